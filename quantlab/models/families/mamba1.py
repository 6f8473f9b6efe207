"""Mamba-1: ``mamba_selective_state_update`` and ``mamba_selective_scan``, the same text in every model that has them.

A layer is one head: value dim = the channels D of the layer, key dim = N.  All in float32, as for Mamba-2.  The scan
takes no state to start from, so that a model of transformers forgets everything before a second chunk of a prompt; here
the chunk continues from what is stored.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quantlab.models.families.base import Family, OpCall, refuse_packed
from quantlab.recurrences import StepInputs


def to_state(dense: Tensor) -> Tensor:
    """(B, D, N) -> (B, 1, D, N), contiguous."""
    return dense[:, None].contiguous()


def to_model(state: Tensor) -> Tensor:
    """(B, 1, D, N) -> (B, D, N)."""
    return state[:, 0]


def token_inputs(
    mixer: nn.Module | None,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> OpCall:
    """One token: x and dt (B, D), A (D, N), B and C (B, N), D and dt_bias (D,), z (B, D)."""
    refuse_packed(mixer, options)
    inputs = _inputs(x, dt, B, C, dt_bias, dt_softplus)
    return OpCall(state, inputs, lambda output, _: _gated(output[:, 0], x, D, z).to(x.dtype))


def chunk_inputs(
    mixer: nn.Module | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> OpCall:
    """T tokens, behind the channels: x, dt and z (B, D, T), A (D, N), B and C (B, N, T), D and delta_bias (D,)."""
    refuse_packed(mixer, options)
    x, dt, B, C = (t.transpose(1, 2) for t in (x, dt, B, C))
    gate = None if z is None else z.transpose(1, 2)

    def finish(outputs: Tensor, state: Tensor | None) -> Any:
        outputs = _gated(outputs[:, :, 0], x, D, gate).to(x.dtype).transpose(1, 2)
        return (outputs, state) if return_last_state else outputs

    return OpCall(None, _inputs(x, dt, B, C, delta_bias, delta_softplus), finish)


def key_heads(mixer: nn.Module | None, *_: Any, **__: Any) -> int:
    return 1


def rates(mixer: nn.Module | None, x: Tensor, dt: Tensor, A: Tensor, *_: Any, **__: Any) -> Tensor:
    return A[None].float()


def _inputs(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, dt_softplus: bool
) -> StepInputs:
    """x and dt (..., D), B and C (..., N), as the inputs of one head."""
    step_size = dt.float()
    if dt_bias is not None:
        step_size = step_size + dt_bias.float()
    if dt_softplus:
        step_size = F.softplus(step_size)
    inputs = StepInputs(q=C.float(), k=B.float(), v=step_size * x.float(), log_decay=step_size)
    return inputs.map(lambda t: t[..., None, :])


def _gated(output: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    output = output.float()
    if D is not None:
        output = output + D.float() * x.float()
    return output if z is None else output * F.silu(z.float())


FAMILY = Family(
    "mamba1",
    step_op="mamba_selective_state_update",
    prefill_op="mamba_selective_scan",
    prefill_state=None,
    to_state=to_state,
    to_model=to_model,
    token_inputs=token_inputs,
    chunk_inputs=chunk_inputs,
    key_heads=key_heads,
    rates=rates,
    token_dim=-1,
)
