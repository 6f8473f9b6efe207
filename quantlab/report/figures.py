"""Figures as SVG text.  Colours are CSS variables inside the page, so that one figure serves light, dark and
print."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from quantlab.errors import InputError, unknown_name
from quantlab.report.load import Record
from quantlab.report.style import GRID, MUTED, PANEL_HEIGHT, PANEL_WIDTH, Style, look, policy_styles, to_svg
from quantlab.report.tables import DriftRow, EvalRow, stream_groups


def drift_panels(groups: Mapping[str, list[Record]], styles: Mapping[str, Style]) -> list[tuple[str, str]]:
    """(heading, SVG) of every stream: output error per token, measured as a line, predicted as a band."""
    curves = {name: _curves(group) for name, group in groups.items()}
    values = [
        v
        for found in curves.values()
        for curve in found.values()
        for v in curve["output_error"]
        if _positive(v)
    ]
    if not values:
        return []
    limits = (max(min(values) / 2, 1e-9), min(max(values) * 3, 1e3))
    panels = []
    for index, (name, found) in enumerate(curves.items()):
        if found:
            with look():
                figure = Figure(figsize=(PANEL_WIDTH, PANEL_HEIGHT))
                axes = figure.add_axes((0.125, 0.145, 0.625, 0.80))
                _draw_curves(axes, found, styles, limits)
                panels.append(
                    (name, to_svg(figure, f"Output error per decoded token, {name}", f"drift {index} {name}"))
                )
    return panels


def _curves(group: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """First seed of each policy: further seeds would lie on top of it, and the table pools them."""
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(group, key=_seed):
        curve = record["curve"]
        if curve and curve.get("output_error") and record["status"] in ("ok", "diverged"):
            found.setdefault(record["point"]["policy"], curve | {"diverged": record["status"] == "diverged"})
    return found


def _seed(record: Record) -> str:
    stream = record["point"].get("stream")
    return str(stream.get("seed", 0)) if isinstance(stream, dict) else "0"


def _draw_curves(
    axes: Axes, curves: Mapping[str, dict[str, Any]], styles: Mapping[str, Style], limits: tuple[float, float]
) -> None:
    ends = {}
    for policy, curve in curves.items():
        style = styles[policy]
        step, error = np.asarray(curve["step"], float), np.asarray(curve["output_error"], float)
        low, high = curve.get("predicted_low"), curve.get("predicted_high")
        if low is not None and high is not None:
            axes.fill_between(
                step,
                np.asarray(low, float),
                np.asarray(high, float),
                color=style.color,
                alpha=0.16,
                linewidth=0,
            )
        good = np.isfinite(error) & (error > 0)
        # A line that leaves the panel ends there, where the mark of a diverged run can be seen.
        good &= np.cumsum(error > limits[1]) <= 1
        if not good.any():
            continue
        shown = np.minimum(error[good], limits[1])
        axes.plot(step[good], shown, color=style.color, linestyle=style.dash, linewidth=1.6)
        last = float(max(shown[-1], limits[0]))
        if curve["diverged"]:
            mark = {"marker": "x", "markersize": 7, "markeredgewidth": 2, "clip_on": False}
            axes.plot(step[good][-1], last, color=style.color, **mark)
        ends[policy] = last
    axes.set(xscale="log", yscale="log", ylim=limits, xlabel="decoded tokens", ylabel="relative output error")
    _plain_ticks(axes)
    axes.grid(axis="y", which="major")
    sns.despine(ax=axes)
    diverged = {policy for policy, curve in curves.items() if curve["diverged"]}
    _label_ends(axes, ends, styles, limits, diverged)


def _plain_ticks(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_power))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _power(value: float, _: int) -> str:
    exponent = round(math.log10(value))
    if -2 <= exponent <= 2:
        return f"{value:g}"
    return f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _label_ends(
    axes: Axes,
    ends: Mapping[str, float],
    styles: Mapping[str, Style],
    limits: tuple[float, float],
    diverged: set[str],
) -> None:
    """Policy names at the right edge, pushed apart so that none covers another, each with a thread to its
    line."""
    low, high = map(math.log10, limits)
    height = {policy: (math.log10(value) - low) / (high - low) for policy, value in ends.items()}
    order = sorted(height, key=lambda policy: height[policy])
    gap = min(0.062, 1.0 / max(len(order), 1))
    places = spread([height[policy] for policy in order], gap)
    for policy, place in zip(order, places, strict=True):
        name = policy if len(policy) <= 19 else policy[:18] + "…"
        color = styles[policy].color
        axes.plot(
            [1.0, 1.035],
            [height[policy], place],
            transform=axes.transAxes,
            color=color,
            linewidth=0.8,
            clip_on=False,
        )
        suffix = " ×" if policy in diverged else ""
        axes.text(
            1.045,
            place,
            name + suffix,
            transform=axes.transAxes,
            color=color,
            fontsize=7.6,
            va="center",
            clip_on=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places in [0, 1], ascending, moved as little as needed to be ``gap`` apart."""
    moved = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else max(place, 0.0))
    limit = 1.0
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def cost_panels(rows: Sequence[DriftRow], styles: Mapping[str, Style]) -> list[tuple[str, str]]:
    """(heading, SVG) for each family and size: bytes per token against output error, range over streams,
    Pareto front."""
    layers: dict[str, dict[str, list[DriftRow]]] = {}
    for row in rows:
        if row.bytes_per_token and row.output_error:
            layers.setdefault(row.layer, {}).setdefault(row.policy, []).append(row)
    return [(layer, _cost_panel(layer, found, styles)) for layer, found in layers.items()]


