"""What a stored number is: a row per element and a row per format; every constant is derived.

An element is a bit layout (sign, exponent, mantissa) or a symmetric integer.  A format stores elements, with
or without shared scales.  A float element is a format by itself as soon as it has a row in ``_ELEMENTS``.
"""

from dataclasses import dataclass
from enum import Enum


class Specials(Enum):
    """Which codes are not numbers."""

    IEEE = "ieee"  # the all-ones exponent holds Inf (mantissa 0) and NaN
    NAN_ONLY = "nan_only"  # only the all-ones code is NaN, no Inf (OCP "FN")
    NONE = "none"  # every code is a number


class Overflow(Enum):
    """What a magnitude beyond the largest number turns into."""

    SATURATE = "saturate"  # the largest number, also for Inf
    INFINITY = "infinity"  # Inf, as IEEE 754 has it


class Scaling(Enum):
    """What multiplies the elements on decoding."""

    NONE = "none"
    FLOAT32 = "float32"  # one FP32 scale a group
    NVFP4 = "nvfp4"  # one E4M3 scale per 16 values and a FP32 global scale


@dataclass(frozen=True)
class Element:
    """A floating-point element: sign, ``exponent_bits``, ``mantissa_bits``; bias 2^(e-1) - 1."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials
    overflow: Overflow

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def sign_code(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity_code(self) -> int | None:
        if self.specials is not Specials.IEEE:
            return None
        return (2**self.exponent_bits - 1) << self.mantissa_bits

    @property
    def nan_code(self) -> int | None:
        """The positive quiet NaN that a NaN is stored as; None if the element has none."""
        if self.specials is Specials.NONE:
            return None
        if self.infinity_code is None:
            return self.sign_code - 1
        return self.infinity_code | (1 << (self.mantissa_bits - 1))

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        if self.infinity_code is not None:
            return self.infinity_code - 1
        return self.sign_code - (2 if self.specials is Specials.NAN_ONLY else 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share it."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max(self) -> float:
        mantissa = self.max_code & ((1 << self.mantissa_bits) - 1)
        return (1 + mantissa / 2**self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest(self) -> float:
        """Smallest positive number (subnormal)."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number; half of it bounds the relative error of a normal."""
        return 2.0**-self.mantissa_bits


@dataclass(frozen=True)
class Integer:
    """A symmetric integer: -(2^(bits-1) - 1) .. 2^(bits-1) - 1; the most negative code is never used."""

    name: str
    bits: int

    @property
    def max(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    @property
    def min_normal(self) -> float:
        return 1.0

    @property
    def smallest(self) -> float:
        return 1.0

    @property
    def eps(self) -> float:
        return 1.0


@dataclass(frozen=True)
class FormatRow:
    """A named format: its element, its scaling, and the granularities of its FP32 scale, default first."""

    name: str
    element: Element | Integer
    scaling: Scaling = Scaling.NONE
    granularities: tuple[str, ...] = ()


_IEEE = (Specials.IEEE, Overflow.INFINITY)
_ELEMENTS = (
    Element("fp64", 11, 52, *_IEEE),
    Element("fp32", 8, 23, *_IEEE),
    Element("bf16", 8, 7, *_IEEE),
    Element("fp16", 5, 10, *_IEEE),
    Element("e5m2", 5, 2, Specials.IEEE, Overflow.SATURATE),
    Element("e4m3", 4, 3, Specials.NAN_ONLY, Overflow.SATURATE),
    Element("e2m1", 2, 1, Specials.NONE, Overflow.SATURATE),
    Integer("int8", 8),
)
ELEMENTS: dict[str, Element | Integer] = {element.name: element for element in _ELEMENTS}
FLOAT_ELEMENTS: dict[str, Element] = {e.name: e for e in _ELEMENTS if isinstance(e, Element)}

_FP32_SCALE = (Scaling.FLOAT32, ("row", "block32"))
_FORMATS = (
    *(FormatRow(element.name, element) for element in FLOAT_ELEMENTS.values()),
    FormatRow("fp8_e4m3", ELEMENTS["e4m3"], *_FP32_SCALE),
    FormatRow("fp8_e5m2", ELEMENTS["e5m2"], *_FP32_SCALE),
    FormatRow("int8", ELEMENTS["int8"], *_FP32_SCALE),
    FormatRow("nvfp4", ELEMENTS["e2m1"], Scaling.NVFP4, ("matrix", "row", "none")),
)
FORMATS: dict[str, FormatRow] = {row.name: row for row in _FORMATS}
ALIASES = {"fp8": "fp8_e4m3"}

# Named in the grammar, refused with one line until somebody builds them.
PLANNED_FORMATS = (
    "tf32", "e3m2", "e2m3", "int16", "int4",
    "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2",
)  # fmt: skip
PLANNED_GRANULARITIES = ("tile32", "head")
PLANNED_MODIFIERS = ("as", "scale", "floor", "4over6", "hadamard")
