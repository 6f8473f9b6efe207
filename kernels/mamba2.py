"""Mamba-2 decode kernels.

Layout (S slots, B rows of the batch; ``slots[b]`` is the row's slot, negative for a padded row, which is skipped):

    checkpoint   (S, H, P, N)            float32, float16, bfloat16
    words        (S, H, P, N / 8)        int32, eight E2M1 codes of the read copy, lowest nibble first
    scales       (S, H, P, N / 16)       uint8 E4M3;  global_scale (S, H) float32
    k_buffer     (S, G, L, N)            one record of a group is shared by its heads
    d_buffer     (S, H, L, P)            a head's records are one block of memory
    log_decays   (S, H, L)               float32
    cursor       (S,) int32              records in the window, 0 to L - 1; L - 1 makes this step a flush
    q, k (B, G, N);  d (B, H, P);  log_decay (B, H);  output (B, H, P)

A layer's step is three launches: ``window`` and ``read`` for rows that do not flush, beside them ``flush`` for those
that do.  ``slots`` has what serves all layers before and after a step.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.checkpoints import decoded_tile, rounded_tile
from quantlab.kernels.decode import widened
from quantlab.kernels.nvfp4_encode import element_stochastic
from quantlab.kernels.packed import COPY_UNIT, add_product, key_of_column, operand, three_parts
from quantlab.kernels.random import element_words
from quantlab.kernels.rounding import encode


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
def window_kernel(
    positions, slots, k_buffer, log_decays, q, k, log_decay, coefficients, decays,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Once a group, for rows that do not flush: coefficients (B, H, L), what record j is multiplied by, the current
    token at j = position, zero behind it; decays (B, H) of the state.  Appends key and log decay to the window.

    HEADS: a power of two >= H / G.
    """
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    j, column, head = tl.arange(0, L), tl.arange(0, N), tl.arange(0, HEADS)
    inside = head < H // G
    h = g * (H // G) + head
    query = widened(tl.load(q + (b * G + g) * N + column))
    token = tl.load(k + (b * G + g) * N + column)
    current = tl.load(log_decay + b * H + h, mask=inside, other=0).to(tl.float32)
    if (n < 0) | (n == L - 1):
        return
    keys_at = k_buffer + (slot * G + g) * (L * N)
    keys = widened(tl.load(keys_at + j[:, None] * N + column[None, :], mask=(j < n)[:, None], other=0))
    gates_at = log_decays + (slot * H + h)[:, None] * L
    later = tl.load(gates_at + j[None, :] + 1, mask=(j + 1 < n)[None, :] & inside[:, None], other=0)
    first = tl.load(log_decays + (slot * H + h) * L, mask=inside & (n > 0), other=0)
    keys = tl.where((j == n)[:, None], widened(token)[None, :], keys)
    match = tl.sum(keys * query[None, :], 1)
    later = tl.where((j + 1 == n)[None, :], current[:, None], later)
    weight = tl.where((j <= n)[None, :], tl.exp(tl.cumsum(later, 1, reverse=True)), 0.0) * match[None, :]
    tl.store(coefficients + (b * H + h)[:, None] * L + j[None, :], weight, mask=inside[:, None])
    whole = tl.sum(later, 1) + tl.where(n > 0, first, current)
    tl.store(decays + b * H + h, tl.exp(whole), mask=inside)
    tl.store(keys_at + n * N + column, narrowed(token, k_buffer.dtype.element_ty))
    tl.store(log_decays + (slot * H + h) * L + n, current, mask=inside)


@triton.jit
def columns(query, dtype: tl.constexpr):
    """float32 (N,) -> bfloat16 (N, 8), columns that sum to it: the first alone where it was bfloat16."""
    high, middle, low = three_parts(query)
    place = tl.arange(0, 8)[None, :]
    right = tl.where(place == 0, high[:, None], 0.0).to(tl.bfloat16)
    if dtype != tl.bfloat16:
        right = tl.where(place == 1, middle[:, None], right)
        right = tl.where(place == 2, low[:, None], right)
    return right


@triton.jit
def read_kernel(
    words, scales, global_scale, checkpoint, checkpoint_scales, k_buffer, d_buffer, log_decays, positions, slots,
    q, k, d, log_decay, coefficients, decays, output,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Rows that do not flush: output, and the token's record behind the window.

    A program takes TILES tiles of R value rows of one group, which share q and the products k_j . q.  The state is the
    NVFP4 copy, or the checkpoint where ``words`` is None.
    """
    PER_HEAD: tl.constexpr = (P + R - 1) // R
    CHUNKS: tl.constexpr = (H // G) * PER_HEAD // TILES
    pid = tl.program_id(0)
    b, g = pid // (G * CHUNKS), (pid // CHUNKS) % G
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    column, r, j = tl.arange(0, N), tl.arange(0, R), tl.arange(0, L)
    query_at = q + (b * G + g) * N
    if (n < 0) | (n == L - 1):
        return
    if coefficients is None:
        query = widened(tl.load(query_at + column))
        token_key = tl.load(k + (b * G + g) * N + column)
        keys_at = k_buffer + (slot * G + g) * (L * N)
        keys = tl.load(keys_at + j[:, None] * N + column[None, :], mask=(j < n)[:, None], other=0)
        if words is not None:
            match = tl.sum(
                add_product(keys.to(tl.bfloat16), columns(query, q.dtype.element_ty), None, ASM), 1
            )
        else:
            match = tl.sum(widened(keys) * query[None, :], 1)
        match = tl.where(j == n, tl.sum(widened(token_key) * query, 0), match)
        if pid % CHUNKS == 0:
            tl.store(keys_at + n * N + column, narrowed(token_key, k_buffer.dtype.element_ty))
    elif words is None:
        query = widened(tl.load(query_at + column))
    if words is not None:
        right = columns(widened(tl.load(query_at + key_of_column(column, N, WIDTH))), q.dtype.element_ty)
    for i in tl.range(TILES, num_stages=STAGES):
        tile = (pid % CHUNKS) * TILES + i
        h = g * (H // G) + tile // PER_HEAD
        first = (tile % PER_HEAD) * R
        row, record = first + r, (slot * H + h) * (L * P)
        state_row = (slot * H + h) * P + first
        if words is not None:
            tile_words = tl.load(
                words + state_row * (N // 8) + (r[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :])
            )
            tile_scales = tl.load(
                scales + state_row * (N // 16) + (r[:, None] * (N // 16) + tl.arange(0, N // 16)[None, :])
            )
            unit = tl.load(global_scale + slot * H + h) * COPY_UNIT
        else:
            state = tl.load(checkpoint + state_row * N + (r[:, None] * N + column[None, :]))
            row_scales = None
            if checkpoint_scales is not None:
                row_scales = tl.load(checkpoint_scales + state_row + r)
        records = tl.load(
            d_buffer + (record + first) + (j[:, None] * P + r[None, :]), mask=(j < n)[:, None], other=0
        )
        if coefficients is None:
            gates_at = log_decays + (slot * H + h) * L
            current = tl.load(log_decay + b * H + h).to(tl.float32)
            weight, whole = record_decays(gates_at, current, j, n)
            weight *= match
            own = tl.sum(tl.where(j == n, weight, 0.0), 0)
            if first == 0:
                tl.store(gates_at + n, current)
        else:
            weight = tl.load(coefficients + (b * H + h) * L + j)
            own = tl.load(coefficients + (b * H + h) * L + n)
            whole = tl.load(decays + b * H + h)
        token = tl.load(d + (b * H + h) * P + row)
        if words is not None:
            left = operand(tile_words, tile_scales, R, N, WIDTH, ASM)
            result = tl.sum(add_product(left, right, None, ASM), 1) * (whole * unit)
        else:
            result = tl.sum(decoded_tile(state, row_scales, STORE) * query[None, :], 1) * whole
        result += tl.sum(widened(records) * weight[:, None], 0)
        result += widened(token) * own
        tl.store(output + (b * H + h) * P + row, narrowed(result, output.dtype.element_ty))
        tl.store(d_buffer + record + n * P + row, narrowed(token, d_buffer.dtype.element_ty))


@triton.jit
def kept(
    x, random, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """float32 x as the checkpoint keeps it.  NATIVE: the device's own conversion, where it rounds to nearest."""
    if ELEMENT is None:
        value = x
    elif NATIVE and ROUNDING == "nearest":
        value = x.to(dtype)
    else:
        if ROUNDING == "stochastic" and BITS == 32:
            codes = element_stochastic(x, random, ELEMENT)
        else:
            codes = encode(x, random, ELEMENT, ROUNDING, BITS)
        value = codes.to(tl.uint16).to(dtype, bitcast=True)
    return value


@triton.jit
def random_tile(
    h, row, slot, store_numbers, sequence_ids, seed, stream, P: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Random words (rows, N) of a head's value rows, of the store after the slot's last one."""
    counter = (h * P + row)[:, None] * (N // 4) + tl.arange(0, N // 4)[None, :]
    number = (tl.load(store_numbers + slot) + 1).to(tl.uint32)
    sequence = tl.load(sequence_ids + slot).to(tl.uint32)
    return element_words(counter.to(tl.uint32), number, sequence, stream.to(tl.uint32), tl.load(seed), ROUNDS)


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
    random = None
    if STORE.stochastic:
        random = random_tile(h, p, slot, store_numbers, sequence_ids, seed, stream, P, N, ROUNDS)
    codes, row_scales, _ = rounded_tile(folded, random, STORE)
    tl.store(at, codes)
    if checkpoint_scales is not None:
        tl.store(checkpoint_scales + (slot * H + h) * P + p, row_scales)
    result = tl.sum(folded * query[None, :], 1)
    tl.store(output + (b * H + h) * P + p, narrowed(result, output.dtype.element_ty))
