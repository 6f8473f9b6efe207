"""The system that a full window's d solve, once a head: what ``delta_product`` folds every tile of value rows with.

With gamma_i the decay up to token i, w_j what record j decays by until the end, and e_ij between the two,

    d_i + beta_i sum_{j<i} e_ij (k_i . k_j) d_j = beta_i (v_i - gamma_i S_0 k_i)
    S = whole S_0 + sum_j w_j d_j k_j^T

(the chunk form of the delta rule, arXiv 2406.06484 eq. 9-11).  So w d = M (v - gamma S_0 k) with a J x J matrix that no
value row enters.  Where the window holds d already, M weighs them and solves for the token's alone.  Under a decay a
key channel e_ij, gamma_i and w_j stand inside the products.

The inverse of the unit lower triangular system is solved row by row: its columns are lanes, and a row waits for the
one before it in one operation alone.  (A power series in the strict part would pass through larger numbers: for equal
keys without decay its terms reach 6435.)
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.decode import widened
from quantlab.kernels.delta_window import entries, one_window, ring_place
from quantlab.kernels.packed import product, three_parts


@triton.jit
def inverse_rows(strict, J: tl.constexpr):
    """Rows (J,) of (I + A)^-1; strict: a pointer to A (J, J), of which what lies below the diagonal counts."""
    column = tl.arange(0, J)
    rows = ()
    for i in tl.static_range(J):
        row = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(strict + (i * J + j)) * rows[j]
        rows += (row,)
    return rows


@triton.jit
def store_system(
    at, scores, strengths, weight, strength, L: tl.constexpr, J: tl.constexpr, RAW: tl.constexpr
):
    """The matrix M behind ``at``, row by row.  scores: e_ij (k_i . k_j) below the diagonal, zero elsewhere.

    RAW: all d are to be derived, by strengths (J,); otherwise only the token's is, by ``strength``.
    """
    i, j = tl.arange(0, J)[:, None], tl.arange(0, J)[None, :]
    if RAW:
        tl.store(at + (i * J + j), tl.where(i == j, weight[:, None], scores * strengths[:, None]))
        tl.debug_barrier()  # every lane reads what others have stored
        rows, weights = inverse_rows(at, J), ()
        for number in tl.static_range(J):
            weights += (tl.load(at + number * (J + 1)),)
        tl.debug_barrier()
        for number in tl.static_range(J):
            tl.store(at + (number * J + tl.arange(0, J)), rows[number] * strengths * weights[number])
    else:
        token = tl.where(j == L - 1, strength, -strength * scores)
        matrix = tl.where(i == L - 1, token, tl.where(i == j, weight[:, None], 0.0))
        tl.store(at + (i * J + j), matrix)


@triton.jit
def keys_of_window(
    k_buffer, origin, slot, b, g, k, column, G: tl.constexpr, K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Key dims ``column`` (n,) of a full window's keys and the token's as record L - 1: (J, n); zero from K on."""
    j = tl.arange(0, J)
    row = (slot * G + g) * RING + ring_place(origin, slot, j, RING)
    inside = (column < K)[None, :]
    keys = tl.load(k_buffer + row[:, None] * K + column[None, :], mask=(j < L - 1)[:, None] & inside, other=0)
    if k is not None:
        token = tl.load(k + (b * G + g) * K + column, mask=column < K, other=0)
        keys = tl.where((j == L - 1)[:, None], token[None, :], keys)
    return keys


