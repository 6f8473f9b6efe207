"""The element codec of rounding.py for float32 tensors, in few passes over memory and bit-equal to it.

Tests compare every function here with its readable twin.  The simulator's inner loop runs through this file.
An element without a NaN must not meet one here: ``replace_nan_`` first.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantlab.formats.rounding import EXACT_BITS, Rounding, decode_fields
from quantlab.formats.table import Element, Integer, Overflow

# Elements that torch can convert from float32 with one rounding to nearest even.
_NATIVE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_EXPONENT = 0x7F800000
# Values worked on at once where a result takes several passes: they then stay in the cache of a core.
_LANES = 16384


def has_nan(x: Tensor) -> bool:
    """Whether x holds a NaN (a maximum propagates it, and is several times faster than isnan().any())."""
    return x.numel() > 0 and math.isnan(x.amax().item())


def replace_nan_(x: Tensor, element: Element | Integer) -> Tensor:
    """In place, what rounding.py makes of NaN where the element has none: the largest number, 0 for integers."""
    if isinstance(element, Integer):
        return x.masked_fill_(x.isnan(), 0.0)
    return x if element.nan_code is not None else x.masked_fill_(x.isnan(), element.max)


def serves(x: Tensor, element: Element | Integer) -> bool:
    """Whether this file can encode x: float32, and an element whose rounding constants fit its exponents."""
    if x.dtype != torch.float32:
        return False
    return isinstance(element, Integer) or element.exponent_bits == 8 or element.max_exponent + 26 < 128


def round_values(
    x: Tensor,
    element: Element | Integer,
    rounding: Rounding = Rounding.NEAREST,
    words: Tensor | None = None,
    bits: int = EXACT_BITS,
) -> Tensor:
    """float32 x -> the float32 values that its codes decode to, in a new tensor."""
    if rounding is Rounding.NEAREST and _converts(element) and element.bits == 16:
        return x.to(_NATIVE[element.name]).to(torch.float32)
    return round_values_(x.clone(), x, element, rounding, words, bits)


def round_values_(
    x: Tensor,
    signs: Tensor,
    element: Element | Integer,
    rounding: Rounding,
    words: Tensor | None,
    bits: int,
) -> Tensor:
    """Like round_values, overwriting x; ``signs`` is a tensor with the signs of x."""
    if isinstance(element, Integer):
        if rounding is Rounding.STOCHASTIC:
            values = _stochastic(x, None, words, bits)
        else:
            values = x.round_() if rounding is Rounding.NEAREST else x.trunc_()
        # An integer has one zero; adding +0.0 turns the -0.0 of a rounded negative into it.
        return values.clamp_(-element.max, element.max).add_(0.0)
    if element.exponent_bits == 8:
        return _round_mantissa(x, element, rounding, words, bits)
    # Beyond 2^(max_exponent + 1) every rounding overflows, so the cap changes no result.
    saturate = element.overflow is Overflow.SATURATE
    infinite = x.isinf() if rounding is Rounding.TOWARD_ZERO and not saturate else None
    cap = element.max if saturate or infinite is not None else 2.0 ** (element.max_exponent + 1)
    x.clamp_(-cap, cap)
    # The power of two at or below |x|, within the normal numbers: quantum * 2^mantissa_bits.
    power = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    power.clamp_(element.min_normal, 2.0**element.max_exponent)
    if rounding is Rounding.NEAREST:
        # Adding 1.5 * 2^23 quanta leaves no bit below the quantum: the addition itself rounds to even.
        magic = power.mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
        values = x.add_(magic).sub_(magic)
    elif rounding is Rounding.TOWARD_ZERO:
        # The quotient has at most 24 significant bits, so truncation and both products are exact.
        quantum = power.mul_(element.eps)
        values = x.div_(quantum).trunc_().mul_(quantum)
    else:
        quantum = power.mul_(element.eps)  # both powers of two, and the product a normal number
        values = _stochastic(x.abs_(), quantum, words, bits)
    if not saturate:
        beyond = values.abs() > element.max if infinite is None else infinite
        values.masked_fill_(beyond, torch.inf if element.overflow is Overflow.INFINITY else torch.nan)
    return values.copysign_(signs)


def _round_mantissa(
    x: Tensor, element: Element, rounding: Rounding, words: Tensor | None, bits: int
) -> Tensor:
    """Elements with float32's own exponents: integer arithmetic on the bits, a carry moves the exponent."""
    saturate = element.overflow is Overflow.SATURATE
    dropped = 23 - element.mantissa_bits
    pattern = x.view(torch.int32)
    keep = -1 << dropped
    special = (pattern & _EXPONENT) == _EXPONENT
    if rounding is Rounding.NEAREST:
        rounded = pattern + ((1 << (dropped - 1)) - 1) + ((pattern >> dropped) & 1)
    elif rounding is Rounding.TOWARD_ZERO:
        rounded = pattern
    else:
        assert words is not None
        low = words & ((1 << bits) - 1)
        # The discarded field is ``dropped`` bits wide: fewer random bits meet its top, where what lies below them
        # cannot carry; more never reach it.
        noise = low << (dropped - bits) if bits <= dropped else low >> (bits - dropped)
        field = pattern & ((1 << dropped) - 1)
        rounded = pattern + torch.where(field + noise >= 1 << dropped, 1 << dropped, 0).to(torch.int32)
    values = torch.where(special, x, (rounded & keep).view(torch.float32))
    if saturate:
        values = values.clamp(-element.max, element.max)
    elif element.overflow is Overflow.NAN:
        values = values.masked_fill(values.isinf(), torch.nan).copysign(x)
    return values


