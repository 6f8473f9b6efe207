"""Why a policy costs what it costs: what the states of a reference model hold of a fact when it is asked for.

python experiments/reference_models/mechanism.py --model gated_delta --output results/reference_models

Of every recurrent layer, on the inputs that it gets under fp32@1, by head:
rank_one      share of a state's energy in its largest singular component, when "?" is read
column_spread how many binades the largest key column of a block of 16 lies above the block's median one
read_rank     the least rank that holds 99 % of a state's energy
retention     what decay leaves of the asked fact from its write to the recall (KDA: of its key's direction)
share         the fact's share of the state: each question is asked twice, the fact's value changed in between, and
              the difference of the two states is what a state holds of the fact; size of that over size of the state
said          the same of the output that is read at "?"
decay         quantiles of a token's decay over all heads
and of every policy, each layer alone under it:
error         of the outputs at "?" against the unrounded recurrence, over the size of what the fact changes in them
spread        the same without what is common to all questions, which a model may be blind to
kept          share of the fact that the outputs still tell: the difference of the two outputs, projected on the same
              difference of the unrounded recurrence; beyond 1 where rounding to nearest swallows the decay of what a
              state holds (stagnation)
``of_fact`` is all three over the heads together, so that those count that hold the fact.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor

from experiments.reference_models.arguments import one_line_errors, positive
from experiments.reference_models.measure import POLICIES, applies
from quantlab.drift import Stream
from quantlab.evals.state_recall import Level, Questions, another_fact, questions
from quantlab.models import capture
from quantlab.models.reference import reference_folder, reference_models
from quantlab.records import check_output_folder, complete_record, record_path, save_record
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.recurrences.base import DecayAxis, expand_groups
from quantlab.schemes import parse_policy, parse_rules, start

DECAY_QUANTILES = (0.05, 0.5, 0.95, 0.99)
ENERGY = 0.99
BLOCK = 16
ITEMS_SEED = 1
BEYOND = 1e6
"""A ratio to something below the rounding of the reference itself."""


@dataclass(frozen=True)
class Layer:
    """A recurrent layer on questions asked twice: facts by name; outputs (batch, heads, value_dim) at "?", float64."""

    number: int
    stream: Stream
    facts: dict[str, Any]
    outputs: Tensor


def look(model: Any, asked: Questions) -> list[Layer]:
    """The recurrent layers; ``asked``: one question a sequence."""
    recall, (changed, places) = int(asked.recall[0, 0]), another_fact(asked)
    both, written = torch.from_numpy(np.concatenate([asked.tokens, changed])), torch.from_numpy(places)
    found = []
    for number, stream in capture(model, both[:, : recall + 1], prefill=1, steps=recall).items():
        state, outputs = exact(stream)
        facts = {"layer": number, "family": stream.family} | state_facts(stream, state, written)
        facts |= {"share": _size(_halves(state)) / _size(state)}
        facts |= {"said": _size(_halves(outputs)) / _size(outputs)}
        found.append(Layer(number, stream, facts, outputs))
    return found


def _halves(x: Tensor) -> Tensor:
    """The difference that the value makes."""
    one, other = x.chunk(2)
    return one - other


def _size(x: Tensor) -> Tensor:
    """Root mean square by head of x (batch, heads, ...)."""
    return x.transpose(0, 1).flatten(1).square().mean(1).sqrt()


def exact(stream: Stream) -> tuple[Tensor, Tensor]:
    """State and outputs of the last token, in float64."""
    recurrence, state, output = get_recurrence(stream.family), stream.initial.double(), torch.empty(0)
    for inputs in tokens_of(stream):
        state, output = recurrence.step(state, inputs.to(torch.float64), None)
    return state, output


def state_facts(stream: Stream, state: Tensor, written: Tensor) -> dict[str, Any]:
    """rank_one, column_spread, read_rank, retention and decay.

    state: at the last token; written: the place of the fact's value in each question, half as many as sequences.
    """
    recurrence = get_recurrence(stream.family)
    energy = torch.linalg.svdvals(state).square()
    share = energy / energy.sum(-1, keepdim=True).clamp_min(1e-300)
    rank = (share.cumsum(-1) < ENERGY).sum(-1) + 1
    columns = state.abs().amax(-2).clamp_min(1e-300)
    spread = [(block.amax(-1) / block.median(-1).values).log2() for block in columns.split(BLOCK, -1)]
    # Step t of the stream read token t + 1 of the sequence.
    written = written.repeat(2)
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
        "rank_one": share[..., 0].mean(0),
        "column_spread": torch.stack(spread).mean((0, 1)),
        "read_rank": rank.double().mean(0),
        "retention": kept.median(0).values,
        "decay": dict(zip(map(str, DECAY_QUANTILES), quantiles.tolist(), strict=True)),
    }


def fact_in_outputs(stream: Stream, policy: str, expected: Tensor) -> dict[str, Any]:
    """error, spread and kept of ``policy``, by head and over all; expected: outputs (batch, heads, value_dim)."""
    held, found = start_twice(stream, policy), torch.empty(0)
    for inputs in tokens_of(stream):
        found = held.step(inputs)
    told, tells = _halves(expected), _halves(found.double())
    error = found.double() - expected
    spread = error - error.mean(0, keepdim=True)
    size, along = told.square().sum((0, 2)) / len(told), (tells * told).sum((0, 2)) / len(told)
    errors, spreads = (x.square().sum((0, 2)) / len(x) for x in (error, spread))
    rows = {
        "error": (errors / size).sqrt(),
        "spread": (spreads / size).sqrt(),
        "kept": along / size,
    }
    together = {
        "error": (errors.sum() / size.sum()).sqrt(),
        "spread": (spreads.sum() / size.sum()).sqrt(),
        "kept": along.sum() / size.sum(),
    }
    return rows | {"of_fact": together}


def start_twice(stream: Stream, policy: str) -> Any:
    # A question draws the same random bits whichever value it holds.
    names = torch.arange(len(stream.initial) // 2).repeat(2)
    return start(policy, stream.family, stream.initial, key_heads=stream.k.shape[2], sequence_ids=names)


def tokens_of(stream: Stream) -> Any:
    for t in range(stream.v.shape[0]):
        beta = None if stream.beta is None else stream.beta[t]
        yield StepInputs(stream.q[t], stream.k[t], stream.v[t], stream.log_decay[t], beta)


def plain(row: Any) -> Any:
    """Tensors as numbers; what no float32 can tell from nothing is None."""
    if isinstance(row, dict):
        return {name: plain(value) for name, value in row.items()}
    if not isinstance(row, Tensor):
        return row
    numbers = [
        float(f"{x:.6g}") if math.isfinite(x) and abs(x) < BEYOND else None for x in row.flatten().tolist()
    ]
    return numbers if row.ndim else numbers[0]


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

    from quantlab.sweep.environment import capture_environment

    torch.set_num_threads(1)
    policies = options.policy or list(POLICIES)
    for policy in policies:
        parse_policy(policy)
    folder = options.output / "mechanism"
    check_output_folder(folder)
    environment = capture_environment(1)
    for name in options.model or known:
        model = AutoModelForCausalLM.from_pretrained(reference_folder(name)).eval()
        layers: list[Layer] = []
        for policy in policies:
            if not applies(model, parse_rules(policy)):
                continue
            point = {
                "kind": "mechanism",
                "model": name,
                "level": vars(Level()),
                "policy": str(parse_policy(policy)),
            }
            point |= {"items": options.items, "items_seed": ITEMS_SEED}
            if record_path(folder, point).exists():
                continue
            if not layers:
                layers = look(model, questions(Level(), options.items, ITEMS_SEED))
                _print_facts(name, layers)
            start, rows = time.monotonic(), []
            for layer in layers:
                found = fact_in_outputs(layer.stream, policy, layer.outputs)
                rows.append(plain(layer.facts | found))
                shown = (f"{what} {value:.2f}" for what, value in found["of_fact"].items())
                print(f"{name} layer {layer.number}  {policy:<34}", *shown, flush=True)
            seconds = time.monotonic() - start
            result = {"metrics": {"layers": rows}}
            save_record(folder, complete_record(point, result, environment=environment, seconds=seconds))


def _print_facts(name: str, layers: list[Layer]) -> None:
    for layer in layers:
        for what in ("rank_one", "column_spread", "read_rank", "retention", "share", "said"):
            print(
                f"{name} layer {layer.number}  {what:<13}", *(f"{x:.4f}" for x in layer.facts[what].tolist())
            )
        decay = (f"{quantile}: {x:.4f}" for quantile, x in layer.facts["decay"].items())
        print(f"{name} layer {layer.number}  decay        ", *decay)


if __name__ == "__main__":
    main()
