"""The table of formats for people: README and command line print it."""

from quantlab.formats.grammar import parse
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import FORMATS, Element, Integer, Scaling

_SCALES = {
    Scaling.NONE: "-",
    Scaling.FLOAT32: "FP32",
    Scaling.MX: "E8M0 / 32",
    Scaling.NVFP4: "E4M3 / 16, FP32",
}


def format_rows(shape: tuple[int, int] = (128, 128)) -> list[dict[str, object]]:
    """One dict a format: name, kind, layout, bits_per_value at ``shape`` (V, K), max, min_normal, smallest, scale,
    granularity (the default first), rounding modes.  max, min_normal, smallest are the element's, unscaled.
    """
    rows: list[dict[str, object]] = []
    for row in FORMATS.values():
        fmt, element = parse(row.name), row.element
        kind = "integer" if isinstance(element, Integer) else "float"
        if row.scaling is not Scaling.NONE:
            kind = f"{kind}, scaled" if row.scaling is Scaling.FLOAT32 else f"{kind}, block-scaled"
        modes = [rounding.value for rounding in Rounding] if fmt.rounded else ["none"]
        if row.scaling is not Scaling.NONE:
            modes.append("error feedback")
        rows.append(
            {
                "name": row.name,
                "kind": kind,
                "layout": layout(element),
                "bits_per_value": fmt.bits_per_value(shape),
                "max": element.max,
                "min_normal": element.min_normal,
                "smallest": element.smallest,
                "scale": _SCALES[row.scaling],
                "granularity": list(row.granularities),
                "rounding": modes,
            }
        )
    return rows


def format_markdown() -> str:
    """The same rows as a Markdown table; the README holds it, and a test compares."""
    lines = [
        "| format | kind | layout | bits per value | largest | smallest normal | smallest | scale | shared by "
        "| rounding |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in format_rows():
        lists = [", ".join(str(x) for x in row[key]) or "-" for key in ("granularity", "rounding")]  # type: ignore
        numbers = [constant_text(row[key]) for key in ("bits_per_value", "max", "min_normal", "smallest")]  # type: ignore
        cells = [f"`{row['name']}`", row["kind"], row["layout"], *numbers, row["scale"], *lists]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def layout(element: Element | Integer) -> str:
    """Sign, exponent and mantissa bits, "1-4-3"; "8-bit" for an integer."""
    if isinstance(element, Integer):
        return f"{element.bits}-bit"
    return f"1-{element.exponent_bits}-{element.mantissa_bits}"


def constant_text(value: float) -> str:
    """A constant of a format with four digits; a whole number below a million with all of them."""
    if abs(value) < 1e6 and value == int(value):
        return f"{value:.0f}"
    return f"{value:.4g}"
