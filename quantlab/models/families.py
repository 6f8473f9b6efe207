"""How each family of model ops hands its tensors to a decode state: one adapter a family.

transformers calls its recurrent ops as module globals, with the same names in every model of a family, so
an adapter per family serves all of them.  To add a family: write its ``step`` and ``key_heads`` functions
and add a row to ``FAMILIES``.  To add a model: nothing, unless it brings new op names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantlab.recurrences import StepInputs
from quantlab.schemes import DecodeState

# The l2 norm of query and key in the model's own op adds this inside the square root.
_L2_EPSILON = 1e-6


@dataclass(frozen=True)
class Family:
    """One family of recurrent ops.

    ``step_op`` and ``prefill_op`` are the module globals to replace; ``prefill_state`` is the keyword under
    which the prefill op takes the state to continue from; ``key_dim_first`` says that the model stores its
    state as (batch, heads, key_dim, value_dim), ours being (batch, heads, value_dim, key_dim). ``step(find,
    mixer, *args, **kwargs)`` has the step op's signature behind ``find`` (handle -> decode state) and
    ``mixer`` (the calling module, or None) and returns what the op returns. ``key_heads(mixer, *args,
    **kwargs)`` reads the number of key heads off the prefill op's arguments.
    """

    recurrence: str
    step_op: str
    prefill_op: str
    prefill_state: str
    key_dim_first: bool
    step: Callable[..., Any]
    key_heads: Callable[..., int]

    def to_state(self, dense: Tensor) -> Tensor:
        """The model's dense state as (B, H, V, K), key dim contiguous."""
        return dense.transpose(-1, -2).contiguous() if self.key_dim_first else dense.contiguous()

    def to_model(self, state: Tensor) -> Tensor:
        """A (B, H, V, K) state in the model's layout."""
        return state.transpose(-1, -2).contiguous() if self.key_dim_first else state


def _mamba2_step(
    find: Callable[[Tensor], DecodeState],
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
    **_: Any,
) -> Tensor:
    """One token of Mamba-2: x (B, H, P), dt (B, H, P) equal along P, A (H, P, N) equal along P and N, B and
    C (B, G, N).

    dt is raw; the decode op never clamps it (``time_step_limit`` belongs to prefill), and neither do we.
    All in float32, whatever the activations are: the rounding under study is the state's alone.
    """
    step_size = dt[..., 0].float()
    if dt_bias is not None:
        step_size = step_size + dt_bias[:, 0].float()
    if dt_softplus:
        step_size = F.softplus(step_size)
    inputs = x.float()
    output = (
        find(state)
        .step(
            StepInputs(
                q=C.float(),
                k=B.float(),
                v=step_size[..., None] * inputs,
                log_decay=step_size * A[:, 0, 0].float(),
            )
        )
        .to(torch.float32)
    )
    if D is not None:
        output = output + D.float() * inputs
    if z is not None:
        output = output * F.silu(z.float())
    return output.to(x.dtype)


def _mamba2_key_heads(
    mixer: nn.Module | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any, **__: Any
) -> int:
    return B.shape[2]


def _distinct_key_heads(mixer: nn.Module | None, key: Tensor) -> int:
    # Some releases repeat query and key to one per value head before the op, others inside it.  The module
    # knows how many there really are; the window's records and the byte ledger must not depend on the
    # release.
    heads = getattr(mixer, "num_k_heads", key.shape[2])
    return heads if key.shape[2] % heads == 0 else key.shape[2]


def _gated_delta_step(
    find: Callable[[Tensor], DecodeState],
    mixer: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated-delta tokens: query and key (B, T, heads, K), value (B, T, H, V), g (log decay) and beta (B, T,
    H).
    """
    assert initial_state is not None  # the caller passes dense starts to the original op
    state = find(initial_state)
    repeat = key.shape[2] // _distinct_key_heads(mixer, key)
    q, k = query[:, :, ::repeat].float(), key[:, :, ::repeat].float()
    if use_qk_l2norm_in_kernel:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _L2_EPSILON) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    tokens = [
        state.step(
            StepInputs(
                q=q[:, t],
                k=k[:, t],
                v=value[:, t].float(),
                log_decay=g[:, t].float(),
                beta=beta[:, t].float(),
            )
        )
        for t in range(key.shape[1])
    ]
    return torch.stack(tokens, 1).to(query.dtype), initial_state if output_final_state else None


def _gated_delta_key_heads(mixer: nn.Module | None, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    return _distinct_key_heads(mixer, key)


FAMILIES: tuple[Family, ...] = (
    Family(
        "mamba2",
        step_op="mamba2_selective_state_update",
        prefill_op="mamba2_chunk_scan",
        prefill_state="initial_states",
        key_dim_first=False,
        step=_mamba2_step,
        key_heads=_mamba2_key_heads,
    ),
    Family(
        "gated_delta",
        step_op="torch_recurrent_gated_delta_rule",
        prefill_op="torch_chunk_gated_delta_rule",
        prefill_state="initial_state",
        key_dim_first=True,
        step=_gated_delta_step,
        key_heads=_gated_delta_key_heads,
    ),
)

# Recurrent ops that we know of and cannot serve yet: meeting one is an error, never a layer left in full
# precision.
UNSUPPORTED_OPS: dict[str, str] = {
    "recurrent_kimi_delta_attention": "kimi_delta",
    "chunk_kimi_delta_attention": "kimi_delta",
    "mamba_selective_state_update": "mamba1",
}
