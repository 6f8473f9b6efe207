"""A flush of Mamba-2 whose heads stay in registers: fold, read, round, store and encode in one pass.

The read copy's global scale needs the largest stored number of a head, so a program has all of one.  What decides the
time is how long a head takes from its first load to its last store: a fixed number of programs runs beside the reads,
so registers and instructions are shared with them.  Hence the token is a record among the others, the slot of the next
head is looked up while this one is computed, and tensor cores take all operands from shared memory.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.checkpoints import decoded_lanes, rounded_tile
from quantlab.kernels.decode import widened
from quantlab.kernels.flush import ring_place
from quantlab.kernels.key_scales import inverse_factors, scale_codes
from quantlab.kernels.lanes import column_of_place, from_rows, lane_offsets, line_offsets, placed, to_rows
from quantlab.kernels.nvfp4_encode import block_maxima, encode_blocks, packed_tops
from quantlab.kernels.packed import product, three_parts
from quantlab.kernels.random import element_words
from quantlab.kernels.scales import float_scale


@triton.jit
def lane_words(
    first, number, sequence, stream, key, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Random words of R whole value rows of a sequence's state from element ``first`` on, in lane form."""
    line = (first + line_offsets(R, N, N, RUN, WARPS)) // 4
    run = (RUN // 4) * tl.arange(0, 4)
    counter = line[None, :, None] + run[None, None, :] + tl.arange(0, RUN // 4)[:, None, None]
    words = element_words(counter.to(tl.uint32), number, sequence, stream, key, ROUNDS)
    words = tl.reshape(words, (RUN // 4, R * N // (4 * RUN), 4, 4))
    return tl.reshape(tl.permute(words, (1, 2, 0, 3)), (R * N // (4 * RUN), 4 * RUN))


@triton.jit
def blocks_of(values, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr):
    """Lane form -> (16 / RUN, lines, RUN / 4, RUN): part of a block, line, block of it, place in the part."""
    PARTS: tl.constexpr = 16 // RUN  # lanes that share a block
    values = tl.reshape(values, (R * N // (4 * RUN), 4 // PARTS, PARTS, RUN))
    return tl.permute(values, (2, 0, 1, 3))


@triton.jit
def encode_lanes(
    blocks, amax, words, scales, first, shared, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr,
    WARPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The NVFP4 copy of R value rows, ``blocks_of`` them, from number ``first`` of all rows on."""
    PARTS: tl.constexpr = 16 // RUN
    LINES: tl.constexpr = R * N // (4 * RUN)
    line, lane = line_offsets(R, N, N, RUN, WARPS)[:, None], tl.arange(0, 4)[None, :]
    words += first // 8
    scales += first // 16
    nothing = 0
    if R < 64:
        # 0, but the compiler does not know.  It cannot tell that more would be aligned, so every lane stores what it
        # has; an exchange for each tile, so that a lane stores more, would take longer.
        nothing = tl.program_id(1)
    tops, scale = encode_blocks(blocks, amax, shared, BLOCK)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (LINES, 4 // PARTS, PARTS)), (LINES, 4)).to(
        tl.uint8
    )
    if R >= 64 or PARTS == 1:
        tl.store(scales + nothing + (line // 16 + lane // PARTS), scale, mask=lane % PARTS == 0)
    else:  # neighbouring addresses are what makes the compiler keep to the lanes
        tl.store(scales + nothing + (line // 16 + lane), scale, mask=lane == 0)
        if PARTS == 2:
            tl.store(scales + nothing + (line // 16 + (lane - 1)), scale, mask=lane == 2)
    tops = tl.permute(tops, (1, 2, 0, 3))
    if RUN == 4:
        packed = packed_tops(tl.reshape(tops, (LINES, 4, 4))).to(tl.int16)
        tl.store(words.to(tl.pointer_type(tl.int16)) + nothing + (line // 4 + lane), packed)
    else:
        packed = packed_tops(tl.reshape(tops, (LINES, RUN // 2, 8))).to(tl.int32, bitcast=True)
        tl.store(words + nothing + (line // 8 + tl.arange(0, RUN // 2)[None, :]), packed)


@triton.jit
def lane_sums(x, R: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """Row form of a narrow tile -> (R, 4 WARPS): what each lane sums by itself."""
    return tl.sum(tl.sum(tl.reshape(x, (R, N // (8 * WARPS), 4 * WARPS, 2)), 3), 1)


@triton.jit
def sums_of_lanes(parts, R: tl.constexpr):
    """``lane_sums`` of up to eight tiles -> the sum of each row, (8 R,): lanes meet once for all of them."""
    nothing = parts[0] * 0.0
    for _ in tl.static_range(len(parts), 8):
        parts += (nothing,)
    pairs = tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]), tl.join(parts[4], parts[5])
    low, high = tl.join(pairs[0], pairs[1]), tl.join(pairs[2], tl.join(parts[6], parts[7]))
    return tl.reshape(tl.permute(tl.sum(tl.join(low, high), 1), (3, 2, 1, 0)), (8 * R,))


@triton.jit
def record_weights(
    gates_at, current, start, L: tl.constexpr, LANES: tl.constexpr, RING: tl.constexpr, TOKEN: tl.constexpr
):
    """(LANES, 1): what record j of a full window has decayed by; and the whole window.

    Sums over the later records themselves, as in ``record_decays``, all at once.
    """
    j, i = tl.arange(0, LANES)[:, None], tl.arange(0, LANES)[None, :]
    HELD: tl.constexpr = L - 1 if TOKEN else L
    at = gates_at + ring_place(i, start, RING)
    later = tl.load(at + 0 * j, mask=(i > j) & (i < HELD), other=0)
    total = tl.sum(tl.load(at, mask=i < HELD, other=0))
    if TOKEN:
        later = tl.where((i == L - 1) & (j < L - 1), current, later)
        total += current
    return tl.exp(tl.sum(later, 1, keep_dims=True)), tl.exp(total)


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("stream",))
def flush_head_kernel(
    flush_rows, flush_count, slots, checkpoint, checkpoint_scales, words, scales, global_scale, key_scales, k_buffer,
    d_buffer, log_decays, origin, q, k, d, log_decay, output, store_numbers, sequence_ids, seed, stream,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr, STORE: tl.constexpr, ROUNDS: tl.constexpr,
    GLOBAL: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """As ``flush_kernel``, for bfloat16 records and tokens.

    R: value rows of a tile; all tiles of a head are in registers.  RUN: neighbours of a value row in a lane, 4 to 16.
    """
    TILES: tl.constexpr = P // R
    LANES: tl.constexpr = J if J > 16 else 16
    total = tl.load(flush_count) * H
    item = tl.program_id(0)
    if item >= total:
        return
    r, j, column = tl.arange(0, R), tl.arange(0, LANES), tl.arange(0, N)
    b = tl.load(flush_rows + item // H)
    slot = tl.load(slots + b).to(tl.int64)
    while item < total:
        h = item % H
        g = h // (H // G)
        head = slot * H + h
        state_at = checkpoint + head * (P * N) + lane_offsets(R, N, N, RUN, WARPS)
        codes, records, row_scales = (), (), ()
        for tile in tl.static_range(TILES):
            codes += (tl.load(state_at + tile * (R * N)),)
        start = None
        if origin is not None:
            start = tl.load(origin + slot)
        place = ring_place(j, start, RING)
        records_at = d_buffer + head * (RING * P) + (place[None, :] * P + r[:, None])
        keys_at = k_buffer + (slot * G + g) * (RING * N) + (place[:, None] * N + column[None, :])
        gates_at, current = log_decays + head * RING, 0.0
        if q is not None:  # the token is the last record
            records_at = tl.where((j == L - 1)[None, :], d + (b * H + h) * P + r[:, None], records_at)
            keys_at = tl.where((j == L - 1)[:, None], k + (b * G + g) * N + column[None, :], keys_at)
            current = tl.load(log_decay + b * H + h).to(tl.float32)
        for tile in tl.static_range(TILES):
            records += (tl.load(records_at + tile * R, mask=(j < L)[None, :], other=0),)
        keys = tl.load(keys_at, mask=(j < L)[:, None], other=0)
        weight, whole = record_weights(gates_at, current, start, L, LANES, RING, q is not None)
        following = item + tl.num_programs(0)
        next_b = tl.load(flush_rows + tl.minimum(following, total - 1) // H)
        next_slot = tl.load(slots + next_b).to(tl.int64)
        high, middle, low = three_parts(placed(widened(keys) * weight, R, N, RUN, WARPS))
        if checkpoint_scales is not None:
            scales_at = checkpoint_scales + head * P + r
            for tile in tl.static_range(TILES):
                row_scales += (tl.load(scales_at + tile * R),)
        number, sequence, key = 0, 0, 0
        if STORE.stochastic:
            number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
            sequence, key = tl.load(sequence_ids + slot).to(tl.uint32), tl.load(seed)
        query = None
        if output is not None and TILES > 1:
            query_at = q + (b * G + g) * N + lane_offsets(R, N, 0, RUN, WARPS)
            query = to_rows(widened(tl.load(query_at)), R, N, RUN, WARPS)
        blocks, maxima, results, kept = (), (), (), ()
        for tile in tl.static_range(TILES):
            window = product(records[tile], low, None)
            window = product(records[tile], middle, window)
            window = product(records[tile], high, window)
            given = None
            if checkpoint_scales is not None:
                given = row_scales[tile]
            state = decoded_lanes(to_rows(codes[tile], R, N, RUN, WARPS), given, STORE)
            folded = state * whole + window
            random = None
            if STORE.stochastic:
                first = h * (P * N) + tile * (R * N)
                random = lane_words(
                    first, number, sequence, stream.to(tl.uint32), key, R, N, RUN, WARPS, ROUNDS
                )
                random = to_rows(random, R, N, RUN, WARPS)
            stored, new_scales, values = rounded_tile(folded, random, STORE)
            tl.store(state_at + tile * (R * N), from_rows(stored, R, N, RUN, WARPS))
            if checkpoint_scales is not None:
                tl.store(scales_at + tile * R, new_scales)
            if output is not None:
                if TILES == 1:
                    query_at = q + (b * G + g) * N + lane_offsets(R, N, 0, RUN, WARPS)
                    query = to_rows(widened(tl.load(query_at)), R, N, RUN, WARPS)
                    result = tl.sum(folded * query, 1)
                    tl.store(output + (b * H + h) * P + r, narrowed(result, output.dtype.element_ty))
                else:
                    results += (lane_sums(folded * query, R, N, WARPS),)
            if key_scales is None:
                part = blocks_of(from_rows(values, R, N, RUN, WARPS), R, N, RUN)
                blocks += (part,)
                maxima += (block_maxima(part),)
            else:
                kept += (values,)
        if output is not None and TILES > 1:
            row = tl.arange(0, 8 * R)
            result = narrowed(sums_of_lanes(results, R), output.dtype.element_ty)
            tl.store(output + (b * H + h) * P + row, result, mask=row < P)
        if key_scales is not None:
            largest = tl.abs(kept[0])
            for tile in tl.static_range(1, TILES):
                largest = tl.maximum(largest, tl.abs(kept[tile]))
            exponents = scale_codes(tl.max(largest, 0))
            tl.store(
                key_scales + head * N + column_of_place(column, R, N, RUN, WARPS), exponents.to(tl.uint8)
            )
            inverse = inverse_factors(exponents)
            for tile in tl.static_range(TILES):
                divided = from_rows(kept[tile] * inverse[None, :], R, N, RUN, WARPS)
                blocks += (blocks_of(divided, R, N, RUN),)
                maxima += (block_maxima(blocks[tile]),)
        most = maxima[0]
        for tile in tl.static_range(1, TILES):
            most = tl.maximum(most, maxima[tile])
        shared, _ = float_scale(tl.max(most), 1.0, GLOBAL)
        tl.store(global_scale + head, shared)
        for tile in tl.static_range(TILES):
            first = head * (P * N) + tile * (R * N)
            encode_lanes(blocks[tile], maxima[tile], words, scales, first, shared, R, N, RUN, WARPS, BLOCK)
        item, b, slot = following, next_b, next_slot
