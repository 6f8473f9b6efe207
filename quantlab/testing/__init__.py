"""Comparison helpers and the conformance suite: what every implementation of an op must pass.

An op has up to three implementations: ``reference`` (the torch twin), ``interpreter`` (the Triton kernel in
Triton's interpreter on the CPU) and ``cuda`` (the kernel on a GPU).  All run the same cases, listed in
``KERNEL_SUITES``. Nothing here needs pytest.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
import multiprocessing
import os
import sys
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from quantlab.recurrences import StepInputs
from quantlab.schemes import start
from quantlab.schemes.dual_read import dual_read
from quantlab.schemes.kernel_read import dual_read_arguments

IMPLEMENTATIONS = ("reference", "interpreter", "cuda")

_ORDERED = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def assert_close(
    ref: Tensor,
    got: Tensor,
    *,
    max_rel: float = 0.0,
    rms_rel: float | None = None,
    scale: Tensor | None = None,
    what: str = "result",
) -> None:
    """Raise AssertionError unless ``got`` is ``ref`` within the limits.

    Tensors of one and the same integer (or bool) dtype must be equal.  Otherwise NaN and infinities must
    stand in the same places, and on the finite rest, in float64:

    - ``max |got - ref| / size <= max_rel``, where size is ``scale`` if given (for a sum: the sum of its
      terms' magnitudes, which rounding errors follow), else the larger of ``|ref|`` and the RMS of ``ref``;
    - ``rms(got - ref) <= rms_rel * rms(size)`` if ``rms_rel`` is given.

    The message has the measures, the worst index, both values there and their distance in ulps.
    """
    assert ref.shape == got.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    if ref.numel() == 0:
        return
    exact = ref.dtype == got.dtype and not ref.dtype.is_floating_point
    ref, got = ref.detach().cpu(), got.detach().cpu()
    if exact:
        differ = ref != got
        assert not differ.any(), f"{what}: {int(differ.sum())} differ, {_worst(differ, ref, got)}"
        return
    reference, value = ref.double(), got.double()
    finite = reference.isfinite() & value.isfinite()
    same_special = (reference.isnan() & value.isnan()) | (reference == value)
    misplaced = ~finite & ~same_special
    assert not misplaced.any(), f"{what}: {int(misplaced.sum())} non-finite, {_worst(misplaced, ref, got)}"

    error = torch.where(finite, value - reference, 0).abs()
    kept = torch.where(finite, reference, 0)
    if scale is None:
        size = kept.abs().clamp(min=float(_rms(kept)))
    else:
        size = torch.where(finite, scale.detach().cpu().double(), 0)
    relative = torch.where(error == 0, 0.0, error / size)
    measured_max = float(relative.max())
    measured_rms = float(_rms(error) / _rms(size)) if error.any() else 0.0
    failed = measured_max > max_rel or (rms_rel is not None and measured_rms > rms_rel)
    limits = f"max {measured_max:.3e} (limit {max_rel:.3e}), rms {measured_rms:.3e}"
    limits += "" if rms_rel is None else f" (limit {rms_rel:.3e})"
    assert not failed, f"{what}: {limits}, {_worst(relative, ref, got)}"


def ulps(ref: Tensor, got: Tensor) -> Tensor:
    """Distance in representable numbers of the coarser dtype, int64; the two zeros are 0 apart."""
    dtype = max(ref.dtype, got.dtype, key=lambda kind: torch.finfo(kind).eps)

    def rank(x: Tensor) -> Tensor:
        bits = x.to(dtype).contiguous().view(_ORDERED[dtype]).long()
        lowest = torch.iinfo(_ORDERED[dtype]).min
        return torch.where(bits < 0, lowest - bits, bits)

    return (rank(ref) - rank(got)).abs()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _worst(badness: Tensor, ref: Tensor, got: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(badness.double().argmax(), badness.shape))
    reference, value = ref[at], got[at]
    text = f"worst at {at}: expected {reference.item()!r}, got {value.item()!r}"
    if ref.dtype.is_floating_point and got.dtype.is_floating_point:
        text += f", {int(ulps(reference, value))} ulps apart"
    return text


@dataclass(frozen=True)
class KernelSuite:
    """The conformance cases of one op, and how far an implementation may be from the truth."""

    cases: dict[str, Callable[[], dict[str, Tensor]]]
    """Case name to a function that makes the arguments on the CPU, the same at every call."""
    truth: Callable[[dict[str, Tensor]], Tensor]
    """The result in float64."""
    size: Callable[[dict[str, Tensor]], Tensor]
    """What an error is measured against, ``scale`` of ``assert_close``."""
    limits: Callable[[dict[str, Tensor]], tuple[float, float]]
    """``max_rel`` and ``rms_rel``, with their derivation."""


def check_kernel(op: str, case: str, implementation: str) -> None:
    """Run a conformance case; AssertionError if the result is out of the suite's limits."""
    suite = KERNEL_SUITES[op]
    arguments = suite.cases[case]()
    max_rel, rms_rel = suite.limits(arguments)
    got = run_kernel(op, case, implementation)
    what = f"{op} {case} {implementation}"
    assert got.dtype == torch.float32, f"{what}: {got.dtype}, expected float32"
    truth, size = suite.truth(arguments), suite.size(arguments)
    assert_close(truth, got, max_rel=max_rel, rms_rel=rms_rel, scale=size, what=what)


def run_kernel(op: str, case: str, implementation: str) -> Tensor:
    """The case's result from one of ``IMPLEMENTATIONS``, on the CPU."""
    if implementation == "interpreter":
        return torch.from_numpy(in_triton_process(_run_kernel, op, case, implementation, interpret=True))
    return torch.from_numpy(_run_kernel(op, case, implementation))


def unavailable(implementation: str) -> str | None:
    """Why an implementation cannot run here, or None."""
    if implementation == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    if implementation == "interpreter" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def in_triton_process(function: Callable[..., Any], *arguments: Any, interpret: bool) -> Any:
    """``function(*arguments)`` in a process in which triton interprets, or compiles, whatever it does here.

    Triton makes that choice once per process, at import.  Function, arguments and result must pickle.
    """
    return _triton_process(interpret).submit(function, *arguments).result()


@functools.cache
def _triton_process(interpret: bool) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_start_triton, initargs=(interpret,))


