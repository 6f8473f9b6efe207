"""The conformance suite of decode steps on pooled memory: what ``begin_step``, ``decode_token``, ``end_step`` must do.

``check_pool`` runs a case with an implementation, ``reference`` (``quantlab.schemes.steps``), ``interpreter`` or
``cuda`` (``quantlab.kernels.steps``), and checks every step against the memory that it found: outputs and folds against
the recurrence in float64 on the stored bits, what was rounded and encoded against the formats, bit for bit where
arithmetic leaves no choice, and everything that the step does not name against what was there before.
"""

import contextlib
import importlib
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from quantlab.recurrences import StepInputs
from quantlab.schemes import StateShape, start
from quantlab.schemes.drafts import ORIGINS
from quantlab.schemes.pool import LayerPool, SlotCounters, allocate_pool
from quantlab.schemes.pool_rows import put_state
from quantlab.testing import _same_memory_on, guarded, in_triton_process, watched_allocations
from quantlab.testing.pool_steps import Step, check_step

RINGS = ("k_buffer", "d_buffer", "v_buffer", "beta_buffer", "log_decay_buffer")
SPARE = 2
"""Slots that no row of the batch names."""


@dataclass(frozen=True)
class PoolCase:
    """One layer's pool and a chain of steps on it.

    cursors: records in the window of each row at the start; the slots are in another order, a padded row stands
    between them, and two slots are not in the batch.  exact: numbers of few bits and no decay, so that float32 holds
    every fold and what is stored has one right answer (mamba2 alone).  foreign: the padded row names a slot that there
    is not, which kernels skip.  drafts: tokens that the pool has room for behind a window; rings then begin wherever
    commits have left them.  spread: state and keys are multiplied by powers of two, 2^-spread to 2^spread, one a key
    column.
    """

    policy: str
    family: str
    shape: StateShape
    cursors: tuple[int, ...]
    steps: int = 2
    token: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    layer: int = 1
    exact: bool = False
    foreign: bool = False
    seed: int = 0
    drafts: int = 0
    spread: int = 0

    def __str__(self) -> str:
        """The policy, the family, the shape, and what else is not as usual."""
        sizes = "x".join(str(size) for size in vars(self.shape).values())
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (self.token, self.output))
        words = [
            f"{name}={dtype}" for name, dtype in zip(("in", "out"), dtypes, strict=True) if dtype != "float32"
        ]
        words += [name for name in ("exact", "foreign") if getattr(self, name)]
        words += [f"{getattr(self, name)}{name}" for name in ("drafts", "spread") if getattr(self, name)]
        return "_".join([self.family, self.policy, sizes, *words])

    @property
    def slot_count(self) -> int:
        return len(self.cursors) + SPARE

    def slots(self) -> Tensor:
        """Of the batch, int32; row 1 is padding, or names a slot that is not there."""
        order = torch.randperm(self.slot_count, generator=self.random(1))[: len(self.cursors)].int()
        padding = torch.tensor([self.slot_count + 7 if self.foreign else -1], dtype=torch.int32)
        return torch.cat([order[:1], padding, order[1:]])

    def live(self) -> Tensor:
        """``slots`` with -1 for every row that no slot belongs to."""
        slots = self.slots()
        return torch.where(slots < self.slot_count, slots, -1)

    def random(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + purpose)


def check_pool(case: PoolCase, implementation: str) -> None:
    """AssertionError unless every step of the case does what it must, and nothing else."""
    found = _where(implementation, _run, case)
    template, inputs = _pool(case), _tokens(case)
    pools = [_restored(template, memory) for memory in found["memory"]]
    for t, given in enumerate(inputs):
        plan = {name: torch.from_numpy(found[name][t]) for name in ("positions", "flush_rows", "flush_count")}
        output = torch.from_numpy(found["outputs"][t]).view(case.output).view(given.v.shape)
        step = Step(pools[t], pools[t + 1], case.live(), given, output, plan, case.exact)
        check_step(step, f"{case.policy} {case.family} {implementation} step {t}")


