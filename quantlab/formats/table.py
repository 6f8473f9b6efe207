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
    NAN = "nan"  # NaN, as conversions without saturation do where there is no Inf


class Scaling(Enum):
    """What multiplies the elements on decoding."""

    NONE = "none"
    FLOAT32 = "float32"  # one FP32 scale a group
    MX = "mx"  # one power of two (E8M0) per 32 values
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
    def storage_bits(self) -> int:
        """Bits that a stored code takes; TF32 lives in 32-bit words."""
        return 32 if 16 < self.bits < 32 else self.bits

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
    def overflows(self) -> tuple[Overflow, ...]:
        """What an overflow can be stored as."""
        infinity = () if self.infinity_code is None else (Overflow.INFINITY,)
        return (Overflow.SATURATE, *infinity, *(() if self.nan_code is None else (Overflow.NAN,)))

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
    def storage_bits(self) -> int:
        return self.bits

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
    """A named format: its element, what scales it, and the choices that its text offers, default first.

    granularities: what shares a FP32 scale.  scales: how the scale is derived from the largest magnitude.
    source: where the recipe is defined.
    """

    name: str
    element: Element | Integer
    scaling: Scaling = Scaling.NONE
    granularities: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    source: str = ""

    @property
    def block(self) -> int:
        """Values along the key dim that one stored block scale serves; 1 without block scales."""
        return {Scaling.MX: 32, Scaling.NVFP4: 16}.get(self.scaling, 1)


_IEEE = (Specials.IEEE, Overflow.INFINITY)
_FINITE = (Specials.NONE, Overflow.SATURATE)
_ELEMENTS = (
    Element("fp64", 11, 52, *_IEEE),
    Element("fp32", 8, 23, *_IEEE),
    Element("tf32", 8, 10, *_IEEE),
    Element("bf16", 8, 7, *_IEEE),
    Element("fp16", 5, 10, *_IEEE),
    Element("e5m2", 5, 2, Specials.IEEE, Overflow.SATURATE),
    Element("e4m3", 4, 3, Specials.NAN_ONLY, Overflow.SATURATE),
    Element("e3m2", 3, 2, *_FINITE),
    Element("e2m3", 2, 3, *_FINITE),
    Element("e2m1", 2, 1, *_FINITE),
    Integer("int16", 16),
    Integer("int8", 8),
    Integer("int4", 4),
)
ELEMENTS: dict[str, Element | Integer] = {element.name: element for element in _ELEMENTS}
FLOAT_ELEMENTS: dict[str, Element] = {e.name: e for e in _ELEMENTS if isinstance(e, Element)}

_ELEMENT_SOURCES = {
    "fp64": "IEEE 754-2019 binary64",
    "fp32": "IEEE 754-2019 binary32",
    "tf32": "PTX ISA, .tf32: the exponent of binary32, 10 mantissa bits",
    "bf16": "PTX ISA, .bf16: the upper half of binary32",
    "fp16": "IEEE 754-2019 binary16",
    "e5m2": "OCP 8-bit Floating Point Specification 1.0",
    "e4m3": "OCP 8-bit Floating Point Specification 1.0",
    "e3m2": "OCP Microscaling Formats 1.0, FP6",
    "e2m3": "OCP Microscaling Formats 1.0, FP6",
    "e2m1": "OCP Microscaling Formats 1.0, FP4",
}
_SHARED = ("row", "block32", "tile32", "head")
_STATE_KERNELS = "the recurrent-state kernels of flashinfer (#2645, #3324) and vLLM (#40012)"
_OCP = "OCP Microscaling Formats 1.0; scale modes as in torchao, rceil as in cuBLAS"


def _float32_scaled(name: str, element: str, scales: tuple[str, ...] = ("max", "recip")) -> FormatRow:
    return FormatRow(name, ELEMENTS[element], Scaling.FLOAT32, _SHARED, scales, _STATE_KERNELS)


def _mx(name: str, element: str) -> FormatRow:
    scales = ("rceil", "floor", "even", "ceil")
    return FormatRow(name, ELEMENTS[element], Scaling.MX, (), scales, _OCP)


_FORMATS = (
    *(FormatRow(e.name, e, source=_ELEMENT_SOURCES[e.name]) for e in FLOAT_ELEMENTS.values()),
    _float32_scaled("fp8_e4m3", "e4m3", ("max", "recip", "240", "240.recip")),
    _float32_scaled("fp8_e5m2", "e5m2"),
    _float32_scaled("int16", "int16"),
    _float32_scaled("int8", "int8"),
    _float32_scaled("int4", "int4"),
    _mx("mxfp8_e4m3", "e4m3"),
    _mx("mxfp8_e5m2", "e5m2"),
    _mx("mxfp6_e3m2", "e3m2"),
    _mx("mxfp6_e2m3", "e2m3"),
    _mx("mxfp4", "e2m1"),
    FormatRow(
        "nvfp4",
        ELEMENTS["e2m1"],
        Scaling.NVFP4,
        ("matrix", "row", "tensor", "none"),
        ("rne", "ceil"),
        "NVIDIA NVFP4, the recipe of Model-Optimizer's NVFP4QTensor except for zero blocks and zero tensors",
    ),
)
FORMATS: dict[str, FormatRow] = {row.name: row for row in _FORMATS}
ALIASES = {"fp8": "fp8_e4m3"}
GRANULARITY_ALIASES = {("nvfp4", "head"): "matrix"}
