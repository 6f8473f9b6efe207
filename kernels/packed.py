"""Two float16 numbers in one int32: the arithmetic that feeds tensor cores with a read copy.

An int32 word holds eight E2M1 or four E4M3 codes of one value row, the lowest bits first.  An E2M1 code times its block
scale has at most six significant bits, so the product is exact in float16, and a matrix product with float32
accumulation reads the copy without any further rounding.  Other operands enter as sums of 16-bit parts.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import INTERPRETED
from quantlab.kernels.decode import e8m0, widened

EIGHTH_BITS: tl.constexpr = tl.constexpr(-0x7F7F7F80)  # 0x80808080
LOW_BITS: tl.constexpr = tl.constexpr(0x0E0E0E0E)
TWO_112: tl.constexpr = tl.constexpr(2.0**112)
TWO_M112: tl.constexpr = tl.constexpr(2.0**-112)
HALF_LIFT: tl.constexpr = tl.constexpr(0x78007800)  # 2^15, twice
SIGN_HALVES: tl.constexpr = tl.constexpr(-0x7FFF8000)  # 0x80008000
MAGNITUDE_HALVES: tl.constexpr = tl.constexpr(0x7F007F00)
BYTE_UNIT: tl.constexpr = tl.constexpr(2.0**8)
"""``byte_operand`` holds value * 2^-8."""
HALF_UNIT: tl.constexpr = tl.constexpr(2.0**7)
"""``half_operand`` holds code * scale * 2^-7."""
LOW_QUERY: tl.constexpr = tl.constexpr(2.0**-11)
"""Unit of the low part of ``half_query``."""


@triton.jit
def half_operand(words, scales, R: tl.constexpr, K: tl.constexpr):
    """words (R, K / 8) int32 and scales (R, K / 16) uint8 -> float16 (R, K), columns as ``key_of_half_column`` says.

    A code's sign and magnitude bits, moved to where E5M2 keeps its own, spell code * 2^-14; E5M2 is the upper byte of a
    float16.  Times scale * 2^7 the product has at most six significant bits and no bit below 2^-24.
    """
    scale = scales.to(tl.int32) * 0x00800080  # E4M3 in float16, twice, times 2^-8
    scale = multiply_halves(scale, tl.full(scale.shape, HALF_LIFT, tl.int32))
    scale = tl.reshape(tl.broadcast_to(tl.expand_dims(scale, 2), (R, K // 16, 2)), (R, K // 8))
    return scaled_halves(words, scale, R, K)


@triton.jit
def power_operand(words, scales, R: tl.constexpr, K: tl.constexpr):
    """words (R, K / 8) int32 and E8M0 scales (R, K / 32) uint8 -> float16 (R, K) as ``half_operand``, and units (R,).

    A row holds code * scale / unit, its largest scale at 2: exact for scales down to 2^-24 of that, and what smaller
    ones lose is below 2^-25 of the row's largest code.  A NaN scale makes the unit NaN.
    """
    exponents = scales.to(tl.int32)
    top = tl.max(exponents, 1)
    halves = tl.maximum(exponents - top[:, None] + 30, 0) * 0x04000400  # 2^15 and less in float16, twice
    halves = tl.reshape(tl.broadcast_to(tl.expand_dims(halves, 2), (R, K // 32, 4)), (R, K // 8))
    return scaled_halves(words, halves, R, K), e8m0(top) * 0.5


@triton.jit
def byte_words(K: tl.constexpr):
    """Which words of a row of K E4M3 codes ``byte_operand`` takes, (n, 1, 4, K / 16 n): four lanes load 64 bytes."""
    CHUNKS: tl.constexpr = K // 64 if K > 64 else 1
    BY_LANE: tl.constexpr = K // (16 * CHUNKS)
    chunk, lane = tl.arange(0, CHUNKS)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    return BY_LANE * (4 * chunk + lane) + tl.arange(0, BY_LANE)[None, None, None, :]


@triton.jit
def byte_operand(words, R: tl.constexpr, K: tl.constexpr):
    """int32 words (n, R, 4, K / 16 n), as ``byte_words`` says, of four E4M3 codes -> float16 (R, K), columns as
    ``key_of_byte_column`` says: value * 2^-8.
    """
    pairs = tl.join(words << 8, words)  # the upper bytes of halves: codes 0 and 2, 1 and 3
    pairs = (pairs & SIGN_HALVES) | ((pairs & MAGNITUDE_HALVES) >> 1)
    pairs = tl.permute(pairs, (1, 0, 3, 2, 4))
    return halves_of_pairs(tl.reshape(pairs, (R, K // 2)), R, K)


@triton.jit
def key_of_byte_column(column, K: tl.constexpr):
    """Which key dim entry a column of ``byte_operand`` holds."""
    BY_LANE: tl.constexpr = 4 if K > 64 else K // 16
    turn, lane = column // 16, (column // 4) % 4
    word = BY_LANE * (4 * (turn // BY_LANE) + lane) + turn % BY_LANE
    return 4 * word + 2 * (column % 2) + (column // 2) % 2


@triton.jit
def scaled_halves(words, scale, R: tl.constexpr, K: tl.constexpr):
    """float16 (R, K) of E2M1 codes times 2^-14 times the float16 that each word's ``scale`` holds twice."""
    even = ((words << 4) & EIGHTH_BITS) | ((words << 1) & LOW_BITS)
    odd = (words & EIGHTH_BITS) | ((words >> 3) & LOW_BITS)
    first = tl.join(
        multiply_halves(byte_pair(even, False), scale),
        multiply_halves(byte_pair(odd, False), scale),
    )
    second = tl.join(
        multiply_halves(byte_pair(even, True), scale),
        multiply_halves(byte_pair(odd, True), scale),
    )
    pairs = tl.reshape(
        tl.join(first, second), (R, 4, K // 32, 2, 2)
    )  # row, lane, its word, odd, half of a word
    return halves_of_pairs(tl.permute(pairs, (0, 2, 1, 3, 4)), R, K)


@triton.jit
def halves_of_pairs(pairs, R: tl.constexpr, K: tl.constexpr):
    """int32 of K / 2 pairs of float16 a row -> (R, K)."""
    elements = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(elements, (R, K)).to(tl.float16, bitcast=True)


@triton.jit
def key_of_half_column(column, K: tl.constexpr):
    """Which key dim entry a column of ``half_operand`` holds."""
    half, odd, lane = (column // 2) % 2, (column // 4) % 2, (column // 8) % 4
    word = (K // 32) * lane + column // 32
    return 8 * word + 4 * half + 2 * (column % 2) + odd


@triton.jit
def half_query(query):
    """float32 (N,) -> float16 high and low, and a unit: (high + LOW_QUERY low) unit is the query.

    Entries below 2^-35 of the largest are lost: less than the rounding of one float32 sum over them.
    """
    exponent = tl.maximum(tl.max(query.to(tl.int32, bitcast=True) & 0x7F800000), 0x02000000)
    unit = exponent.to(tl.float32, bitcast=True)
    scaled = query * (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    high = scaled.to(tl.float16)
    low = ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16)
    return high, low, unit


@triton.jit
def half_queries(queries):
    """``half_query`` of every row of float32 (rows, N), units (rows,)."""
    exponent = tl.maximum(tl.max(queries.to(tl.int32, bitcast=True) & 0x7F800000, 1), 0x02000000)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    scaled = queries * inverse[:, None]
    high = scaled.to(tl.float16)
    low = ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16)
    return high, low, exponent.to(tl.float32, bitcast=True)


@triton.jit
def three_parts(x):
    """float32 -> three bfloat16 that sum to it: 24 bits in all.  Towards zero, by masks, so each rest is exact."""
    high = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    middle = ((x - high).to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    low = x - high - middle
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)


@triton.jit
def product(left, right, total):
    """total + left @ right on tensor cores, 16-bit operands, float32 sums; total None for nothing.

    Triton's interpreter multiplies the bit patterns of bfloat16, so it gets float32.
    """
    if INTERPRETED:
        result = tl.dot(widened(left), widened(right), input_precision="ieee")
    else:
        result = tl.dot(left, right)
    if total is not None:
        result += total
    return result


@triton.jit
def each(left, right, total):
    """``product``; of left (n, rows, columns) each with the same right (columns, m), if that has no n."""
    if len(left.shape) == 3 and len(right.shape) == 2:
        right = tl.broadcast_to(right[None, :, :], (left.shape[0], right.shape[0], right.shape[1]))
    return product(left, right, total)


@triton.jit
def exact_product(high, middle, low, right, total):
    """total + the ``three_parts`` of a float32 factor @ bfloat16 right; total None for nothing."""
    total = each(low, right, total)
    total = each(middle, right, total)
    return each(high, right, total)


@triton.jit
def wide_product(high, middle, low, right, total):
    """total + the ``three_parts`` of a float32 factor @ float32 right, but for terms of 2^-24 of what they sum."""
    right_high, right_middle, right_low = three_parts(right)
    return parts_product(high, middle, low, right_high, right_middle, right_low, total)


@triton.jit
def parts_product(high, middle, low, right_high, right_middle, right_low, total):
    """``wide_product`` of a right factor that is ``three_parts``, too."""
    total = each(low, right_high, total)
    total = each(middle, right_middle, total)
    total = each(high, right_low, total)
    total = each(middle, right_high, total)
    total = each(high, right_middle, total)
    return each(high, right_high, total)


@triton.jit
def multiply_halves(a, b):
    """Products of the two float16 of each int32; they must be exact."""
    if not INTERPRETED:
        products = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
        )
    else:
        low = half_value(a & 0xFFFF) * half_value(b & 0xFFFF)
        high = half_value((a >> 16) & 0xFFFF) * half_value((b >> 16) & 0xFFFF)
        products = half_bits(low) | (half_bits(high) << 16)
    return products


@triton.jit
def byte_pair(bytes, high: tl.constexpr):
    """Bytes 0 and 1, or 2 and 3, of each int32 as the upper bytes of two float16."""
    if not INTERPRETED:
        if high:
            pair = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x3424;", "=r,r", [bytes], tl.int32, is_pure=True, pack=1
            )
        else:
            pair = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x1404;", "=r,r", [bytes], tl.int32, is_pure=True, pack=1
            )
    else:
        if high:
            bytes = (bytes >> 16) & 0xFFFF
        pair = ((bytes & 0xFF) << 8) | ((bytes & 0xFF00) << 16)
    return pair


@triton.jit
def half_value(bits):
    """float16 bits in int32, finite, as float32: the interpreter's stand-in."""
    magnitude = ((bits & 0x7FFF) << 13).to(tl.float32, bitcast=True) * TWO_112
    return tl.where(bits >= 0x8000, -magnitude, magnitude)


@triton.jit
def half_bits(x):
    """The inverse for a float32 that float16 holds."""
    bits = tl.abs(x).to(tl.float32) * TWO_M112
    return ((bits.to(tl.int32, bitcast=True) >> 13) & 0x7FFF) | (
        (x.to(tl.int32, bitcast=True) >> 16) & 0x8000
    )
