"""Exact decoding of E2M1 and E4M3 codes inside a kernel, by integer bit arithmetic: no table, no float cast.

A small float's exponent and mantissa bits, moved to where float32 keeps its own, spell the same number except
for a power of two: the difference of the two exponent biases.  Subnormal codes become float32 subnormals or
powers of two, which are exact as well, as long as no multiplication flushes subnormals (kernels here are
compiled without ``.ftz``).
"""

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
