"""The stored checkpoint inside a kernel: a tile of codes to float32 and back, bit for bit as the formats define it.

A ``Store`` says what a checkpoint's format makes of a tile; kernels take it as one constexpr.  Formats: fp32, bf16,
fp16, and fp8_e4m3 and int8 under one float32 scale a value row; rounded to nearest, or stochastically by all 32 bits of
a random word.

A tile is (rows, columns), or one of ``delta_tiles``, (LANES, S, P, N, INNER) with scales (S, P).

What torch refuses to store as diverged, a kernel cannot refuse: a NaN or Inf stays one in fp32, bf16 and fp16, and
under row scales it makes its row's scale NaN, so that whatever reads the row shows it.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false, reportRedeclaration=false

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.formats.rounding import EXACT_BITS
from quantlab.formats.table import Element, Integer
from quantlab.kernels.arithmetic import INTERPRETED, multiply_add, narrowed, reciprocal
from quantlab.kernels.decode import element_value, widened
from quantlab.kernels.random import element_words
from quantlab.kernels.rounding import encode
from quantlab.kernels.scales import FloatOptions, float_scale, recipe_of
from quantlab.kernels.stochastic import sign_codes, stochastic_codes

NAMES = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8")

SMALL: tl.constexpr = tl.constexpr(2.0**-60)
LIFT: tl.constexpr = tl.constexpr(2.0**90)
SIGN: tl.constexpr = tl.constexpr(-(2**31))
HALVES: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22, it leaves the nearest integer in the low bits."""


@dataclass(frozen=True)
class Store:
    """What a checkpoint's format makes of a tile.

    element: what a number is rounded to, None for fp32.  scale: options of ``float_scale`` for one scale a value row,
    None without.  stochastic: by 32 random bits a number.
    """

    element: Element | Integer | None
    scale: FloatOptions | None
    stochastic: bool


@functools.cache
def store_of(fmt: Format) -> Store:
    """The ``Store`` of a checkpoint's format.

    Raises:
        InputError: no kernel stores checkpoints in the format.
    """
    if reason := unserved(fmt):
        raise InputError("fmt", fmt.text, reason)
    scale = None if fmt.recipe is None else recipe_of(fmt).options
    element = fmt.element if fmt.rounded else None
    return Store(element, scale, fmt.stochastic)


def unserved(fmt: Format) -> str | None:
    """What the format would need to be for kernels to store checkpoints in it, or None."""
    if fmt.name not in NAMES or (fmt.recipe is not None and fmt.granularity != "row"):
        return "a checkpoint of fp32, bf16, fp16, or fp8 or int8 with one scale a value row"
    if fmt.text.partition("+")[2] not in ("", "sr") or (fmt.random_bits or EXACT_BITS) != EXACT_BITS:
        return "a checkpoint without modifiers other than +sr"
    return None


@triton.jit
def decoded_tile(codes, row_scales, STORE: tl.constexpr):
    """codes of a tile as stored, a float32 scale a row or None -> float32 values."""
    ELEMENT: tl.constexpr = STORE.element
    if STORE.scale is None:
        values = widened(codes)
    else:
        values = element_value(codes, ELEMENT) * over_rows(row_scales)
    return values


@triton.jit
def decoded_lanes(codes, row_scales, STORE: tl.constexpr):
    """``decoded_tile`` of (rows, columns) with four or more numbers a lane; NaN is what a row's scale says."""
    if codes.dtype == tl.uint8 and not INTERPRETED:
        values = small_values(codes) * (row_scales * 256.0)[:, None]
    else:
        values = decoded_tile(codes, row_scales, STORE)
    return values


@triton.jit
def small_values(codes):
    """E4M3 codes -> their numbers times 2^-8, without a NaN, in float32: not for the interpreter.

    The exponent is four bits of float16's five, so a code, moved to where float16 keeps its own bits, spells that.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, sign;
        .reg .b16 a, b, c, d;
        prmt.b32 low, $4, 0, 0x1404;
        prmt.b32 high, $4, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        shr.b32 low, low, 1;
        and.b32 low, low, 0x3F803F80;
        or.b32 low, low, sign;
        and.b32 sign, high, 0x80008000;
        shr.b32 high, high, 1;
        and.b32 high, high, 0x3F803F80;
        or.b32 high, high, sign;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
        }
        """,
        "=f,=f,=f,=f,r",
        [codes],
        tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def over_rows(numbers):
    """A number a row, to broadcast over a tile."""
    if len(numbers.shape) == 1:
        result = numbers[:, None]
    else:
        result = numbers[None, :, :, None, None]
    return result


@triton.jit
def largest_of_rows(x):
    """Along each row of a tile."""
    if len(x.shape) == 2:
        result = tl.max(x, 1)
    else:
        result = tl.max(tl.max(tl.max(x, 4), 3), 0)
    return result


