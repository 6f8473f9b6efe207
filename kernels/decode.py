"""Exact decoding of stored codes inside a kernel, by integer bit arithmetic: no table, no float cast.

A small float's exponent and mantissa bits, moved to where float32 keeps its own, spell the same number except
for a power of two: the difference of the two exponent biases.  Subnormal codes become float32 subnormals or
powers of two, which are exact as well, as long as no multiplication flushes subnormals (kernels here are
compiled without ``.ftz``).
"""

# A constexpr stands for the value that it wraps; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

E4M3_UNIT: tl.constexpr = tl.constexpr(2.0**120)
"""From a float32's bias of 127 to E4M3's of 7."""


@triton.jit
def e2m1(words, position: tl.constexpr):
    """E2M1 code ``position`` (0 to 7, low bits first) of each uint32 word, as float32 times ``2**-126``.

    That is bias 1 against 127.  The factor stays, because undoing it costs one multiplication per element
    here and one per sum outside.  Whoever sums products scales the other operand up first, by ``2**63``, and
    the sum by ``2**63`` again: both stay in range, while products of subnormals would lose bits.
    """
    sign = (words << (28 - 4 * position)) & 0x80000000
    if position <= 5:
        magnitude = (words << (22 - 4 * position)) & 0x01C00000
    else:
        magnitude = (words >> (4 * position - 22)) & 0x01C00000
    return (sign | magnitude).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(codes):
    """E4M3 (the finite-only kind, 0x7F and 0xFF are NaN) in uint8 to its float32 value."""
    bits = codes.to(tl.uint32)
    magnitude = bits & 0x7F
    value = (((bits & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True) * E4M3_UNIT
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def e8m0(codes):
    """E8M0 scale (uint8) to its float32 power of two, ``2**(code - 127)``; 0xFF is NaN."""
    exponent = codes.to(tl.uint32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is a float32 subnormal
    return tl.where(exponent == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """float32, float16 or bfloat16 to float32.  Triton's interpreter would flush bfloat16's subnormals."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = x.to(tl.float32)
    return values


@triton.jit
def element_value(codes, ELEMENT: tl.constexpr):
    """Codes of an ``Element`` or ``Integer`` of the formats' table, of any integer type, to float32 values.

    Elements with at most 8 exponent and fewer than 23 mantissa bits.  Bits above the element's are ignored.
    """
    if hasattr(ELEMENT, "exponent_bits"):
        bits = codes.to(tl.uint32)
        magnitude = bits & (ELEMENT.sign_code - 1)
        sign = (bits & ELEMENT.sign_code) << (32 - ELEMENT.bits)
        value = (sign | (magnitude << (23 - ELEMENT.mantissa_bits))).to(tl.float32, bitcast=True)
        if ELEMENT.bias != 127:
            value *= 2.0 ** (127 - ELEMENT.bias)
        if ELEMENT.nan_code is not None:
            nan = (sign | 0x7FC00000).to(tl.float32, bitcast=True)
            value = tl.where(magnitude > ELEMENT.max_code, nan, value)
        if ELEMENT.infinity_code is not None:
            infinity = (sign | 0x7F800000).to(tl.float32, bitcast=True)
            value = tl.where(magnitude == ELEMENT.infinity_code, infinity, value)
    else:
        value = codes.to(tl.float32)
    return value
