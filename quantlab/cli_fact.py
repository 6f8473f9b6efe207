"""``quantlab predict --model reference:NAME --writes N``: what policies do to a read that asks for one fact."""

from typing import Any

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, print_wrapped

LARGEST_WRITES = 2048
"""The longest level of the tasks."""
QUESTIONS, SEED = 6, 1
EVERY = 3
"""Of the stores of each token one in so many is rounded; keys and values take turns, an odd number meets both."""
HELD = 1.2
"""Of a fact, what it is kept beyond its decay for rounding to nearest to be said to hold the state back."""
_COLUMNS = {
    "policy": "policy",
    "layer": "layer",
    "of_fact": "error / fact",
    "held_of_fact": "held: error / fact",
    "kept": "held: fact kept",
}


def predict_facts(model: str, policies: list[str] | None, writes: int, as_json: bool) -> None:
    """Print a row for each policy, its worst layer; as JSON one for each layer."""
    from quantlab.models.reference import PREFIX
    from quantlab.schemes import check_policy_fits, parse_policy

    if not model.startswith(PREFIX):
        raise InputError("writes", writes, f"--model {PREFIX}NAME beside it, whose questions are known")
    if not policies:
        raise InputError("policy", None, "at least one policy text")
    parsed = list(dict.fromkeys(map(parse_policy, policies)))
    layers = _layers(model, writes)
    for policy in parsed:
        for stream in layers.values():
            check_policy_fits(policy, stream.family)
    rows = [row for number, stream in layers.items() for row in _rows(number, stream, parsed)]
    rows.sort(key=lambda row: [str(policy) for policy in parsed].index(row["policy"]))
    if as_json:
        print_json(rows)
        return
    worst = [
        max((row for row in rows if row["policy"] == str(policy)), key=lambda row: row["of_fact"])
        for policy in parsed
    ]
    title = f"Predicted for {model}: a fact behind {writes:,} writes, the layer with the largest error"
    print_table(title, worst, list(_COLUMNS), _COLUMNS, ())
    print_wrapped(
        "Error / fact: of the outputs that are read where the fact is asked for, over what the fact changes in them; it"
        " orders policies as right answers do, and takes stores for independent of each other.  Held: the same where"
        " rounding to nearest lets only part of decays and writes through, good to a factor of 5, and the share of the"
        " fact that the outputs still tell, 1 where nothing is held."
    )
    held = [row["policy"] for row in worst if row["kept"] is not None and row["kept"] > HELD]
    if held:
        print_wrapped(
            f"{', '.join(held)}: decays are below half a step, so that held values stop fading and small key columns"
            " grow; the error is nearer to the held one.  +sr is fair to both."
        )


def _layers(model: str, writes: int) -> dict[int, Any]:
    """Streams of the recurrent layers, every question twice with another value of its fact."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from quantlab.evals.state_recall import Level, another_fact, questions
    from quantlab.models import capture
    from quantlab.models.reference import reference_folder
    from quantlab.models.texts import quiet_transformers

    quiet_transformers()
    asked = questions(Level(updates=writes), QUESTIONS, SEED)
    recall = int(asked.recall[0, 0])
    tokens = torch.from_numpy(np.concatenate([asked.tokens, another_fact(asked)[0]]))
    loaded = AutoModelForCausalLM.from_pretrained(reference_folder(model)).eval()
    return capture(loaded, tokens[:, : recall + 1], prefill=1, steps=recall)


def _rows(number: int, stream: Any, policies: list[Any]) -> list[dict[str, Any]]:
    from quantlab.drift.fact_error import fact_errors
    from quantlab.drift.stagnation import held_read, holds_back

    found, rows = fact_errors(stream, policies, every=EVERY), []
    power = found.fact.square()
    for policy in policies:
        row = {"policy": str(policy), "layer": number, "of_fact": found.of_fact(policy)}
        row |= {"held_of_fact": None, "kept": None}
        if holds_back(policy):
            held = held_read(stream, policy)
            row["held_of_fact"] = float((held.error.square().sum() / power.sum()).sqrt())
            row["kept"] = float((held.kept * power).sum() / power.sum())
        rows.append(row)
    return rows
