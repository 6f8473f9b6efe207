"""Tiles of value rows of a state inside a kernel, laid out for sums along the key dim.

A tile of R rows is (LANES, S, P, N, INNER) with LANES S = 32 lanes of a warp and P = R / S: a warp takes S rows at a
time, LANES lanes a row, each with N runs of INNER neighbours, so that a load moves LANES INNER neighbours of a row and
a sum along the key dim exchanges data log2(LANES) times a row.  Entry (t, s, p, n, i) is key dim
LANES INNER n + INNER t + i of row P s + p; what stands behind the key dim is zero.  Numbers of rows are (S, P).

The compiler gives the threads of a warp to a tile's last axis, as far as its numbers do not fit one load, and then to
its axes from the first on.  So the axes of the lanes stand first, and a vector along the key dim, (LANES, S, 1, N,
INNER), has an entry for every lane: laid out otherwise than the tile it would be exchanged on every use.

Sums go axis by axis, and no reshape merges axes before one: where the lanes of the merged axis are no neighbouring bits
of the lane's number, Triton 3.6 sums over the wrong lanes (triton-lang/triton pull request 9219, which 3.7 has).
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.checkpoints import decoded_tile, over_rows
from quantlab.kernels.checkpoints import store_tile as rounded_store
from quantlab.kernels.decode import e4m3, widened

LANES_A_ROW = 8
"""Loads of 16 bytes by so many lanes are the 128 of a cache line; every key dim has room for them."""


def inner_of(itemsize: int, key_dim: int, lanes: int) -> int:
    """INNER for 16-byte loads of numbers of ``itemsize`` bytes, where the key dim has room for ``lanes`` of them."""
    return min(16 // itemsize, (1 << (key_dim - 1).bit_length()) // lanes)


@triton.jit
def tile_rows(R: tl.constexpr, LANES: tl.constexpr):
    """0 to R - 1 as (S, P)."""
    S: tl.constexpr = 32 // LANES
    return tl.arange(0, S)[:, None] * (R // S) + tl.arange(0, R // S)[None, :]


@triton.jit
def tile_columns(KP: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr):
    """Key dim of every entry of a row, (LANES, 1, 1, N, INNER)."""
    lane = tl.arange(0, LANES)[:, None, None, None, None]
    n = tl.arange(0, KP // (LANES * INNER))[None, None, None, :, None]
    return INNER * lane + (LANES * INNER) * n + tl.arange(0, INNER)[None, None, None, None, :]


@triton.jit
def tile_vector(pointer, K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr):
    """float32 values of a vector of K entries for every lane, (LANES, S, 1, N, INNER); zero behind its end."""
    S: tl.constexpr = 32 // LANES
    N: tl.constexpr = KP // (LANES * INNER)
    # Of any width: by fours, which one thread loads as one, so that its threads are those of the tile.
    lane = tl.arange(0, LANES)[:, None, None, None, None, None]
    n = tl.arange(0, N)[None, None, None, :, None, None]
    four = tl.arange(0, INNER // 4)[None, None, None, None, :, None]
    column = INNER * lane + (LANES * INNER) * n + 4 * four + tl.arange(0, 4)[None, None, None, None, None, :]
    column = tl.broadcast_to(column, (LANES, S, 1, N, INNER // 4, 4))
    if K == KP:
        values = tl.load(pointer + column)
    else:
        values = tl.load(pointer + column, mask=column < K, other=0)
    return tl.reshape(widened(values), (LANES, S, 1, N, INNER))


@triton.jit
def row_sums(x):
    """A tile -> (S, P), a vector -> (S, 1)."""
    return tl.sum(tl.sum(tl.sum(x, 4), 3), 0)


@triton.jit
def dense_tile(
    checkpoint, checkpoint_scales, first, r, K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """The stored checkpoint's values in rows first + r of all rows (S, H, V)."""
    column = tile_columns(KP, LANES, INNER)
    at = checkpoint + first * K + (over_rows(r) * K + column)
    if K == KP:
        codes = tl.load(at)
    else:
        codes = tl.load(at, mask=column < K, other=0)
    row_scales = None
    if STORE.scale is not None:
        row_scales = tl.load(checkpoint_scales + first + r)
    return decoded_tile(codes, row_scales, STORE)


@triton.jit
def store_tile(
    x, checkpoint, checkpoint_scales, first, r, first_row, slot, store_numbers, sequence_ids, seed, stream,
    K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr, STORE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Round a float32 tile into the checkpoint's rows first + r; returns the largest magnitude of what is stored.

    Stochastic rounding takes the words of the sequence's value rows first_row + r (of H V) for its next store.
    """
    column = tile_columns(KP, LANES, INNER)
    at = checkpoint + first * K + (over_rows(r) * K + column)
    mask, scales_at = None, None
    if K < KP:
        mask = tl.broadcast_to(column < K, x.shape)
    if STORE.scale is not None:
        scales_at = checkpoint_scales + first + r
    counter, number, sequence, key = 0, 0, 0, 0
    if STORE.stochastic:
        counter = over_rows((first_row + r) * (K // 4)) + tile_columns(KP // 4, LANES, INNER // 4)
        counter = counter.to(tl.uint32)
        number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
        sequence, key = tl.load(sequence_ids + slot).to(tl.uint32), tl.load(seed)
        stream = tl.full((1, 1, 1, 1, 1), stream, tl.int32).to(tl.uint32)
    return rounded_store(at, scales_at, mask, x, counter, number, sequence, stream, key, STORE, ROUNDS)


@triton.jit
def copy_tile(
    codes, scales, global_scale, head, first, r, K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """The NVFP4 copy's values in rows first + r of all rows, which are of ``head`` of all heads (S, H).

    codes: int32 words.
    """
    column = tile_columns(KP, LANES, INNER)
    row, inside = over_rows(r), column < K
    words = tl.load(codes + first * (K // 8) + (row * (K // 8) + column // 8), mask=inside, other=0)
    code = ((words >> (4 * (column % 8))) & 15).to(tl.uint32)
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * TWO_126
    value = tl.where(code >= 8, -magnitude, magnitude)
    scale = tl.load(scales + first * (K // 16) + (row * (K // 16) + column // 16), mask=inside, other=0)
    return value * (e4m3(scale) * tl.load(global_scale + head))


TWO_126: tl.constexpr = tl.constexpr(2.0**126)
