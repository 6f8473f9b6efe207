"""Mamba-2 (state-space duality): one scalar decay a head.

    S_t = exp(A dt_t) S_{t-1} + (dt_t x_t) (x) B_t          o_t = S_t C_t

with log_decay = A dt, v = dt x, k = B, q = C.  The skip D x is added by the layer, outside the state.
Source: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), eq. 16-18, and the reference implementation
``selective_state_update`` of state-spaces/mamba.
"""

from torch import Tensor

from quantlab.recurrences.base import Recurrence, StepInputs, expand_groups, head_decay, matvec, outer


def step(state: Tensor, inputs: StepInputs, rates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token.  state (batch, heads, value_dim, key_dim) -> (new state, output (batch, heads, value_dim))."""
    heads = state.shape[1]
    k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
    state = head_decay(inputs.log_decay) * state + outer(inputs.v, k)
    return state, matvec(state, q)


RECURRENCE = Recurrence(name="mamba2", step=step, decay=head_decay)
