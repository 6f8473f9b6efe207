"""Kimi Delta Attention (KDA): the delta rule of GDN with a decay for each key channel.

    S <- S Diag(alpha_t)     d_t = beta_t (v_t - S k_t)     S_t = S + d_t (x) k_t     o_t = S_t q_t

with log_decay = log alpha (batch, heads, key_dim) = -exp(A_log) softplus(f(x) + dt_bias), k l2-normalised, q already
scaled by key_dim^-1/2, beta a sigmoid.

Source: "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv 2510.26692), eq. 1; state orientation
(value_dim, key_dim), so that Diag(alpha) scales columns.
"""

from torch import Tensor

from quantlab.recurrences.base import DecayAxis, Recurrence, StepInputs, delta_rule_step, key_decay


def step(state: Tensor, inputs: StepInputs, rates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token.  state (batch, heads, value_dim, key_dim) -> (new state, output (batch, heads, value_dim))."""
    return delta_rule_step(state, inputs, key_decay(inputs.log_decay))


RECURRENCE = Recurrence(name="kimi_delta", step=step, decay=key_decay, delta_rule=True, axis=DecayAxis.KEY)
