"""The compiled loops of compiled.py: an element's arithmetic on all values, bit-equal to rounding.py.

Inductor vectorizes integer arithmetic and float arithmetic, but not a view of one as the
other, which it does a lane at a time.  So bits are viewed outside of the loop where that is possible, and a code
becomes a byte by way of float32, whose conversion is vectorized.
"""

import types
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from quantlab.formats import fused
from quantlab.formats.nvfp4 import SCALE_ELEMENT, Nvfp4
from quantlab.formats.table import Element, Integer, Overflow

_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000


class _Loop:
    """A function of tensors, compiled at its first call for all lengths of dim 0 (and of dim 1, if ``both``).

    The code object is copied: torch counts and searches what it has compiled per code object, and one that served
    every element would run into its limit.  Numbers of an element are constants in the loop, and so is whether it
    is shared among threads.
    """

    def __init__(self, body: Callable, both: bool = False):
        self._body = body
        self._both = both
        self._compiled: dict[int, Callable] = {}

    def __call__(self, *tensors: Tensor):
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, [0, 1] if self._both and tensor.shape[-1] > 1 else 0)
        threads = torch.get_num_threads()
        if threads not in self._compiled:
            self._compiled[threads] = self._compile()
        return self._compiled[threads](*tensors)

    def _compile(self) -> Callable:
        body = self._body
        code = body.__code__.replace()
        function = types.FunctionType(code, body.__globals__, body.__name__, closure=body.__closure__)
        return torch.compile(function, fullgraph=True, dynamic=False)


@cache
def amax_loop() -> _Loop:
    def largest(x: Tensor) -> Tensor:
        return x.abs().amax(-1)

    return _Loop(largest)


@cache
def block_scales(recipe: Nvfp4) -> _Loop:
    def scales(amax: Tensor, global_scale: Tensor) -> Tensor:
        values = recipe.block_scales(amax, global_scale)
        bits = values.view(torch.int32)
        return _codes(values, bits, bits, SCALE_ELEMENT)

    return _Loop(scales)


@cache
def block_factors() -> _Loop:
    def factors(scales: Tensor, global_scale: Tensor) -> Tensor:
        return _decoded(scales, SCALE_ELEMENT) * global_scale

    return _Loop(factors)


