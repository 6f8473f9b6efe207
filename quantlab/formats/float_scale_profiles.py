"""Integers and FP8 under FP32 scales as libraries compute them, bit for bit: rows of named float32 steps.

A group is whatever shares a scale; its extremes come in already reduced and broadcast against the values, so every
step works for any layout of groups.

    factors    minimum and maximum of a group -> the factor that its values are scaled by, float32
    quotients  values and factors -> what is rounded
    cast       quotients -> codes; None where it is the element's own rounding: nearest even, saturating
    store      factor -> the scale that is stored, float32
    decode     decoded codes and stored scales -> values, float32

Sources: torchao 0.18.0 quantization/quant_primitives.py, nvidia-modelopt 0.47.0 torch/quantization (qtensor and
tensor_quant.py), compressed-tensors 0.20.1 quantization/utils and lifecycle, flashinfer and the vLLM port of its
Triton kernel (state-space decode).  All on the CPU, with true division: a division by a number on CUDA multiplies
by its reciprocal, which is why constants are divided by as tensors here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny
_EPS = torch.finfo(torch.float32).eps
_LARGEST = torch.finfo(torch.float32).max


def _quotient(values: Tensor, scales: Tensor) -> Tensor:
    return values / scales


def _product(values: Tensor, factors: Tensor) -> Tensor:
    return values * factors


def _unchanged(factors: Tensor) -> Tensor:
    return factors


def _reciprocal(factors: Tensor) -> Tensor:
    return torch.ones_like(factors) / factors


@dataclass(frozen=True)
class FloatScaleProfile:
    """One convention; the steps are described at the top of this file.

    variant: what distinguishes the conventions of one library.  elements: the names that it applies to.
    """

    library: str
    variant: str
    elements: tuple[str, ...]
    factors: Callable[[Tensor, Tensor], Tensor]
    quotients: Callable[[Tensor, Tensor], Tensor] = _quotient
    cast: Callable[[Tensor], Tensor] | None = None
    store: Callable[[Tensor], Tensor] = _unchanged
    decode: Callable[[Tensor, Tensor], Tensor] = _product


def encode(
    x: Tensor,
    minimum: Tensor,
    maximum: Tensor,
    profile: FloatScaleProfile,
    encode_quotients: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Codes like x and the stored scales, float32, like minimum and maximum.

    minimum, maximum: float32, the extremes of x's groups, broadcasting against x; a caller that has only the largest
    magnitude passes (-amax, amax), which makes no difference except to torchao's no_clipping_err.
    encode_quotients: float32 quotients -> codes; not called by a profile that has its own cast.
    """
    factors = profile.factors(minimum, maximum)
    quotients = profile.quotients(x, factors)
    codes = encode_quotients(quotients) if profile.cast is None else profile.cast(quotients)
    return codes, profile.store(factors)


def _amax(minimum: Tensor, maximum: Tensor) -> Tensor:
    return torch.maximum(-minimum, maximum)


def _divided(x: Tensor, denominator: float) -> Tensor:
    return x / x.new_full((), denominator)


def _kernel_factors(minimum: Tensor, maximum: Tensor, largest: float) -> Tensor:
    """largest / amax, 1.0 for a zero group; Inf where amax is so small that the quotient overflows."""
    amax = _amax(minimum, maximum)
    return torch.where(amax == 0, 1.0, torch.full_like(amax, largest) / amax)


