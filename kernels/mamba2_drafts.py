"""Mamba-2 kernels that verify drafted tokens: T of them read the state once, and no state is stored.

Memory as in ``mamba2``, but for a window that is a ring of RING records, a power of two, which starts at ``origin``
(S,) and has room for drafts behind the cursor.  Inputs have a token dimension behind the batch:

    q, k (B, T, G, N);  d (B, T, H, P);  log_decay (B, T, H);  output (B, T, H, P)

Draft t of a row whose window holds n records reads the records 0 to n - 1 and, as records n to n + t, the drafts up to
itself.  What the accepted drafts complete is folded by ``flush``.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.kernels.flush import ring_place
from quantlab.kernels.key_scales import key_factors
from quantlab.kernels.mamba2 import stored_rows
from quantlab.kernels.packed import (
    HALF_UNIT,
    LOW_QUERY,
    half_operand,
    half_queries,
    key_of_half_column,
    product,
    three_parts,
)


@triton.jit
def held_gates(ring_at, drafts_at, j, n, start, inside, RING: tl.constexpr, T: tl.constexpr, H: tl.constexpr):
    """Log decays (HEADS, RING) of the records j, of the window and then of the drafts; 0 behind them.

    ring_at, drafts_at: pointers (HEADS,) to those of record 0 and of draft 0.
    """
    draft = j - n
    old = (j < n)[None, :] & inside[:, None]
    new = ((draft >= 0) & (draft < T))[None, :] & inside[:, None]
    gates = tl.load(ring_at[:, None] + ring_place(j, start, RING)[None, :], mask=old, other=0)
    drafted = tl.load(drafts_at[:, None] + draft[None, :] * H, mask=new, other=0).to(tl.float32)
    return tl.where(new, drafted, gates)


@triton.jit
def draft_window_kernel(
    positions, slots, origin, k_buffer, log_decays, q, k, log_decay, coefficients, decays,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, RING: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Once a group: coefficients (B, T, H, RING), what record j is multiplied by for draft t, zero behind it; decays
    (B, T, H) of the state.  Keys and log decays of the drafts go behind the window.

    HEADS: a power of two >= H / G.
    """
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    if n < 0:
        return
    j, column, head = tl.arange(0, RING), tl.arange(0, N), tl.arange(0, HEADS)
    inside = head < H // G
    h = g * (H // G) + head
    start = tl.load(origin + slot)
    draft = j - n
    keys_at = k_buffer + (slot * G + g) * (RING * N)
    place = ring_place(j, start, RING)
    old = tl.load(keys_at + place[:, None] * N + column[None, :], mask=(j < n)[:, None], other=0)
    drafted = ((draft >= 0) & (draft < T))[:, None]
    new_at = k + ((b * T + draft) * G + g)[:, None] * N + column[None, :]
    keys = tl.where(drafted, widened(tl.load(new_at, mask=drafted, other=0)), widened(old))
    ring_at, drafts_at = log_decays + (slot * H + h) * RING, log_decay + b * T * H + h
    gates = held_gates(ring_at, drafts_at, j, n, start, inside, RING, T, H)
    later = held_gates(ring_at, drafts_at, j + 1, n, start, inside, RING, T, H)
    for t in tl.static_range(T):
        query = widened(tl.load(q + ((b * T + t) * G + g) * N + column))
        match = tl.sum(keys * query[None, :], 1)
        since = tl.cumsum(tl.where((j < n + t)[None, :], later, 0.0), 1, reverse=True)
        weight = tl.where((j <= n + t)[None, :], tl.exp(since) * match[None, :], 0.0)
        head_at = (b * T + t) * H + h
        tl.store(coefficients + head_at[:, None] * RING + j[None, :], weight, mask=inside[:, None])
        whole = tl.sum(tl.where((j <= n + t)[None, :], gates, 0.0), 1)
        tl.store(decays + head_at, tl.exp(whole), mask=inside)
        at = ring_place(n + t, start, RING)
        token = tl.load(k + ((b * T + t) * G + g) * N + column)
        tl.store(keys_at + at * N + column, narrowed(token, k_buffer.dtype.element_ty))
        current = tl.load(log_decay + head_at, mask=inside, other=0).to(tl.float32)
        tl.store(ring_at + at, current, mask=inside)


@triton.jit
def draft_read_copy_kernel(
    words, scales, global_scale, key_scales, d_buffer, positions, slots, origin, q, d, coefficients, decays, output,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RING: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the NVFP4 copy: the outputs of all drafts, and their d behind the window.  R value rows of a head a program,
    R divides P.

    One product of tensor cores reads the codes along the queries of all tokens, two columns a token: the parts of its
    query.  COLUMNS: a power of two >= 2 T, at least the 8 that tensor cores take.
    """
    TILES: tl.constexpr = P // R
    LANES: tl.constexpr = RING if RING > 16 else 16
    pid = tl.program_id(0)
    b, h, first = pid // (H * TILES), (pid // TILES) % H, (pid % TILES) * R
    g = h // (H // G)
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    if n < 0:
        return
    r, j, c, column = tl.arange(0, R), tl.arange(0, LANES), tl.arange(0, COLUMNS), tl.arange(0, N)
    start = tl.load(origin + slot)
    t = c // 2
    upper = (c % 2 == 0)[None, :]
    at = key_of_half_column(column, N)
    query_at = q + ((b * T + t) * G + g)[:, None] * N + at[None, :]
    queries = widened(tl.load(query_at, mask=(t < T)[:, None], other=0))
    if key_scales is not None:
        queries *= key_factors(tl.load(key_scales + (slot * H + h) * N + at))[None, :]
    high, low, query_unit = half_queries(queries)
    query = tl.where(tl.trans(upper), high, low)
    state_row = (slot * H + h) * P + first
    tile_words = tl.load(
        words + state_row * (N // 8) + (r[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :])
    )
    tile_scales = tl.load(
        scales + state_row * (N // 16) + (r[:, None] * (N // 16) + tl.arange(0, N // 16)[None, :])
    )
    records_at = d_buffer + (slot * H + h) * (RING * P) + first
    place = ring_place(j, start, RING)
    records = tl.load(records_at + (place[:, None] * P + r[None, :]), mask=(j < n)[:, None], other=0)
    head_at = (b * T + t) * H + h
    weights_at = coefficients + head_at[None, :] * RING + j[:, None]
    weights = tl.load(weights_at, mask=(j < n)[:, None] & (t < T)[None, :], other=0)
    unit = query_unit * tl.where(c % 2 == 0, HALF_UNIT, HALF_UNIT * LOW_QUERY)
    unit *= tl.load(decays + head_at, mask=t < T, other=0) * tl.load(global_scale + slot * H + h)
    result = product(half_operand(tile_words, tile_scales, R, N), tl.trans(query), None) * unit[None, :]
    if d_buffer.dtype.element_ty == tl.bfloat16:
        top, middle, rest = three_parts(weights)
        result = product(tl.trans(records), tl.where(upper, top, middle), result)
        result = product(tl.trans(records), tl.where(upper, rest, 0.0).to(tl.bfloat16), result)
    else:
        weights = tl.where(upper, weights, 0.0)
        result += tl.dot(tl.trans(widened(records)), weights, input_precision="ieee")
    sums = tl.sum(tl.reshape(result, (R, COLUMNS // 2, 2)), 2)
    token = tl.arange(0, COLUMNS // 2)
    token_at = (b * T + token) * H + h
    for s in tl.static_range(T):
        vector = tl.load(d + ((b * T + s) * H + h) * P + first + r)
        reads = (token >= s) & (token < T)
        own = tl.load(coefficients + token_at * RING + n + s, mask=reads, other=0)
        sums += tl.where(reads[None, :], widened(vector)[:, None] * own[None, :], 0.0)
        at = ring_place(n + s, start, RING)
        tl.store(records_at + at * P + r, narrowed(vector, d_buffer.dtype.element_ty))
    output_at = output + token_at[None, :] * P + (first + r)[:, None]
    tl.store(output_at, narrowed(sums, output.dtype.element_ty), mask=(token < T)[None, :])


@triton.jit
def draft_read_kernel(
    checkpoint, checkpoint_scales, d_buffer, positions, slots, origin, q, d, coefficients, decays, output,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RING: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """From the checkpoint, or from a read copy in its place: the outputs of all drafts, and their d behind the window.
    R value rows a program, R divides P.
    """
    TILES: tl.constexpr = P // R
    pid = tl.program_id(0)
    b, h, first = pid // (H * TILES), (pid // TILES) % H, (pid % TILES) * R
    g = h // (H // G)
    n = tl.load(positions + b)
    slot = tl.load(slots + b).to(tl.int64)
    if n < 0:
        return
    column, r, j = tl.arange(0, N), tl.arange(0, R), tl.arange(0, RING)
    start = tl.load(origin + slot)
    draft = j - n
    state = stored_rows(checkpoint, checkpoint_scales, (slot * H + h) * P + first, R, N, STORE)
    records_at = d_buffer + (slot * H + h) * (RING * P) + first
    place = ring_place(j, start, RING)
    old = tl.load(records_at + (place[:, None] * P + r[None, :]), mask=(j < n)[:, None], other=0)
    drafted = ((draft >= 0) & (draft < T))[:, None]
    new_at = d + ((b * T + draft) * H + h)[:, None] * P + (first + r)[None, :]
    records = tl.where(drafted, widened(tl.load(new_at, mask=drafted, other=0)), widened(old))
    for t in tl.static_range(T):
        query = widened(tl.load(q + ((b * T + t) * G + g) * N + column))
        head_at = (b * T + t) * H + h
        weight = tl.load(coefficients + head_at * RING + j)
        result = tl.sum(state * query[None, :], 1) * tl.load(decays + head_at)
        result += tl.sum(tl.where((j <= n + t)[:, None], records * weight[:, None], 0.0), 0)
        tl.store(output + head_at * P + first + r, narrowed(result, output.dtype.element_ty))
        vector = tl.load(d + head_at * P + first + r)
        at = ring_place(n + t, start, RING)
        tl.store(records_at + at * P + r, narrowed(vector, d_buffer.dtype.element_ty))
