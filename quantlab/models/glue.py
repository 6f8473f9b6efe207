"""What a decode step does around a recurrence, in plain torch: the twins of three modules of kernels.

``quantlab.kernels.conv_update``, ``.gated_norm`` and ``.step_inputs`` have the same functions under the same names, one
launch each; their docstrings have shapes and sources.  The twins say what the kernels are to compute, and serve where
no kernel runs; they look at no argument.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.models.families import gated_delta, mamba2
from quantlab.recurrences import StepInputs


def conv_update(
    conv_state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """One token of a depthwise causal convolution; see ``quantlab.kernels.conv_update``.

    conv_state (B, C, W) moves by one in place; x (B, C) or (B, C, 1) like the result; weight (C, W), bias (C,).
    """
    batch, channels = x.shape[:2]
    window = torch.cat([conv_state[..., 1:], x.reshape(batch, channels, 1)], -1)
    conv_state.copy_(window)
    total = (window.float() * weight.float()).sum(-1)
    if bias is not None:
        total = total + bias.float()
    total = total.to(x.dtype)
    if activation is not None:
        total = F.silu(total)
    return total.reshape(x.shape)


def gated_norm(
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    *,
    activation: str = "silu",
    rounds_norm: bool = True,
    D: Tensor | None = None,
    x: Tensor | None = None,
) -> Tensor:
    """Grouped RMS norm with a gate, behind Mamba-2's skip; see ``quantlab.kernels.gated_norm``.

    y, gate, x (B, ...), weight of as many numbers as a row or fewer, D (H,); returns the shape of y, the dtype of gate,
    or of y if there is none.
    """
    dtype, value = (y if gate is None else gate).dtype, y.flatten(1)
    if D is not None and x is not None:
        skip = D.float()[:, None] * x.float().flatten(1).unflatten(1, (D.shape[0], -1))
        value = value.float() + skip.flatten(1)
    value = value.to(dtype).float()
    factor = None
    if gate is not None:
        factor = gate.float().flatten(1)
        factor = F.silu(factor) if activation == "silu" else factor.sigmoid()
    if factor is not None and not norm_before_gate:
        value = value * factor
    groups = value.unflatten(1, (-1, group_size))
    normalised = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    normalised = normalised.flatten(1).unflatten(1, (-1, weight.shape[0]))
    value = weight * normalised.to(dtype) if rounds_norm else weight.float() * normalised
    value = value.flatten(1)
    if factor is not None and norm_before_gate:
        value = value * factor
    return value.to(dtype).view(y.shape)


def mamba2_inputs(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None = None,
    *,
    A: Tensor | None = None,
    A_log: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> StepInputs:
    """One token of a Mamba-2 layer, raw gates in; see ``quantlab.kernels.step_inputs``.

    x (batch, H, P), dt (batch, H), B and C (batch, G, N), dt_bias, A or A_log (H,).
    """
    rate = -A_log.float().exp() if A is None and A_log is not None else A
    assert rate is not None
    bias = None if dt_bias is None else dt_bias[:, None]
    call = mamba2.token_inputs(
        None, x, x, dt[..., None], rate[:, None, None], B, C, dt_bias=bias, dt_softplus=True
    )
    return _stored(call.inputs, dtype or x.dtype)


def gated_delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    negative_eigenvalues: bool = False,
    dtype: torch.dtype | None = None,
) -> StepInputs:
    """One token of a Gated DeltaNet layer, raw gates in; see ``quantlab.kernels.step_inputs``.

    query and key (batch, HK, K), value (batch, H, V), a and b (batch, H), A_log and dt_bias (H,).
    """
    log_decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return _delta_inputs(query, key, value, log_decay, b, negative_eigenvalues, dtype)


def kimi_delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    negative_eigenvalues: bool = False,
    dtype: torch.dtype | None = None,
) -> StepInputs:
    """One token of a Kimi Delta Attention layer, raw gates in; see ``quantlab.kernels.step_inputs``.

    As ``gated_delta_inputs`` with g (batch, H, K) and dt_bias (H K,).
    """
    step = F.softplus(g.float() + dt_bias.float().view(g.shape[1:]))
    log_decay = -A_log.float().exp().reshape(-1, 1) * step
    return _delta_inputs(query, key, value, log_decay, b, negative_eigenvalues, dtype)


def _delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    b: Tensor,
    negative_eigenvalues: bool,
    dtype: torch.dtype | None,
) -> StepInputs:
    beta = b.sigmoid()
    if negative_eigenvalues:
        beta = beta * 2
    arguments = (t[:, None] for t in (query, key, value, log_decay, beta))
    call = gated_delta.token_inputs(None, *arguments, use_qk_l2norm_in_kernel=True)
    return _stored(call.inputs, dtype or value.dtype, b.dtype)


def _stored(inputs: StepInputs, dtype: torch.dtype, strengths: torch.dtype | None = None) -> StepInputs:
    """q, k and v rounded once to ``dtype``, gates as they are, all contiguous."""
    q, k, v = (t.to(dtype).contiguous() for t in (inputs.q, inputs.k, inputs.v))
    beta = None if inputs.beta is None else inputs.beta.to(strengths).contiguous()
    return StepInputs(q, k, v, inputs.log_decay.contiguous(), beta)
