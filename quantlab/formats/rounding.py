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
    STOCHASTIC = "stochastic"


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exact for integers in [-1022, 1023] (a library's exp2 need not be)."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_units(units: Tensor, words: Tensor | None, bits: int) -> Tensor:
    """Round float64 ``units`` to int64: to nearest even, or stochastically if ``words`` are given.

    Exact while |units| * 2^bits < 2^62.
    """
    if words is None:
        return torch.round(units).to(torch.int64)
    low = words & ((1 << bits) - 1)
    return (torch.floor(units * 2.0**bits).to(torch.int64) + low) >> bits


def encode_element(
    x: Tensor, element: Element, words: Tensor | None = None, bits: int = EXACT_BITS
) -> Tensor:
    """Codes (int64) of x (float32 or float64).  One rounding, straight from x; the sign of zero is kept.

    NaN becomes the quiet NaN with the sign of x, or, where the element has no NaN, a zero: the caller refuses
    such input.  Stochastic rounding acts on the magnitude.
    """
    x = x.to(torch.float64)
    nan = torch.isnan(x)
    # 2^(max_exponent + 1) is beyond every rounding boundary, so capping there changes no result.
    magnitude = x.abs().masked_fill(nan, 0.0).clamp(max=2.0 ** (element.max_exponent + 1))
    exponent = (torch.frexp(magnitude).exponent - 1).masked_fill(magnitude == 0, element.min_exponent)
    exponent = exponent.clamp(min=element.min_exponent)
    units = magnitude * power_of_two(element.mantissa_bits - exponent)  # multiples of the quantum, exact
    rounded = round_units(units, words, bits)
    # A normal has units in [2^m, 2^(m+1)), a subnormal below; a carry runs into the exponent field by itself.
    code = ((exponent - element.min_exponent).to(torch.int64) << element.mantissa_bits) + rounded
    overflow = code > element.max_code
    if element.overflow is Overflow.SATURATE or element.infinity_code is None:
        code = code.masked_fill(overflow, element.max_code)
    else:
        code = code.masked_fill(overflow, element.infinity_code)
    code = code.masked_fill(nan, element.nan_code or 0)
    return code + torch.signbit(x).to(torch.int64) * element.sign_code


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
    x: Tensor, integer: Integer, words: Tensor | None = None, bits: int = EXACT_BITS
) -> Tensor:
    """Integer codes (int64) of x, clamped to +-max.  Stochastic rounding is floor(x + u), of the signed x."""
    bound = integer.max + 1
    units = x.to(torch.float64).clamp(-bound, bound)
    return round_units(units, words, bits).clamp(-int(integer.max), int(integer.max))
