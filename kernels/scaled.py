"""Encoding and decoding of values that share scales: kernels and launchers.

Values that share a scale are a span of memory, whatever the granularity: a part of a value row, a row, some rows or
a whole matrix.  A program takes some spans and walks each twice, once for the largest magnitude and once to encode.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats import Format
from quantlab.formats.fused import code_dtype
from quantlab.formats.rounding import EXACT_BITS
from quantlab.formats.storage import Encoded, Packed
from quantlab.formats.table import Scaling
from quantlab.kernels.decode import element_value, widened
from quantlab.kernels.elements import CODES, PACKED, VALUES, launch, tile_size
from quantlab.kernels.rounding import encode
from quantlab.kernels.scales import float_scale, global_options, groups_of, recipe_of


@triton.jit
def span_amax(x, start, size, SPANS: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """Largest magnitude of ``size`` values from ``start`` on (SPANS,), at most LENGTH; a NaN does not count."""
    largest = tl.zeros((SPANS,), dtype=tl.int32)
    for offset in range(0, LENGTH, CHUNK):
        column = offset + tl.arange(0, CHUNK)
        inside = column[None, :] < size[:, None]
        values = widened(tl.load(x + start[:, None] + column[None, :], mask=inside, other=0))
        # Magnitudes order like their bit patterns.
        magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        magnitude = tl.where(magnitude > 0x7F800000, 0, magnitude)
        largest = tl.maximum(largest, tl.max(magnitude, axis=1))
    return largest.to(tl.float32, bitcast=True)


@triton.jit
def global_scale_kernel(
    x, output, count, LENGTH: tl.constexpr, SPANS: tl.constexpr, CHUNK: tl.constexpr, OPTIONS: tl.constexpr
):
    span = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    mask = span < count
    amax = span_amax(x, span * LENGTH, tl.where(mask, LENGTH, 0), SPANS, LENGTH, CHUNK)
    scale, _ = float_scale(amax, 1.0, OPTIONS)
    tl.store(output + span, scale, mask=mask)


@triton.jit
def scaled_encode_kernel(
    x,
    words,
    output,
    scales,
    global_scale,
    count,
    LINE: tl.constexpr,
    LENGTH: tl.constexpr,
    GLOBAL_SPANS: tl.constexpr,
    LINE_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    ROUNDING: tl.constexpr,
    BITS: tl.constexpr,
    DERIVE: tl.constexpr,
    QUOTIENT: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PRODUCT: tl.constexpr,
    OPTIONS: tl.constexpr,
    OUTPUT: tl.constexpr,
    SPANS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    span = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    mask = span < count
    PER_LINE: tl.constexpr = (LINE + LENGTH - 1) // LENGTH
    line, place = span // PER_LINE, span % PER_LINE
    start = line * LINE + place * LENGTH
    size = tl.where(mask, tl.minimum(LINE - place * LENGTH, LENGTH), 0)

    amax = span_amax(x, start, size, SPANS, LENGTH, CHUNK)
    shared = 1.0
    if global_scale is not None:
        shared = tl.load(global_scale + span // GLOBAL_SPANS, mask=mask, other=1.0)
    stored, operand = DERIVE(amax, shared, OPTIONS)
    if OUTPUT == VALUES:
        multiplier = MULTIPLIER(stored, shared, OPTIONS)
    else:
        tl.store(scales + span, stored, mask=mask)

    for offset in range(0, LENGTH, CHUNK):
        column = offset + tl.arange(0, CHUNK)
        inside = column[None, :] < size[:, None]
        at = start[:, None] + column[None, :]
        values = widened(tl.load(x + at, mask=inside, other=0))
        word = None
        if words is not None:
            word = tl.load(words + at, mask=inside, other=0)
        codes = encode(QUOTIENT(values, operand[:, None]), word, ELEMENT, ROUNDING, BITS)
        if OUTPUT == CODES:
            tl.store(output + at, codes, mask=inside)
        elif OUTPUT == PACKED:
            low, high = tl.split(tl.reshape(codes & 0xF, (SPANS, CHUNK // 2, 2)))
            byte = (place * LENGTH)[:, None] // 2 + offset // 2 + tl.arange(0, CHUNK // 2)[None, :]
            # Behind the row's last value its bytes hold zero codes.
            own = mask[:, None] & (byte < LINE_BYTES) & (byte < ((place + 1) * LENGTH + 1)[:, None] // 2)
            tl.store(output + line[:, None] * LINE_BYTES + byte, low | (high << 4), mask=own)
        else:
            result = PRODUCT(element_value(codes, ELEMENT), multiplier[:, None])
            tl.store(output + at, result, mask=inside)


@triton.jit
def scaled_decode_kernel(
    codes,
    scales,
    global_scale,
    output,
    count,
    LINE: tl.constexpr,
    LENGTH: tl.constexpr,
    GLOBAL_SPANS: tl.constexpr,
    ELEMENT: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PRODUCT: tl.constexpr,
    OPTIONS: tl.constexpr,
    SPANS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    span = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    mask = span < count
    PER_LINE: tl.constexpr = (LINE + LENGTH - 1) // LENGTH
    line, place = span // PER_LINE, span % PER_LINE
    start = line * LINE + place * LENGTH
    size = tl.where(mask, tl.minimum(LINE - place * LENGTH, LENGTH), 0)

    shared = 1.0
    if global_scale is not None:
        shared = tl.load(global_scale + span // GLOBAL_SPANS, mask=mask, other=1.0)
    multiplier = MULTIPLIER(tl.load(scales + span, mask=mask, other=0), shared, OPTIONS)
    for offset in range(0, LENGTH, CHUNK):
        column = offset + tl.arange(0, CHUNK)
        inside = column[None, :] < size[:, None]
        at = start[:, None] + column[None, :]
        values = element_value(tl.load(codes + at, mask=inside, other=0), ELEMENT)
        tl.store(output + at, PRODUCT(values, multiplier[:, None]), mask=inside)


@dataclass(frozen=True)
class Spans:
    """Memory seen as lines, and each line as spans that share a scale, of which the last may be short."""

    line: int
    length: int
    count: int

    @property
    def per_line(self) -> int:
        return -(-self.line // self.length)


@dataclass(frozen=True)
class ScaleLayout:
    """Shape and dtype of the scales, and the shape of the float32 global scale, None without one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    global_shape: tuple[int, ...] | None


