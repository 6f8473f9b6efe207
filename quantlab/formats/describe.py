"""A format explained: what its element, recipe and options are, and what it does to special inputs.

Everything comes from the tables, from the recipes (``Recipe.explain``) and from trying the format, so that a new
row or profile explains itself.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import fused
from quantlab.formats.components import rank_of
from quantlab.formats.float_scales import GROUPS
from quantlab.formats.format import Format
from quantlab.formats.grammar import choices, parse
from quantlab.formats.mx import decode_scales
from quantlab.formats.nvfp4 import SCALE_ELEMENT
from quantlab.formats.recipe import FUNCTIONS, Explanation
from quantlab.formats.rounding import Rounding
from quantlab.formats.rows import constant_text, layout
from quantlab.formats.storage import Encoded
from quantlab.formats.table import Element, Integer, Scaling

_SHARED = {
    "row": "a value row over the key dim",
    "block32": "32 values along the key dim",
    "tile32": "32 value rows over the key dim",
    "head": "a head's (V, K) matrix",
    "matrix": "a head's (V, K) matrix",
    "tensor": "the whole tensor",
    "none": "nothing: there is no global scale",
}


@dataclass(frozen=True)
class Section:
    """Lines of one subject, each a label and a text."""

    title: str
    lines: tuple[tuple[str, str], ...]


def describe(text: str, shape: tuple[int, ...] = (128, 128)) -> list[Section]:
    """The sections about a format text, its bits counted for a (..., V, K) state.

    Errors: InputError for a text that ``parse`` refuses, or a shape without positive sizes.
    """
    fmt = parse(text)
    explanation = None if fmt.recipe is None else fmt.recipe.explain()
    sections = [
        Section("Format", tuple(_summary(fmt, explanation))),
        Section("Element", tuple(_element(fmt.element))),
        Section("Arithmetic", tuple(_arithmetic(fmt, explanation))),
    ]
    if fmt.rounded:
        # Lone numbers are no matrices: what is told is what becomes of what a component leaves, scaled by key.
        inner = dataclasses.replace(fmt, component=None, key_scale=False)
        title = "Special inputs" + ("" if inner == fmt else " of the codes")
        sections.append(Section(title, tuple(_specials(inner))))
    sections.append(Section(f"Bits per value at {_shape_text(shape)}", tuple(_bits(fmt, shape))))
    if explanation is not None and explanation.reproduces:
        sections.append(Section("Library", tuple(_library(fmt, explanation))))
    options = _options(fmt)
    if options:
        sections.append(Section("Options", tuple(options)))
    return [section for section in sections if section.lines]


def number_text(value: float) -> str:
    """The fewest digits that give a number back: as float32 where that holds it, else as float64."""
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if value != value else "Inf" if value > 0 else "-Inf"
    fits = abs(value) <= float(np.finfo(np.float32).max) and float(np.float32(value)) == value
    narrow = np.float32(value) if fits else np.float64(value)
    if value == 0 or 1e-4 <= abs(value) < 1e9:
        return np.format_float_positional(narrow, trim="-")
    return np.format_float_scientific(narrow, trim="-")


def scale_values(fmt: Format, encoded: Encoded) -> Tensor | None:
    """The stored scales as float32 numbers; None where there are none."""
    if encoded.scales is None:
        return None
    if fmt.row.scaling is Scaling.NVFP4:
        return fused.decode(encoded.scales, SCALE_ELEMENT)
    return decode_scales(encoded.scales) if fmt.row.scaling is Scaling.MX else encoded.scales


def values_per_scale(fmt: Format) -> int | None:
    """Values along the key dim that share a stored scale; None if a scale serves all of a row, or there is none."""
    if fmt.row.scaling is Scaling.FLOAT32:
        return GROUPS[fmt.granularity or ""].columns
    return None if fmt.row.block == 1 else fmt.row.block


def _summary(fmt: Format, explanation: Explanation | None) -> list[tuple[str, str]]:
    row = fmt.row
    lines = [("text", fmt.text)]
    if row.scaling is Scaling.NONE:
        lines.append(("scale", "none"))
    elif row.scaling is Scaling.FLOAT32:
        lines.append(("scale", f"one float32 for {_SHARED[fmt.granularity or '']}"))
    elif row.scaling is Scaling.MX:
        lines.append(("scale", "one E8M0 (a power of two) for 32 values along the key dim"))
    else:
        lines.append(("block scale", "one E4M3 for 16 values along the key dim"))
        lines.append(
            (
                "global scale",
                f"one float32 for {_SHARED[fmt.granularity or '']}" if fmt.granularity != "none" else "none",
            )
        )
    if fmt.profile is None:
        extra = "" if explanation is None or not explanation.source else f"; {explanation.source}"
        lines.append(("source", row.source + extra))
    return lines


def _element(element: Element | Integer) -> list[tuple[str, str]]:
    if isinstance(element, Integer):
        return [
            ("layout", f"{element.bits}-bit two's complement"),
            (
                "numbers",
                f"-{element.max:.0f} .. {element.max:.0f}; only some library profiles use {-element.max - 1:.0f}",
            ),
        ]
    largest, width = _hex(element.max_code, element.bits), element.bits
    lines = [
        ("layout", f"{layout(element)}: sign, exponent, mantissa; exponent bias {element.bias}"),
        ("largest", f"{constant_text(element.max)} (code {largest})"),
        ("smallest normal", constant_text(element.min_normal)),
        ("smallest", constant_text(element.smallest)),
        ("eps", f"{constant_text(element.eps)}: a normal number is off by at most half of it, relatively"),
    ]
    if element.bits <= 4:
        codes = torch.arange(element.sign_code, dtype=torch.uint8)
        numbers = ", ".join(constant_text(value) for value in fused.decode(codes, element).tolist())
        lines.append(("numbers", f"{numbers} (codes 0 to {element.max_code}); +{element.sign_code} negates"))
    special = [
        f"{name} {_hex(code, width)}" if code is not None else f"no {name}"
        for name, code in (("Inf", element.infinity_code), ("NaN", element.nan_code))
    ]
    return [*lines, ("Inf and NaN", ", ".join(special))]


_ROUNDINGS = {
    Rounding.NEAREST: "nearest, ties to even",
    Rounding.TOWARD_ZERO: "toward zero",
    Rounding.STOCHASTIC: "stochastic: up iff floor(delta * 2^n) + r >= 2^n, with delta the part of an ulp that is cut "
    "off, n = {bits}, r the low n bits of a word",
}


def _arithmetic(fmt: Format, explanation: Explanation | None) -> list[tuple[str, str]]:
    if not fmt.rounded:
        return [("value", "what is given, unrounded")]
    steps = () if explanation is None else explanation.steps
    lines = []
    if fmt.component is not None:
        lines.append(("component", f"{_component(fmt.component)}; x <- x - C, added again after decoding"))
    if fmt.hadamard is not None:
        rotation = "x <- H (signs * x) along the key dim, in blocks of its largest power-of-two divisor"
        lines.append(("rotation", f"{rotation}; signs from seed {fmt.hadamard}; undone after decoding"))
    if fmt.error_feedback is not None:
        lines.append(("error feedback", "x <- x + r, with r the residual of the previous store"))
    if fmt.key_scale:
        scale = "2^e in E8M0 for each key column of a head's (V, K) matrix, 2^e <= its largest magnitude < 2^(e + 1)"
        lines.append(("key scales", f"{scale}; x <- x / 2^e, v <- v 2^e after decoding"))
    symbols = _symbols(fmt, steps)
    if symbols:
        lines.append(("where", symbols))
    for label, formula in steps:
        if label == "value":
            lines.append(("code", f"c = {_element_name(fmt)}({'q'}), {_cast(fmt, explanation)}"))
        lines.append((label.strip("()"), formula))
    if not steps:
        lines.append(("code", f"c = {_element_name(fmt)}(x), {_cast(fmt, None)}"))
    if fmt.error_feedback is not None:
        stored = f"r = {fmt.error_feedback}(x - v), kept for the next store"
        if fmt.component is not None:
            stored = f"r = {fmt.error_feedback}(x + C - (v + C)), kept for the next store"
        if fmt.key_scale:
            stored += ", x and v as they are without key scales"
        lines.append(("residual", stored))
    used = [
        f"{name}: {FUNCTIONS[name]}" for name in FUNCTIONS if any(_mentions(step[1], name) for step in steps)
    ]
    return [*lines, *((("functions", "; ".join(used)),) if used else ())]


def _component(name: str) -> str:
    rank = rank_of(name)
    if rank is None:
        return "C = in every row the mean of the value rows of a head's (V, K) matrix, in float16"
    terms = "largest singular component" if rank == 1 else f"{rank} largest singular components"
    return f"C = the {terms} s u v^T of a head's (V, K) matrix, sqrt(s) u and sqrt(s) v stored in float16"


def _mentions(formula: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", formula) is not None


def _symbols(fmt: Format, steps: tuple[tuple[str, str], ...]) -> str:
    if not steps:
        return ""
    groups = {
        Scaling.MX: "32 values",
        Scaling.NVFP4: "16 values",
        Scaling.FLOAT32: _SHARED.get(fmt.granularity or ""),
    }
    words = [f"x a value, a the largest magnitude of {groups[fmt.row.scaling]}"]
    if any(" low " in formula or "(low" in formula for _, formula in steps):
        words.append("low and high its smallest (at most 0) and largest (at least 0) value")
    if fmt.row.scaling is Scaling.NVFP4 and fmt.granularity != "none":
        words.append(f"A that of {_SHARED[fmt.granularity or '']}")
    words.append("float32 arithmetic, every operation rounded, ^ a power")
    return "; ".join(words)


def _cast(fmt: Format, explanation: Explanation | None) -> str:
    rounding = _ROUNDINGS[fmt.rounding].format(bits=fmt.random_bits or 32)
    if explanation is not None and explanation.cast and fmt.rounding is Rounding.NEAREST:
        return explanation.cast
    element = fmt.element
    if isinstance(element, Integer):
        if fmt.stochastic:
            bits = fmt.random_bits or 32
            rounding = f"stochastic: floor(q + r / 2^n) with q signed, cut to n = {bits} bits behind the point, and r "
            rounding += "the low n bits of a word"
        return f"{rounding}, clamped to +-{element.max:.0f}"
    beyond = {
        "saturate": f"beyond the largest +-{constant_text(element.max)}",
        "infinity": "beyond the largest Inf",
        "nan": "beyond the largest NaN",
    }
    return f"{rounding}; {beyond[element.overflow.value]}"


def _element_name(fmt: Format) -> str:
    return fmt.element.name.upper()


def _specials(fmt: Format) -> list[tuple[str, str]]:
    """What the format makes of inputs that are no ordinary numbers, found by trying them."""
    scaled, block = fmt.row.scaling is not Scaling.NONE, values_per_scale(fmt)
    fill = [] if not scaled else [0.0] * ((block or 4) - 2)
    lines = []
    if scaled:
        lines.append(("zeros only", _outcome(fmt, [0.0, 0.0, *fill], shown=1)))
        if block is not None:
            lines.append(
                ("block of zeros", f"{_outcome(fmt, [0.0, 0.0, *fill, 1.0, 0.0, *fill], shown=1)}, beside 1")
            )
    lines.append(("-0", _outcome(fmt, [-0.0, 1.0, *fill], shown=1)))
    for name, value in (("NaN", torch.nan), ("Inf", torch.inf)):
        values = [value, 1.0, *fill] if scaled else [value]
        shown = 2 if scaled else 1
        plain, hardware = (_outcome(fmt, values, shown, specials) for specials in ("raise", "hardware"))
        beside = " and 1 beside it" if scaled else ""
        lines.append(
            (
                f"{name}{beside}",
                plain if plain == hardware else f"{plain}; with specials hardware: {hardware}",
            )
        )
    largest = float(np.finfo(np.float32).max)
    if scaled:
        lines.append(("largest float32", _outcome(fmt, [largest, 0.0, *fill], shown=1)))
    elif isinstance(fmt.element, Element) and fmt.element.max < largest / 2:
        lines.append(
            ("overflow", f"{constant_text(2 * fmt.element.max)} {_outcome(fmt, [2 * fmt.element.max], 1)}")
        )
    return lines


def _outcome(fmt: Format, values: list[float], shown: int, specials: str = "raise") -> str:
    """Codes, scale and numbers of the first ``shown`` values."""
    x = torch.tensor([values])
    words = torch.zeros(x.shape, dtype=torch.int64) if fmt.stochastic else None
    try:
        encoded = fmt.quantize(x, words, specials=specials)
    except InputError:
        return "refused"
    decoded = fmt.dequantize(encoded)[0, :shown].tolist()
    text = f"decodes to {' and '.join(number_text(value) for value in decoded)}"
    codes = " ".join(code_text(code, fmt) for code in encoded.codes[0, :shown].tolist())
    text += f" (code{'s' if shown > 1 else ''} {codes}"
    scales = scale_values(fmt, encoded)
    if scales is not None:
        text += f", scale {number_text(scales.flatten()[0].item())}"
    return text + ")"


def code_text(code: int, fmt: Format) -> str:
    """A code in hexadecimal, two's complement of the element's width; "none" for a NaN that has no code."""
    bits = fmt.element.storage_bits
    if fmt.row.scaling is Scaling.NVFP4 and code >= 1 << bits:
        return "none"
    return _hex(code & ((1 << bits) - 1), bits)


def _hex(code: int, bits: int) -> str:
    return f"0x{code:0{-(-bits // 4)}x}"


def _bits(fmt: Format, shape: tuple[int, ...]) -> list[tuple[str, str]]:
    values = 1
    parts = fmt.stored_bits(shape)
    for size in shape:
        values *= size
    lines = [(part, f"{bits / values:.6g}") for part, bits in parts.items()]
    total = sum(parts.values())
    return [*lines, ("total", f"{total / values:.6g} ({-(-total // 8):,} bytes)")]


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _library(fmt: Format, explanation: Explanation) -> list[tuple[str, str]]:
    lines = [("reproduces", explanation.reproduces)]
    if fmt.rounding is not Rounding.NEAREST:
        lines.append(
            (
                "rounding",
                "scales and their order of operations are the library's, the rounding of the element is quantlab's",
            )
        )
    lines += [("differs", difference) for difference in explanation.differs]
    return [*lines, ("read in", explanation.source)]


def _options(fmt: Format) -> list[tuple[str, str]]:
    """What can be chosen beside, or added to, what the text says already."""
    lines = []
    for kind, texts in choices(fmt.row).items():
        parsed = {text: _with_choice(fmt, kind, text) for text in texts}
        kept = [text for text, result in parsed.items() if result is not None]
        if any(parsed[text] != fmt for text in kept):
            lines.append((kind, " ".join(kept)))
    return lines


_EXAMPLES = {"<r>": "2", "<seed>": "1", "<bits>": "8", "<format>": "bf16"}


def _with_choice(fmt: Format, kind: str, text: str) -> Format | None:
    """The format with one more choice, or with another granularity or library; None if they do not go together."""
    for placeholder, example in _EXAMPLES.items():
        text = text.replace(placeholder, example)
    head, plus, modifiers = fmt.text.partition("+")
    if kind == "granularity":
        text = head.partition(":")[0] + text + plus + modifiers
    elif kind == "library" and fmt.profile is not None:
        text = fmt.text.replace(f"+as.{fmt.profile}", text, 1)
    else:
        text = fmt.text + text
    try:
        return parse(text)
    except InputError:
        return None
