"""Cases B7 and B13: which heads share a scale, and which of them remember an error."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quantlab.drift.evidence.case import Case, Figure, Measured
from quantlab.drift.evidence.streams import channel_decays, gdn_stream
from quantlab.drift.measure import run_drift
from quantlab.drift.streams import Stream
from quantlab.drift.synthetic import synthetic_stream
from quantlab.recurrences import StepInputs
from quantlab.recurrences.base import expand_groups, matvec
from quantlab.schemes import start


def _grouped_stream(family: str) -> Stream:
    """16 tokens, 2 heads, K = 16, V = 128; values of the first 64 channels 80 times smaller than of the second."""
    stream = synthetic_stream(
        family, alpha=0.95, steps=16, heads=2, sequences=1, key_dim=16, value_dim=128, seed=514
    )
    scale = torch.tensor([0.05, 4.0]).repeat_interleave(64)
    return channel_decays(replace(stream, v=stream.v * scale))


def _in_tiles(stream: Stream) -> Stream:
    """The same with each head cut into two tiles of 64 value channels, which share keys and gates."""
    steps, batch, heads, _ = stream.v.shape
    return Stream(
        stream.family,
        q=stream.q,
        k=stream.k,
        v=stream.v.reshape(steps, batch, 2 * heads, 64),
        log_decay=stream.log_decay.repeat_interleave(2, 2),
        beta=None if stream.beta is None else stream.beta.repeat_interleave(2, 2),
        initial=stream.initial.reshape(batch, 2 * heads, 64, -1),
    )


def _outputs_and_state(stream: Stream, *, stored_read: bool = False) -> tuple[Tensor, Tensor]:
    state = start("int8:head@1", stream.family, stream.initial, key_heads=stream.key_heads)
    outputs = []
    for t in range(stream.steps):
        inputs = stream.step(t)
        output = state.step(inputs)
        if stored_read:
            output = matvec(state.materialize(), expand_groups(inputs.q, stream.heads, 1))
        outputs.append(output.reshape(1, 2, 128))
    return torch.stack(outputs), state.materialize().reshape(1, 2, 128, 16)


def _b7(full: bool) -> dict[str, Measured]:
    found = {}
    for name, family in (("GDN", "gated_delta"), ("KDA", "kimi_delta")):
        stream = _grouped_stream(family)
        outputs, state = _outputs_and_state(stream)
        variants = {
            "working read": _outputs_and_state(stream),
            "stored read": _outputs_and_state(stream, stored_read=True),
            "tiled side": _outputs_and_state(_in_tiles(stream)),
        }
        for variant, (other, other_state) in variants.items():
            found[f"{name}, {variant}, output"] = Measured(float((other - outputs).norm() / outputs.norm()))
            found[f"{name}, {variant}, state"] = Measured(float((other_state - state).norm() / state.norm()))
        for variant, part in _B7_LEVELS:
            found[f"thread {name}, {variant}, {part}"] = found[f"{name}, {variant}, {part}"]
    # An integer grid: bfloat16 between 128 and 256.
    one = torch.ones(1, 1, 1)
    token = StepInputs(one, one, 0.6 * one, torch.zeros(1, 1))
    for name, policy in (("end only", "bf16@2"), ("each step", "bf16@2:schedule=step")):
        toy = start(policy, "mamba2", torch.full((1, 1, 1, 1), 128.0))
        for _ in range(2):
            toy.step(token)
        found[f"toy, {name}"] = Measured(toy.materialize().item() - 128.0)
    return found


_GENERATOR = (
    "the level needs the thread's generator (keys, gates, write strengths); where it is zero does not"
)
_B7_LEVELS = {
    ("stored read", "output"): {"GDN": "0.0225", "KDA": "0.0197"},
    ("tiled side", "output"): {"GDN": "0.0522", "KDA": "0.0518"},
    ("tiled side", "state"): {"GDN": "0.257", "KDA": "0.214"},
}
B7 = Case(
    "B7",
    "which groups share a scale, and whether S q is read before or after the store (Model-Optimizer)",
    (
        *(
            figure
            for name in ("GDN", "KDA")
            for figure in (
                Figure(f"{name}, working read, output", "= 0"),
                Figure(f"{name}, working read, state", "= 0"),
                Figure(
                    f"{name}, stored read, output", ">= 1e-6", why="not zero: above what float32 makes of it"
                ),
                Figure(f"{name}, stored read, state", "= 0"),
                Figure(
                    f"{name}, tiled side, output", ">= 1e-6", why="not zero: above what float32 makes of it"
                ),
                Figure(
                    f"{name}, tiled side, state", ">= 1e-6", why="not zero: above what float32 makes of it"
                ),
                *(
                    Figure(f"thread {name}, {variant}, {part}", row[name], comparable=False, why=_GENERATOR)
                    for (variant, part), row in _B7_LEVELS.items()
                ),
            )
        ),
        Figure("toy, end only", "= 1"),
        Figure("toy, each step", "= 2"),
    ),
    _b7,
)


def _b13(full: bool) -> dict[str, Measured]:
    sequences = 32 if full else 8
    generator = torch.Generator().manual_seed(9)
    forget = torch.empty(sequences, 8).uniform_(np.log(1e-4), np.log(0.1), generator=generator).exp()
    stream = gdn_stream(
        torch.log1p(-forget).expand(512, -1, -1).contiguous(), seed=10, key_dim=64, value_dim=64
    )
    half_life = (np.log(0.5) / np.log1p(-forget.double().numpy())).flatten()
    found = {}
    result = run_drift(stream, ["int8@1", "int4@1"])
    for run in result.runs:
        measured = np.isfinite(run.state_error).all(1)
        error = run.state_error[measured].sum(0) / result.state_reference[measured].sum(0)
        found[f"{run.policy}, rank correlation"] = Measured(_rank_correlation(half_life, error))
    return found


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(v)).astype(float) for v in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


B13 = Case(
    "B13",
    "heads that remember longer keep more error: half-life against state error (STEPQuant)",
    (
        Figure("int8@1, rank correlation", ">= 0.8", why="the file's bound for INT6, which lies between"),
        Figure("int4@1, rank correlation", ">= 0.8", why="the file's bound for INT6, which lies between"),
    ),
    _b13,
)


CASES = (B7, B13)
