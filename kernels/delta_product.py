"""The fold of a delta rule's window as matrix products: rounded, stored and encoded by the program that has the head.

    w d = M (v - S_0 P)        S = S_0 whole + (w d) Q

with the matrix M, the keys P and Q times the decays up to and behind them, and the decay of the whole window as
``delta_systems`` has left them, or keys as they stand and gamma of all tokens under one decay a head.  A float32 factor
is three bfloat16 that sum to it, so products on tensor cores keep float32 accuracy: with bfloat16 keys exactly but for
the sums' own roundings, otherwise but for terms of 2^-24.

A warp has 16 value rows, in the layout of tensor cores from load to store: lane 4 s + t holds rows 8 p + s and four
neighbours of every 16 key dims, which stand for columns 2 t, 2 t + 1 of two tiles of eight (``key_of_place``).  The
key dim comes in pieces of ``PIECE``, so that the bfloat16 of only one are in registers at a time.  Products are batched,
a warp each: those of several warps together would be asynchronous, and of another layout.

A piece of R rows is stored as (4, 8, WARPS, 2, PIECE / 16, 4): t, s, warp, p, sixteen, place in it.  ``lanes`` are the
same numbers as (R, PIECE), rows ordered s, warp, p and columns t, sixteen, place.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import INTERPRETED, narrowed
from quantlab.kernels.checkpoints import (
    decoded_tile,
    distance,
    ordinary_distance,
    plain_codes,
    quick_codes,
    row_quotients,
    saturated,
    scale_of_bits,
    small_codes,
)
from quantlab.kernels.decode import e2m1, e4m3, element_value, widened
from quantlab.kernels.delta_systems import keys_of_window
from quantlab.kernels.delta_window import ring_place
from quantlab.kernels.nvfp4_encode import LIFT, SMALL, block_scales, e2m1_nearest, quotient
from quantlab.kernels.packed import product, three_parts
from quantlab.kernels.random import element_words
from quantlab.kernels.scales import float_scale

PIECE: tl.constexpr = tl.constexpr(32)
ROOT: tl.constexpr = tl.constexpr(2.0**63)
"""``decode.e2m1`` is off by 2^126."""


@triton.jit
def key_of_place(place):
    """Which key dim stands at a column of the products."""
    return 16 * (place // 16) + 4 * ((place // 2) % 4) + 2 * ((place // 8) % 2) + place % 2


@triton.jit
def row_of_lane(R: tl.constexpr):
    """Value row of each row of ``lanes``, (R,)."""
    WARPS: tl.constexpr = R // 16
    row = tl.arange(0, R)
    return 16 * ((row // 2) % WARPS) + 8 * (row % 2) + row // (2 * WARPS)


@triton.jit
def piece_offsets(R: tl.constexpr, K: tl.constexpr):
    """Offsets of a stored piece, R rows of K, from the first of its numbers."""
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    s = tl.arange(0, 8)[None, :, None, None, None, None]
    w = tl.arange(0, R // 16)[None, None, :, None, None, None]
    p = tl.arange(0, 2)[None, None, None, :, None, None]
    n = tl.arange(0, PIECE // 16)[None, None, None, None, :, None]
    column = 16 * n + 4 * t + tl.arange(0, 4)[None, None, None, None, None, :]
    return (16 * w + 8 * p + s) * K + column


@triton.jit
def piece_columns(R: tl.constexpr):
    """Key dim within a piece of every entry of a vector that each lane loads for itself."""
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    n = tl.arange(0, PIECE // 16)[None, None, None, None, :, None]
    column = 16 * n + 4 * t + tl.arange(0, 4)[None, None, None, None, None, :]
    return tl.broadcast_to(column, (4, 8, R // 16, 1, PIECE // 16, 4))


@triton.jit
def lanes_of_piece(x, R: tl.constexpr):
    """A stored piece as ``lanes``."""
    return tl.reshape(tl.permute(x, (1, 2, 3, 0, 4, 5)), (R, PIECE))


@triton.jit
def piece_of_lanes(x, R: tl.constexpr):
    """The inverse."""
    x = tl.reshape(x, (8, R // 16, 2, 4, PIECE // 16, 4))
    return tl.permute(x, (3, 0, 1, 2, 4, 5))


@triton.jit
def decoded_piece(codes, row_scales, R: tl.constexpr, STORE: tl.constexpr):
    """A stored piece's float32 values; row_scales (R,) in the order of ``lanes``, None where the format has none."""
    if STORE.scale is None:
        values = widened(codes)
    else:
        values = piece_of_lanes(decoded_tile(lanes_of_piece(codes, R), row_scales, STORE), R)
    return values


