"""Exact rational rounding, written from the definitions and sharing no code and no constant with quantlab.

A grid is the sorted list of an element's non-negative numbers with their codes; rounding is a search in it.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Typed from the OCP and IEEE tables.  finite_codes: the number of non-negative finite codes."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    finite_codes: int
    infinity: bool  # overflow gives the code after the last finite one
    nan_code: int | None

    @property
    def sign_code(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)


LAYOUTS = {
    "tf32": Layout(8, 10, 127, 0x3FC00, True, 0x3FE00),
    "bf16": Layout(8, 7, 127, 0x7F80, True, 0x7FC0),
    "fp16": Layout(5, 10, 15, 0x7C00, True, 0x7E00),
    "e5m2": Layout(5, 2, 15, 0x7C, False, 0x7E),
    "e4m3": Layout(4, 3, 7, 0x7F, False, 0x7F),
    "e3m2": Layout(3, 2, 3, 32, False, None),
    "e2m3": Layout(2, 3, 1, 32, False, None),
    "e2m1": Layout(2, 1, 1, 8, False, None),
}


@cache
def grid(name: str) -> list[Fraction]:
    """The non-negative finite numbers; index = code."""
    layout = LAYOUTS[name]
    numbers = []
    for code in range(layout.finite_codes):
        field, mantissa = divmod(code, 2**layout.mantissa_bits)
        units = mantissa + (2**layout.mantissa_bits if field else 0)  # multiples of the last place
        exponent = max(field, 1) - layout.bias - layout.mantissa_bits
        numbers.append(Fraction(units << exponent) if exponent > 0 else Fraction(units, 1 << -exponent))
    return numbers


SHIFT = 1130  # every float64 and every midpoint is a multiple of 2^-SHIFT


def units(x: float) -> int:
    """|x| as an exact multiple of 2^-SHIFT."""
    numerator, denominator = abs(x).as_integer_ratio()
    return numerator << (SHIFT + 1 - denominator.bit_length())  # the denominator is a power of two


@cache
def grid_units(name: str) -> list[int]:
    """The grid in units, continued by one step: overflow is decided against that number."""
    numbers = [n.numerator << (SHIFT + 1 - n.denominator.bit_length()) for n in grid(name)]
    return [*numbers, 2 * numbers[-1] - numbers[-2]]


def round_code(
    name: str, x: float, random: int | None = None, bits: int = 0, *, toward_zero: bool = False
) -> int:
    """The code of a finite or infinite float x: nearest even, toward zero, or with ``bits`` random bits."""
    layout, numbers = LAYOUTS[name], grid_units(name)
    sign = layout.sign_code if math.copysign(1, x) < 0 else 0
    last = layout.finite_codes - (0 if layout.infinity else 1)
    if math.isinf(x):
        return sign + last
    magnitude = units(x)
    if toward_zero:
        return sign + bisect_right(numbers, magnitude, hi=len(numbers) - 1) - 1
    if magnitude >= numbers[-1]:
        return sign + last
    low = bisect_right(numbers, magnitude) - 1
    offset, step = magnitude - numbers[low], numbers[low + 1] - numbers[low]
    if random is None:
        up = 2 * offset > step or (2 * offset == step and low % 2 == 1)
    else:
        up = offset * 2**bits // step + random >= 2**bits
    return sign + min(low + up, last)


def midpoints(name: str, dtype: type) -> np.ndarray:
    """Every grid number and midpoint that ``dtype`` holds, with one ulp to either side, both signs."""
    numbers = np.array([float(number) for number in grid(name)])  # exact, as are sums of neighbours
    last, step = numbers[-1], numbers[-1] - numbers[-2]
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [last + step / 2, last + step]])
    with np.errstate(over="ignore"):
        x = points.astype(dtype)
        inf = dtype(np.inf)
        x = np.concatenate([x, np.nextafter(x, inf), np.nextafter(x, -inf)])
    return np.concatenate([x, -x])
