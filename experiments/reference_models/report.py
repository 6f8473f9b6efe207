"""Table and figure of what ``measure.py`` recorded.

python experiments/reference_models/report.py                       # the table of the default level
python experiments/reference_models/report.py --level 512
python experiments/reference_models/report.py --figure experiments/reference_models/dose-response.png
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from experiments.reference_models.arguments import one_line_errors
from experiments.reference_models.measure import BASELINE, LEVELS, POLICIES, right_answers
from quantlab.errors import InputError
from quantlab.statistics.paired import paired_accuracy_interval

HERE = Path(__file__).parent
DEFAULT_LEVEL = "152"
SHOWN_AGAINST_WRITES = (BASELINE, "int8@1", "fp8_e4m3@1", "nvfp4@1", "nvfp4@16", "fp32/nvfp4@16")
WRITES = {"32": 32, "152": 152, "512": 512, "2048": 2048}


@dataclass(frozen=True)
class Row:
    """One policy of one model at one level against the baseline on the same questions; points are percent.

    change: (points, low, high) by what is asked, Tango's 95 % interval.
    """

    policy: str
    items: int
    right: Mapping[str, float]
    change: Mapping[str, tuple[float, float, float]]
    bits_per_value: float
    bytes_per_token: float


class Records:
    """What is in a folder of records, by model, level and policy; of several seeds of rounding the first."""

    def __init__(self, folder: Path):
        self._found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        paths = sorted(folder.glob("*.json"))
        if not paths:
            raise InputError("records", str(folder), "a folder of records that measure.py wrote")
        for path in paths:
            record = json.loads(path.read_text())
            point = record["point"]
            level = next((name for name, (level, _) in LEVELS.items() if vars(level) == point["level"]), None)
            if level is None or point["items"] != LEVELS[level][1] or record["status"] != "ok":
                continue
            here = self._found.setdefault((point["model"], level), {})
            held = here.get(point["policy"])
            if held is None or point["seed"] < held["point"]["seed"]:
                here[point["policy"]] = record
        self.models = sorted({model for model, _ in self._found})

    def rows(self, model: str, level: str) -> dict[str, Row]:
        """By policy, the study's in its order and then others; {} without a baseline."""
        found = self._found.get((model, level), {})
        if BASELINE not in found:
            return {}
        base = _answers(found[BASELINE])
        return {policy: _row(found[policy], base) for policy in self.policies(model, level)}

    def policies(self, model: str, level: str) -> list[str]:
        """What there are records of, the study's in its order and then others; with or without a baseline."""
        found = self._found.get((model, level), {})
        return [*(p for p in POLICIES if p in found), *sorted(p for p in found if p not in POLICIES)]

    def answers(self, model: str, level: str, policy: str) -> dict[str, NDArray[np.bool_]]:
        """Which questions were answered right, (items,) by what is asked."""
        return _answers(self._found[model, level][policy])


def _answers(record: dict[str, Any]) -> dict[str, NDArray[np.bool_]]:
    metrics, items = record["metrics"], record["point"]["items"]
    return {asked: right_answers(metrics[f"{asked}s"], items) for asked in ("letter", "value")}


def _row(record: dict[str, Any], base: Mapping[str, NDArray[np.bool_]]) -> Row:
    metrics, answers, change = record["metrics"], _answers(record), {}
    for asked, right in answers.items():
        lost, gained = int((base[asked] & ~right).sum()), int((~base[asked] & right).sum())
        low, high = paired_accuracy_interval(lost, gained, len(right))
        change[asked] = (100 * (gained - lost) / len(right), 100 * low, 100 * high)
    return Row(
        record["point"]["policy"],
        record["point"]["items"],
        {asked: 100 * float(right.mean()) for asked, right in answers.items()},
        change,
        metrics["bits_per_value"],
        metrics["bytes_per_token"],
    )


