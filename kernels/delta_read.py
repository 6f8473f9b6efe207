"""The read of a delta rule: a token whose window is not full, through the stored state and the window.

    p = S' k        d = beta (v - p)        o = S' q + d (k . q)

with S' k and S' q as in ``delta_window``, whose coefficients a launch before has written.  Both come out of one pass
over the stored state: of an NVFP4 copy as columns of one matrix product with its codes (``packed``), whose operand
takes what an NVFP4 code is, exactly; of anything else as sums of float32 products.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.kernels.delta_tiles import copy_tile, dense_tile, row_sums, tile_columns, tile_rows
from quantlab.kernels.delta_window import (
    both_columns,
    coefficient_columns,
    column_sums,
    entries,
    ring_place,
)
from quantlab.kernels.packed import COPY_UNIT, add_product, key_of_column, operand


@triton.jit
def copy_operand(
    words, scales, first, r, START: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Columns START to START + SIZE of the NVFP4 copy's rows first + r as a bfloat16 operand (R, SIZE)."""
    word = START // 8 + tl.arange(0, SIZE // 8)
    block = START // 16 + tl.arange(0, SIZE // 16)
    tile = tl.load(words + first * (K // 8) + (r[:, None] * (K // 8) + word[None, :]))
    tile_scales = tl.load(scales + first * (K // 16) + (r[:, None] * (K // 16) + block[None, :]))
    return operand(tile, tile_scales, R, SIZE, WIDTH, NATIVE)


@triton.jit
def copy_vectors(
    key, query, START: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    """What ``copy_operand`` is multiplied by: (SIZE, 8) of the vectors behind two pointers."""
    column = START + key_of_column(tl.arange(0, SIZE), SIZE, WIDTH)
    return both_columns(widened(tl.load(key + column)), widened(tl.load(query + column)), PARTS)


@triton.jit
def record_sums(
    d_buffer, origin, slot, head, first_row, r, n, from_key, from_query, total, V: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """sum_j coefficient_j d_j in rows first_row + r of a head, along key and query, (R,) each.

    total: (R, 8) to which a bfloat16 window is added by tensor cores, or None.
    """
    j = tl.arange(0, J)
    at = (head * RING + ring_place(origin, slot, j, RING))[:, None] * V + (first_row + r)[None, :]
    records = tl.load(d_buffer + at, mask=(j < n)[:, None], other=0)
    if records.dtype == tl.bfloat16:
        right = coefficient_columns(from_key, from_query)
        along_key, along_query = column_sums(add_product(tl.trans(records), right, total, NATIVE))
    else:
        records = widened(records)
        along_key = tl.sum(records * from_key[:, None], 0)
        along_query = tl.sum(records * from_query[:, None], 0)
        if total is not None:
            from_state, of_query = column_sums(total)
            along_key += from_state
            along_query += of_query
    return along_key, along_query


@triton.jit
def flat_rows(x):
    """``row_sums`` as (R,)."""
    sums = row_sums(x)
    return tl.reshape(sums, (sums.shape[0] * 8,))


@triton.jit
def read_kernel(
    codes, scales, global_scale, checkpoint, checkpoint_scales, d_buffer, v_buffer, positions, slots, origin,
    q, k, v, beta, coefficients, decays, vectors, output,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, STORE: tl.constexpr, COPY: tl.constexpr,
    COPY_ELEMENT: tl.constexpr, KEY_COPY: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows that do not flush: output (B, H, V), and d (and v) behind the window.

    A program takes TILES tiles of R value rows of one key head, or of one head where the decay is one of key channels
    (``vectors`` (B, H, 2, K) instead of ``decays`` (B, H)).  COPY: name of the copy's format, None without one; codes
    are int32 words for nvfp4.  SIZE: the largest power of two in K.  KEY_COPY: whether the copy serves S k, too.
    """
    SHARED: tl.constexpr = H // G if vectors is None else 1
    PER_HEAD: tl.constexpr = V // R
    CHUNKS: tl.constexpr = SHARED * PER_HEAD // TILES
    UNITS: tl.constexpr = H // SHARED
    PACKED: tl.constexpr = COPY == "nvfp4"
    DENSE: tl.constexpr = COPY is None or not KEY_COPY
    pid = tl.program_id(0)
    b, unit = pid // (UNITS * CHUNKS), (pid // CHUNKS) % UNITS
    n = tl.load(positions + b)
    if (n < 0) | (n == L - 1):
        return
    slot = tl.load(slots + b).to(tl.int64)
    r, j, column = tl.arange(0, R), tl.arange(0, J), tile_columns(KP, INNER)
    place = ring_place(origin, slot, n, RING)
    if vectors is None:
        key_at, query_at = k + (b * G + unit) * K, q + (b * G + unit) * K
    else:
        key_at = vectors + (b * H + unit) * (2 * K)
        query_at = key_at + K
    if PACKED:
        PARTS: tl.constexpr = 1 if key_at.dtype.element_ty == tl.bfloat16 else 3
        right = copy_vectors(key_at, query_at, 0, SIZE, PARTS, WIDTH)
        if SIZE < K:
            right_rest = copy_vectors(key_at, query_at, SIZE, K - SIZE, PARTS, WIDTH)
    if DENSE or not PACKED:
        key, query = entries(key_at, column, K), entries(query_at, column, K)
    for i in tl.range(TILES, num_stages=STAGES):
        tile = (pid % CHUNKS) * TILES + i
        h = unit * SHARED + tile // PER_HEAD
        first_row = (tile % PER_HEAD) * R
        head = slot * H + h
        first = head * V + first_row
        at = (b * H + h) * V + first_row + r
        value = widened(tl.load(v + at))
        strength = widened(tl.load(beta + b * H + h))
        from_key = tl.load(coefficients + (b * H + h) * (2 * J) + j)
        from_query = tl.load(coefficients + (b * H + h) * (2 * J) + J + j)
        own = tl.load(coefficients + (b * H + h) * (2 * J) + J + n)
        whole = 1.0
        if vectors is None:
            whole = tl.load(decays + b * H + h)
        if PACKED:
            left = copy_operand(codes, scales, first, r, 0, SIZE, K, R, WIDTH, NATIVE)
            total = add_product(left, right, None, NATIVE)
            if SIZE < K:
                left = copy_operand(codes, scales, first, r, SIZE, K - SIZE, K, R, WIDTH, NATIVE)
                total = add_product(left, right_rest, total, NATIVE)
            unit_scale = tl.load(global_scale + head) * COPY_UNIT
            total *= whole * unit_scale
            if not KEY_COPY:
                total = tl.where((tl.arange(0, 8) < 3)[None, :], 0.0, total)
        else:
            total = None
        along_key, along_query = record_sums(
            d_buffer, origin, slot, head, first_row, r, n, from_key, from_query, total, V, J, RING, NATIVE
        )
        if COPY is not None and not PACKED:
            state = copy_tile(
                codes, scales, global_scale, head, first, tile_rows(R), K, KP, INNER, COPY, COPY_ELEMENT
            )
            along_query += flat_rows(state * query) * whole
            if KEY_COPY:
                along_key += flat_rows(state * key) * whole
        if DENSE:
            state = dense_tile(checkpoint, checkpoint_scales, first, tile_rows(R), K, KP, INNER, STORE)
            along_key += flat_rows(state * key) * whole
            if COPY is None:
                along_query += flat_rows(state * query) * whole
        d = strength * (value - along_key)
        result = along_query + d * own
        tl.store(output + at, narrowed(result, output.dtype.element_ty))
        record = (head * RING + place) * V + first_row + r
        tl.store(d_buffer + record, narrowed(d, d_buffer.dtype.element_ty))
        if v_buffer is not None:
            tl.store(v_buffer + record, narrowed(value, v_buffer.dtype.element_ty))
