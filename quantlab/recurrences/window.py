"""A window of records on top of a base state: read through it, fold it, re-derive the deltas of a delta rule.

With g_j the cumulative log decay up to and including record j, and g_n that of the whole window,

    S_n = exp(g_n) S_0 + sum_j exp(g_n - g_j) d_j (x) k_j.

Everything here is the same sum, arranged so that a read never forms the dense state.
"""

import torch
from torch import Tensor

from quantlab.recurrences.base import Records, Recurrence, expand_groups


def _suffix(log_decay: Tensor) -> Tensor:
    """g_n - g_j for each record j: the decay that acts on a record after it was written (0 for the newest).

    Summed over the later records themselves: a difference of two totals cancels behind a gate that closes (in float32
    nothing is left of a decay of 0.01 beside one of 1e6), and is NaN for log decay -inf.
    """
    later = torch.cat([log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])], 1)
    return later.flip(1).cumsum(1).flip(1)


def fold(recurrence: Recurrence, base: Tensor, records: Records, rates: Tensor | None = None) -> Tensor:
    """The dense state after ``records``: base (batch, heads, value_dim, key_dim) -> same shape.

    ``records.d`` must be there; a delta rule gets it from ``solve_deltas`` or from a buffer that kept it.
    """
    assert records.d is not None
    if len(records) == 0:
        return base
    heads = base.shape[1]
    k = expand_groups(records.k, heads, 2)
    if recurrence.elementwise_decay:
        # Record by record: as many exponentials as the closed sum, a third of its memory traffic.
        state = base
        for j in range(len(records)):
            decayed = recurrence.decay(records.log_decay[:, j], rates) * state
            state = torch.addcmul(decayed, records.d[:, j, ..., None], k[:, j, ..., None, :])
        return state
    factor = recurrence.decay(records.log_decay.sum(1), rates)
    d = records.d * torch.exp(_suffix(records.log_decay))[..., None]
    return torch.baddbmm(
        (factor * base).flatten(0, 1),
        d.permute(0, 2, 3, 1).flatten(0, 1),
        k.permute(0, 2, 1, 3).flatten(0, 1),
    ).view_as(base)


def decayed_read(
    recurrence: Recurrence,
    base: Tensor,
    records: Records,
    log_decay: Tensor,
    vectors: Tensor,
    rates: Tensor | None = None,
) -> Tensor:
    """Read the state just before the current token is written: (decay of the token) * S_n, times each vector.

    log_decay: of the current token.  vectors: (batch, heads, m, key_dim).  Returns (batch, heads, m, value_dim).
    """
    assert records.d is not None
    heads = base.shape[1]
    if recurrence.elementwise_decay:
        state = fold(recurrence, base, records, rates) * recurrence.decay(log_decay, rates)
        return torch.matmul(vectors, state.transpose(-1, -2))
    total = log_decay if len(records) == 0 else log_decay + records.log_decay.sum(1)
    result = torch.exp(total)[..., None, None] * torch.matmul(vectors, base.transpose(-1, -2))
    if len(records) == 0:
        return result
    k = expand_groups(records.k, heads, 2).transpose(1, 2)
    weights = torch.exp(log_decay[:, None] + _suffix(records.log_decay)).transpose(1, 2)
    scores = torch.matmul(vectors, k.transpose(-1, -2)) * weights[..., None, :]
    return result + torch.matmul(scores, records.d.transpose(1, 2))


def solve_deltas(recurrence: Recurrence, base: Tensor, records: Records) -> Tensor:
    """d_j = beta_j (v_j - S_{j-1}' k_j) for every record, from the base state: (batch, n, heads, value_dim).

    S_{j-1}' is the state before record j, decayed by its own step.  The d_j obey a unit lower triangular system,

        d_j + beta_j sum_{i<j} exp(g_j - g_i) (k_i . k_j) d_i = beta_j (v_j - exp(g_j) S_0 k_j),

    which is the chunk form of the delta rule (arXiv 2406.06484, eq. 9-11) and gives the deltas that a step-by-step
    run from ``base`` would write.
    """
    assert recurrence.delta_rule
    assert records.v is not None
    assert records.beta is not None
    heads = base.shape[1]
    k = expand_groups(records.k, heads, 2).transpose(1, 2)
    cumulative = records.log_decay.cumsum(1).transpose(1, 2)
    beta = records.beta.transpose(1, 2)[..., None]
    # g_j - g_i as the sum over i < m <= j, for the reason given in _suffix.
    steps = records.log_decay.transpose(1, 2)[..., :, None].expand(*cumulative.shape, len(records))
    earlier = torch.ones(len(records), len(records), dtype=torch.bool, device=base.device).tril(-1)
    between = torch.exp(steps.masked_fill(~earlier, 0.0).cumsum(-2))
    system = (beta * between * torch.matmul(k, k.transpose(-1, -2))).tril(-1)
    predicted = torch.exp(cumulative)[..., None] * torch.matmul(k, base.transpose(-1, -2))
    right = beta * (records.v.transpose(1, 2) - predicted)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return solved.transpose(1, 2)
