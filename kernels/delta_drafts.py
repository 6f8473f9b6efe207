"""Kernels of the delta rules that verify drafted tokens: T of them read the state once, and no state is stored.

Draft t of a row whose window holds n records stands on these and on the drafts before it:

    p_t = whole_t B k_t + sum_j w_jt (k_j . k_t) d_j + sum_{s<t} e_st (k_s . k_t) d_s        d_t = beta_t (v_t - p_t)
    o_t = whole_t B q_t + sum_j w_jt (k_j . q_t) d_j + sum_{s<=t} e_st (k_s . q_t) d_s

with w_jt and e_st what record j and draft s have decayed by until draft t, and whole_t what the state B below the
window has.  B k_t and B q_t of all drafts come out of one pass over the stored state; the d_t follow from each other,
which is forward substitution on value rows that never meet.  kimi_delta decays each key channel by itself: decays then
stand inside the products.  Decays are sums over the tokens themselves, never differences of totals.

Memory as in ``delta_window``, inputs with a token dimension behind the batch, q and k (B, T, G, K).  TP: the power of
two from T on, at least 4.  What the window launch leaves for the read:

    coefficients (B, H, T, 2, J)    of the records, along each draft's key and query; zero from n on
    pairs        (B, H, T, 2, TP)   of draft s (third axis) along the key of draft t > s, and along the query of t >= s
    decays       (B, H, T, 2)       whole_t, times the unit of a vector's halves where a copy is read along it
    halves       (B, G, 4 TP, K)    float16 parts of keys and queries, a column each; kimi_delta (B, H, ...), decayed;
                                    (B, H, ...) with key_scales (S, H, K), which they are multiplied by
    vectors      (B, H, T, 2, K)    kimi_delta where the checkpoint is read: decayed keys and queries
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.kernels.delta_read import copy_operand, flat_rows
from quantlab.kernels.delta_tiles import dense_tile, tile_rows, tile_vector
from quantlab.kernels.delta_window import (
    channel_columns,
    channel_sums,
    entries,
    factors_of,
    newest_first,
    ring_place,
    store_half,
    window_keys,
)
from quantlab.kernels.packed import HALF_UNIT, LOW_QUERY, product, three_parts, wide_product

# Columns of a product: the parts of a sum are neighbours, its kinds eight apart, four tokens in between.  A lane of a
# tensor core's result then holds both parts of both kinds, and no sum of them leaves it.


@triton.jit
def token_of(c):
    """The draft of a column."""
    return 4 * (c // 16) + (c % 8) // 2


@triton.jit
def kind_of(c):
    """0: along the key, 1: along the query."""
    return (c // 8) % 2


@triton.jit
def first_column(t, kind):
    """Of the two columns of a draft's key or query."""
    return 16 * (t // 4) + 8 * kind + 2 * (t % 4)


@triton.jit
def token_sums(total, R: tl.constexpr, TP: tl.constexpr):
    """(R, 4 TP) in these columns -> the sums along keys and along queries, (R, TP)."""
    sums = tl.sum(tl.reshape(total, (R, TP // 4, 2, 4, 2)), 4)
    kind = tl.arange(0, 2)[None, None, :, None]
    along_key = tl.sum(tl.where(kind == 0, sums, 0.0), 2)
    along_query = tl.sum(tl.where(kind == 1, sums, 0.0), 2)
    return tl.reshape(along_key, (R, TP)), tl.reshape(along_query, (R, TP))


@triton.jit
def store_draft(halves, t, key, query, column, K: tl.constexpr, SIZE: tl.constexpr):
    """``store_half`` of the key and the query of draft t, in its columns; returns their units."""
    key_unit = store_half(halves + first_column(t, 0) * K, key, column, K, SIZE)
    return key_unit, store_half(halves + first_column(t, 1) * K, query, column, K, SIZE)


@triton.jit
def head_draft_window_kernel(
    positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients, pairs,
    halves, decays, key_scales,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, RING: tl.constexpr,
    T: tl.constexpr, TP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """One key head of a row: what the read takes, for each of its heads; keys, log decays and betas of the drafts go
    behind the window.  HEADS: a power of two >= H / G.
    """
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    n = tl.load(positions + b)
    if n < 0:
        return
    slot = tl.load(slots + b).to(tl.int64)
    j, s, column, head = tl.arange(0, J), tl.arange(0, TP), tl.arange(0, KP), tl.arange(0, HEADS)
    h, inside = g * (H // G) + head, head < H // G
    keys = window_keys(k_buffer, origin, slot, g, column, n, G, K, J, RING)
    drafts_at = k + ((b * T + s) * G + g)[:, None] * K + column[None, :]
    drafts = widened(tl.load(drafts_at, mask=(s < T)[:, None] & (column < K)[None, :], other=0))
    gates = log_decay_buffer + (slot * H + h) * RING
    later_at = gates[:, None] + ring_place(origin, slot, j + 1, RING)[None, :]
    later = tl.load(later_at, mask=(j + 1 < n)[None, :] & inside[:, None], other=0)
    oldest = tl.load(gates + ring_place(origin, slot, 0, RING), mask=inside & (n > 0), other=0)
    tail, window = tl.cumsum(later, 1, reverse=True), tl.sum(later, 1) + oldest
    since_window, gap = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, TP), tl.float32)
    for t in tl.static_range(T):
        vector_at, token = ((b * T + t) * G + g) * K, (b * T + t) * H + h
        key, query = entries(k + vector_at, column, K), entries(q + vector_at, column, K)
        current = widened(tl.load(log_decay + token, mask=inside, other=0))
        since_window += current
        gap = tl.where((s < t)[None, :], gap + current[:, None], 0.0)
        since = tl.exp(tail + since_window[:, None])
        from_key = tl.where((j < n)[None, :], since * tl.sum(keys * key[None, :], 1)[None, :], 0.0)
        from_query = tl.where((j < n)[None, :], since * tl.sum(keys * query[None, :], 1)[None, :], 0.0)
        window_at = coefficients + ((b * H + h) * T + t)[:, None] * (2 * J) + j[None, :]
        tl.store(window_at, from_key, mask=inside[:, None])
        tl.store(window_at + J, from_query, mask=inside[:, None])
        between = tl.exp(gap)
        from_key = between * tl.sum(drafts * key[None, :], 1)[None, :]
        from_query = between * tl.sum(drafts * query[None, :], 1)[None, :]
        pairs_at = pairs + ((b * H + h)[:, None] * T + s[None, :]) * (2 * TP) + t
        tl.store(pairs_at, from_key, mask=inside[:, None] & (s < t)[None, :])
        tl.store(pairs_at + TP, from_query, mask=inside[:, None] & (s <= t)[None, :])
        whole = tl.exp(window + since_window)
        key_decay, query_decay = whole, whole
        if halves is not None:
            if key_scales is None:
                halves_at = halves + (b * G + g) * (4 * TP * K)
                key_unit, query_unit = store_draft(halves_at, t, key, query, column, K, SIZE)
            else:
                key_unit, query_unit = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS,), tl.float32)
                for i in tl.static_range(H // G):
                    one = g * (H // G) + i
                    factors = factors_of(key_scales + (slot * H + one) * K, column, K)
                    halves_at = halves + (b * H + one) * (4 * TP * K)
                    of_key, of_query = store_draft(
                        halves_at, t, key * factors, query * factors, column, K, SIZE
                    )
                    key_unit = tl.where(head == i, of_key, key_unit)
                    query_unit = tl.where(head == i, of_query, query_unit)
            query_decay = whole * query_unit
            if KEY_COPY:
                key_decay = whole * key_unit
        decays_at = decays + ((b * H + h) * T + t) * 2
        tl.store(decays_at, key_decay, mask=inside)
        tl.store(decays_at + 1, query_decay, mask=inside)
        place = ring_place(origin, slot, n + t, RING)
        gate_at = (slot * H + h) * RING + place
        tl.store(log_decay_buffer + gate_at, current, mask=inside)
        if beta_buffer is not None:
            strength = widened(tl.load(beta + token, mask=inside, other=0))
            tl.store(beta_buffer + gate_at, strength, mask=inside)
        key_at = k_buffer + ((slot * G + g) * RING + place) * K + column
        tl.store(key_at, narrowed(key, k_buffer.dtype.element_ty), mask=column < K)


@triton.jit
def channel_draft_window_kernel(
    positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients, pairs,
    halves, decays, vectors, key_scales,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, RING: tl.constexpr,
    T: tl.constexpr, TP: tl.constexpr, SIZE: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """``head_draft_window_kernel`` of one head under a decay a key channel."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    n = tl.load(positions + b)
    if n < 0:
        return
    slot = tl.load(slots + b).to(tl.int64)
    # Records and drafts in registers, four channels a lane, as in ``channel_coefficients``.
    j, g, s = newest_first(J), h // (H // G), tl.arange(0, TP)
    record, draft = j[None, :, None], s[None, :, None]
    column = channel_columns(KP)
    gates = (slot * H + h) * RING
    later_at = (gates + ring_place(origin, slot, record + 1, RING)) * K + column
    later = tl.load(log_decay_buffer + later_at, mask=(record + 1 < n) & (column < K), other=0)
    keys_at = ((slot * G + g) * RING + ring_place(origin, slot, record, RING)) * K + column
    keys = widened(tl.load(k_buffer + keys_at, mask=(record < n) & (column < K), other=0))
    oldest = log_decay_buffer + (gates + ring_place(origin, slot, 0, RING)) * K + column
    window = tl.sum(later, 1)[:, None, :] + tl.load(oldest, mask=(column < K) & (n > 0), other=0)
    drafted = (draft < T) & (column < K)
    drafts_at = ((b * T + draft) * G + g) * K + column
    drafts = widened(tl.load(k + drafts_at, mask=drafted, other=0))
    queries = widened(tl.load(q + drafts_at, mask=drafted, other=0))
    currents_at = ((b * T + draft) * H + h) * K + column
    currents = widened(tl.load(log_decay + currents_at, mask=drafted, other=0))
    # What a record contributes along the key and the query of each draft is one product for all of them.
    decay = tl.exp(tl.cumsum(currents, 1))
    vectors_of = tl.permute(tl.join(drafts * decay, queries * decay), (1, 3, 0, 2))
    records = tl.reshape(tl.permute(keys * tl.exp(tl.cumsum(later, 1)), (1, 0, 2)), (J, KP))
    right = tl.trans(tl.reshape(vectors_of, (2 * TP, KP)))
    high, middle, low = three_parts(records)
    weights = wide_product(high, middle, low, right, None)
    c = tl.arange(0, 2 * TP)
    window_at = coefficients + ((b * H + h) * 2 * T + c)[None, :] * J + j[:, None]
    tl.store(window_at, tl.where((j < n)[:, None], weights, 0.0), mask=(c < 2 * T)[None, :])
    since_window, gap = tl.zeros((KP // 4, 1, 4), tl.float32), tl.zeros((KP // 4, TP, 4), tl.float32)
    for t in tl.static_range(T):
        vector_at, token = ((b * T + t) * G + g) * K, (b * T + t) * H + h
        key, query = entries(k + vector_at, column, K), entries(q + vector_at, column, K)
        current = entries(log_decay + token * K, column, K)
        since_window += current
        gap = tl.where(draft < t, gap + current, 0.0)
        between = drafts * tl.exp(gap)
        pairs_at = pairs + ((b * H + h) * T + s) * (2 * TP) + t
        tl.store(pairs_at, channel_sums(between * key), mask=s < t)
        tl.store(pairs_at + TP, channel_sums(between * query), mask=s <= t)
        whole = tl.exp(window + since_window)
        key_unit, query_unit = 1.0, 1.0
        if halves is not None:
            halves_at = halves + (b * H + h) * (4 * TP * K)
            read = whole
            if key_scales is not None:
                read *= factors_of(key_scales + (slot * H + h) * K, column, K)
            key_unit, query_unit = store_draft(halves_at, t, key * read, query * read, column, K, SIZE)
            if not KEY_COPY:
                key_unit = 1.0
        decays_at = decays + ((b * H + h) * T + t) * 2
        tl.store(decays_at, key_unit)
        tl.store(decays_at + 1, query_unit)
        if vectors is not None:
            vectors_at = vectors + ((b * H + h) * T + t) * (2 * K) + column
            tl.store(vectors_at, key * whole, mask=column < K)
            tl.store(vectors_at + K, query * whole, mask=column < K)
        place = ring_place(origin, slot, n + t, RING)
        tl.store(log_decay_buffer + (gates + place) * K + column, current, mask=column < K)
        if beta_buffer is not None:
            tl.store(beta_buffer + gates + place, widened(tl.load(beta + token)))
        if h % (H // G) == 0:
            key_at = k_buffer + ((slot * G + g) * RING + place) * K + column
            tl.store(key_at, narrowed(key, k_buffer.dtype.element_ty), mask=column < K)


@triton.jit
def draft_product(
    words, scales, first, r, halves, K: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    TP: tl.constexpr,
):  # fmt: skip
    """The copy's rows first + r times the columns of ``halves``: (R, 4 TP), zeros for drafts from T on."""
    c, column = tl.arange(0, 4 * TP), tl.arange(0, SIZE)
    drafted = (token_of(c) < T)[:, None]
    right = tl.load(halves + c[:, None] * K + column[None, :], mask=drafted, other=0)
    total = product(copy_operand(words, scales, first, r, 0, SIZE, K, R), tl.trans(right), None)
    if SIZE < K:
        rest = tl.arange(0, K - SIZE)
        right = tl.load(halves + SIZE + c[:, None] * K + rest[None, :], mask=drafted, other=0)
        total = product(copy_operand(words, scales, first, r, SIZE, K - SIZE, K, R), tl.trans(right), total)
    return total


@triton.jit
def draft_read_kernel(
    codes, scales, global_scale, key_scales, checkpoint, checkpoint_scales, d_buffer, v_buffer, positions, slots,
    origin, q, k, v, beta, coefficients, pairs, halves, decays, vectors, output,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr, STORE: tl.constexpr, COPY: tl.constexpr, BY_KEY: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """Outputs (B, T, H, V) of all drafts, and their d (and v) behind the window.  R value rows of a head a program.

    COPY: whether there is an NVFP4 copy, codes as int32 words.  KEY_COPY: whether it serves S k.  SIZE: the largest
    power of two in K.  A draft that is not finite reaches none before it: what stands behind the diagonal is selected,
    not multiplied by zero.
    """
    TILES: tl.constexpr = V // R
    DENSE: tl.constexpr = not (COPY and KEY_COPY)
    pid = tl.program_id(0)
    b, h, tile = pid // (H * TILES), (pid // TILES) % H, pid % TILES
    n, slot = tl.load(positions + b), tl.load(slots + b).to(tl.int64)
    # The slot as well, because one that decides nothing would be loaded after the position has come.
    if (n < 0) | (slot < 0):
        return
    r, j, c, token = tl.arange(0, R), tl.arange(0, J), tl.arange(0, 4 * TP), tl.arange(0, TP)
    g, head, row = h // (H // G), slot * H + h, tile * R + r
    record = (head * RING + ring_place(origin, slot, j, RING))[:, None] * V + row[None, :]
    records = tl.load(d_buffer + record, mask=(j < n)[:, None], other=0)
    drafted = token < T
    token_at = (b * T + token) * H + h
    value_at = token_at[None, :] * V + row[:, None]
    value = widened(tl.load(v + value_at, mask=drafted[None, :], other=0))
    strength = widened(tl.load(beta + token_at, mask=drafted, other=0))
    whole = (b * H + h) * T
    column_at = (whole + token_of(c)) * 2 + kind_of(c)
    total = None
    if COPY:
        halves_at = halves + (b * H + h if BY_KEY or key_scales is not None else b * G + g) * (4 * TP * K)
        total = draft_product(codes, scales, head * V + tile * R, r, halves_at, K, SIZE, R, T, TP)
        factor = tl.load(decays + column_at, mask=token_of(c) < T, other=0)
        if not KEY_COPY:
            factor = tl.where(kind_of(c) == 0, 0.0, factor)
        factor *= tl.load(global_scale + head) * HALF_UNIT
        total *= tl.where(c % 2 == 0, factor, factor * LOW_QUERY)[None, :]
    if d_buffer.dtype.element_ty == tl.bfloat16:
        weights_at = coefficients + column_at[None, :] * J + j[:, None]
        weights = tl.load(weights_at, mask=(j < n)[:, None] & (token_of(c) < T)[None, :], other=0)
        upper = (c % 2 == 0)[None, :]
        top, middle, rest = three_parts(weights)
        total = product(tl.trans(records), tl.where(upper, top, middle), total)
        total = product(tl.trans(records), tl.where(upper, rest, 0.0).to(tl.bfloat16), total)
        along_key, along_query = token_sums(total, R, TP)
    else:
        # A column a token: not a tensor core's product, and Triton 3.6 sums over the wrong lanes of ``total`` in
        # another layout than theirs.
        weights_at = coefficients + (whole + token)[None, :] * (2 * J) + j[:, None]
        held = (j < n)[:, None] & drafted[None, :]
        left = tl.trans(widened(records))
        along_key = tl.dot(left, tl.load(weights_at, mask=held, other=0), input_precision="ieee")
        along_query = tl.dot(left, tl.load(weights_at + J, mask=held, other=0), input_precision="ieee")
        if COPY:
            copy_key, copy_query = token_sums(total, R, TP)
            along_key += copy_key
            along_query += copy_query
    if DENSE:
        first, rows = head * V + tile * R, tile_rows(R, LANES)
        state = dense_tile(checkpoint, checkpoint_scales, first, rows, K, KP, LANES, INNER, STORE)
        for t in tl.static_range(T):
            if BY_KEY:
                key_at = vectors + (whole + t) * (2 * K)
                query_at = key_at + K
            else:
                key_at, query_at = k + ((b * T + t) * G + g) * K, q + ((b * T + t) * G + g) * K
            mine = (token == t)[None, :]
            from_state = flat_rows(state * tile_vector(key_at, K, KP, LANES, INNER))
            from_state *= tl.load(decays + (whole + t) * 2)
            along_key += tl.where(mine, from_state[:, None], 0.0)
            if not COPY:
                from_state = flat_rows(state * tile_vector(query_at, K, KP, LANES, INNER))
                from_state *= tl.load(decays + (whole + t) * 2 + 1)
                along_query += tl.where(mine, from_state[:, None], 0.0)
    for s in tl.static_range(T):
        own = tl.where((token == s)[None, :], strength[None, :] * (value - along_key), 0.0)
        d = tl.sum(own, 1)
        pairs_at = pairs + (whole + s) * (2 * TP) + token
        from_key = tl.load(pairs_at, mask=(token > s) & drafted, other=0)
        from_query = tl.load(pairs_at + TP, mask=(token >= s) & drafted, other=0)
        along_key += tl.where((token > s)[None, :], d[:, None] * from_key[None, :], 0.0)
        along_query += tl.where((token >= s)[None, :], d[:, None] * from_query[None, :], 0.0)
    tl.store(output + value_at, narrowed(along_query, output.dtype.element_ty), mask=drafted[None, :])
    place = ring_place(origin, slot, n + token, RING)
    new = (head * RING + place)[None, :] * V + row[:, None]
    deltas = strength[None, :] * (value - along_key)
    tl.store(d_buffer + new, narrowed(deltas, d_buffer.dtype.element_ty), mask=drafted[None, :])
    if v_buffer is not None:
        tl.store(v_buffer + new, narrowed(value, v_buffer.dtype.element_ty), mask=drafted[None, :])
