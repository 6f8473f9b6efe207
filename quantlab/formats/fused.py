"""Faster rounding of float32 tensors, bit-equal to decoding the reference's codes (a test compares them)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from quantlab.formats.format import Format


def round_like(fmt: Format, x: Tensor, random_bits: Tensor | None, residual: Tensor | None) -> Tensor | None:
    """fmt.round(x, ...), or None where only the reference path exists."""
    return None
