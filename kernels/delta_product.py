"""The fold of a gated_delta window as matrix products, for bfloat16 windows and tokens.

With gamma_i the decay up to token i, w_j what record j decays by until the end, and e_ij between the two,

    d_i + beta_i sum_{j<i} e_ij (k_i . k_j) d_j = beta_i (v_i - gamma_i S_0 k_i)
    S = whole S_0 + sum_j w_j d_j k_j^T

(the chunk form of the delta rule, arXiv 2406.06484 eq. 9-11).  A float32 factor is three bfloat16 that sum to it, so
products on tensor cores keep float32 accuracy: state and keys, d and keys exactly but for the sums' own roundings, the
system's inverse and its right side but for terms of 2^-24.

The inverse of the unit lower triangular system is built from those of its diagonal blocks, whose size doubles,

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]],

so that nothing in it is larger than in the inverses of the system's own blocks (a power series in the strict part is
not: for equal keys without decay its terms reach 6435).

A tile is in the layout of tensor cores from load to store: lane 4 s + t of warp w holds rows 16 w + 8 p + s and four
neighbours of every 16 key dims, which stand for columns 2 t, 2 t + 1 of two tiles of eight (``key_of_place``).
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.kernels.delta_read import copy_operand
from quantlab.kernels.delta_window import ring_place
from quantlab.kernels.packed import (
    HALF_UNIT,
    LOW_QUERY,
    half_query,
    key_of_half_column,
    product,
    three_parts,
)


@triton.jit
def key_of_place(place):
    """Which key dim stands at a column of the products."""
    return 16 * (place // 16) + 4 * ((place // 2) % 4) + 2 * ((place // 8) % 2) + place % 2


@triton.jit
def lane_offsets(R: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """Offsets (SIZE / 16, R / (8 WARPS), WARPS, 8, 4, 4) of SIZE columns of R value rows from the first of them."""
    n = tl.arange(0, SIZE // 16)[:, None, None, None, None, None]
    p = tl.arange(0, R // (8 * WARPS))[None, :, None, None, None, None]
    w = tl.arange(0, WARPS)[None, None, :, None, None, None]
    s = tl.arange(0, 8)[None, None, None, :, None, None]
    t = tl.arange(0, 4)[None, None, None, None, :, None]
    column = 16 * n + 4 * t + tl.arange(0, 4)[None, None, None, None, None, :]
    return ((R // WARPS) * w + 8 * p + s) * K + column


@triton.jit
def to_rows(x, R: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """A tile of ``lane_offsets`` as (R, SIZE)."""
    x = tl.reshape(x, (SIZE // 16, R // (8 * WARPS), WARPS, 8, 4, 2, 2))
    return tl.reshape(tl.permute(x, (2, 1, 3, 0, 5, 4, 6)), (R, SIZE))


@triton.jit
def from_rows(x, R: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """The inverse of ``to_rows``."""
    x = tl.reshape(x, (WARPS, R // (8 * WARPS), 8, SIZE // 16, 2, 4, 2))
    return tl.reshape(tl.permute(x, (3, 1, 0, 2, 5, 4, 6)), (SIZE // 16, R // (8 * WARPS), WARPS, 8, 4, 4))


@triton.jit
def exact_product(left, right, total):
    """total + float32 left @ bfloat16 right; total None for nothing."""
    high, middle, low = three_parts(left)
    total = product(low, right, total)
    total = product(middle, right, total)
    return product(high, right, total)


@triton.jit
def wide_product(left, right):
    """float32 left @ float32 right, but for terms of 2^-24 of what they sum."""
    high, middle, low = three_parts(left)
    right_high, right_middle, right_low = three_parts(right)
    total = product(low, right_high, None)
    total = product(middle, right_middle, total)
    total = product(high, right_low, total)
    total = product(middle, right_high, total)
    total = product(high, right_middle, total)
    return product(high, right_high, total)


@triton.jit
def inverse(strict, J: tl.constexpr, LEVELS: tl.constexpr):
    """(I + strict)^-1 of a strictly lower triangular (J, J), J = 2^LEVELS."""
    i, j = tl.arange(0, J)[:, None], tl.arange(0, J)[None, :]
    result = tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        half = 1 << level
        below = (i // (2 * half) == j // (2 * half)) & (i % (2 * half) >= half) & (j % (2 * half) < half)
        block = tl.where(below, strict, 0.0)
        if half > 1:
            block = wide_product(result, wide_product(block, result))
        result -= block
    return result


@triton.jit
def keys_of_window(
    k_buffer, origin, slot, b, g, k, START: tl.constexpr, SIZE: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, J: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """SIZE columns, from key dim START on, of a full window's keys and a token's as record L - 1: (J, SIZE)."""
    j = tl.arange(0, J)
    column = START + key_of_place(tl.arange(0, SIZE))
    row = (slot * G + g) * RING + ring_place(origin, slot, j, RING)
    keys = tl.load(k_buffer + row[:, None] * K + column[None, :], mask=(j < L - 1)[:, None], other=0)
    if k is not None:
        token = tl.load(k + (b * G + g) * K + column)
        keys = tl.where((j == L - 1)[:, None], token[None, :], keys)
    return keys


@triton.jit
def window_decays(
    log_decay_buffer, origin, slot, b, h, log_decay, H: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """gamma (J,), e_ij below the diagonal (J, J), 0 elsewhere, w (J,) and whole, of a full window and a token."""
    LAST: tl.constexpr = L - 1 if log_decay is not None else L - 2
    j = tl.arange(0, J)
    at = (slot * H + h) * RING + ring_place(origin, slot, j, RING)
    gate = tl.load(log_decay_buffer + at, mask=j < L - 1, other=0)
    if log_decay is not None:
        gate = tl.where(j == L - 1, widened(tl.load(log_decay + b * H + h)), gate)
    gamma = tl.exp(tl.cumsum(gate, 0))
    below = j[:, None] > j[None, :]
    between = tl.exp(tl.cumsum(tl.where(below, gate[:, None], 0.0), 0))
    weight = tl.sum(tl.where((j == LAST)[:, None], between, 0.0), 0)
    whole = tl.sum(tl.where(j == LAST, gamma, 0.0), 0)
    return gamma, tl.where(below, between, 0.0), weight, whole


@triton.jit
def window_vectors(
    buffer, origin, slot, h, first_row, H: tl.constexpr, V: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    R: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Records of v or d in rows first_row + r of a head, (R, J) float32; zeros from record L - 1 on."""
    r, j = tl.arange(0, R), tl.arange(0, J)
    row = (slot * H + h) * RING + ring_place(origin, slot, j, RING)
    at = row[None, :] * V + (first_row + r)[:, None]
    return widened(tl.load(buffer + at, mask=(j < L - 1)[None, :], other=0))


