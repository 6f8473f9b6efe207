"""Rounding of float32 to a format's codes inside a kernel: the twin of ``quantlab.formats.rounding``.

Integer bit arithmetic only, exact for every input, subnormals of either side included: Triton's interpreter
rounds its own float casts wrongly, and a conversion instruction fixes what overflow and NaN become.

A float32 magnitude is ``significand * 2^e`` with a significand below 2^24.  Rounding drops ``shift`` of its low
bits, the discarded field, which for a subnormal result is as wide as the two exponents are apart.

Arguments everywhere: ``ELEMENT`` is a row of the formats' table (``Element`` with at most 8 exponent and at
most 10 mantissa bits, or ``Integer`` up to 16 bits), ``ROUNDING`` the value of a ``Rounding``, ``words`` int32
or uint32 random words for stochastic rounding (else None), of which the low ``BITS`` bits are used.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.decode import element_value


@triton.jit
def encode(x, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr):
    """float32 x -> int32 codes: bit patterns of an ``Element`` (upper bits zero), numbers of an ``Integer``."""
    if hasattr(ELEMENT, "exponent_bits"):
        codes = encode_element(x, words, ELEMENT, ROUNDING, BITS)
    else:
        codes = encode_integer(x, words, ELEMENT, ROUNDING, BITS)
    return codes


@triton.jit
def round_value(x, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr):
    """float32 x -> the float32 value of its code."""
    return element_value(encode(x, words, ELEMENT, ROUNDING, BITS), ELEMENT)


@triton.jit
def encode_element(x, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr):
    """The sign of zero is kept.  NaN becomes the positive quiet NaN, or the largest number if there is none.

    Toward zero, nothing finite overflows.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Subnormals have the exponent of field 1, without the leading one.
    field = tl.maximum(magnitude >> 23, 1)
    significand = magnitude - ((field - 1) << 23)
    MIN_FIELD: tl.constexpr = ELEMENT.min_exponent + 127
    target = tl.maximum(field, MIN_FIELD)
    shift = (23 - ELEMENT.mantissa_bits) + target - field
    if ROUNDING == "nearest":
        units = nearest(significand, shift)
    elif ROUNDING == "toward zero":
        units = significand >> tl.minimum(shift, 31)
    else:
        units, rest = split(significand, shift)
        units += carry(rest, shift, words, BITS).to(tl.int32)
    # A normal has units in [2^m, 2^(m+1)), a subnormal below; a carry runs into the exponent field by itself.
    codes = ((target - MIN_FIELD) << ELEMENT.mantissa_bits) + units
    beyond = codes > ELEMENT.max_code
    if ROUNDING == "toward zero":
        codes = tl.where(beyond, ELEMENT.max_code, codes)
        beyond = magnitude == 0x7F800000
    if ELEMENT.overflow.value == "infinity" and ELEMENT.infinity_code is not None:
        codes = tl.where(beyond, ELEMENT.infinity_code, codes)
    elif ELEMENT.overflow.value == "nan" and ELEMENT.nan_code is not None:
        codes = tl.where(beyond, ELEMENT.nan_code, codes)
    else:
        codes = tl.where(beyond, ELEMENT.max_code, codes)
    nan = magnitude > 0x7F800000
    sign = (bits >> (32 - ELEMENT.bits)) & ELEMENT.sign_code
    if ELEMENT.nan_code is None:
        codes = tl.where(nan, ELEMENT.max_code, codes | sign)
    else:
        codes = tl.where(nan, ELEMENT.nan_code, codes | sign)
    return codes


@triton.jit
def encode_integer(x, words, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr):
    """Clamped to +-max; NaN becomes 0.  Stochastic rounding is floor(x + u), of the signed x."""
    bits = x.to(tl.int32, bitcast=True)
    # 2^(bits - 1) is beyond every rounding boundary, so capping there changes no result.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, (126 + ELEMENT.bits) << 23)
    field = tl.maximum(magnitude >> 23, 1)
    significand = magnitude - ((field - 1) << 23)
    shift = 150 - field
    if ROUNDING == "nearest":
        units = nearest(significand, shift)
    elif ROUNDING == "toward zero":
        units = significand >> tl.minimum(shift, 31)
    else:
        units, rest = split(significand, shift)
        away = tl.where(bits < 0, borrow(rest, shift, words, BITS), carry(rest, shift, words, BITS))
        units += away.to(tl.int32)
    LARGEST: tl.constexpr = (1 << (ELEMENT.bits - 1)) - 1
    units = tl.minimum(units, LARGEST)
    numbers = tl.where(bits < 0, -units, units)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0, numbers)


@triton.jit
def nearest(significand, shift):
    """significand / 2^shift to the nearest integer, ties to even; significand < 2^24, shift >= 1."""
    shift = tl.minimum(shift, 25)  # from there on everything is below one half
    odd = (significand >> shift) & 1
    return (significand + ((1 << (shift - 1)) - 1) + odd) >> shift


@triton.jit
def split(significand, shift):
    """significand / 2^shift: the integer part (int32) and the discarded field (uint32)."""
    shift = tl.minimum(shift, 30)
    units = significand >> shift
    return units, (significand - (units << shift)).to(tl.uint32)


@triton.jit
def fraction(rest, shift, BITS: tl.constexpr):
    """floor(rest / 2^shift * 2^BITS) as uint32, rest < 2^shift, and whether that was exact.

    Exact although the discarded field may be wider than 32 bits: rest itself has no more than 24.
    """
    left = tl.maximum(BITS - shift, 0).to(tl.uint32)
    right = tl.minimum(tl.maximum(shift - BITS, 0), 31).to(tl.uint32)
    shifted = rest << left
    whole = shifted >> right
    return whole, (whole << right) == shifted


@triton.jit
def low_bits(words, BITS: tl.constexpr):
    """The low BITS bits of random words, uint32."""
    words = words.to(tl.uint32)
    if BITS < 32:
        words &= (1 << BITS) - 1
    return words


@triton.jit
def carry(rest, shift, words, BITS: tl.constexpr):
    """Whether stochastic rounding goes away from zero: floor(delta * 2^BITS) + r >= 2^BITS."""
    whole, _ = fraction(rest, shift, BITS)
    return low_bits(words, BITS) > ((1 << BITS) - 1) - whole


@triton.jit
def borrow(rest, shift, words, BITS: tl.constexpr):
    """The same for floor(x + u) of a negative x = -(units + delta): r < ceil(delta * 2^BITS)."""
    whole, exact = fraction(rest, shift, BITS)
    low = low_bits(words, BITS)
    return (low < whole) | ((low == whole) & ~exact)