@triton.jit
def window_decays(
    log_decay_buffer, origin, slot, b, h, log_decay, H: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """gamma (J,), e_ij below the diagonal (J, J), 0 elsewhere, and w (J,), of a full window and a token."""
    LAST: tl.constexpr = L - 1 if log_decay is not None else L - 2
    j = tl.arange(0, J)
    at = (slot * H + h) * RING + ring_place(origin, slot, j, RING)
    gate = tl.load(log_decay_buffer + at, mask=j < L - 1, other=0)
    if log_decay is not None:
        gate = tl.where(j == L - 1, widened(tl.load(log_decay + b * H + h)), gate)
    gamma = tl.exp(tl.cumsum(gate, 0))
    below = j[:, None] > j[None, :]
    between = tl.exp(tl.cumsum(tl.where(below, gate[:, None], 0.0), 0))
    weight = tl.sum(tl.where((j == LAST)[:, None], between, 0.0), 0)
    return gamma, tl.where(below, between, 0.0), weight


@triton.jit
def window_strengths(
    beta_buffer,
    origin,
    slot,
    h,
    strength,
    H: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    RING: tl.constexpr,
):
    """beta (J,) of a full window and the token, zero behind; without a beta_buffer the token's alone."""
    j = tl.arange(0, J)
    strengths = tl.where(j == L - 1, strength, 0.0)
    if beta_buffer is not None:
        at = (slot * H + h) * RING + ring_place(origin, slot, j, RING)
        strengths += tl.load(beta_buffer + at, mask=j < L - 1, other=0)
    return strengths


@triton.jit
def head_system(
    item, flush_rows, slots, origin, k_buffer, beta_buffer, log_decay_buffer, k, log_decay, beta, systems, gammas,
    keys_after,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Head ``item`` of the flushing rows under one decay a head: its matrix M into ``systems`` (B, H, J, J) and gamma
    into ``gammas`` (B, H, J), at the number of the flush, the keys into ``keys_after`` (B, H, K, J).  Keys and token
    are bfloat16.
    """
    i, h = item // H, item % H
    b = tl.load(flush_rows + i)
    slot = tl.load(slots + b).to(tl.int64)
    g, j = h // (H // G), tl.arange(0, J)
    strength = 0.0
    if beta is not None:
        strength = widened(tl.load(beta + b * H + h))
    strengths = window_strengths(beta_buffer, origin, slot, h, strength, H, L, J, RING)
    gamma, between, weight = window_decays(log_decay_buffer, origin, slot, b, h, log_decay, H, L, J, RING)
    column = tl.arange(0, KP)
    keys = keys_of_window(k_buffer, origin, slot, b, g, k, column, G, K, L, J, RING)
    turned = keys_after + item * (J * K) + (column[:, None] * J + j[None, :])
    tl.store(turned, tl.trans(keys), mask=(column < K)[:, None])
    scores = product(keys, tl.trans(keys), None) * between
    RAW: tl.constexpr = beta_buffer is not None
    store_system(systems + item * (J * J), scores, strengths, weight, strength, L, J, RAW)
    tl.store(gammas + item * J + j, gamma)


# A head's records are (8, 4, J / 4, KP / 32, 4): lane 8 s + t holds four neighbours of every 32 key dims of every
# fourth record, so that a sum along the key dim exchanges data three times.  A vector along the key dim has one of the
# second and third sizes, and every lane loads its own.


@triton.jit
def record_columns(KP: tl.constexpr):
    """Key dim of every entry of a vector."""
    t = tl.arange(0, 8)[:, None, None, None, None]
    n = tl.arange(0, KP // 32)[None, None, None, :, None]
    column = 32 * n + 4 * t + tl.arange(0, 4)[None, None, None, None, :]
    return tl.broadcast_to(column, (8, 4, 1, KP // 32, 4))


@triton.jit
def next_token(keys, before, number, log_decay, key, record):
    """The keys of earlier tokens decayed by one token more; the product of all decays; and the token's scores along
    all keys, of which those along earlier ones count.
    """
    factor = tl.exp(log_decay)
    keys *= tl.where(record < number, factor, 1.0)
    return keys, before * factor, tl.sum(tl.sum(tl.sum(keys * key, 4), 3), 0)


@triton.jit
def store_parts(at, keys, inside, APART: tl.constexpr):
    """float32 keys as three bfloat16 that sum to them, APART apart."""
    high, middle, low = three_parts(keys)
    tl.store(at, high, mask=inside)
    tl.store(at + APART, middle, mask=inside)
    tl.store(at + 2 * APART, low, mask=inside)


@triton.jit
def channel_system(
    item, flush_rows, slots, origin, k_buffer, beta_buffer, log_decay_buffer, k, log_decay, beta, systems, gammas,
    keys_before, keys_after,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """``head_system`` under a decay a key channel: ``gammas`` (B, H, 2, K) have the decay of the whole window, and the
    token's key times it, if there is one; and as three bfloat16 each key times the decays up to it in ``keys_before``
    (B, H, 3, J, K), and times those behind it in ``keys_after`` (B, H, 3, K, J).
    """
    HELD: tl.constexpr = L if k is not None else L - 1
    i, h = item // H, item % H
    b = tl.load(flush_rows + i)
    slot = tl.load(slots + b).to(tl.int64)
    g, head = h // (H // G), slot * H + h
    lane = tl.arange(0, 4)[None, :, None, None, None]
    record = 4 * tl.arange(0, J // 4)[None, None, :, None, None] + lane
    row = tl.arange(0, 4)[:, None] + 4 * tl.arange(0, J // 4)[None, :]
    column = record_columns(KP)
    first = (lane == 0) & (column < K)
    system = systems + item * (J * J)
    before_at, after_at = keys_before + item * (3 * J * K), keys_after + item * (3 * J * K)
    gammas_at = gammas + (2 * item * K + column)
    strength = 0.0
    if beta is not None:
        strength = widened(tl.load(beta + b * H + h))
    strengths = window_strengths(beta_buffer, origin, slot, h, strength, H, L, J, RING)
    inside = (record < L - 1) & (column < K)
    places = ring_place(origin, slot, record, RING)
    keys = widened(tl.load(k_buffer + ((slot * G + g) * RING + places) * K + column, mask=inside, other=0))
    # All of a window's log decays at once, too: the loop then finds them in the cache.
    gates = tl.load(log_decay_buffer + (head * RING + places) * K + column, mask=inside, other=0)
    whole = tl.sum(tl.sum(gates, 2), 1)[:, None, None, :, :]
    before = tl.full((8, 4, 1, KP // 32, 4), 1.0, tl.float32)
    for number in range(L - 1):
        place = ring_place(origin, slot, number, RING)
        gate = entries(log_decay_buffer + (head * RING + place) * K, column, K)
        key = entries(k_buffer + ((slot * G + g) * RING + place) * K, column, K)
        keys, before, scores = next_token(keys, before, number, gate, key, record)
        tl.store(system + number * J + row, scores)
        store_parts(before_at + number * K + column, key * before, first, J * K)
    if k is not None:
        gate = entries(log_decay + (b * H + h) * K, column, K)
        key = entries(k + (b * G + g) * K, column, K)
        keys = tl.where(record == L - 1, key, keys)
        keys, before, scores = next_token(keys, before, L - 1, gate, key, record)
        tl.store(system + (L - 1) * J + row, scores)
        store_parts(before_at + (L - 1) * K + column, key * before, first, J * K)
        tl.store(gammas_at + K, key * before, mask=first)
        whole += gate
    for number in tl.static_range(HELD, J):  # behind the window
        store_parts(before_at + number * K + column, tl.zeros(column.shape, tl.float32), first, J * K)
    store_parts(after_at + column * J + record, keys, column < K, J * K)
    tl.store(gammas_at, tl.exp(whole), mask=first)
    tl.debug_barrier()  # other lanes read the scores than stored them
    i, j = tl.arange(0, J)[:, None], tl.arange(0, J)[None, :]
    scores = tl.load(system + (i * J + j), mask=(j < i) & (i < HELD), other=0)
    tl.debug_barrier()
    RAW: tl.constexpr = beta_buffer is not None
    weight = tl.full((J,), 1.0, tl.float32)
    store_system(system, scores, strengths, weight, strength, L, J, RAW)


@triton.jit
def window_system_kernel(
    positions, slots, flush_rows, flush_count, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta,
    coefficients, parts, halves, decays, vectors, key_scales, systems, gammas, keys_before, keys_after, shares,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BY_KEY: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """The first ``shares`` programs share the systems of the heads of the rows that flush; the others have the windows
    of the other rows, of a key head or a head each.  Without a token (q to beta None) L - 1 records are the whole
    window, and there are no others.
    """
    pid = tl.program_id(0)
    if pid < shares:
        total = tl.load(flush_count) * H
        # Invariants of the loop would live in registers all the time.
        for item in tl.range(pid, total, shares, num_stages=1, disable_licm=True):
            if BY_KEY:
                channel_system(
                    item, flush_rows, slots, origin, k_buffer, beta_buffer, log_decay_buffer, k, log_decay, beta,
                    systems, gammas, keys_before, keys_after, H, G, K, KP, L, J, RING,
                )  # fmt: skip
            else:
                head_system(
                    item, flush_rows, slots, origin, k_buffer, beta_buffer, log_decay_buffer, k, log_decay, beta,
                    systems, gammas, keys_after, H, G, K, KP, L, J, RING,
                )  # fmt: skip
    elif q is not None:
        one_window(
            pid - shares, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta,
            coefficients, parts, halves, decays, vectors, key_scales,
            H, G, K, KP, L, J, RING, HEADS, SIZE, BY_KEY, KEY_COPY,
        )  # fmt: skip
