"""The exact state beside which policies run: float64, updated in place."""

import torch
from torch import Tensor

from quantlab.recurrences import StepInputs, expand_groups, get_recurrence


class ExactState:
    """One recurrence in float64, step by step: what ``Recurrence.step`` computes, without a new state for every token.

    The decayed state is read along k and along q by one product, and o = S q is split as (decayed S) q + d (k . q), so
    that a step passes over the state three times.  ``state``: (batch, heads, value_dim, key_dim), overwritten by the
    next step.
    """

    def __init__(self, family: str, initial: Tensor, rates: Tensor | None = None):
        self.recurrence = get_recurrence(family)
        self.state = initial.to(torch.float64, copy=True)
        self.rates = None if rates is None else rates.double()

    def read(self, vectors: Tensor) -> Tensor:
        """S w for vectors (batch, heads, m, key_dim): (batch, heads, m, value_dim)."""
        return torch.matmul(vectors, self.state.transpose(-1, -2))

    def step(self, inputs: StepInputs) -> Tensor:
        """Decode one token of float64 inputs; returns the output (batch, heads, value_dim)."""
        heads = self.state.shape[1]
        k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
        self.state.mul_(self.recurrence.decay(inputs.log_decay, self.rates))
        if self.recurrence.delta_rule:
            assert inputs.beta is not None  # checked where inputs enter: Stream
            along_k, along_q = self.read(torch.stack([k, q], 2)).unbind(2)
            d = inputs.beta[..., None] * (inputs.v - along_k)
        else:
            along_q, d = self.read(q[:, :, None])[:, :, 0], inputs.v
        self.state.addcmul_(d[..., :, None], k[..., None, :])
        return along_q + d * (k * q).sum(-1, keepdim=True)
