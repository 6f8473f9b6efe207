"""The NVFP4 encoder of a flush: bit for bit the codes of ``scaled``, with fewer instructions.

A correctly rounded quotient x / m costs a division a block and three operations a value: with y = 1 / m rounded to
nearest and q = x y, the remainder r = x - q m is exact in one fused operation, and q + r y rounded once is the rounded
quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).  That needs r to stay
clear of the subnormals, so small states are lifted by a power of two first, which changes no quotient.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import INTERPRETED, reciprocal

SMALL: tl.constexpr = tl.constexpr(2.0**-60)
LIFT: tl.constexpr = tl.constexpr(2.0**60)
SIGN: tl.constexpr = tl.constexpr(-(2**31))
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-9)


@triton.jit
def e2m1_total(x):
    """A float32's bits, ``total``, with round(x) to E2M1, ties to even, saturating, in the low three of
    total + (total >> 22), whatever the sign of x.

    A float32 in [2^23, 2^24) has whole numbers as its grid.  With E = 2^e, e = 0 below 2 and 1 or 2 above, the grid of
    E2M1 at |x| is E / 2, which is that of float32 at 2^22 E: the sum 2^22 E + 3 E + |x|, rounded once, has
    n = round(2 |x| / E) + 6 in its low bits and 2 (e + 149) from bit 22 on.  The code is round(2 |x| / E) + 2 e, and
    n + 2 (e + 149) is that number plus 304, a multiple of 8.
    """
    magnitude = tl.minimum(tl.abs(x), 6.0)
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True), 0x3F800000) & 0x7F800000
    return tl.fma(power.to(tl.float32, bitcast=True), 4194307.0, magnitude).to(tl.int32, bitcast=True)


@triton.jit
def e2m1_nearest(x, signed):
    """Float32 -> E2M1 codes in int32 with the signs of ``signed``, ties to even, saturating."""
    total = e2m1_total(x)
    code = total + (total >> 22)
    return (code & 7) | ((signed.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_tops(x, signed):
    """The codes of ``e2m1_nearest`` in the top four bits of uint32, whose other bits mean nothing."""
    top = e2m1_total(x) * ((1 << 28) + (1 << 6))
    signs = signed.to(tl.int32, bitcast=True) & SIGN
    return ((top & 0x7FFFFFFF) | signs).to(tl.uint32, bitcast=True)


@triton.jit
def packed_tops(tops):
    """``e2m1_tops`` (lines, words, 4 or 8) -> uint32 (lines, words), the first code lowest: one funnel shift a code."""
    LINES: tl.constexpr = tops.shape[0]
    WORDS: tl.constexpr = tops.shape[1]
    if tops.shape[2] == 4:
        even, odd = tl.split(tl.reshape(tops, (LINES, WORDS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        word = (appended(appended(fourth >> 28, third), second) << 4) | (first >> 28)
    else:
        low, high = tl.split(tl.permute(tl.reshape(tops, (LINES, WORDS, 2, 4)), (0, 1, 3, 2)))
        word = packed_tops(high)
        even, odd = tl.split(tl.reshape(low, (LINES, WORDS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        word = appended(appended(appended(appended(word, fourth), third), second), first)
    return word


@triton.jit
def appended(word, top):
    return (word << 4) | (top >> 28)


@triton.jit
def e4m3_nearest(x):
    """Float32 from 0 on -> E4M3 codes in int32 and their values, ties to even, saturating.

    As ``e2m1_nearest``: steps of 2^-3 of the power of two, but not below those of 2^-6.
    """
    magnitude = tl.minimum(x, 448.0)
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True), 0x3C800000) & 0x7F800000
    offset = power.to(tl.float32, bitcast=True) * 1048579.0
    total = offset + magnitude
    bits = total.to(tl.int32, bitcast=True)
    return (bits + (bits >> 20)) & 0x7F, total - offset


@triton.jit
def block_pointers(base, row, N: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers (16 / WIDTH, rows, N / 16, WIDTH) to ``row``s of N values: part of a block, row, block, place in it.

    With the parts outermost a lane loads WIDTH values at a time and still gets all of a block, so that nothing is
    exchanged and no scale is derived twice.
    """
    inner = 16 * tl.arange(0, N // 16)[:, None] + tl.arange(0, WIDTH)[None, :]
    part = WIDTH * tl.arange(0, 16 // WIDTH)
    return base + (part[:, None, None, None] + row[None, :, None, None] * N + inner[None, None, :, :])


@triton.jit
def quotient(x, divisor, inverse):
    """x / divisor rounded to nearest; inverse = 1 / divisor rounded to nearest, or 0 for a quotient of 0.

    Triton's interpreter does not fuse, so it divides.
    """
    if not INTERPRETED:
        first = x * inverse
        result = tl.fma(tl.fma(-first, divisor, x), inverse, first)
    else:
        result = tl.where(inverse == 0, 0.0, tl.math.div_rn(x, divisor))
    return result


@triton.jit
def block_maxima(values):
    """Largest magnitudes (rows, N / 16) of values of ``block_pointers``, float32."""
    return tl.max(tl.max(tl.abs(values), 3), 0)


@triton.jit
def encode_blocks(values, amax, shared, BLOCK: tl.constexpr):
    """values of ``block_pointers``, float32, finite, and their ``block_maxima`` under the global scale ``shared``, a
    scalar.

    Returns ``e2m1_tops`` of the same shape, and scales (rows, N / 16), E4M3 codes in int32.
    """
    lift = 1.0
    if shared < SMALL:  # remainders of such numbers would be subnormal; powers of two change no quotient
        lift = LIFT
        values = values * LIFT
    scales, divisor, inverse = block_scales(amax * lift, shared, lift, BLOCK)
    divisor = tl.broadcast_to(divisor[None, :, :, None], values.shape)
    inverse = tl.broadcast_to(inverse[None, :, :, None], values.shape)
    return e2m1_tops(quotient(values, divisor, inverse), values), scales


@triton.jit
def block_scales(amax, shared, lift, BLOCK: tl.constexpr):
    """Of blocks whose largest magnitude times ``lift``, a power of two, is ``amax``: scales, E4M3 codes in int32, and
    what ``quotient`` divides lifted values by.
    """
    unit = tl.full(amax.shape, 1.0, tl.float32) * (BLOCK.code_max * shared * lift)
    scales, factor = e4m3_nearest(quotient(amax, unit, reciprocal(unit)))
    if BLOCK.floor_code > 0:
        something = amax > 0
        scales = tl.where(something, tl.maximum(scales, BLOCK.floor_code), 0)
        factor = tl.where(something, tl.maximum(factor, BLOCK.floor_code * SMALLEST_SCALE), 0.0)
    divisor = factor * shared
    inverse = tl.where(divisor == 0, 0.0, reciprocal(divisor * lift))
    return scales, divisor * lift, inverse


@triton.jit
def pack_words(tops, R: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """tops of ``block_pointers`` -> int32 words (2, R, N / 16): half of a block, row, block."""
    BLOCKS: tl.constexpr = R * N // 16
    if WIDTH <= 8:
        parts = tl.reshape(tops, (2, 8 // WIDTH, BLOCKS, WIDTH))
        halves = tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (2, BLOCKS, 8))
    else:
        halves = tl.permute(tl.reshape(tops, (BLOCKS, 2, 8)), (1, 0, 2))
    return tl.reshape(packed_tops(halves).to(tl.int32, bitcast=True), (2, R, N // 16))
