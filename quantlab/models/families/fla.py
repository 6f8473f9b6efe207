"""flash-linear-attention's layers: ``fused_recurrent_gated_delta_rule``, ``fused_recurrent_kda`` and the chunk ops.

They differ from transformers' calls in four ways.  The op gets raw gates: log decay = -exp(A_log) softplus(g +
dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)); beta = sigmoid, doubled for negative eigenvalues.  The state
is (N, H, V, K) already.  The recurrent op serves short prompts too, with no state to start from.  And the sequences of
a padded batch come as one packed row with ``cu_seqlens``, one token each when they decode.  The layer keeps the state
that the op returned.  Source: flash-linear-attention 0.5.2, fla/layers/gated_deltanet.py, kda.py and their kernels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.families.base import Family, OpCall, key_dim_last
from quantlab.recurrences import StepInputs

_L2_EPSILON = 1e-6


def decodes(mixer: nn.Module | None, *, q: Tensor, initial_state: Tensor | None = None, **_: Any) -> bool:
    """Whether the recurrent op is called for one token of each sequence that has a state."""
    return initial_state is not None and q.shape[0] * q.shape[1] == len(initial_state)


def token_inputs(mixer: nn.Module | None, **call: Any) -> OpCall:
    """One token of N sequences, as (N, 1, ...) or packed as (1, N, ...)."""
    offsets = call.get("cu_seqlens")
    if offsets is not None and not torch.equal(
        offsets.cpu(), torch.arange(len(offsets), dtype=offsets.dtype)
    ):
        raise InputError("cu_seqlens", offsets.tolist(), "one token of each sequence in a decode step")
    several = chunk_inputs(mixer, **call)
    return OpCall(
        several.state,
        several.inputs.map(lambda t: t.flatten(0, 1)),
        lambda output, state: several.finish(output.view_as(call["v"]), state),
    )


def chunk_inputs(
    mixer: nn.Module | None,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    **_: Any,
) -> OpCall:
    """T tokens, by keyword as the layers call: q and k (B, T, heads, K), v (B, T, H, V), g (B, T, H) or (B, T, H, K),
    beta (B, T, H).
    """
    if not state_v_first:
        raise InputError("state_v_first", state_v_first, "True, the layout of flash-linear-attention 0.5.2")
    q32, k32, decay, strength = q.float(), k.float(), g.float(), beta.float()
    if use_qk_l2norm_in_kernel:
        q32, k32 = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _L2_EPSILON) for t in (q32, k32))
    if use_gate_in_kernel:
        assert A_log is not None  # the op itself asks for it
        if dt_bias is not None:
            decay = decay + dt_bias.float().view(decay.shape[2:])
        decay = _log_decay(decay, A_log.float().exp(), lower_bound)
    if use_beta_sigmoid_in_kernel:
        strength = strength.sigmoid() * (2 if allow_neg_eigval else 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = StepInputs(q=q32 * factor, k=k32, v=v.float(), log_decay=decay, beta=strength)

    def finish(outputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return outputs.to(v.dtype), state if output_final_state else None

    return OpCall(initial_state, inputs, finish)


def _log_decay(gate: Tensor, rates: Tensor, lower_bound: float | None) -> Tensor:
    """The gate law of the layer: gate (B, T, H) or (B, T, H, K), rates (H,)."""
    rates = rates.view(-1, *[1] * (gate.ndim - 3))
    if lower_bound is None:
        return -rates * F.softplus(gate)
    return lower_bound * torch.sigmoid(rates * gate)


def key_heads(mixer: nn.Module | None, *, k: Tensor, **_: Any) -> int:
    return k.shape[2]


def _family(recurrence: str, step_op: str, prefill_op: str) -> Family:
    return Family(
        recurrence,
        step_op=step_op,
        prefill_op=prefill_op,
        prefill_state="initial_state",
        to_state=key_dim_last,
        to_model=key_dim_last,
        token_inputs=token_inputs,
        chunk_inputs=chunk_inputs,
        key_heads=key_heads,
        decodes=decodes,
    )


GATED_DELTA = _family("gated_delta", "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule")
KIMI_DELTA = _family("kimi_delta", "fused_recurrent_kda", "chunk_kda")
