"""A format as a value: quantize, dequantize, round, and what it stores."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import fused, rounding, scaling
from quantlab.formats.table import FORMATS, Element, FormatRow, Integer, Scaling

RESIDUAL_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
_PLAIN_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Encoded:
    """What is stored.  Absent parts are None.

    codes (..., K): uint8 bit patterns (one code a byte, unpacked, also for 4-bit elements), int8 integers,
    int16 bit patterns of 16-bit elements, or the float tensor itself for fp32 and fp64.
    scales (..., groups): uint8 E4M3 bytes (nvfp4) or float32.
    global_scale: float32; x.shape[:-2], x.shape[:-1] with granularity "row".
    residual (..., K): the error-feedback residual in its own dtype.
    """

    codes: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    residual: Tensor | None = None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Format:
    """A number format; make one with :func:`quantlab.formats.parse`.

    granularity: what shares one FP32 scale: "row" (a value row over the key dim), "block32", "matrix" (V, K),
    "none"; None if the format has no scale.  random_bits: None = all 32 of a word.
    """

    name: str
    granularity: str | None = None
    stochastic: bool = False
    random_bits: int | None = None
    error_feedback: str | None = None

    @cached_property
    def row(self) -> FormatRow:
        """The format's row in the table."""
        return FORMATS[self.name]

    @property
    def text(self) -> str:
        """Canonical text: defaults dropped; ``parse(fmt.text) == fmt``."""
        text = self.name
        if self.granularity is not None and self.granularity != self.row.granularities[0]:
            text += f":{self.granularity}"
        if self.stochastic:
            text += "+sr" + ("" if self.random_bits is None else str(self.random_bits))
        if self.error_feedback is not None:
            text += "+ef" + ("" if self.error_feedback == "fp16" else f".{self.error_feedback}")
        return text

    def __str__(self) -> str:
        return self.text

    @property
    def rounding(self) -> rounding.Rounding:
        """How an element is rounded; what overflow does is the element's own (table.py)."""
        return rounding.Rounding.STOCHASTIC if self.stochastic else rounding.Rounding.NEAREST

    @property
    def rounded(self) -> bool:
        """False if a float32 tensor passes through unchanged."""
        return self.name not in _PLAIN_DTYPES

    def quantize(
        self, x: Tensor, random_bits: Tensor | None = None, residual: Tensor | None = None
    ) -> Encoded:
        """Encode x, float32 or float64 (..., K), in new memory.

        random_bits: int64 like x, uint32 words, required iff stochastic (the low n bits are used).
        residual: the previous Encoded.residual, for error feedback only; zeros if absent.
        Elements are rounded once, straight from x; scaled formats first take x to float32 and compute in it,
        so equal numbers give equal bits whatever dtype holds them.  float64 input takes the readable path.
        Errors: InputError for a wrong dtype or shape, for NaN or Inf into int8 or nvfp4, for NaN into e2m1.
        """
        self._check(x, random_bits, residual)
        if not self.rounded:
            return Encoded(x.to(_PLAIN_DTYPES[self.name], copy=True))
        if self.row.scaling is Scaling.NONE:
            return Encoded(self._encode(x, random_bits))
        target = self._target(x, residual)
        scales, global_scale, divisors = self._scales(target)
        values, divisors = scaling.align(target, divisors, self.group(x.shape[-1]))
        quotient = (values / divisors).view(x.shape)
        codes = self._encode(quotient.to(x.dtype), random_bits)
        if self._is_nvfp4:
            scales = fused.encode(scales, scaling.SCALE_ELEMENT, None, rounding.EXACT_BITS)
        encoded = Encoded(codes, scales, global_scale)
        if self.error_feedback is None:
            return encoded
        error = target - self.dequantize(encoded)
        return Encoded(codes, scales, global_scale, self._store_residual(error))

    def dequantize(self, encoded: Encoded) -> Tensor:
        """float32 (..., K), float64 for fp64; the residual is not part of the value."""
        if not self.rounded:
            return encoded.codes
        values = fused.decode(encoded.codes, self.row.element)
        if encoded.scales is None:
            return values
        scales = encoded.scales
        if self._is_nvfp4:
            scales = fused.decode(scales, scaling.SCALE_ELEMENT)
            scales *= self._global_per_block(encoded.global_scale)
        aligned, scales = scaling.align(values, scales, self.group(values.shape[-1]))
        aligned *= scales
        return values

    def round(self, x: Tensor, random_bits: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """``dequantize(quantize(x, ...))``, by a faster path of equal bits where there is one.

        An unrounded format returns x itself if its dtype is the format's.
        """
        self._check(x, random_bits, residual)
        if not self.rounded:
            return x.to(_PLAIN_DTYPES[self.name])
        element, bits = self.row.element, self.random_bits or rounding.EXACT_BITS
        if not fused.serves(x, element):
            return self.dequantize(self.quantize(x, random_bits, residual))
        if self.row.scaling is Scaling.NONE:
            self._refuse_nan(x)
            return fused.round_values(x, element, random_bits, bits)
        target = self._target(x, residual)
        # A zero scale has divisor 1.0 and zero codes, so that multiplying by the divisor decodes it as well.
        values, divisors = scaling.align(target, self._scales(target)[2], self.group(x.shape[-1]))
        quotient = (values / divisors).view(x.shape)
        rounded = fused.round_values_(quotient, target, element, random_bits, bits)
        return rounded.view(values.shape).mul_(divisors).view(x.shape)

    def group(self, key_dim: int) -> int:
        """Values along the key dim that share a stored scale; 0 if there is none."""
        if self._is_nvfp4:
            return scaling.NVFP4_BLOCK
        return {None: 0, "row": key_dim, "block32": 32}[self.granularity]

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """All stored bits of a (..., V, K) state divided by its values.

        Codes (padded to whole bytes in every row), scales, global scale and residual.
        """
        if not isinstance(shape, (tuple, list)) or not shape or any(not _is_size(n) for n in shape):
            raise InputError("shape", shape, "positive sizes (..., V, K)")
        key_dim, rows = shape[-1], math.prod(shape[:-1])
        bits = 8 * math.ceil(key_dim * self.row.element.bits / 8)
        if self.row.scaling is not Scaling.NONE:
            scale_bits = scaling.SCALE_ELEMENT.bits if self._is_nvfp4 else 32
            bits += scale_bits * math.ceil(key_dim / self.group(key_dim))
        if self.error_feedback is not None:
            bits += key_dim * RESIDUAL_DTYPES[self.error_feedback].itemsize * 8
        total = bits * rows
        if self._is_nvfp4:
            total += 32 * {"matrix": math.prod(shape[:-2]), "row": rows}.get(self.granularity or "", 0)
        return total / (key_dim * rows)

    @property
    def _is_nvfp4(self) -> bool:
        return self.row.scaling is Scaling.NVFP4

    def _check(self, x: Tensor, random_bits: Tensor | None, residual: Tensor | None) -> None:
        for name, value in (("x", x), ("random_bits", random_bits), ("residual", residual)):
            if not isinstance(value, Tensor) and (name == "x" or value is not None):
                raise InputError(name, type(value).__name__, "a tensor")
        if x.dtype not in (torch.float32, torch.float64) or x.dim() == 0 or x.shape[-1] == 0:
            raise InputError("x", f"{x.dtype} {tuple(x.shape)}", "float32 or float64 of shape (..., K)")
        if (random_bits is not None) != self.stochastic:
            given = "a tensor" if random_bits is not None else None
            raise InputError(
                "random_bits", given, f"{'a tensor' if self.stochastic else None} for {self.text}"
            )
        if random_bits is not None and (random_bits.dtype != torch.int64 or random_bits.shape != x.shape):
            value = f"{random_bits.dtype} {tuple(random_bits.shape)}"
            raise InputError("random_bits", value, f"int64 of shape {tuple(x.shape)}")
        if residual is not None and (self.error_feedback is None or residual.shape != x.shape):
            expected = None if self.error_feedback is None else f"shape {tuple(x.shape)}"
            raise InputError("residual", f"a tensor {tuple(residual.shape)}", f"{expected} for {self.text}")
        if residual is not None and not residual.is_floating_point():
            raise InputError("residual", str(residual.dtype), f"a float dtype for {self.text}")

    def _refuse_nan(self, x: Tensor) -> None:
        element = self.row.element
        if isinstance(element, Element) and element.nan_code is None and fused.has_nan(x):
            raise InputError("x", "NaN", f"numbers: {self.text} has no code for NaN")

    def _encode(self, x: Tensor, words: Tensor | None) -> Tensor:
        """Codes in their storage dtype."""
        element, bits = self.row.element, self.random_bits or rounding.EXACT_BITS
        self._refuse_nan(x)
        if fused.serves(x, element):
            return fused.encode(x, element, words, bits)
        if isinstance(element, Integer):
            return rounding.encode_integer(x, element, words, bits).to(torch.int8)
        codes = rounding.encode_element(x, element, words, bits)
        return codes.to(torch.uint8 if element.bits <= 8 else torch.int16)

    def _target(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What a scaled format stores: x plus the error left by the previous store, float32."""
        x = x.to(torch.float32)
        return x if residual is None else x + residual.to(torch.float32)

    def _scales(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scales (float32 values), global scale, and the float32 divisor of every group (..., groups)."""
        amax = scaling.group_amax(x, self.group(x.shape[-1]))
        if amax.numel() and not math.isfinite(amax.amax().item()):
            if self.row.element.name not in ("e4m3", "e5m2"):
                raise InputError(
                    "x", "NaN or Inf", f"finite values in float32, residual included, for {self.text}"
                )
            # FP8 keeps a NaN in its place and saturates Inf; neither may spoil the scale of its neighbours.
            largest = torch.finfo(torch.float32).max
            x = x.nan_to_num(nan=0.0, posinf=largest, neginf=-largest)
            amax = scaling.group_amax(x, self.group(x.shape[-1]))
        if not self._is_nvfp4:
            scales = scaling.float32_scales(amax, self.row.element.max)
            return scales, None, scales
        global_scale = None
        if self.granularity != "none":
            shared = (-1,) if self.granularity == "row" or x.dim() == 1 else (-2, -1)
            # A maximum over no rows has no value: zero.
            empty = amax.new_zeros(amax.shape[: shared[0]])
            global_scale = scaling.nvfp4_global_scale(amax.amax(shared) if amax.numel() else empty)
        per_block = self._global_per_block(global_scale)
        scales = scaling.nvfp4_block_scales(amax, per_block)
        return scales, global_scale, scaling.divisors(scales * per_block)

    def _global_per_block(self, global_scale: Tensor | None) -> Tensor | float:
        """The global scale shaped to multiply the block scales (..., V, blocks)."""
        if global_scale is None:
            return 1.0
        if self.granularity == "row" or global_scale.dim() == 0:
            return global_scale[..., None]
        return global_scale[..., None, None]

    def _store_residual(self, error: Tensor) -> Tensor:
        """Saturated: an fp16 residual beyond 65504 would turn into Inf and poison every later store."""
        dtype = RESIDUAL_DTYPES[self.error_feedback or "fp16"]
        largest = torch.finfo(dtype).max
        return error.clamp(-largest, largest).to(dtype)
