"""Formats compiled into few passes over memory: ``quantize``, ``dequantize``, ``round`` of equal bits.

torch.compile makes one loop out of an element's arithmetic, in C++ on the CPU.  What decides a scale stays where it
is written, in the recipes: they get the largest magnitudes of the groups and nothing else, so only the passes over
all values are written a second time.  Whatever is not served here goes to the Format itself: other devices and
dtypes, stochastic rounding, library profiles and the like, elements above 8 bits, which torch converts in one pass,
groups that do not divide the key dim, fewer values than ``MINIMUM_SIZE``, NaN and Inf.
"""

import ctypes
import dataclasses
import math
import mmap
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from quantlab.formats import fused, loops
from quantlab.formats.float_scales import FloatScaled
from quantlab.formats.format import Format, check_format
from quantlab.formats.mx import SCALE_BIAS, Mx, decode_scales, scale_codes
from quantlab.formats.nvfp4 import BLOCK, Nvfp4, spread
from quantlab.formats.recipe import Scales
from quantlab.formats.rounding import Rounding
from quantlab.formats.storage import Encoded, check_encoded
from quantlab.formats.table import Element

MINIMUM_SIZE = 1 << 19
"""Values from which every format gains: a compiled call costs 0.1 ms a loop before it begins."""


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
        or fmt.key_scale
        or fmt.component is not None
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
        codes, zeros = loops.encode_loop(fmt.element)(*_rows(x))
        return Encoded(codes.view(x.shape)) if _admits(fmt, zeros) else None
    groups = x.view(-1, _group(fmt, x.shape[-1]))
    scales = _scales(fmt, groups, x.shape)
    if scales is None:
        return None
    bits = groups.view(torch.int32)
    if isinstance(fmt.recipe, Mx) and _has_normal_quotients(scales.stored):
        inverse = decode_scales(2 * SCALE_BIAS - scales.stored).view(-1, 1)
        shift = (SCALE_BIAS - scales.stored.view(-1, 1).int()) << 23
        codes = loops.encode_power_groups(fmt.element)(groups, bits, inverse, shift)
    else:
        codes = loops.encode_groups(fmt.element)(groups, bits, _divisors(fmt.recipe, scales))
    return Encoded(codes.view(x.shape), scales.stored, scales.global_scale)


def _dequantize(fmt: Format, encoded: Encoded) -> Tensor | None:
    recipe, codes = fmt.recipe, encoded.codes.contiguous()
    if recipe is None or encoded.scales is None:
        values = _empty(codes.shape).copy_(codes)
        loops.decode_loop(fmt.element)(values.view(-1))
        return values
    factors = _factors(recipe, Scales(encoded.scales.contiguous(), encoded.global_scale))
    if factors is None:
        return None
    # The loop would load bytes eight at a time by way of memory: torch's own conversion is faster, and in place.
    values = _empty(codes.shape).copy_(codes)
    loops.decode_groups(fmt.element)(values.view(-1, _group(fmt, codes.shape[-1])), factors)
    return values


def _round(fmt: Format, x: Tensor) -> Tensor | None:
    x = x.detach().contiguous()
    if fmt.recipe is None:
        rows, bits = _rows(x)
        values = _empty(rows.shape)
        zeros = loops.round_loop(fmt.element)(rows, bits, values)
        return values.view(x.shape) if _admits(fmt, zeros) else None
    groups = x.view(-1, _group(fmt, x.shape[-1]))
    scales = _scales(fmt, groups, x.shape)
    factors = None if scales is None else _factors(fmt.recipe, scales)
    if scales is None or factors is None:
        return None
    divisors = _divisors(fmt.recipe, scales)
    values = _empty(groups.shape)
    loops.round_groups(fmt.element)(groups, divisors, factors, values)
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
    """x as rows that stay in a cache while their zeros are added up, as floats and as bits."""
    rows = x.view(-1, math.gcd(x.numel(), 4096))
    return rows, rows.view(torch.int32)


def _admits(fmt: Format, zeros: Tensor) -> bool:
    """Whether no NaN or Inf is there that the Format may refuse.

    zeros: sums of x - x, NaN where one is; a fused sum costs nothing, where a maximum takes half as long as the loop.
    """
    element = fmt.element
    return (
        isinstance(element, Element) and element.infinity_code is not None
    ) or not zeros.sum().isnan().item()


def _scales(fmt: Format, groups: Tensor, shape: torch.Size) -> Scales | None:
    """The recipe's scales, from the largest magnitudes alone; None if a value is not finite."""
    recipe = fmt.recipe
    amax = loops.amax_loop()(groups)
    if not math.isfinite(amax.amax().item()):
        return None
    if isinstance(recipe, Nvfp4):
        amax = amax.view(*shape[:-1], -1)
        global_scale = recipe.global_scale(amax)
        stored = loops.block_scales(recipe)(amax.view(-1), _per_block(global_scale, amax)).view(amax.shape)
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


def _has_normal_quotients(scales: Tensor) -> bool:
    """Whether no float32 subnormal has a quotient that is a normal number of an element (all are above 2^-30).

    Blocks of zeros do not pass either, and take the general loop.
    """
    return scales.amin().item() >= 32


def _factors(recipe: object, scales: Scales) -> Tensor | None:
    """float32 (groups, 1), what the recipe multiplies by; None where a product saturates."""
    if isinstance(recipe, Nvfp4):
        factors = loops.block_factors()(
            scales.stored.view(-1), _per_block(scales.global_scale, scales.stored)
        )
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
