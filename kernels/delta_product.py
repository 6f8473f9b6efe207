"""The fold of a delta rule's window as matrix products: rounded, stored and encoded by one program a head.

    w d = M (v - S_0 P)        S = S_0 whole + (w d) Q

with the matrix M, the keys P and Q times the decays up to and behind them, and the decay of the whole window as
``delta_systems`` has left them, or keys as they stand and gamma of all tokens under one decay a head.  A float32 factor
is three bfloat16 that sum to it, so products on tensor cores keep float32 accuracy: with bfloat16 keys exactly but for
the sums' own roundings, otherwise but for terms of 2^-24.

Products are batched, a warp each: those of several warps together would be asynchronous, and of another layout.

An NVFP4 copy's global scale needs all of a head, which four warps do not hold: they fold it tile by tile, and read
again what they have stored, from cache.  So few warps leave room for the reads beside them.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.copies import store_key_scales
from quantlab.kernels.decode import e2m1, e4m3, widened
from quantlab.kernels.delta_pieces import (
    PIECE,
    afresh,
    columns_of_lane,
    decoded_lanes,
    decoded_piece,
    encode_rows,
    lanes_of_piece,
    operand,
    piece_columns,
    piece_of_operand,
    piece_offsets,
    right_operand,
    right_piece,
    row_of_lane,
    row_of_piece,
    row_of_record,
    stored_rows,
)
from quantlab.kernels.delta_window import factors_of, ring_place
from quantlab.kernels.packed import exact_product, parts_product, three_parts, wide_product
from quantlab.kernels.scales import float_scale

ROOT: tl.constexpr = tl.constexpr(2.0**63)
"""``decode.e2m1`` is off by 2^126."""


@triton.jit
def parts_of(at, APART: tl.constexpr):
    """What ``delta_systems.store_parts`` has stored."""
    return tl.load(at), tl.load(at + APART), tl.load(at + 2 * APART)


@triton.jit
def copy_along_key(words, scales, key_scales, first, key, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """(NVFP4 copy) k / global scale in rows first + r of all rows, (R,); key: a pointer to K numbers.

    key_scales: of the head, None without.
    """
    r, word = tl.arange(0, R)[:, None], tl.arange(0, KP // 8)[None, :]
    inside = word < K // 8
    codes = tl.load(words + first * (K // 8) + (r * (K // 8) + word), mask=inside, other=0)
    codes = codes.to(tl.uint32, bitcast=True)
    scale = tl.load(scales + first * (K // 16) + (r * (K // 16) + word // 2), mask=inside, other=0)
    total = tl.zeros((R, KP // 8), tl.float32)
    for position in tl.static_range(8):
        numbers = widened(tl.load(key + 8 * word + position, mask=inside, other=0)) * ROOT
        if key_scales is None:
            total += e2m1(codes, position) * numbers
        else:  # of any size, so codes come first
            numbers *= factors_of(key_scales, 8 * word + position, K)
            total += (e2m1(codes, position) * ROOT) * numbers
    if key_scales is not None:
        total *= 1 / ROOT
    return tl.sum(total * ROOT * e4m3(scale), 1)


@triton.jit
def window_piece(
    k_buffer, origin, slot, b, g, k, record, FIRST: tl.constexpr, G: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Key dims FIRST to FIRST + PIECE of a window's keys, the token's as record L - 1, for ``right_piece``."""
    column = piece_columns(R) + FIRST
    at = k_buffer + (((slot * G + g) * RING + ring_place(origin, slot, record, RING)) * K + column)
    if k is not None:
        at = tl.where(record == L - 1, k + ((b * G + g) * K + column), at)
    return tl.load(at, mask=record < (L if k is not None else L - 1), other=0)


