"""Mamba-1 (selective state space): one decay for each element of the state.

    S_t[v, n] = exp(dt_t[v] A[v, n]) S_{t-1}[v, n] + dt_t[v] x_t[v] B_t[n]          o_t[v] = sum_n S_t[v, n] C_t[n]

with log_decay = dt, rates = A (negative), v = dt x, k = B, q = C.  A layer is one head: value_dim = d_inner, key_dim =
d_state.  Source: Gu and Dao, "Mamba" (arXiv 2312.00752), algorithm 2 and the simplified discretisation of B used by
``selective_scan``.
"""

import torch
from torch import Tensor

from quantlab.recurrences.base import DecayAxis, Recurrence, StepInputs, expand_groups, matvec, outer


def decay(log_decay: Tensor, rates: Tensor | None = None) -> Tensor:
    """exp(dt A): dt (..., heads, value_dim), A (heads, value_dim, key_dim) -> (..., heads, value_dim, key_dim)."""
    assert rates is not None  # checked where inputs enter: DecodeState and Stream
    return torch.exp(log_decay[..., None] * rates)


def step(state: Tensor, inputs: StepInputs, rates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token.  state (batch, heads, value_dim, key_dim) -> (new state, output (batch, heads, value_dim))."""
    heads = state.shape[1]
    k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
    state = decay(inputs.log_decay, rates) * state + outer(inputs.v, k)
    return state, matvec(state, q)


RECURRENCE = Recurrence(name="mamba1", step=step, decay=decay, axis=DecayAxis.ELEMENT)
