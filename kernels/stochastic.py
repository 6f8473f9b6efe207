"""Stochastic rounding of float32 to a floating-point element by all 32 bits of a random word, without a branch.

Up if the discarded fraction plus the word carries.  Codes of one sign count on through the powers of two, so a carry
may pass into the exponent.  What is below the normal numbers discards more bits.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import INTERPRETED


@triton.jit
def stochastic_codes(x, signed, words, ELEMENT: tl.constexpr):
    """float32 x with the signs of ``signed`` -> codes as memory has them: bfloat16, float16, or uint8."""
    return signed_codes(magnitude_codes(x, words, ELEMENT), signed, ELEMENT)


@triton.jit
def magnitude_codes(x, words, ELEMENT: tl.constexpr):
    """The codes without their signs, in int32.

    A float32 of exponent field f is (bits - (f - 1) 2^23) 2^(f - 150), except for its own subnormals, of which nothing
    is left.  With f no more than that of the smallest normal number, the same difference counts on from there.
    """
    words = words.to(tl.uint32, bitcast=True)
    DROPPED: tl.constexpr = 23 - ELEMENT.mantissa_bits
    MIN_FIELD: tl.constexpr = ELEMENT.min_exponent + 127
    INFINITE: tl.constexpr = ELEMENT.overflow.value == "infinity"
    if MIN_FIELD > 1:
        # One step beyond the largest number is where the infinity's code stands.
        LIMIT: tl.constexpr = 2.0 ** (ELEMENT.max_exponent + 1) if INFINITE else ELEMENT.max
        PROPAGATE: tl.constexpr = tl.PropagateNan.ALL if INFINITE else tl.PropagateNan.NONE
        limited = tl.minimum(tl.abs(x), LIMIT, propagate_nan=PROPAGATE).to(tl.int32, bitcast=True)
        below = tl.minimum((limited >> 23) - 1, MIN_FIELD - 1)
        codes = shifted_with_carry(limited - (below << 23), MIN_FIELD + DROPPED - 1 - below, words)
        if INFINITE:  # what is beyond its code was a NaN
            codes = tl.minimum(codes, ELEMENT.nan_code)
    else:  # as many subnormals as float32 has; without a sign, the sum stays below 2^32
        magnitude = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32, bitcast=True)
        codes = ((magnitude + (words >> (32 - DROPPED))) >> DROPPED).to(tl.int32, bitcast=True)
        codes = tl.where(x == x, tl.minimum(codes, ELEMENT.infinity_code), ELEMENT.nan_code)
    return codes


@triton.jit
def shifted_with_carry(numbers, places, words):
    """numbers >> places, one more if the first 32 bits of what is dropped plus the word carry.

    int32 numbers from 0 on, int32 places from 1 on, uint32 words.
    """
    if not INTERPRETED:
        shifted = tl.inline_asm_elementwise(
            """
            {
            .reg .u64 both;
            .reg .u32 low, high;
            mov.u32 low, 0;
            mov.b64 both, {low, $1};
            shr.u64 both, both, $2;
            mov.b64 {low, high}, both;
            add.cc.u32 low, low, $3;
            addc.u32 $0, high, 0;
            }
            """,
            "=r,r,r,r",
            [numbers, places, words],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        both = (numbers.to(tl.uint64) << 32) >> tl.minimum(places, 63).to(tl.uint64)
        shifted = ((both + words.to(tl.uint64)) >> 32).to(tl.int32)
    return shifted


@triton.jit
def signed_codes(codes, x, ELEMENT: tl.constexpr):
    """int32 codes of magnitudes with the signs of float32 x, as memory has them."""
    if ELEMENT.bits == 8:
        if not INTERPRETED:
            stored = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 low, high;
                prmt.b32 low, $5, $6, 0x0073;
                prmt.b32 high, $7, $8, 0x0073;
                prmt.b32 high, low, high, 0x5410;
                and.b32 high, high, 0x80808080;
                prmt.b32 low, $1, $2, 0x0040;
                prmt.b32 $0, $3, $4, 0x0040;
                prmt.b32 low, low, $0, 0x5410;
                or.b32 $0, low, high;
                }
                """,
                "=&r,r,r,r,r,r,r,r,r",
                [codes, x],
                tl.uint8,
                is_pure=True,
                pack=4,
            )
        else:
            stored = (codes | sign_codes(x, ELEMENT)).to(tl.uint8)
    else:
        if not INTERPRETED:
            bits = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 signs, both;
                prmt.b32 signs, $3, $4, 0x7632;
                prmt.b32 both, $1, $2, 0x5410;
                and.b32 signs, signs, 0x80008000;
                or.b32 $0, both, signs;
                }
                """,
                "=r,r,r,r,r",
                [codes, x],
                tl.uint16,
                is_pure=True,
                pack=2,
            )
        else:
            bits = (codes | sign_codes(x, ELEMENT)).to(tl.uint16)
        if ELEMENT.name == "bf16":
            stored = bits.to(tl.bfloat16, bitcast=True)
        else:
            stored = bits.to(tl.float16, bitcast=True)
    return stored


@triton.jit
def sign_codes(x, ELEMENT: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) >> (32 - ELEMENT.bits)) & ELEMENT.sign_code
