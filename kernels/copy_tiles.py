"""A read copy's values inside a kernel, whatever its format: the one place that decodes for sums of float32 products.

What the copy is its memory says (``quantlab.schemes.pool``): fp8 has one float32 scale a value row; nvfp4 and mxfp4
have two E2M1 codes a byte, the low nibble the even element, nvfp4 an E4M3 scale for 16 of them under a global one of
the head, mxfp4 a power of two for 32.  nvfp4 also feeds tensor cores, see ``packed``.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.decode import e4m3, e8m0

TWO_126: tl.constexpr = tl.constexpr(2.0**126)
"""From a float32's bias of 127 to E2M1's of 1."""


@triton.jit
def copy_runs(codes, scales, global_scale, head, first, row, start, K: tl.constexpr, INNER: tl.constexpr):
    """float32 values of INNER neighbours from key dim ``start`` on; zero from K on.

    codes: pointer to bytes or to words of four.  global_scale: None but for nvfp4, whose head of all heads (S, H) is
    ``head``.  first + row: value rows of all rows (S, H, V).  row, start: integers of shapes that broadcast to
    (..., 1); the result is (..., INNER).  INNER: a power of two up to 16 (mxfp4: 32), which divides ``start``, so that
    a run is of one block.
    """
    inside, bytes = start < K, codes.to(tl.pointer_type(tl.uint8))
    if scales.dtype.element_ty == tl.float32:
        at = bytes + first * K + (row * K + start + tl.arange(0, INNER))
        values = e4m3(tl.load(at, mask=inside, other=0)) * tl.load(scales + first + row)
    else:
        BLOCK: tl.constexpr = 32 if global_scale is None else 16
        at = bytes + first * (K // 2) + (row * (K // 2) + start // 2 + tl.arange(0, INNER // 2))
        pairs = tl.load(at, mask=inside, other=0)
        at = scales + first * (K // BLOCK) + (row * (K // BLOCK) + start // BLOCK)
        scale = tl.load(at, mask=inside, other=0)
        if global_scale is None:
            factor = e8m0(scale)
        else:
            factor = e4m3(scale) * tl.load(global_scale + head)
        nibbles = tl.interleave(pairs & 0xF, pairs >> 4).to(tl.uint32)
        bits = ((nibbles & 8) << 28) | ((nibbles & 7) << 22)
        values = bits.to(tl.float32, bitcast=True) * TWO_126 * factor
    return values


@triton.jit
def copy_rows(codes, scales, global_scale, head, first, R: tl.constexpr, K: tl.constexpr):
    """float32 (R, K) of the copy's value rows from ``first`` on, K a power of two."""
    RUN: tl.constexpr = 32 if global_scale is None else 16
    start = RUN * tl.arange(0, K // RUN)[None, :, None]
    values = copy_runs(
        codes, scales, global_scale, head, first, tl.arange(0, R)[:, None, None], start, K, RUN
    )
    return tl.reshape(values, (R, K))
