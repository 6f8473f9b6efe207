"""Records of ``quantlab bench`` as rows, a CSV file and figures."""

import csv
import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantlab.errors import InputError
from quantlab.records import load_records, write_atomic
from quantlab.report.check import SPEED_NUMBERS, check_speed
from quantlab.report.load import BASELINE, Record, check_records

OURS = "quantlab"
SHAPE = ("heads", "value_dim", "key_dim", "key_heads")

Row = dict[str, Any]
Name = tuple[str, str, int]
"""Implementation, policy, drafts."""


def load_speed_records(folder: str | os.PathLike[str]) -> list[Record]:
    """The bench records of ``folder``/records, or of ``folder`` itself.

    Raises InputError if there are none, one is not valid or holds what no table can show, or they were measured under
    different protocols.
    """
    inner = Path(folder) / "records"
    found = [r for r in load_records(inner if inner.is_dir() else folder) if r["kind"] == "bench"]
    if not found:
        raise InputError("records folder", str(folder), "at least one record of quantlab bench")
    for record in found:
        check_speed(record)
    check_records(found)
    return found


def check_stored(folder: str | os.PathLike[str]) -> None:
    """InputError if ``folder`` holds a record that cannot be read, or that no table can show: before more are timed."""
    for record in load_records(folder):
        if record["kind"] == "bench":
            check_speed(record)


def speed_rows(records: Sequence[Record]) -> Iterator[Row]:
    """A row a record: its numbers, and ratios with records of the same run.

    against_baseline, against_peer: how many times faster than our own ``fp32@1`` and than the fastest peer (named in
    ``peer``) at the same family, shape and batch; of drafts, than as many steps, or a peer's verification of as many.
    None without one that was timed in the same run.  A peer whose state has fewer bits a value than our checkpoint is
    no rival: it gives up what ours keeps.  Peers have no peer.

    chosen: the policy whose kernels are to decode in this one's place, or its own.  chosen_us: what they took in the
    same run.  chosen_against_peer: the fastest peer's time over it, a peer with fewer bits than the chosen checkpoint
    being no rival; it may be a slower one than ``peer``, where the choice keeps more bits.
    """
    for record in records:
        point, metrics = record["point"], record["metrics"]
        mine, tokens = metrics.get("us"), point.get("drafts", 1)
        beside = [other for other in records if _same_group(record, other) and other["metrics"].get("us")]
        base = _of_ours(BASELINE, beside)
        best = _fastest_rival(record, beside)
        chosen = _of_ours(metrics.get("chosen", {}).get("policy"), beside)
        rival = _fastest_rival(chosen, beside) if chosen else None
        yield {
            **{name: value for name, value in point.items() if name != "kind"},
            "drafts": point.get("drafts"),
            "run": metrics.get("run"),
            "status": record["status"],
            "message": record["message"],
            **{name: metrics.get(name) for name in SPEED_NUMBERS},
            "against_baseline": tokens * base["metrics"]["us"] / mine if base and mine else None,
            "against_peer": _microseconds(best, tokens) / mine if best and mine else None,
            "peer": best["point"]["implementation"] if best else None,
            "peer_policy": best["point"]["policy"] if best else None,
            "chosen": metrics.get("chosen", {}).get("policy"),
            "chosen_us": chosen["metrics"]["us"] if chosen else None,
            "chosen_against_peer": rival["metrics"]["us"] / chosen["metrics"]["us"]
            if chosen and rival
            else None,
            "chosen_peer": rival["point"]["implementation"] if rival else None,
            "chosen_peer_policy": rival["point"]["policy"] if rival else None,
            "control_share": metrics.get("control_share"),
            "kernels": " + ".join(metrics.get("kernels") or []) or None,
            "launches": metrics.get("launches") or {},
        }


def _of_ours(policy: str | None, beside: Sequence[Record]) -> Record | None:
    """Our steps of a policy."""
    wanted = (OURS, policy, None)
    points = ((r, r["point"]) for r in beside)
    return next((r for r, p in points if (p["implementation"], p["policy"], p.get("drafts")) == wanted), None)


