"""A format as a value: quantize, dequantize, round, and what it stores."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import fused, scaling
from quantlab.formats.rounding import EXACT_BITS, decode_element, encode_element, encode_integer
from quantlab.formats.table import FORMATS, Element, FormatRow, Integer, Scaling

RESIDUAL_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
_PLAIN_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_CODE_DTYPES = {8: torch.uint8, 16: torch.int16}


@dataclass(frozen=True)
class Encoded:
    """What is stored.  Absent parts are None.

    codes (..., K): uint8 bit patterns (one code per byte, unpacked, also for 4-bit elements), int8 integers,
    int16 bit patterns of 16-bit elements, or the float tensor itself for fp32 and fp64.
    scales (..., groups): uint8 E4M3 bytes (nvfp4) or float32.  global_scale: float32, the shape of what shares it.
    residual (..., K): the error-feedback residual in its own dtype.
    """

    codes: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """A number format; make one with :func:`quantlab.formats.parse`.

    granularity: what shares the format's FP32 scale: "row" (one value row over the key dim), "block32", "matrix"
    (V, K), "none"; None if the format has no FP32 scale.  random_bits: None = all 32 of a word.
    """

    name: str
    granularity: str | None = None
    stochastic: bool = False
    random_bits: int | None = None
    error_feedback: str | None = None

    @cached_property
    def row(self) -> FormatRow:
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
    def rounded(self) -> bool:
        """False if a float32 tensor passes through unchanged."""
        return self.name not in _PLAIN_DTYPES

    def quantize(
        self, x: Tensor, random_bits: Tensor | None = None, residual: Tensor | None = None
    ) -> Encoded:
        """Encode x, float32 or float64 (..., K).

        random_bits: int64 like x, uint32 words, required iff stochastic (the low n bits are used).  residual: the
        previous Encoded.residual, error feedback only, zeros if absent.  Scaled formats compute in float32, so
        equal numbers give equal bits whatever dtype holds them.  Errors: InputError for a wrong dtype or shape, for
        NaN or Inf into an integer or nvfp4, and for NaN into an element without one.
        """
        self._check(x, random_bits, residual)
        if not self.rounded:
            return Encoded(x.to(_PLAIN_DTYPES[self.name], copy=True))
        if self.row.scaling is Scaling.NONE:
            return Encoded(self._narrow(self._encode(x, random_bits)))
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
        encoded = (
            self._quantize_nvfp4(x, random_bits) if self._is_nvfp4 else self._quantize_scaled(x, random_bits)
        )
        if self.error_feedback is None:
            return encoded
        error = x - self.dequantize(encoded)
        return Encoded(encoded.codes, encoded.scales, encoded.global_scale, self._store_residual(error))

    def dequantize(self, encoded: Encoded) -> Tensor:
        """float32 (..., K), float64 for fp64; the residual is not part of the value."""
        if not self.rounded:
            return encoded.codes
        values = self._decode(encoded.codes)
        if encoded.scales is None:
            return values
        scales = encoded.scales
        if self._is_nvfp4:
            scales = scaling.nvfp4_decoded_scales(scales, self._global_per_block(encoded.global_scale))
        return values * scaling.expand_groups(scales, self.group(values.shape[-1]), values.shape[-1])

    def round(self, x: Tensor, random_bits: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """``dequantize(quantize(x, ...))``, by a faster path of equal bits where there is one.

        An unrounded format returns x itself if its dtype is the format's.
        """
        self._check(x, random_bits, residual)
        if not self.rounded:
            return x.to(_PLAIN_DTYPES[self.name])
        fast = fused.round_like(self, x, random_bits, residual)
        return fast if fast is not None else self.dequantize(self.quantize(x, random_bits, residual))

    def group(self, key_dim: int) -> int:
        """Values along the key dim that share a stored scale; 0 if there is none."""
        if self._is_nvfp4:
            return scaling.NVFP4_BLOCK
        return {None: 0, "row": key_dim, "block32": 32}[self.granularity]

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """All stored bits of a (..., V, K) state divided by its values: codes padded to whole bytes per row, scales,
        global scale, residual."""
        if not shape or min(shape) < 1:
            raise InputError("shape", tuple(shape), "positive sizes (..., V, K)")
        key_dim, rows = shape[-1], math.prod(shape[:-1])
        bits = 8 * math.ceil(key_dim * self.row.element.bits / 8)
        if self.row.scaling is not Scaling.NONE:
            scale_bits = scaling.SCALE_ELEMENT.bits if self._is_nvfp4 else 32
            bits += scale_bits * math.ceil(key_dim / self.group(key_dim))
        if self.error_feedback is not None:
            bits += key_dim * RESIDUAL_DTYPES[self.error_feedback].itemsize * 8
        total = bits * rows
        if self._is_nvfp4:
            total += (
                32 * {"matrix": math.prod(shape[:-2]), "row": rows, "none": 0}[self.granularity or "none"]
            )
        return total / (key_dim * rows)

    @property
    def _is_nvfp4(self) -> bool:
        return self.row.scaling is Scaling.NVFP4

    def _check(self, x: Tensor, random_bits: Tensor | None, residual: Tensor | None) -> None:
        if x.dtype not in (torch.float32, torch.float64) or x.dim() == 0 or x.shape[-1] == 0:
            raise InputError("x", f"{x.dtype} {tuple(x.shape)}", "float32 or float64 of shape (..., K)")
        if (random_bits is not None) != self.stochastic:
            given = "a tensor" if random_bits is not None else None
            raise InputError(
                "random_bits", given, f"{'a tensor' if self.stochastic else 'None'} for {self.text}"
            )
        if random_bits is not None and (random_bits.dtype != torch.int64 or random_bits.shape != x.shape):
            value = f"{random_bits.dtype} {tuple(random_bits.shape)}"
            raise InputError("random_bits", value, f"int64 of shape {tuple(x.shape)}")
        if residual is not None and (self.error_feedback is None or residual.shape != x.shape):
            expected = "None" if self.error_feedback is None else f"shape {tuple(x.shape)}"
            raise InputError("residual", f"a tensor {tuple(residual.shape)}", f"{expected} for {self.text}")

    def _encode(self, x: Tensor, words: Tensor | None) -> Tensor:
        element, bits = self.row.element, self.random_bits or EXACT_BITS
        if isinstance(element, Integer):
            return encode_integer(x, element, words, bits)
        if element.nan_code is None:
            refuse_nonfinite(self.text, torch.where(x.isinf(), 0, x))
        return encode_element(x, element, words, bits)

    def _narrow(self, codes: Tensor) -> Tensor:
        if isinstance(self.row.element, Integer):
            return codes.to(torch.int8)
        return codes.to(_CODE_DTYPES[8 if self.row.element.bits <= 8 else 16])

    def _decode(self, codes: Tensor) -> Tensor:
        element = self.row.element
        return codes.to(torch.float32) if isinstance(element, Integer) else decode_element(codes, element)

    def _quantize_scaled(self, x: Tensor, words: Tensor | None) -> Encoded:
        element, group = self.row.element, self.group(x.shape[-1])
        if isinstance(element, Element):  # FP8 keeps NaN in its place and saturates Inf
            largest = torch.finfo(torch.float32).max
            amax = scaling.group_amax(x.nan_to_num(nan=0.0, posinf=largest, neginf=largest), group)
        else:
            amax = scaling.group_amax(x, group)
            refuse_nonfinite(self.text, amax)
        scales = scaling.float32_scales(amax, element.max)
        quotient = x / scaling.expand_groups(scales, group, x.shape[-1])
        return Encoded(self._narrow(self._encode(quotient, words)), scales)

    def _quantize_nvfp4(self, x: Tensor, words: Tensor | None) -> Encoded:
        block_amax = scaling.group_amax(x, scaling.NVFP4_BLOCK)
        refuse_nonfinite(self.text, block_amax)
        global_scale = None
        if self.granularity != "none":
            dims = (-1,) if self.granularity == "row" or x.dim() == 1 else (-2, -1)
            global_scale = scaling.nvfp4_global_scale(block_amax.amax(dims))
        per_block = self._global_per_block(global_scale)
        scales = scaling.nvfp4_block_scales(block_amax, per_block)
        divisors = scaling.divisor(scaling.nvfp4_decoded_scales(scales, per_block))
        quotient = x / scaling.expand_groups(divisors, scaling.NVFP4_BLOCK, x.shape[-1])
        return Encoded(self._narrow(self._encode(quotient, words)), scales, global_scale)

    def _global_per_block(self, global_scale: Tensor | None) -> Tensor | float:
        """The global scale shaped to multiply the block scales (..., V, blocks)."""
        if global_scale is None:
            return 1.0
        return (
            global_scale[..., None]
            if self.granularity == "row" or not global_scale.dim()
            else global_scale[..., None, None]
        )

    def _store_residual(self, error: Tensor) -> Tensor:
        """Saturated: an fp16 residual beyond 65504 would turn into Inf and poison every later store."""
        dtype = RESIDUAL_DTYPES[self.error_feedback or "fp16"]
        largest = torch.finfo(dtype).max
        return error.clamp(-largest, largest).to(dtype)


def refuse_nonfinite(text: str, amax: Tensor) -> None:
    """InputError if the values (or their magnitudes' maxima) hold NaN or Inf."""
    if not bool(torch.isfinite(amax).all()):
        raise InputError("x", "NaN or Inf", f"finite values: {text} cannot encode it")