def encode_scaled(fmt: Format, x: Tensor, random_bits: Tensor | None) -> Encoded:
    """Codes and scales of x, which is not empty."""
    codes = torch.empty(x.shape, dtype=code_dtype(fmt.element), device=x.device)
    scales, global_scale = _encode(fmt, x, random_bits, codes, CODES)
    return Encoded(codes, scales, global_scale)


def encode_packed(fmt: Format, x: Tensor, random_bits: Tensor | None) -> Packed:
    """The same as two 4-bit codes a byte, for scales within a value row."""
    key_dim = x.shape[-1]
    codes = torch.empty((*x.shape[:-1], _row_bytes(fmt, key_dim)), dtype=torch.uint8, device=x.device)
    scales, global_scale = _encode(fmt, x, random_bits, codes, PACKED)
    return Packed(codes, key_dim, scales, global_scale)


def round_scaled(fmt: Format, x: Tensor, random_bits: Tensor | None) -> Tensor:
    """The values of ``encode_scaled``."""
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _encode(fmt, x, random_bits, values, VALUES)
    return values


def decode_scaled(fmt: Format, encoded: Encoded) -> Tensor:
    """float32 values of codes and scales that fit ``scale_layout``."""
    codes = encoded.codes
    output = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if output.numel():
        spans, meta = spans_of(fmt, codes.shape), decode_constants(fmt, codes.shape)
        arguments = codes, encoded.scales, encoded.global_scale, output, spans.count
        launch(scaled_decode_kernel, spans.count, meta["SPANS"], *arguments, **meta)
    return output


