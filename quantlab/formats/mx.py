"""MX block formats: 32 elements along the last dimension under one E8M0 scale, a power of two.

Scale bytes are read off the bits of the block's largest magnitude; no logarithm is taken, so a number just below
a power of two is not mistaken for it.  With emax the exponent of the element's largest number, the scale is
2^(exponent(amax) - emax), one higher where the mode says so:

    rceil   if amax exceeds the element's largest number: the smallest scale at which no element saturates
    floor   never (OCP MX 1.0): an amax beyond the largest number saturates
    even    if amax, rounded to nearest even on the element's grid, lands beyond the largest number
    ceil    if amax is no power of two
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantlab.errors import unknown_name
from quantlab.formats.groups import Groups
from quantlab.formats.recipe import DividingRecipe, Explanation, Scales
from quantlab.formats.rounding import power_of_two
from quantlab.formats.table import Element

BLOCKS = Groups(columns=32)
SCALE_BIAS = 127
SCALE_NAN = 0xFF
MODES = ("rceil", "floor", "even", "ceil")  # the default first

_MAX_BYTE = 0xFE
# From this byte on the widest element (E5M2, below 2^16) may decode beyond the largest float32.
_OVERFLOW_BYTE = 128 - 16 + SCALE_BIAS


def scale_codes(amax: Tensor, element: Element, mode: str = MODES[0]) -> Tensor:
    """E8M0 bytes (uint8, like amax) of the scales for block maxima, float32 or float64, exact for all of them.

    Saturates at 2^-127 (byte 0, also for a zero block) and 2^127 (byte 254, also for Inf); NaN gives 0xFF.
    Errors: InputError for an unknown mode.
    """
    if mode not in MODES:
        raise unknown_name("scale", mode, MODES)
    bits = amax.to(torch.float64).view(torch.int64)  # every float32, subnormal or not, is a normal float64
    exponent, mantissa = (bits >> 52) & 0x7FF, bits & ((1 << 52) - 1)
    exponent += SCALE_BIAS - 1023 - element.max_exponent
    exponent += mantissa >= raising_mantissa(element, mode)
    codes = exponent.clamp_(0, _MAX_BYTE)
    return codes.masked_fill_(amax.isnan(), SCALE_NAN).to(torch.uint8)


@lru_cache
def raising_mantissa(element: Element, mode: str) -> int:
    """The smallest 52-bit mantissa of amax that takes the scale one higher; 2^52 if none does."""
    if mode == "floor":
        return 1 << 52
    if mode == "ceil":
        return 1
    largest = int((element.max / 2.0**element.max_exponent - 1) * 2**52)
    if mode == "rceil":
        return largest + 1
    # Midway to the number that would follow the largest one; on a tie the even code wins.
    midpoint = largest + (1 << (51 - element.mantissa_bits))
    return midpoint if element.max_code % 2 else midpoint + 1


def decode_scales(codes: Tensor) -> Tensor:
    """E8M0 bytes -> float32, exactly (byte 0 is the subnormal 2^-127); 0xFF -> NaN."""
    return _scale_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@lru_cache(maxsize=8)
def _scale_table(device: torch.device) -> Tensor:
    values = power_of_two(torch.arange(256, device=device) - SCALE_BIAS)
    values[SCALE_NAN] = torch.nan
    return values.to(torch.float32)


@dataclass(frozen=True)
class Mx(DividingRecipe):
    """The recipe of an element under one of the scale modes.

    Quotient and product are exact, so the error of a value x is the element's: with h(q) half the distance of its
    numbers around q = x / scale, |value - x| <= h * scale; midpoints attain it (5 beside 6 in mxfp4).  Toward zero
    and stochastic: below 2 h * scale.  Saturation adds, with M the largest number and 2^emax its power of two:

        rceil, ceil   nothing: no q exceeds M
        even          nothing: q exceeds M by at most half a step, so that h holds as if the grid went on
        floor         q comes close to 2^(emax + 1): up to the share 1 - M / 2^(emax + 1) of the largest value of the
                      block is lost, 1/4 for E2M1, 1/8 for E4M3, E5M2 and E3M2, 1/16 for E2M3
    """

    element: Element
    mode: str = MODES[0]

    def scales(self, x: Tensor) -> Scales:
        return Scales(scale_codes(BLOCKS.amax(x), self.element, self.mode))

    def quotient(self, x: Tensor, scales: Scales) -> Tensor:
        """Exact, in the dtype of x, unless below 2^-126, where every rounding gives what it gives for the exact one.

        x is multiplied by the inverse scale, a power of two from 2^-127 to 2^127 that float32 holds as well.
        """
        inverse = decode_scales((2 * SCALE_BIAS - scales.stored.int()).clamp_(min=0))
        inverse = inverse.masked_fill_(scales.stored == SCALE_NAN, torch.nan).to(x.dtype)
        values, inverse = BLOCKS.align(x, inverse)
        return (values * inverse).view(x.shape)

    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        """A finite element never decodes to Inf: beyond the largest float32 the product saturates.

        For the codes of a block that holds that number may stand for 2^128.
        """
        infinite = ~values.isfinite() if _may_overflow(scales.stored) else None
        aligned, factors = BLOCKS.align(values, decode_scales(scales.stored))
        aligned *= factors
        if infinite is None:
            return values
        largest = torch.finfo(torch.float32).max
        return torch.where(infinite, values, values.clamp(-largest, largest))

    def explain(self) -> Explanation:
        emax, bump = self.element.max_exponent, raising_mantissa(self.element, self.mode)
        # The limit itself is a double: the first mantissa beyond which the scale doubles, or that mantissa.
        inclusive = bump % 2**29 == 0
        limit = (1 + (bump if inclusive else bump - 1) / 2**52) * 2.0**emax
        condition = f" + (a {'>=' if inclusive else '>'} {limit:.9g} * 2^(exponent(a) - {emax}))"
        steps = (
            ("exponent", f"k = exponent(a) - {emax}" + ("" if self.mode == "floor" else condition)),
            ("scale, E8M0", "s = 2^clamp(k, -127, 127)"),
            ("quotient", "q = x / s"),
            ("value", "v = clamp(c * s, -MAX, MAX)"),
        )
        return Explanation(steps)


def _may_overflow(scales: Tensor) -> bool:
    return bool(((scales >= _OVERFLOW_BYTE) & (scales < SCALE_NAN)).any())