@triton.jit
def copy_along_key(
    words, scales, global_scale, head, first, key, K: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr
):
    """(NVFP4 copy) k in rows first + r of all rows, (R,); key: a pointer to bfloat16."""
    REST: tl.constexpr = K - SIZE
    r = tl.arange(0, R)
    total = key_product(copy_operand(words, scales, first, r, 0, SIZE, K, R), key, SIZE)
    if REST > 0:
        total += key_product(copy_operand(words, scales, first, r, SIZE, REST, K, R), key + SIZE, REST)
    return total * (tl.load(global_scale + head) * HALF_UNIT)


@triton.jit
def key_product(left, key, SIZE: tl.constexpr):
    """``half_operand`` (R, SIZE) times the vector behind ``key``, (R,)."""
    c = tl.arange(0, 8)[None, :]
    high, low, unit = half_query(widened(tl.load(key + key_of_half_column(tl.arange(0, SIZE), SIZE))))
    right = tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], 0.0)).to(tl.float16)
    total = product(left, right, None)
    return tl.sum(tl.where(c == 1, total * LOW_QUERY, total), 1) * unit


@triton.jit
def product_tile(
    item, flush_rows, slots, origin, words, scales, global_scale, checkpoint, k_buffer, d_buffer, v_buffer,
    beta_buffer, log_decay_buffer, q, k, v, log_decay, beta, output, largest,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, LEVELS: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr,
    KEY_COPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Tile ``item`` of the flushing rows: fold, output, store in float32, and the largest stored magnitude.

    d are derived again where there is a v_buffer; without one only the token's is missing, whose S' k comes from the
    NVFP4 copy with KEY_COPY.  Without a token (q to output None) L - 1 <= J records are the whole window, and nothing
    is put out.  The key dim comes in two parts, so that the bfloat16 of only one are in registers at a time.
    """
    TILES: tl.constexpr = V // R
    ONE: tl.constexpr = KP // 2
    TWO: tl.constexpr = K - ONE
    i, h, tile = item // (H * TILES), (item // TILES) % H, item % TILES
    b = tl.load(flush_rows + i)
    slot = tl.load(slots + b).to(tl.int64)
    g, head, j = h // (H // G), slot * H + h, tl.arange(0, J)
    first = head * V + tile * R
    at_one = checkpoint + first * K + lane_offsets(R, K, ONE, WARPS)
    at_two = checkpoint + first * K + ONE + lane_offsets(R, K, TWO, WARPS)
    one, two = to_rows(tl.load(at_one), R, ONE, WARPS), to_rows(tl.load(at_two), R, TWO, WARPS)
    row = h * V + tile * R + tl.arange(0, R)
    if q is not None:
        value, strength = widened(tl.load(v + b * (H * V) + row)), widened(tl.load(beta + b * H + h))
    keys_one = keys_of_window(k_buffer, origin, slot, b, g, k, 0, ONE, G, K, L, J, RING)
    keys_two = keys_of_window(k_buffer, origin, slot, b, g, k, ONE, TWO, G, K, L, J, RING)
    gamma, between, weight, whole = window_decays(
        log_decay_buffer, origin, slot, b, h, log_decay, H, L, J, RING
    )

    scores = product(keys_one, tl.trans(keys_one), None)
    scores = product(keys_two, tl.trans(keys_two), scores) * between
    if v_buffer is not None or (q is not None and not KEY_COPY):
        predicted = exact_product(one, tl.trans(keys_one), None)
        predicted = exact_product(two, tl.trans(keys_two), predicted) * gamma[None, :]
    last = j == L - 1
    if v_buffer is not None:
        values = window_vectors(v_buffer, origin, slot, h, tile * R, H, V, L, J, R, RING)
        at = head * RING + ring_place(origin, slot, j, RING)
        strengths = tl.load(beta_buffer + at, mask=j < L - 1, other=0)
        if q is not None:
            values = tl.where(last[None, :], value[:, None], values)
            strengths = tl.where(last, strength, strengths)
        solved = inverse(scores * strengths[:, None], J, LEVELS)
        deltas = wide_product((values - predicted) * strengths[None, :], tl.trans(solved))
    else:
        deltas = window_vectors(d_buffer, origin, slot, h, tile * R, H, V, L, J, R, RING)
        if q is not None:
            if KEY_COPY:
                key = k + (b * G + g) * K
                along_key = copy_along_key(words, scales, global_scale, head, first, key, K, SIZE, R) * whole
            else:
                along_key = tl.sum(tl.where(last[None, :], predicted, 0.0), 1)
            from_key = tl.sum(tl.where(last[:, None], scores, 0.0), 0)
            along_key += tl.sum(deltas * from_key[None, :], 1)
            deltas = tl.where(last[None, :], (strength * (value - along_key))[:, None], deltas)
    deltas *= weight[None, :]
    one = one * whole + exact_product(deltas, keys_one, None)
    two = two * whole + exact_product(deltas, keys_two, None)
    if q is not None:
        query = q + (b * G + g) * K
        query_one = widened(tl.load(query + key_of_place(tl.arange(0, ONE))))
        query_two = widened(tl.load(query + ONE + key_of_place(tl.arange(0, TWO))))
        result = tl.sum(one * query_one[None, :], 1) + tl.sum(two * query_two[None, :], 1)
        tl.store(output + b * (H * V) + row, narrowed(result, output.dtype.element_ty))
    tl.store(at_one, from_rows(one, R, ONE, WARPS))
    tl.store(at_two, from_rows(two, R, TWO, WARPS))
    if largest is not None:
        most = tl.max(tl.maximum(tl.max(tl.abs(one), 1), tl.max(tl.abs(two), 1)), 0)
        tl.store(largest + item, most)
