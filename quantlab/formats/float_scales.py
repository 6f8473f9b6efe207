"""One FP32 scale a group of values: integers and FP8, as recurrent-state kernels store them.

decode scale = amax / largest, 1.0 for a group of zeros; code = round(x / scale); value = code * scale.
``recip``, the order of those kernels: encode = largest / amax; code = round(x * encode); stored = 1 / encode.
All arithmetic is float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.formats.groups import Groups
from quantlab.formats.recipe import DividingRecipe, Explanation, Scales, largest_scale
from quantlab.formats.rounding import divide, multiply
from quantlab.formats.table import FLOAT_ELEMENTS, Element, Integer

_TINY = FLOAT_ELEMENTS["fp32"].smallest
_MAX = FLOAT_ELEMENTS["fp32"].max
GROUPS = {
    "row": Groups(),
    "block32": Groups(columns=32),
    "tile32": Groups(rows=32),
    "head": Groups(rows=None),
}


@dataclass(frozen=True)
class FloatScaled(DividingRecipe):
    """scale "max" or "recip" with the element's largest number, or "240", "240.recip" with another one.

    A denominator below the largest number leaves headroom; codes use less of the element.

    Error of a value x under its scale s, with h(q) half the distance of the element's numbers around q = x / s (1/2
    for integers): |value - x| <= h * s + 2^-22 |x|, the last for the float32 roundings of quotient and product; 2^-21
    under "recip", which rounds the scale twice.  Midpoints attain h * s: 0.5 beside 127 in int8.  Toward zero and
    stochastic: below 2 h * s.  Nothing saturates while amax / largest is at least 2^-126; below that the scale may
    be rounded down by a third, and so is the largest value.  Under "recip" the scale ends at 2^-128 instead, the
    reciprocal of the largest float32, and the bound holds.
    """

    element: Element | Integer
    granularity: str
    scale: str

    @property
    def groups(self) -> Groups:
        return GROUPS[self.granularity]

    @property
    def largest(self) -> float:
        number = self.scale.removesuffix("recip").rstrip(".")
        return self.element.max if number in ("", "max") else float(number)

    @property
    def stores_reciprocal(self) -> bool:
        return self.scale.endswith("recip")

    def scales(self, x: Tensor) -> Scales:
        amax = self.groups.amax(x)
        if self.stores_reciprocal:
            return Scales(1.0 / self._encode_scale(amax))
        scales = divide(amax, self.largest).clamp_(min=_TINY, max=largest_scale(self.element.max))
        return Scales(scales.masked_fill_(amax == 0, 1.0))

    def quotient(self, x: Tensor, scales: Scales) -> Tensor:
        if self.stores_reciprocal:
            # The encode scale is not a function of the stored one: 1 / (1 / e) need not be e.
            encode = self._encode_scale(self.groups.amax(x))
            values, encode = self.groups.align(x, encode)
            return multiply(values, encode).view(x.shape)
        values, divisors = self.groups.align(x, scales.stored)
        return divide(values, divisors).view(x.shape)

    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        aligned, factors = self.groups.align(values, scales.stored)
        aligned *= factors
        return values

    def explain(self) -> Explanation:
        bound = largest_scale(self.element.max)
        if not self.stores_reciprocal:
            rule = f"s = clamp(a / {self.largest:.9g}, 2^-149, {bound:.9g}) if a > 0 else 1"
            steps = (("scale, float32", rule), ("quotient", "q = x / s"), ("value", "v = c * s"))
            return Explanation(steps)
        steps = (
            ("encode scale", f"e = clamp({self.largest:.9g} / a, 1 / {bound:.9g}, MAX) if a > 0 else 1"),
            ("scale, float32", "s = 1 / e"),
            ("quotient", "q = x * e"),
            ("value", "v = c * s"),
        )
        return Explanation(steps)

    def _encode_scale(self, amax: Tensor) -> Tensor:
        """largest / amax, 1.0 for zeros; kept finite and with a finite reciprocal."""
        numerator = torch.full_like(amax, self.largest, dtype=torch.float32)
        encode = (numerator / amax.to(torch.float32)).clamp_(
            max=_MAX, min=1.0 / largest_scale(self.element.max)
        )
        return encode.masked_fill_(amax == 0, 1.0)