@triton.jit
def fold_rows(
    flush, tile, flush_rows, slots, origin, words, scales, global_scale, key_scales, checkpoint, checkpoint_scales,
    k_buffer, d_buffer, v_buffer, q, k, v, beta, output, systems, gammas, keys_before, keys_after, store_numbers,
    sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Tile of R value rows of head ``flush`` of the flushing rows; returns magnitudes (R, 4) whose largest is that of
    what is stored.  See ``product_fold_kernel``.
    """
    HELD: tl.constexpr = L if q is not None else L - 1
    PIECES: tl.constexpr = K // PIECE
    RAW: tl.constexpr = v_buffer is not None
    i, h = flush // H, flush % H
    b = tl.load(flush_rows + i)
    slot = tl.load(slots + b).to(tl.int64)
    g, head = h // (H // G), slot * H + h
    first = head * V + tile * R
    at = checkpoint + first * K + piece_offsets(R, K)
    stored, row_scales = (), None
    for c in tl.static_range(PIECES):
        stored += (tl.load(at + c * PIECE),)
    if STORE.scale is not None:
        row_scales = tl.load(checkpoint_scales + first + row_of_lane(R))
    # Numbers of records and vectors over them are (4, 8, R / 16, 2, 4), as a product of 16 columns leaves its sums.
    record = columns_of_lane(R, 16)
    row = tile * R + row_of_piece(R)[:, :, :, :, None]
    held_at = (head * RING + ring_place(origin, slot, record, RING)) * V + row
    wanted = widened(tl.load((v_buffer if RAW else d_buffer) + held_at, mask=record < L - 1, other=0))
    if q is not None:
        value_at = tl.broadcast_to((b * H + h) * V + row, record.shape)
        wanted += widened(tl.load(v + value_at, mask=record == L - 1, other=0))
    right_row = row_of_record(16)[:, :, :, :, None]
    matrix = tl.load(systems + flush * (J * J) + (right_row * J + record))
    before_at, after_at = keys_before, keys_after
    right_at = right_row[:, :, :, :, :, None] * K + piece_columns(R)
    if BY_KEY:
        before_at += flush * (3 * J * K)
        after_at += flush * (3 * J * K)
    else:
        after_at += flush * (J * K)
        gamma = tl.load(gammas + flush * J + record)
        whole = tl.load(gammas + flush * J + HELD - 1)

    predicted = None
    if RAW or (q is not None and not KEY_COPY):
        for c in tl.static_range(PIECES):
            high, middle, low = three_parts(operand(decoded_piece(stored[c], row_scales, R, STORE), R))
            if BY_KEY:
                key_high, key_middle, key_low = parts_of(before_at + (right_at + c * PIECE), J * K)
                predicted = parts_product(
                    high,
                    middle,
                    low,
                    right_piece(key_high, R),
                    right_piece(key_middle, R),
                    right_piece(key_low, R),
                    predicted,
                )
            else:
                keys = window_piece(
                    k_buffer,
                    origin,
                    slot,
                    b,
                    g,
                    k,
                    right_row[:, :, :, :, :, None],
                    c * PIECE,
                    G,
                    K,
                    L,
                    RING,
                    R,
                )
                predicted = exact_product(high, middle, low, right_piece(keys, R), predicted)
        predicted = tl.reshape(piece_of_operand(predicted, R), record.shape)
        if not BY_KEY:
            predicted *= gamma
    if RAW:
        wanted -= predicted
    elif q is not None:
        if KEY_COPY:
            by_head = None
            if key_scales is not None:
                by_head = key_scales + head * K
            if BY_KEY:
                along = copy_along_key(words, scales, by_head, first, gammas + (2 * flush + 1) * K, K, KP, R)
            else:
                along = copy_along_key(words, scales, by_head, first, k + (b * G + g) * K, K, KP, R) * whole
            along = tl.reshape(along * tl.load(global_scale + head), (R // 16, 2, 8))
            predicted = tl.permute(along, (2, 0, 1))[None, :, :, :, None]
        wanted = tl.where(record == L - 1, wanted - predicted, wanted)
    high, middle, low = three_parts(operand(wanted[:, :, :, :, None, :], R))
    deltas = wide_product(high, middle, low, right_operand(matrix, R), None)
    high, middle, low = three_parts(deltas)
    turned_at = after_at + (row_of_record(PIECE)[:, :, :, :, None] * J + columns_of_lane(R, PIECE))
    pieces = ()
    for c in tl.static_range(PIECES):
        state = decoded_piece(afresh(stored[c]), row_scales, R, STORE)
        if BY_KEY:
            decay = tl.load(gammas + 2 * flush * K + (piece_columns(R) + c * PIECE))
            key_high, key_middle, key_low = parts_of(turned_at + c * (PIECE * J), J * K)
            state = parts_product(
                high,
                middle,
                low,
                right_operand(key_high, R),
                right_operand(key_middle, R),
                right_operand(key_low, R),
                operand(state * decay, R),
            )
        else:
            keys = right_operand(tl.load(turned_at + c * (PIECE * J)), R)
            state = exact_product(high, middle, low, keys, operand(state * whole, R))
        pieces += (piece_of_operand(state, R),)
    result = tl.zeros((4, 8, R // 16, 2), tl.float32)
    lanes = ()
    for c in tl.static_range(PIECES):
        if q is not None:
            query = widened(tl.load(q + (b * G + g) * K + (piece_columns(R) + c * PIECE)))
            result += tl.sum(tl.sum(pieces[c] * query, 5), 4)
        lanes += (lanes_of_piece(pieces[c], R),)
    if q is not None:
        result = tl.broadcast_to(tl.sum(result, 0, keep_dims=True), result.shape)
        output_at = tl.broadcast_to((b * H + h) * V + tile * R + row_of_piece(R), result.shape)
        one = tl.arange(0, 4)[:, None, None, None] == 0
        tl.store(output + output_at, narrowed(result, output.dtype.element_ty), mask=one)
    number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
    sequence = tl.load(sequence_ids + slot).to(tl.uint32)
    stream = tl.full((1, 1), random_stream, tl.int32).to(tl.uint32)
    names = (number, sequence, stream, tl.load(seed))
    counter = (h * V + tile * R) * (K // 4)
    lanes, row_scales = stored_rows(
        lanes, checkpoint, checkpoint_scales, first, counter, names, R, K, STORE, ROUNDS
    )
    most = tl.zeros((R, 4), tl.float32)
    for c in tl.static_range(PIECES):
        values = tl.abs(decoded_lanes(lanes[c], row_scales, STORE))
        most = tl.maximum(most, tl.max(tl.reshape(values, (R, 4, PIECE // 4)), 2))
    return most


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("random_stream",))
def product_fold_kernel(
    flush_rows, flush_count, slots, origin, words, scales, global_scale, key_scales, code_halves, scale_pairs,
    checkpoint, checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, systems, gammas, keys_before,
    keys_after, store_numbers, sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, ROUNDS: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold, output, round and store R value rows of a head of the flushing rows at a time, R / 16 warps; with an NVFP4
    copy all of a head one after another, and then the copy.

    words, code_halves, scale_pairs: the copy's codes as int32 and as int16, and its scales as int16; None without one.
    key_scales: None but for a copy that has them; then a head is read once more, from cache, between fold and encode.
    d are derived again where there is a v_buffer; without one only the token's is missing, whose S k comes from the
    copy with KEY_COPY.  Without a token (q to output None) L - 1 records are the whole window, and nothing is put out.
    """
    TOGETHER: tl.constexpr = V // R if code_halves is not None else 1
    ITEMS: tl.constexpr = V // (R * TOGETHER)
    total = tl.load(flush_count) * (H * ITEMS)
    # Invariants of the loops would live in registers all the time.
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1, disable_licm=True):
        flush, first = item // ITEMS, item % ITEMS * TOGETHER
        most = tl.zeros((R, 4), tl.float32)
        for tile in tl.range(first, first + TOGETHER, num_stages=1, disable_licm=True):
            magnitudes = fold_rows(
                flush, tile, flush_rows, slots, origin, words, scales, global_scale, key_scales, checkpoint,
                checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, systems, gammas, keys_before,
                keys_after, store_numbers, sequence_ids, seed, random_stream,
                H, G, V, K, KP, L, J, RING, R, STORE, BY_KEY, KEY_COPY, ROUNDS,
            )  # fmt: skip
            most = tl.maximum(most, magnitudes)
        if code_halves is not None:
            slot = tl.load(slots + tl.load(flush_rows + flush // H)).to(tl.int64)
            head = slot * H + flush % H
            amax, by_head = tl.max(most), None
            tl.debug_barrier()  # other lanes read the rows and the old copy
            if key_scales is not None:
                WIDTH: tl.constexpr = 128 // checkpoint.dtype.element_ty.primitive_bitwidth
                by_head = key_scales + head * K
                _, amax = store_key_scales(
                    checkpoint, checkpoint_scales, key_scales, head, V, K, 16, WIDTH, STORE
                )
                tl.debug_barrier()  # other lanes read the key scales
            shared, _ = float_scale(amax, 1.0, GLOBAL)
            tl.store(global_scale + head, shared)
            for tile in tl.range(TOGETHER, num_stages=1, disable_licm=True):
                encode_rows(
                    checkpoint, checkpoint_scales, by_head, head * V + tile * R, shared, code_halves, scale_pairs, R, K,
                    STORE, BLOCK,
                )  # fmt: skip
