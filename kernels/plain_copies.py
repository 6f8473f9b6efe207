"""Read copies of fp8 and mxfp4: encoded row by row from the stored checkpoint, no row needs another."""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats import Format
from quantlab.formats.table import Element
from quantlab.kernels import target
from quantlab.kernels.checkpoints import decoded_tile, rounded_tile, store_of
from quantlab.kernels.rounding import encode
from quantlab.kernels.scales import PowerOptions, power_scale, recipe_of
from quantlab.schemes.pool import LayerPool

PROGRAMS = 1056
ROWS = 16
BLOCK: tl.constexpr = tl.constexpr(32)


@dataclass(frozen=True)
class PackedStore:
    """What mxfp4 makes of a tile: ``element`` under scales that ``power_scale`` derives."""

    element: Element
    powers: PowerOptions


def copy_store_of(copy: Format) -> Any:
    """The Store of an fp8 read copy, or the PackedStore of mxfp4."""
    if copy.name == "mxfp4":
        return PackedStore(copy.element, recipe_of(copy).options)  # type: ignore[arg-type]
    return store_of(copy)


@triton.jit
def encode_plain_rows(
    checkpoint, checkpoint_scales, codes, scales, head, first,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """R value rows from ``first`` on of a head of all heads (S, H).  COLUMNS: K or the power of two above it."""
    v, column = first + tl.arange(0, R), tl.arange(0, COLUMNS)
    inside = (v < V)[:, None] & (column < K)[None, :]
    row_scales = None
    if checkpoint_scales is not None:
        row_scales = tl.load(checkpoint_scales + head * V + v, mask=v < V, other=1.0)
    stored = tl.load(checkpoint + head * (V * K) + v[:, None] * K + column[None, :], mask=inside, other=0)
    x = decoded_tile(stored, row_scales, STORE)
    if hasattr(COPY, "powers"):
        OPTIONS: tl.constexpr = COPY.powers
        ELEMENT: tl.constexpr = COPY.element
        blocks = tl.reshape(x, (R, COLUMNS // BLOCK, BLOCK))
        powers, inverse = power_scale(tl.max(tl.abs(blocks), 2), 1.0, OPTIONS)
        nibbles = encode(blocks * inverse[:, :, None], None, ELEMENT, "nearest", 32)
        low, high = tl.split(tl.reshape(nibbles & 0xF, (R, COLUMNS // 2, 2)))
        byte, block = tl.arange(0, COLUMNS // 2), tl.arange(0, COLUMNS // BLOCK)
        byte_at = codes + head * (V * K // 2) + v[:, None] * (K // 2) + byte[None, :]
        written = (v < V)[:, None] & (byte < K // 2)[None, :]
        tl.store(byte_at, (low | (high << 4)).to(tl.uint8), mask=written)
        scale_at = scales + head * (V * K // BLOCK) + v[:, None] * (K // BLOCK) + block[None, :]
        written = (v < V)[:, None] & (block < K // BLOCK)[None, :]
        tl.store(scale_at, powers.to(tl.uint8), mask=written)
    else:
        new, new_scales, _ = rounded_tile(x, None, COPY)
        tl.store(codes + head * (V * K) + v[:, None] * K + column[None, :], new, mask=inside)
        tl.store(scales + head * V + v, new_scales, mask=v < V)


@triton.jit
def encode_plain_kernel(
    rows, count, slots, checkpoint, checkpoint_scales, codes, scales,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    """The read copies of whole slots.  rows (B,): batch rows, ``count`` of them."""
    TILES: tl.constexpr = (V + R - 1) // R
    total = tl.load(count) * (H * TILES)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        i, h, first = item // (H * TILES), (item // TILES) % H, (item % TILES) * R
        slot = tl.load(slots + tl.load(rows + i)).to(tl.int64)
        encode_plain_rows(
            checkpoint, checkpoint_scales, codes, scales, slot * H + h, first, V, K, R, COLUMNS, STORE, COPY
        )


def encode_plain(pool: LayerPool, rows: Tensor, count: Tensor, slots: Tensor) -> None:
    """Encode the read copies of the slots ``slots[rows[i]]`` for i below ``count``, as in ``read_copies.encode``."""
    shape, copy = pool.shape, pool.policy.read_copy
    assert copy is not None
    kernel: Any = encode_plain_kernel
    tiles = -(-shape.value_dim // ROWS)
    kernel[(min(PROGRAMS, rows.shape[0] * shape.heads * tiles),)](
        rows,
        count,
        slots,
        pool.checkpoint,
        pool.checkpoint_scales,
        pool.copy_codes,
        pool.copy_scales,
        H=shape.heads,
        V=shape.value_dim,
        K=shape.key_dim,
        R=ROWS,
        COLUMNS=triton.next_power_of_2(shape.key_dim),
        STORE=store_of(pool.policy.checkpoint),
        COPY=copy_store_of(copy),
        num_warps=2,
        **target.LAUNCH_OPTIONS,
    )
