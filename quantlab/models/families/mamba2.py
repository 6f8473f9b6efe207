"""Mamba-2: ``mamba2_selective_state_update`` and ``mamba2_chunk_scan``, the same text in every model that has them.

All in float32, whatever the activations are: the rounding under study is the state's alone.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quantlab.models.families.base import Family, OpCall, key_dim_last, refuse_packed
from quantlab.recurrences import StepInputs


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
    """One token: x (B, H, P), dt (B, H, P) equal along P, A (H, P, N) equal along P and N, B and C (B, G, N), D (H, P),
    dt_bias (H, P) equal along P, z (B, H, P).
    """
    refuse_packed(mixer, options)
    bias = None if dt_bias is None else dt_bias[:, 0]
    inputs, x32 = _inputs(x, dt[..., 0], A[:, 0, 0], B, C, bias, dt_softplus)

    def finish(output: Tensor, _: Tensor | None) -> Tensor:
        output = output.float()
        if D is not None:
            output = output + D.float() * x32
        if z is not None:
            output = output * F.silu(z.float())
        return output.to(x.dtype)

    return OpCall(state, inputs, finish)


def chunk_inputs(
    mixer: nn.Module | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    **options: Any,
) -> OpCall:
    """T tokens: x (B, T, H, P), dt (B, T, H), A (H,), B and C (B, T, G, N), D and dt_bias (H,)."""
    refuse_packed(mixer, options)
    inputs, x32 = _inputs(x, dt, A, B, C, dt_bias, dt_softplus)

    def finish(outputs: Tensor, state: Tensor | None) -> Any:
        outputs = outputs.float()
        if D is not None:
            outputs = outputs + D.float()[:, None] * x32
        outputs = outputs.to(x.dtype)
        return (outputs, state) if return_final_states else outputs

    return OpCall(initial_states, inputs, finish)


def key_heads(
    mixer: nn.Module | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any, **__: Any
) -> int:
    return B.shape[2]


def _inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, dt_softplus: bool
) -> tuple[StepInputs, Tensor]:
    """The recurrence's inputs, and x in float32.

    dt is raw.  The decode op never clamps it (``time_step_limit`` belongs to prefill), and neither do we.
    """
    step_size = dt.float()
    if dt_bias is not None:
        step_size = step_size + dt_bias.float()
    if dt_softplus:
        step_size = F.softplus(step_size)
    x = x.float()
    inputs = StepInputs(q=C.float(), k=B.float(), v=step_size[..., None] * x, log_decay=step_size * A.float())
    return inputs, x


FAMILY = Family(
    "mamba2",
    step_op="mamba2_selective_state_update",
    prefill_op="mamba2_chunk_scan",
    prefill_state="initial_states",
    to_state=key_dim_last,
    to_model=key_dim_last,
    token_inputs=token_inputs,
    chunk_inputs=chunk_inputs,
    key_heads=key_heads,
)
