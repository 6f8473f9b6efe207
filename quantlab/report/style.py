"""How policies look everywhere: one colour, dash and marker each; and SVG text that follows the page's colour
scheme."""

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.figure import Figure

from quantlab.report.load import BASELINE

# Told apart with each of the common colour-vision deficiencies (Okabe and Ito 2008, darkened for white
# paper); light, dark.  Beyond ten policies, dashes and markers tell the second round from the first.
PALETTE = (
    ("#0072b2", "#5ab4f0"),
    ("#d55e00", "#ff8f4f"),
    ("#00805e", "#3dd6a3"),
    ("#a23e92", "#dd8fd0"),
    ("#9a7400", "#e5bd3f"),
    ("#1f82a6", "#8fdcf5"),
    ("#7a4a2a", "#d3a27f"),
    ("#d6428a", "#ff9ccb"),
    ("#5a5cc2", "#b3b5ff"),
    ("#64720a", "#c6d45e"),
)
INK, MUTED, GRID = "#1b1f24", "#5b6470", "#d5dae0"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    light: f"--p{index}" for index, (light, _) in enumerate(PALETTE)
}
MARKERS = "osD^vPX*hd"
PANEL_WIDTH, PANEL_HEIGHT = 4.7, 3.3  # inches of one panel; at this size 8 pt text stays readable on a phone


@dataclass(frozen=True)
class Style:
    """How one policy is drawn everywhere."""

    color: str
    dash: str
    marker: str


BASELINE_STYLE = Style(MUTED, ":", "o")


def policy_styles(policies: Sequence[str]) -> dict[str, Style]:
    """One style a policy; the baseline is ink-coloured and dotted."""
    styles = {}
    for index, policy in enumerate(policy for policy in policies if policy != BASELINE):
        dash = "-" if index < len(PALETTE) else ("--" if index < 2 * len(PALETTE) else "-.")
        color = PALETTE[index % len(PALETTE)][0]
        styles[policy] = Style(color, dash, MARKERS[index % len(MARKERS)])
    return styles | {BASELINE: BASELINE_STYLE}


@contextmanager
def look(text_as_paths: bool = False) -> Iterator[None]:
    settings: dict[Any, Any] = {
        "svg.fonttype": "path" if text_as_paths else "none",
        "svg.hashsalt": "quantlab",
        "font.size": 8.5,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "text.color": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "axes.linewidth": 0.8,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "axes.labelsize": 8.5,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
    }
    with matplotlib.rc_context(), sns.axes_style("ticks"), matplotlib.rc_context(settings):
        yield


def to_svg(figure: Figure, label: str, salt: str) -> str:
    """Inline SVG: no XML head, no fixed size or font, policy colours as variables, identifiers unique to
    ``salt``."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{html.escape(label)}">',
        text,
        count=1,
    )
    text = re.sub(
        r"font: (?:(bold|normal|\d+) )?([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", text
    )
    # The page's own font: matplotlib's list begins with names that a reader may not have.
    text = re.sub(r"font-weight: ;|font-family: [^;\"]*;?", "", text)
    # Identifiers that matplotlib does not salt (figure_1, axes_1, text_3) would repeat from figure to figure.
    text = re.sub(
        r' id="(?:figure|axes|patch|matplotlib\.axis|[xy]tick|line2d|text|[A-Za-z]*Collection)_\d+"',
        "",
        text,
    )
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text.strip()
