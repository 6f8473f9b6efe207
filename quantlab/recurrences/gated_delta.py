"""Gated DeltaNet (GDN): one scalar decay a head, and an erase term.

    S <- alpha_t S         d_t = beta_t (v_t - S k_t)         S_t = S + d_t (x) k_t         o_t = S_t q_t

with log_decay = log alpha = -exp(A_log) softplus(a + dt_bias), k l2-normalised, q already scaled by key_dim^-1/2.
beta lies in (0, 1), or in (0, 2) where the layer allows negative eigenvalues: I - beta k k^T then reflects along k.
value_dim and key_dim need not be equal.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), eq. 10; negative eigenvalues: Grazzi et
al. (arXiv 2411.12537); state orientation (value_dim, key_dim) as in the decode kernels of the serving engines.
"""

from torch import Tensor

from quantlab.recurrences.base import Recurrence, StepInputs, delta_rule_step, head_decay


def step(state: Tensor, inputs: StepInputs, rates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token.  state (batch, heads, value_dim, key_dim) -> (new state, output (batch, heads, value_dim))."""
    return delta_rule_step(state, inputs, head_decay(inputs.log_decay))


RECURRENCE = Recurrence(name="gated_delta", step=step, decay=head_decay, delta_rule=True)
