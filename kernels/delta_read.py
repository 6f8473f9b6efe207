"""The read of a delta rule: a token whose window is not full, through the stored state and the window.

    p = S' k        d = beta (v - p)        o = S' q + d (k . q)

with S' k and S' q as in ``delta_window``, whose coefficients a launch before has written.  Both come out of one pass
over the stored state: of a read copy as columns of one matrix product with its codes, which ``packed`` makes an exact
operand of tensor cores; of the checkpoint as sums of float32 products.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.kernels.delta_tiles import dense_tile, row_sums, tile_rows, tile_vector
from quantlab.kernels.delta_window import column_of_key, column_sums, ring_place
from quantlab.kernels.packed import (
    BYTE_UNIT,
    HALF_UNIT,
    LOW_QUERY,
    byte_operand,
    byte_words,
    half_operand,
    key_of_byte_column,
    power_operand,
    product,
)


@triton.jit
def copy_operand(
    words, scales, first, r, START: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, R: tl.constexpr
):
    """Key dims START to START + SIZE of the NVFP4 copy's rows first + r as a float16 operand (R, SIZE)."""
    word = START // 8 + tl.arange(0, SIZE // 8)
    block = START // 16 + tl.arange(0, SIZE // 16)
    tile = tl.load(words + first * (K // 8) + (r[:, None] * (K // 8) + word[None, :]))
    tile_scales = tl.load(scales + first * (K // 16) + (r[:, None] * (K // 16) + block[None, :]))
    return half_operand(tile, tile_scales, R, SIZE)


@triton.jit
def copy_product(
    words, scales, global_scale, head, first, r, halves, K: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr
):
    """The read copy's rows first + r, of ``head``, times the columns of ``delta_window.store_halves``: (R, 8).

    What the copy is its memory says, see ``copy_tiles``.
    """
    total = part_product(words, scales, global_scale, first, r, halves, None, 0, SIZE, K, R)
    if SIZE < K:
        total = part_product(words, scales, global_scale, first, r, halves, total, SIZE, K - SIZE, K, R)
    if global_scale is not None:
        total *= tl.load(global_scale + head) * HALF_UNIT
    elif scales.dtype.element_ty == tl.float32:
        total *= (tl.load(scales + first + r) * BYTE_UNIT)[:, None]
    return total


@triton.jit
def part_product(
    words, scales, global_scale, first, r, halves, total, START: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """``copy_product`` of key dims START to START + SIZE, added to total (None: to nothing), in the operand's units."""
    c, column = tl.arange(0, 8), tl.arange(0, SIZE)
    if global_scale is None and scales.dtype.element_ty == tl.float32:
        place = column_of_key(key_of_byte_column(column, SIZE), SIZE)
        column = tl.max_contiguous(tl.multiple_of(place, 2), 2)
    right = tl.load(halves + START + c[:, None] * K + column[None, :], mask=(c < 4)[:, None], other=0)
    if global_scale is not None:
        total = product(copy_operand(words, scales, first, r, START, SIZE, K, R), tl.trans(right), total)
    elif scales.dtype.element_ty == tl.float32:
        word = START // 4 + byte_words(SIZE)
        tile = tl.load(words + first * (K // 4) + (r[None, :, None, None] * (K // 4) + word))
        left = byte_operand(tile, R, SIZE)
        total = product(left, tl.trans(right), total)
    else:
        word, block = START // 8 + tl.arange(0, SIZE // 8), START // 32 + tl.arange(0, SIZE // 32)
        tile = tl.load(words + first * (K // 8) + (r[:, None] * (K // 8) + word[None, :]))
        tile_scales = tl.load(scales + first * (K // 32) + (r[:, None] * (K // 32) + block[None, :]))
        left, units = power_operand(tile, tile_scales, R, SIZE)
        part = product(left, tl.trans(right), None) * units[:, None]
        total = part if total is None else total + part
    return total


@triton.jit
def flat_rows(x):
    """``row_sums`` as (R,)."""
    sums = row_sums(x)
    return tl.reshape(sums, (sums.shape[0] * sums.shape[1],))


@triton.jit
def read_kernel(
    codes, scales, global_scale, key_scales, checkpoint, checkpoint_scales, d_buffer, v_buffer, positions, slots,
    origin, q, k, v, beta, coefficients, parts, halves, decays, vectors, output,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr, STORE: tl.constexpr, COPY: tl.constexpr, BY_KEY: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """Rows that do not flush: output (B, H, V), and d (and v) behind the window.  R value rows of a head a program.

    COPY: whether there is a read copy, codes as int32 words; its key_scales are in ``halves`` already.  KEY_COPY:
    whether it serves S k.  SIZE: the largest power of two in K.  Coefficients and what follows: what ``head_window`` or
    ``channel_window`` (BY_KEY) has left.
    """
    TILES: tl.constexpr = V // R
    DENSE: tl.constexpr = not (COPY and KEY_COPY)
    pid = tl.program_id(0)
    b, h, tile = pid // (H * TILES), (pid // TILES) % H, pid % TILES
    n, slot = tl.load(positions + b), tl.load(slots + b).to(tl.int64)
    # The slot as well, because one that decides nothing would be loaded after the position has come.
    if (n < 0) | (n == L - 1) | (slot < 0):
        return
    r, j, c, g = tl.arange(0, R), tl.arange(0, J), tl.arange(0, 8), h // (H // G)
    head = slot * H + h
    row = tile * R + r
    place = ring_place(origin, slot, n, RING)
    record = (head * RING + ring_place(origin, slot, j, RING))[:, None] * V + row[None, :]
    records = tl.load(d_buffer + record, mask=(j < n)[:, None], other=0)
    value = widened(tl.load(v + (b * H + h) * V + row))
    strength = widened(tl.load(beta + b * H + h))
    window = coefficients + (b * H + h) * (2 * J)
    own = tl.load(window + J + n)
    key_decay, query_decay = tl.load(decays + 2 * (b * H + h)), tl.load(decays + 2 * (b * H + h) + 1)
    if COPY:
        halves_at = halves + (b * H + h if BY_KEY or key_scales is not None else b * G + g) * (4 * K)
        total = copy_product(codes, scales, global_scale, head, head * V + tile * R, r, halves_at, K, SIZE, R)
        factor = tl.where(c < 2, key_decay if KEY_COPY else 0.0, query_decay)
        total *= tl.where(c % 2 == 1, factor * LOW_QUERY, factor)[None, :]
    else:
        total = None
    if COPY and d_buffer.dtype.element_ty == tl.bfloat16:
        weights = tl.load(
            parts + (b * H + h) * (6 * J) + c[:, None] * J + j[None, :], mask=(c < 6)[:, None], other=0
        )
        along_key, along_query = column_sums(product(tl.trans(records), tl.trans(weights), total))
    else:
        along_key = tl.sum(widened(records) * tl.load(window + j)[:, None], 0)
        # The token's own coefficient stands at j = n, where the tile of records is zero.
        along_query = tl.sum(widened(records) * tl.load(window + J + j)[:, None], 0)
        if COPY:
            from_key, from_query = column_sums(total)
            along_key += from_key
            along_query += from_query
    if DENSE:
        state = dense_tile(
            checkpoint,
            checkpoint_scales,
            head * V + tile * R,
            tile_rows(R, LANES),
            K,
            KP,
            LANES,
            INNER,
            STORE,
        )
        if BY_KEY:
            key_at = vectors + (b * H + h) * (2 * K)
            query_at = key_at + K
        else:
            key_at, query_at = k + (b * G + g) * K, q + (b * G + g) * K
        along_key += flat_rows(state * tile_vector(key_at, K, KP, LANES, INNER)) * key_decay
        if not COPY:
            along_query += flat_rows(state * tile_vector(query_at, K, KP, LANES, INNER)) * query_decay
    d = strength * (value - along_key)
    tl.store(output + (b * H + h) * V + row, narrowed(along_query + d * own, output.dtype.element_ty))
    new = (head * RING + place) * V + row
    tl.store(d_buffer + new, narrowed(d, d_buffer.dtype.element_ty))
    if v_buffer is not None:
        tl.store(v_buffer + new, narrowed(value, v_buffer.dtype.element_ty))
