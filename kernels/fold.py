"""The first half of a flush of Mamba-2: fold the window into the checkpoint, read, round, store.

A program takes R value rows of one head of one row of the batch.  The read copy needs the whole head's largest stored
number first, so each program leaves that of its rows in ``largest``, and ``copies`` encodes in a launch of its own.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.checkpoints import decoded_tile, store_tile
from quantlab.kernels.decode import widened
from quantlab.kernels.packed import product, three_parts


@triton.jit
def record_decays(gates_at, current, j, n):
    """What each record has decayed by, 1 for the current token at j = n, 0 behind it; and the whole window.

    The decay since a record is summed over the later records themselves: a difference of two totals cancels.
    """
    later = tl.load(gates_at + j + 1, mask=j + 1 < n, other=0)
    later = tl.where(j + 1 == n, current, later)
    weight = tl.where(j <= n, tl.exp(tl.cumsum(later, 0, reverse=True)), 0.0)
    first = tl.where(n > 0, tl.load(gates_at), current)
    whole = tl.sum(later, 0) + tl.where(n > 0, first, current)
    return weight, tl.exp(whole)


@triton.jit
def fold_kernel(
    flush_rows, flush_count, slots, checkpoint, checkpoint_scales, k_buffer, d_buffer, log_decays, q, k, d, log_decay,
    output, largest, store_numbers, sequence_ids, seed, stream,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STORE: tl.constexpr, ROUNDS: tl.constexpr,
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
        row_scales, scales_at = None, None
        if checkpoint_scales is not None:
            scales_at = checkpoint_scales + head * P + first + r
            row_scales = tl.load(scales_at)
        records = tl.load(records_at + (j[None, :] * P + r[:, None]), mask=(j < L - 1)[None, :], other=0)
        weighted = widened(records) * weight[None, :]
        high, middle, low = three_parts(weighted)
        number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
        sequence = tl.load(sequence_ids + slot).to(tl.uint32)
        key = tl.load(seed)
        result = tl.zeros((R,), tl.float32)
        most = 0.0
        for part in tl.range(N // C, disallow_acc_multi_buffer=True):
            column = part * C + c
            at = state_at + (r[:, None] * N + column[None, :])
            codes = tl.load(at)
            token_key = widened(tl.load(k + (b * G + g) * N + column))
            query = widened(tl.load(q + (b * G + g) * N + column))
            keys = tl.load(keys_at + (j[:, None] * N + column[None, :]), mask=(j < L - 1)[:, None], other=0)
            if k_buffer.dtype.element_ty == tl.bfloat16:
                window = product(low, keys, None)
                window = product(middle, keys, window)
                window = product(high, keys, window)
            else:
                window = tl.dot(weighted, widened(keys), input_precision="ieee")
            folded = decoded_tile(codes, row_scales, STORE) * whole + window
            folded += token[:, None] * token_key[None, :]
            result += tl.sum(folded * query[None, :], 1)
            quad = (h * P + first + r)[:, None] * (N // 4) + (part * (C // 4) + tl.arange(0, C // 4))[None, :]
            quad = quad.to(tl.uint32)
            stored = store_tile(
                at,
                scales_at,
                None,
                folded,
                quad.to(tl.uint32),
                number,
                sequence,
                stream.to(tl.uint32),
                key,
                STORE,
                ROUNDS,
            )
            most = tl.maximum(most, stored)
        tl.store(output + (b * H + h) * P + first + r, narrowed(result, output.dtype.element_ty))
        if largest is not None:
            tl.store(largest + (i * H + h) * TILES + first // R, most)
