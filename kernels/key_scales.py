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

from quantlab.kernels.decode import e8m0


@triton.jit
def magnitude_bits(x):
    """float32 -> bit patterns of |x| in int32, which order like the magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_codes(bits):
    """``magnitude_bits`` of the largest number of each column -> E8M0 codes in int32: 2^e <= it < 2^(e + 1), 0 for
    subnormals, 2^0 for a column of zeros.
    """
    return tl.where(bits == 0, 127, tl.minimum(bits >> 23, 254))


@triton.jit
def inverse_scales(codes):
    """What a column is multiplied by in place of a division: the same number, rounded once."""
    return e8m0(254 - codes)
