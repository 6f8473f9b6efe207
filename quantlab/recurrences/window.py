"""A window of records on top of a base state: read through it, fold it, re-derive the deltas of a delta rule.

With g_j the cumulative log decay up to and including record j, and g_n that of the whole window,

    S_n = exp(g_n) S_0 + sum_j d_j (x) exp(g_n - g_j) k_j.

Everything here is the same sum, arranged so that a read never forms the dense state.  A decay of a key channel
(kimi_delta) multiplies k_j and the reading vector entry by entry; a decay of a head is the same number in every entry.
The decay between two tokens is summed over the tokens themselves: a difference of two totals cancels behind a gate that
closes (in float32 nothing is left of a decay of 0.01 beside one of 1e6), and is NaN for log decay -inf.

Any float dtype; on bfloat16 and float16 every operation rounds to it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantlab.recurrences.base import DecayAxis, Records, Recurrence, StepInputs, expand_groups, matvec

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""accumulator (n, V, K), left (n, V, m), right (n, m, K) -> accumulator + left @ right."""

Write = Callable[[Tensor], Tensor]
"""d as it is used and kept, from d as it was computed; same shape."""


def _suffix(log_decay: Tensor) -> Tensor:
    """g_n - g_j for each record j: the decay that acts on a record after it was written (0 for the newest)."""
    later = torch.cat([log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])], 1)
    return later.flip(1).cumsum(1).flip(1)


def _on_key(recurrence: Recurrence, log_decay: Tensor) -> Tensor:
    """exp(log_decay) as a factor of vectors along the key dim: (..., key_dim or 1)."""
    factor = torch.exp(log_decay)
    return factor if recurrence.axis is DecayAxis.KEY else factor[..., None]


def fold(
    recurrence: Recurrence,
    base: Tensor,
    records: Records,
    rates: Tensor | None = None,
    product: Product = torch.baddbmm,
) -> Tensor:
    """The dense state after ``records``: base (batch, heads, value_dim, key_dim) -> same shape.

    ``records.d`` must be there; a delta rule gets it from ``solve_deltas`` or from a buffer that kept it.
    product: the matrix product, where its arithmetic is under study (not for mamba1, which has none).
    """
    assert records.d is not None
    if len(records) == 0:
        return base
    heads = base.shape[1]
    k = expand_groups(records.k, heads, 2)
    if recurrence.axis is DecayAxis.ELEMENT:
        # Record by record: as many exponentials as the closed sum, a third of its memory traffic.
        state = base
        for j in range(len(records)):
            decayed = recurrence.decay(records.log_decay[:, j], rates) * state
            state = torch.addcmul(decayed, records.d[:, j, ..., None], k[:, j, ..., None, :])
        return state
    d = records.d
    weight = _on_key(recurrence, _suffix(records.log_decay))
    if recurrence.axis is DecayAxis.KEY:
        k = k * weight
    else:
        d = d * weight
    decayed = recurrence.decay(records.log_decay.sum(1), rates) * base
    return product(
        decayed.flatten(0, 1), d.permute(0, 2, 3, 1).flatten(0, 1), k.permute(0, 2, 1, 3).flatten(0, 1)
    ).view_as(base)


def window_read(
    recurrence: Recurrence,
    base: Tensor,
    records: Records,
    log_decay: Tensor,
    vectors: Tensor,
    rates: Tensor | None = None,
) -> Tensor:
    """Read base and records after a further decay: exp(log_decay) S_n, times each vector.

    log_decay: (batch, m or 1, *gate), for each vector the sum over the tokens since the newest record, that of the
    reading token included.  vectors: (batch, heads, m, key_dim).  Returns (batch, heads, m, value_dim).
    """
    assert records.d is not None
    heads = base.shape[1]
    if recurrence.axis is DecayAxis.ELEMENT:
        folded = fold(recurrence, base, records, rates)
        states = folded[:, None] * recurrence.decay(log_decay, rates)
        return matvec(states, vectors.transpose(1, 2)).transpose(1, 2)
    vectors = vectors * _on_key(recurrence, log_decay).transpose(1, 2)
    if len(records) == 0:
        return torch.matmul(vectors, base.transpose(-1, -2))
    k = expand_groups(records.k, heads, 2) * _on_key(recurrence, _suffix(records.log_decay))
    scores = torch.matmul(vectors, k.permute(0, 2, 3, 1))
    whole = _on_key(recurrence, records.log_decay.sum(1))[:, :, None]
    through_base = torch.matmul(vectors * whole, base.transpose(-1, -2))
    return through_base + torch.matmul(scores, records.d.transpose(1, 2))