def _stochastic(x: Tensor, quantum: Tensor | None, words: Tensor | None, bits: int) -> Tensor:
    """float32 x rounded to a multiple of ``quantum`` (None = 1) by the rule of rounding.py; NaN stays.

    Every step is exact in float64: at most 16 integer bits (int16) and 32 random ones.
    """
    assert words is not None
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    rounded, given, noise = result.flatten(), x.flatten(), words.flatten()
    size = _LANES if x.device.type == "cpu" else max(1, x.numel())
    for start in range(0, x.numel(), size):
        part = slice(start, start + size)
        units = given[part].to(torch.float64)
        scale = None if quantum is None else quantum.flatten()[part]
        if scale is not None:
            units.div_(scale)
        low = (noise[part] & ((1 << bits) - 1)).to(torch.float64)
        units.mul_(2.0**bits).floor_().add_(low).mul_(0.5**bits).floor_()
        rounded[part] = units if scale is None else units.mul_(scale)
    return result


def encode(
    x: Tensor,
    element: Element | Integer,
    rounding: Rounding = Rounding.NEAREST,
    words: Tensor | None = None,
    bits: int = EXACT_BITS,
) -> Tensor:
    """float32 x -> codes in their storage dtype (``code_dtype``)."""
    native = _NATIVE.get(element.name)
    if isinstance(element, Integer):
        return round_values(x, element, rounding, words, bits).to(code_dtype(element))
    if rounding is Rounding.NEAREST and _converts(element):
        # torch's own overflow differs between its FP8 types and releases: saturate here.
        values = x.clamp(-element.max, element.max) if element.overflow is Overflow.SATURATE else x
    else:
        values = round_values(x, element, rounding, words, bits)
    if native is not None:
        codes = values.to(native).view(code_dtype(element))
    elif element.exponent_bits == 8:
        codes = values.contiguous().view(torch.int32) >> (23 - element.mantissa_bits)
        codes = codes.bitwise_and_(2 * element.sign_code - 1).to(code_dtype(element))
    else:
        codes = _codes_of_values(values, element)
    if element.nan_code is None:
        return codes
    return _canonical_nan(codes, values, x, element) if has_nan(values) else codes


def _converts(element: Element | Integer) -> bool:
    """Whether torch's own conversion gives the element's overflow (after a clamp where that saturates)."""
    if element.name not in _NATIVE or isinstance(element, Integer):
        return False
    return element.overflow is (Overflow.INFINITY if element.name in ("bf16", "fp16") else Overflow.SATURATE)


def code_dtype(element: Element | Integer) -> torch.dtype:
    """What holds an unpacked code: signed integers for integers, otherwise the bit pattern."""
    if element.bits <= 8:
        return torch.int8 if isinstance(element, Integer) else torch.uint8
    return torch.int16 if element.bits <= 16 else torch.int32


def _canonical_nan(codes: Tensor, values: Tensor, x: Tensor, element: Element) -> Tensor:
    """One code for the NaN of x, one a sign for overflow: conversions leave payloads of their own."""
    assert element.nan_code is not None
    positive = torch.tensor(element.nan_code, device=x.device).to(codes.dtype)
    negative = torch.tensor(element.nan_code + element.sign_code, device=x.device).to(codes.dtype)
    return torch.where(values.isnan(), torch.where(x.signbit() & ~x.isnan(), negative, positive), codes)


def decode(codes: Tensor, element: Element | Integer) -> Tensor:
    """Codes -> float32 values, in new memory."""
    if isinstance(element, Integer):
        return codes.to(torch.float32)
    if element.exponent_bits == 8:
        return (codes.to(torch.int32) << (23 - element.mantissa_bits)).view(torch.float32)
    if codes.dtype == torch.int16:
        return codes.view(_NATIVE[element.name]).to(torch.float32)
    return _table(element, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _codes_of_values(values: Tensor, element: Element) -> Tensor:
    """Codes (uint8) of float32 values that the element holds exactly.

    A normal's code is the top of its float32 bits with the exponent re-biased; a subnormal's is its number of
    quanta (capped at 2^m, the first normal).  Where one formula holds the other gives no more: the maximum is
    right.  NaN gets some code.
    """
    magnitude = values.abs()
    quanta = (magnitude * (1 / element.smallest)).clamp_(max=2.0**element.mantissa_bits).to(torch.int32)
    codes = magnitude.view(torch.int32)
    codes >>= 23 - element.mantissa_bits
    codes -= (127 - element.bias) << element.mantissa_bits
    torch.maximum(codes, quanta, out=codes)
    if element.infinity_code is not None:
        codes.clamp_(max=element.infinity_code)
    signs = torch.bitwise_right_shift(values.view(torch.int32), 31, out=quanta)
    codes |= signs.bitwise_and_(element.sign_code)
    return codes.to(torch.uint8)


@lru_cache(maxsize=32)
def _table(element: Element, device: torch.device) -> Tensor:
    """float32 (256,): the value of every byte; bits above the element's are ignored."""
    return decode_fields(torch.arange(256, device=device), element).to(torch.float32)