def _cost_panel(layer: str, found: Mapping[str, list[DriftRow]], styles: Mapping[str, Style]) -> str:
    points = {}
    with look():
        figure = Figure(figsize=(PANEL_WIDTH, PANEL_HEIGHT))
        axes = figure.add_axes((0.125, 0.145, 0.625, 0.80))
        for policy, rows in found.items():
            errors = [e for row in rows if (e := row.output_error) and math.isfinite(e)]
            if not errors:
                continue
            cost = float(np.mean([row.bytes_per_token or 0.0 for row in rows])) / 1024
            lost = len(errors) < len(rows)
            style = styles[policy]
            axes.plot([cost, cost], [min(errors), max(errors)], color=style.color, linewidth=1.2, alpha=0.6)
            axes.plot(
                cost, max(errors), marker="x" if lost else style.marker, color=style.color, markersize=6
            )
            points[policy] = (cost, max(errors), lost)
        front = pareto({policy: point[:2] for policy, point in points.items() if not point[2]})
        if len(front) > 1:
            xs, ys = zip(*(points[policy][:2] for policy in front), strict=True)
            axes.step(xs, ys, where="post", color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.set(xscale="log", yscale="log", xlabel="KiB per token and sequence", ylabel="worst output error")
        low, high = axes.get_xlim()
        ticks = [t for e in range(-3, 9) for m in (1, 2, 5) if low <= (t := m * 10.0**e) <= high]
        _plain_ticks(axes)
        axes.set_xticks(ticks)
        axes.grid(which="major")
        sns.despine(ax=axes)
        limits = axes.get_ylim()
        ends = {policy: point[1] for policy, point in points.items()}
        _label_ends(axes, ends, styles, limits, {policy for policy, point in points.items() if point[2]})
        return to_svg(figure, f"Bytes per token against output error, {layer}", f"cost {layer}")


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points that no other beats in both numbers, in order of the first."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front


def dot_plot(
    values: Mapping[str, float | None], styles: Mapping[str, Style], xlabel: str, label: str, salt: str
) -> str | None:
    """SVG of one positive number a policy on a log axis, smallest on top; zeros are said in words."""
    shown = {policy: value for policy, value in values.items() if value is not None and math.isfinite(value)}
    positive = [value for value in shown.values() if value > 0]
    if not positive:
        return None
    order = sorted(shown, key=lambda policy: -shown[policy])
    floor = min(positive) / 3
    with look():
        figure = Figure(figsize=(PANEL_WIDTH, max(1.6, 0.26 * len(order) + 0.7)))
        axes = figure.add_axes((0.30, 0.55 / figure.get_figheight(), 0.62, 1 - 0.7 / figure.get_figheight()))
        for place, policy in enumerate(order):
            value, style = shown[policy], styles[policy]
            if value > 0:
                axes.plot([floor, value], [place, place], color=GRID, linewidth=1.2, zorder=0)
                axes.plot(value, place, marker=style.marker, color=style.color, markersize=6, linestyle="")
            else:
                axes.text(floor * 1.15, place, "exactly 0", va="center", color=MUTED, fontsize=7.6)
        axes.set_xscale("log")
        axes.set_xlim(floor, max(positive) * 2)
        axes.set_yticks(range(len(order)), [p if len(p) <= 22 else p[:21] + "…" for p in order])
        for tick, policy in zip(axes.get_yticklabels(), order, strict=True):
            tick.set_color(styles[policy].color)
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_major_formatter(FuncFormatter(_power))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(xlabel)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        sns.despine(ax=axes, left=True)
        return to_svg(figure, label, salt)


def accuracy_panels(rows: Sequence[EvalRow], styles: Mapping[str, Style]) -> list[tuple[str, str]]:
    """(heading, SVG) for each model and task: accuracy change against fp32@1 with its paired 95 %
    interval."""
    panels = []
    for key in dict.fromkeys((row.model, row.task) for row in rows):
        mine = [row for row in rows if (row.model, row.task) == key and row.paired]
        if not mine:
            continue
        with look():
            figure = Figure(figsize=(PANEL_WIDTH, max(1.6, 0.28 * len(mine) + 0.8)))
            height = figure.get_figheight()
            axes = figure.add_axes((0.30, 0.55 / height, 0.62, 1 - 0.7 / height))
            axes.axvline(0, color=MUTED, linewidth=1)
            for place, row in enumerate(reversed(mine)):
                if row.paired:
                    style, paired = styles[row.policy], row.paired
                    axes.plot(
                        [100 * paired.low, 100 * paired.high],
                        [place, place],
                        color=style.color,
                        linewidth=2,
                        solid_capstyle="butt",
                    )
                    axes.plot(
                        100 * paired.difference, place, marker=style.marker, color=style.color, markersize=6
                    )
            axes.set_yticks(range(len(mine)), [row.policy for row in reversed(mine)])
            for tick, row in zip(axes.get_yticklabels(), reversed(mine), strict=True):
                tick.set_color(styles[row.policy].color)
            axes.set_ylim(-0.6, len(mine) - 0.4)
            axes.set_xlabel("accuracy change, percentage points")
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x")
            sns.despine(ax=axes, left=True)
            salt = f"accuracy{len(panels)}"
            panels.append((f"{key[1]}, {key[0]}", to_svg(figure, f"Accuracy change on {key[1]}", salt)))
    return panels


def drift_overview(
    records: Sequence[Record], path: str | os.PathLike[str], *, policies: Sequence[str] | int = 5
) -> Path:
    """Draw the README's figure to ``path`` (.svg or .png): output error per token on the slowest-decaying
    stream.

    Takes the stream of the records with the most policies, then the largest alpha, and ``policies`` of them
    spread over the range of errors, baseline included.  Raises InputError if there is no drift curve or the
    ending is another.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise InputError("path", str(path), "a name that ends in .svg or .png")
    groups = stream_groups([record for record in records if record["kind"] == "drift"])
    curves = {name: _curves(group) for name, group in groups.items()}
    curves = {name: found for name, found in curves.items() if found}
    if not curves:
        raise InputError("records", len(records), "drift records with a curve")

    def rank(name: str) -> tuple[int, float]:
        return len(curves[name]), groups[name][0]["point"]["stream"].get("alpha") or 0.0

    name = max(curves, key=rank)
    found = curves[name]
    chosen = {policy: found[policy] for policy in _pick(found, policies)}
    values = [v for curve in chosen.values() for v in curve["output_error"] if _positive(v)]
    limits = (max(min(values) / 2, 1e-9), min(max(values) * 2, 1e3))
    with look(text_as_paths=True):
        figure = Figure(figsize=(7.2, 3.8))
        figure.set_facecolor("white")
        axes = figure.add_axes((0.10, 0.14, 0.68, 0.76))
        _draw_curves(axes, chosen, policy_styles(sorted(chosen)), limits)
        axes.set_title(f"{name}: measured (lines), predicted (bands)")
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _pick(found: Mapping[str, Mapping[str, Any]], policies: Sequence[str] | int) -> list[str]:
    if not isinstance(policies, int):
        for policy in policies:
            if policy not in found:
                raise unknown_name("policies", policy, found)
        return list(policies)
    order = sorted(found, key=lambda policy: _final(found[policy]))
    picks = {round(index) for index in np.linspace(0, len(order) - 1, min(policies, len(order)))}
    return [order[index] for index in sorted(picks)]


def _final(curve: Mapping[str, Any]) -> float:
    values = [value for value in curve["output_error"] if _positive(value)]
    return math.inf if curve["diverged"] or not values else values[-1]


def _positive(value: Any) -> bool:
    return value is not None and math.isfinite(value) and value > 0
