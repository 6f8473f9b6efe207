"""A flush of Mamba-2: fold the window into the checkpoint, read, round, store, and encode the read copy.

The global scale of an NVFP4 copy needs the largest stored number of a whole head, so a program folds all of it, tile by
tile, and then reads it again, from cache, to encode.  Of the other copies a program has a tile, whose rows it reads
again in the same way.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.checkpoints import decoded_tile, store_tile
from quantlab.kernels.copies import encode_rows, store_key_scales
from quantlab.kernels.decode import widened
from quantlab.kernels.packed import exact_product, three_parts
from quantlab.kernels.plain_copies import encode_plain_rows
from quantlab.kernels.scales import float_scale


@triton.jit
def ring_place(j, start, RING: tl.constexpr):
    """Where record j stands in a ring that starts at ``start``, or None for one that never moves."""
    if start is None:
        place = j
    else:
        place = (start + j) & (RING - 1)
    return place


@triton.jit
def record_decays(gates_at, current, j, n, start, RING: tl.constexpr):
    """What each record has decayed by, 1 for the current token at j = n, 0 behind it; and the whole window.

    The decay since a record is summed over the later records themselves: a difference of two totals cancels.
    """
    later = tl.load(gates_at + ring_place(j + 1, start, RING), mask=j + 1 < n, other=0)
    later = tl.where(j + 1 == n, current, later)
    weight = tl.where(j <= n, tl.exp(tl.cumsum(later, 0, reverse=True)), 0.0)
    first = tl.where(n > 0, tl.load(gates_at + ring_place(0, start, RING)), current)
    whole = tl.sum(later, 0) + tl.where(n > 0, first, current)
    return weight, tl.exp(whole)


@triton.jit
def fold_rows(
    b, h, slot, first, weight, whole, checkpoint, checkpoint_scales, k_buffer, d_buffer, q, k, d, output,
    start, number, sequence, stream, key,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, RING: tl.constexpr,
    R: tl.constexpr, LANES: tl.constexpr, C: tl.constexpr, STORE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Fold, output, round and store R value rows of a head from ``first`` on; returns the largest |stored|.

    weight: (LANES,), of ``record_decays``; tensor cores sum at least 16 products, so LANES may be more than L.
    Without a token (q None) its record stands in the window, too, and nothing is put out; without output neither.
    """
    HELD: tl.constexpr = L if q is None else L - 1
    r, j, c = tl.arange(0, R), tl.arange(0, LANES), tl.arange(0, C)
    g, head = h // (H // G), slot * H + h
    state_at = checkpoint + (head * P + first) * N
    keys_at = k_buffer + (slot * G + g) * (RING * N)
    records_at = d_buffer + head * (RING * P) + first
    place = ring_place(j, start, RING)
    if q is not None:
        token = widened(tl.load(d + (b * H + h) * P + first + r))
    row_scales, scales_at = None, None
    if checkpoint_scales is not None:
        scales_at = checkpoint_scales + head * P + first + r
        row_scales = tl.load(scales_at)
    records = tl.load(records_at + (place[None, :] * P + r[:, None]), mask=(j < HELD)[None, :], other=0)
    weighted = widened(records) * weight[None, :]
    high, middle, low = three_parts(weighted)
    result = tl.zeros((R,), tl.float32)
    most = 0.0
    for part in tl.range(N // C):
        column = part * C + c
        at = state_at + (r[:, None] * N + column[None, :])
        codes = tl.load(at)
        if q is not None:
            token_key = widened(tl.load(k + (b * G + g) * N + column))
            query = widened(tl.load(q + (b * G + g) * N + column))
        keys = tl.load(keys_at + (place[:, None] * N + column[None, :]), mask=(j < HELD)[:, None], other=0)
        if k_buffer.dtype.element_ty == tl.bfloat16:
            window = exact_product(high, middle, low, keys, None)
        else:
            window = tl.dot(weighted, widened(keys), input_precision="ieee")
        folded = decoded_tile(codes, row_scales, STORE) * whole + window
        if q is not None:
            folded += token[:, None] * token_key[None, :]
            result += tl.sum(folded * query[None, :], 1)
        quad = (h * P + first + r)[:, None] * (N // 4) + (part * (C // 4) + tl.arange(0, C // 4))[None, :]
        quad = quad.to(tl.uint32)
        stored = store_tile(at, scales_at, None, folded, quad, number, sequence, stream, key, STORE, ROUNDS)
        most = tl.maximum(most, stored)
    if output is not None:
        tl.store(output + (b * H + h) * P + first + r, narrowed(result, output.dtype.element_ty))
    return most


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("stream",))
def flush_kernel(
    flush_rows, flush_count, slots, checkpoint, checkpoint_scales, words, scales, global_scale, key_scales, k_buffer,
    d_buffer, log_decays, origin, q, k, d, log_decay, output, store_numbers, sequence_ids, seed, stream,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, R: tl.constexpr, C: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, STORE: tl.constexpr,
    ROUNDS: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of ``flush_rows``.  Programs share the heads of all rows, with an NVFP4 copy; otherwise their tiles.

    A token completes the window, or, without one (q to output None), the window is complete and the first L records of
    a ring of RING are folded, from ``origin`` (S,) on.  origin None: the ring starts at 0.  output None with a token:
    it is read elsewhere.  J: a power of two >= L.

    R value rows are folded at a time, C columns at a time; all of them (N) where a value row has a scale.  E rows of
    the read copy are encoded at a time.

    words, scales, global_scale: of an NVFP4 copy, BLOCK what makes its codes; of another copy codes as bytes, its
    scales, and no global scale, BLOCK what makes it of a tile; None without a copy.  key_scales: None but for an NVFP4
    copy that has them; they take a pass over the head of their own, between fold and encode.
    """
    TILES: tl.constexpr = P // R
    PER_ITEM: tl.constexpr = TILES if global_scale is not None else 1
    PER_HEAD: tl.constexpr = TILES // PER_ITEM
    total = tl.load(flush_count) * (H * PER_HEAD)
    LANES: tl.constexpr = J if J > 16 else 16
    j = tl.arange(0, LANES)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        b, h = tl.load(flush_rows + item // (H * PER_HEAD)), (item // PER_HEAD) % H
        slot = tl.load(slots + b).to(tl.int64)
        head = slot * H + h
        start = None
        if origin is not None:
            start = tl.load(origin + slot)
        gates_at = log_decays + head * RING
        if q is not None:
            current = tl.load(log_decay + b * H + h).to(tl.float32)
        else:
            current = tl.load(gates_at + ring_place(L - 1, start, RING))
        weight, whole = record_decays(gates_at, current, j, L - 1, start, RING)
        number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
        sequence, key = tl.load(sequence_ids + slot).to(tl.uint32), tl.load(seed)
        most = 0.0
        for tile in tl.range(PER_ITEM):
            first = (item % PER_HEAD + tile) * R
            stored = fold_rows(
                b, h, slot, first, weight, whole, checkpoint, checkpoint_scales, k_buffer, d_buffer, q, k, d, output,
                start, number, sequence, stream.to(tl.uint32), key, H, G, P, N, L, RING, R, LANES, C, STORE, ROUNDS,
            )  # fmt: skip
            most = tl.maximum(most, stored)
        if words is not None and global_scale is None:
            tl.debug_barrier()  # the rows are read again, by other lanes than stored them
            for part in tl.range(R // E):
                first = (item % PER_HEAD) * R + part * E
                encode_plain_rows(
                    checkpoint, checkpoint_scales, words, scales, head, first, P, N, E, N, STORE, BLOCK
                )
        if global_scale is not None:
            tl.debug_barrier()  # the head is read again, by other lanes than stored it
            inverse = None
            if key_scales is not None:
                inverse, most = store_key_scales(
                    checkpoint, checkpoint_scales, key_scales, head, P, N, E, WIDTH, STORE
                )
            shared, _ = float_scale(most, 1.0, GLOBAL)
            tl.store(global_scale + head, shared)
            for tile in tl.range(P // E):
                encode_rows(
                    checkpoint,
                    checkpoint_scales,
                    words,
                    scales,
                    head,
                    tile * E,
                    shared,
                    inverse,
                    P,
                    N,
                    E,
                    WIDTH,
                    STORE,
                    BLOCK,
                )
