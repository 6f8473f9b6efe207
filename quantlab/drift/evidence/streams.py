"""Streams of the public protocols, and walks that measure what no policy's output shows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quantlab.drift.evidence.case import Measured, pooled_over
from quantlab.drift.measure import run_drift
from quantlab.drift.streams import Stream
from quantlab.drift.synthetic import synthetic_stream
from quantlab.recurrences import StepInputs, get_recurrence

HEADS, SEQUENCES, FULL_SEQUENCES = 8, 1, 8


def gdn(
    alpha: float,
    steps: int,
    full: bool,
    *,
    beta: float | None = None,
    family: str = "gated_delta",
    sequences: int | None = None,
    value_dim: int = 128,
) -> Stream:
    """The protocol of the file: 128 x 128 heads, unit keys and queries, v ~ N(0, 1), zero start."""
    count = sequences or (FULL_SEQUENCES if full else SEQUENCES)
    return synthetic_stream(
        family, alpha=alpha, steps=steps, heads=HEADS, sequences=count, beta=beta, seed=1, value_dim=value_dim
    )


def gdn_stream(
    log_decay: Tensor, *, seed: int, key_dim: int = 128, value_dim: int = 128, beta: float | None = None
) -> Stream:
    """The same with decays given token by token: log_decay (steps, batch, heads)."""
    generator = torch.Generator().manual_seed(seed)
    lead = log_decay.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys, queries = (F.normalize(normal(*lead, key_dim), dim=-1) for _ in range(2))
    drawn = torch.sigmoid(normal(*lead))
    return Stream(
        "gated_delta",
        q=queries,
        k=keys,
        v=normal(*lead, value_dim),
        log_decay=log_decay.float(),
        beta=drawn if beta is None else torch.full_like(drawn, beta),
        initial=torch.zeros(*lead[1:], value_dim, key_dim),
    )


def channel_decays(stream: Stream) -> Stream:
    """kimi_delta: log decays of the channels of a head from a half to three halves of the given one; else unchanged."""
    if stream.family != "kimi_delta":
        return stream
    factor = torch.linspace(0.5, 1.5, stream.log_decay.shape[-1])
    return replace(stream, log_decay=stream.log_decay * factor)


@dataclass(frozen=True)
class Exact:
    """One token of the float64 shadow: inputs as the stream holds them, state after the token, output."""

    inputs: StepInputs
    state: Tensor
    output: Tensor


def shadow(stream: Stream) -> Iterator[Exact]:
    """The stream in float64, token by token."""
    recurrence = get_recurrence(stream.family)
    state = stream.initial.double()
    for t in range(stream.steps):
        inputs = stream.step(t)
        state, output = recurrence.step(state, inputs.to(torch.float64), stream.rates)
        yield Exact(inputs, state, output)


def output_errors(
    stream: Stream, policies: Sequence[str], *, second_half: bool = False
) -> dict[str, Measured]:
    """Pooled output error of each policy, in the order asked; NaN for one that diverged."""
    result = run_drift(stream, list(policies))
    part = slice(stream.steps // 2, None) if second_half else slice(None)
    found = {}
    for name, run in zip(policies, result.runs, strict=True):
        lost = run.status == "diverged"
        reference = result.output_reference[part]
        found[name] = Measured(np.nan) if lost else pooled_over(run.output_error[part], reference)
    return found


def squared(x: Tensor) -> NDArray:
    """Squared norm of each unit: (batch, heads, ...) -> (batch * heads,) float64."""
    return x.double().flatten(2).square().sum(-1).flatten().numpy()


def tokens_of(stream: Stream, first: int, last: int) -> StepInputs:
    """Tokens first .. last - 1 with the token dimension after the batch."""
    tokens = StepInputs(stream.q, stream.k, stream.v, stream.log_decay, stream.beta)
    return tokens.map(lambda t: t[first:last].transpose(0, 1))
