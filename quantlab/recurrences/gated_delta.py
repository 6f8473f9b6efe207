"""Gated DeltaNet (GDN): one scalar decay a head, and an erase term.

    S <- alpha_t S         d_t = beta_t (v_t - S k_t)         S_t = S + d_t (x) k_t         o_t = S_t q_t

with log_decay = log alpha = -exp(A_log) softplus(a + dt_bias), k l2-normalised, q already scaled by key_dim^-1/2.
Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), eq. 10; state orientation (value_dim,
key_dim) as in the decode kernels of the serving engines.
"""

from torch import Tensor

from quantlab.recurrences.base import Recurrence, StepInputs, expand_groups, head_decay, matvec, outer


def step(state: Tensor, inputs: StepInputs, rates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token.  state (batch, heads, value_dim, key_dim) -> (new state, output (batch, heads, value_dim))."""
    heads = state.shape[1]
    k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
    assert inputs.beta is not None  # checked where inputs enter: DecodeState and Stream
    state = head_decay(inputs.log_decay) * state
    d = inputs.beta[..., None] * (inputs.v - matvec(state, k))
    state = state + outer(d, k)
    return state, matvec(state, q)


RECURRENCE = Recurrence(name="gated_delta", step=step, decay=head_decay, delta_rule=True)