@cache
def encode_loop(element: Element | Integer) -> _Loop:
    def encode(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        return _codes(x, bits, bits, element), (x - x).sum(-1)

    return _Loop(encode, both=True)


@cache
def round_loop(element: Element | Integer) -> _Loop:
    def round_values(x: Tensor, bits: Tensor, output: Tensor) -> Tensor:
        output.copy_(_values(x, bits, element))
        return (x - x).sum(-1)

    return _Loop(round_values, both=True)


@cache
def decode_loop(element: Element | Integer) -> _Loop:
    def decode(values: Tensor) -> None:
        values.copy_(_decoded(values, element))

    return _Loop(decode)


@cache
def encode_groups(element: Element | Integer) -> _Loop:
    def encode(x: Tensor, signs: Tensor, divisors: Tensor) -> Tensor:
        quotient = x / divisors
        return _codes(quotient, quotient.view(torch.int32), signs, element)

    return _Loop(encode, both=True)


@cache
def encode_power_groups(element: Element) -> _Loop:
    def encode(x: Tensor, bits: Tensor, inverse: Tensor, shift: Tensor) -> Tensor:
        # The bits of a normal quotient are those of x with the exponent moved: no float is viewed as an integer.
        return _codes(x * inverse, ((bits & _MAGNITUDE) + shift).clamp(min=0), bits, element)

    return _Loop(encode, both=True)


@cache
def round_groups(element: Element | Integer) -> _Loop:
    def round_values(x: Tensor, divisors: Tensor, factors: Tensor, output: Tensor) -> None:
        quotient = x / divisors
        output.copy_(_values(quotient, quotient.view(torch.int32), element) * factors)

    return _Loop(round_values, both=True)


@cache
def decode_groups(element: Element | Integer) -> _Loop:
    def decode(values: Tensor, factors: Tensor) -> None:
        values.copy_(_decoded(values, element) * factors)

    return _Loop(decode, both=True)


def _codes(x: Tensor, bits: Tensor, signs: Tensor, element: Element | Integer) -> Tensor:
    """Codes of x to nearest even; bits: those of x; signs: bits of a tensor with the signs of x."""
    if isinstance(element, Integer):
        return x.round().clamp(-element.max, element.max).to(fused.code_dtype(element))
    mantissa_bits, dtype = element.mantissa_bits, fused.code_dtype(element)
    if element.name == "e2m1":
        # Three binades of two numbers each: rounding to 1/2, 1 and 2 is rounding of integers.
        magnitude = x.abs()
        upper = torch.where(
            magnitude < 4, magnitude.round() + 2, ((magnitude * 0.5).round() + 4).clamp(max=7)
        )
        codes = torch.where(magnitude < 2, (magnitude * 2).round(), upper)
        return torch.where(signs < 0, codes + 8, codes).to(dtype)
    magnitude = bits & _MAGNITUDE
    dropped, least = 23 - mantissa_bits, 127 + element.min_exponent
    half = (1 << (dropped - 1)) - 1
    capped = magnitude.clamp(max=_cap(element))
    # Normals round in the bits, with the exponent biased anew; subnormals count their quanta.
    normal = (capped + (half - ((least - 1) << 23)) + ((capped >> dropped) & 1)) >> dropped
    subnormal = (x.abs() * (1 / element.smallest)).round()
    codes = torch.where(x.abs() < element.min_normal, subnormal, normal.to(torch.float32))
    codes = torch.where(signs < 0, codes + element.sign_code, codes)
    if element.nan_code is not None:
        codes = torch.where(magnitude > _EXPONENT, element.nan_code, codes)
    return codes.to(dtype)


def _values(x: Tensor, bits: Tensor, element: Element | Integer) -> Tensor:
    """What the codes of x decode to, float32; bits: those of x."""
    if isinstance(element, Integer):
        # By way of integers, which have one zero.
        return x.round().clamp(-element.max, element.max).to(torch.int32).to(torch.float32)
    if element.name == "e2m1":
        magnitude = x.abs()
        upper = torch.where(magnitude < 4, magnitude.round(), ((magnitude * 0.5).round() * 2).clamp(max=6))
        return torch.where(magnitude < 2, (magnitude * 2).round() * 0.5, upper).copysign(x)
    dropped = 23 - element.mantissa_bits
    # Adding 1.5 * 2^23 quanta leaves no bit below the quantum: the addition itself rounds to even.
    # A power of two comes from an integer's conversion, which is vectorized, and not from a view of its bits.
    least = 127 + element.min_exponent
    binade = ((bits >> 23) & 0xFF).clamp(least, 127 + element.max_exponent) - least
    power = (torch.ones_like(binade) << binade).to(torch.float32)
    magic = power * (element.min_normal * 1.5 * 2.0**dropped)
    saturate = element.overflow is Overflow.SATURATE
    bound = element.max if saturate else 2.0 ** (element.max_exponent + 1)
    values = (x.clamp(-bound, bound) + magic) - magic
    if not saturate:
        values = torch.where(values.abs() > element.max, torch.inf, values)
    return values.copysign(x)


def _decoded(codes: Tensor, element: Element | Integer) -> Tensor:
    """float32 values of codes."""
    if isinstance(element, Integer):
        return codes.to(torch.float32)
    codes, mantissa_bits = codes.to(torch.int32), element.mantissa_bits
    magnitude = codes & (element.sign_code - 1)
    if (element.max_code >> mantissa_bits) + mantissa_bits < 24:
        # Quanta as an integer, whose conversion is vectorized.
        field, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
        significand = torch.where(field > 0, mantissa + (1 << mantissa_bits), mantissa)
        quanta = significand << (field.clamp(min=1) - 1)
        values = quanta.to(torch.float32) * element.smallest
        if element.nan_code is not None:
            values = torch.where(magnitude > element.max_code, torch.nan, values)
        return torch.where((codes & element.sign_code) != 0, -values, values)
    normal = ((magnitude << (23 - mantissa_bits)) + ((127 - element.bias) << 23)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * element.smallest
    values = torch.where(magnitude < (1 << mantissa_bits), subnormal, normal)
    if element.infinity_code is not None:
        values = torch.where(magnitude >= element.infinity_code, torch.inf, values)
    if element.nan_code is not None:
        values = torch.where(magnitude > (element.infinity_code or element.max_code), torch.nan, values)
    return torch.where((codes & element.sign_code) != 0, -values, values)


def _cap(element: Element) -> int:
    """Bits of a magnitude that rounds as all beyond it do: the largest number, or what rounds to Inf."""
    saturate = element.overflow is Overflow.SATURATE
    return _bits(element.max if saturate else 2.0 ** (element.max_exponent + 1))


def _bits(value: float) -> int:
    """The bit pattern of a float32."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
