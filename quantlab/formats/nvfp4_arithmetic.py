"""NVFP4 arithmetic as data: what a library does at each step, and the encoder and decoder that run the steps.

16 E2M1 codes share one E4M3 scale, and many blocks a global value.  Libraries differ in the global value that
they keep, in which scales they floor, in where they divide and where they multiply by a reciprocal, and in zeros
and NaN.

Shapes: x (..., V, K) is cut into blocks, (..., V, blocks, 16), the last one padded with zeros.  Every step gets
tensors that broadcast against that: block maxima and scales (..., V, blocks, 1), the global value with as many
dimensions.  Scales are float32 numbers that E4M3 holds.  NaN and Inf are not refused here: they spread as far as
they do in the library.  Only the sign of a NaN, which belongs to the processor, is dropped: NaN scales are 0x7F.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import fused
from quantlab.formats.rounding import EXACT_BITS
from quantlab.formats.table import FLOAT_ELEMENTS

BLOCK = 16
GRANULARITIES = ("matrix", "row", "tensor", "none")
NO_CODE = 255  # what a NaN is stored as by a cast that keeps NaN as a float: no E2M1 code says it
SCALE_ELEMENT = FLOAT_ELEMENTS["e4m3"]
_E2M1 = FLOAT_ELEMENTS["e2m1"]
CODE_MAX = _E2M1.max
_TIE_TO_EIGHT = 7.0  # between 6 and 8; 8 is even


@dataclass(frozen=True)
class ElementCast:
    """How a library turns a float32 quotient into an E2M1 code: to nearest, ties to even, and these quirks.

    nan_code: what NaN turns into.  keeps_minus_zero: else -0.0 is code 0; a negative number that rounds to zero
    is code 8 in either case.  saturates: else the exponent of what rounds to 8 has no room, and it is code 8, -0.
    """

    nan_code: int
    keeps_minus_zero: bool = False
    saturates: bool = True


@dataclass(frozen=True)
class Nvfp4Arithmetic:
    """One library's arithmetic.  The global value is what the library stores, in its own convention.

    one_level: also works without a global value, which is then 1.  keeps_bfloat16: from a bfloat16 input the
    maxima stay in bfloat16, and so do the first divisions.
    """

    name: str
    global_value: Callable[[Tensor], Tensor]  # largest magnitude of what shares it -> global value
    block_scale: Callable[[Tensor, Tensor], Tensor]  # block maximum, global value -> scale
    quotient: Callable[[Tensor, Tensor, Tensor], Tensor]  # x, scale, global value -> what is cast
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]  # element value, scale, global value -> number
    cast: ElementCast
    one_level: bool = False
    keeps_bfloat16: bool = False


def global_amax(x: Tensor, granularity: str) -> Tensor | None:
    """Largest magnitude of what shares a global value, in the dtype of x; NaN wins, 0 where there is nothing.

    x (..., V, K); "matrix" gives x.shape[:-2], "row" x.shape[:-1], "tensor" (), "none" None.  A vector (K,) is
    one row and one matrix.  InputError for another granularity.
    """
    if granularity not in GRANULARITIES:
        raise InputError("granularity", granularity, f"one of {', '.join(GRANULARITIES)}")
    if granularity == "none":
        return None
    kept = {"row": x.dim() - 1, "matrix": max(x.dim() - 2, 0), "tensor": 0}[granularity]
    magnitudes = x.abs().flatten(kept)
    return magnitudes.amax(-1) if magnitudes.shape[-1] else x.new_zeros(x.shape[:kept])


def encode(
    profile: Nvfp4Arithmetic,
    x: Tensor,
    amax: Tensor | None,
    encode_element: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (..., V, K) uint8, E4M3 bytes (..., V, blocks) uint8, and the global value (float32, like amax).

    x: float32 or bfloat16 (..., V, K).  amax: see global_amax; its dimensions are the leading ones of x, and
    without dimensions it holds for all of x.  None: no global value, InputError if the library has no such mode.
    encode_element: quotients (..., V, K) float32 -> codes, instead of the library's cast (stochastic rounding).
    NO_CODE in the codes marks a NaN that the library's cast keeps as a float.
    """
    blocks, global_value = prepare(profile, x, amax)
    shared = per_block(global_value, x.dim())
    scales = profile.block_scale(block_amax(blocks), shared)
    quotient = join_blocks(profile.quotient(blocks.to(torch.float32), scales, shared), x.shape[-1])
    codes = cast_element(quotient, profile.cast) if encode_element is None else encode_element(quotient)
    return codes, scale_bytes(scales), None if amax is None else global_value