def table(records: Records, level: str) -> Iterator[str]:
    """Markdown lines, one table a model."""
    for model in records.models:
        rows = records.rows(model, level)
        if not rows:
            continue
        base = rows[BASELINE]
        yield f"**{model}**, {level}, {base.items:,} questions"
        yield ""
        yield "| policy | letter % | recall % | letters lost or gained | recall lost or gained | bytes moved |"
        yield "|---|---|---|---|---|---|"
        for row in rows.values():
            share = 100 * row.bytes_per_token / base.bytes_per_token
            changes = ["", ""] if row is base else [_text(row.change[asked]) for asked in ("letter", "value")]
            cells = [row.policy, f"{row.right['letter']:.1f}", f"{row.right['value']:.1f}", *changes]
            yield "| " + " | ".join([*cells, f"{share:.0f} %"]) + " |"
        yield ""


def _text(change: tuple[float, float, float]) -> str:
    points, low, high = change
    return f"{points:+.1f} [{low:+.1f}, {high:+.1f}]"


def figure(records: Records, path: Path) -> None:
    """Every policy of every model at the default level, and some of them against the number of writes."""
    from matplotlib.figure import Figure

    from quantlab.report.style import GRID, INK, MUTED, look, policy_styles

    styles = policy_styles(SHOWN_AGAINST_WRITES)
    models = [model for model in records.models if records.rows(model, DEFAULT_LEVEL)]
    with look(text_as_paths=True):
        chart = Figure(figsize=(2.3 * len(models) + 1.6, 8.4), layout="constrained")
        axes = chart.subplots(2, len(models), sharey="row", height_ratios=(2, 1), squeeze=False)
        shown = [policy for policy in POLICIES if policy != BASELINE]
        for column, model in enumerate(models):
            above, below = axes[0, column], axes[1, column]
            rows = records.rows(model, DEFAULT_LEVEL)
            for place, policy in enumerate(shown):
                if policy not in rows:
                    continue
                for asked, color, shift in (("value", INK, 0.0), ("letter", "#d55e00", 0.28)):
                    points, low, high = rows[policy].change[asked]
                    above.plot([low, high], [place + shift] * 2, color=color, lw=1.2)
                    above.plot(points, place + shift, "o", color=color, ms=3.2)
            above.axvline(0, color=MUTED, lw=0.8, ls=":")
            above.set(title=model, xlim=(-103, 8), xlabel="points against fp32@1")
            above.set_yticks(range(len(shown)), shown)
            above.set_ylim(len(shown) - 0.4, -0.6)
            above.grid(axis="both", color=GRID)
            for policy in SHOWN_AGAINST_WRITES:
                found = {
                    WRITES[level]: rows[policy].right["value"]
                    for level in WRITES
                    if policy in (rows := records.rows(model, level))
                }
                style = styles[policy]
                below.plot(
                    list(found), list(found.values()), color=style.color, ls=style.dash, marker=style.marker,
                    ms=4, lw=1.3, label=policy,
                )  # fmt: skip
            below.set(xscale="log", ylim=(-3, 103), xlabel="writes behind the facts")
            below.set_xlim(24, 2700)
            below.set_xticks(list(WRITES.values()), [f"{n:,}" for n in WRITES.values()])
            below.minorticks_off()
            below.grid(color=GRID)
        axes[1, 0].set_ylabel("recall %")
        axes[1, -1].legend(loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False)
        axes[0, -1].plot([], [], "o-", color=INK, ms=3.2, label="recall (of 64)")
        axes[0, -1].plot([], [], "o-", color="#d55e00", ms=3.2, label="letter (of 4)")
        axes[0, -1].legend(loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False)
        chart.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--level", choices=LEVELS, default=DEFAULT_LEVEL)
    parser.add_argument("--figure", type=Path, help="write the figure here instead of printing a table")
    options = parser.parse_args()
    with one_line_errors():
        records = Records(options.records)
        if options.figure:
            if options.figure.suffix not in (".png", ".svg") or not options.figure.parent.is_dir():
                raise InputError(
                    "figure", str(options.figure), "a .png or .svg file in a folder that is there"
                )
            figure(records, options.figure)
        else:
            print("\n".join(table(records, options.level)))


if __name__ == "__main__":
    main()
