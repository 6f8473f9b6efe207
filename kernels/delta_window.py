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

    Returns coefficients (J,) twice, key and query times the decay of the state below the window (KP,), and the token's
    log decay (KP,).
    """
    j, column = tl.arange(0, J), tl.arange(0, KP)
    g = h // (H // G)
    query, key = entries(q + (b * G + g) * K, column, K), entries(k + (b * G + g) * K, column, K)
    current = entries(log_decay + (b * H + h) * K, column, K)
    whole = current
    from_key = tl.zeros((J,), tl.float32)
    from_query = tl.where(j == n, tl.sum(key * query, 0), 0.0)
    if L > 1:
        gates = (slot * H + h) * RING
        at = (gates + ring_place(origin, slot, j + 1, RING))[:, None] * K + column[None, :]
        inside = (j + 1 < n)[:, None] & (column < K)[None, :]
        later = tl.load(log_decay_buffer + at, mask=inside, other=0)
        later = tl.where((j + 1 == n)[:, None], current[None, :], later)
        oldest = log_decay_buffer + (gates + ring_place(origin, slot, 0, RING)) * K + column
        whole = tl.sum(later, 0) + tl.where(
            n > 0, tl.load(oldest, mask=(column < K) & (n > 0), other=0), current
        )
        since = tl.exp(tl.cumsum(later, 0, reverse=True))
        keys = window_keys(k_buffer, origin, slot, g, column, n, G, K, J, RING) * since
        from_key = tl.sum(keys * key[None, :], 1)
        from_query += tl.sum(keys * query[None, :], 1)
    decay = tl.exp(whole)
    return from_key, from_query, key * decay, query * decay, current


@triton.jit
def head_window(
    program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients,
    decays, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program of one key head of a row that does not flush: ``coefficients`` (B, H, 2, J) and ``decays`` (B, H) of its
    heads; key, log decay and beta go behind the window.

    HEADS: a power of two >= H / G.
    """
    b, g = program // G, program % G
    n = tl.load(positions + b)
    if (n >= 0) & (n < L - 1):
        slot = tl.load(slots + b).to(tl.int64)
        j, head = tl.arange(0, J), tl.arange(0, HEADS)
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
        tl.store(decays + b * H + h, whole, mask=inside)
        place = ring_place(origin, slot, n, RING)
        gate_at = (slot * H + h) * RING + place
        tl.store(log_decay_buffer + gate_at, current, mask=inside)
        if beta_buffer is not None:
            strength = widened(tl.load(beta + b * H + h, mask=inside, other=0))
            tl.store(beta_buffer + gate_at, strength, mask=inside)
        append_key(k_buffer, k, b, slot, g, place, G, K, KP, RING)


@triton.jit
def channel_window(
    program, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta, coefficients,
    vectors, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Program of one head of a row that does not flush: ``coefficients`` (B, H, 2, J), and in ``vectors`` (B, H, 2, K)
    the decayed key and query; the record's parts as in ``head_window``.
    """
    b, h = program // H, program % H
    n = tl.load(positions + b)
    if (n >= 0) & (n < L - 1):
        slot = tl.load(slots + b).to(tl.int64)
        j, column, g = tl.arange(0, J), tl.arange(0, KP), h // (H // G)
        from_key, from_query, key, query, current = channel_coefficients(
            k_buffer, log_decay_buffer, origin, slot, b, h, n, q, k, log_decay, H, G, K, KP, L, J, RING
        )
        at = coefficients + (b * H + h) * (2 * J) + j
        tl.store(at, from_key)
        tl.store(at + J, from_query)
        vectors_at = vectors + (b * H + h) * (2 * K) + column
        tl.store(vectors_at, key, mask=column < K)
        tl.store(vectors_at + K, query, mask=column < K)
        place = ring_place(origin, slot, n, RING)
        gate_at = (slot * H + h) * RING + place
        tl.store(log_decay_buffer + gate_at * K + column, current, mask=column < K)
        if beta_buffer is not None:
            tl.store(beta_buffer + gate_at, widened(tl.load(beta + b * H + h)))
        if h % (H // G) == 0:
            append_key(k_buffer, k, b, slot, g, place, G, K, KP, RING)


@triton.jit
def append_key(
    k_buffer, k, b, slot, g, place, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, KP)
    key = entries(k + (b * G + g) * K, column, K)
    at = k_buffer + ((slot * G + g) * RING + place) * K + column
    tl.store(at, narrowed(key, k_buffer.dtype.element_ty), mask=column < K)


@triton.jit
def coefficient_columns(from_key, from_query):
    """Coefficients (J,) as bfloat16 (J, 8): three that sum to each, those along the query from column 3 on."""
    return both_columns(from_key, from_query, 3)


@triton.jit
def both_columns(key, query, PARTS: tl.constexpr):
    """Two float32 vectors (n,) as bfloat16 (n, 8): ``key`` in columns 0 to 2, ``query`` in 3 to 5, as the sums of
    PARTS bfloat16: 1 where the vectors are bfloat16, or 3.
    """
    from_zero = tl.arange(0, 8)[None, :]
    value = tl.where(from_zero < 3, key[:, None], query[:, None])
    part = tl.where(from_zero < 3, from_zero, from_zero - 3)
    high = (value.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    if PARTS == 1:
        chosen = tl.where(part == 0, high, 0.0)
    else:
        rest = value - high
        middle = (rest.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        chosen = tl.where(part == 0, high, tl.where(part == 1, middle, rest - middle))
    return tl.where(from_zero < 6, chosen, 0.0).to(tl.bfloat16)


@triton.jit
def column_sums(total):
    """(R, 8) of a product with ``both_columns`` -> what belongs to key and query, (R,) each."""
    along_key = (tl.arange(0, 8) < 3)[None, :]
    return tl.sum(tl.where(along_key, total, 0.0), 1), tl.sum(tl.where(along_key, 0.0, total), 1)