@triton.jit
def rounded_tile(x, words, STORE: tl.constexpr):
    """A float32 tile, whole value rows, and uint32 random words or None, to what is stored.

    Returns codes in the dtype of the checkpoint's memory; a scale a row, 0.0 where the format has none; the float32
    values that the codes decode to.
    """
    if STORE.scale is None:
        codes, values = plain_codes(x, words, STORE)
        return codes, 0.0, values  # Triton 3.6 returns no None
    else:
        OPTIONS: tl.constexpr = STORE.scale
        scales = row_scale(x, OPTIONS)
        if len(x.shape) == 2:
            codes = small_codes(unsigned_quotients(x, scales), x, words, STORE)
            return codes, scales, decoded_lanes(codes, scales, STORE)
        else:
            codes = small_codes(unsigned_quotients(x, scales), x, words, STORE)
            return codes, scales, decoded_tile(codes, scales, STORE)


@triton.jit
def store_tile(
    at, scales_at, mask, x, counter, number, sequence, stream, seed, STORE: tl.constexpr, ROUNDS: tl.constexpr
):
    """Round a float32 tile, whole value rows, and store it: codes at the pointers ``at`` where ``mask`` allows (None:
    everywhere), row scales at ``scales_at``, None where the format has none.  Returns the largest |stored|.

    Only of (rows, columns) may the mask leave out rows.  The other arguments are those of ``element_words``, for
    stochastic rounding.
    """
    ELEMENT: tl.constexpr = STORE.element
    inside = None
    if mask is not None and len(x.shape) == 2:
        inside = tl.max(mask.to(tl.int32), 1) > 0
    if STORE.stochastic and hasattr(ELEMENT, "exponent_bits"):
        factor = 1.0
        if STORE.scale is not None:
            OPTIONS: tl.constexpr = STORE.scale
            scales = row_scale(x, OPTIONS)
            tl.store(scales_at, scales, mask=inside)
            x = row_quotients(x, scales)
            factor = over_rows(scales)
        words = element_words(counter, number, sequence, stream, seed, ROUNDS)
        codes, values, ordinary = quick_codes(x, words, ELEMENT)
        tl.store(at, codes, mask=mask)
        largest = tl.max(tl.abs(values * factor))
        if not ordinary:
            # Words are drawn once more, so that none is kept for this case; the compiler must not know that they are
            # the same.
            nothing = (number >> 30) >> 2
            words = element_words(counter + nothing, number, sequence, stream, seed, ROUNDS)
            codes = stochastic_codes(x, x, words, ELEMENT)
            tl.store(at, codes, mask=mask)
            if STORE.scale is None:
                values = widened(codes)
            else:
                values = element_value(codes, ELEMENT)
            largest = tl.max(tl.abs(values * factor))
    else:
        words = None
        if STORE.stochastic:
            words = element_words(counter, number, sequence, stream, seed, ROUNDS)
        codes, scales, values = rounded_tile(x, words, STORE)
        tl.store(at, codes, mask=mask)
        if scales_at is not None:
            tl.store(scales_at, scales, mask=inside)
        largest = tl.max(tl.abs(values))
    return largest


@triton.jit
def quick_codes(x, words, ELEMENT: tl.constexpr):
    """Stochastic codes of a tile, the values that they stand for, and whether they hold: if every |x| is between the
    smallest normal and the largest number of the element.

    Then the tops of the words, added to the bit patterns, are all there is to it.
    """
    DROPPED: tl.constexpr = 23 - ELEMENT.mantissa_bits
    x = saturated(x, ELEMENT)
    bits = x.to(tl.int32, bitcast=True)
    ordinary = tl.max(distance(x, ELEMENT)) <= ordinary_distance(ELEMENT)
    top = (words >> (32 - DROPPED)).to(tl.int32, bitcast=True)
    rounded = (bits + top) & -(1 << DROPPED)
    values = rounded.to(tl.float32, bitcast=True)
    if ELEMENT.bits == 8:
        REBIAS: tl.constexpr = (127 - ELEMENT.bias) << ELEMENT.mantissa_bits
        codes = ((rounded & 0x7FFFFFFF) >> DROPPED) - REBIAS
        codes = (codes | ((rounded >> 24) & ELEMENT.sign_code)).to(tl.uint8)
    else:
        codes = stored_float(values, ELEMENT)
    return codes, values, ordinary


@triton.jit
def saturated(x, ELEMENT: tl.constexpr):
    """x within the numbers of an element that saturates."""
    LARGEST: tl.constexpr = ELEMENT.max
    if ELEMENT.overflow.value == "saturate":
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return x


@triton.jit
def distance(x, ELEMENT: tl.constexpr):
    """How far |x|'s bit pattern is above that of the smallest normal number, uint32; below it wraps around."""
    SMALLEST: tl.constexpr = (ELEMENT.min_exponent + 127) << 23
    return ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) - SMALLEST).to(tl.uint32, bitcast=True)


