"""A format as a value: quantize, dequantize, round, and what it stores."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import fused, rounding, storage
from quantlab.formats.components import Component, component_of
from quantlab.formats.hadamard import largest_input, rotate
from quantlab.formats.key_scales import divide_by_scales, key_scales, times_scales
from quantlab.formats.nvfp4_arithmetic import NO_CODE
from quantlab.formats.recipe import DividingRecipe, Recipe, Scales
from quantlab.formats.recipes import recipe_of
from quantlab.formats.rounding import Rounding
from quantlab.formats.storage import RESIDUAL_DTYPES, Encoded, Packed
from quantlab.formats.table import FORMATS, Element, FormatRow, Integer, Overflow, Scaling

SPECIALS = ("raise", "hardware")
_PLAIN_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_INPUT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Format:
    """A number format; make one with :func:`quantlab.formats.parse`.

    granularity: what shares one FP32 scale: "row" (a value row over the key dim), "block32", "tile32" (32 value
    rows), "head" or "matrix" (V, K), "tensor", "none"; None if the format has no scale.
    profile: the library whose arithmetic is reproduced bit for bit; None for the canonical recipe.
    scale, floor, four_over_six: how block scales are chosen; None for the default.
    overflow: of an unscaled element, None for its own.  random_bits: None = all 32 of a word.
    key_scale: whether every key column has a power of two of its own above the other scales (``key_scales``).
    component: "mean" or "rank1" to "rank8", what is stored beside the codes (``components``); None for nothing.  It
    is taken out first and added last: a rotation, scales and rounding, stochastic or not, are those of the rest.
    hadamard: seed of the rotation along the key dim, None for no rotation.
    error_feedback: text of the residual's format, None for no residual.
    """

    name: str
    granularity: str | None = None
    profile: str | None = None
    scale: str | None = None
    floor: str | None = None
    four_over_six: str | None = None
    overflow: Overflow | None = None
    key_scale: bool = False
    component: str | None = None
    hadamard: int | None = None
    rounding: Rounding = Rounding.NEAREST
    random_bits: int | None = None
    error_feedback: str | None = None

    @cached_property
    def row(self) -> FormatRow:
        """The format's row in the table."""
        return FORMATS[self.name]

    @cached_property
    def element(self) -> Element | Integer:
        """The element with the format's overflow."""
        if self.overflow is None:
            return self.row.element
        return dataclasses.replace(self.row.element, overflow=self.overflow)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The arithmetic of the scales; None for an unscaled element."""
        return recipe_of(self)

    @cached_property
    def residual_format(self) -> "Format | None":
        """What stores the residual of error feedback, where that is more than a dtype of torch."""
        if self.error_feedback is None or self.error_feedback in RESIDUAL_DTYPES:
            return None
        name, _, granularity = self.error_feedback.partition(":")
        return Format(name, granularity or next(iter(FORMATS[name].granularities), None))

    @property
    def text(self) -> str:
        """Canonical text: defaults dropped; ``parse(fmt.text) == fmt``."""
        text = self.name
        if self.granularity is not None and self.granularity != self.row.granularities[0]:
            text += f":{self.granularity}"
        text += "" if self.profile is None else f"+as.{self.profile}"
        text += "" if self.scale is None else f"+scale.{self.scale}"
        text += "" if self.floor is None else f"+floor.{self.floor}"
        text += "" if self.four_over_six is None else f"+4over6{self.four_over_six}"
        text += "" if self.overflow is None else f"+overflow.{self.overflow.value}"
        text += "+keyscale" if self.key_scale else ""
        text += "" if self.component is None else f"+{self.component}"
        if self.hadamard is not None:
            text += "+hadamard" + (f".{self.hadamard}" if self.hadamard else "")
        if self.rounding is Rounding.TOWARD_ZERO:
            text += "+rz"
        if self.stochastic:
            text += "+sr" + ("" if self.random_bits is None else str(self.random_bits))
        if self.error_feedback is not None:
            text += "+ef" + ("" if self.error_feedback == "fp16" else f".{self.error_feedback}")
        return text

    def __str__(self) -> str:
        return self.text

    @property
    def stochastic(self) -> bool:
        """Whether ``quantize`` needs random bits."""
        return self.rounding is Rounding.STOCHASTIC

    @property
    def rounded(self) -> bool:
        """False if a float32 tensor passes through unchanged."""
        return self.name not in _PLAIN_DTYPES

    def quantize(
        self,
        x: Tensor,
        random_bits: Tensor | None = None,
        residual: "Tensor | Encoded | None" = None,
        specials: str = "raise",
    ) -> Encoded:
        """Encode x (..., K) of float32, float64, float16 or bfloat16, in new memory.

        random_bits: int64 like x, uint32 words, required iff stochastic (the low n bits are used).
        residual: the previous Encoded.residual, for error feedback only; zeros if absent.
        specials: "raise" refuses a NaN or Inf that the format has no code for; "hardware" stores what the
        conversions of GPUs make of it: Inf saturates, NaN becomes the largest number, 0 for integers; where
        scales are derived a NaN does not count, and it leaves no residual; a rotation spreads it over its block.
        A library profile then does what the library does.
        Nothing rounds twice: an element is rounded once, straight from x, and the float32 arithmetic of a
        scaled format starts from x itself, so that equal numbers give equal bits whatever dtype holds them.
        Except: a rotation and what a component leaves are float64 for float64; profiles and +4over6 round float64 to
        float32 first.  float64 input takes the readable path.
        The residual of error feedback is what the decoded sum of component and codes leaves of x + residual; the
        component is that of x alone.
        Errors: InputError for a wrong dtype or shape, and for NaN and Inf as above.
        """
        admitted = self.admit(x, random_bits, residual, specials)
        if not self.rounded:
            return Encoded(admitted.to(_PLAIN_DTYPES[self.name], copy=True))
        recipe = self.recipe
        if recipe is None:
            return Encoded(self._cast(admitted, random_bits, specials))
        aim, component = self._target(admitted, residual), self._component(admitted)
        common = None if component is None else self._rotated(component, aim)
        target = aim if common is None else aim - common
        by_key = key_scales(target) if self.key_scale else None
        target = target if by_key is None else divide_by_scales(target, by_key)
        if x.dtype == torch.bfloat16 and target is admitted and self.profile is not None:
            target = x  # one library computes in the dtype of its input
        codes, scales = recipe.encode(target, lambda quotient: self._cast(quotient, random_bits, specials))
        encoded = Encoded(codes, scales.stored, scales.global_scale, key_scales=by_key)
        if component is not None:
            encoded = dataclasses.replace(encoded, key_factor=component.key, value_factor=component.value)
        if self.error_feedback is None:
            return encoded
        decoded = self._decode(encoded)
        error = aim - (decoded if common is None else common + decoded)
        error = error.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        return dataclasses.replace(encoded, residual=self._store_residual(error))

    def dequantize(self, encoded: Encoded) -> Tensor:
        """float32 (..., K), float64 for fp64; the residual is not part of the value.

        Errors: InputError for codes and scales that are none of this format's.
        """
        storage.check_encoded(self, encoded, residual=False)
        if not self.rounded:
            return encoded.codes
        values = rotate(self._decode(encoded), self.hadamard, inverse=True)
        if encoded.key_factor is None:
            return values
        return values + Component(encoded.key_factor, encoded.value_factor).decode()

    def round(
        self,
        x: Tensor,
        random_bits: Tensor | None = None,
        residual: "Tensor | Encoded | None" = None,
        specials: str = "raise",
    ) -> Tensor:
        """``dequantize(quantize(x, ...))``, by a faster path of equal bits where there is one.

        An unrounded format returns x itself if its dtype is the format's.
        """
        admitted = self.admit(x, random_bits, residual, specials)
        if not self.rounded:
            return admitted.to(_PLAIN_DTYPES[self.name])
        recipe, element, bits = self.recipe, self.element, self.random_bits or rounding.EXACT_BITS
        plain = fused.serves(admitted, element) and specials == "raise"
        if not plain or not (recipe is None or isinstance(recipe, DividingRecipe)):
            return self.dequantize(self.quantize(x, random_bits, residual, specials))
        if recipe is None:
            return fused.round_values(admitted, element, self.rounding, random_bits, bits)
        target, component = self._target(admitted, residual), self._component(admitted)
        if component is not None:
            target = target - self._rotated(component, target)
        by_key = key_scales(target) if self.key_scale else None
        target = target if by_key is None else divide_by_scales(target, by_key)
        scales = recipe.scales(target)
        quotient = recipe.quotient(target, scales)
        values = fused.round_values_(quotient, target, element, self.rounding, random_bits, bits)
        values = recipe.decode(values, scales)
        values = values if by_key is None else times_scales(values, by_key)
        values = rotate(values, self.hadamard, inverse=True)
        return values if component is None else values + component.decode()

    def residual_values(self, residual: "Tensor | Encoded") -> Tensor:
        """An error-feedback residual as float32 values to add to ``dequantize``."""
        if isinstance(residual, Encoded):
            assert self.residual_format is not None
            residual = self.residual_format.dequantize(residual)
        return rotate(residual.to(torch.float32), self.hadamard, inverse=True)

    def pack(self, encoded: Encoded) -> Packed:
        """The bytes that are stored; ``unpack`` gives ``encoded`` back."""
        return storage.pack(self, encoded)

    def unpack(self, packed: Packed) -> Encoded:
        """What ``pack`` was given, bit for bit."""
        return storage.unpack(self, packed)

    def stored_bits(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Bits that a (..., V, K) state stores: codes, padding, scales, global scale, key scales, component, residual.

        Errors: InputError for a shape without the matrices that a component or key scales need.
        """
        return storage.stored_bits(self, shape)

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """All stored bits of a (..., V, K) state, padding included, divided by its values."""
        return sum(self.stored_bits(shape).values()) / math.prod(shape)

    def admit(
        self, x: Tensor, random_bits: Tensor | None, residual: "Tensor | Encoded | None", specials: str
    ) -> Tensor:
        """x as float32 or float64, all arguments of ``quantize`` checked; raises InputError."""
        for name, value in (("x", x), ("random_bits", random_bits)):
            if not isinstance(value, Tensor) and (name == "x" or value is not None):
                raise InputError(name, type(value).__name__, "a tensor")
        if x.dtype not in _INPUT_DTYPES or x.dim() == 0:
            expected = "float32, float64, float16 or bfloat16 of shape (..., K)"
            raise InputError("x", f"{x.dtype} {tuple(x.shape)}", expected)
        storage.check_matrices(self, tuple(x.shape), "x")
        if x.is_meta or x.layout != torch.strided:
            raise InputError("x", f"{x.layout} on {x.device}", "a dense tensor that holds numbers")
        if specials not in SPECIALS:
            raise InputError("specials", specials, " or ".join(SPECIALS))
        if (random_bits is not None) != self.stochastic:
            given = "a tensor" if random_bits is not None else None
            expected = f"{'a tensor' if self.stochastic else None} for {self.text}"
            raise InputError("random_bits", given, expected)
        if random_bits is not None and (random_bits.dtype != torch.int64 or random_bits.shape != x.shape):
            value = f"{random_bits.dtype} {tuple(random_bits.shape)}"
            raise InputError("random_bits", value, f"int64 of shape {tuple(x.shape)}")
        self._check_residual(x, residual)
        x = x.detach() if x.requires_grad else x
        x = x if x.dtype == torch.float64 else x.to(torch.float32)
        return self._admit_specials(x, specials)

    def _check_residual(self, x: Tensor, residual: "Tensor | Encoded | None") -> None:
        if residual is None:
            return
        encoded = self.residual_format is not None
        if not isinstance(residual, Encoded if encoded else Tensor) or self.error_feedback is None:
            expected = {True: "an Encoded", False: "a tensor"}[encoded] if self.error_feedback else None
            raise InputError("residual", type(residual).__name__, f"{expected} for {self.text}")
        values = residual.codes if isinstance(residual, Encoded) else residual
        if values.shape != x.shape:
            value = f"a tensor {tuple(values.shape)}"
            raise InputError("residual", value, f"shape {tuple(x.shape)} for {self.text}")
        if isinstance(residual, Encoded):
            assert self.residual_format is not None
            storage.check_encoded(self.residual_format, residual, "residual", residual=False)
        if isinstance(residual, Tensor) and not residual.is_floating_point():
            raise InputError("residual", str(residual.dtype), f"a float dtype for {self.text}")

    def _admit_specials(self, x: Tensor, specials: str) -> Tensor:
        """Refuse NaN and Inf that have no code, or turn them into what the arithmetic can take."""
        element = self.element
        keeps_nan = isinstance(element, Element) and element.nan_code is not None
        if self.row.scaling is not Scaling.NONE:
            limit, keeps_nan = torch.finfo(torch.float32).max, keeps_nan and self.profile is None
            if self.hadamard is not None and x.numel():
                limit, keeps_nan = largest_input(x.shape[-1]), False
        elif isinstance(element, Element) and element.infinity_code is None:
            limit = torch.finfo(x.dtype).max
        else:
            return x
        if x.numel() == 0 or all(abs(bound) <= limit for bound in map(float, torch.aminmax(x))):
            return x
        bad = (x.isnan() & (not keeps_nan)) | (x.abs() > limit)
        if specials == "raise":
            if not bad.any():
                return x
            index = tuple(int(i) for i in bad.nonzero()[0])
            raise InputError("x", f"{x[index].item()} at {index}", f"numbers that {self.text} can store")
        if self.profile is not None:
            return x
        return x.clamp(-limit, limit)

    def _cast(self, x: Tensor, words: Tensor | None, specials: str) -> Tensor:
        """Codes in their storage dtype; the low bits of ``words`` are used."""
        element, bits = self.element, self.random_bits or rounding.EXACT_BITS
        if specials == "hardware":
            x = fused.replace_nan_(x.clone(), element)
        if fused.serves(x, element):
            return fused.encode(x, element, self.rounding, words, bits)
        encode = rounding.encode_integer if isinstance(element, Integer) else rounding.encode_element
        return encode(x, element, self.rounding, words, bits).to(fused.code_dtype(element))  # type: ignore

    def _decode(self, encoded: Encoded) -> Tensor:
        """float32 values in the rotated basis, if there is one."""
        values = fused.decode(encoded.codes, self.element)
        if self.recipe is None or encoded.scales is None:
            return values
        if self.profile is not None and self.row.scaling is Scaling.NVFP4:
            values.masked_fill_(encoded.codes == NO_CODE, torch.nan)
        values = self.recipe.decode(values, Scales(encoded.scales, encoded.global_scale))
        return values if encoded.key_scales is None else times_scales(values, encoded.key_scales)

    def _target(self, x: Tensor, residual: "Tensor | Encoded | None") -> Tensor:
        """What a scaled format stores: x, rotated, plus the error that the previous store left."""
        x = rotate(x, self.hadamard)
        if residual is None:
            return x
        if isinstance(residual, Encoded):
            assert self.residual_format is not None
            residual = self.residual_format.dequantize(residual)
        return x + residual.to(torch.float32)

    def _component(self, x: Tensor) -> Component | None:
        return None if self.component is None else component_of(x, self.component)

    def _rotated(self, component: Component, like: Tensor) -> Tensor:
        """The decoded component in the basis and dtype of what it is taken from."""
        return rotate(component.decode().to(like.dtype), self.hadamard)

    def _store_residual(self, error: Tensor) -> "Tensor | Encoded":
        """Saturated: an fp16 residual beyond 65504 would turn into Inf and poison every later store."""
        if self.residual_format is not None:
            return self.residual_format.quantize(error)
        dtype = RESIDUAL_DTYPES[self.error_feedback or "fp16"]
        largest = torch.finfo(dtype).max
        return error.clamp(-largest, largest).to(dtype)


def check_format(fmt: object) -> None:
    """InputError for the text of a format where a Format is needed."""
    if not isinstance(fmt, Format):
        raise InputError("fmt", fmt, "a Format, such as parse('nvfp4') gives")
