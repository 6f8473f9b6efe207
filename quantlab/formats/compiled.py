"""Formats compiled into few passes over memory: ``quantize``, ``dequantize``, ``round`` of equal bits.

torch.compile makes one loop out of an element's arithmetic, in C++ on the CPU.  What decides a scale stays where it
is written, in the recipes: they get the largest magnitudes of the groups and nothing else, so only the passes over
all values are written a second time.  Whatever is not served here goes to the Format itself: other devices and
dtypes, stochastic rounding, library profiles and the like, elements above 8 bits, which torch converts in one pass,
groups that do not divide the key dim, fewer values than ``MINIMUM_SIZE``, NaN and Inf.

How the loops are written: inductor vectorizes integer arithmetic and float arithmetic, but not a view of one as the
other, which it does a lane at a time.  So bits are viewed outside of the loop where that is possible, and a code
becomes a byte by way of float32, whose conversion is vectorized.
"""

import ctypes
import dataclasses
import math
import mmap
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from quantlab.formats import fused
from quantlab.formats.float_scales import FloatScaled
from quantlab.formats.format import Format, check_format
from quantlab.formats.mx import SCALE_BIAS, Mx, decode_scales, scale_codes
from quantlab.formats.nvfp4 import BLOCK, SCALE_ELEMENT, Nvfp4, spread
from quantlab.formats.recipe import Scales
from quantlab.formats.rounding import Rounding
from quantlab.formats.storage import Encoded, check_encoded
from quantlab.formats.table import Element, Integer, Overflow

MINIMUM_SIZE = 1 << 19
"""Values from which every format gains: a compiled call costs 0.1 ms a loop before it begins."""

_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000


def quantize(fmt: Format, x: Tensor, random_bits: Tensor | None = None) -> Encoded:
    """``fmt.quantize(x, random_bits)``, bit for bit and with its errors.

    The first call for a kind of format compiles, which takes seconds.  Without a C++ compiler one warning says so,
    and the Format does the work from then on.
    """
    check_format(fmt)
    encoded = None
    if random_bits is None and _serves(fmt, x, torch.float32):
        encoded = _attempt(_quantize, fmt, x)
    return fmt.quantize(x, random_bits) if encoded is None else encoded


def dequantize(fmt: Format, encoded: Encoded) -> Tensor:
    """``fmt.dequantize(encoded)``, bit for bit; otherwise as ``quantize``."""
    check_format(fmt)
    check_encoded(fmt, encoded, residual=False)
    dtype = fused.code_dtype(fmt.element)
    values = _attempt(_dequantize, fmt, encoded) if _serves(fmt, encoded.codes, dtype) else None
    return fmt.dequantize(encoded) if values is None else values


def round(fmt: Format, x: Tensor, random_bits: Tensor | None = None) -> Tensor:
    """``fmt.round(x, random_bits)``, bit for bit and with its errors; otherwise as ``quantize``."""
    check_format(fmt)
    values = None
    if random_bits is None and _serves(fmt, x, torch.float32):
        values = _attempt(_round, fmt, x)
    return fmt.round(x, random_bits) if values is None else values


