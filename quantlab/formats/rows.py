"""The table of formats for people: README and command line print it."""

from quantlab.formats.grammar import parse
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import FORMATS, Integer, Scaling


def format_rows(shape: tuple[int, int] = (128, 128)) -> list[dict[str, object]]:
    """One dict a format: name, kind, bits_per_value at ``shape`` (V, K), max, min_normal, smallest,
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
                "bits_per_value": fmt.bits_per_value(shape),
                "max": element.max,
                "min_normal": element.min_normal,
                "smallest": element.smallest,
                "granularity": list(row.granularities),
                "rounding": modes,
            }
        )
    return rows


def format_markdown() -> str:
    """The same rows as a Markdown table; the README holds it, and a test compares."""
    lines = [
        "| format | kind | bits per value | largest | smallest normal | smallest | scale shared by | rounding |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in format_rows():
        lists = [", ".join(str(x) for x in row[key]) or "-" for key in ("granularity", "rounding")]  # type: ignore
        numbers = [f"{row[key]:.4g}" for key in ("bits_per_value", "max", "min_normal", "smallest")]
        lines.append(f"| `{row['name']}` | {row['kind']} | {' | '.join(numbers)} | {' | '.join(lists)} |")
    return "\n".join(lines)
