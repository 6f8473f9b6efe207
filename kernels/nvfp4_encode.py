"""The NVFP4 encoder of a flush: bit for bit the codes of ``scaled``, with fewer instructions.

A correctly rounded quotient x / m costs a division a block and three operations a value: with y = 1 / m rounded to
nearest and q = x y, the remainder r = x - q m is exact in one fused operation, and q + r y rounded once is the rounded
quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).  That needs r to stay
clear of the subnormals, so small states are lifted by a power of two first, which changes no quotient.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.scales import block_scale, float_scale

SMALL: tl.constexpr = tl.constexpr(2.0**-60)
LIFT: tl.constexpr = tl.constexpr(2.0**60)


@triton.jit
def e2m1_nearest(x):
    """Finite float32 -> E2M1 codes in int32, ties to even, saturating, sign of zero kept."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # One mantissa bit stays of a normal number (1 and up), whose float32 exponent field 127 becomes 1.
    normal = (magnitude + (0x1FFFFF - (252 << 22)) + ((magnitude >> 22) & 1)) >> 22
    # Below 1 the grid is halves, as float32's own is at 2^22.
    shifted = magnitude.to(tl.float32, bitcast=True) + 4194304.0
    code = tl.where(magnitude < 0x3F800000, shifted.to(tl.int32, bitcast=True) & 7, tl.minimum(normal, 7))
    return code | ((bits >> 28) & 8)


@triton.jit
def block_pointers(base, row, N: tl.constexpr):
    """Pointers (4, rows, N / 16, 4) to ``row``s of N values: quarter of a block, row, block, place in the quarter.

    With the quarters outermost a lane loads 16 bytes at a time and still gets all of a block, so that nothing is
    exchanged and no scale is derived twice.
    """
    inner = 16 * tl.arange(0, N // 16)[:, None] + tl.arange(0, 4)[None, :]
    return base + (
        4 * tl.arange(0, 4)[:, None, None, None] + row[None, :, None, None] * N + inner[None, None, :, :]
    )


@triton.jit
def encode_blocks(values, shared, BLOCK: tl.constexpr):
    """values of ``block_pointers``, float32, finite, under the global scale ``shared``.

    Returns codes of the same shape, int32, and scales (rows, N / 16), E4M3 codes in int32.
    """
    amax = tl.max(tl.max(tl.abs(values), 3), 0)
    scales, divisor = block_scale(amax, shared, BLOCK)
    nothing = divisor == float("inf")  # a zero scale: zeros with the values' signs
    lift = tl.where(shared < SMALL, LIFT, 1.0)
    divisor = tl.where(nothing, 1.0, divisor * lift)
    inverse = tl.where(nothing, 0.0, tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), divisor))
    divisor = tl.broadcast_to(divisor[None, :, :, None], values.shape)
    inverse = tl.broadcast_to(inverse[None, :, :, None], values.shape)
    x = values * lift
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    return e2m1_nearest(quotient), scales


@triton.jit
def pack_words(codes, R: tl.constexpr, N: tl.constexpr):
    """codes (4, R, N / 16, 4) of 4 bits -> int32 words (2, R, N / 16): half of a block, row, block."""
    halves = tl.reshape(codes, (2, 2, R, N // 16, 4))
    place = 4 * tl.arange(0, 2)[:, None] + tl.arange(0, 4)[None, :]
    words = tl.sum(halves << (4 * place)[None, :, None, None, :], 4)
    return tl.sum(words, 1)


@triton.jit
def encode_matrix(values, GLOBAL: tl.constexpr, BLOCK: tl.constexpr):
    """values (rows, blocks, 16) float32 of one matrix, finite.

    Returns codes (rows, blocks, 16) int32, scales (rows, blocks) E4M3 codes in int32, the global scale.
    """
    amax = tl.max(tl.abs(values), 2)
    shared, _ = float_scale(tl.max(amax), 1.0, GLOBAL)
    scales, divisor = block_scale(amax, shared, BLOCK)
    nothing = divisor == float("inf")  # a zero scale: zeros with the values' signs
    lift = tl.where(shared < SMALL, LIFT, 1.0)
    divisor = tl.where(nothing, 1.0, divisor * lift)
    inverse = tl.where(nothing, 0.0, tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), divisor))
    x = values * lift
    quotient = x * inverse[:, :, None]
    rest = tl.fma(-quotient, tl.broadcast_to(divisor[:, :, None], x.shape), x)
    quotient = tl.fma(rest, tl.broadcast_to(inverse[:, :, None], x.shape), quotient)
    return e2m1_nearest(quotient), scales, shared


@triton.jit
def pack_rows(codes, R: tl.constexpr, K: tl.constexpr):
    """codes (R, K / 16, 16) of 4 bits -> int32 words (R, K / 8), the first code in the lowest nibble."""
    nibbles = tl.reshape(codes, (R, K // 8, 8)) << (4 * tl.arange(0, 8))[None, None, :]
    return tl.sum(nibbles, 2)


@triton.jit
def element_stochastic(x, words, ELEMENT: tl.constexpr):
    """``rounding.encode_element`` with stochastic rounding by all 32 bits of ``words`` and finite x, shorter.

    The significand in units of the target's last bit, with 32 bits behind the point, plus a random word: the integer
    part is the rounded significand.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    field = tl.maximum(magnitude >> 23, 1)
    significand = magnitude - ((field - 1) << 23)
    MIN_FIELD: tl.constexpr = ELEMENT.min_exponent + 127
    target = tl.maximum(field, MIN_FIELD)
    shift = tl.minimum((23 - ELEMENT.mantissa_bits) + target - field, 63)
    wide = (significand.to(tl.uint64) << 32) >> shift.to(tl.uint64)
    units = ((wide + words.to(tl.uint32).to(tl.uint64)) >> 32).to(tl.int32)
    codes = ((target - MIN_FIELD) << ELEMENT.mantissa_bits) + units
    beyond = codes > ELEMENT.max_code
    if ELEMENT.overflow.value == "infinity" and ELEMENT.infinity_code is not None:
        codes = tl.where(beyond, ELEMENT.infinity_code, codes)
    elif ELEMENT.overflow.value == "nan" and ELEMENT.nan_code is not None:
        codes = tl.where(beyond, ELEMENT.nan_code, codes)
    else:
        codes = tl.where(beyond, ELEMENT.max_code, codes)
    return codes | ((bits >> (32 - ELEMENT.bits)) & ELEMENT.sign_code)