@triton.jit
def ordinary_distance(ELEMENT: tl.constexpr):
    """``distance`` of the element's largest number."""
    SMALLEST: tl.constexpr = (ELEMENT.min_exponent + 127) << 23
    LARGEST: tl.constexpr = ELEMENT.max
    limit = tl.full((1,), LARGEST, tl.float32).to(tl.int32, bitcast=True) - SMALLEST
    return tl.max(limit).to(tl.uint32)


@triton.jit
def stored_float(values, ELEMENT: tl.constexpr):
    """Values that the element holds, in its own type."""
    if ELEMENT.name == "bf16":
        codes = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        codes = values.to(tl.float16)
    return codes


@triton.jit
def plain_codes(x, words, STORE: tl.constexpr):
    """``rounded_tile`` without scales: what is stored, and its values."""
    ELEMENT: tl.constexpr = STORE.element
    if ELEMENT is None:
        codes, values = x, x
    else:
        if ELEMENT.name == "bf16":
            dtype: tl.constexpr = tl.bfloat16
        else:
            dtype: tl.constexpr = tl.float16
        if STORE.stochastic:
            codes = stochastic_codes(x, x, words, ELEMENT)
        else:
            codes = narrowed(x, dtype)
        values = widened(codes)
    return codes, values


@triton.jit
def row_scale(x, OPTIONS: tl.constexpr):
    """A float32 tile -> ``float_scale`` of each row's largest magnitude; NaN if the row is not finite."""
    # Magnitudes order like their bit patterns, and a NaN is above Inf.
    return scale_of_bits(largest_of_rows(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF), OPTIONS)


@triton.jit
def scale_of_bits(bits, OPTIONS: tl.constexpr):
    """``row_scale`` of rows whose largest magnitudes have these bit patterns."""
    scales, _ = float_scale(bits.to(tl.float32, bitcast=True), 1.0, OPTIONS)
    return tl.where(bits >= 0x7F800000, float("nan"), scales)


@triton.jit
def row_quotients(x, scales):
    """x / scale, rounded once, for finite x."""
    quotient = unsigned_quotients(x, scales)
    signed = quotient.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def unsigned_quotients(x, scales):
    """``row_quotients`` whose zeros may have lost their signs: a reciprocal a row and four operations a value.

    With y = 1 / s rounded to nearest and z = (1 - y s) y, x y + x z is off by hardly more than its own rounding, so q =
    x y + x z rounded is off by less than one unit in the last place.  From there q + (x - q s) y is the rounded
    quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990), as long as the
    remainder is exact.  Small scales are lifted by a power of two, which changes no quotient; the remainder is then
    exact for every quotient above 2^-42, and for int8 and E4M3 a smaller one is only a sign.
    """
    lift = tl.where(scales < SMALL, LIFT, 1.0)
    divisor = scales * lift
    inverse = reciprocal(divisor)
    low = multiply_add(-inverse, divisor, tl.full(scales.shape, 1.0, tl.float32)) * inverse
    divisor = tl.broadcast_to(over_rows(divisor), x.shape)
    inverse = tl.broadcast_to(over_rows(inverse), x.shape)
    lifted = x * over_rows(lift)
    quotient = multiply_add(lifted, inverse, lifted * over_rows(low))
    return multiply_add(multiply_add(-quotient, divisor, lifted), inverse, quotient)


@triton.jit
def small_codes(quotients, x, words, STORE: tl.constexpr):
    """Codes of E4M3 (uint8) or int8 of finite quotients, with the signs of x."""
    ELEMENT: tl.constexpr = STORE.element
    if hasattr(ELEMENT, "exponent_bits"):
        if STORE.stochastic:
            codes = stochastic_codes(quotients, x, words, ELEMENT)
        else:
            codes = nearest_codes(quotients, x, ELEMENT).to(tl.uint8)
    else:
        if STORE.stochastic:
            codes = encode(quotients, words, ELEMENT, "stochastic", 32)
        else:
            limited = tl.minimum(tl.maximum(quotients, -ELEMENT.max), ELEMENT.max)
            codes = (limited + HALVES).to(tl.int32, bitcast=True) - 0x4B400000
        codes = codes.to(tl.int8)
    return codes


@triton.jit
def nearest_codes(x, signed, ELEMENT: tl.constexpr):
    """Finite float32 x with the signs of ``signed`` -> codes in int32 of an element that saturates; ties to even."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - ELEMENT.mantissa_bits
    REBIAS: tl.constexpr = (127 - ELEMENT.bias) << ELEMENT.mantissa_bits
    odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED) - REBIAS
    # Below the normal numbers the grid is the quantum, as float32's own is here.
    shifted = magnitude.to(tl.float32, bitcast=True) + ELEMENT.smallest * 2.0**23
    units = shifted.to(tl.int32, bitcast=True) & ((2 << ELEMENT.mantissa_bits) - 1)
    code = tl.where(normal <= (1 << ELEMENT.mantissa_bits), units, tl.minimum(normal, ELEMENT.max_code))
    return code | sign_codes(signed, ELEMENT)
