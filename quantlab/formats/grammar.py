"""Format text: ``name [":" granularity] ("+" modifier)*`` -> Format."""

import re
from collections.abc import Callable
from functools import lru_cache

from quantlab.errors import InputError, unknown_name
from quantlab.formats.components import COMPONENTS, LARGEST_RANK, MEAN
from quantlab.formats.format import Format
from quantlab.formats.four_over_six import METRICS, SCALE_MAXIMA, canonical_options
from quantlab.formats.nvfp4 import DEFAULT_FLOOR, FLOORS
from quantlab.formats.nvfp4_profiles import PROFILES as NVFP4_PROFILES
from quantlab.formats.recipes import canonical_profile, profiles_of
from quantlab.formats.rounding import EXACT_BITS, Rounding
from quantlab.formats.storage import RESIDUAL_DTYPES
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
    "+overflow.<mode>", "+keyscale", "+mean", "+rank<r>", "+hadamard[.<seed>]", "+rz", "+sr[<bits>]", "+ef[.<format>]",
)  # fmt: skip
"""What may follow a name, in the order of canonical text."""


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
            choice = {"rounding": "one of +rz and +sr, once", "component": "one of +mean and +rank<r>, once"}
            once = choice.get(next(iter(new)), f"+{word} once")
            raise InputError("format", text, once)
        fields |= new
    _check_together(text, row, fields)
    return Format(name, **{key: value for key, value in fields.items() if value is not None})


def choices(row: FormatRow) -> dict[str, list[str]]:
    """What may follow the name in a text of the format, by kind; the first of a kind is its default if it has one.

    Not all of it goes together; ``parse`` decides.
    """
    element = row.element
    scaled = row.scaling is not Scaling.NONE
    nvfp4 = row.scaling is Scaling.NVFP4
    offered = {
        "granularity": [f":{name}" for name in row.granularities],
        "library": [f"+as.{name}" for name in profiles_of(row)],
        "scale": [f"+scale.{name}" for name in row.scales],
        "floor": [f"+floor.{name}" for name in (DEFAULT_FLOOR, *(f for f in FLOORS if f != DEFAULT_FLOOR))],
        "four over six": ["+4over6", *(f"+4over6.{m}.{s}" for m in METRICS for s in SCALE_MAXIMA)],
        "overflow": [f"+overflow.{mode.value}" for mode in _overflows(row)],
        "key scales": ["+keyscale"],
        "component": ["+mean", "+rank<r>"],
        "rotation": ["+hadamard", "+hadamard.<seed>"],
        "rounding": ["+rz", "+sr", "+sr<bits>"],
        "error feedback": ["+ef", "+ef.<format>"],
    }
    if not nvfp4:
        del offered["floor"], offered["four over six"]
    if not scaled:
        del offered["key scales"], offered["component"], offered["rotation"], offered["error feedback"]
    if element.name in ("fp32", "fp64"):
        return {}
    return {kind: texts for kind, texts in offered.items() if texts}


def _split(modifier: str) -> tuple[str, str | None]:
    """The word of a modifier and what follows it, None if nothing does."""
    if modifier.startswith("sr"):
        stochastic = re.fullmatch(r"sr([0-9]*)", modifier)
        return ("sr", stochastic[1] or None) if stochastic else (modifier, None)
    if modifier.startswith("rank"):
        rank = re.fullmatch(r"rank([0-9]*)", modifier)
        return ("rank", rank[1] or None) if rank else (modifier, None)
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
    profile = canonical_profile(row, library)
    if profile is None:
        raise InputError("format", text, _offer(row, "as", profiles_of(row)))
    return {"profile": profile}


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
    if row.scaling is not Scaling.NVFP4:
        raise InputError("format", text, "+4over6 on nvfp4 only")
    return {"four_over_six": "" if options is None else f".{options}"}


def _overflow(text: str, row: FormatRow, mode: str | None) -> dict:
    element, valid = row.element, [overflow.value for overflow in _overflows(row)]
    if mode not in valid:
        raise InputError("format", text, _offer(row, "overflow", valid))
    assert isinstance(element, Element)
    chosen = Overflow(mode)
    return {"overflow": None if chosen is element.overflow else chosen}


def _overflows(row: FormatRow) -> list[Overflow]:
    """The element's own first; empty for a scaled format, whose overflow no text changes."""
    element = row.element
    if row.scaling is not Scaling.NONE or not isinstance(element, Element):
        return []
    return sorted(element.overflows, key=lambda overflow: overflow is not element.overflow)


def _key_scale(text: str, row: FormatRow, argument: str | None) -> dict:
    if row.scaling is Scaling.NONE or argument is not None:
        raise InputError("format", text, "+keyscale on a scaled format, without an argument")
    return {"key_scale": True}


def _mean(text: str, row: FormatRow, argument: str | None) -> dict:
    if row.scaling is Scaling.NONE or argument is not None:
        raise InputError("format", text, "+mean on a scaled format, without an argument")
    return {"component": MEAN}


def _rank(text: str, row: FormatRow, rank: str | None) -> dict:
    component = f"rank{rank}"
    if row.scaling is Scaling.NONE or component not in COMPONENTS:
        raise InputError("format", text, f"+rank<r> on a scaled format, r from 1 to {LARGEST_RANK}")
    return {"component": component}


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
    residual = "fp16" if residual is None else ALIASES.get(residual, residual)
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
    "keyscale": _key_scale,
    "mean": _mean,
    "rank": _rank,
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
    profile = fields.get("profile")
    for option in ("scale", "floor"):
        if fields.get(option) is not None and (profile is not None or "four_over_six" in fields):
            raise InputError("format", text, f"+{option} on the plain canonical recipe only")
    if "four_over_six" in fields:
        if fields["granularity"] == "none":
            raise InputError("format", text, "+4over6 with a global scale: its room for 4 comes from there")
        try:
            options = canonical_options(profile, fields["four_over_six"])
        except InputError as error:
            raise InputError("format", text, f"a {error.argument} of {error.expected}") from error
        fields["four_over_six"] = options
    elif fields["granularity"] == "none" and profile is not None and not NVFP4_PROFILES[profile].one_level:
        raise InputError("format", text, f"{profile} with a global scale: it has no NVFP4 without one")


def _offer(row: FormatRow, word: str, valid: list[str] | tuple[str, ...]) -> str:
    """What a modifier of the format may say."""
    if not valid:
        return f"{row.name} without +{word}"
    return " or ".join(f"{row.name}+{word}.{choice}" for choice in valid)
