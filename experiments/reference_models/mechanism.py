"""Why a policy costs what it costs: what the states of a reference model look like when a fact is recalled.

python experiments/reference_models/mechanism.py --model gated_delta --output results/reference_models

Of every recurrent layer, on the inputs that it gets under fp32@1:
rank_one      share of a state's energy in its largest singular component, when "?" is read, by head
column_spread by head, how many binades the largest key column of a block of 16 lies above the block's median one
retention     what decay leaves of the asked fact from its write to the recall (KDA: of its key's direction), by head
decay         quantiles of a token's decay
read_rank     the least rank that holds 99 % of a state's energy
output_error  of the layer's outputs at the recall, each layer alone under the policy, relative to their size
progress      <what a store changed, what it was to change> / <that, itself>, over all stores: 1 if rounding is fair,
              less if it swallows updates (stagnation)
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from experiments.reference_models.arguments import one_line_errors, positive
from experiments.reference_models.measure import BASELINE, POLICIES, applies
from quantlab.drift import Stream
from quantlab.evals.state_recall import Level, Questions, questions
from quantlab.models import capture
from quantlab.models.reference import reference_folder, reference_models
from quantlab.records import check_output_folder, write_atomic
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.recurrences.base import DecayAxis, expand_groups
from quantlab.schemes import parse_policy, parse_rules, start

DECAY_QUANTILES = (0.05, 0.5, 0.95, 0.99)
ENERGY = 0.99
BLOCK = 16


def look(model: Any, asked: Questions, policies: list[str]) -> list[dict[str, Any]]:
    """One row a recurrent layer; ``asked``: one question a sequence."""
    tokens, recall = asked.tokens, int(asked.recall[0, 0])
    streams = capture(model, torch.from_numpy(tokens[:, : recall + 1]), prefill=1, steps=recall)
    # The key and the value of a fact stand beside each other, and its key once before the question.
    keys = torch.from_numpy(tokens)
    named = keys[:, recall - 1 : recall]
    written = (keys[:, : recall - 1] == named).float().argmax(1) + 1
    rows = []
    for layer, stream in streams.items():
        row = {"layer": layer, "family": stream.family} | state_facts(stream, written)
        row["output_error"] = {policy: output_error(stream, policy) for policy in policies}
        row["progress"] = {
            policy: progress(stream, policy)
            for policy in policies
            if parse_policy(policy).checkpoint.rounded and parse_policy(policy).window == 1
        }
        rows.append(row)
    return rows


def state_facts(stream: Stream, written: Tensor) -> dict[str, Any]:
    """rank_one, column_spread, read_rank, retention and decay.

    written: (batch,) the place of the fact's value in the sequence.
    """
    recurrence = get_recurrence(stream.family)
    state = stream.initial.double()
    for inputs in _tokens(stream):
        state, _ = recurrence.step(state, inputs.to(torch.float64), None)
    energy = torch.linalg.svdvals(state).square()
    share = energy / energy.sum(-1, keepdim=True).clamp_min(1e-300)
    rank = (share.cumsum(-1) < ENERGY).sum(-1) + 1
    columns = state.abs().amax(-2).clamp_min(1e-300)
    spread = [(b.amax(-1) / b.median(-1).values).log2() for b in columns.split(BLOCK, -1)]
    # Step t of the stream read token t + 1 of the sequence.
    steps = torch.arange(stream.v.shape[0])[:, None]
    after = (steps >= written[None]).double()
    log_decay = stream.log_decay.double()
    kept = (log_decay * after.view(*after.shape, *[1] * (log_decay.ndim - 2))).sum(0).exp()
    if recurrence.axis is DecayAxis.KEY:
        at = (written - 1).view(1, -1, 1, 1).expand(1, -1, *stream.k.shape[2:])
        key = expand_groups(stream.k.gather(0, at)[0].double(), kept.shape[1], 1).square()
        kept = (kept.square() * key).sum(-1).sqrt() / key.sum(-1).sqrt()
    decay = log_decay.exp().flatten()
    picked = decay[:: max(1, len(decay) // 10**6)]  # torch.quantile takes 16 million numbers at most
    quantiles = torch.quantile(picked, torch.tensor(DECAY_QUANTILES, dtype=torch.float64))
    return {
        "rank_one": share[..., 0].mean(0).tolist(),
        "column_spread": torch.stack(spread).mean((0, 1)).tolist(),
        "read_rank": rank.double().mean(0).tolist(),
        "retention": kept.median(0).values.tolist(),
        "decay": dict(zip(map(str, DECAY_QUANTILES), quantiles.tolist(), strict=True)),
    }


def output_error(stream: Stream, policy: str) -> float:
    """Of the outputs of the last token, pooled over sequences and heads, against the unrounded recurrence."""
    recurrence, exact = get_recurrence(stream.family), stream.initial.double()
    held, expected, found = _start(stream, policy), torch.empty(0), torch.empty(0)
    for inputs in _tokens(stream):
        exact, expected = recurrence.step(exact, inputs.to(torch.float64), None)
        found = held.step(inputs)
    return float((found.double() - expected).norm() / expected.norm())


def progress(stream: Stream, policy: str) -> float:
    """Of a policy that stores every token."""
    recurrence, held = get_recurrence(stream.family), _start(stream, policy)
    along = whole = 0.0
    before = held.materialize().double()
    for inputs in _tokens(stream):
        wanted = recurrence.step(before, inputs.to(torch.float64), None)[0] - before
        held.step(inputs)
        after = held.materialize().double()
        along += float(((after - before) * wanted).sum())
        whole += float(wanted.square().sum())
        before = after
    return along / whole


def _start(stream: Stream, policy: str) -> Any:
    return start(policy, stream.family, stream.initial, key_heads=stream.k.shape[2])


def _tokens(stream: Stream) -> Any:
    for t in range(stream.v.shape[0]):
        beta = None if stream.beta is None else stream.beta[t]
        yield StepInputs(stream.q[t], stream.k[t], stream.v[t], stream.log_decay[t], beta)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = reference_models()
    parser.add_argument("--model", action="append", choices=known, help="repeat for several (default: all)")
    parser.add_argument("--items", type=positive, default=64, help="questions of the default level")
    parser.add_argument("--policy", action="append", help="repeat for several (default: the study's)")
    parser.add_argument("--output", type=Path, default=Path("results/reference_models"))
    with one_line_errors():
        _write(parser.parse_args(), known)


def _write(options: argparse.Namespace, known: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    policies = options.policy or [policy for policy in POLICIES if policy != BASELINE]
    for policy in policies:
        parse_policy(policy)
    check_output_folder(options.output)
    for name in options.model or known:
        model = AutoModelForCausalLM.from_pretrained(reference_folder(name)).eval()
        chosen = [policy for policy in policies if applies(model, parse_rules(policy))]
        rows = look(model, questions(Level(), options.items, 1), chosen)
        path = options.output / f"mechanism-{name}.json"
        found = {"model": name, "items": options.items, "level": vars(Level()), "layers": rows}
        write_atomic(path, (json.dumps(found, indent=1) + "\n").encode())
        for row in rows:
            print(f"{name} layer {row['layer']}: rank one", *(f"{x:.2f}" for x in row["rank_one"]))
            print("  column spread", *(f"{x:.1f}" for x in row["column_spread"]))
            print("  retention", *(f"{x:.3f}" for x in row["retention"]), " decay", row["decay"])
            for policy in chosen:
                fair = row["progress"].get(policy)
                fair = "" if fair is None else f", progress {fair:.3f}"
                print(f"  {policy:<34} output error {row['output_error'][policy]:.4f}{fair}")


if __name__ == "__main__":
    main()