def _start_triton(interpret: bool) -> None:
    assert "triton" not in sys.modules, "triton was imported before the choice to interpret was made"
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    torch.set_num_threads(1)


def _run_kernel(op: str, case: str, implementation: str) -> numpy.ndarray:
    layer = "schemes" if implementation == "reference" else "kernels"
    function = getattr(importlib.import_module(f"quantlab.{layer}.{op}"), op)
    arguments = KERNEL_SUITES[op].cases[case]()
    if implementation == "cuda":
        arguments = {name: _same_memory_on(tensor, "cuda") for name, tensor in arguments.items()}
    if implementation == "reference":
        return function(**arguments).numpy()
    with watched_allocations():
        return function(**arguments).cpu().numpy()


@contextlib.contextmanager
def watched_allocations():
    """Inside, ``torch.empty`` gives NaN, so that unwritten output shows, between guards that must stay.

    Integers have no NaN and start from their smallest number.
    """
    guard, mark, allocated = 64, 123, []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape)
        whole = torch.full((count + 2 * guard,), mark, dtype=dtype, device=device)
        allocated.append(whole)
        poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        return whole[guard : guard + count].view(shape).fill_(poison)

    with unittest.mock.patch.object(torch, "empty", empty):
        yield
    for whole in allocated:
        outside = torch.cat([whole[:guard], whole[-guard:]])
        assert (outside == mark).all(), "the kernel wrote outside of its output"


