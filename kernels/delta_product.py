"""The fold of a delta rule's window as matrix products: rounded, stored and encoded by the program that has the head.

    w d = M (v - S_0 P)        S = S_0 whole + (w d) Q

with the matrix M, the keys P and Q times the decays up to and behind them, and the decay of the whole window as
``delta_systems`` has left them, or keys as they stand and gamma of all tokens under one decay a head.  A float32 factor
is three bfloat16 that sum to it, so products on tensor cores keep float32 accuracy: with bfloat16 keys exactly but for
the sums' own roundings, otherwise but for terms of 2^-24.

Products are batched, a warp each: those of several warps together would be asynchronous, and of another layout.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.copies import encode_rows
from quantlab.kernels.decode import e2m1, e4m3, widened
from quantlab.kernels.delta_pieces import (
    PIECE,
    afresh,
    block_maxima,
    decoded_lanes,
    decoded_piece,
    encode_head,
    key_of_place,
    lanes_of_piece,
    operand,
    piece_columns,
    piece_of_operand,
    piece_offsets,
    row_of_lane,
    stored_rows,
)
from quantlab.kernels.delta_systems import keys_of_window
from quantlab.kernels.delta_window import ring_place
from quantlab.kernels.packed import exact_product, three_parts, wide_product
from quantlab.kernels.scales import float_scale

ROOT: tl.constexpr = tl.constexpr(2.0**63)
"""``decode.e2m1`` is off by 2^126."""


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
def fold_item(
    item, flush_rows, slots, origin, words, scales, global_scale, code_halves, scale_pairs, checkpoint,
    checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, systems, gammas, keys_before,
    keys_after, store_numbers, sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, ROUNDS: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``product_fold_kernel``; returns a tile's largest stored magnitude where it is encoded later, else 0."""
    HELD: tl.constexpr = L if q is not None else L - 1
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
        stored += (tl.load(at + c * PIECE),)
    if STORE.scale is not None:
        row_scales = tl.load(checkpoint_scales + first + row_of_lane(R))
    row = tile * R + 16 * tl.arange(0, R // 16)[:, None] + tl.arange(0, 16)[None, :]
    if q is not None:
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
        whole = tl.load(gammas + flush * J + HELD - 1)
        for c in tl.static_range(PIECES):
            column = key_of_place(tl.arange(0, PIECE)) + c * PIECE
            keys += (keys_of_window(k_buffer, origin, slot, b, g, k, column, G, K, L, J, RING),)

    predicted = None
    if RAW or (q is not None and not KEY_COPY):
        for c in tl.static_range(PIECES):
            high, middle, low = three_parts(operand(decoded_piece(stored[c], row_scales, R, STORE), R))
            if BY_KEY:
                right = tl.trans(wide_keys(before_at, HELD, K, J, c * PIECE))
                predicted = wide_product(high, middle, low, right, predicted)
            else:
                predicted = exact_product(high, middle, low, tl.trans(keys[c]), predicted)
    if predicted is not None and not BY_KEY:
        predicted *= gamma[None, None, :]
    last = (j == L - 1)[None, None, :]
    wanted = widened(held)
    if RAW:
        if q is not None:
            wanted = tl.where(last, value[:, :, None], wanted)
        wanted -= predicted
    elif q is not None:
        if KEY_COPY:
            if BY_KEY:
                along = copy_along_key(words, scales, first, before_at + (L - 1) * K, K, KP, R)
            else:
                along = copy_along_key(words, scales, first, k + (b * G + g) * K, K, KP, R) * whole
            along = tl.reshape(along, (R // 16, 16)) * tl.load(global_scale + head)
        else:
            along = tl.sum(tl.where(last, predicted, 0.0), 2)
        wanted = tl.where(last, (value - along)[:, :, None], wanted)
    high, middle, low = three_parts(wanted)
    high, middle, low = three_parts(wide_product(high, middle, low, matrix, None))
    pieces = ()
    for c in tl.static_range(PIECES):
        state = decoded_piece(afresh(stored[c]), row_scales, R, STORE)
        if BY_KEY:
            decay = tl.load(gammas + flush * K + (piece_columns(R) + c * PIECE))
            state = wide_product(
                high, middle, low, wide_keys(after_at, HELD, K, J, c * PIECE), operand(state * decay, R)
            )
        else:
            state = exact_product(high, middle, low, keys[c], operand(state * whole, R))
        pieces += (piece_of_operand(state, R),)
    result = tl.zeros((4, 8, R // 16, 2), tl.float32)
    lanes = ()
    for c in tl.static_range(PIECES):
        if q is not None:
            query = widened(tl.load(q + (b * G + g) * K + (piece_columns(R) + c * PIECE)))
            result += tl.sum(tl.sum(pieces[c] * query, 5), 4)
        lanes += (lanes_of_piece(pieces[c], R),)
    if q is not None:
        result = tl.reshape(tl.sum(result, 0), (R,))
        output_at = output + (b * H + h) * V + tile * R + row_of_lane(R)
        tl.store(output_at, narrowed(result, output.dtype.element_ty))
    number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
    sequence = tl.load(sequence_ids + slot).to(tl.uint32)
    stream = tl.full((1, 1), random_stream, tl.int32).to(tl.uint32)
    names = (number, sequence, stream, tl.load(seed))
    counter = (h * V + tile * R) * (K // 4)
    lanes, row_scales = stored_rows(
        lanes, checkpoint, checkpoint_scales, first, counter, names, R, K, STORE, ROUNDS
    )
    found = 0.0
    if code_halves is not None:
        if R < V:
            most = tl.zeros((R, PIECE), tl.float32)
            for c in tl.static_range(PIECES):
                most = tl.maximum(most, tl.abs(decoded_lanes(lanes[c], row_scales, STORE)))
            found = tl.max(most)
        else:
            maxima = block_maxima(lanes, row_scales, V, STORE)
            most = maxima[0]
            for four in tl.static_range(1, len(maxima)):
                most = tl.maximum(most, maxima[four])
            shared, _ = float_scale(tl.max(most), 1.0, GLOBAL)
            tl.store(global_scale + head, shared)
            encode_head(lanes, row_scales, maxima, shared, code_halves, scale_pairs, head, V, K, STORE, BLOCK)
    return found


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("random_stream",))
def product_fold_kernel(
    flush_rows, flush_count, slots, origin, words, scales, global_scale, code_halves, scale_pairs, checkpoint,
    checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, systems, gammas, keys_before,
    keys_after, store_numbers, sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, ROUNDS: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fold, output, round and store R value rows of a head of the flushing rows at a time, R / 16 warps.

    With all of a head's rows (R = V) its NVFP4 copy is encoded, too, from the rows at hand; otherwise a program folds
    all tiles of a head and encodes what it stored, E rows of COLUMNS numbers at a time, WIDTH of which make 16 bytes
    of the checkpoint.  (Blocks lie one behind the other, so without row scales COLUMNS is any power of two in K.)
    words, code_halves, scale_pairs: the copy's codes as int32 and as int16, and its scales as int16; None without a
    copy.  d are derived again where there is a v_buffer; without one only the token's is missing, whose S k comes from
    the copy with KEY_COPY.  Without a token (q to output None) L - 1 records are the whole window; nothing is put out.
    """
    TILES: tl.constexpr = V // R
    PER_ITEM: tl.constexpr = TILES if code_halves is not None else 1
    total = tl.load(flush_count) * (H * TILES // PER_ITEM)
    # Invariants of the loop would live in registers all the time.
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1, disable_licm=True):
        if PER_ITEM == 1:
            fold_item(
                item, flush_rows, slots, origin, words, scales, global_scale, code_halves, scale_pairs, checkpoint,
                checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output, systems, gammas,
                keys_before, keys_after, store_numbers, sequence_ids, seed, random_stream,
                H, G, V, K, KP, L, J, RING, R, STORE, BY_KEY, KEY_COPY, ROUNDS, GLOBAL, BLOCK,
            )  # fmt: skip
        else:
            most = 0.0
            for tile in tl.range(TILES, num_stages=1, disable_licm=True):
                found = fold_item(
                    item * TILES + tile, flush_rows, slots, origin, words, scales, global_scale, code_halves,
                    scale_pairs, checkpoint, checkpoint_scales, k_buffer, d_buffer, v_buffer, q, k, v, beta, output,
                    systems, gammas, keys_before, keys_after, store_numbers, sequence_ids, seed, random_stream,
                    H, G, V, K, KP, L, J, RING, R, STORE, BY_KEY, KEY_COPY, ROUNDS, GLOBAL, BLOCK,
                )  # fmt: skip
                most = tl.maximum(most, found)
            slot = tl.load(slots + tl.load(flush_rows + item // H)).to(tl.int64)
            head = slot * H + item % H
            shared, _ = float_scale(most, 1.0, GLOBAL)
            tl.store(global_scale + head, shared)
            tl.debug_barrier()  # the head is read again, by other lanes than stored it
            ROWS: tl.constexpr = V * K // COLUMNS
            for part in tl.range(ROWS // E):
                encode_rows(
                    checkpoint, checkpoint_scales, words, scales, head, part * E, shared, ROWS, COLUMNS, E, WIDTH,
                    STORE, BLOCK,
                )  # fmt: skip
