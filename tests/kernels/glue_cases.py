"""Cases of the kernels around a recurrence and of their torch twins: what they get, and how far a result may be off.

Every argument lies in NaN: what is read beside it shows in the result, and what is written beside it, too.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from torch import Tensor

from quantlab.recurrences import StepInputs
from quantlab.testing import guarded, watched_allocations

U = 2.0**-24
"""Half a unit in the last place of float32, relatively."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """module, function: of quantlab.kernels and of the twins.  bounds(arguments, twin's results) -> result ->
    how far it may be from the twin's.
    """

    module: str
    function: str
    make: Callable[[], dict[str, Any]]
    bounds: Callable[[dict[str, Any], Results], Results]


def apart(tensor: Tensor, lead: int = 8, gap: int = 24) -> Tensor:
    """The same rows as columns of a wider matrix of NaN."""
    rows, width = tensor.shape[0], tensor[0].numel()
    whole = torch.full((rows + 1, lead + width + gap), float("nan"), dtype=tensor.dtype)
    inside = whole[:rows, lead : lead + width]
    inside.copy_(tensor.reshape(rows, width))
    return inside.unflatten(1, tensor.shape[1:]) if tensor.ndim != 2 else inside


def random(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *sizes, dtype=FP32: torch.randn(sizes, generator=generator).to(dtype)


def run_twin(name: str) -> Results:
    """Results by name, the convolution's state among them."""
    case = CASES[name]
    arguments = case.make()
    twin = getattr(importlib.import_module("quantlab.models.glue"), case.function)
    return _named(twin(**arguments), arguments)


def run_kernel(name: str, device: str) -> dict[str, numpy.ndarray]:
    """Bytes of the results; AssertionError if anything was written that is no result."""
    case = CASES[name]
    given = {key: _moved(value, device) for key, value in case.make().items()}
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    before = {key: _outside(key, tensor) for key, tensor in tensors.items()}
    kernel = getattr(importlib.import_module(f"quantlab.kernels.{case.module}"), case.function)
    with watched_allocations():
        results = _named(kernel(**given), given)
    for key, tensor in tensors.items():
        assert torch.equal(before[key], _outside(key, tensor)), f"{name}: {key} was written to"
    assert all(tensor.is_contiguous() for tensor in results.values())
    return {key: tensor.cpu().view(torch.uint8).numpy() for key, tensor in results.items()}


def _named(result: Any, arguments: dict[str, Any]) -> Results:
    if isinstance(result, StepInputs):
        found = {field.name: getattr(result, field.name) for field in fields(result)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}
    state = {"conv_state": arguments["conv_state"]} if "conv_state" in arguments else {}
    return {"result": result, **state}


def _moved(value: Any, device: str) -> Any:
    """A tensor with all the memory that it lies in, on another device."""
    if not isinstance(value, Tensor):
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _outside(name: str, tensor: Tensor) -> Tensor:
    """Bytes of the memory that a tensor lies in; of the convolution's state without its own."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).clone()
    if name == "conv_state":
        whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    return whole.view(torch.uint8)


def rounding(dtype: torch.dtype, times: int = 1) -> float:
    """By how much ``times`` roundings to a narrow dtype may turn, relatively: each by one unit in the last place."""
    return 0.0 if dtype == FP32 else times * torch.finfo(dtype).eps


# The convolution.


def conv(
    batch: int,
    channels: int,
    taps: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    activation: str | None = "silu",
    column: bool = False,
    offset: int = 0,
) -> Case:
    def make() -> dict[str, Any]:
        normal = random(taps)
        x = apart(normal(batch, channels, dtype=dtype))
        return {
            "conv_state": guarded(normal(batch, channels, taps, dtype=dtype), 64 + offset),
            "x": x[..., None] if column else x,
            "weight": guarded(normal(channels, taps, dtype=dtype)),
            "bias": guarded(normal(channels, dtype=dtype)) if bias else None,
            "activation": activation,
        }

    return Case("conv_update", "conv_update", make, conv_bounds)


def conv_bounds(arguments: dict[str, Any], twin: Results) -> Results:
    """Two sums of W + 1 terms in any order are 2 (W + 2) u of the terms' magnitudes apart, and a rounding that turns is
    one more unit in the last place; the slope of silu is below 1.1; 12 u are silu's own, and its rounding turns, too.
    """
    window, weight, bias = twin["conv_state"].double(), arguments["weight"].double(), arguments["bias"]
    added = torch.zeros(()) if bias is None else bias.double()
    terms = (window * weight).abs().sum(-1) + added.abs()
    total = (window * weight).sum(-1) + added
    result = twin["result"]
    own = rounding(result.dtype)
    error = 1.1 * (2 * (weight.shape[1] + 2) * U * terms + own * total.abs())
    error = error.reshape(result.shape) + (12 * U + own) * result.double().abs()
    return {"conv_state": torch.zeros(twin["conv_state"].shape), "result": error}


# The norm.


def norm(
    sizes: tuple[int, ...],
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype = BF16,
    *,
    weights: int | None = None,
    y: torch.dtype | None = None,
    weight: torch.dtype | None = None,
    heads: int | None = None,
    together: bool = False,
    **options: Any,
) -> Case:
    def make() -> dict[str, Any]:
        normal, width = random(group_size), torch.Size(sizes[1:]).numel()
        rows = guarded if together else apart
        given = {
            "y": rows(normal(*sizes).to(y or dtype)),
            "gate": rows(normal(*sizes).to(dtype)),
            "weight": guarded((1 + 0.5 * normal(weights or width)).to(weight or dtype)),
            "eps": 1e-5,
            "group_size": group_size,
            "norm_before_gate": norm_before_gate,
            **options,
        }
        if heads is not None:
            given |= {"D": guarded(normal(heads, dtype=dtype)), "x": rows(normal(*sizes).to(dtype))}
        return given

    return Case("gated_norm", "gated_norm", make, norm_bounds)


def norm_bounds(arguments: dict[str, Any], twin: Results) -> Results:
    """Relative to the result: a mean of G squares in any order is 2 (G + 1) u off, its root half of that; 24 u are
    root, sigmoid and products of both; y + D x is u |D x| off where the product is not rounded apart; and each rounding
    on the way may turn: of y + D x, of the norm, of its product with the weight, of the result.
    """
    result, group, dtype = twin["result"], arguments["group_size"], arguments["gate"].dtype
    skip = arguments.get("D")
    roundings = 1 + (skip is not None) + 2 * arguments.get("rounds_norm", True)
    limit = ((group + 25) * U + rounding(dtype, roundings)) * result.double().abs()
    if skip is not None:
        batch, heads = result.shape[0], skip.shape[0]
        product = skip.double()[:, None] * arguments["x"].double().reshape(batch, heads, -1)
        limit += (
            U * product.abs().reshape(result.shape) * norm_slope(arguments, product.reshape(result.shape))
        )
    return {"result": limit}


def norm_slope(arguments: dict[str, Any], product: torch.Tensor) -> torch.Tensor:
    """How much a result moves with its own y + D x, which may be 0."""
    gate = arguments["gate"].double()
    factor = gate * gate.sigmoid() if arguments.get("activation", "silu") == "silu" else gate.sigmoid()
    held = arguments["y"].double() + product
    inside = held if arguments["norm_before_gate"] else held * factor
    groups = inside.flatten(1).unflatten(1, (-1, arguments["group_size"]))
    root = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + arguments["eps"]).expand(groups.shape)
    weight = arguments["weight"].double()
    repeated = weight.repeat(product[0].numel() // len(weight)).view(product.shape[1:])
    return (repeated * factor * root.reshape(product.shape)).abs()


# Inputs of a step.


def mamba2(
    batch: int,
    heads: int,
    value_dim: int,
    groups: int,
    key_dim: int,
    dtype: torch.dtype,
    *,
    logarithm: bool = True,
    bias: bool = True,
    into: torch.dtype | None = None,
    together: bool = False,
) -> Case:
    def make() -> dict[str, Any]:
        normal, rows = random(value_dim), guarded if together else apart
        rate = guarded(1.5 * normal(heads, dtype=dtype))
        return {
            "x": rows(normal(batch, heads, value_dim, dtype=dtype)),
            "dt": rows(normal(batch, heads, dtype=dtype)),
            "B": rows(normal(batch, groups, key_dim, dtype=dtype)),
            "C": rows(normal(batch, groups, key_dim, dtype=dtype)),
            "dt_bias": guarded((4 * normal(heads) - 4).to(dtype)) if bias else None,
            **({"A_log": rate} if logarithm else {"A": guarded(-rate.exp())}),
            "dtype": into,
        }

    return Case("step_inputs", "mamba2_inputs", make, mamba2_bounds)


def mamba2_bounds(arguments: dict[str, Any], twin: Results) -> Results:
    """q and k are copies.  Relative to the step: the sum z before softplus is u |z| off, its slope at most 1 and
    softplus falls no faster than e^z, so 2 u |z| of it and of the exponential's own argument; 24 u are softplus and
    products of both implementations, and u |A_log| the exponential of A_log.
    """
    before = arguments["dt"].double()
    if arguments["dt_bias"] is not None:
        before = before + arguments["dt_bias"].double()
    rate = arguments.get("A_log")
    step = (24 + 4 * before.abs()) * U
    decay = step if rate is None else step + 2 * U * (4 + rate.double().abs())
    v, log_decay = twin["v"].double().abs(), twin["log_decay"].double().abs()
    return {
        "q": torch.zeros(twin["q"].shape),
        "k": torch.zeros(twin["k"].shape),
        "v": v * (step[..., None] + rounding(twin["v"].dtype)),
        "log_decay": decay * log_decay,
    }


def delta(
    function: str,
    batch: int,
    heads: int,
    value_dim: int,
    key_heads: int,
    key_dim: int,
    model: torch.dtype,
    **options: Any,
) -> Case:
    kimi = function == "kimi_delta_inputs"

    def make() -> dict[str, Any]:
        normal = random(key_dim)
        gate = normal(batch, heads, key_dim, dtype=model) if kimi else normal(batch, heads, dtype=model)
        rate = guarded(1.5 * normal(heads))
        return {
            "query": apart(normal(batch, key_heads, key_dim, dtype=model)),
            "key": apart(normal(batch, key_heads, key_dim, dtype=model)),
            "value": apart(normal(batch, heads, value_dim, dtype=model)),
            "g" if kimi else "a": apart(gate),
            "b": apart(3 * normal(batch, heads, dtype=model)),
            "A_log": rate.view(1, 1, heads, 1) if kimi else rate,
            "dt_bias": guarded(4 * normal(heads * key_dim if kimi else heads) - 4),
            **options,
        }

    return Case("step_inputs", function, make, delta_bounds)


def delta_bounds(arguments: dict[str, Any], twin: Results) -> Results:
    """v is a copy.  A sum of K squares is 2 (K + 1) u off, its root half of that, 16 u are root and products; sigmoid
    24 u of both implementations with u |b| of its exponential's argument; decays as under Mamba-2.
    """
    gate = arguments["g"] if "g" in arguments else arguments["a"]
    before = gate.double() + arguments["dt_bias"].double().view(gate.shape[1:])
    rate = arguments["A_log"].double().abs().view(-1, *(1,) * (gate.ndim - 2))
    decay = (24 + 4 * before.abs() + 2 * (4 + rate)) * U
    norm = (arguments["key"].shape[2] + 17) * U + rounding(twin["k"].dtype)
    beta = (24 + 2 * arguments["b"].double().abs()) * U + rounding(twin["beta"].dtype)
    return {
        "q": norm * twin["q"].double().abs(),
        "k": norm * twin["k"].double().abs(),
        "v": torch.zeros(twin["v"].shape),
        "log_decay": decay * twin["log_decay"].double().abs(),
        "beta": beta * twin["beta"].double().abs(),
    }


GDN, KDA = "gated_delta_inputs", "kimi_delta_inputs"

CASES: dict[str, Case] = {
    "conv": conv(5, 100, 4, BF16),
    "conv of one row": conv(1, 70, 4, BF16),
    "conv of columns": conv(3, 96, 4, BF16, column=True),
    "conv float16": conv(2, 33, 4, FP16),
    "conv float32": conv(5, 100, 4, FP32),
    "conv of width 2": conv(5, 100, 2, BF16),
    "conv of width 2, float32": conv(2, 64, 2, FP32),
    "conv of width 3": conv(2, 70, 3, BF16),
    "conv of width 1": conv(2, 64, 1, BF16),
    "conv off a word": conv(2, 64, 4, BF16, offset=1),
    "conv without bias": conv(2, 64, 4, BF16, bias=False),
    "conv without activation": conv(2, 64, 4, BF16, activation=None),
    "conv of many rows": conv(33, 2000, 4, BF16),
    "norm of groups": norm((2, 240), 80, False, heads=3),
    "norm of one row": norm((1, 1, 240), 80, False, heads=3),
    "norm of the whole width": norm((5, 240), 240, False, heads=3),
    "norm of a float32 output": norm((2, 240), 80, False, y=FP32, heads=3),
    "norm without a skip": norm((2, 96), 32, False),
    "norm before the gate": norm((6, 48), 48, True),
    "norm of heads": norm((2, 3, 80), 80, True, weights=80),
    "norm float32": norm((2, 240), 80, False, FP32, heads=6),
    "norm float32 before the gate": norm((5, 48), 48, True, FP32),
    "norm float16": norm((2, 240), 80, False, FP16, heads=3),
    "norm of a float32 weight": norm((2, 96), 96, False, weight=FP32),
    "norm of sigmoid gates": norm((4, 32), 32, True, activation="sigmoid", rounds_norm=False),
    "norm rounded once": norm((2, 96), 48, False, rounds_norm=False),
    "norm of many groups": norm((40, 16, 16), 16, True, FP32, weights=16, together=True),
    "mamba2": mamba2(2, 6, 80, 3, 32, BF16),
    "mamba2 of one row": mamba2(1, 6, 80, 3, 32, BF16, into=FP32),
    "mamba2 float32": mamba2(5, 6, 16, 3, 32, FP32),
    "mamba2 float16": mamba2(2, 4, 16, 1, 32, FP16),
    "mamba2 of odd sizes": mamba2(2, 6, 37, 3, 20, BF16, logarithm=False),
    "mamba2 without bias": mamba2(2, 4, 64, 1, 64, BF16, bias=False, logarithm=False),
    "mamba2 of many pieces": mamba2(2, 24, 80, 8, 128, BF16),
    "mamba2 without gaps": mamba2(3, 6, 80, 3, 32, BF16, together=True),
    "gated_delta": delta(GDN, 2, 6, 80, 3, 32, BF16),
    "gated_delta of one row": delta(GDN, 1, 6, 16, 2, 96, BF16, dtype=FP32),
    "gated_delta float32": delta(GDN, 5, 6, 80, 3, 32, FP32),
    "gated_delta float16": delta(GDN, 2, 3, 16, 3, 32, FP16),
    "gated_delta of negative eigenvalues": delta(GDN, 2, 6, 16, 6, 32, BF16, negative_eigenvalues=True),
    "gated_delta of many pieces": delta(GDN, 2, 32, 128, 16, 128, BF16),
    "kimi_delta": delta(KDA, 2, 3, 48, 3, 32, BF16),
    "kimi_delta of one row": delta(KDA, 1, 3, 32, 3, 96, BF16, dtype=FP32),
    "kimi_delta float32": delta(KDA, 5, 6, 32, 6, 32, FP32),
    "kimi_delta of many pieces": delta(KDA, 2, 8, 128, 8, 128, BF16),
}

FAST = (
    "conv of one row",
    "norm of one row",
    "mamba2 of one row",
    "gated_delta of one row",
    "kimi_delta of one row",
)

MODELS: dict[str, Case] = {
    "conv of Nemotron": conv(256, 9728, 4, BF16),
    "norm of Nemotron": norm((256, 7680), 960, False, heads=96),
    "norm of Mamba-2": norm((256, 7680), 7680, False, heads=96),
    "norm of Qwen": norm((256, 32, 128), 128, True, weights=128),
    "mamba2 of Nemotron": mamba2(256, 96, 80, 8, 128, BF16),
    "gated_delta of Qwen": delta(GDN, 256, 32, 128, 16, 128, BF16),
    "kimi_delta of Kimi": delta(KDA, 256, 32, 128, 32, 128, BF16),
}
"""On a GPU alone."""
CASES |= MODELS


@functools.cache
def twin_of(name: str) -> tuple[Results, Results]:
    """The twin's results and how far others may be from them."""
    found = run_twin(name)
    return found, CASES[name].bounds(CASES[name].make(), found)