def _where(implementation: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(implementation, device, *arguments)`` in a process and on a device where that can run."""
    if implementation == "interpreter":
        return in_triton_process(function, implementation, "cpu", *arguments, interpret=True)
    return function(implementation, "cuda" if implementation == "cuda" else "cpu", *arguments)


def _run(implementation: str, device: str, case: PoolCase) -> dict[str, Any]:
    """Memory before and after each step, outputs and plans, as arrays of bytes or int32."""
    layer = "schemes" if implementation == "reference" else "kernels"
    steps = importlib.import_module(f"quantlab.{layer}.steps")
    pool = _guarded(_pool(case), device)
    around = _around(pool)
    slots, window = guarded(case.slots()).to(device), pool.policy.window
    if layer == "kernels":
        importlib.import_module("quantlab.kernels.arguments").pool(pool)  # takes memory without numbers, once
    found: dict[str, Any] = {name: [] for name in ("outputs", "positions", "flush_rows", "flush_count")}
    found["memory"] = [_bytes(pool)]
    for inputs in _tokens(case):
        given = inputs.map(lambda t: _same_memory_on(guarded(t), device))
        output = torch.full(inputs.v.shape, torch.nan, dtype=case.output)
        output = _same_memory_on(guarded(output), device)
        with _kernels_watched() if layer == "kernels" else contextlib.nullcontext():
            plan = steps.begin_step(pool.counters, slots, window)
            steps.decode_token(pool, given, plan, output)
            steps.end_step(plan)
        found["outputs"].append(_as_bytes(output))
        for name in ("positions", "flush_rows", "flush_count"):
            found[name].append(getattr(plan, name).cpu().numpy().copy())
        found["memory"].append(_bytes(pool))
    for before, after in zip(around, _around(pool), strict=True):
        assert torch.equal(before, after), "a kernel wrote outside of the pool's memory"
    return found


@contextlib.contextmanager
def _kernels_watched():
    """Workspaces start from NaN, nothing is written beside them, and slot numbers are not looked at on the host."""
    arguments = importlib.import_module("quantlab.kernels.arguments")
    with (
        watched_allocations(),
        unittest.mock.patch.object(arguments, "check_numbers", lambda *_: None),
    ):
        yield


def check_load(case: PoolCase, implementation: str, dtype: torch.dtype = torch.float32) -> None:
    """AssertionError unless ``load_states`` leaves the bytes of memory that the torch twin leaves."""
    got = _where(implementation, _load, case, dtype)
    expected = _where("reference", _load, case, dtype)
    differ = [name for name, value in expected.items() if not numpy.array_equal(value, got[name])]
    assert differ == [], f"{case} {implementation}: {', '.join(differ)} of the loaded slots"


def _load(implementation: str, device: str, case: PoolCase, dtype: torch.dtype) -> dict[str, numpy.ndarray]:
    """The pool's bytes after prefill states were handed to its batch."""
    layer = "schemes" if implementation == "reference" else "kernels"
    steps = importlib.import_module(f"quantlab.{layer}.steps")
    pool, shape = _guarded(_pool(case), device), case.shape
    around, slots = _around(pool), case.slots()
    initial = torch.randn(
        (len(slots), shape.heads, shape.value_dim, shape.key_dim), generator=case.random(7)
    ).to(dtype)
    initial *= torch.logspace(-6, 4, shape.heads)[None, :, None, None].to(dtype)
    if layer == "schemes":
        there = (slots >= 0) & (slots < pool.slots)
        steps.load_states(pool, slots[there], initial[there].float())
        return _bytes(pool)
    importlib.import_module("quantlab.kernels.arguments").pool(pool)
    given = slots.to(device), _same_memory_on(guarded(initial), device)
    with _kernels_watched():
        steps.load_states(pool, *given)
    for before, after in zip(around, _around(pool), strict=True):
        assert torch.equal(before, after), "a kernel wrote outside of the pool's memory"
    return _bytes(pool)


def check_graph(case: PoolCase, tokens: int) -> None:
    """AssertionError unless a captured step, replayed, leaves what as many launches leave; on a GPU."""
    steps = importlib.import_module("quantlab.kernels.steps")
    pools = [_guarded(_pool(case), "cuda") for _ in range(2)]
    slots = case.slots().cuda()
    inputs = _token(case, 100, len(slots)).map(lambda t: t.to(case.token).cuda())
    output = torch.empty(inputs.v.shape, dtype=case.output, device="cuda")

    def step(pool: LayerPool) -> None:
        plan = steps.begin_step(pool.counters, slots, pool.policy.window)
        steps.decode_token(pool, inputs, plan, output)
        steps.end_step(plan)

    for _ in range(tokens + 1):  # the first compiles
        step(pools[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(pools[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(pools[1])
    for _ in range(tokens):
        graph.replay()
    torch.cuda.synchronize()
    one, other = (_bytes(pool) for pool in pools)
    differ = [name for name in one if not numpy.array_equal(one[name], other[name])]
    assert differ == [], f"{case}: {', '.join(differ)} after {tokens} replays"


def _pool(case: PoolCase) -> LayerPool:
    """The case's pool on the CPU: every slot filled, its window as far as its cursor; the rest NaN or large."""
    policy, shape, count = case.policy, case.shape, case.slot_count
    layers, seed = case.layer + 1, case.seed + 5
    pools = allocate_pool(policy, case.family, shape, count, layers=layers, seed=seed, drafts=case.drafts)
    pool = pools[case.layer]
    for _, memory in _tensors(pool):
        memory.fill_(torch.nan if memory.is_floating_point() else torch.iinfo(memory.dtype).max)
    ids = torch.arange(count) + 100
    options = {"key_heads": shape.key_heads, "seed": seed, "layer": case.layer, "sequence_ids": ids}
    initial = _numbers(case, 2, (count, shape.heads, shape.value_dim, shape.key_dim), 60, 2.0**-8)
    initial *= _columns(case)
    state = start(policy, case.family, initial, **options)
    cursors = torch.full((count,), min(1, pool.policy.window - 1))
    live = case.live()[case.live() >= 0].long()
    cursors[live] = torch.tensor(case.cursors)
    for t in range(int(cursors.max())):
        rows = (cursors > t).nonzero()[:, 0]
        state.step(_token(case, 10 + t, len(rows)), rows)
    put_state(pool, torch.arange(count), state)
    assert torch.equal(pool.counters.cursor, cursors.int())
    if case.drafts:
        _turn(pool)
    return pool


def _turn(pool: LayerPool) -> None:
    """As if drafts had completed windows of every slot before: a ring begins where one of these ended."""
    for slot in range(pool.slots):
        origin = pool.policy.window * (3 * slot + 1)
        pool.counters.origin[slot] = origin
        for name in RINGS:
            ring = getattr(pool, name)
            if ring is not None:
                ring[slot] = ring[slot].roll(origin, 1)
    pool.counters.origin[0] += ORIGINS + 1 - pool.records  # about to start over


def _tokens(case: PoolCase) -> list[StepInputs]:
    """One token of the whole batch a step; padded rows hold NaN."""
    found = []
    for t in range(case.steps):
        inputs = _token(case, 100 + t, len(case.slots())).map(lambda x: x.to(case.token))
        found.append(inputs.map(lambda x: x.index_fill(0, torch.tensor([1]), torch.nan)))
    return found


def _token(case: PoolCase, purpose: int, rows: int) -> StepInputs:
    shape, keys = case.shape, (rows, case.shape.key_heads, case.shape.key_dim)
    q = torch.randn(keys, generator=case.random(purpose + 1000))
    k = _numbers(case, purpose + 2000, keys, 15, 2.0**-7) * _columns(case)
    v = _numbers(case, purpose + 3000, (rows, shape.heads, shape.value_dim), 15, 2.0**-7)
    gate = (rows, shape.heads) + ((shape.key_dim,) if case.family == "kimi_delta" else ())
    log_decay = -0.2 * torch.randn(gate, generator=case.random(purpose + 4000)).exp()
    if case.exact:
        return StepInputs(q, k, v, torch.zeros(gate))
    if case.family == "mamba2":
        return StepInputs(q, k, v, log_decay)
    beta = torch.rand(rows, shape.heads, generator=case.random(purpose + 5000))
    return StepInputs(q, torch.nn.functional.normalize(k, dim=-1), v, log_decay, beta)


def _columns(case: PoolCase) -> Tensor:
    """(key_dim,), see ``PoolCase.spread``."""
    sizes = torch.randint(-case.spread, case.spread + 1, (case.shape.key_dim,), generator=case.random(6))
    return torch.exp2(sizes.float())


def _numbers(case: PoolCase, purpose: int, shape: tuple[int, ...], most: int, unit: float) -> Tensor:
    """Normal numbers, or integers up to ``most`` times ``unit``."""
    numbers = torch.randn(shape, generator=case.random(purpose))
    return (numbers * most / 4).round().clamp(-most, most) * unit if case.exact else numbers


def _tensors(pool: LayerPool) -> Iterator[tuple[str, Tensor]]:
    """The layer's memory by name, without the counters."""
    for name, value in vars(pool).items():
        if isinstance(value, Tensor):
            yield name, value


def _all(pool: LayerPool) -> dict[str, Tensor]:
    return dict(_tensors(pool)) | {f"counters.{name}": t for name, t in vars(pool.counters).items()}


def _guarded(pool: LayerPool, device: str) -> LayerPool:
    """The pool in memory of its own on ``device``, poison on either side of every tensor."""

    def moved(tensor: Tensor) -> Tensor:
        return _same_memory_on(guarded(tensor), device)

    counters = SlotCounters(**{name: moved(t) for name, t in vars(pool.counters).items()})
    return replace(pool, counters=counters, **{name: moved(t) for name, t in _tensors(pool)})


def _around(pool: LayerPool) -> list[Tensor]:
    """Bytes before and behind every tensor."""
    found = []
    for tensor in _all(pool).values():
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        first = tensor.storage_offset() * tensor.element_size()
        found.append(torch.cat([storage[:first], storage[first + tensor.nbytes :]]).cpu())
    return found


def _bytes(pool: LayerPool) -> dict[str, numpy.ndarray]:
    return {name: _as_bytes(tensor) for name, tensor in _all(pool).items()}


def _as_bytes(tensor: Tensor) -> numpy.ndarray:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().copy()


def _restored(template: LayerPool, memory: dict[str, numpy.ndarray]) -> LayerPool:
    """A pool on the CPU from its bytes."""
    tensors = {
        name: torch.from_numpy(memory[name]).view(old.dtype).view(old.shape)
        for name, old in _all(template).items()
    }
    counters = SlotCounters(**{name: tensors.pop(f"counters.{name}") for name in vars(template.counters)})
    return replace(template, counters=counters, **tensors)
