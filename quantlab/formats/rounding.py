"""Rounding of elements, exact in float64: the readable truth that every faster path is compared with.

Stochastic rounding adds ``bits`` random bits to the top of the discarded field and keeps the carry:
up iff floor(delta * 2^bits) + r >= 2^bits (the rule of the hardware conversions).
"""

from enum import Enum

import torch
from torch import Tensor

from quantlab.formats.table import Element, Integer, Overflow

EXACT_BITS = 32  # what "exact" stochastic rounding draws: the whole word


class Rounding(Enum):
    NEAREST = "nearest"  # ties to even
    TOWARD_ZERO = "toward zero"
    STOCHASTIC = "stochastic"


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exact for integers in [-1022, 1023] (a library's exp2 need not be)."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_units(units: Tensor, rounding: Rounding, words: Tensor | None, bits: int) -> Tensor:
    """Round float64 ``units`` to int64; ``words`` are used by stochastic rounding only.

    Exact while |units| * 2^bits < 2^62.
    """
    if rounding is Rounding.NEAREST:
        return torch.round(units).to(torch.int64)
    if rounding is Rounding.TOWARD_ZERO:
        return torch.trunc(units).to(torch.int64)
    assert words is not None
    low = words & ((1 << bits) - 1)
    return (torch.floor(units * 2.0**bits).to(torch.int64) + low) >> bits


def encode_element(
    x: Tensor,
    element: Element,
    rounding: Rounding = Rounding.NEAREST,
    words: Tensor | None = None,
    bits: int = EXACT_BITS,
) -> Tensor:
    """Codes (int64) of x (float32 or float64).  One rounding, straight from x; the sign of zero is kept.

    NaN becomes the positive quiet NaN (its sign belongs to the processor that made it), or, where the element has
    no NaN, the largest number, as the hardware conversions have it.  Stochastic rounding acts on the magnitude.
    Toward zero, nothing finite overflows.
    """
    x = x.to(torch.float64)
    nan = torch.isnan(x)
    # 2^(max_exponent + 1) is beyond every rounding boundary, so capping there changes no result.
    magnitude = x.abs().masked_fill(nan, 0.0).clamp(max=2.0 ** (element.max_exponent + 1))
    exponent = (torch.frexp(magnitude).exponent - 1).masked_fill(magnitude == 0, element.min_exponent)
    exponent = exponent.clamp(min=element.min_exponent)
    units = magnitude * power_of_two(element.mantissa_bits - exponent)  # multiples of the quantum, exact
    rounded = round_units(units, rounding, words, bits)
    # A normal has units in [2^m, 2^(m+1)), a subnormal below; a carry runs into the exponent field by itself.
    code = ((exponent - element.min_exponent).to(torch.int64) << element.mantissa_bits) + rounded
    beyond = code > element.max_code
    if rounding is Rounding.TOWARD_ZERO:
        code = code.masked_fill(beyond & ~x.isinf(), element.max_code)
        beyond = x.isinf()
    code = code.masked_fill(beyond, overflow_code(element))
    code = code + torch.signbit(x).to(torch.int64) * element.sign_code
    return code.masked_fill(nan, element.nan_code or element.max_code)


def overflow_code(element: Element) -> int:
    """The code, without its sign, of a magnitude beyond the largest number."""
    if element.overflow is Overflow.INFINITY and element.infinity_code is not None:
        return element.infinity_code
    if element.overflow is Overflow.NAN and element.nan_code is not None:
        return element.nan_code
    return element.max_code


def decode_fields(codes: Tensor, element: Element) -> Tensor:
    """float64 values of the codes, computed from the bit fields."""
    codes = codes.to(torch.int64) & (2 * element.sign_code - 1)
    mantissa = codes & ((1 << element.mantissa_bits) - 1)
    magnitude_code = codes & (element.sign_code - 1)
    field = magnitude_code >> element.mantissa_bits
    normal = field > 0
    units = mantissa + (normal.to(torch.int64) << element.mantissa_bits)
    quantum = power_of_two(field.clamp(min=1) - element.bias - element.mantissa_bits)
    value = units.to(torch.float64) * quantum
    if element.nan_code is not None:
        value = value.masked_fill(magnitude_code > element.max_code, torch.nan)
    if element.infinity_code is not None:
        value = value.masked_fill(magnitude_code == element.infinity_code, torch.inf)
    return torch.where(codes >= element.sign_code, -value, value)


def encode_integer(
    x: Tensor,
    integer: Integer,
    rounding: Rounding = Rounding.NEAREST,
    words: Tensor | None = None,
    bits: int = EXACT_BITS,
) -> Tensor:
    """Integer codes (int64) of x, clamped to +-max; NaN becomes 0, as the hardware conversion has it.

    Stochastic rounding is floor(x + u), of the signed x.
    """
    bound = integer.max + 1
    units = x.to(torch.float64).nan_to_num(nan=0.0).clamp(-bound, bound)
    return round_units(units, rounding, words, bits).clamp(-int(integer.max), int(integer.max))


def divide(x: Tensor, divisor: Tensor | float) -> Tensor:
    """x / divisor, rounded once to float32, for x float32 or float64 and a float32 divisor.

    What a float32 division of the exact numbers gives, so that the dtype that holds x changes nothing.  Rounding to
    float64 on the way is harmless: a midpoint m of two float32 has 25 bits, so m * divisor is a float64, and an x
    that is another one differs from it by an ulp, x / divisor from m by more than half an ulp of m.
    """
    if not isinstance(divisor, Tensor):
        divisor = x.new_full((), divisor)  # by a Python number CUDA multiplies with its rounded reciprocal
    if x.dtype == torch.float32:
        return x / divisor
    return (x / divisor.to(torch.float64)).to(torch.float32)


def multiply(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, rounded once to float32, for x float32 or float64 and a float32 factor."""
    if x.dtype == torch.float32:
        return x * factor
    factor = factor.to(torch.float64)
    product = x * factor
    head, tail = _split(x)
    return _to_float32(product, (head * factor - product) + tail * factor)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float64 x = head + tail of 29 and at most 24 bits: their products with a float32 are exact."""
    head = (x.view(torch.int64) & ~0xFFFFFF).view(torch.float64)
    return head, x - head


def _to_float32(x: Tensor, error: Tensor) -> Tensor:
    """x + error rounded once to float32; of ``error``, below an ulp of the float64 x, only the sign counts.

    x is rounded to odd first: its last bit then says whether it was exact, and rounding that to float32 equals
    rounding the exact number (Boldo and Melquiond, IEEE Transactions on Computers 57, 2008).
    """
    bits = x.view(torch.int64)
    away = torch.where((bits & 1) == 0, (error.sign() * x.sign()).nan_to_num(nan=0.0), 0.0)
    odd = (bits + away.to(torch.int64)).view(torch.float64)
    return torch.where(x.isfinite(), odd, x).to(torch.float32)
