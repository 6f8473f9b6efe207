"""Arithmetic that Triton's interpreter rounds otherwise than a device does."""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels import target

INTERPRETED: tl.constexpr = tl.constexpr(target.interpreting())


@triton.jit
def multiply_add(a, b, c):
    """float32 a * b + c, rounded once.

    The interpreter's ``tl.fma`` rounds the product too.  There the product is formed in float64, which holds it, and
    the sum is rounded to odd, which the rounding to float32 that follows cannot tell from the exact sum (Boldo and
    Melquiond, IEEE Transactions on Computers 57, 2008).
    """
    if INTERPRETED:
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.to(tl.int64, bitcast=True)
        inexact = (tl.abs(error) > 0) & ((bits & 1) == 0)
        odd = tl.where(inexact, bits + tl.where((error > 0) == (total > 0), 1, -1), bits)
        result = odd.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        result = tl.fma(a, b, c)
    return result
