"""Key scales inside a kernel, bit for bit those of ``quantlab.formats.key_scales``.

A column's scale needs all value rows of a head, so whoever encodes such a copy has all of one: its rows in registers
(``flush_head``), or in cache, read twice (``copies``).  No atomic maximum, and nothing that a second launch waits for.
The global scale then costs no further pass: division by a power of two is monotone, so the largest divided number is
the largest of the divided column maxima.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def scale_codes(largest):
    """Largest magnitudes of columns, float32 -> E8M0 codes in int32: 2^e <= it < 2^(e + 1), 0 for subnormals, 2^0 for a
    column of zeros.
    """
    bits = largest.to(tl.int32, bitcast=True)
    return tl.where(bits == 0, 127, tl.minimum(bits >> 23, 254))


@triton.jit
def key_factors(codes):
    """E8M0 codes of any type that holds them, none of them a NaN -> 2^e, float32."""
    # 2^-127 is a subnormal.
    return tl.maximum(codes.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_factors(codes):
    """2^-e of codes in int32: times it is division by 2^e, the same number rounded once."""
    return key_factors(254 - codes)