def _same_memory_on(tensor: Tensor, device: str) -> Tensor:
    """A copy that keeps what lies before and behind the tensor, poison included."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def guarded(tensor: Tensor, guard: int = 64) -> Tensor:
    """A contiguous copy with ``guard`` poisoned elements on either side: NaN, or the largest integer."""
    poison = float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max
    whole = torch.full((tensor.numel() + 2 * guard,), poison, dtype=tensor.dtype)
    inside = whole[guard : guard + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def _dual_read_arguments(
    *,
    heads: int,
    groups: int,
    value_dim: int,
    key_dim: int,
    window: int,
    cursors: tuple[int, ...],
    buffer: torch.dtype = torch.float32,
    token: torch.dtype = torch.float32,
    reset_at: int | None = None,
    guard: int = 64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random stored bits and inputs, every number that must not be read set to NaN.

    The codes are all 16 with equal chance, a tenth of the scales is zero.  The copy, the window and the
    current token contribute about equally, so an error in one of them cannot hide.  ``reset_at`` is a record
    whose decay is zero.
    """
    batch, random = len(cursors), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    codes = torch.randint(0, 256, (batch, heads, value_dim, key_dim // 2), generator=random).to(torch.uint8)
    scales = torch.randint(0x28, 0x48, (batch, heads, value_dim, key_dim // 16), generator=random)
    scales[torch.rand(scales.shape, generator=random) < 0.1] = 0
    log_decays = -0.3 * normal(batch, window + 1, heads).exp()
    if reset_at is not None:
        log_decays[:, reset_at] = -torch.inf
    buffers = {
        "k_buffer": normal(batch, window, groups, key_dim),
        "d_buffer": normal(batch, window, heads, value_dim),
        "log_decay_buffer": log_decays[:, :window],
    }
    for row, cursor in enumerate(cursors):
        for tensor in buffers.values():
            tensor[row, cursor:] = torch.nan
    tokens = {
        "q": normal(batch, groups, key_dim) / key_dim**0.5,
        "k": normal(batch, groups, key_dim),
        "d": normal(batch, heads, value_dim),
        "log_decay": log_decays[:, window],
    }
    return {
        "codes": guarded(codes, guard),
        "scales": guarded(scales.to(torch.uint8), guard),
        "global_scale": guarded((0.3 * normal(batch, heads)).exp(), guard),
        **{name: guarded(tensor.to(buffer), guard) for name, tensor in buffers.items()},
        "cursor": guarded(torch.tensor(cursors, dtype=torch.int32), guard),
        **{name: guarded(tensor.to(token), guard) for name, tensor in tokens.items()},
    }


def _dual_read_truth(arguments: dict[str, Tensor]) -> Tensor:
    return dual_read(**{**arguments, "q": arguments["q"].double()})


def _dual_read_size(arguments: dict[str, Tensor]) -> Tensor:
    """The sum of the magnitudes of all terms: the same read of a state without any sign."""
    unsigned = {name: arguments[name].abs() for name in ("k_buffer", "d_buffer", "k", "d")}
    codes, q = arguments["codes"] & 0x77, arguments["q"].double().abs()
    return dual_read(**{**arguments, **unsigned, "codes": codes, "q": q})


def _dual_read_limits(arguments: dict[str, Tensor]) -> tuple[float, float]:
    """Forward error of a sum, in units u = 2^-24 of the sum of the terms' magnitudes.

    A term passes through at most K + L + 2 additions, whatever their order, and 6 multiplications, each off
    by u (two of them because code, scale and global scale may be multiplied in another order).  Its decay
    exp(g) is off by the absolute error of g: L additions, the rounding of log2(e) and of g * log2(e), each u
    times the sum of |log decay|; and by the exponential itself, 2 ulp = 4 u for the GPU's ex2.approx, less
    elsewhere.  The RMS limit takes the roundings for independent: the square root of the count, with a
    factor 2 to spare.
    """
    window, key_dim = arguments["k_buffer"].shape[1], arguments["q"].shape[2]
    log_decays = torch.cat(
        [arguments["log_decay_buffer"].double(), arguments["log_decay"].double()[:, None]], 1
    )
    # Neither undefined records (NaN) nor a decay of zero (-inf) has an error.
    exponent = torch.where(log_decays.isfinite(), log_decays, 0).abs().sum(1).max()
    count = key_dim + window + 2 + 6 + 4 + (window + 2) * float(exponent)
    return count * 2.0**-24, 2 * count**0.5 * 2.0**-24


def _dual_read_unit_queries() -> dict[str, Tensor]:
    """Row i of the batch reads column i of one copy: every scale from 0 to NaN, every nibble position."""
    key_dim, value_dim = 32, 64
    arguments = _dual_read_arguments(
        heads=1, groups=1, value_dim=value_dim, key_dim=key_dim, window=0, cursors=(0,) * key_dim, seed=1
    )
    scales = torch.arange(128, dtype=torch.uint8).view(1, 1, value_dim, key_dim // 16)
    return {
        **arguments,
        "codes": guarded(arguments["codes"][:1].expand(key_dim, -1, -1, -1)),
        "scales": guarded(scales.expand(key_dim, -1, -1, -1)),
        "global_scale": torch.ones(key_dim, 1),
        "q": torch.eye(key_dim)[:, None],
        "d": torch.zeros(key_dim, 1, value_dim),
        "log_decay": torch.zeros(key_dim, 1),
    }


def _dual_read_of_scheme(steps: int) -> dict[str, Tensor]:
    """Bits that a decode state stored: ``fp32/nvfp4@8`` after ``steps`` tokens, its rows at three cursors."""
    batch, heads, groups, value_dim, key_dim = 3, 4, 2, 80, 64
    random = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    def token() -> StepInputs:
        q, k = normal(batch, groups, key_dim), normal(batch, groups, key_dim)
        return StepInputs(q, k, normal(batch, heads, value_dim), -normal(batch, heads).exp() / 8)

    initial = normal(batch, heads, value_dim, key_dim)
    state = start("fp32/nvfp4@8:flush_read=copy", "mamba2", initial, key_heads=groups)
    for step in range(steps):
        for row in (1, 2):
            if step == 3 * row:
                state.reset(torch.tensor([row]), initial[[row]])
        state.step(token())
    return dual_read_arguments(state, token())


def _dual_read_cases() -> dict[str, Callable[[], dict[str, Tensor]]]:
    def case(**options: Any) -> Callable[[], dict[str, Tensor]]:
        return functools.partial(_dual_read_arguments, **options)

    bf16, fp16 = torch.bfloat16, torch.float16
    mamba = {"heads": 4, "groups": 2, "value_dim": 64, "key_dim": 128, "window": 16}
    small = {"heads": 2, "groups": 1, "value_dim": 16, "key_dim": 64, "window": 16}
    return {
        "H4_G2_V64_K128_L16": case(**mamba, cursors=(0, 1, 7, 16)),
        "H4_G2_V64_K128_L16_bf16": case(**mamba, cursors=(16, 5), buffer=bf16, token=bf16),
        "H3_G1_V80_K128_L16_bf16_buffer": case(
            **{**mamba, "heads": 3, "groups": 1, "value_dim": 80}, cursors=(3, 15), buffer=bf16
        ),
        "H2_G2_V64_K256_L16": case(**{**mamba, "heads": 2, "key_dim": 256}, cursors=(16, 2)),
        "H2_G1_V16_K64_L16_fp16": case(**small, cursors=(9, 16, 0), buffer=fp16, token=fp16),
        "batch1": case(**small, cursors=(11,)),
        "batch1_empty_window": case(**small, cursors=(0,)),
        "no_window": case(**{**small, "window": 0}, cursors=(0, 0)),
        "every_cursor_L5": case(**{**small, "window": 5}, cursors=(0, 1, 2, 3, 4, 5)),
        "L1": case(**{**small, "window": 1}, cursors=(1, 0)),
        "L33": case(**{**small, "window": 33}, cursors=(33, 20)),
        "V1": case(**{**small, "value_dim": 1}, cursors=(4, 16)),
        "V37_K80_four_byte_aligned": case(
            **{**small, "value_dim": 37, "key_dim": 80}, cursors=(6, 16), guard=4
        ),
        "K16": case(**{**small, "key_dim": 16}, cursors=(8, 13)),
        "H6_G3": case(**{**small, "heads": 6, "groups": 3}, cursors=(2, 12)),
        "decay_zero_in_window": case(**small, cursors=(16, 4), reset_at=3),
        "decay_zero_now": case(**small, cursors=(16, 4), reset_at=16),
        "unit_queries": _dual_read_unit_queries,
        "scheme_before_its_first_record": functools.partial(_dual_read_of_scheme, 0),
        "scheme_in_its_second_window": functools.partial(_dual_read_of_scheme, 11),
    }


KERNEL_SUITES = {
    "dual_read": KernelSuite(_dual_read_cases(), _dual_read_truth, _dual_read_size, _dual_read_limits)
}
"""Op name to its suite; tests run every case with every implementation that is available."""
