"""The first half of a flush of Mamba-2: fold the window into the checkpoint, read, round, store.

A program takes R value rows of one head of one row of the batch.  The read copy needs the whole head's largest stored
number first, so each program leaves that of its rows in ``largest``, and ``copies`` encodes in a launch of its own.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.decode import widened
from quantlab.kernels.mamba2 import kept, random_tile, record_decays
from quantlab.kernels.packed import add_product, three_parts


@triton.jit
def fold_kernel(
    flush_rows, flush_count, slots, checkpoint, k_buffer, d_buffer, log_decays, q, k, d, log_decay, output, largest,
    store_numbers, sequence_ids, seed, stream,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, ROUNDS: tl.constexpr,
    MMA: tl.constexpr,
):  # fmt: skip
    """largest (B, H, P / R): of |stored|, at the index of the flush; None without a read copy."""
    TILES: tl.constexpr = P // R
    total = tl.load(flush_count) * (H * TILES)
    r, j, column = tl.arange(0, R), tl.arange(0, L), tl.arange(0, N)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        i, h, first = item // (H * TILES), (item // TILES) % H, (item % TILES) * R
        b = tl.load(flush_rows + i)
        slot = tl.load(slots + b).to(tl.int64)
        g = h // (H // G)
        head = slot * H + h
        at = checkpoint + (head * P + first) * N + (r[:, None] * N + column[None, :])
        state = tl.load(at)
        keys_at = k_buffer + (slot * G + g) * (L * N)
        records_at = d_buffer + head * (L * P) + first
        current = tl.load(log_decay + b * H + h).to(tl.float32)
        weight, whole = record_decays(log_decays + head * L, current, j, L - 1)
        token = widened(tl.load(d + (b * H + h) * P + first + r))
        token_key = widened(tl.load(k + (b * G + g) * N + column))
        query = widened(tl.load(q + (b * G + g) * N + column))
        if MMA:
            keys = tl.load(keys_at + (j[:, None] * N + column[None, :]), mask=(j < L - 1)[:, None], other=0)
            keys = keys.to(tl.bfloat16)
            records = tl.load(records_at + (j[None, :] * P + r[:, None]), mask=(j < L - 1)[None, :], other=0)
            high, middle, low = three_parts(widened(records) * weight[None, :])
            window = add_product(low, keys, None, NATIVE)
            window = add_product(middle, keys, window, NATIVE)
            window = add_product(high, keys, window, NATIVE)
            folded = widened(state) * whole + window
        else:
            folded = widened(state) * whole
            for n in tl.static_range(L - 1):
                own = tl.sum(tl.where(j == n, weight, 0.0), 0)
                key = widened(tl.load(keys_at + n * N + column))
                folded += (widened(tl.load(records_at + n * P + r)) * own)[:, None] * key[None, :]
        folded += token[:, None] * token_key[None, :]
        random = None
        if ROUNDING == "stochastic":
            random = random_tile(h, first + r, slot, store_numbers, sequence_ids, seed, stream, P, N, ROUNDS)
        new = kept(folded, random, ELEMENT, ROUNDING, BITS, NATIVE, checkpoint.dtype.element_ty)
        tl.store(at, new)
        result = tl.sum(folded * query[None, :], 1)
        tl.store(output + (b * H + h) * P + first + r, result.to(output.dtype.element_ty))
        if largest is not None:
            tl.store(largest + (i * H + h) * TILES + first // R, tl.max(tl.abs(widened(new))))