def decode(profile: Nvfp4Arithmetic, values: Tensor, scales: Tensor, global_value: Tensor | None) -> Tensor:
    """Numbers (..., V, K) float32 from element values (..., V, K) float32 and what encode returned beside them."""
    shared = per_block(torch.ones(()) if global_value is None else global_value, values.dim())
    scale = fused.decode(scales, SCALE_ELEMENT)[..., None]
    return join_blocks(
        profile.decode(split_blocks(values), scale, shared.to(values.device)), values.shape[-1]
    )


def element_values(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes; NaN for NO_CODE."""
    return fused.decode(codes, _E2M1).masked_fill_(codes == NO_CODE, torch.nan)


def cast_element(quotient: Tensor, cast: ElementCast) -> Tensor:
    """float32 quotients -> E2M1 codes (uint8) as the library's own cast makes them."""
    nan = quotient.isnan()
    numbers = quotient.masked_fill(nan, 0.0)
    codes = fused.encode(numbers, _E2M1, None, EXACT_BITS)
    if not cast.keeps_minus_zero:
        codes.masked_fill_(numbers == 0, 0)
    if not cast.saturates:
        codes.masked_fill_(numbers.abs() >= _TIE_TO_EIGHT, 8)
        nan |= numbers.isinf()
    return codes.masked_fill_(nan, cast.nan_code)


def cast_values(quotient: Tensor, codes: Tensor, cast: ElementCast) -> Tensor:
    """What the library takes its codes to be worth when it measures its own error (float32).

    The value of the code; where a cast does not saturate, the multiple of 2 that the code failed to hold.
    """
    values = element_values(codes)
    if cast.saturates:
        return values
    beyond = 2.0 * torch.round(quotient / 2.0)
    beyond = beyond.masked_fill(quotient.isinf(), torch.nan)
    return torch.where(quotient.abs() < _TIE_TO_EIGHT, values, beyond)


def prepare(profile: Nvfp4Arithmetic, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Blocks of x in the dtype that the library computes maxima in, and the global value (1 if it has none)."""
    dtype = torch.bfloat16 if profile.keeps_bfloat16 and x.dtype == torch.bfloat16 else torch.float32
    blocks = split_blocks(x.to(dtype))
    if amax is not None:
        return blocks, profile.global_value(amax.to(dtype))
    if not profile.one_level:
        raise InputError("amax", None, f"a tensor: {profile.name} has no NVFP4 without a global value")
    return blocks, torch.ones((), device=x.device)


def split_blocks(x: Tensor) -> Tensor:
    """(..., K) -> (..., blocks, 16), the last block padded with zeros."""
    missing = -x.shape[-1] % BLOCK
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK))


def join_blocks(blocks: Tensor, key_dim: int) -> Tensor:
    """(..., blocks, 16) -> (..., K), contiguous, without the padding."""
    return blocks.flatten(-2)[..., :key_dim].contiguous()


def block_amax(blocks: Tensor) -> Tensor:
    """(..., blocks, 16) -> (..., blocks, 1); NaN wins."""
    return blocks.abs().amax(-1, keepdim=True)


def per_block(global_value: Tensor, dims: int) -> Tensor:
    """The global value of an x with ``dims`` dimensions, shaped to broadcast against its blocks."""
    return global_value.reshape(global_value.shape + (1,) * (dims + 1 - global_value.dim()))


def to_e4m3(x: Tensor) -> Tensor:
    """float32 -> the nearest number of E4M3, saturated; NaN stays."""
    return fused.decode(fused.encode(x, SCALE_ELEMENT, None, EXACT_BITS), SCALE_ELEMENT)


def scale_bytes(scales: Tensor) -> Tensor:
    """Numbers that E4M3 holds (..., blocks, 1) -> their bytes (..., blocks) without a sign bit."""
    return fused.encode(scales[..., 0], SCALE_ELEMENT, None, EXACT_BITS).bitwise_and_(
        SCALE_ELEMENT.sign_code - 1
    )


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b with one rounding on every device, one of them a tensor.

    For a Python number torch multiplies by the reciprocal: number / tensor everywhere, tensor / number on CUDA.
    """
    if isinstance(a, Tensor):
        return a / (b if isinstance(b, Tensor) else a.new_full((), b))
    assert isinstance(b, Tensor)
    return b.new_full((), a) / b
