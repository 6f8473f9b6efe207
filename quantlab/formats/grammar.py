"""Format text: ``name [":" granularity] ("+" modifier)*`` -> Format."""

import re
from functools import lru_cache

from quantlab.errors import InputError, unknown_name
from quantlab.formats.format import RESIDUAL_DTYPES, Format
from quantlab.formats.rounding import EXACT_BITS
from quantlab.formats.table import (
    ALIASES,
    FORMATS,
    PLANNED_FORMATS,
    PLANNED_GRANULARITIES,
    PLANNED_MODIFIERS,
    Scaling,
)


def parse(text: str) -> Format:
    """The format named by ``text``, e.g. "nvfp4", "fp16+sr13", "int8:block32+ef.bf16".

    InputError (argument "format") for a name, granularity or modifier that is unknown or not built yet, and
    for a modifier that the format cannot take.
    """
    if not isinstance(text, str):
        raise InputError("format", text, "text such as 'nvfp4' or 'fp16+sr13'")
    return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Format:
    head, *modifiers = text.split("+")
    name, colon, granularity = head.partition(":")
    name = ALIASES.get(name, name)
    if name in PLANNED_FORMATS:
        raise _not_built(text, name)
    if name not in FORMATS:
        raise unknown_name("format", name, [*FORMATS, *ALIASES])
    fields: dict = {"granularity": _granularity(text, name, granularity if colon else None)}
    for modifier in modifiers:
        fields |= _modifier(text, modifier, fields)
    if len(fields) > 1 and name in ("fp32", "fp64"):
        raise InputError("format", text, f"no modifier: {name} rounds nothing")
    if "error_feedback" in fields:
        if fields.get("stochastic"):
            raise InputError(
                "format", text, "+sr or +ef, not both: feedback needs the error of nearest rounding"
            )
        if FORMATS[name].scaling is Scaling.NONE:
            raise InputError("format", text, "+ef on a scaled format (int8, fp8_*, nvfp4)")
    return Format(name, **fields)


def _granularity(text: str, name: str, granularity: str | None) -> str | None:
    valid = FORMATS[name].granularities
    if granularity is None:
        return valid[0] if valid else None
    if granularity in valid:
        return granularity
    if granularity in PLANNED_GRANULARITIES and FORMATS[name].scaling is Scaling.FLOAT32:
        raise _not_built(text, f"{name}:{granularity}")
    if not valid:
        raise InputError("format", text, f"{name} without a granularity: it has no scale")
    raise InputError("format", text, f"{name} with granularity {' or '.join(valid)}")


def _modifier(text: str, modifier: str, fields: dict) -> dict:
    word = modifier.partition(".")[0]
    if word in PLANNED_MODIFIERS:
        raise _not_built(text, f"+{word}")
    if stochastic := re.fullmatch(r"sr([0-9]{0,9})", modifier):
        if "stochastic" in fields:
            raise InputError("format", text, "+sr once")
        bits = int(stochastic[1] or EXACT_BITS)
        if not 1 <= bits <= EXACT_BITS:
            raise InputError("format", text, f"+sr<n> with n random bits, 1 to {EXACT_BITS}")
        return {"stochastic": True, "random_bits": None if bits == EXACT_BITS else bits}
    if feedback := re.fullmatch(r"ef(?:\.(.+))?", modifier):
        residual = feedback[1] or "fp16"
        if "error_feedback" in fields:
            raise InputError("format", text, "+ef once")
        if residual not in RESIDUAL_DTYPES:
            raise InputError("format", text, f"+ef. followed by {', '.join(RESIDUAL_DTYPES)}")
        return {"error_feedback": residual}
    raise InputError("format", text, f"modifiers +sr[n], +ef[.fp16|.fp32|.bf16], not +{modifier}")


def _not_built(text: str, part: str) -> InputError:
    return InputError("format", text, f"a format that is built; {part} is not built yet")
