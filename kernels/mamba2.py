"""Mamba-2 decode kernels.

Layout (S slots, B rows of the batch; ``slots[b]`` is the row's slot, negative for a padded row, which is skipped):

    checkpoint   (S, H, P, N)            float32, float16, bfloat16
    words        (S, H, P, N / 8)        int32, eight E2M1 codes of the read copy, lowest nibble first
    scales       (S, H, P, N / 16)       uint8 E4M3;  global_scale (S, H) float32;  key_scales (S, H, N) uint8 or None
    k_buffer     (S, G, RING, N)         one record of a group is shared by its heads
    d_buffer     (S, H, RING, P)         a head's records are one block of memory
    log_decays   (S, H, RING)            float32
    cursor       (S,) int32              records in the window, 0 to L - 1; L - 1 makes this step a flush
    q, k (B, G, N);  d (B, H, P);  log_decay (B, H);  output (B, H, P)

RING is a power of two from L - 1 on, J one from L on.  The records of a window begin at ``origin`` (S,) of the ring, at
0 where that is None.  A layer's step is ``window`` and ``read`` for rows that do not flush, and beside them ``flush``
for those that do; where a flush is read from the copy (VIEWED), too, ``window`` and ``read`` are for all rows.
``slots`` has what serves all layers before and after a step.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.checkpoints import decoded_tile, store_tile
from quantlab.kernels.copy_tiles import copy_rows
from quantlab.kernels.decode import widened
from quantlab.kernels.flush import ring_place
from quantlab.kernels.key_scales import key_factors
from quantlab.kernels.packed import (
    HALF_UNIT,
    LOW_QUERY,
    half_operand,
    half_query,
    key_of_half_column,
    product,
    three_parts,
)
from quantlab.kernels.succession import let_follower_begin, wait_for_predecessor


@triton.jit
def window_kernel(
    positions, slots, origin, k_buffer, log_decays, q, k, log_decay, coefficients, decays,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr, J: tl.constexpr, RING: tl.constexpr,
    VIEWED: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Once a group: coefficients (B, H, J), what record j is multiplied by, the current token at j = position, zero
    behind it; decays (B, H) of the state.  Appends key and log decay to a window that the token does not fill.

    HEADS: a power of two >= H / G.
    """
    let_follower_begin(OVERLAP)
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    j, column, head = tl.arange(0, J), tl.arange(0, N), tl.arange(0, HEADS)
    inside = head < H // G
    h = g * (H // G) + head
    query = widened(tl.load(q + (b * G + g) * N + column))
    token = tl.load(k + (b * G + g) * N + column)
    current = tl.load(log_decay + b * H + h, mask=inside, other=0).to(tl.float32)
    if (n < 0) | (n >= (L if VIEWED else L - 1)):
        return
    keys_at = k_buffer + (slot * G + g) * (RING * N)
    start = None
    if origin is not None:
        start = tl.load(origin + slot)
    place = ring_place(j, start, RING)
    keys = widened(tl.load(keys_at + place[:, None] * N + column[None, :], mask=(j < n)[:, None], other=0))
    gates_at = log_decays + (slot * H + h)[:, None] * RING
    following = ring_place(j[None, :] + 1, start, RING)
    later = tl.load(gates_at + following, mask=(j + 1 < n)[None, :] & inside[:, None], other=0)
    oldest = log_decays + (slot * H + h) * RING + ring_place(0, start, RING)
    first = tl.load(oldest, mask=inside & (n > 0), other=0)
    keys = tl.where((j == n)[:, None], widened(token)[None, :], keys)
    match = tl.sum(keys * query[None, :], 1)
    later = tl.where((j + 1 == n)[None, :], current[:, None], later)
    weight = tl.where((j <= n)[None, :], tl.exp(tl.cumsum(later, 1, reverse=True)), 0.0) * match[None, :]
    tl.store(coefficients + (b * H + h)[:, None] * J + j[None, :], weight, mask=inside[:, None])
    whole = tl.exp(tl.sum(later, 1) + tl.where(n > 0, first, current))
    tl.store(decays + b * H + h, whole, mask=inside)
    appended = n < L - 1
    behind = ring_place(n, start, RING)
    tl.store(keys_at + behind * N + column, narrowed(token, k_buffer.dtype.element_ty), mask=appended)
    tl.store(log_decays + (slot * H + h) * RING + behind, current, mask=inside & appended)


@triton.jit
def record_columns(weight, c, first: tl.constexpr):
    """float32 weight (L,) -> (L, 8) bfloat16: three columns from ``first`` on that sum to it, zeros beside them."""
    high, middle, low = three_parts(weight)
    columns = tl.where((c == first)[None, :], high[:, None], 0.0).to(tl.bfloat16)
    columns = tl.where((c == first + 1)[None, :], middle[:, None], columns)
    return tl.where((c == first + 2)[None, :], low[:, None], columns)


@triton.jit
def read_copy_kernel(
    words, scales, global_scale, key_scales, d_buffer, positions, slots, origin, q, d, coefficients, decays, output,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, VIEWED: tl.constexpr, R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """From the NVFP4 copy: output, and the token's d behind a window that it does not fill.

    A program takes R consecutive value rows of a group's heads, of two heads at most (R divides (H / G) P, R <= P); of
    one head where there are key scales (R divides P), which make the query the head's own.
    One product of tensor cores reads the codes along the two parts of the query, another sums the records: columns 0
    and 1 of the result are the state's, 2 to 4 the records' of the first head, 5 to 7 of the second.

    What tensor cores take is made here and not in ``window_kernel``: a program waits longer for memory than it
    computes.
    """
    TILES: tl.constexpr = (H // G) * P // R
    pid = tl.program_id(0)
    b, g, first = pid // (G * TILES), (pid // TILES) % G, (pid % TILES) * R
    # Tensor cores sum at least 16 products; what stands behind the window is masked.
    LANES: tl.constexpr = J if J > 16 else 16
    r, j, c, column = tl.arange(0, R), tl.arange(0, LANES), tl.arange(0, 8), tl.arange(0, N)
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    if (n < 0) | (n >= (L if VIEWED else L - 1)):
        return
    h = g * (H // G) + first // P
    at = key_of_half_column(column, N)
    scaled_query = widened(tl.load(q + (b * G + g) * N + at))
    if key_scales is not None:
        scaled_query *= key_factors(tl.load(key_scales + (slot * H + h) * N + at))
    high, low, query_unit = half_query(scaled_query)
    query = tl.where((c == 0)[:, None], high[None, :], 0.0).to(tl.float16)
    query = tl.where((c == 1)[:, None], low[None, :], query)
    row = first + r  # of the group
    state_row = (slot * H + g * (H // G)) * P + first
    tile_words = tl.load(
        words + state_row * (N // 8) + (r[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :])
    )
    tile_scales = tl.load(
        scales + state_row * (N // 16) + (r[:, None] * (N // 16) + tl.arange(0, N // 16)[None, :])
    )
    records_at = d_buffer + (slot * H + g * (H // G)) * (RING * P)
    if P % R == 0:
        place = (first // P) * (RING * P) + first % P + r
    else:
        place = (row // P) * (RING * P) + row % P
    place = tl.max_contiguous(tl.multiple_of(place, 16), 16)  # heads and tiles are multiples of 16 rows
    start = None
    if origin is not None:
        start = tl.load(origin + slot)
    record = ring_place(j, start, RING)
    records = tl.load(records_at + (place[None, :] + record[:, None] * P), mask=(j < n)[:, None], other=0)
    unit = tl.load(global_scale + slot * H + h) * HALF_UNIT * query_unit
    wait_for_predecessor(OVERLAP)
    weight = tl.load(coefficients + (b * H + h) * J + j, mask=j < J, other=0)
    own = tl.load(coefficients + (b * H + h) * J + n)
    unit *= tl.load(decays + b * H + h)
    token = tl.load(d + (b * H + g * (H // G)) * P + row)
    weights = record_columns(weight, c, 2)
    if P % R == 0:
        factor = tl.where(c == 0, unit, tl.where(c == 1, unit * LOW_QUERY, 1.0))[None, :]
    else:
        # What follows the last head of a group is no head of its own; no row of the tile belongs to it.
        second = tl.minimum(h + 1, g * (H // G) + H // G - 1)
        behind = row >= (first // P + 1) * P
        second_weight = tl.load(coefficients + (b * H + second) * J + j, mask=j < J, other=0)
        weights = tl.where((c < 5)[None, :], weights, record_columns(second_weight, c, 5))
        second_unit = tl.load(global_scale + slot * H + second) * HALF_UNIT * query_unit
        second_unit *= tl.load(decays + b * H + second)
        row_unit = tl.where(behind, second_unit, unit)[:, None]
        factor = tl.where((c[None, :] >= 5) == behind[:, None], 1.0, 0.0)
        factor = tl.where(c[None, :] == 0, row_unit, tl.where(c[None, :] == 1, row_unit * LOW_QUERY, factor))
        own = tl.where(behind, tl.load(coefficients + (b * H + second) * J + n), own)
    result = product(half_operand(tile_words, tile_scales, R, N), tl.trans(query), None)
    if d_buffer.dtype.element_ty == tl.bfloat16:
        result = product(tl.trans(records), weights, result)
        result = tl.sum(result * factor, 1)
    else:
        result = tl.sum(tl.where((c < 2)[None, :], result * factor, 0.0), 1)
        row_weight = weight[:, None]
        if P % R != 0:
            row_weight = tl.where(behind[None, :], second_weight[:, None], row_weight)
        result += tl.sum(widened(records) * row_weight, 0)
    result += widened(token) * own
    tl.store(output + (b * H + g * (H // G)) * P + row, narrowed(result, output.dtype.element_ty))
    appended = narrowed(token, d_buffer.dtype.element_ty)
    tl.store(records_at + place + ring_place(n, start, RING) * P, appended, mask=n < L - 1)


@triton.jit
def stored_rows(
    checkpoint, checkpoint_scales, state_row, R: tl.constexpr, N: tl.constexpr, STORE: tl.constexpr
):
    """float32 (R, N): value rows from ``state_row`` on, of the checkpoint or (STORE None) of a copy in its place."""
    column, r = tl.arange(0, N), tl.arange(0, R)
    if STORE is None:
        state = copy_rows(checkpoint, checkpoint_scales, None, 0, state_row, R, N)
    else:
        codes = tl.load(checkpoint + state_row * N + (r[:, None] * N + column[None, :]))
        row_scales = None
        if checkpoint_scales is not None:
            row_scales = tl.load(checkpoint_scales + state_row + r)
        state = decoded_tile(codes, row_scales, STORE)
    return state


@triton.jit
def read_kernel(
    checkpoint, checkpoint_scales, d_buffer, positions, slots, origin, q, d, coefficients, decays, output,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, VIEWED: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """From the checkpoint, or from a read copy in its place: output, and the token's d behind a window that it does not
    fill.  R value rows a program, R divides P.
    """
    TILES: tl.constexpr = P // R
    pid = tl.program_id(0)
    b, h, first = pid // (H * TILES), (pid // TILES) % H, (pid % TILES) * R
    g = h // (H // G)
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    column, r, j = tl.arange(0, N), tl.arange(0, R), tl.arange(0, J)
    if (n < 0) | (n >= (L if VIEWED else L - 1)):
        return
    row, record = first + r, (slot * H + h) * (RING * P)
    state_row = (slot * H + h) * P + first
    state = stored_rows(checkpoint, checkpoint_scales, state_row, R, N, STORE)
    start = None
    if origin is not None:
        start = tl.load(origin + slot)
    place = ring_place(j, start, RING)
    records = tl.load(
        d_buffer + (record + first) + (place[:, None] * P + r[None, :]), mask=(j < n)[:, None], other=0
    )
    query = widened(tl.load(q + (b * G + g) * N + column))
    wait_for_predecessor(OVERLAP)
    weight = tl.load(coefficients + (b * H + h) * J + j)
    own = tl.load(coefficients + (b * H + h) * J + n)
    token = tl.load(d + (b * H + h) * P + row)
    result = tl.sum(state * query[None, :], 1) * tl.load(decays + b * H + h)
    result += tl.sum(widened(records) * weight[:, None], 0)
    result += widened(token) * own
    tl.store(output + (b * H + h) * P + row, narrowed(result, output.dtype.element_ty))
    appended = narrowed(token, d_buffer.dtype.element_ty)
    tl.store(d_buffer + record + ring_place(n, start, RING) * P + row, appended, mask=n < L - 1)


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("stream",))
def step_kernel(
    checkpoint, checkpoint_scales, positions, slots, q, k, d, log_decay, output, store_numbers, sequence_ids, seed,
    stream,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """The state of every token rewritten, R value rows a program; R divides P."""
    PER_HEAD: tl.constexpr = P // R
    pid = tl.program_id(0)
    b, h = pid // (H * PER_HEAD), (pid // PER_HEAD) % H
    g = h // (H // G)
    if tl.load(positions + b) < 0:
        return
    slot = tl.load(slots + b).to(tl.int64)
    p, column = (pid % PER_HEAD) * R + tl.arange(0, R), tl.arange(0, N)
    at = checkpoint + (slot * H + h) * (P * N) + (p[:, None] * N + column[None, :])
    row_scales = None
    if checkpoint_scales is not None:
        row_scales = tl.load(checkpoint_scales + (slot * H + h) * P + p)
    state = decoded_tile(tl.load(at), row_scales, STORE)
    decay = tl.exp(tl.load(log_decay + b * H + h).to(tl.float32))
    key = widened(tl.load(k + (b * G + g) * N + column))
    query = widened(tl.load(q + (b * G + g) * N + column))
    value = widened(tl.load(d + (b * H + h) * P + p))
    folded = state * decay + value[:, None] * key[None, :]
    result = tl.sum(folded * query[None, :], 1)
    tl.store(output + (b * H + h) * P + p, narrowed(result, output.dtype.element_ty))
    scales_at = None
    if checkpoint_scales is not None:
        scales_at = checkpoint_scales + (slot * H + h) * P + p
    quad = ((h * P + p)[:, None] * (N // 4) + tl.arange(0, N // 4)[None, :]).to(tl.uint32)
    number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
    sequence, key = tl.load(sequence_ids + slot).to(tl.uint32), tl.load(seed)
    store_tile(at, scales_at, None, folded, quad, number, sequence, stream.to(tl.uint32), key, STORE, ROUNDS)
