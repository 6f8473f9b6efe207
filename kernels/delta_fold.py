"""The stores of a delta rule: the step that rewrites the state each token, and the fold of a full window.

    S' = decay S        d = beta (v - S' k)        S = S' + d k^T        o = S q = S' q + d (k . q)

A fold runs this recurrence over the window's records and the token on a tile of value rows that stays in registers,
which is the forward substitution for the window's d without its triangular system.  With ``contents=derived`` the
records bring their d.  The read copy needs a whole head's largest stored number first, so every program leaves that of
its rows in ``largest``, and ``copies`` encodes in a launch of its own.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.checkpoints import over_rows
from quantlab.kernels.decode import widened
from quantlab.kernels.delta_tiles import (
    copy_tile,
    dense_tile,
    row_sums,
    store_tile,
    tile_rows,
    tile_vector,
)
from quantlab.kernels.delta_window import (
    channel_coefficients,
    channel_decays,
    head_coefficients,
    newest_first,
    one_window,
    ring_place,
)
from quantlab.kernels.key_scales import key_factors


@triton.jit
def step_decay(
    log_decay, head, K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """exp of a head's log decay, a number or one a key channel."""
    if BY_KEY:
        factor = tl.exp(tile_vector(log_decay + head * K, K, KP, LANES, INNER))
    else:
        factor = tl.exp(widened(tl.load(log_decay + head)))
    return factor


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("random_stream",))
def step_kernel(
    checkpoint, checkpoint_scales, positions, slots, q, k, v, log_decay, beta, output, store_numbers, sequence_ids,
    seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    LANES: tl.constexpr, INNER: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """One token of every row, R value rows of a head a program; the output is read before rounding.

    BY_KEY: whether log_decay is (B, H, K) or (B, H).
    """
    TILES: tl.constexpr = V // R
    pid = tl.program_id(0)
    b, h, tile = pid // (H * TILES), (pid // TILES) % H, pid % TILES
    position, slot = tl.load(positions + b), tl.load(slots + b).to(tl.int64)
    # The slot as well, because one that decides nothing would be loaded after the position has come.
    if (position < 0) | (slot < 0):
        return
    g = h // (H // G)
    r = tile_rows(R, LANES)
    row = tile * R + r
    value = widened(tl.load(v + (b * H + h) * V + row))
    strength = widened(tl.load(beta + b * H + h))
    key = tile_vector(k + (b * G + g) * K, K, KP, LANES, INNER)
    query = tile_vector(q + (b * G + g) * K, K, KP, LANES, INNER)
    decay = step_decay(log_decay, b * H + h, K, KP, LANES, INNER, BY_KEY)
    first = (slot * H + h) * V + tile * R
    state = dense_tile(checkpoint, checkpoint_scales, first, r, K, KP, LANES, INNER, STORE)
    state *= decay
    # The output is read from the state below the token, so that no sum waits for another.
    d = strength * (value - row_sums(state * key))
    result = row_sums(state * query) + d * row_sums(key * query)
    state += over_rows(d) * key
    tl.store(output + (b * H + h) * V + row, narrowed(result, output.dtype.element_ty))
    store_tile(
        state, checkpoint, checkpoint_scales, first, r, h * V + tile * R, slot, store_numbers, sequence_ids, seed,
        random_stream, K, KP, LANES, INNER, STORE, ROUNDS,
    )  # fmt: skip


@triton.jit
def viewed_read(
    state, value, strength, key, query, slot, b, h, tile, origin, codes, scales, global_scale, key_scales, k_buffer,
    d_buffer, log_decay_buffer, q, k, log_decay,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr,
    BY_KEY: tl.constexpr, KEY_COPY: tl.constexpr,
):  # fmt: skip
    """What the token of a full window reads through the copy (S k from the checkpoint without KEY_COPY) and the
    records' d as they are: its d and the output.
    """
    j, head = tl.arange(0, J), slot * H + h
    own = row_sums(key * query)
    whole = 1.0
    if BY_KEY:
        j = newest_first(J)
        from_key, from_query, _, _, _ = channel_coefficients(
            k_buffer, log_decay_buffer, origin, slot, b, h, L - 1, q, k, log_decay, H, G, K, KP, L, J, RING
        )
        total = tile_vector(log_decay + (b * H + h) * K, K, KP, LANES, INNER)
        if L > 1:
            for i in range(L - 1):
                gate = head * RING + ring_place(origin, slot, i, RING)
                total += tile_vector(log_decay_buffer + gate * K, K, KP, LANES, INNER)
        key *= tl.exp(total)
        query *= tl.exp(total)
    else:
        one = tl.arange(0, 1)
        from_key, from_query, whole, _ = head_coefficients(
            k_buffer, log_decay_buffer, origin, slot, b, h + one, one == 0, L - 1, q, k, log_decay,
            H, G, K, KP, L, J, RING,
        )  # fmt: skip
        from_key, from_query, whole = tl.sum(from_key, 0), tl.sum(from_query, 0), tl.sum(whole, 0)
    first = head * V + tile * R
    viewed = copy_tile(codes, scales, global_scale, head, first, tile_rows(R, LANES), K, KP, LANES, INNER)
    if key_scales is not None:
        # As numbers, which float32 holds, on their way into a tile's layout.
        exponents = tile_vector(key_scales + head * K, K, KP, LANES, INNER)
        viewed *= key_factors(exponents)
    along_query = row_sums(viewed * query) * whole
    if KEY_COPY:
        along_key = row_sums(viewed * key) * whole
    else:
        along_key = row_sums(state * key) * whole
    if L > 1:
        record = (head * RING + ring_place(origin, slot, j, RING)) * V
        at = record[:, None, None] + tile * R + tile_rows(R, LANES)[None, :, :]
        records = widened(tl.load(d_buffer + at, mask=(j < L - 1)[:, None, None], other=0))
        along_key += tl.sum(records * from_key[:, None, None], 0)
        # The token's own coefficient stands at L - 1, where the tile of records is zero.
        along_query += tl.sum(records * from_query[:, None, None], 0)
    d = strength * (value - along_key)
    return d, along_query + d * own


@triton.jit
def fold_tile(
    item, flush_rows, slots, origin, codes, scales, global_scale, key_scales, checkpoint, checkpoint_scales, k_buffer,
    d_buffer, v_buffer, beta_buffer, log_decay_buffer, q, k, v, log_decay, beta, output, largest, factors,
    store_numbers, sequence_ids, seed, random_stream,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr,
    STORE: tl.constexpr, BY_KEY: tl.constexpr,
    KEY_COPY: tl.constexpr, OUTPUT_COPY: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Tile ``item`` of the flushing rows: fold, output, round, store, and the largest stored magnitude.

    KEY_COPY, OUTPUT_COPY: whether what the token reads along its key (for a d that is not derived again) and its output
    come from the copy.  The records' d are derived from v_buffer where there is one.  Without a token (q to output
    None) L - 1 records are the whole window, and nothing is put out.
    """
    TILES: tl.constexpr = V // R
    RAW: tl.constexpr = v_buffer is not None or (L == 1 and not KEY_COPY)
    VIEWED: tl.constexpr = q is not None and (OUTPUT_COPY or (KEY_COPY and not RAW))
    i, h, tile = item // (H * TILES), (item // TILES) % H, item % TILES
    b = tl.load(flush_rows + i)
    slot = tl.load(slots + b).to(tl.int64)
    g, head = h // (H // G), slot * H + h
    r = tile_rows(R, LANES)
    first_row = h * V + tile * R
    row = first_row + r
    first = head * V + tile * R
    state = dense_tile(checkpoint, checkpoint_scales, first, r, K, KP, LANES, INNER, STORE)
    if q is not None:
        key = tile_vector(k + (b * G + g) * K, K, KP, LANES, INNER)
        query = tile_vector(q + (b * G + g) * K, K, KP, LANES, INNER)
        value = widened(tl.load(v + b * (H * V) + row))
        strength = widened(tl.load(beta + b * H + h))

    if VIEWED:
        read_d, viewed_output = viewed_read(
            state, value, strength, key, query, slot, b, h, tile, origin, codes, scales, global_scale, key_scales,
            k_buffer, d_buffer, log_decay_buffer, q, k, log_decay,
            H, G, V, K, KP, L, J, RING, R, LANES, INNER, BY_KEY, KEY_COPY,
        )  # fmt: skip
    if BY_KEY and L > 1:
        # Lanes of several rows share a channel, and they had better not form its decay again.
        channel_decays(log_decay_buffer, origin, slot, h, factors, H, K, KP, L, J, RING)
    if L > 1:  # Triton 3.6 compiles the body of an empty loop, too
        for j in range(L - 1):
            place = ring_place(origin, slot, j, RING)
            record_key = tile_vector(k_buffer + ((slot * G + g) * RING + place) * K, K, KP, LANES, INNER)
            gate = head * RING + place
            if BY_KEY:
                state *= tile_vector(factors + j * K, K, KP, LANES, INNER)
            else:
                state *= tl.exp(tl.load(log_decay_buffer + gate))
            record = gate * V + tile * R + r
            if RAW:
                record_value = widened(tl.load(v_buffer + record))
                d = tl.load(beta_buffer + gate) * (record_value - row_sums(state * record_key))
            else:
                d = widened(tl.load(d_buffer + record))
            state += over_rows(d) * record_key
    if q is not None:
        state *= step_decay(log_decay, b * H + h, K, KP, LANES, INNER, BY_KEY)
        if KEY_COPY and not RAW:
            d = read_d
        else:
            d = strength * (value - row_sums(state * key))
        if OUTPUT_COPY:
            result = viewed_output
        else:
            result = row_sums(state * query) + d * row_sums(key * query)
        state += over_rows(d) * key
        tl.store(output + b * (H * V) + row, narrowed(result, output.dtype.element_ty))
    most = store_tile(
        state, checkpoint, checkpoint_scales, first, r, first_row, slot, store_numbers, sequence_ids, seed,
        random_stream, K, KP, LANES, INNER, STORE, ROUNDS,
    )  # fmt: skip
    if largest is not None:
        tl.store(largest + item, most)


# Triton would compile anew for a stream or a number of programs that is a multiple of 16.
@triton.jit(do_not_specialize=("random_stream", "folds"))
def window_fold_kernel(
    positions, slots, flush_rows, flush_count, origin, codes, scales, global_scale, key_scales, checkpoint,
    checkpoint_scales, k_buffer, d_buffer, v_buffer, beta_buffer, log_decay_buffer, q, k, v, log_decay, beta, output,
    coefficients, parts, halves, decays, vectors, largest, factors, store_numbers, sequence_ids, seed, random_stream,
    folds,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr,
    J: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, STORE: tl.constexpr, BY_KEY: tl.constexpr, KEY_COPY: tl.constexpr, OUTPUT_COPY: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """The first ``folds`` programs share the tiles of the rows that flush; the others prepare the windows of the other
    rows.

    largest: float32 (B, H, V / R), at the number of the flush; None without a copy.  factors: float32 (folds, J, K) to
    work in; None unless BY_KEY.  KEY_COPY: whether the copy serves
    S k; OUTPUT_COPY: whether it serves the output of a flush.  Without a token (q to output None) whole windows of
    L - 1 records are folded, and that is all.
    """
    pid = tl.program_id(0)
    if pid < folds:
        total = tl.load(flush_count) * (H * (V // R))
        # Invariants of the loop would live in registers all the time.
        for item in tl.range(pid, total, folds, num_stages=1, disable_licm=True):
            fold_tile(
                item, flush_rows, slots, origin, codes, scales, global_scale, key_scales, checkpoint, checkpoint_scales,
                k_buffer, d_buffer, v_buffer, beta_buffer, log_decay_buffer, q, k, v, log_decay, beta, output, largest,
                None if factors is None else factors + pid * (J * K), store_numbers, sequence_ids, seed,
                random_stream,
                H, G, V, K, KP, L, J, RING, R, LANES, INNER, STORE, BY_KEY, KEY_COPY, OUTPUT_COPY, ROUNDS,
            )  # fmt: skip
    elif q is None or L == 1:  # no window to read
        pass
    else:
        one_window(
            pid - folds, positions, slots, origin, k_buffer, log_decay_buffer, beta_buffer, q, k, log_decay, beta,
            coefficients, parts, halves, decays, vectors, key_scales,
            H, G, K, KP, L, J, RING, HEADS, SIZE, BY_KEY, KEY_COPY,
        )  # fmt: skip