def _fastest_rival(record: Record, beside: Sequence[Record]) -> Record | None:
    """Of one of our records, among the peers' that keep as many bits; of drafts, their steps or as many drafts."""
    if record["point"]["implementation"] != OURS:
        return None
    bits, tokens = record["metrics"]["checkpoint_bits"], record["point"].get("drafts", 1)
    peers = (r for r in beside if r["point"]["implementation"] != OURS)
    rivals = (
        r
        for r in peers
        if r["metrics"]["checkpoint_bits"] >= bits and r["point"].get("drafts", tokens) == tokens
    )
    return min(rivals, key=lambda r: _microseconds(r, tokens), default=None)


def _microseconds(record: Record, tokens: int) -> float:
    """Of as many steps, or of a verification of so many drafts."""
    return record["metrics"]["us"] * tokens / record["point"].get("drafts", 1)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By family, shape and batch, ours before peers, each by policy; the baseline first."""

    def key(row: Row) -> tuple[Any, ...]:
        where = (row["device"], row["family"], *(row[name] for name in SHAPE), row["batch"])
        policy = row["policy"]
        ours = row["implementation"] == OURS
        return (*where, not ours, row["implementation"], policy != BASELINE, policy, row["drafts"] or 0)

    return sorted(rows, key=key)


def _same_group(one: Record, other: Record) -> bool:
    if one["metrics"].get("run") != other["metrics"].get("run"):
        return False
    names = set(one["point"]) - {"policy", "implementation", "drafts"}
    return all(one["point"][name] == other["point"].get(name) for name in names)


def speed_csv(rows: Sequence[Row], path: str | os.PathLike[str]) -> Path:
    """The rows as a CSV file, all or nothing; single kernels as columns of their own."""
    launches = list(dict.fromkeys(name for row in rows for name in row["launches"]))
    names = [name for name in rows[0] if name != "launches"]
    extra = [f"{name}_{part}" for name in launches for part in ("us", "of_copy")]
    text = io.StringIO()
    writer = csv.DictWriter(text, names + extra, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        alone = {
            f"{name}_{part}": found.get(part)
            for name, found in row["launches"].items()
            for part in ("us", "of_copy")
        }
        writer.writerow({name: row[name] for name in names} | alone)
    write_atomic(path, text.getvalue().encode())
    return Path(path)


def draw_speed(rows: Sequence[Row], folder: str | os.PathLike[str]) -> list[Path]:
    """A figure (PNG and SVG) for each device, family and shape in ``folder``; returns the paths.

    Left: bytes moved in a second against the batch, with what the copy reaches.  Right: time at the largest batch.
    """
    paths = []
    for key in dict.fromkeys(_figure_key(row) for row in rows if row["us"]):
        mine = [row for row in rows if row["us"] and _figure_key(row) == key]
        paths += _draw(key, mine, Path(folder))
    return paths


def _figure_key(row: Row) -> tuple[Any, ...]:
    return (row["device"], row["family"], *(row[name] for name in SHAPE))


def _draw(key: tuple[Any, ...], rows: list[Row], folder: Path) -> list[Path]:
    import seaborn as sns
    from matplotlib.figure import Figure

    from quantlab.report.style import look

    device, family, *shape = key
    with look(text_as_paths=True):
        largest = max(row["batch"] for row in rows)
        bars = [row for row in rows if row["batch"] == largest]
        figure = Figure(figsize=(10.5, max(3.4, 1.3 + 0.27 * len(bars))))
        figure.set_facecolor("white")
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 0.8))
        styles = _styles(rows)
        _draw_rates(left, rows, styles)
        _draw_times(right, bars, styles, largest)
        keys = f"{shape[3]} key head{'' if shape[3] == 1 else 's'}"
        figure.suptitle(
            f"{family}, {shape[0]} heads of {shape[1]} x {shape[2]}, {keys}; {device}",
            x=0.01,
            ha="left",
            fontsize=9.5,
            fontweight="bold",
        )
        sns.despine(figure)
        figure.tight_layout()
        paths = []
        for suffix in (".png", ".svg"):
            path = folder / f"speed-{family}-{'x'.join(map(str, shape))}{suffix}"
            data = io.BytesIO()
            figure.savefig(
                data,
                format=suffix[1:],
                dpi=160,
                metadata={"Date": None} if suffix == ".svg" else None,
            )
            write_atomic(path, data.getvalue())
            paths.append(path)
    return paths


def _name(row: Row) -> Name:
    return row["implementation"], row["policy"], row["drafts"] or 0


def _label(name: Name) -> str:
    implementation, policy, drafts = name
    what = f"{policy}, {drafts} drafts" if drafts else policy
    return what if implementation == OURS else f"{implementation}: {what}"


def _styles(rows: Sequence[Row]) -> dict[Name, Any]:
    """Ours first, so that peers change nobody's colour.  Dashes say whose a line is: beyond ten, lighter colours and
    other markers tell the second round from the first.
    """
    from quantlab.report.style import BASELINE_STYLE, MARKERS, PALETTE, Style

    names = sorted(set(map(_name, rows)), key=lambda name: (name[0] != OURS, *name))
    styles = {}
    for index, name in enumerate(name for name in names if _label(name) != BASELINE):
        again, place = divmod(index, len(PALETTE))
        color, marker = PALETTE[place][again % 2], MARKERS[(place + again) % len(MARKERS)]
        styles[name] = Style(color, "-" if name[0] == OURS else "--", marker)
    return {name: styles.get(name, BASELINE_STYLE) for name in names}


def _draw_rates(axes: Any, rows: list[Row], styles: dict[Name, Any]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    from quantlab.report.style import INK, MUTED

    copy = max(row["copy_bandwidth"] for row in rows) / 1e6
    axes.axhline(copy, color=INK, linewidth=1)
    for name, style in styles.items():
        mine = sorted((row for row in rows if _name(row) == name), key=lambda row: row["batch"])
        axes.plot(
            [row["batch"] for row in mine],
            [row["bytes_per_us"] / 1e6 for row in mine],
            color=style.color,
            marker=style.marker,
            markersize=4,
            linestyle="-" if name[0] == OURS else "--",
            linewidth=1.4,
            label=_label(name),
        )
    batches = sorted({row["batch"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.3, batches[-1] * 1.3)
    axes.text(
        batches[0] / 1.25, copy * 1.015, f"copy, {copy:.2f} TB/s", fontsize=7.6, color=MUTED, va="bottom"
    )
    axes.set_ylim(0, max([copy, *(row["bytes_per_us"] / 1e6 for row in rows)]) * 1.1)
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="rows of the batch", ylabel="own bytes, TB/s")
    named = {_name(row) for row in rows if row["batch"] == batches[-1]}
    for name, style in styles.items():
        if name not in named:  # the bars name what was timed at the largest batch
            last = max((row for row in rows if _name(row) == name), key=lambda row: row["batch"])
            at = (last["batch"] * 1.06, last["bytes_per_us"] / 1e6)
            axes.text(*at, _label(name), fontsize=7, color=style.color, va="center")


def _draw_times(axes: Any, rows: list[Row], styles: dict[Name, Any], batch: int) -> None:
    order = sorted(rows, key=lambda row: -row["us"])
    longest = order[0]["us"]
    for place, row in enumerate(order):
        style, ours = styles[_name(row)], row["implementation"] == OURS
        axes.barh(
            place,
            row["us"],
            height=0.62,
            color=style.color if ours else "white",
            edgecolor=style.color,
            hatch=None if ours else "////",
            linewidth=1,
        )
        digits = max(0, 2 - math.floor(math.log10(row["us"]))) if row["us"] > 0 else 0
        end = max(row["us"], row["us_upper"] or 0.0) + 0.012 * longest
        axes.text(end, place, f"{row['us']:.{min(digits, 2)}f}", va="center", fontsize=7.6)
        shown = [row["us"] - (row["us_lower"] or row["us"])], [(row["us_upper"] or row["us"]) - row["us"]]
        axes.errorbar(row["us"], place, xerr=shown, color="black", linewidth=0.8, capsize=0)
    drafts = any(row["drafts"] for row in rows)
    one = ", one step" if drafts else ""  # beside drafts, of which a bar is several tokens
    axes.set_yticks(
        range(len(order)), [_label(_name(row)) + (one if not row["drafts"] else "") for row in order]
    )
    axes.tick_params(axis="y", length=0, labelsize=7.6)
    axes.set_xlim(0, longest * 1.16)
    what = "a step or of drafts" if drafts else "a step"
    axes.set_xlabel(f"microseconds of {what} at batch {batch}")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
