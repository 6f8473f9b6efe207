"""The first half of a flush of Mamba-2: fold the window into the checkpoint, read, round, store.

A program takes R value rows of one head of one row of the batch.  The read copy needs the whole head's largest stored
number first, so each program leaves that of its rows in ``largest``, and ``copies`` encodes in a launch of its own.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.decode import widened
from quantlab.kernels.arithmetic import INTERPRETED
from quantlab.kernels.checkpoints import decoded_tile, rounded_tile
from quantlab.kernels.mamba2 import record_decays
from quantlab.kernels.packed import add_product, prefetch, three_parts
from quantlab.kernels.random import element_words


@triton.jit
def fold_kernel(
    flush_rows, flush_count, slots, checkpoint, checkpoint_scales, k_buffer, d_buffer, log_decays, q, k, d, log_decay,
    output, largest, store_numbers, sequence_ids, seed, stream,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STORE: tl.constexpr, ROUNDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """C columns at a time; all of them (N) where a value row has a scale.

    largest (B, H, P / R): of |stored|, at the index of the flush; None without a read copy.
    """
    TILES: tl.constexpr = P // R
    total = tl.load(flush_count) * (H * TILES)
    r, j, c = tl.arange(0, R), tl.arange(0, L), tl.arange(0, C)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        i, h, first = item // (H * TILES), (item // TILES) % H, (item % TILES) * R
        b = tl.load(flush_rows + i)
        slot = tl.load(slots + b).to(tl.int64)
        g = h // (H // G)
        head = slot * H + h
        state_at = checkpoint + (head * P + first) * N
        keys_at = k_buffer + (slot * G + g) * (L * N)
        records_at = d_buffer + head * (L * P) + first
        current = tl.load(log_decay + b * H + h).to(tl.float32)
        weight, whole = record_decays(log_decays + head * L, current, j, L - 1)
        token = widened(tl.load(d + (b * H + h) * P + first + r))
        if AHEAD:
            later = tl.minimum(item + tl.num_programs(0), total - 1)
            i2, h2, first2 = later // (H * TILES), (later // TILES) % H, (later % TILES) * R
            slot2 = tl.load(slots + tl.load(flush_rows + i2)).to(tl.int64)
            LINE: tl.constexpr = 1024 // checkpoint.dtype.element_ty.primitive_bitwidth
            line = tl.arange(0, R * N // LINE)
            prefetch(checkpoint + ((slot2 * H + h2) * P + first2) * N + line * LINE)
            prefetch(d_buffer + (slot2 * H + h2) * (L * P) + first2 + j * P)
        row_scales = None
        if checkpoint_scales is not None:
            row_scales = tl.load(checkpoint_scales + head * P + first + r)
        records = tl.load(records_at + (j[None, :] * P + r[:, None]), mask=(j < L - 1)[None, :], other=0)
        high, middle, low = three_parts(widened(records) * weight[None, :])
        result = tl.zeros((R,), tl.float32)
        most = 0.0
        for part in tl.range(N // C, disallow_acc_multi_buffer=True):
            column = part * C + c
            at = state_at + (r[:, None] * N + column[None, :])
            codes = tl.load(at)
            token_key = widened(tl.load(k + (b * G + g) * N + column))
            query = widened(tl.load(q + (b * G + g) * N + column))
            keys = tl.load(keys_at + (j[:, None] * N + column[None, :]), mask=(j < L - 1)[:, None], other=0)
            keys = keys.to(tl.bfloat16)
            window = add_product(low, keys, None, not INTERPRETED)
            window = add_product(middle, keys, window, not INTERPRETED)
            window = add_product(high, keys, window, not INTERPRETED)
            folded = decoded_tile(codes, row_scales, STORE) * whole + window
            folded += token[:, None] * token_key[None, :]
            random = None
            if STORE.stochastic:
                counter = (h * P + first + r)[:, None] * (N // 4) + (part * (C // 4) + tl.arange(0, C // 4))[None, :]
                number = tl.load(store_numbers + slot).to(tl.uint32)
                sequence = tl.load(sequence_ids + slot).to(tl.uint32)
                random = element_words(
                    counter.to(tl.uint32), number, sequence, stream.to(tl.uint32), tl.load(seed), ROUNDS
                )
            codes, new_scales, stored = rounded_tile(folded, random, STORE)
            tl.store(at, codes)
            if checkpoint_scales is not None:
                tl.store(checkpoint_scales + head * P + first + r, new_scales)
            result += tl.sum(folded * query[None, :], 1)
            most = tl.maximum(most, tl.max(tl.abs(stored)))
        tl.store(output + (b * H + h) * P + first + r, result.to(output.dtype.element_ty))
        if largest is not None:
            tl.store(largest + (i * H + h) * TILES + first // R, most)
