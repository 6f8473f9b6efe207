"""Grouped RMS norm with a gate, behind a recurrence, as one launch; with Mamba-2's skip D x in front of it.

The skip belongs here and not to the recurrence's kernels: those read neither x (v is dt x) nor D, while this one is
bound by the bytes of its rows, to which the skip adds those of x, and no launch.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import row_arguments, target
from quantlab.kernels.activations import sigmoid
from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.schemes.checks import is_integer

LARGEST_GROUP = 16384
"""A group stays in the registers of one program."""


@dataclass(frozen=True)
class Configuration:
    """groups: of one program.  warps: of one program."""

    groups: int
    warps: int


def configuration(groups: int, group_size: int) -> Configuration:
    """About eight numbers a lane, as long as there is a program for every multiprocessor.  groups: of all rows."""
    block = 1 << (group_size - 1).bit_length()
    together = max(1, 1024 // block)
    while together > 1 and groups < 264 * together:
        together //= 2
    return Configuration(together, max(1, min(16, block * together // 256)))


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
    """RMS norm of each ``group_size`` neighbours of a row, and a gate before or behind it.

    h = y + D x (h = y without D), rounded to the model's dtype, which is that of ``gate``
    norm_before_gate=False: weight n(h act(gate)), True: weight n(h) act(gate), with n(h) = h rsqrt(mean(h^2) + eps)
    without a gate: weight n(h), and the model's dtype is that of ``y``

    All in float32, but for what the models round to their dtype.  rounds_norm: n is rounded before the weight, and
    its product with a weight of the same dtype once more, as transformers does in ``MambaRMSNormGated`` and its kin
    (gate first; 5.17: group_size = the whole width, 5.24: width / n_groups) and in ``Qwen3_5RMSNormGated`` (norm first,
    a weight for each value dim).  Without it only the result is rounded: ``KimiLinearRMSNormGated`` (activation
    "sigmoid"), ``FalconH1RMSNormGated``.  A module that returns float32, because its weight is, is rounded here
    as its caller does next.

    y: (B, ...), float32, bfloat16 or float16; the numbers of a row neighbours, as in gate and x.
    gate: (B, ...) of as many numbers a row, its dtype the model's; None for a norm alone.
    weight: contiguous, of as many numbers as a row, or of fewer that are repeated (the value dim of heads); a multiple
    of group_size.
    D: (H,) with x: (B, ...), as many numbers a row as y; number i of a row belongs to head i // (width / H).

    Returns: shape of y, the model's dtype, contiguous.

    Raises:
        InputError: an argument does not fit; names it, and nothing was launched.
    """
    y = row_arguments.batched("y", y, 2)
    batch, width, device = y.shape[0], row_arguments.width(y), y.device
    y_stride = row_arguments.rows("y", y, tuple(y.shape), device)
    gate_stride = 0 if gate is None else _beside("gate", gate, y)
    weights = _weights(weight, width, device)
    _check_group(group_size, weights)
    if activation not in ("silu", "sigmoid"):
        raise InputError("activation", activation, "'silu' or 'sigmoid'")
    x_stride, heads = 0, 1
    if (D is None) != (x is None):
        raise InputError("x", row_arguments.described(x), "given with D, and only then")
    if D is not None and x is not None:
        x_stride = _beside("x", x, y)
        heads = D.numel() if isinstance(D, Tensor) else 1
        row_arguments.whole("D", D, (heads,), device)
        if heads < 1 or width % heads:
            raise InputError("D", row_arguments.described(D), f"one a head, a divisor of {width} of them")
    output = torch.empty(tuple(y.shape), dtype=(y if gate is None else gate).dtype, device=device)
    if output.numel():
        groups = batch * (width // group_size)
        chosen = configuration(groups, group_size)
        kernel: Any = gated_norm_kernel
        kernel[(-(-groups // chosen.groups),)](
            y,
            gate,
            weight,
            D,
            x,
            output,
            groups,
            y_stride,
            gate_stride,
            x_stride,
            WIDTH=width,
            GROUP=group_size,
            WEIGHTS=weights,
            P=width // heads,
            EPS=float(eps),
            BEFORE=bool(norm_before_gate),
            SILU=activation == "silu",
            ROUNDS=bool(rounds_norm),
            R=chosen.groups,
            BLOCK=triton.next_power_of_2(group_size),
            num_warps=chosen.warps,
            **target.LAUNCH_OPTIONS,
        )
    return output


def _beside(name: str, given: Any, y: Tensor) -> int:
    """Distance of the rows of a tensor that goes with y, number by number."""
    row_arguments.batched(name, given, 2)
    batch, width = y.shape[0], row_arguments.width(y)
    if given.shape[0] != batch or row_arguments.width(given) != width:
        raise InputError(name, row_arguments.described(given), f"{batch} rows of {width} numbers like y")
    return row_arguments.rows(name, given, tuple(given.shape), y.device)


def _weights(weight: Any, width: int, device: torch.device) -> int:
    weights = weight.numel() if isinstance(weight, Tensor) else 0
    row_arguments.whole("weight", weight, (weights,), device)
    if weights < 1 or width % weights:
        raise InputError("weight", row_arguments.described(weight), f"a divisor of {width} numbers")
    return weights


def _check_group(group_size: Any, weights: int) -> None:
    if not is_integer(group_size) or not 1 <= group_size <= LARGEST_GROUP or weights % group_size:
        raise InputError("group_size", group_size, f"a divisor of {weights}, up to {LARGEST_GROUP}")


@triton.jit
def gated_norm_kernel(
    y, gate, weight, D, x, output, groups, y_stride, gate_stride, x_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, WEIGHTS: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr,
    BEFORE: tl.constexpr, SILU: tl.constexpr, ROUNDS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R groups a program."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    model: tl.constexpr = output.dtype.element_ty
    item, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BLOCK)
    inside = (item < groups)[:, None] & (column < GROUP)[None, :]
    row = (item // GROUPS).to(tl.int64)[:, None]
    at = (item % GROUPS * GROUP)[:, None] + column[None, :]
    value = widened(tl.load(y + row * y_stride + at, mask=inside, other=0))
    factor = None
    if gate is not None:
        factor = widened(tl.load(gate + row * gate_stride + at, mask=inside, other=0))
    own = tl.broadcast_to(column[None, :], (R, BLOCK)) if WEIGHTS == GROUP else at % WEIGHTS
    scale = tl.load(weight + own, mask=inside, other=0)
    if D is not None:
        skip = widened(tl.load(D + at // P, mask=inside, other=0))
        value += skip * widened(tl.load(x + row * x_stride + at, mask=inside, other=0))
    value = widened(narrowed(value, model))
    if gate is not None:
        if SILU:
            factor = factor * sigmoid(factor)
        else:
            factor = sigmoid(factor)
        if not BEFORE:
            value *= factor
    mean = tl.sum(tl.where(inside, value * value, 0.0), 1) * (1.0 / GROUP)
    value *= tl.rsqrt(mean + EPS)[:, None]
    if ROUNDS:
        value = widened(narrowed(value, model)) * widened(scale)
        if weight.dtype.element_ty == model:
            value = widened(narrowed(value, model))
    else:
        value *= widened(scale)
    if gate is not None and BEFORE:
        value *= factor
    tl.store(output + row * WIDTH + at, narrowed(value, model), mask=inside)