def _half_away(quotients: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """To nearest, ties away from zero, exactly (adding one half first would round twice)."""
    whole = torch.trunc(quotients)
    rounded = whole + torch.sign(quotients) * ((quotients - whole).abs() >= 0.5)
    return rounded.clamp(-largest, largest).nan_to_num(nan=0.0).to(dtype)


def _integers(quotients: Tensor, low: int, high: int, nan: int, dtype: torch.dtype) -> Tensor:
    """To nearest even, clamped to low .. high; NaN as its conversion to an integer gives it."""
    return torch.round(quotients).clamp(low, high).nan_to_num(nan=float(nan)).to(dtype)


def _cast(bits: int, low: int, nan: int = 0) -> Callable[[Tensor], Tensor]:
    dtype = torch.int8 if bits <= 8 else torch.int16
    return partial(_integers, low=low, high=2 ** (bits - 1) - 1, nan=nan, dtype=dtype)


# torchao.


def _torchao_symmetric(minimum: Tensor, maximum: Tensor, low: int, high: int, eps: float = _TINY) -> Tensor:
    """amax over half the range, which is 127.5 for -128 .. 127: the largest magnitude is clipped if positive."""
    return _divided(_amax(minimum.clamp(max=0), maximum), (high - low) / 2).clamp(min=eps)


def _torchao_no_clipping(minimum: Tensor, maximum: Tensor, low: int, high: int, eps: float = _TINY) -> Tensor:
    """Each side over its own end of the range, the larger of the two."""
    negative, positive = _divided(minimum.clamp(max=0), low), _divided(maximum.clamp(min=0), high)
    return torch.where(negative > positive, negative, positive).clamp(min=eps)


def _torchao_quotients(x: Tensor, scales: Tensor) -> Tensor:
    return x * _reciprocal(scales)


def _divided_amax(minimum: Tensor, maximum: Tensor, denominator: float) -> Tensor:
    """amax / denominator without a guard: a zero group has scale 0 and turns into NaN."""
    return _divided(_amax(minimum, maximum), denominator)


def _torchao(bits: int, rule: Callable[..., Tensor], variant: str, narrow: bool) -> FloatScaleProfile:
    high = 2 ** (bits - 1) - 1
    low = -high if narrow else -high - 1
    factors = partial(rule, low=low, high=high)
    name = variant + ("_narrow" if narrow else "")
    return FloatScaleProfile("torchao", name, (f"int{bits}",), factors, _torchao_quotients, _cast(bits, low))


# Model-Optimizer.


def _modelopt_int4_factors(minimum: Tensor, maximum: Tensor) -> Tensor:
    """7 / amax as torch divides a number by a tensor: the reciprocal first, then the product, each rounded."""
    return _reciprocal(_amax(minimum, maximum)) * 7.0


def _modelopt_eager_factors(minimum: Tensor, maximum: Tensor) -> Tensor:
    """448 / amax, by way of the reciprocal; amax up to 2^-24 counts as 1."""
    amax = _amax(minimum, maximum)
    return _reciprocal(torch.where(amax <= 2.0**-24, 1.0, amax)) * 448.0


# compressed-tensors.


def _compressed_tensors_factors(minimum: Tensor, maximum: Tensor, denominator: float) -> Tensor:
    """amax over half the range; a scale of zero becomes the epsilon of float32, 2^-23."""
    scales = _divided(_amax(minimum.clamp(max=0), maximum.clamp(min=0)), denominator)
    return torch.where(scales == 0, _EPS, scales)


def _compressed_tensors_quotients(x: Tensor, scales: Tensor) -> Tensor:
    """The zero point 0 is added, which turns -0 into +0."""
    return x / scales + 0.0


def _kernel(library: str, element: str, largest: float, away: bool) -> FloatScaleProfile:
    """Kernels of state-space decode: one factor a row, its reciprocal stored.

    Triton rounds integers half away from zero, CUDA to even; FP8 is cast to nearest even by both.
    """
    dtype = torch.int8 if element == "int8" else torch.int16
    cast = partial(_half_away, largest=largest, dtype=dtype) if away else None
    factors = partial(_kernel_factors, largest=largest)
    return FloatScaleProfile(library, "", (element,), factors, _product, cast, _reciprocal)


_TORCHAO_RULES = {"symmetric": _torchao_symmetric, "symmetric_no_clipping_err": _torchao_no_clipping}
_KERNEL_ELEMENTS = {"int8": 127.0, "int16": 32767.0, "e4m3": 448.0}

# The first row of a library that has the element is its default.
FLOAT_SCALE_PROFILES: tuple[FloatScaleProfile, ...] = (
    *(
        _torchao(bits, rule, variant, narrow)
        for bits in (8, 4, 16)
        for variant, rule in _TORCHAO_RULES.items()
        for narrow in (False, True)
    ),
    FloatScaleProfile("torchao", "", ("e4m3",), partial(_divided_amax, denominator=448.0)),
    FloatScaleProfile("torchao", "", ("e5m2",), partial(_divided_amax, denominator=57344.0)),
    FloatScaleProfile("modelopt", "", ("e4m3",), partial(_divided_amax, denominator=448.0)),
    FloatScaleProfile("modelopt", "eager", ("e4m3",), _modelopt_eager_factors, _product, None, _reciprocal),
    FloatScaleProfile(
        "modelopt", "", ("int8",), partial(_divided_amax, denominator=127.0), cast=_cast(8, -128)
    ),
    # Codes are packed as code + 8, the even element in the high nibble; NaN becomes the byte 0.
    FloatScaleProfile(
        "modelopt", "", ("int4",), _modelopt_int4_factors, _product, _cast(4, -8, nan=-8), decode=_quotient
    ),
    *(
        FloatScaleProfile(
            "compressed_tensors",
            "",
            (f"int{bits}",),
            partial(_compressed_tensors_factors, denominator=2.0 ** (bits - 1) - 0.5),
            _compressed_tensors_quotients,
            _cast(bits, -(2 ** (bits - 1))),
        )
        for bits in (8, 4)
    ),
    FloatScaleProfile(
        "compressed_tensors",
        "",
        ("e4m3",),
        partial(_compressed_tensors_factors, denominator=448.0),
        _compressed_tensors_quotients,
    ),
    *(_kernel("flashinfer", name, largest, False) for name, largest in _KERNEL_ELEMENTS.items()),
    *(_kernel("vllm", name, largest, name != "e4m3") for name, largest in _KERNEL_ELEMENTS.items()),
)
