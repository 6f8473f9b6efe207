"""Gated delta rule: ``torch_recurrent_gated_delta_rule`` and ``torch_chunk_gated_delta_rule``, one signature."""

from typing import Any

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.families.base import Family, OpCall, key_dim_swapped, refuse_packed
from quantlab.recurrences import StepInputs

# The l2 norm of query and key in the model's own op adds this inside the square root.
_L2_EPSILON = 1e-6


def chunk_inputs(
    mixer: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> OpCall:
    """T tokens: query and key (B, T, heads, K), value (B, T, H, V), g (log decay) and beta (B, T, H)."""
    refuse_packed(mixer, options)
    repeat = key.shape[2] // _distinct_key_heads(mixer, key)
    q, k = query[:, :, ::repeat].float(), key[:, :, ::repeat].float()
    if use_qk_l2norm_in_kernel:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _L2_EPSILON) for t in (q, k))
    q = q * q.shape[-1] ** -0.5

    def finish(outputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return outputs.to(query.dtype), state if output_final_state else None

    inputs = StepInputs(q=q, k=k, v=value.float(), log_decay=g.float(), beta=beta.float())
    return OpCall(initial_state, inputs, finish)


def token_inputs(mixer: nn.Module | None, *args: Any, **kwargs: Any) -> OpCall:
    """One token, with a token dimension of 1 in every argument."""
    several = chunk_inputs(mixer, *args, **kwargs)
    count = several.inputs.v.shape[1]
    if count != 1:
        raise InputError("tokens", count, "one a call of the recurrent op")
    return OpCall(
        several.state,
        several.inputs.token(0),
        lambda output, state: several.finish(output[:, None], state),
    )


def key_heads(mixer: nn.Module | None, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    return _distinct_key_heads(mixer, key)


def _distinct_key_heads(mixer: nn.Module | None, key: Tensor) -> int:
    # Some releases repeat query and key to one per value head before the op, others inside it.  The module
    # knows how many there really are; the window's records and the byte ledger must not depend on the
    # release.
    heads = getattr(mixer, "num_k_heads", key.shape[2])
    return heads if key.shape[2] % heads == 0 else key.shape[2]


FAMILY = Family(
    "gated_delta",
    step_op="torch_recurrent_gated_delta_rule",
    prefill_op="torch_chunk_gated_delta_rule",
    prefill_state="initial_state",
    to_state=key_dim_swapped,
    to_model=key_dim_swapped,
    token_inputs=token_inputs,
    chunk_inputs=chunk_inputs,
    key_heads=key_heads,
)
