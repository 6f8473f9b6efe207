"""MX block formats as libraries compute them, bit for bit: each profile is a row of named float32 steps.

Every library goes through the same five steps, and they differ in each:

    exponents      block maxima -> the scale's exponent, float32 (-inf, inf and NaN are possible values)
    store          exponent -> E8M0 byte
    divide         x and exponents, broadcast against each other -> quotients
    cast           quotients -> codes; None where it is the element's own rounding to nearest even
    decode_scales  byte -> float32 factor of the decoded elements

Sources: torchao 0.18.0 prototype/mx_formats/mx_tensor.py, nvidia-modelopt 0.47.0 torch/quantization/qtensor,
compressed-tensors 0.20.1 quantization/utils, fouroversix 1.0.5 quantize/pytorch/reference.py, microxcaling 7bc4195
mx/mx_ops.py and elemwise_ops.py, all on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantlab.formats import mx
from quantlab.formats.rounding import encode_element, power_of_two
from quantlab.formats.table import Element, Overflow, Specials


class FixedPoint(Element):
    """A sign-magnitude fixed-point number with one integer bit: code / 2^mantissa_bits, emax 0.

    It is a float whose single exponent bit is the integer bit: with bias 1, subnormals and normals share one step.
    """

    @property
    def bias(self) -> int:
        return 1


# The integer elements of microxcaling (MXINT8 of OCP MX 1.0 without the code -2).
MXINT8 = FixedPoint("mxint8", 1, 6, Specials.NONE, Overflow.SATURATE)
MXINT4 = FixedPoint("mxint4", 1, 2, Specials.NONE, Overflow.SATURATE)


@dataclass(frozen=True)
class MXProfile:
    """One way in which a library computes MX blocks; the steps are described at the top of this file.

    variant: what the library lets its user choose (a scale mode, a rounding, a scale rule).
    elements: names of the elements that the library has, microxcaling's mxint8 and mxint4 included.
    """

    library: str
    variant: str
    elements: tuple[str, ...]
    exponents: Callable[[Tensor, Element], Tensor]
    store: Callable[[Tensor], Tensor]
    divide: Callable[[Tensor, Tensor], Tensor]
    decode_scales: Callable[[Tensor], Tensor]
    cast: Callable[[Tensor, Element], Tensor] | None = None


def encode(
    x: Tensor,
    element: Element,
    profile: MXProfile,
    encode_quotients: Callable[[Tensor], Tensor],
    own_cast: bool = True,
) -> tuple[Tensor, Tensor]:
    """Codes (..., K) and scale bytes (..., blocks) of float32 x (..., K).

    encode_quotients: float32 quotients (..., K) -> codes; not called by a profile that has its own cast, unless
    own_cast is false (stochastic rounding).
    """
    exponents = profile.exponents(mx.BLOCKS.largest(x), element)
    values, per_value = mx.BLOCKS.align(x, exponents)
    quotients = profile.divide(values, per_value).view(x.shape)
    own = profile.cast if own_cast else None
    codes = own(quotients, element) if own else encode_quotients(quotients)
    return codes, profile.store(exponents)


def decode(values: Tensor, scales: Tensor, profile: MXProfile) -> Tensor:
    """Decoded elements (..., K), float32, times their blocks' factors, with the library's Inf and NaN."""
    aligned, factors = mx.BLOCKS.align(values, profile.decode_scales(scales))
    return (aligned * factors).view(values.shape)


def _power(exponents: Tensor) -> Tensor:
    """2^exponent, float32, exact from -149 to 127; Inf above (also for inf), NaN for NaN."""
    exact = power_of_two(exponents.nan_to_num(nan=0.0, posinf=128.0).clamp(-150, 128)).to(torch.float32)
    return exact.masked_fill(exponents.isnan(), torch.nan)


def _log2(x: Tensor) -> Tensor:
    """log2 rounded to float32: below a power of two by less than half an ulp of its exponent it is that exponent."""
    return torch.log2(x.to(torch.float64)).to(torch.float32)


def _float_exponent(x: Tensor) -> Tensor:
    """The exponent field of non-negative float32 x without its bias; -127 for zero and subnormals."""
    return ((x.view(torch.int32) >> 23) & 0xFF).to(torch.float32) - 127


def _round_to_power(x: Tensor, mantissa_bits: int) -> Tensor:
    """float32 x rounded to ``mantissa_bits``, ties up, then down to a power of two; it can reach Inf."""
    bits = x.view(torch.int32) + (1 << (22 - mantissa_bits))
    return (bits & 0x7F800000).view(torch.float32).masked_fill(x.isnan(), torch.nan)


def _divided(x: Tensor, denominator: float) -> Tensor:
    """True division: by a number, CUDA would multiply by its rounded reciprocal."""
    return x / x.new_full((), denominator)


def _divide(x: Tensor, exponents: Tensor) -> Tensor:
    return x / _power(exponents)


def _multiply_by_inverse(x: Tensor, exponents: Tensor) -> Tensor:
    return x * _power(-exponents)


def _store(exponents: Tensor) -> Tensor:
    """The biased exponent, clamped to a byte; NaN -> 0xFF."""
    return (exponents + mx.SCALE_BIAS).clamp(0, 255).nan_to_num(nan=255.0).to(torch.uint8)


def _store_finite(exponents: Tensor) -> Tensor:
    """The biased exponent; Inf and NaN turn into byte 0, as their conversion to an unsigned byte does."""
    return torch.where(exponents.isfinite(), exponents + mx.SCALE_BIAS, 0.0).to(torch.uint8)


# torchao: floor, ceil and even read exponent bits, rceil takes a logarithm.


def _torchao_exponents(amax: Tensor, element: Element, mode: str) -> Tensor:
    if mode == "even":
        amax = _round_to_power(amax, element.mantissa_bits)
    exponents = _float_exponent(amax) - element.max_exponent
    if mode == "ceil":
        exponents += (amax.view(torch.int32) & 0x7FFFFF) > 0
    return exponents.clamp(-127, 128).masked_fill(amax.isnan(), torch.nan)


def _torchao_divide(x: Tensor, exponents: Tensor) -> Tensor:
    """The divisor is at least 2^-126, the byte stored may say 2^-127: such blocks decode to half their size.

    The divisor of a block with NaN is 0xFF read as an exponent, Inf: its numbers turn into zeros.
    """
    return x / _power(exponents.clamp(min=-126).nan_to_num(nan=128.0))


def _torchao_rceil_exponents(amax: Tensor, element: Element) -> Tensor:
    return torch.ceil(_log2(_divided(amax, element.max))).clamp(-127, 127)


def _torchao_rceil_multiply(x: Tensor, exponents: Tensor) -> Tensor:
    """The inverse of byte 0 is taken as 1: such blocks are flushed to zero."""
    return x * _power(-exponents).masked_fill(exponents == -127, 1.0)


# Model-Optimizer.


def _modelopt_mxfp4_exponents(amax: Tensor, element: Element) -> Tensor:
    logarithm = _log2(_divided(amax, element.max))
    return torch.ceil(torch.maximum(logarithm, logarithm.new_tensor(-127.0)))


def _modelopt_mxfp8_exponents(amax: Tensor, element: Element) -> Tensor:
    exponents = torch.ceil(_log2(_divided(amax, element.max))).clamp(-127, 127)
    return exponents.masked_fill(amax.isnan(), -127.0)


def _modelopt_mxfp4_cast(quotients: Tensor, element: Element) -> Tensor:
    """Ties go to the smaller magnitude; both zeros, and NaN, get the code of -0.

    The code counts the midpoints that are strictly below the magnitude.
    """
    midpoints = quotients.new_tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = (quotients.abs()[..., None] > midpoints).sum(-1)
    return (codes + element.sign_code * ~(quotients > 0)).to(torch.uint8)


# compressed-tensors.


def _compressed_tensors_exponents(amax: Tensor, element: Element, mantissa_bits: int) -> Tensor:
    """Clamped to what a byte holds: 0xFF, which Inf and NaN give, is used as the number 2^128, that is Inf."""
    exponents = _log2(_round_to_power(amax, mantissa_bits)) - element.max_exponent
    return exponents.clamp(-127, 128).nan_to_num(nan=128.0)


def _compressed_tensors_divide(x: Tensor, exponents: Tensor, has_nan: bool) -> Tensor:
    """The zero point 0 is added, which turns -0 into +0.

    Inf / Inf, and NaN, where the element has no code for NaN: zero, which decodes to NaN as 0 * Inf.
    """
    quotients = x / _power(exponents) + 0.0
    return quotients if has_nan else quotients.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


# fouroversix.


def _fouroversix_exponents(amax: Tensor, element: Element, largest: float) -> Tensor:
    """Rounded up on the bits of amax / largest; a subnormal quotient becomes 2^-126, zero stays zero (-inf)."""
    quotient = _divided(amax, largest)
    exponents = _float_exponent(quotient) + ((quotient.view(torch.int32) & 0x7FFFFF) > 0)
    # The byte is computed modulo 256: that of NaN wraps round to that of zero.
    return exponents.masked_fill((exponents == -127) | amax.isnan(), -torch.inf)


def _fouroversix_cast(quotients: Tensor, element: Element) -> Tensor:
    """To nearest even; -0 loses its sign; Inf and NaN, as 0/0 in a zero block, get code 11 (x86's default NaN)."""
    finite = quotients.isfinite()
    codes = encode_element(torch.where(finite, quotients + 0.0, 0.0), element)
    return codes.masked_fill(~finite, 11).to(torch.uint8)


# microxcaling: it stores no bits; codes and bytes are those of the values that it returns.


def _microxcaling_exponents(amax: Tensor, element: Element) -> Tensor:
    """floor of the rounded logarithm; what exceeds 127 turns the block into NaN."""
    tiny = torch.finfo(torch.float32).tiny
    exponents = torch.floor(_log2(amax.masked_fill(amax == 0, tiny))) - element.max_exponent
    return exponents.masked_fill(exponents > 127, torch.nan).clamp(min=-127)


def _microxcaling_cast(quotients: Tensor, element: Element, rounding: str) -> Tensor:
    """Rounded in float32 on a grid whose step follows the rounded logarithm of each quotient; NaN -> zero or NaN."""
    magnitude = quotients.abs()
    steps = torch.floor(_log2(magnitude.masked_fill(magnitude == 0, 1.0))).clamp(min=element.min_exponent)
    steps = _power(steps - element.mantissa_bits)
    units = _MICROXCALING_ROUNDINGS[rounding](magnitude / steps)
    signs = torch.sign(quotients)  # zero for both zeros: -0 loses its sign
    return encode_element(signs * (units * steps), element).to(torch.uint8)


def _round_half_away(units: Tensor) -> Tensor:
    """The sum is rounded to float32: the number below one half gives 1."""
    return torch.floor(units + 0.5)


def _round_half_even(units: Tensor) -> Tensor:
    tie = (units - 0.5) % 2 == 0
    return torch.floor(units + 0.5) - tie.to(units.dtype)


_MICROXCALING_ROUNDINGS = {"nearest": _round_half_away, "even": _round_half_even, "floor": torch.floor}

_FLOATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_MICROXCALING_ELEMENTS = (*_FLOATS, "mxint8", "mxint4")


def _torchao(mode: str) -> MXProfile:
    exponents = partial(_torchao_exponents, mode=mode)
    return MXProfile("torchao", mode, _FLOATS, exponents, _store, _torchao_divide, mx.decode_scales)


def _microxcaling(rounding: str) -> MXProfile:
    cast = partial(_microxcaling_cast, rounding=rounding)
    steps = (_microxcaling_exponents, _store, _divide, mx.decode_scales, cast)
    return MXProfile("microxcaling", rounding, _MICROXCALING_ELEMENTS, *steps)


def _compressed_tensors(element: str, mantissa_bits: int) -> MXProfile:
    exponents = partial(_compressed_tensors_exponents, mantissa_bits=mantissa_bits)
    divide = partial(_compressed_tensors_divide, has_nan=element == "e4m3")
    steps = (exponents, _store, divide, _decode_to_infinity)
    return MXProfile("compressed_tensors", "", (element,), *steps)


def _decode_to_infinity(codes: Tensor) -> Tensor:
    """0xFF is the number 2^128, so that a block with it decodes to Inf and NaN."""
    return _power(codes.to(torch.float32) - mx.SCALE_BIAS)


def _fouroversix(rule: str, largest: float) -> MXProfile:
    exponents = partial(_fouroversix_exponents, largest=largest)
    steps = (exponents, _store, _divide, mx.decode_scales, _fouroversix_cast)
    return MXProfile("fouroversix", rule, ("e2m1",), *steps)


# The first row of a library that has the element is its default.
MX_PROFILES: tuple[MXProfile, ...] = (
    *(_torchao(mode) for mode in ("floor", "ceil", "even")),
    MXProfile(
        "torchao",
        "rceil",
        _FLOATS,
        _torchao_rceil_exponents,
        _store,
        _torchao_rceil_multiply,
        mx.decode_scales,
    ),
    MXProfile(
        "modelopt",
        "",
        ("e2m1",),
        _modelopt_mxfp4_exponents,
        _store_finite,
        _divide,
        mx.decode_scales,
        _modelopt_mxfp4_cast,
    ),
    MXProfile(
        "modelopt",
        "",
        ("e4m3",),
        _modelopt_mxfp8_exponents,
        _store,
        _multiply_by_inverse,
        mx.decode_scales,
    ),
    # Rounding thresholds: the mantissa bits of E2M1 also for E4M3, which puts the step at 448.
    _compressed_tensors("e2m1", 1),
    _compressed_tensors("e2m3", 3),
    _compressed_tensors("e4m3", 1),
    *(_microxcaling(rounding) for rounding in ("nearest", "even", "floor")),
    _fouroversix("static_6", 6.0),
    _fouroversix("static_4", 4.0),
)
