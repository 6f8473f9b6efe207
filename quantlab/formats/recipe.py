"""What every scaled format does: derive scales, divide by them, multiply back."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

Cast = Callable[[Tensor], Tensor]
"""Quotients (..., K) -> codes in their storage dtype."""


@dataclass(frozen=True)
class Scales:
    """What is stored beside the codes.

    stored: one entry a group; uint8 bytes (E4M3 or E8M0) or float32.  global_scale: float32, shared by blocks.
    multipliers: float32 (..., groups), what they come to, where who made them knew it; never stored.
    """

    stored: Tensor
    global_scale: Tensor | None = None
    multipliers: Tensor | None = None


@dataclass(frozen=True)
class Explanation:
    """A recipe for people, and for the test that evaluates it.

    steps: (what it is, "name = expression") in order.  Expressions are Python on float32 scalars, each operation
    rounded, except that ^ is a power: x a value, a the largest magnitude of what shares its scale, A of what shares
    its global value, low and high the extremes of the group, s the scale and g the global value that are stored, q
    what is rounded to an element, c the number that its code stands for, v the number decoded; the functions are
    those of ``FUNCTIONS``.  A step whose name begins with "(" is prose.
    cast: where it is not the element's own, how q becomes a code under nearest rounding.
    reproduces, differs, source: for a library profile, what has these bits, how it departs from the canonical
    recipe, and where it was read.
    """

    steps: tuple[tuple[str, str], ...]
    cast: str = ""
    reproduces: str = ""
    differs: tuple[str, ...] = ()
    source: str = ""


FUNCTIONS = {
    "E4M3": "the nearest number of E4M3, ties to even, at most 448",
    "E4M3_up": "the next number of E4M3 that is not smaller but for 2^-21, at most 448",
    "clamp": "clamp(z, low, high): z, but at least low and at most high",
    "exponent": "floor(log2(z)), exact; -inf for 0",
    "exponent_field": "the exponent that float32 stores; -127 for 0 and subnormals",
    "is_power": "whether the mantissa bits of a float32 are zero",
    "log2f": "log2 rounded to float32, so that just below a power of two it gives the power",
    "round_mantissa": "round_mantissa(z, n): z rounded to n mantissa bits, ties up",
    "MAX": "the largest float32, 3.4028235e+38",
}
"""What the expressions of an Explanation may call, beside abs, min, max, floor, ceil and isfinite."""


class Recipe(ABC):
    """A scaled format's arithmetic.  x is float32, or float64 of at most float32's range; it is not written."""

    @abstractmethod
    def encode(self, x: Tensor, cast: Cast) -> tuple[Tensor, Scales]:
        """Codes (..., V, K) and scales.  A library whose element cast has quirks may use its own for ``cast``."""

    @abstractmethod
    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        """float32 values of elements times their scales, (..., K); ``values`` may be overwritten."""

    @abstractmethod
    def explain(self) -> Explanation:
        """The arithmetic in formulas."""


class DividingRecipe(Recipe):
    """The canonical recipes: scales from the values, one quotient a value, and nothing else."""

    def encode(self, x: Tensor, cast: Cast) -> tuple[Tensor, Scales]:
        scales = self.scales(x)
        return cast(self.quotient(x, scales).to(x.dtype)), scales

    @abstractmethod
    def scales(self, x: Tensor) -> Scales:
        """From the values (..., V, K) to be stored."""

    @abstractmethod
    def quotient(self, x: Tensor, scales: Scales) -> Tensor:
        """What is rounded to an element, in new memory, (..., K)."""


@lru_cache
def largest_scale(*factors: float) -> float:
    """The largest float32 scale whose float32 product with ``factors``, taken in order, is finite.

    Without it a group that holds the largest float32 could decode to Inf, because its scale may round up.
    """
    scale = np.float32(np.finfo(np.float32).max / np.prod(factors))
    with np.errstate(over="ignore"):
        while not np.isfinite(np.multiply.reduce(np.array([scale, *factors], dtype=np.float32))):
            scale = np.nextafter(scale, np.float32(0))
    return float(scale)
