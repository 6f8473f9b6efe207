"""Small operations of a model's decode step in one launch each, while a block lasts.

transformers writes norms, gates and the convolution's step as many torch operations, each a pass over the activations.
A module is replaced only after the replacement gave its own result on random numbers; what is not recognised stays.
"""

import contextlib
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.models import glue
from quantlab.models.patching import replace
from quantlab.recurrences import StepInputs

CONVOLUTION = "causal_conv1d_update"
"""Module global of transformers' models."""
PROBED_ROWS = 3
GATED = "gated"
"""Name of the function that stands for a gated norm's forward."""

Norm = Callable[..., Tensor]


def fuse(
    stack: contextlib.ExitStack,
    model: nn.Module,
    files: list[ModuleType],
    skips: dict[int, tuple[Tensor, Tensor]],
) -> list[Norm]:
    """Norms of ``model``, gated ones too, and the convolutions of ``files`` run as one launch until ``stack`` closes.

    skips: by id of a gated norm, the D (heads,) and x (B, heads, value_dim) to add to its input before it is rounded;
    taken out when the norm runs.

    Returns what runs in place of the norms: a graph that was captured meanwhile reads memory of theirs.
    """
    made = []
    conv_update, norm = _functions(next(model.parameters()).device)
    for module in model.modules():
        fused = fused_norm(module, norm, skips)
        if fused is not None:
            module.forward = fused
            made.append(fused)
            stack.callback(delattr, module, "forward")
    for file in {id(file): file for file in files}.values():
        if hasattr(file, CONVOLUTION):
            replace(stack, file, CONVOLUTION, lambda op: _convolution(op, conv_update))
    return made


def _functions(device: torch.device) -> tuple[Callable[..., Tensor], Norm]:
    if device.type != "cuda":
        return glue.conv_update, glue.gated_norm
    from quantlab.kernels.conv_update import conv_update
    from quantlab.kernels.gated_norm import gated_norm

    return conv_update, gated_norm


def _convolution(original: Callable[..., Any], conv_update: Callable[..., Tensor]) -> Callable[..., Any]:
    def update(
        hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Any = None, activation: Any = None
    ) -> Any:
        plain = (
            hidden_states.ndim == 3 and hidden_states.shape[2] == 1 and activation in ("silu", "swish", None)
        )
        same = hidden_states.dtype == conv_state.dtype == weight.dtype
        if not plain or not same or not conv_state.is_contiguous():
            return original(hidden_states, conv_state, weight, bias, activation)
        return conv_update(conv_state, hidden_states, weight.contiguous(), bias, activation)

    return update


def fused_token(
    mixer: nn.Module,
    skips: dict[int, tuple[Tensor, Tensor]],
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
) -> StepInputs | None:
    """The recurrence's inputs from the arguments of a Mamba-2 op, in one launch, D x left in ``skips`` for the norm.

    None where the op does more than that, or no fused norm stands behind it.  Arguments as in ``families.mamba2``.
    """
    norm: Any = getattr(mixer, "norm", None)
    behind = isinstance(norm, nn.Module) and getattr(norm.forward, "__name__", "") == GATED
    if not behind or z is not None or not dt_softplus or D is None or dt_bias is None:
        return None
    skips[id(norm)] = D[:, 0].contiguous(), x
    return _inputs(x.device)(x, dt[..., 0], B, C, dt_bias[:, 0], A=A[:, 0, 0].contiguous())


def _inputs(device: torch.device) -> Callable[..., StepInputs]:
    if device.type != "cuda":
        return glue.mamba2_inputs
    from quantlab.kernels.step_inputs import mamba2_inputs

    return mamba2_inputs


def fused_norm(
    module: nn.Module, norm: Norm, skips: dict[int, tuple[Tensor, Tensor]]
) -> Callable[..., Tensor] | None:
    """What is to run in place of a norm's forward, by ``norm``; None for what is no norm that it can stand for."""
    if (options := _gated_options(module, norm)) is not None:

        def gated(hidden_states: Tensor, gate: Tensor) -> Tensor:
            width = options["weight"].numel()
            D, x = skips.pop(id(module), (None, None))
            if D is not None and x is not None:
                x = x.reshape(-1, width)
            flat = norm(hidden_states.reshape(-1, width), gate.reshape(-1, width), D=D, x=x, **options)
            return flat.view(hidden_states.shape)

        assert gated.__name__ == GATED
        return gated
    if (options := _plain_options(module, norm)) is not None:

        def plain(hidden_states: Tensor) -> Tensor:
            flat = norm(hidden_states.reshape(-1, options["group_size"]), None, **options)
            return flat.view(hidden_states.shape)

        return plain
    return None


def _gated_options(module: nn.Module, norm: Norm) -> dict[str, Any] | None:
    weight, epsilon = _norm_of(module, "Gated")
    if weight is None:
        return None
    width = weight.numel()
    groups = getattr(module, "group_size", None), width // (getattr(module, "n_groups", None) or 1)
    for size, before, activation, rounds in product(
        dict.fromkeys((*groups, width)), (False, True), ("silu", "sigmoid"), (True, False)
    ):
        if not isinstance(size, int) or size < 1 or width % size:
            continue
        options = {"weight": weight, "eps": epsilon, "group_size": size, "norm_before_gate": before}
        options |= {"activation": activation, "rounds_norm": rounds}
        if _agrees(module, lambda y, gate, o=options: norm(y, gate, **o), weight, 2):
            return options
    return None


def _plain_options(module: nn.Module, norm: Norm) -> dict[str, Any] | None:
    weight, epsilon = _norm_of(module, "")
    if weight is None:
        return None
    common = {"eps": epsilon, "group_size": weight.numel(), "norm_before_gate": False}
    # Some are stored as what is to be added to 1.
    for scale, rounds in ((weight, True), (weight, False), (1.0 + weight.detach().float(), False)):
        options = {"weight": scale, "rounds_norm": rounds, **common}
        if _agrees(module, lambda y, o=options: norm(y, None, **o), weight, 1):
            return options
    return None


def _norm_of(module: nn.Module, kind: str) -> tuple[Tensor | None, float]:
    """Weight and epsilon of a module that looks like an RMS norm, gated or not."""
    name, weight = type(module).__name__, getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    gated = "Gated" in name
    if "RMSNorm" not in name or gated != (kind == "Gated") or not isinstance(epsilon, float):
        return None, 0.0
    fits = (
        isinstance(weight, Tensor)
        and weight.ndim == 1
        and weight.is_contiguous()
        and not list(module.children())
    )
    return (weight, epsilon) if fits else (None, 0.0)


@torch.no_grad()
def _agrees(module: nn.Module, candidate: Callable[..., Tensor], weight: Tensor, count: int) -> bool:
    """Whether both give the same on random rows of the module's dtype: to two of the dtype's last places, as every
    rounding on the way may turn, and another norm is off by much more.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    sizes = (PROBED_ROWS, weight.numel())
    rows = [
        torch.randn(sizes, generator=generator, device=weight.device).to(weight.dtype) for _ in range(count)
    ]
    try:
        expected = module(*rows)
    except (TypeError, ValueError, RuntimeError):
        return False
    if not isinstance(expected, Tensor) or expected.shape != sizes:
        return False
    found, places = candidate(*rows).float(), 2 * torch.finfo(weight.dtype).eps
    return bool(((found - expected.float()).abs() <= places * expected.float().abs() + 1e-6).all())
