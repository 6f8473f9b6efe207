"""Tiles of value rows of a state inside a kernel, laid out for sums along the key dim.

A tile of R rows is (N, R / 8, 8, 4, INNER): a warp takes eight rows at a time, four lanes a row, each with runs of
INNER neighbours, so that a load moves whole sectors and a sum along the key dim exchanges data twice.  Entry
(n, p, s, t, i) is key dim 4 INNER n + INNER t + i of row 8 p + s; what stands behind the key dim is zero.  A vector
along the key dim is (N, 1, 8, 4, INNER): every lane loads its own, because the compiler would lay the tile out after a
shared vector.  Numbers of rows are (R / 8, 8).
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.checkpoints import rounded_tile
from quantlab.kernels.copy_tiles import copy_runs
from quantlab.kernels.decode import element_value, widened
from quantlab.kernels.random import element_words


def inner_of(itemsize: int, key_dim: int) -> int:
    """INNER for 16-byte loads of numbers of ``itemsize`` bytes, where the key dim has room for four lanes of them."""
    return min(16 // itemsize, (1 << (key_dim - 1).bit_length()) // 4)


@triton.jit
def tile_rows(R: tl.constexpr):
    """0 to R - 1 as (R / 8, 8)."""
    return 8 * tl.arange(0, R // 8)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def tile_columns(KP: tl.constexpr, INNER: tl.constexpr):
    """Key dim of every entry of a vector, (N, 1, 8, 4, INNER)."""
    n = tl.arange(0, KP // (4 * INNER))[:, None, None, None, None]
    lane = tl.arange(0, 4)[None, None, None, :, None]
    column = 4 * INNER * n + INNER * lane + tl.arange(0, INNER)[None, None, None, None, :]
    return tl.broadcast_to(column, (KP // (4 * INNER), 1, 8, 4, INNER))


@triton.jit
def row_sums(x):
    """A tile -> (R / 8, 8)."""
    return tl.sum(tl.sum(tl.sum(x, 4), 0), 2)


@triton.jit
def by_row(x):
    """(R / 8, 8) to broadcast over a tile."""
    return x[None, :, :, None, None]


@triton.jit
def dense_tile(
    checkpoint, checkpoint_scales, first, r, K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """The stored checkpoint's values in rows first + r of all rows (S, H, V)."""
    column = tile_columns(KP, INNER)
    at = checkpoint + first * K + (by_row(r) * K + column)
    if K == KP:
        codes = tl.load(at)
    else:
        codes = tl.load(at, mask=column < K, other=0)
    if STORE.scale is None:
        values = widened(codes)
    else:
        ELEMENT: tl.constexpr = STORE.element
        values = element_value(codes, ELEMENT) * by_row(tl.load(checkpoint_scales + first + r))
    return values


@triton.jit
def store_tile(
    x, checkpoint, checkpoint_scales, first, r, words, K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Round a float32 tile into the checkpoint; returns the largest magnitude of what is stored."""
    if STORE.element is None:
        column = tile_columns(KP, INNER)
        at = checkpoint + first * K + (by_row(r) * K + column)
        if K == KP:
            tl.store(at, x)
        else:
            tl.store(at, x, mask=column < K)
        most = tl.max(tl.max(tl.max(tl.max(tl.max(tl.abs(x), 4), 0), 2), 1), 0)
    else:
        R: tl.constexpr = 8 * r.shape[0]
        row = tl.arange(0, R)
        rows = tl.reshape(tl.permute(x, (1, 2, 0, 3, 4)), (R, KP))
        codes, scales, values = rounded_tile(rows, words, STORE)
        column = tl.arange(0, KP)
        at = checkpoint + first * K + (row[:, None] * K + column[None, :])
        tl.store(at, codes, mask=(column < K)[None, :])
        if STORE.scale is not None:
            tl.store(checkpoint_scales + first + row, scales)
        most = tl.max(tl.max(tl.abs(values), 1), 0)
    return most


@triton.jit
def row_words(
    row,
    slot,
    store_numbers,
    sequence_ids,
    seed,
    stream,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Random words (R, KP) of value rows ``row`` (H V rows of a sequence) for its next store."""
    counter = row[:, None] * (K // 4) + tl.arange(0, KP // 4)[None, :]
    number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
    sequence = tl.load(sequence_ids + slot).to(tl.uint32)
    stream = tl.full((1, 1), stream, tl.int32).to(tl.uint32)
    return element_words(counter.to(tl.uint32), number, sequence, stream, tl.load(seed), ROUNDS)


@triton.jit
def copy_tile(
    codes, scales, global_scale, head, first, r, K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr
):
    """The read copy's values in rows first + r of all rows, which are of ``head`` of all heads; see ``copy_runs``."""
    n, lane = tl.arange(0, KP // (4 * INNER)), tl.arange(0, 4)
    start = 4 * INNER * n[:, None, None, None, None] + INNER * lane[None, None, None, :, None]
    start = tl.broadcast_to(start, (KP // (4 * INNER), 1, 8, 4, 1))
    return copy_runs(codes, scales, global_scale, head, first, by_row(r), start, K, INNER)
