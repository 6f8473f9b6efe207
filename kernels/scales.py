"""Shared scales inside a kernel: the twins of the recipes in ``quantlab.formats``, float32 throughout.

A ``Recipe`` brings four jit functions to a kernel, and ``options`` for them:

    derive(amax, shared, OPTIONS)        what is stored a group, and the operand that its values meet
    quotient(x, operand)                 what is rounded to an element
    multiplier(stored, shared, OPTIONS)  the stored scale as a float32 factor
    product(value, multiplier)           the way back

``amax`` is a group's largest magnitude (a NaN does not count), ``shared`` the global scale, 1.0 where there is none.
Division is ``div_rn``: Triton's ``/`` of float32 is approximate on a GPU, and stored bits must not depend on that.
"""

# A constexpr stands for the value that it wraps; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.formats.float_scales import FloatScaled
from quantlab.formats.groups import Groups
from quantlab.formats.mx import Mx, raising_mantissa
from quantlab.formats.nvfp4 import CODE_MAX, FLOORS, SCALE_ELEMENT, Nvfp4
from quantlab.formats.recipe import largest_scale
from quantlab.formats.table import FLOAT_ELEMENTS, Element
from quantlab.kernels.decode import e8m0, element_value
from quantlab.kernels.rounding import encode

LARGEST: tl.constexpr = tl.constexpr(FLOAT_ELEMENTS["fp32"].max)


class Recipe(NamedTuple):
    """See the module's docstring; ``options`` is hashable."""

    derive: Any
    quotient: Any
    multiplier: Any
    product: Any
    options: Any


@dataclass(frozen=True)
class FloatOptions:
    """A scale amax / number, at most ``limit``; or the reciprocal of number / amax, at least ``1 / limit``."""

    number: float
    limit: float
    least: float


@dataclass(frozen=True)
class PowerOptions:
    """E8M0 scales: exponent(amax) - max_exponent, one more from the float32 mantissa ``bump`` of amax on."""

    max_exponent: int
    bump: int


@dataclass(frozen=True)
class BlockOptions:
    """Scales of ``element`` under a global one."""

    element: Element
    code_max: float
    upward: bool
    floor_code: int


def recipe_of(fmt: Format) -> Recipe:
    """The kernels' recipe of a scaled format.

    Raises:
        InputError: no kernel serves the recipe.
    """
    recipe = fmt.recipe
    if type(recipe) is FloatScaled:
        derive = reciprocal_scale if recipe.stores_reciprocal else float_scale
        quotient = multiply if recipe.stores_reciprocal else divide
        return Recipe(
            derive, quotient, as_stored, multiply, float_options(recipe.largest, recipe.element.max)
        )
    if type(recipe) is Nvfp4:
        floor_code = int(FLOORS[recipe.floor] / SCALE_ELEMENT.smallest)
        options = BlockOptions(SCALE_ELEMENT, CODE_MAX, recipe.scale == "ceil", floor_code)
        return Recipe(block_scale, divide, block_multiplier, multiply, options)
    if type(recipe) is Mx:
        bump = -(-raising_mantissa(recipe.element, recipe.mode) // 2**29)  # of float64's 52 mantissa bits
        options = PowerOptions(recipe.element.max_exponent, bump)
        return Recipe(power_scale, multiply, power_multiplier, saturating_product, options)
    raise InputError("fmt", fmt.text, "a format that a kernel serves: this recipe has none")


def groups_of(fmt: Format) -> Groups:
    """Which values of a scaled format share a stored scale."""
    return getattr(fmt.recipe, "groups", None) or Groups(columns=fmt.row.block)


def global_options() -> FloatOptions:
    """Of nvfp4's global scale, which ``float_scale`` derives."""
    return float_options(SCALE_ELEMENT.max * CODE_MAX, SCALE_ELEMENT.max, CODE_MAX)


def float_options(number: float, *factors: float) -> FloatOptions:
    """factors: what a scale is multiplied by on decoding; that must stay finite."""
    limit = largest_scale(*factors)
    return FloatOptions(number, limit, float(np.float32(1.0 / limit)))


@triton.jit
def divide(x, operand):
    return tl.math.div_rn(x, operand)


@triton.jit
def multiply(x, operand):
    return x * operand


@triton.jit
def as_stored(stored, shared, OPTIONS: tl.constexpr):
    return stored


@triton.jit
def float_scale(amax, shared, OPTIONS: tl.constexpr):
    """amax / number; 1.0 for zeros; the smallest float32 where that underflows to zero."""
    quotient = tl.math.div_rn(amax, OPTIONS.number)
    # Integers, because Triton makes a float64 of a constant below the normal float32.
    bits = tl.maximum(quotient.to(tl.int32, bitcast=True), 1)
    scale = tl.minimum(bits.to(tl.float32, bitcast=True), OPTIONS.limit)
    scale = tl.where(amax == 0, 1.0, scale)
    return scale, scale


@triton.jit
def reciprocal_scale(amax, shared, OPTIONS: tl.constexpr):
    """Values are multiplied by number / amax, what is stored is the reciprocal of that; 1.0 for zeros."""
    number = tl.full(amax.shape, OPTIONS.number, tl.float32)
    encode_scale = tl.math.div_rn(number, tl.where(amax == 0, number, amax))
    encode_scale = tl.maximum(tl.minimum(encode_scale, LARGEST), OPTIONS.least)
    return tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode_scale), encode_scale


@triton.jit
def block_scale(amax, shared, OPTIONS: tl.constexpr):
    """E4M3 code of amax / (code_max * shared), with a floor; zero for zeros."""
    ELEMENT: tl.constexpr = OPTIONS.element
    quotient = tl.math.div_rn(amax, OPTIONS.code_max * shared)
    codes = encode(quotient, None, ELEMENT, "nearest", 32)
    if OPTIONS.upward:
        below = element_value(codes, ELEMENT) < quotient
        codes = tl.where(below & (codes < ELEMENT.max_code), codes + 1, codes)
    codes = tl.where(amax == 0, 0, tl.maximum(codes, OPTIONS.floor_code))
    multiplier = block_multiplier(codes, shared, OPTIONS)
    # What a zero scale serves decodes to zero whatever its code; x / Inf gives a zero of the same sign.
    return codes, tl.where(multiplier == 0, float("inf"), multiplier)


@triton.jit
def block_multiplier(stored, shared, OPTIONS: tl.constexpr):
    ELEMENT: tl.constexpr = OPTIONS.element
    return element_value(stored, ELEMENT) * shared


@triton.jit
def power_scale(amax, shared, OPTIONS: tl.constexpr):
    """E8M0 code; its operand is the inverse, a power of two that float32 holds as well."""
    bits = amax.to(tl.int32, bitcast=True)
    # A subnormal amax has the smallest scale whatever its exponent: every element's largest number is above 2.
    codes = (bits >> 23) - OPTIONS.max_exponent + ((bits & 0x7FFFFF) >= OPTIONS.bump).to(tl.int32)
    codes = tl.minimum(tl.maximum(codes, 0), 0xFE)
    return codes, e8m0(0xFE - codes)


@triton.jit
def power_multiplier(stored, shared, OPTIONS: tl.constexpr):
    return e8m0(stored)


@triton.jit
def saturating_product(value, multiplier):
    """A finite element never decodes to Inf: codes of a block with the largest float32 may stand for 2^128."""
    product = value * multiplier
    limited = tl.minimum(tl.maximum(product, -LARGEST), LARGEST)
    finite = (value.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(finite & (multiplier == multiplier), limited, product)
