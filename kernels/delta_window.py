"""The window of a delta rule inside a kernel: what each record contributes along the token's key and query.

With w_j what record j has decayed by since it was written and B the state that the records stand on,

    S' k = whole B k + sum_j w_j (k_j . k) d_j        S' q = whole B q + sum_j w_j (k_j . q) d_j

so a window is two coefficients a record.  kimi_delta decays each key channel by itself: w_j then stands inside the
products, and whole multiplies k and q entry by entry.  Decays are sums over the tokens themselves, never differences
of totals.

Sizes: H heads, G key heads, V value dim, K key dim (KP the power of two from it on), L window, RING ring positions,
J >= 16 a power of two >= L.  Shapes are those of ``quantlab.schemes.pool``.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.kernels.key_scales import key_factors
from quantlab.kernels.packed import half_query, three_parts


@triton.jit
def ring_place(origin, slot, j, RING: tl.constexpr):
    """Ring positions of records j.  origin None: every window starts at position 0."""
    at = j
    if origin is not None:
        at = (tl.load(origin + slot) + j) & (RING - 1)
    return at


@triton.jit
def entries(pointer, column, K: tl.constexpr):
    """float32 values of a vector of K entries at ``column``, of any shape; zero behind its end."""
    return widened(tl.load(pointer + column, mask=column < K, other=0))


@triton.jit
def factors_of(pointer, column, K: tl.constexpr):
    """``entries`` of a head's key scales, as what its key and query are multiplied by to read a copy's codes."""
    return key_factors(tl.load(pointer + column, mask=column < K, other=127))


@triton.jit
def window_keys(
    k_buffer,
    origin,
    slot,
    g,
    column,
    n,
    G: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    RING: tl.constexpr,
):
    """Keys (J, KP) float32 of the first n records, zeros behind."""
    j = tl.arange(0, J)
    row = (slot * G + g) * RING + ring_place(origin, slot, j, RING)
    inside = (j < n)[:, None] & (column < K)[None, :]
    return widened(tl.load(k_buffer + row[:, None] * K + column[None, :], mask=inside, other=0))


@triton.jit
def head_coefficients(
    k_buffer, log_decay_buffer, origin, slot, b, h, inside, n, q, k, log_decay,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Of heads h (n_heads,) of one key head under one decay a head, those where ``inside``.

    Returns coefficients along the key and along the query (n_heads, J), of the records j < n; the latter has k . q, the
    token's own, at j = n.  And what the state below the window has decayed by (n_heads,), and the token's log decay.
    """
    j, column = tl.arange(0, J), tl.arange(0, KP)
    g = tl.min(h, 0) // (H // G)
    query, key = entries(q + (b * G + g) * K, column, K), entries(k + (b * G + g) * K, column, K)
    current = widened(tl.load(log_decay + b * H + h, mask=inside, other=0))
    later = tl.where((j + 1 == n)[None, :], current[:, None], 0.0)
    whole = current
    own = tl.sum(key * query, 0)
    along_key = tl.zeros((J,), tl.float32)
    along_query = tl.where(j == n, own, 0.0)
    if L > 1:
        keys = window_keys(k_buffer, origin, slot, g, column, n, G, K, J, RING)
        along_key = tl.sum(keys * key[None, :], 1)
        along_query = tl.where(j == n, own, tl.sum(keys * query[None, :], 1))
        gates = (slot * H + h) * RING
        at = gates[:, None] + ring_place(origin, slot, j + 1, RING)[None, :]
        later += tl.load(log_decay_buffer + at, mask=(j + 1 < n)[None, :] & inside[:, None], other=0)
        oldest = tl.load(
            log_decay_buffer + gates + ring_place(origin, slot, 0, RING), mask=inside & (n > 0), other=0
        )
        whole = tl.sum(later, 1) + tl.where(n > 0, oldest, current)
    since = tl.exp(tl.cumsum(later, 1, reverse=True))
    from_key = tl.where((j < n)[None, :], since * along_key[None, :], 0.0)
    from_query = tl.where((j <= n)[None, :], since * along_query[None, :], 0.0)
    return from_key, from_query, tl.exp(whole), current


