"""What is predicted of each reference model, level and policy, and the error of its state; one record each, resumes.

python experiments/reference_models/predict.py --output results/reference_models

On questions that are asked twice, with another value of the fact, of every recurrent layer under every policy:
of_fact      error of the outputs at "?" over what the fact changes in them, in closed form (``drift.fact_error``)
fact, error  the sizes of the two by head
state_error  measured: of the state at "?" against the unrounded recurrence, over the size of the state
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from experiments.reference_models.arguments import one_line_errors, positive
from experiments.reference_models.measure import LEVELS, POLICIES, applies
from experiments.reference_models.mechanism import ITEMS_SEED, exact, plain, start_twice, tokens_of
from quantlab.drift import Stream
from quantlab.drift.fact_error import fact_errors
from quantlab.evals.state_recall import Level, another_fact, questions
from quantlab.models import capture
from quantlab.models.reference import reference_folder, reference_models
from quantlab.records import check_output_folder, complete_record, record_path, save_record
from quantlab.schemes import parse_policy, parse_rules

EVERY = 3
"""Of the stores of each token one in so many is rounded: keys and values take turns, an odd number meets both."""


def asked_twice(model: Any, level: Level, items: int) -> dict[int, Stream]:
    """What the recurrent layers get up to "?", each question twice with another value of the asked fact."""
    asked = questions(level, items, ITEMS_SEED)
    recall = int(asked.recall[0, 0])
    both = torch.from_numpy(np.concatenate([asked.tokens, another_fact(asked)[0]]))
    return capture(model, both[:, : recall + 1], prefill=1, steps=recall)


def state_error(stream: Stream, policy: str, expected: torch.Tensor) -> float:
    """Of the state behind the last token, over the size of ``expected``, all heads together."""
    held = start_twice(stream, policy)
    for inputs in tokens_of(stream):
        held.step(inputs)
    return float((held.materialize().double() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = reference_models()
    parser.add_argument("--model", action="append", choices=known, help="repeat for several (default: all)")
    parser.add_argument("--level", action="append", choices=LEVELS, help="repeat for several (default: all)")
    parser.add_argument("--items", type=positive, default=6, help="questions of a level")
    parser.add_argument("--output", type=Path, default=Path("results/reference_models"))
    with one_line_errors():
        _write(parser.parse_args(), known)


def _write(options: argparse.Namespace, known: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    from quantlab.sweep.environment import capture_environment

    torch.set_num_threads(1)
    folder = options.output / "predicted"
    check_output_folder(folder)
    environment = capture_environment(1)
    for name in options.model or known:
        model = AutoModelForCausalLM.from_pretrained(reference_folder(name)).eval()
        policies = [str(parse_policy(policy)) for policy in POLICIES if applies(model, parse_rules(policy))]
        for level_name in options.level or LEVELS:
            level, begun = LEVELS[level_name][0], time.monotonic()
            shared = {"kind": "predicted", "model": name, "level": vars(level), "items": options.items}
            shared |= {"items_seed": ITEMS_SEED, "every": EVERY}
            points = {policy: shared | {"policy": policy} for policy in policies}
            if all(record_path(folder, point).exists() for point in points.values()):
                continue
            layers: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
            for number, stream in asked_twice(model, level, options.items).items():
                for policy, found in _layer(stream, policies).items():
                    layers[policy].append({"layer": number} | found)
                print(f"{name} {level_name} layer {number}: {time.monotonic() - begun:.0f} s", flush=True)
            seconds = time.monotonic() - begun
            for policy, point in points.items():
                result = {"metrics": {"layers": layers[policy]}}
                save_record(folder, complete_record(point, result, environment=environment, seconds=seconds))


def _layer(stream: Stream, policies: list[str]) -> dict[str, Any]:
    found, (expected, _) = fact_errors(stream, policies, every=EVERY), exact(stream)
    return plain(
        {
            policy: {
                "of_fact": torch.tensor(found.of_fact(policy)),
                "fact": found.fact,
                "error": found.errors[parse_policy(policy)],
                "state_error": torch.tensor(state_error(stream, policy, expected)),
            }
            for policy in policies
        }
    )


if __name__ == "__main__":
    main()
