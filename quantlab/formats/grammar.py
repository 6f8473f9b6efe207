"""Format text: ``name [":" granularity] ("+" modifier)*`` -> Format."""

import re
from collections.abc import Callable
from functools import lru_cache

from quantlab.errors import InputError, unknown_name
from quantlab.formats.format import RESIDUAL_DTYPES, Format
from quantlab.formats.nvfp4 import DEFAULT_FLOOR, FLOORS
from quantlab.formats.recipes import profiles_of
from quantlab.formats.rounding import EXACT_BITS, Rounding
from quantlab.formats.table import (
    ALIASES,
    FORMATS,
    GRANULARITY_ALIASES,
    Element,
    FormatRow,
    Overflow,
    Scaling,
)

MODIFIERS = (
    "+as.<library>", "+scale.<rule>", "+floor.<number>", "+4over6[.mse|.mae|.absmax][.256|.448]",
    "+overflow.<mode>", "+hadamard[.<seed>]", "+rz", "+sr[<bits>]", "+ef[.<format>]",
)  # fmt: skip
"""What may follow a name, in the order of canonical text."""
_METRICS, _SCALE_MAXIMA = ("mse", "mae", "absmax"), ("256", "448")


def parse(text: str) -> Format:
    """The format named by ``text``, e.g. "nvfp4", "fp16+sr13", "int8:block32+ef.bf16".

    InputError (argument "format") for an unknown name, granularity or modifier, and for one that the format
    cannot take.
    """
    if not isinstance(text, str):
        raise InputError("format", text, "text such as 'nvfp4' or 'fp16+sr13'")
    return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Format:
    head, *modifiers = text.split("+")
    name, colon, granularity = head.partition(":")
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise unknown_name("format", name, [*FORMATS, *ALIASES])
    row = FORMATS[name]
    fields: dict = {"granularity": _granularity(text, row, granularity if colon else None)}
    if modifiers and name in ("fp32", "fp64"):
        raise InputError("format", text, f"no modifier: {name} rounds nothing")
    for modifier in modifiers:
        word, argument = _split(modifier)
        if word not in _PARSERS:
            raise InputError("format", text, f"modifiers {', '.join(MODIFIERS)}, not +{modifier}")
        new = _PARSERS[word](text, row, argument)
        if new.keys() & fields.keys():
            once = "one of +rz and +sr, once" if "rounding" in new else f"+{word} once"
            raise InputError("format", text, once)
        fields |= new
    _check_together(text, row, fields)
    return Format(name, **{key: value for key, value in fields.items() if value is not None})


def _split(modifier: str) -> tuple[str, str | None]:
    """The word of a modifier and what follows it, None if nothing does."""
    if modifier.startswith("sr"):
        stochastic = re.fullmatch(r"sr([0-9]*)", modifier)
        return ("sr", stochastic[1] or None) if stochastic else (modifier, None)
    word, dot, argument = modifier.partition(".")
    return word, argument if dot else None


def _granularity(text: str, row: FormatRow, granularity: str | None) -> str | None:
    valid = row.granularities
    if granularity is None:
        return valid[0] if valid else None
    granularity = GRANULARITY_ALIASES.get((row.name, granularity), granularity)
    if granularity in valid:
        return granularity
    if not valid:
        raise InputError("format", text, f"{row.name} without a granularity: it has none to choose")
    raise InputError("format", text, f"{row.name} with granularity {' or '.join(valid)}")


def _profile(text: str, row: FormatRow, library: str | None) -> dict:
    valid = profiles_of(row)
    if library not in valid:
        raise InputError("format", text, _offer(row, "as", valid))
    return {"profile": library}


def _scale(text: str, row: FormatRow, scale: str | None) -> dict:
    if scale not in row.scales:
        raise InputError("format", text, _offer(row, "scale", row.scales))
    return {"scale": None if scale == row.scales[0] else scale}