@triton.jit
def channel_coefficients(
    k_buffer, log_decay_buffer, origin, slot, b, h, n, q, k, log_decay,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """``head_coefficients`` of one head under a decay a key channel.

    Returns coefficients (J,) twice, of the records ``newest_first``; as (KP / 4, 1, 4) key and query times the decay of
    the state below the window, and the token's log decay.
    """
    # Records in registers, four channels a lane: decays are then summed without an exchange.  The compiler spreads
    # lanes over the first axis.
    j, g = newest_first(J), h // (H // G)
    record = j[None, :, None]
    column = channel_columns(KP)
    query, key = entries(q + (b * G + g) * K, column, K), entries(k + (b * G + g) * K, column, K)
    current = entries(log_decay + (b * H + h) * K, column, K)
    whole = current
    from_key = tl.zeros((J,), tl.float32)
    from_query = tl.where(j == n, tl.sum(channel_sums(key * query), 0), 0.0)
    if L > 1:
        gates = (slot * H + h) * RING
        at = (gates + ring_place(origin, slot, record + 1, RING)) * K + column
        later = tl.load(log_decay_buffer + at, mask=(record + 1 < n) & (column < K), other=0)
        later = tl.where(record + 1 == n, current, later)
        keys_at = ((slot * G + g) * RING + ring_place(origin, slot, record, RING)) * K + column
        keys = widened(tl.load(k_buffer + keys_at, mask=(record < n) & (column < K), other=0))
        oldest = log_decay_buffer + (gates + ring_place(origin, slot, 0, RING)) * K + column
        first = tl.load(oldest, mask=(column < K) & (n > 0), other=0)
        since = tl.cumsum(later, 1)
        whole = tl.sum(later, 1)[:, None, :] + tl.where(n > 0, first, current)
        keys *= tl.exp(since)
        from_key = channel_sums(keys * key)
        from_query += channel_sums(keys * query)
    decay = tl.exp(whole)
    return from_key, from_query, key * decay, query * decay, current


@triton.jit
def channel_decays(
    log_decay_buffer, origin, slot, h, output, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """exp of the records' log decays of a full window into output (J, K), for all lanes of this program to read."""
    record = tl.arange(0, J)[None, :, None]
    column = channel_columns(KP)
    inside = (record < L - 1) & (column < K)
    at = ((slot * H + h) * RING + ring_place(origin, slot, record, RING)) * K + column
    factors = tl.exp(tl.load(log_decay_buffer + at, mask=inside, other=0))
    tl.debug_barrier()
    tl.store(output + record * K + column, factors, mask=inside)
    tl.debug_barrier()


@triton.jit
def newest_first(J: tl.constexpr):
    """J - 1 to 0: a sum over later records is then one over those before; reversed scans exchange data."""
    return J - 1 - tl.arange(0, J)


@triton.jit
def channel_columns(KP: tl.constexpr):
    """0 to KP - 1 as (KP / 4, 1, 4)."""
    return 4 * tl.arange(0, KP // 4)[:, None, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def channel_sums(x):
    """(K / 4, J, 4) -> (J,)."""
    return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def head_window(
    program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients,
    parts, halves, decays, key_scales,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """Program of one key head of a row that does not flush: ``coefficients`` (B, H, 2, J) and ``decays`` (B, H, 2) of
    its heads, along key and query; key, log decay and beta go behind the window.

    For a packed copy also what tensor cores take: ``parts`` (B, H, 6, J) and ``halves`` (B, G, 4, K), see
    ``store_parts`` and ``store_halves``, whose units are then in the decays.  key_scales (S, H, K): of a packed copy
    that has them; ``halves`` are then a head's own, (B, H, 4, K).  HEADS: a power of two >= H / G.
    """
    b, g = program // G, program % G
    n = tl.load(positions + b)
    if (n >= 0) & (n < L - 1):
        slot = tl.load(slots + b).to(tl.int64)
        j, head, column = tl.arange(0, J), tl.arange(0, HEADS), tl.arange(0, KP)
        h, inside = g * (H // G) + head, head < H // G
        from_key, from_query, whole, current = head_coefficients(
            k_buffer,
            log_decay_buffer,
            origin,
            slot,
            b,
            h,
            inside,
            n,
            q,
            k,
            log_decay,
            H,
            G,
            K,
            KP,
            L,
            J,
            RING,
        )
        at = coefficients + (b * H + h)[:, None] * (2 * J) + j[None, :]
        tl.store(at, from_key, mask=inside[:, None])
        tl.store(at + J, from_query, mask=inside[:, None])
        key = entries(k + (b * G + g) * K, column, K)
        key_decay, query_decay = whole, whole
        if halves is not None:
            query = entries(q + (b * G + g) * K, column, K)
            parts_at = parts + (b * H + h)[:, None] * (6 * J) + j[None, :]
            store_parts(parts_at, from_key, from_query, inside[:, None], J)
            if key_scales is None:
                key_unit, query_unit = store_halves(
                    halves + (b * G + g) * (4 * K), key, query, column, K, SIZE
                )
            else:
                key_unit, query_unit = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS,), tl.float32)
                for i in tl.static_range(H // G):
                    one = g * (H // G) + i
                    factors = factors_of(key_scales + (slot * H + one) * K, column, K)
                    of_key, of_query = store_halves(
                        halves + (b * H + one) * (4 * K), key * factors, query * factors, column, K, SIZE
                    )
                    key_unit = tl.where(head == i, of_key, key_unit)
                    query_unit = tl.where(head == i, of_query, query_unit)
            query_decay = whole * query_unit
            if KEY_COPY:
                key_decay = whole * key_unit
        tl.store(decays + 2 * (b * H + h), key_decay, mask=inside)
        tl.store(decays + 2 * (b * H + h) + 1, query_decay, mask=inside)
        place = ring_place(origin, slot, n, RING)
        gate_at = (slot * H + h) * RING + place
        tl.store(log_decay_buffer + gate_at, current, mask=inside)
        if beta_buffer is not None:
            strength = widened(tl.load(beta + b * H + h, mask=inside, other=0))
            tl.store(beta_buffer + gate_at, strength, mask=inside)
        key_at = k_buffer + ((slot * G + g) * RING + place) * K + column
        tl.store(key_at, narrowed(key, k_buffer.dtype.element_ty), mask=column < K)


@triton.jit
def channel_window(
    program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients,
    parts, halves, decays, vectors, key_scales,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, SIZE: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """``head_window`` of one head under a decay a key channel: ``halves`` (B, H, 4, K), and where the checkpoint is
    read ``vectors`` (B, H, 2, K), are the decayed key and query; the decays are their units alone.
    """
    b, h = program // H, program % H
    n = tl.load(positions + b)
    if (n >= 0) & (n < L - 1):
        slot = tl.load(slots + b).to(tl.int64)
        j, g = newest_first(J), h // (H // G)
        column = channel_columns(KP)
        from_key, from_query, key, query, current = channel_coefficients(
            k_buffer, log_decay_buffer, origin, slot, b, h, n, q, k, log_decay, H, G, K, KP, L, J, RING
        )
        at = coefficients + (b * H + h) * (2 * J) + j
        tl.store(at, from_key)
        tl.store(at + J, from_query)
        key_unit, query_unit = 1.0, 1.0
        if halves is not None:
            store_parts(parts + (b * H + h) * (6 * J) + j, from_key, from_query, j >= 0, J)
            factors = 1.0
            if key_scales is not None:
                factors = factors_of(key_scales + (slot * H + h) * K, column, K)
            key_unit, query_unit = store_halves(
                halves + (b * H + h) * (4 * K), key * factors, query * factors, column, K, SIZE
            )
            if not KEY_COPY:
                key_unit = 1.0
        tl.store(decays + 2 * (b * H + h), key_unit)
        tl.store(decays + 2 * (b * H + h) + 1, query_unit)
        if vectors is not None:
            vectors_at = vectors + (b * H + h) * (2 * K) + column
            tl.store(vectors_at, key, mask=column < K)
            tl.store(vectors_at + K, query, mask=column < K)
        place = ring_place(origin, slot, n, RING)
        gate_at = (slot * H + h) * RING + place
        tl.store(log_decay_buffer + gate_at * K + column, current, mask=column < K)
        if beta_buffer is not None:
            tl.store(beta_buffer + gate_at, widened(tl.load(beta + b * H + h)))
        if h % (H // G) == 0:
            token = entries(k + (b * G + g) * K, column, K)
            key_at = k_buffer + ((slot * G + g) * RING + place) * K + column
            tl.store(key_at, narrowed(token, k_buffer.dtype.element_ty), mask=column < K)


@triton.jit
def one_window(
    program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients,
    parts, halves, decays, vectors, key_scales,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BY_KEY: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """``channel_window`` or ``head_window``."""
    if BY_KEY:
        channel_window(
            program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta,
            coefficients, parts, halves, decays, vectors, key_scales, H, G, K, KP, L, J, RING, SIZE, KEY_COPY,
        )  # fmt: skip
    else:
        head_window(
            program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta,
            coefficients, parts, halves, decays, key_scales, H, G, K, KP, L, J, RING, HEADS, SIZE, KEY_COPY,
        )  # fmt: skip


# Columns of a product with the copy: key, query and the last parts of the window's coefficients along them.
#
#     column    0           1          2             3            4           5
#     vector    key, high   key, low   query, high   query, low   -           -
#     window    key 0       key 1      query 0       query 1      key 2       query 2


@triton.jit
def store_parts(at, from_key, from_query, inside, J: tl.constexpr):
    """Coefficients as bfloat16 that sum to them, behind the pointers of column 0, J apart."""
    high, middle, low = three_parts(from_key)
    tl.store(at, high, mask=inside)
    tl.store(at + J, middle, mask=inside)
    tl.store(at + 4 * J, low, mask=inside)
    high, middle, low = three_parts(from_query)
    tl.store(at + 2 * J, high, mask=inside)
    tl.store(at + 3 * J, middle, mask=inside)
    tl.store(at + 5 * J, low, mask=inside)


@triton.jit
def store_half(at, vector, column, K: tl.constexpr, SIZE: tl.constexpr):
    """A vector's two float16 parts, K apart, in the order of ``half_operand``'s columns; returns their unit.

    These come as SIZE of them, the largest power of two in K, and the rest.
    """
    REST: tl.constexpr = K - SIZE
    place = at + column_of_key(column, SIZE)
    if REST > 0:
        place = tl.where(column < SIZE, place, at + SIZE + column_of_key(column - SIZE, REST))
    high, low, unit = half_query(vector)
    tl.store(place, high, mask=column < K)
    tl.store(place + K, low, mask=column < K)
    return unit


@triton.jit
def store_halves(at, key, query, column, K: tl.constexpr, SIZE: tl.constexpr):
    """``store_half`` of key and query, 2 K apart; returns their units."""
    key_unit = store_half(at, key, column, K, SIZE)
    return key_unit, store_half(at + 2 * K, query, column, K, SIZE)


@triton.jit
def column_of_key(key, K: tl.constexpr):
    """The inverse of ``packed.key_of_half_column``."""
    word = key // 8
    inner = 4 * (key % 2) + 2 * ((key // 4) % 2) + (key // 2) % 2
    return 32 * (word % (K // 32)) + 8 * (word // (K // 32)) + inner


@triton.jit
def column_sums(total):
    """(R, 8) of such a product -> the sums along key and query, (R,)."""
    c = tl.arange(0, 8)[None, :]
    of_key = (c < 2) | (c == 4)
    return tl.sum(tl.where(of_key, total, 0.0), 1), tl.sum(tl.where(of_key, 0.0, total), 1)