def _serves(fmt: Format, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a loop of this file does what the format says; x: values or codes."""
    plain = fmt.rounding is Rounding.NEAREST and fmt.overflow is None and fmt.hadamard is None
    if (
        not plain
        or fmt.error_feedback is not None
        or fmt.profile is not None
        or fmt.four_over_six is not None
    ):
        return False
    # torch converts to the wider floats in one pass by itself.
    if isinstance(fmt.element, Element) and fmt.element.bits > 8:
        return False
    served = isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() > 0 and x.numel() >= MINIMUM_SIZE
    if not served or x.dtype != dtype:
        return False
    return fmt.recipe is None or _group(fmt, x.shape[-1]) > 1


def _group(fmt: Format, key_dim: int) -> int:
    """Values that share a scale, 0 where this file does not serve the recipe."""
    recipe, group = fmt.recipe, 0
    if isinstance(recipe, FloatScaled) and not recipe.stores_reciprocal:
        group = {"row": key_dim, "block32": 32}.get(recipe.granularity, 0)
    elif isinstance(recipe, Mx):
        group = 32
    elif isinstance(recipe, Nvfp4) and recipe.scale == "rne":
        group = BLOCK
    return group if group and key_dim % group == 0 else 0


def _quantize(fmt: Format, x: Tensor) -> Encoded | None:
    x = x.detach().contiguous()
    if fmt.recipe is None:
        codes, amax = _encode_loop(fmt.element)(*_rows(x))
        return Encoded(codes.view(x.shape)) if _admits(fmt, amax) else None
    groups = x.view(-1, _group(fmt, x.shape[-1]))
    scales = _scales(fmt, groups, x.shape)
    if scales is None:
        return None
    codes = _encode_groups(fmt.element)(groups, groups.view(torch.int32), _divisors(fmt.recipe, scales))
    return Encoded(codes.view(x.shape), scales.stored, scales.global_scale)


def _dequantize(fmt: Format, encoded: Encoded) -> Tensor | None:
    recipe, codes = fmt.recipe, encoded.codes.contiguous()
    if recipe is None or encoded.scales is None:
        values = _empty(codes.shape).copy_(codes)
        _decode_loop(fmt.element)(values.view(-1))
        return values
    factors = _factors(recipe, Scales(encoded.scales.contiguous(), encoded.global_scale))
    if factors is None:
        return None
    # The loop would load bytes eight at a time by way of memory: torch's own conversion is faster, and in place.
    values = _empty(codes.shape).copy_(codes)
    _decode_groups(fmt.element)(values.view(-1, _group(fmt, codes.shape[-1])), factors)
    return values


def _round(fmt: Format, x: Tensor) -> Tensor | None:
    x = x.detach().contiguous()
    if fmt.recipe is None:
        rows, bits = _rows(x)
        values = _empty(rows.shape)
        amax = _round_loop(fmt.element)(rows, bits, values)
        return values.view(x.shape) if _admits(fmt, amax) else None
    groups = x.view(-1, _group(fmt, x.shape[-1]))
    scales = _scales(fmt, groups, x.shape)
    factors = None if scales is None else _factors(fmt.recipe, scales)
    if scales is None or factors is None:
        return None
    divisors = _divisors(fmt.recipe, scales)
    values = _empty(groups.shape)
    _round_groups(fmt.element)(groups, divisors, factors, values)
    return values.view(x.shape)


def _empty(shape: torch.Size) -> Tensor:
    """New float32 memory, in huge pages where Linux has them on request: to fault in 4 KiB pages costs a large
    tensor more time than its arithmetic."""
    values = torch.empty(shape, dtype=torch.float32)
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-values.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (values.data_ptr() + values.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            # Advice: what the kernel does with it changes no result, so a refusal is of no interest.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return values


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as rows that stay in a cache while their largest magnitude is found, as floats and as bits."""
    rows = x.view(-1, math.gcd(x.numel(), 4096))
    return rows, rows.view(torch.int32)


def _admits(fmt: Format, amax: Tensor) -> bool:
    """Whether no NaN or Inf is there that the Format may refuse."""
    element = fmt.element
    return (isinstance(element, Element) and element.infinity_code is not None) or math.isfinite(
        amax.amax().item()
    )


def _scales(fmt: Format, groups: Tensor, shape: torch.Size) -> Scales | None:
    """The recipe's scales, from the largest magnitudes alone; None if a value is not finite."""
    recipe = fmt.recipe
    amax = _amax_loop()(groups)
    if not math.isfinite(amax.amax().item()):
        return None
    if isinstance(recipe, Nvfp4):
        amax = amax.view(*shape[:-1], -1)
        global_scale = recipe.global_scale(amax)
        stored = _block_scales(recipe)(amax.view(-1), _per_block(global_scale, amax)).view(amax.shape)
        return Scales(stored, global_scale)
    if isinstance(recipe, Mx):
        stored = scale_codes(amax, recipe.element, recipe.mode)
    else:
        assert isinstance(recipe, FloatScaled)
        # A group of one value has that value's magnitude.
        stored = dataclasses.replace(recipe, granularity="row").scales(amax[:, None]).stored
    return Scales(stored.view(*shape[:-1], -1))


def _per_block(global_scale: Tensor | None, blocks: Tensor) -> Tensor:
    """The global scale of every block, float32 (all blocks)."""
    if global_scale is None:
        return torch.ones(blocks.numel())
    return spread(global_scale, blocks).expand(blocks.shape).reshape(-1)  # type: ignore


def _factors(recipe: object, scales: Scales) -> Tensor | None:
    """float32 (groups, 1), what the recipe multiplies by; None where a product saturates."""
    if isinstance(recipe, Nvfp4):
        factors = _block_factors()(scales.stored.view(-1), _per_block(scales.global_scale, scales.stored))
        return factors.view(-1, 1)
    if isinstance(recipe, FloatScaled):
        return scales.stored.view(-1, 1)
    # Below 2^16, the range of the widest element, times 2^111.
    if scales.stored.amax().item() > SCALE_BIAS + 111:
        return None
    return decode_scales(scales.stored).view(-1, 1)


def _divisors(recipe: object, scales: Scales) -> Tensor:
    """float32 (groups, 1), what the recipe divides by; by a power of two that is the same as its product."""
    factors = decode_scales(scales.stored).view(-1, 1) if isinstance(recipe, Mx) else _factors(recipe, scales)
    assert factors is not None
    return factors.masked_fill(factors == 0, torch.inf) if isinstance(recipe, Nvfp4) else factors


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
def _amax_loop() -> _Loop:
    def largest(x: Tensor) -> Tensor:
        return x.abs().amax(-1)

    return _Loop(largest)


@cache
def _block_scales(recipe: Nvfp4) -> _Loop:
    def scales(amax: Tensor, global_scale: Tensor) -> Tensor:
        values = recipe.block_scales(amax, global_scale)
        bits = values.view(torch.int32)
        return _codes(values, bits, bits, SCALE_ELEMENT)

    return _Loop(scales)


@cache
def _block_factors() -> _Loop:
    def factors(scales: Tensor, global_scale: Tensor) -> Tensor:
        return _decoded(scales, SCALE_ELEMENT) * global_scale

    return _Loop(factors)


@cache
def _encode_loop(element: Element | Integer) -> _Loop:
    def encode(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        return _codes(x, bits, bits, element), x.abs().amax(-1)

    return _Loop(encode, both=True)


@cache
def _round_loop(element: Element | Integer) -> _Loop:
    def round_values(x: Tensor, bits: Tensor, output: Tensor) -> Tensor:
        output.copy_(_values(x, bits, element))
        return x.abs().amax(-1)

    return _Loop(round_values, both=True)


@cache
def _decode_loop(element: Element | Integer) -> _Loop:
    def decode(values: Tensor) -> None:
        values.copy_(_decoded(values, element))

    return _Loop(decode)


@cache
def _encode_groups(element: Element | Integer) -> _Loop:
    def encode(x: Tensor, signs: Tensor, divisors: Tensor) -> Tensor:
        quotient = x / divisors
        return _codes(quotient, quotient.view(torch.int32), signs, element)

    return _Loop(encode, both=True)


@cache
def _round_groups(element: Element | Integer) -> _Loop:
    def round_values(x: Tensor, divisors: Tensor, factors: Tensor, output: Tensor) -> None:
        quotient = x / divisors
        output.copy_(_values(quotient, quotient.view(torch.int32), element) * factors)

    return _Loop(round_values, both=True)


@cache
def _decode_groups(element: Element | Integer) -> _Loop:
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
    codes = torch.where(capped < (least << 23), subnormal, normal.to(torch.float32))
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
    power = (bits & _EXPONENT).clamp(_bits(element.min_normal), _bits(2.0**element.max_exponent))
    magic = (power + (dropped << 23) + (1 << 22)).view(torch.float32)
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


_failed = False


def _attempt(function: Callable, *arguments):
    """function(*arguments); None if it cannot be compiled here, which is said once."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import, and not needed for small tensors

    global _failed
    if _failed:
        return None
    try:
        return function(*arguments)
    except TorchDynamoException as error:
        _failed = True
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"formats are not compiled, eager torch does the same more slowly: {reason}", stacklevel=3
        )
        return None