def _floor(text: str, row: FormatRow, floor: str | None) -> dict:
    valid = tuple(FLOORS) if row.scaling is Scaling.NVFP4 else ()
    if floor not in valid:
        raise InputError("format", text, _offer(row, "floor", valid))
    return {"floor": None if floor == DEFAULT_FLOOR else floor}


def _four_over_six(text: str, row: FormatRow, options: str | None) -> dict:
    words = options.split(".") if options is not None else []
    metric = words.pop(0) if words and words[0] in _METRICS else _METRICS[0]
    largest = words.pop(0) if words and words[0] in _SCALE_MAXIMA else _SCALE_MAXIMA[0]
    if words or row.scaling is not Scaling.NVFP4:
        raise InputError("format", text, "nvfp4+4over6[.mse|.mae|.absmax][.256|.448]")
    metric = "" if metric == _METRICS[0] else f".{metric}"
    return {"four_over_six": metric + ("" if largest == _SCALE_MAXIMA[0] else f".{largest}")}


def _overflow(text: str, row: FormatRow, mode: str | None) -> dict:
    element, valid = row.element, []
    if row.scaling is Scaling.NONE and isinstance(element, Element):
        valid = [overflow.value for overflow in element.overflows]
    if mode not in valid:
        raise InputError("format", text, _offer(row, "overflow", valid))
    assert isinstance(element, Element)
    chosen = Overflow(mode)
    return {"overflow": None if chosen is element.overflow else chosen}


def _hadamard(text: str, row: FormatRow, seed: str | None) -> dict:
    if row.scaling is Scaling.NONE or (seed is not None and not re.fullmatch(r"[0-9]{1,18}", seed)):
        raise InputError("format", text, "+hadamard[.<seed>] on a scaled format, seed a whole number")
    return {"hadamard": int(seed or 0)}


def _toward_zero(text: str, row: FormatRow, argument: str | None) -> dict:
    if argument is not None:
        raise InputError("format", text, "+rz without an argument")
    return {"rounding": Rounding.TOWARD_ZERO}


def _stochastic(text: str, row: FormatRow, bits: str | None) -> dict:
    number = int(bits[:9]) if bits else EXACT_BITS
    if not 1 <= number <= EXACT_BITS:
        raise InputError("format", text, f"+sr<n> with n random bits, 1 to {EXACT_BITS}")
    return {"rounding": Rounding.STOCHASTIC, "random_bits": None if number == EXACT_BITS else number}


def _error_feedback(text: str, row: FormatRow, residual: str | None) -> dict:
    valid = [*RESIDUAL_DTYPES, *(name for name in FORMATS if name not in ("fp64", *RESIDUAL_DTYPES))]
    residual = ALIASES.get(residual or "fp16", residual or "fp16")
    if residual not in valid:
        raise InputError("format", text, f"+ef.<format> with {', '.join(valid)}")
    if row.scaling is Scaling.NONE:
        raise InputError("format", text, "+ef on a scaled format (int8, fp8_*, mx*, nvfp4)")
    return {"error_feedback": residual}


_PARSERS: dict[str, Callable[[str, FormatRow, str | None], dict]] = {
    "as": _profile,
    "scale": _scale,
    "floor": _floor,
    "4over6": _four_over_six,
    "overflow": _overflow,
    "hadamard": _hadamard,
    "rz": _toward_zero,
    "sr": _stochastic,
    "ef": _error_feedback,
}


def _check_together(text: str, row: FormatRow, fields: dict) -> None:
    rounding = fields.get("rounding", Rounding.NEAREST)
    if "error_feedback" in fields and rounding is not Rounding.NEAREST:
        word = "+sr" if rounding is Rounding.STOCHASTIC else "+rz"
        expected = f"{word} or +ef, not both: feedback needs the error of nearest rounding"
        raise InputError("format", text, expected)


def _offer(row: FormatRow, word: str, valid: list[str] | tuple[str, ...]) -> str:
    """What a modifier of the format may say."""
    if not valid:
        return f"{row.name} without +{word}"
    return " or ".join(f"{row.name}+{word}.{choice}" for choice in valid)
