"""A whole decode step, timed, and where its time goes.

SSM: the recurrent ops of all layers, begin and end of the step included, in a graph of their own.
attention, MLP: what a step without SSM is faster by if attention (or MLP) layers return their input.
other: projections of the recurrent layers, convolutions, norms, embedding, head: the rest of a step without SSM.
gaps: of that step, what no kernel ran in: its time without the sum of its kernels' own.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from experiments.decode_step.models import Geometry
from quantlab.kernels.bench_pools import desynchronised_cursors, fill_records, prefill_states
from quantlab.kernels.bench_timing import Times, captured, quartiles
from quantlab.models import DecodeGraph
from quantlab.models.static_cache import clear
from quantlab.recurrences import StepInputs

STEPS = 16
"""Between two readings of the clock: one window."""


class WithoutRecurrence(DecodeGraph):
    """The step of a model whose recurrent ops return their values as outputs."""

    def decode(self, layer: int, inputs: StepInputs, output: torch.Tensor | None = None) -> torch.Tensor:
        return inputs.v


@dataclass(frozen=True)
class Split:
    """Microseconds of a step without SSM (``rest``), and of its parts; gaps are part of the others."""

    rest: float
    attention: float
    mlp: float
    gaps: float | None

    @property
    def other(self) -> float:
        return self.rest - self.attention - self.mlp


def prepare(graph: DecodeGraph, held: int, seed: int = 0) -> None:
    """Sequences in the middle of decoding, ``held`` tokens each: random states, records, keys, values and tokens, and
    cursors spread evenly.  (Experts are chosen by what a token is: the same one everywhere would use few of them.)
    The capture's warm-up read states that nothing had written; what it left in the convolutions is cleared.
    """
    clear(graph.cache)
    generator = torch.Generator(graph.device).manual_seed(seed)
    graph.tokens.random_(0, graph.logits.shape[-1], generator=generator)
    for layer in graph.cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
    for pool in graph.pools.values():
        for slots in graph.slots.split(max(1, 2**28 // pool.shape.values)):
            graph.load_states(pool, slots, prefill_states(pool.shape, len(slots), generator))
        fill_records(pool, generator)
        pool.counters.cursor.copy_(desynchronised_cursors(graph.batch, pool.policy.window))
        pool.counters.origin.zero_()
    graph.resume(held)


def time_steps(graphs: dict[str, DecodeGraph], held: int, rounds: int) -> dict[str, Times]:
    """Microseconds a step by name, the graphs taking turns in every round of ``STEPS``."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 1):
        for name, graph in graphs.items():
            graph.resume(held)
            time = _elapsed(lambda graph=graph: graph.replay(), STEPS)
            if number:  # the first round warms up
                found[name].append(time)
    return {name: quartiles(times) for name, times in found.items()}


def time_recurrence(graph: DecodeGraph, rounds: int) -> Times:
    """Microseconds of the recurrent ops of all layers for one token, as the step launches them."""
    layers = {layer: random_inputs(graph, layer) for layer in graph.pools}

    def ops() -> None:
        with graph.windows():
            for layer, inputs in layers.items():
                graph.decode(layer, inputs)

    with torch.no_grad():
        alone = captured(ops)
    for pool in graph.pools.values():
        pool.counters.cursor.copy_(desynchronised_cursors(graph.batch, pool.policy.window))
    _elapsed(alone.replay, STEPS)
    return quartiles([_elapsed(alone.replay, STEPS) for _ in range(rounds)])


def random_inputs(graph: DecodeGraph, layer: int) -> StepInputs:
    from quantlab.kernels.bench_pools import random_token

    pool = graph.pools[layer]
    generator = torch.Generator(graph.device).manual_seed(layer)
    return random_token(pool.family, pool.shape, graph.batch, generator, graph.dtype)


def split_of(
    model: nn.Module, geometry: Geometry, policy: str, batch: int, length: int, rounds: int
) -> Split:
    """Of the step without SSM."""
    held = length - STEPS - 1

    def rest(leave_out: tuple[str, ...] = ()) -> tuple[float, DecodeGraph]:
        with _left_out(model, leave_out):
            graph = WithoutRecurrence(model, policy, batch, length)
        prepare(graph, held)
        return time_steps({"": graph}, held, rounds)[""].median, graph

    whole, graph = rest()
    busy = _busy(graph, held)
    del graph
    attention = whole - rest((geometry.attention,))[0]
    mlp = whole - rest(geometry.mlp)[0]
    return Split(whole, attention, mlp, None if busy is None else whole - busy)


@contextlib.contextmanager
def _left_out(model: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Modules of these classes return what they are given."""
    chosen: list[Any] = [part for part in model.modules() if type(part).__name__ in names]
    for part in chosen:
        pair = part.__class__.__name__.endswith("Attention")
        part.forward = lambda hidden_states=None, *_, pair=pair, **__: (
            (hidden_states, None) if pair else hidden_states
        )
    try:
        yield
    finally:
        for part in chosen:
            del part.forward


def _elapsed(work: Callable[[], object], steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / steps


def _busy(graph: DecodeGraph, held: int) -> float | None:
    """Microseconds that a step's kernels take in all, by torch's profiler; None where it sees none."""
    from torch.profiler import ProfilerActivity, profile

    times = []
    graph.resume(held)
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            graph.replay()
            torch.cuda.synchronize()
        times.append(sum(e.device_time for e in found.events() or [] if str(e.device_type).endswith("CUDA")))
    return statistics.median(times) or None
