"""NVFP4: 16 E2M1 codes under an E4M3 scale, the scales under one FP32 global scale.

Canonical recipe, all arithmetic float32 with true division: global = A / 2688 with A the largest magnitude of
what shares it, 1.0 for A = 0; block scale s = E4M3(a / (6 * global)), at most 448, at least 2^-9 unless the
block's largest magnitude a is 0; code = E2M1(x / (s * global)); value = code * (s * global).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.formats import fused
from quantlab.formats.groups import Groups
from quantlab.formats.recipe import DividingRecipe, Explanation, Scales, largest_scale
from quantlab.formats.rounding import divide
from quantlab.formats.table import FLOAT_ELEMENTS

BLOCK = 16
SCALE_ELEMENT = FLOAT_ELEMENTS["e4m3"]
CODE_MAX = FLOAT_ELEMENTS["e2m1"].max
BLOCKS = Groups(columns=BLOCK)
FLOORS = {"0": 0.0, "2^-9": 2.0**-9, "2^-6": 2.0**-6}
"""Text of ``+floor.<...>`` to the smallest block scale of a block that is not zero; the first is none."""
DEFAULT_FLOOR = "2^-9"
_TINY = FLOAT_ELEMENTS["fp32"].smallest
# What the float32 roundings of a stored block and of its re-derived global scale can add to a / (6 * global), in
# units of a scale: four of 2^-24 and a step of the global scale, 2^-23, together below 2^-21.
ROUNDINGS = 2.0**-21


@dataclass(frozen=True)
class Nvfp4(DividingRecipe):
    """The canonical recipe and its options.

    granularity: what shares the global scale: "matrix" (V, K), "row", "tensor", "none".
    scale: "rne", or "ceil" that rounds block scales up, so that no block's largest value saturates.  What exceeds
    an E4M3 number by float32 roundings alone, below 2^-21, is not taken up: an unchanged block that is stored again
    would else take the next scale, 1/8 coarser, whenever its global scale moves by an ulp.

    Error of a value x under the product m of both scales, with h(q) half the distance of the codes around q = x / m
    (1/4, 1/2, 1 up to 2, 4, 6): |value - x| <= h * m + 2^-22 |x|, the last for the float32 roundings of quotient and
    product.  Ties attain h * m: 5 beside 6 under the scale 1.  Toward zero and stochastic: below 2 h * m.
    Saturation: a scale rounded to nearest is at most 1/17 too small, so that q stays below 6.4 and the bound holds
    with h = 1.  Where it is subnormal, for a < 6 * 2^-6 * global, q may come close to 9 and lose 3 m; "ceil" excludes
    both.  With "none" everything beyond 2688 is lost.  The floor "0" drops blocks with a <= 6 * 2^-10 * global.
    """

    granularity: str = "matrix"
    scale: str = "rne"
    floor: str = DEFAULT_FLOOR

    def scales(self, x: Tensor) -> Scales:
        amax = BLOCKS.amax(x)
        global_scale = self.global_scale(amax)
        per_block = spread(global_scale, amax)
        values = self.block_scales(amax, per_block)
        return Scales(_bytes(values), global_scale, values.mul_(per_block))

    def quotient(self, x: Tensor, scales: Scales) -> Tensor:
        # What a zero scale serves decodes to zero whatever its code; x / Inf gives a zero of the same sign.
        divisors = self.multipliers(scales)
        values, divisors = BLOCKS.align(x, divisors.masked_fill(divisors == 0, torch.inf))
        return divide(values, divisors).view(x.shape)

    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        aligned, factors = BLOCKS.align(values, self.multipliers(scales))
        aligned *= factors
        return values

    def multipliers(self, scales: Scales) -> Tensor:
        """float32 (..., groups): block scale times global scale."""
        if scales.multipliers is not None:
            return scales.multipliers
        blocks = fused.decode(scales.stored, SCALE_ELEMENT)
        return blocks.mul_(spread(scales.global_scale, blocks))

    def explain(self) -> Explanation:
        bound = largest_scale(SCALE_ELEMENT.max, CODE_MAX)
        shared = ("global scale, float32", f"g = clamp(A / 2688, 2^-149, {bound:.9g}) if A > 0 else 1")
        if self.granularity == "none":
            shared = ("no global scale", "g = 1")
        block = f"{'E4M3_up' if self.scale == 'ceil' else 'E4M3'}(a / (6 * g))"
        block = block if self.floor == "0" else f"max({block}, {self.floor})"
        steps = (
            shared,
            ("block scale, E4M3", f"s = {block} if a > 0 else 0"),
            ("quotient", "q = x / (s * g) if s * g > 0 else 0"),
            ("value", "v = c * (s * g)"),
        )
        return Explanation(steps)

    def global_scale(self, amax: Tensor) -> Tensor | None:
        """float32 from the blocks' largest magnitudes (..., V, blocks); None with granularity "none"."""
        shared = shared_amax(amax, self.granularity)
        if shared is None:
            return None
        scale = divide(shared, SCALE_ELEMENT.max * CODE_MAX)
        scale = scale.clamp_(min=_TINY, max=largest_scale(SCALE_ELEMENT.max, CODE_MAX))
        return scale.masked_fill_(shared == 0, 1.0)

    def block_scales(self, amax: Tensor, global_scale: Tensor | float) -> Tensor:
        """float32 numbers of E4M3 (..., groups)."""
        quotient = divide(amax, CODE_MAX * global_scale)
        values = fused.round_values(quotient, SCALE_ELEMENT)
        if self.scale == "ceil":
            values = torch.where(values < quotient * (1 - ROUNDINGS), _next_scale(values), values)
        return values.clamp_(min=FLOORS[self.floor]).masked_fill_(amax == 0, 0.0)


def shared_amax(amax: Tensor, granularity: str) -> Tensor | None:
    """The largest of the blocks' (..., V, blocks) magnitudes that share a global scale; 0 if there are none."""
    if granularity == "none":
        return None
    if granularity == "tensor":
        return amax.amax() if amax.numel() else amax.new_zeros(())
    shared = (-1,) if granularity == "row" or amax.dim() == 1 else (-2, -1)
    return amax.amax(shared) if amax.numel() else amax.new_zeros(amax.shape[: shared[0]])


def spread(global_scale: Tensor | None, blocks: Tensor) -> Tensor | float:
    """The global scale shaped to multiply block scales (..., V, blocks); 1.0 for none."""
    if global_scale is None:
        return 1.0
    return global_scale.reshape(*global_scale.shape, *(1,) * (blocks.dim() - global_scale.dim()))


def _bytes(values: Tensor) -> Tensor:
    """E4M3 codes of numbers that it holds and that are not negative: the top of their bits, exponent biased anew.

    E4M3's subnormals become float32's, whose bits count the same quanta.
    """
    shifted = values * 2.0 ** (SCALE_ELEMENT.bias - 127)
    return (shifted.view(torch.int32) >> (23 - SCALE_ELEMENT.mantissa_bits)).to(torch.uint8)


def _next_scale(values: Tensor) -> Tensor:
    """The E4M3 number above, at most 448; float32 in and out."""
    codes = fused.encode(values, SCALE_ELEMENT).clamp_(max=SCALE_ELEMENT.max_code - 1) + 1
    return fused.decode(codes, SCALE_ELEMENT)