def _encode(
    fmt: Format, x: Tensor, words: Tensor | None, output: Tensor, form: tl.constexpr
) -> tuple[Tensor | None, Tensor | None]:
    """Fill ``output``; the scales, None beside values, and the global scale, None without one."""
    layout, spans = scale_layout(fmt, x.shape), spans_of(fmt, x.shape)
    scales = global_scale = None
    if form is not VALUES:
        scales = torch.empty(layout.shape, dtype=layout.dtype, device=x.device)
    if layout.global_shape is not None:
        global_scale = torch.empty(layout.global_shape, dtype=torch.float32, device=x.device)
        length = x.numel() // global_scale.numel()
        shared = Spans(length, length, global_scale.numel())
        meta = global_scale_constants(shared)
        launch(global_scale_kernel, shared.count, meta["SPANS"], x, global_scale, shared.count, **meta)
    meta = encode_constants(fmt, x.shape, form)
    arguments = x, words, output, scales, global_scale, spans.count
    launch(scaled_encode_kernel, spans.count, meta["SPANS"], *arguments, **meta)
    return scales, global_scale


def encode_constants(fmt: Format, shape: torch.Size, form: tl.constexpr) -> dict[str, Any]:
    """Compile-time arguments of ``scaled_encode_kernel``."""
    packed = _row_bytes(fmt, shape[-1]) if form is PACKED else 0
    element = {"ELEMENT": fmt.element, "ROUNDING": fmt.rounding.value, "BITS": fmt.random_bits or EXACT_BITS}
    return _constants(fmt, shape) | element | {"OUTPUT": form.value, "LINE_BYTES": packed}


def decode_constants(fmt: Format, shape: torch.Size) -> dict[str, Any]:
    """Compile-time arguments of ``scaled_decode_kernel``."""
    constants = _constants(fmt, shape)
    del constants["DERIVE"], constants["QUOTIENT"]
    return constants | {"ELEMENT": fmt.element}


def global_scale_constants(spans: Spans) -> dict[str, Any]:
    """Compile-time arguments of ``global_scale_kernel``."""
    return _span_constants(spans) | {"OPTIONS": global_options()}


def _constants(fmt: Format, shape: torch.Size) -> dict[str, Any]:
    spans = spans_of(fmt, shape)
    sizes = {"LINE": spans.line, "GLOBAL_SPANS": _global_spans(fmt, shape, spans)}
    recipe = {name.upper(): part for name, part in recipe_of(fmt)._asdict().items()}
    return sizes | _span_constants(spans) | recipe


def _span_constants(spans: Spans) -> dict[str, Any]:
    chunk = min(max(2, triton.next_power_of_2(spans.length)), tile_size())
    count = min(tile_size() // chunk, triton.next_power_of_2(spans.count))
    return {"LENGTH": spans.length, "CHUNK": chunk, "SPANS": count}


def spans_of(fmt: Format, shape: torch.Size) -> Spans:
    """How values of ``shape`` share stored scales."""
    groups = groups_of(fmt)
    key_dim, rows, values = shape[-1], shape[-2] if len(shape) > 1 else 1, shape.numel()
    if groups.rows == 1:
        length = groups.columns or key_dim
        return Spans(key_dim, length, values // key_dim * -(-key_dim // length))
    line = rows * key_dim
    length = min(line, (groups.rows or rows) * key_dim)
    return Spans(line, length, values // line * -(-line // length))


def _global_spans(fmt: Format, shape: torch.Size, spans: Spans) -> int:
    """Block scales under one global scale."""
    rows = shape[-2] if len(shape) > 1 else 1
    counts = {"row": spans.per_line, "matrix": rows * spans.per_line, "tensor": spans.count}
    return counts.get(fmt.granularity or "", 1) if fmt.row.scaling is Scaling.NVFP4 else 1


def scale_layout(fmt: Format, shape: torch.Size) -> ScaleLayout:
    """Of the scales of values of ``shape``."""
    dtype = torch.float32 if fmt.row.scaling is Scaling.FLOAT32 else torch.uint8
    shared = None
    if fmt.row.scaling is Scaling.NVFP4:
        shared = {"matrix": shape[:-2], "row": shape[:-1], "tensor": torch.Size()}.get(fmt.granularity or "")
    return ScaleLayout(groups_of(fmt).count(shape), dtype, shared)


def _row_bytes(fmt: Format, key_dim: int) -> int:
    padded = -(-key_dim // fmt.row.block) * fmt.row.block
    return -(-padded * fmt.element.bits // 8)