def pair_scores(recurrence: Recurrence, vectors: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """vectors_j . (exp(g_j - g_i) k_i) for tokens i <= j of one chunk, 0 above: (batch, heads, j, i).

    vectors, k: (batch, heads, tokens, key_dim); log_decay: (batch, tokens, *gate).
    """
    count = k.shape[2]
    if count == 1:
        return (vectors * k).sum(-1, keepdim=True)
    per_head = log_decay.transpose(1, 2)
    # g_j - g_i as the sum over i < m <= j.
    steps = per_head[:, :, :, None].expand(*per_head.shape[:3], count, *per_head.shape[3:])
    lower = torch.ones(count, count, dtype=torch.bool, device=k.device).tril()
    after = lower.tril(-1)
    if recurrence.axis is DecayAxis.KEY:
        between = torch.exp(steps.masked_fill(~after[..., None], 0.0).cumsum(2))
        weighted = between * vectors[:, :, :, None]
        scores = torch.einsum("bhjik,bhik->bhji", weighted, k)
    else:
        between = torch.exp(steps.masked_fill(~after, 0.0).cumsum(2))
        scores = torch.matmul(vectors, k.transpose(-1, -2)) * between
    return scores.masked_fill(~lower, 0.0)


def solve_deltas(
    recurrence: Recurrence, base: Tensor, records: Records, write: Write | None = None
) -> Tensor:
    """d_j = beta_j (v_j - S_{j-1}' k_j) for every record, from the base state: (batch, n, heads, value_dim).

    S_{j-1}' is the state before record j, decayed by its own step.  The d_j obey a unit lower triangular system,

        d_j + beta_j sum_{i<j} (k_j . exp(g_j - g_i) k_i) d_i = beta_j (v_j - S_0 exp(g_j) k_j),

    which is the chunk form of the delta rule (arXiv 2406.06484, eq. 9-11) and gives the deltas that a step-by-step
    run from ``base`` would write.  write: rounds each d before it is used, if its rounding is under study.
    """
    assert recurrence.delta_rule
    assert records.v is not None
    k = expand_groups(records.k, base.shape[1], 2).transpose(1, 2)
    predicted = window_read(recurrence, base, EMPTY, records.log_decay.cumsum(1), k)
    return _deltas(recurrence, k, predicted, records.v, records.log_decay, records.beta, write)


def read_tokens(
    recurrence: Recurrence,
    base: Tensor,
    records: Records,
    tokens: StepInputs,
    rates: Tensor | None = None,
    key_base: Tensor | None = None,
    write: Write | None = None,
) -> tuple[Tensor, Tensor]:
    """Several tokens on top of a window, by matrix products, without forming a state.

    tokens: q, k, v, log_decay, beta with a token dimension T after the batch.  key_base: what S k is read from, if it
    is not ``base``.  write: as in ``solve_deltas``.  Returns what each token writes along its key, d (batch, T, heads,
    value_dim), and the outputs, same shape.  (mamba1 steps through them: its decay has no matrix form.)
    """
    heads = base.shape[1]
    if recurrence.axis is DecayAxis.ELEMENT:
        return _stepped(recurrence, fold(recurrence, base, records, rates), tokens, rates, write)
    q, k = (expand_groups(t, heads, 2).transpose(1, 2) for t in (tokens.q, tokens.k))
    since = tokens.log_decay.cumsum(1)
    if not recurrence.delta_rule:
        d = tokens.v if write is None else write(tokens.v)
        outputs = window_read(recurrence, base, records, since, q)
    else:
        if key_base is None or key_base is base:
            both = window_read(recurrence, base, records, torch.cat([since, since], 1), torch.cat([k, q], 2))
            predicted, outputs = both.chunk(2, 2)
        else:
            predicted = window_read(recurrence, key_base, records, since, k)
            outputs = window_read(recurrence, base, records, since, q)
        d = _deltas(recurrence, k, predicted, tokens.v, tokens.log_decay, tokens.beta, write)
    within = pair_scores(recurrence, q, k, tokens.log_decay)
    return d, (outputs + _causal(within, d.transpose(1, 2))).transpose(1, 2)


def _causal(weights: Tensor, values: Tensor) -> Tensor:
    """Lower triangular (..., T, T) @ values (..., T, value_dim); what is not finite reaches no earlier token."""
    if weights.shape[-1] == 1 or bool(torch.isfinite(values).all()):
        return torch.matmul(weights, values)
    reached = (~torch.isfinite(values)).cumsum(-2) > 0
    return torch.matmul(weights, values.masked_fill(reached, 0.0)).masked_fill(reached, torch.nan)


def _stepped(
    recurrence: Recurrence, state: Tensor, tokens: StepInputs, rates: Tensor | None, write: Write | None
) -> tuple[Tensor, Tensor]:
    """``read_tokens`` by steps on a dense state, for a decay of single elements."""
    outputs = []
    if write is not None:
        tokens = replace(tokens, v=write(tokens.v))
    for t in range(tokens.v.shape[1]):
        state, output = recurrence.step(state, tokens.token(t), rates)
        outputs.append(output)
    return tokens.v, torch.stack(outputs, 1)


def _deltas(
    recurrence: Recurrence,
    k: Tensor,
    predicted: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    write: Write | None,
) -> Tensor:
    """The system of ``solve_deltas``, given what the state before the tokens holds along each of their keys.

    k: (batch, heads, tokens, key_dim); predicted: (batch, heads, tokens, value_dim); the others as in Records.
    """
    assert beta is not None
    strength = beta.transpose(1, 2)[..., None]
    right = strength * (v.transpose(1, 2) - predicted)
    if k.shape[2] == 1 and write is None:
        return right.transpose(1, 2)
    system = (strength * pair_scores(recurrence, k, k, log_decay)).tril(-1)
    if write is None and right.dtype in (torch.float32, torch.float64):
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        return solved.transpose(1, 2)
    # Row by row: LAPACK has no half precision, and a rounded d enters the rows below it.
    rows = []
    for row in range(right.shape[2]):
        d = right[:, :, row]
        if rows:
            earlier = torch.stack(rows, 2)
            d = d - torch.matmul(system[:, :, row, None, :row], earlier)[:, :, 0]
        rows.append(d if write is None else write(d))
    return torch.stack(rows, 1)


EMPTY = Records(torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0))
"""A window without records."""