@triton.jit
def operand(x, R: tl.constexpr):
    """A stored piece as (warps, 16, PIECE), columns as ``key_of_place`` says."""
    x = tl.reshape(x, (4, 8, R // 16, 2, PIECE // 16, 2, 2))
    return tl.reshape(tl.permute(x, (2, 3, 1, 4, 5, 0, 6)), (R // 16, 16, PIECE))


@triton.jit
def piece_of_operand(x, R: tl.constexpr):
    """The inverse."""
    x = tl.reshape(x, (R // 16, 2, 8, PIECE // 16, 2, 4, 2))
    return tl.reshape(tl.permute(x, (5, 2, 0, 1, 3, 4, 6)), (4, 8, R // 16, 2, PIECE // 16, 4))


@triton.jit
def afresh(codes):
    """``codes`` as something that the compiler does not know (the grid has one dimension), so that what was made of
    them need not stay in registers.
    """
    if not INTERPRETED:
        BYTES: tl.constexpr = codes.dtype.primitive_bitwidth // 8
        if BYTES < 4:
            codes = tl.inline_asm_elementwise(
                "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; xor.b32 $0, $1, zero; }",
                "=r,r",
                [codes],
                codes.dtype,
                is_pure=True,
                pack=4 // BYTES,
            )
    return codes


@triton.jit
def each(left, right, total):
    """total + left (warps, 16, n) @ right (n, m), the same for every warp; total None for nothing."""
    right = tl.broadcast_to(right[None, :, :], (left.shape[0], right.shape[0], right.shape[1]))
    return product(left, right, total)


@triton.jit
def exact_product(high, middle, low, right, total):
    """total + the three parts of a float32 factor @ bfloat16 right."""
    total = each(low, right, total)
    total = each(middle, right, total)
    return each(high, right, total)


@triton.jit
def wide_product(high, middle, low, right, total):
    """total + the three parts of a float32 factor @ float32 right, but for terms of 2^-24 of what they sum."""
    right_high, right_middle, right_low = three_parts(right)
    total = each(low, right_high, total)
    total = each(middle, right_middle, total)
    total = each(high, right_low, total)
    total = each(middle, right_high, total)
    total = each(high, right_middle, total)
    return each(high, right_high, total)


@triton.jit
def wide_keys(keys, L: tl.constexpr, K: tl.constexpr, J: tl.constexpr, FIRST: tl.constexpr):
    """A piece of a window's float32 keys (J, K), zeros behind the token: (J, PIECE)."""
    j, column = tl.arange(0, J), key_of_place(tl.arange(0, PIECE)) + FIRST
    return tl.load(keys + (j[:, None] * K + column[None, :]), mask=(j < L)[:, None], other=0)


@triton.jit
def copy_along_key(words, scales, first, key, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """(NVFP4 copy) k / global scale in rows first + r of all rows, (R,); key: a pointer to K numbers."""
    r, word = tl.arange(0, R)[:, None], tl.arange(0, KP // 8)[None, :]
    inside = word < K // 8
    codes = tl.load(words + first * (K // 8) + (r * (K // 8) + word), mask=inside, other=0)
    codes = codes.to(tl.uint32, bitcast=True)
    scale = tl.load(scales + first * (K // 16) + (r * (K // 16) + word // 2), mask=inside, other=0)
    total = tl.zeros((R, KP // 8), tl.float32)
    for position in tl.static_range(8):
        numbers = widened(tl.load(key + 8 * word + position, mask=inside, other=0)) * ROOT
        total += e2m1(codes, position) * numbers
    return tl.sum(total * ROOT * e4m3(scale), 1)


@triton.jit
def stored_rows(
    pieces, checkpoint, checkpoint_scales, first, counter, names, R: tl.constexpr, K: tl.constexpr,
    STORE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Round the pieces (``lanes``) of R whole value rows from ``first`` on and store them; returns what they decode to.

    counter: of ``element_words`` at the first element.  names: its other arguments.
    """
    PIECES: tl.constexpr = K // PIECE
    ELEMENT: tl.constexpr = STORE.element
    at = checkpoint + first * K + piece_offsets(R, K)
    scales = 1.0
    found = ()
    if STORE.scale is not None:
        OPTIONS: tl.constexpr = STORE.scale
        bits = tl.zeros((R,), tl.int32)
        for c in tl.static_range(PIECES):
            bits = tl.maximum(bits, tl.max(pieces[c].to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
        scales = scale_of_bits(bits, OPTIONS)
        tl.store(checkpoint_scales + first + row_of_lane(R), scales)
        scaled = ()
        for c in tl.static_range(PIECES):
            scaled = scaled + (row_quotients(pieces[c], scales),)
        pieces = scaled
    QUICK: tl.constexpr = STORE.stochastic and hasattr(ELEMENT, "exponent_bits")
    ordinary = True
    if QUICK:
        beyond = tl.zeros((R, PIECE), tl.uint32)
        for c in tl.static_range(PIECES):
            beyond = tl.maximum(beyond, distance(saturated(pieces[c], ELEMENT), ELEMENT))
        ordinary = tl.max(beyond) <= ordinary_distance(ELEMENT)
    number, sequence, stream, seed = names
    quad = row_of_lane(R)[:, None] * (K // 4)
    inner = tl.arange(0, PIECE // 4)[None, :]  # t, sixteen
    quad = counter + quad + (4 * (inner % (PIECE // 16)) + inner // (PIECE // 16))
    for c in tl.static_range(PIECES):
        x = pieces[c]
        if STORE.element is None:
            codes, values = x, x
        else:
            words = None
            if STORE.stochastic:
                words = element_words((quad + c * (PIECE // 4)).to(tl.uint32), number, sequence, stream, seed, ROUNDS)
            if QUICK:
                if ordinary:
                    codes, values, _ = quick_codes(x, words, ELEMENT)
                else:
                    codes, values = general_codes(x, words, STORE)
            else:
                codes, values = general_codes(x, words, STORE)
        tl.store(at + c * PIECE, piece_of_lanes(codes, R))
        found = found + (codes,)
    return found, scales


@triton.jit
def general_codes(x, words, STORE: tl.constexpr):
    """Codes and the values that they stand for, whatever x is."""
    ELEMENT: tl.constexpr = STORE.element
    if STORE.scale is None:
        codes, values = plain_codes(x, words, STORE)
    else:
        codes = small_codes(x, words, STORE)
        values = element_value(codes, ELEMENT)
    return codes, values


@triton.jit
def block_maxima(pieces, row_scales, V: tl.constexpr, STORE: tl.constexpr):
    """Largest magnitudes of the blocks of a whole head (``lanes``): one (4, V, PIECE / 16) for every four pieces.

    Four lanes share a block, so each gets those of another piece's to derive scales from.
    """
    found = ()
    t = tl.arange(0, 4)[:, None, None]
    for four in tl.static_range(0, len(pieces), 4):
        amax = tl.zeros((4, V, PIECE // 16), tl.float32)
        for c in tl.static_range(four, min(four + 4, len(pieces))):
            blocks = tl.reshape(decoded_tile(pieces[c], row_scales, STORE), (V, 4, PIECE // 16, 4))
            largest = tl.max(tl.max(tl.abs(blocks), 3), 1)
            amax = tl.where(t == c - four, largest[None, :, :], amax)
        found = found + (amax,)
    return found


@triton.jit
def encode_head(
    pieces, row_scales, maxima, shared, code_halves, scale_pairs, head, V: tl.constexpr, K: tl.constexpr,
    STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The read copy of a whole head from its pieces (``lanes``) and their ``block_maxima`` under the global scale.

    code_halves: int16, four codes each.  scale_pairs: int16, two scales each.
    """
    PIECES: tl.constexpr = K // PIECE
    SIXTEENS: tl.constexpr = PIECE // 16
    t, row, n, place = tl.arange(0, 4), row_of_lane(V), tl.arange(0, SIXTEENS), tl.arange(0, 4)
    lift = tl.where(shared < SMALL, LIFT, 1.0)
    inner = row[:, None] * (K // 4) + 4 * n[None, :]
    half_at = code_halves + head * (V * K // 4) + (t[:, None, None] + inner[None, :, :])
    pair_at = scale_pairs + head * (V * K // 32) + row[None, :] * (K // 32) + t[:, None]
    for four in tl.static_range(0, PIECES, 4):
        scales, divisors, inverses = block_scales(maxima[four // 4] * lift, shared, lift, BLOCK)
        pairs = tl.sum(scales << (8 * n)[None, None, :], 2)
        tl.store(pair_at + four, pairs.to(tl.int16), mask=(t < PIECES - four)[:, None])
        for c in tl.static_range(four, min(four + 4, PIECES)):
            own = (t == c - four)[:, None, None]
            divisor = tl.sum(tl.where(own, divisors, 0.0), 0)
            inverse = tl.sum(tl.where(own, inverses, 0.0), 0)
            values = decoded_tile(afresh(pieces[c]), row_scales, STORE)
            blocks = tl.permute(tl.reshape(values, (V, 4, SIXTEENS, 4)), (1, 0, 2, 3))
            if shared < SMALL:  # remainders would be subnormal
                blocks *= LIFT
            divisor = tl.broadcast_to(divisor[None, :, :, None], blocks.shape)
            inverse = tl.broadcast_to(inverse[None, :, :, None], blocks.shape)
            codes = e2m1_nearest(quotient(blocks, divisor, inverse), blocks)
            halves = tl.sum(codes << (4 * place)[None, None, None, :], 3)
            tl.store(half_at + c * (PIECE // 4), halves.to(tl.int16))


@triton.jit
def fold_item(
    item, flush_rows, slots, origin, words, scales, global_scale, code_halves, scale_pairs, checkpoint,
    checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, largest, systems, gammas, keys_before,
    keys_after, store_numbers, sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, ROUNDS: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``product_fold_kernel``."""
    TILES: tl.constexpr = V // R
    PIECES: tl.constexpr = K // PIECE
    RAW: tl.constexpr = v_buffer is not None
    flush, tile = item // TILES, item % TILES
    i, h = flush // H, flush % H
    b = tl.load(flush_rows + i)
    slot = tl.load(slots + b).to(tl.int64)
    g, head, j = h // (H // G), slot * H + h, tl.arange(0, J)
    first = head * V + tile * R
    at = checkpoint + first * K + piece_offsets(R, K)
    stored, row_scales = (), None
    for c in tl.static_range(PIECES):
        stored = stored + (tl.load(at + c * PIECE),)
    if STORE.scale is not None:
        row_scales = tl.load(checkpoint_scales + first + row_of_lane(R))
    row = tile * R + 16 * tl.arange(0, R // 16)[:, None] + tl.arange(0, 16)[None, :]
    value = widened(tl.load(v + (b * H + h) * V + row))
    record = (head * RING + ring_place(origin, slot, j, RING)) * V
    held_at = record[None, None, :] + row[:, :, None]
    if RAW:
        held = tl.load(v_buffer + held_at, mask=(j < L - 1)[None, None, :], other=0)
    else:
        held = tl.load(d_buffer + held_at, mask=(j < L - 1)[None, None, :], other=0)
    matrix = tl.load(systems + flush * (J * J) + (j[None, :] * J + j[:, None]))
    keys, before_at, after_at = (), None, None
    if BY_KEY:
        before_at, after_at = keys_before + flush * (J * K), keys_after + flush * (J * K)
    else:
        gamma = tl.load(gammas + flush * J + j)
        whole = tl.load(gammas + flush * J + L - 1)
        for c in tl.static_range(PIECES):
            column = key_of_place(tl.arange(0, PIECE)) + c * PIECE
            keys = keys + (keys_of_window(k_buffer, origin, slot, b, g, k, column, G, K, L, J, RING),)

    predicted = None
    if RAW or not KEY_COPY:
        for c in tl.static_range(PIECES):
            high, middle, low = three_parts(operand(decoded_piece(stored[c], row_scales, R, STORE), R))
            if BY_KEY:
                right = tl.trans(wide_keys(before_at, L, K, J, c * PIECE))
                predicted = wide_product(high, middle, low, right, predicted)
            else:
                predicted = exact_product(high, middle, low, tl.trans(keys[c]), predicted)
    if predicted is not None and not BY_KEY:
        predicted *= gamma[None, None, :]
    last = (j == L - 1)[None, None, :]
    if RAW:
        wanted = tl.where(last, value[:, :, None], widened(held)) - predicted
    else:
        if KEY_COPY:
            if BY_KEY:
                along = copy_along_key(words, scales, first, before_at + (L - 1) * K, K, KP, R)
            else:
                along = copy_along_key(words, scales, first, k + (b * G + g) * K, K, KP, R) * whole
            along = tl.reshape(along, (R // 16, 16)) * tl.load(global_scale + head)
        else:
            along = tl.sum(tl.where(last, predicted, 0.0), 2)
        wanted = tl.where(last, (value - along)[:, :, None], widened(held))
    high, middle, low = three_parts(wanted)
    high, middle, low = three_parts(wide_product(high, middle, low, matrix, None))
    pieces = ()
    for c in tl.static_range(PIECES):
        state = decoded_piece(afresh(stored[c]), row_scales, R, STORE)
        if BY_KEY:
            decay = tl.load(gammas + flush * K + (piece_columns(R) + c * PIECE))
            state = wide_product(
                high, middle, low, wide_keys(after_at, L, K, J, c * PIECE), operand(state * decay, R)
            )
        else:
            state = exact_product(high, middle, low, keys[c], operand(state * whole, R))
        pieces = pieces + (piece_of_operand(state, R),)
    result = tl.zeros((4, 8, R // 16, 2), tl.float32)
    lanes = ()
    for c in tl.static_range(PIECES):
        query = widened(tl.load(q + (b * G + g) * K + (piece_columns(R) + c * PIECE)))
        result += tl.sum(tl.sum(pieces[c] * query, 5), 4)
        lanes = lanes + (lanes_of_piece(pieces[c], R),)
    result = tl.reshape(tl.sum(result, 0), (R,))
    output_at = output + (b * H + h) * V + tile * R + row_of_lane(R)
    tl.store(output_at, narrowed(result, output.dtype.element_ty))
    number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
    sequence = tl.load(sequence_ids + slot).to(tl.uint32)
    stream = tl.full((1, 1), random_stream, tl.int32).to(tl.uint32)
    names = (number, sequence, stream, tl.load(seed))
    counter = (h * V + tile * R) * (K // 4)
    lanes, row_scales = stored_rows(lanes, checkpoint, checkpoint_scales, first, counter, names, R, K, STORE, ROUNDS)
    if code_halves is not None:
        if R < V:
            most = tl.zeros((R, PIECE), tl.float32)
            for c in tl.static_range(PIECES):
                most = tl.maximum(most, tl.abs(decoded_tile(lanes[c], row_scales, STORE)))
            tl.store(largest + item, tl.max(most))
        else:
            maxima = block_maxima(lanes, row_scales, V, STORE)
            most = maxima[0]
            for four in tl.static_range(1, len(maxima)):
                most = tl.maximum(most, maxima[four])
            shared, _ = float_scale(tl.max(most), 1.0, GLOBAL)
            tl.store(global_scale + head, shared)
            encode_head(
                lanes, row_scales, maxima, shared, code_halves, scale_pairs, head, V, K, STORE, BLOCK
            )


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("random_stream",))
def product_fold_kernel(
    flush_rows, flush_count, slots, origin, words, scales, global_scale, code_halves, scale_pairs, checkpoint,
    checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, largest, systems, gammas, keys_before,
    keys_after, store_numbers, sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, ROUNDS: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold, output, round and store R value rows of a head of the flushing rows at a time, R / 16 warps.

    With all of a head's rows (R = V) its NVFP4 copy is encoded, too; otherwise ``largest`` (B, H, V / R), at the number
    of the flush, is the largest stored magnitude of each tile.  words, code_halves, scale_pairs: the copy's codes as
    int32 and as int16, and its scales as int16; None without a copy.  d are derived again where there is a v_buffer;
    without one only the token's is missing, whose S k comes from the copy with KEY_COPY.
    """
    total = tl.load(flush_count) * (H * (V // R))
    # Invariants of the loop would live in registers all the time.
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1, disable_licm=True):
        fold_item(
            item, flush_rows, slots, origin, words, scales, global_scale, code_halves, scale_pairs, checkpoint,
            checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, largest, systems, gammas,
            keys_before, keys_after, store_numbers, sequence_ids, seed, random_stream,
            H, G, V, K, KP, L, J, RING, R, STORE, BY_KEY, KEY_COPY, ROUNDS, GLOBAL, BLOCK,
        )  # fmt: skip
