"""Encoding and decoding of unscaled elements: kernels and launchers, the twins of ``quantlab.formats.fused``."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats.fused import code_dtype
from quantlab.formats.rounding import EXACT_BITS, Rounding
from quantlab.formats.table import Element, Integer
from quantlab.kernels import target
from quantlab.kernels.decode import element_value, widened
from quantlab.kernels.rounding import encode

TILE = 1024
"""Values of one program at a time.  The interpreter pays by the program, so it takes far more at once."""
INTERPRETED_TILE = 65536

CODES: tl.constexpr = tl.constexpr(0)
PACKED: tl.constexpr = tl.constexpr(1)
VALUES: tl.constexpr = tl.constexpr(2)
"""What an encoding kernel writes: codes, two codes a byte, or the float32 values that the codes decode to."""


@triton.jit
def encode_kernel(
    x,
    words,
    output,
    count,
    ELEMENT: tl.constexpr,
    ROUNDING: tl.constexpr,
    BITS: tl.constexpr,
    OUTPUT: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < count
    word = None
    if words is not None:
        word = tl.load(words + at, mask=mask, other=0)
    result = encode(widened(tl.load(x + at, mask=mask, other=0)), word, ELEMENT, ROUNDING, BITS)
    if OUTPUT == VALUES:
        result = element_value(result, ELEMENT)
    tl.store(output + at, result, mask=mask)


@triton.jit
def decode_kernel(codes, output, count, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < count
    tl.store(output + at, element_value(tl.load(codes + at, mask=mask, other=0), ELEMENT), mask=mask)


def encode_elements(
    x: Tensor,
    element: Element | Integer,
    rounding: Rounding = Rounding.NEAREST,
    words: Tensor | None = None,
    bits: int = EXACT_BITS,
) -> Tensor:
    """``quantlab.formats.fused.encode``: codes of x, float32, float16 or bfloat16, in their storage dtype."""
    codes = torch.empty(x.shape, dtype=code_dtype(element), device=x.device)
    _encode(x, element, rounding, words, bits, codes, CODES)
    return codes


def round_elements(
    x: Tensor,
    element: Element | Integer,
    rounding: Rounding = Rounding.NEAREST,
    words: Tensor | None = None,
    bits: int = EXACT_BITS,
) -> Tensor:
    """``quantlab.formats.fused.round_values``: float32 values of the codes of x."""
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _encode(x, element, rounding, words, bits, values, VALUES)
    return values


def decode_elements(codes: Tensor, element: Element | Integer) -> Tensor:
    """``quantlab.formats.fused.decode``: float32 values of codes."""
    output = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    count = codes.numel()
    if count:
        meta = decode_constants(element)
        launch(decode_kernel, count, meta["TILE"], codes, output, count, **meta)
    return output


def _encode(
    x: Tensor,
    element: Element | Integer,
    rounding: Rounding,
    words: Tensor | None,
    bits: int,
    output: Tensor,
    form: tl.constexpr,
) -> None:
    count = x.numel()
    if count:
        meta = encode_constants(element, rounding, bits, form)
        launch(encode_kernel, count, meta["TILE"], x, words, output, count, **meta)


def encode_constants(
    element: Element | Integer, rounding: Rounding, bits: int, form: tl.constexpr
) -> dict[str, Any]:
    """Compile-time arguments of ``encode_kernel``."""
    constants = {"ELEMENT": element, "ROUNDING": rounding.value, "BITS": bits}
    return constants | {"OUTPUT": form.value, "TILE": tile_size()}


def decode_constants(element: Element | Integer) -> dict[str, Any]:
    """Compile-time arguments of ``decode_kernel``."""
    return {"ELEMENT": element, "TILE": tile_size()}


def launch(kernel: Any, count: int, tile: int, *arguments: Any, **meta: Any) -> None:
    """Run a kernel of programs that take ``tile`` of ``count`` things each."""
    kernel[(triton.cdiv(count, tile),)](*arguments, **meta, **target.LAUNCH_OPTIONS)


def tile_size() -> int:
    """Values of one program at a time."""
    return INTERPRETED_TILE if target.interpreting() else TILE
