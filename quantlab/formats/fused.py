"""The element codec of rounding.py for float32 tensors, in few passes over memory and bit-equal to it.

Tests compare every function here with its readable twin.  The simulator's inner loop runs through this file.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantlab.formats.rounding import decode_fields
from quantlab.formats.table import Element, Integer, Overflow

# Elements that torch can convert from float32 with one rounding to nearest even.
_NATIVE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_CODE_VIEWS = {1: torch.uint8, 2: torch.int16}
_EXPONENT = 0x7F800000


def serves(x: Tensor, element: Element | Integer) -> bool:
    """Whether this file can encode x: float32, and an element whose rounding constants fit its exponents."""
    if x.dtype != torch.float32:
        return False
    return isinstance(element, Integer) or element.name in _NATIVE or element.max_exponent + 26 < 128


def has_nan(x: Tensor) -> bool:
    """Whether x holds a NaN (a maximum propagates it, and is several times faster than isnan().any())."""
    return x.numel() > 0 and math.isnan(x.amax().item())


def round_values(x: Tensor, element: Element | Integer, words: Tensor | None, bits: int) -> Tensor:
    """float32 x -> the float32 values that its codes decode to, in a new tensor."""
    native = _NATIVE.get(element.name)
    if words is None and native is not None and element.bits == 16:
        return x.to(native).to(torch.float32)
    return round_values_(x.clone(), x, element, words, bits)


def round_values_(
    x: Tensor, signs: Tensor, element: Element | Integer, words: Tensor | None, bits: int
) -> Tensor:
    """Like round_values, overwriting x; ``signs`` is a tensor with the signs of x."""
    if isinstance(element, Integer):
        values = x.round_() if words is None else _stochastic(x, None, words, bits)
        # An integer has one zero; adding +0.0 turns the -0.0 of a rounded negative into it.
        return values.clamp_(-element.max, element.max).add_(0.0)
    # Beyond 2^(max_exponent + 1) every rounding overflows, so the cap changes no result.
    saturate = element.overflow is Overflow.SATURATE
    cap = element.max if saturate else 2.0 ** (element.max_exponent + 1)
    if cap < torch.finfo(torch.float32).max:
        x.clamp_(-cap, cap)
    # The power of two at or below |x|, within the normal numbers: quantum * 2^mantissa_bits.
    power = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    power.clamp_(element.min_normal, 2.0**element.max_exponent)
    if words is None:
        # Adding 1.5 * 2^23 quanta leaves no bit below the quantum: the addition itself rounds to even.
        magic = power.mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
        values = x.add_(magic).sub_(magic)
    else:
        quantum = power.to(torch.float64).mul_(element.eps)
        values = _stochastic(x.abs_(), quantum, words, bits)
    if not saturate:
        values.masked_fill_(values.abs() > element.max, torch.inf)
    return values.copysign_(signs)


def _stochastic(x: Tensor, quantum: Tensor | None, words: Tensor, bits: int) -> Tensor:
    """float32 x rounded to a multiple of ``quantum`` (None = 1) by the rule of rounding.py; NaN stays.

    Every step is exact in float64: at most 11 integer bits (fp16) and 32 random ones.
    """
    units = x.to(torch.float64)
    if quantum is not None:
        units.div_(quantum)
    low = (words & ((1 << bits) - 1)).to(torch.float64)
    units.mul_(2.0**bits).floor_().add_(low).mul_(0.5**bits).floor_()
    if quantum is not None:
        units.mul_(quantum)
    return units.to(torch.float32)


def encode(x: Tensor, element: Element | Integer, words: Tensor | None, bits: int) -> Tensor:
    """float32 x -> codes: int8 integers, uint8 or int16 bit patterns."""
    if isinstance(element, Integer):
        return round_values(x, element, words, bits).to(torch.int8)
    native = _NATIVE.get(element.name)
    if words is not None or native is None:
        values = round_values(x, element, words, bits)
    else:
        # torch's own overflow differs between its FP8 types and releases: saturate here.
        values = x.clamp(-element.max, element.max) if element.overflow is Overflow.SATURATE else x
    if native is None:
        codes = _codes_of_values(values, element)
    else:
        codes = values.to(native).view(_CODE_VIEWS[native.itemsize])
    return _canonical_nan(codes, x, element) if element.nan_code is not None and has_nan(x) else codes


def _canonical_nan(codes: Tensor, x: Tensor, element: Element) -> Tensor:
    """One NaN code per sign: conversions leave payloads that differ between instructions."""
    assert element.nan_code is not None
    positive = torch.tensor(element.nan_code, device=x.device).to(codes.dtype)
    negative = torch.tensor(element.nan_code + element.sign_code, device=x.device).to(codes.dtype)
    return torch.where(x.isnan(), torch.where(x.signbit(), negative, positive), codes)


def decode(codes: Tensor, element: Element | Integer) -> Tensor:
    """Codes -> float32 values, in new memory."""
    if isinstance(element, Integer):
        return codes.to(torch.float32)
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
