"""Arithmetic that Triton's interpreter rounds otherwise than a device does."""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.formats.table import FLOAT_ELEMENTS
from quantlab.kernels import target
from quantlab.kernels.decode import widened
from quantlab.kernels.rounding import encode

BF16: tl.constexpr = tl.constexpr(FLOAT_ELEMENTS["bf16"])
FP16: tl.constexpr = tl.constexpr(FLOAT_ELEMENTS["fp16"])
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


@triton.jit
def reciprocal(x):
    """1 / x rounded to nearest, for x from 2^-126 to 2^126."""
    if not INTERPRETED:
        # What rcp.rn is within its limits, but without a branch on them.
        result = tl.inline_asm_elementwise(
            """
            {
            .reg .f32 minus, estimate, rest;
            neg.f32 minus, $1;
            rcp.approx.ftz.f32 estimate, $1;
            fma.rn.f32 rest, minus, estimate, 0f3F800000;
            fma.rn.f32 $0, estimate, rest, estimate;
            }
            """,
            "=f,f",
            [x],
            tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return result


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """float32, bfloat16 or float16 x in one of these types, to nearest, ties to even."""
    if x.dtype == dtype:
        result = x
    elif dtype == tl.float32:
        result = widened(x)
    elif not INTERPRETED:
        result = x.to(dtype)
    elif dtype == tl.bfloat16:
        codes = encode(widened(x), None, BF16.value, "nearest", 32)
        result = codes.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        codes = encode(widened(x), None, FP16.value, "nearest", 32)
        result = codes.to(tl.uint16).to(tl.float16, bitcast=True)
    return result
