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


class Recipe(ABC):
    """A scaled format's arithmetic.  x is float32, or float64 of at most float32's range; it is not written."""

    @abstractmethod
    def encode(self, x: Tensor, cast: Cast) -> tuple[Tensor, Scales]:
        """Codes (..., V, K) and scales.  A library whose element cast has quirks may use its own for ``cast``."""

    @abstractmethod
    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        """float32 values of elements times their scales, (..., K); ``values`` may be overwritten."""


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
