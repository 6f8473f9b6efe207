"""Probes of the delta rules' kernels for what the pools' conformance suite cannot reach."""

# A jit function returns; a type checker does not know that.
# pyright: reportGeneralTypeIssues=false

from dataclasses import replace
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.kernels import steps, target
from quantlab.kernels.delta_systems import inverse_rows
from quantlab.kernels.delta_window import column_of_key
from quantlab.kernels.packed import (
    byte_operand,
    byte_words,
    exact_product,
    key_of_byte_column,
    key_of_half_column,
    power_operand,
    three_parts,
    wide_product,
)
from quantlab.recurrences import StepInputs
from quantlab.schemes import StateShape
from quantlab.schemes import steps as reference
from quantlab.schemes.pool import LayerPool, allocate_pool
from quantlab.testing import in_triton_process

SIZE = 16


@triton.jit
def inverse_kernel(strict, output, J: tl.constexpr):
    rows = inverse_rows(strict, J)
    for i in tl.static_range(J):
        tl.store(output + i * J + tl.arange(0, J), rows[i])


@triton.jit
def column_kernel(output, K: tl.constexpr):
    column = tl.arange(0, K)
    tl.store(output + column, column_of_key(key_of_half_column(column, K), K))


@triton.jit
def byte_kernel(words, output, R: tl.constexpr, K: tl.constexpr):
    """float32 (R, K) of ``byte_operand``, in the order of the keys."""
    r = tl.arange(0, R)
    left = byte_operand(tl.load(words + r[None, :, None, None] * (K // 4) + byte_words(K)), R, K)
    key = key_of_byte_column(tl.arange(0, K), K)
    tl.store(output + r[:, None] * K + key[None, :], left.to(tl.float32))


@triton.jit
def power_kernel(words, scales, output, units, R: tl.constexpr, K: tl.constexpr):
    """float32 (R, K) of ``power_operand``, in the order of the keys, and (R,)."""
    r, word, block = tl.arange(0, R)[:, None], tl.arange(0, K // 8)[None, :], tl.arange(0, K // 32)[None, :]
    tile, powers = tl.load(words + r * (K // 8) + word), tl.load(scales + r * (K // 32) + block)
    left, unit = power_operand(tile, powers, R, K)
    key = key_of_half_column(tl.arange(0, K), K)
    tl.store(output + r * K + key[None, :], left.to(tl.float32))
    tl.store(units + tl.arange(0, R), unit)


@triton.jit
def product_kernel(left, right, output, N: tl.constexpr, WIDE: tl.constexpr):
    """left (2, 16, N) @ right (N, 16)."""
    warp, row, column = tl.arange(0, 2)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, N)
    high, middle, low = three_parts(tl.load(left + (warp * (16 * N) + row * N + column[None, None, :])))
    other = tl.load(right + (column[:, None] * 16 + tl.arange(0, 16)[None, :]))
    if WIDE:
        found = wide_product(high, middle, low, other, None)
    else:
        found = exact_product(high, middle, low, other.to(tl.bfloat16), None)
    tl.store(output + (warp * 256 + row * 16 + tl.arange(0, 16)[None, None, :]), found)


def products(left: Tensor, right: Tensor, wide: bool, implementation: str) -> Tensor:
    """float32 left (2, 16, n) @ right (n, 16) as a fold forms it; right holds bfloat16 unless ``wide``."""
    return _run(_products, implementation, left.numpy(), right.numpy(), wide)


def _products(left: numpy.ndarray, right: numpy.ndarray, wide: bool, device: str) -> numpy.ndarray:
    given = (torch.from_numpy(x).to(device) for x in (left, right))
    output = torch.full((2, 16, 16), torch.nan, device=device)
    kernel: Any = product_kernel
    kernel[(1,)](*given, output, N=right.shape[0], WIDE=wide, num_warps=2, **target.LAUNCH_OPTIONS)
    return output.cpu().numpy()


def inverses(strict: Tensor, implementation: str) -> Tensor:
    """(I + strict)^-1 of strictly lower triangular float32 (n, 16, 16), as the kernels form it."""
    return _run(_inverses, implementation, strict.numpy())


def _inverses(strict: numpy.ndarray, device: str) -> numpy.ndarray:
    given = torch.from_numpy(strict).to(device)
    output = torch.full_like(given, torch.nan)
    kernel: Any = inverse_kernel
    for one, result in zip(given, output, strict=True):
        kernel[(1,)](one, result, J=SIZE, num_warps=1, **target.LAUNCH_OPTIONS)
    return output.cpu().numpy()


def restored_columns(key_dim: int, implementation: str) -> Tensor:
    """What ``column_of_key`` makes of the key dim of each column of the copy's operand."""
    return _run(_restored_columns, implementation, key_dim)


def _restored_columns(key_dim: int, device: str) -> numpy.ndarray:
    output = torch.full((key_dim,), -1, dtype=torch.int32, device=device)
    kernel: Any = column_kernel
    kernel[(1,)](output, K=key_dim, num_warps=1, **target.LAUNCH_OPTIONS)
    return output.cpu().numpy()


def byte_operands(codes: Tensor, implementation: str) -> Tensor:
    """float32 (R, K) that tensor cores take for E4M3 codes uint8 (R, K)."""
    return _run(_byte_operands, implementation, codes.numpy())


def _byte_operands(codes: numpy.ndarray, device: str) -> numpy.ndarray:
    given = torch.from_numpy(codes).to(device)
    output = torch.full(given.shape, torch.nan, dtype=torch.float32, device=device)
    kernel: Any = byte_kernel
    sizes = {"R": given.shape[0], "K": given.shape[1]}
    kernel[(1,)](given.view(torch.int32), output, **sizes, num_warps=1, **target.LAUNCH_OPTIONS)
    return output.cpu().numpy()


def power_operands(codes: Tensor, scales: Tensor, implementation: str) -> Tensor:
    """float32 (R, K + 1): what tensor cores take for packed E2M1 codes uint8 (R, K / 2) under E8M0 scales (R, K / 32),
    and the unit of each row.
    """
    return _run(_power_operands, implementation, codes.numpy(), scales.numpy())


def _power_operands(codes: numpy.ndarray, scales: numpy.ndarray, device: str) -> numpy.ndarray:
    given = torch.from_numpy(codes).to(device)
    rows, key_dim = given.shape[0], 2 * given.shape[1]
    output = torch.full((rows, key_dim), torch.nan, dtype=torch.float32, device=device)
    units = torch.full((rows,), torch.nan, dtype=torch.float32, device=device)
    kernel: Any = power_kernel
    powers = torch.from_numpy(scales).to(device)
    options = {"R": rows, "K": key_dim, "num_warps": 1, **target.LAUNCH_OPTIONS}
    kernel[(1,)](given.view(torch.int32), powers, output, units, **options)
    return torch.cat([output, units[:, None]], 1).cpu().numpy()


def moved_windows(
    policy: str, family: str, drafts: int, implementation: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """One step on a pool with room for drafts, whose windows start anywhere in the ring and wrap around its end.

    Output and memory by name: of ``quantlab.schemes.steps``, and of the kernels.
    """
    pool, slots, inputs = _moved(policy, family, drafts)
    expected = _memory(pool, slots, inputs, reference)
    found = _run(_moved_step, implementation, policy, family, drafts)
    return {name: (torch.from_numpy(expected[name]), torch.from_numpy(found[name])) for name in expected}


def _moved_step(policy: str, family: str, drafts: int, device: str) -> dict[str, numpy.ndarray]:
    pool, slots, inputs = _moved(policy, family, drafts)
    counters = replace(pool.counters, **{name: t.to(device) for name, t in vars(pool.counters).items()})
    moved = {name: t.to(device) for name, t in vars(pool).items() if isinstance(t, Tensor)}
    pool = replace(pool, counters=counters, **moved)
    return _memory(pool, slots.to(device), inputs.map(lambda t: t.to(device)), steps)


def _memory(pool: LayerPool, slots: Tensor, inputs: StepInputs, layer: Any) -> dict[str, numpy.ndarray]:
    plan = layer.begin_step(pool.counters, slots, pool.policy.window)
    output = layer.decode_token(pool, inputs, plan, torch.full_like(inputs.v, torch.nan))
    memory = {name: t for name, t in vars(pool).items() if isinstance(t, Tensor)}
    return {name: t.float().cpu().numpy() for name, t in {"output": output, **memory}.items()}


def _moved(policy: str, family: str, drafts: int) -> tuple[LayerPool, Tensor, StepInputs]:
    """Every number but the counters is random; positions outside of a window hold NaN."""
    random = torch.Generator().manual_seed(7)
    shape = StateShape(2, 16, 32, 2 if family == "kimi_delta" else 1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random)

    pool = allocate_pool(policy, family, shape, 4, drafts=drafts)[0]
    reference.load_states(pool, torch.arange(4), normal(4, shape.heads, shape.value_dim, shape.key_dim))
    cursors, origins = (pool.policy.window - 1, 0, 2, 1), (6, 3, 7, 5)
    pool.counters.cursor.copy_(torch.tensor(cursors))
    pool.counters.origin.copy_(torch.tensor(origins))
    rings = {name: t for name, t in vars(pool).items() if name.endswith("buffer") and t is not None}
    for name, ring in rings.items():
        ring.fill_(torch.nan)
        for slot, (cursor, origin) in enumerate(zip(cursors, origins, strict=True)):
            for j in range(cursor):
                record = normal(*ring.shape[1:2], *ring.shape[3:])
                if name == "log_decay_buffer":
                    record = -record.abs() / 4
                elif name == "beta_buffer":
                    record = record.sigmoid()
                elif name == "k_buffer":
                    record = torch.nn.functional.normalize(record, dim=-1)
                ring[slot, :, (origin + j) % pool.records] = record.to(ring)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    gate = (3, shape.heads) + ((shape.key_dim,) if family == "kimi_delta" else ())
    keys = (3, shape.key_heads, shape.key_dim)
    inputs = StepInputs(
        normal(*keys) / shape.key_dim**0.5,
        torch.nn.functional.normalize(normal(*keys), dim=-1),
        normal(3, shape.heads, shape.value_dim),
        -normal(*gate).abs() / 4,
        normal(3, shape.heads).sigmoid(),
    )
    return pool, slots, inputs


def _run(function: Any, implementation: str, *arguments: Any) -> Any:
    if implementation == "interpreter":
        found = in_triton_process(function, *arguments, "cpu", interpret=True)
    else:
        found = function(*arguments, "cuda")
    return torch.from_numpy(found) if isinstance(found, numpy.ndarray) else found
