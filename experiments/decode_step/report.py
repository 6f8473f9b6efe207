"""Table, targets and figure of the decode-step records."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantlab.errors import InputError
from quantlab.records import load_records
from quantlab.report.load import check_records

BASELINE = "fp32@1"
REPLAY, DUAL = "fp32@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16"
MAIN = ("nano_4b", 256)
PARTS = ("ssm", "attention", "mlp", "other")
LABELS = {
    "ssm": "recurrent ops",
    "attention": "attention layers",
    "mlp": "MLP layers",
    "other": "projections, convolutions, norms, head",
}
NAMES = {
    "nano_4b": "Nemotron-3-Nano-4B",
    "nano_30b": "Nemotron-3-Nano-30B-A3B",
    "qwen35_4b": "Qwen3.5-4B",
    "kimi_block": "one block of Kimi-Linear",
}

Row = dict[str, Any]


def load(folder: Path) -> list[Row]:
    """A row a record: point and metrics, and at the same model and batch ``speedup`` over fp32@1, that of the kernels
    that are chosen at the batch, and ``bound``.

    bound: Amdahl's, 1 / (1 - f + f / r), of f the share of the recurrent ops in a step of fp32@1 and r how many times
    faster they are under the policy, in graphs of their own.
    """
    inner = folder / "records"
    records = [r for r in load_records(inner if inner.is_dir() else folder) if r["kind"] == "decode_step"]
    if not records:
        raise InputError("records folder", str(folder), "at least one record of decode_step/run.py")
    check_records(records)
    rows = [{**r["point"], **r["metrics"], "status": r["status"], "message": r["message"]} for r in records]
    for row in rows:
        if row["status"] != "ok":
            row["us"] = None  # what it took to compute nothing is no speed
    for row in rows:
        base = next(
            (r for r in rows if r["policy"] == BASELINE and _place(r) == _place(row) and r.get("us")), None
        )
        row["speedup"] = row["bound"] = None
        if base and row.get("us"):
            row["speedup"] = base["us"] / row["us"]
            share, faster = base["ssm"] / base["us"], base["ssm"] / row["ssm"]
            row["bound"] = 1 / (1 - share + share / faster)
    for row in rows:
        beside = (r for r in rows if r["policy"] == row.get("chosen") and _place(r) == _place(row))
        row["chosen_speedup"] = next((r["speedup"] for r in beside), None)
    order = [BASELINE, REPLAY, DUAL]
    return sorted(
        rows,
        key=lambda r: (
            list(NAMES).index(r["model"]) if r["model"] in NAMES else len(NAMES),
            r["batch"],
            order.index(r["policy"]) if r["policy"] in order else len(order),
        ),
    )


def _place(row: Row) -> tuple[Any, ...]:
    return row["model"], row["batch"], row["length"], row["device"]


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'':<50}{'ms':>9}{'x fp32@1':>10}{'bound':>8}   recurrent, attention, MLP, other (ms)"
    for row in rows:
        where = f"{row['model']:<11} {row['batch']:>5}  {row['policy']:<30}"
        if not row.get("us"):
            yield f"{where} {row['status']}: {row['message']}"
            continue
        parts = "  ".join(f"{row[part] / 1e3:6.2f}" for part in PARTS)
        yield f"{where} {row['us'] / 1e3:9.3f}  {_ratio(row['speedup'])}  {_ratio(row['bound'])}  {parts}"


def _ratio(value: float | None) -> str:
    return f"{value:7.2f}" if value else "      -"


def targets(rows: Sequence[Row]) -> Iterator[str]:
    """A line a target: what was reached, or that there is no record."""

    def of(policy: str, batch: int) -> Row | None:
        found = (r for r in rows if (r["model"], r["batch"], r["policy"]) == (MAIN[0], batch, policy))
        return next((r for r in found if r["speedup"]), None)

    def ratio(row: Row | None, over: str | None = None) -> float | None:
        return row["speedup"] / (row[over] if over else 1.0) if row else None

    where = f"{MAIN[0]} batch {MAIN[1]}"
    replay, dual = of(REPLAY, MAIN[1]), of(DUAL, MAIN[1])
    yield _line(f"{where} {REPLAY} over fp32@1, published 1.20 to 1.47", ratio(replay), 1.20)
    yield _line(f"{where} {DUAL} over fp32@1", ratio(dual), 1.9)
    yield _line(f"{where} {DUAL} over Amdahl's bound", ratio(dual, "bound"), 0.9)
    for policy in (REPLAY, DUAL):
        row = of(policy, 1)
        text = f"{MAIN[0]} batch 1 {policy} over fp32@1"
        if row and row["chosen_speedup"]:
            text += f", by the chosen kernels, {row['chosen']} (its own {row['speedup']:.3f})"
        yield _line(text, (row["chosen_speedup"] or row["speedup"]) if row else None, 0.97)


def _line(text: str, value: float | None, least: float) -> str:
    if value is None:
        return f"no record          {text}"
    return f"{value:7.3f} {'met' if value >= least else 'NOT MET':>8} (>= {least:g})  {text}"


def write_report(folder: Path) -> list[str]:
    """Lines of table and targets; figures decode-step-MODEL.png beside the records."""
    rows = load(folder)
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model and row.get("us")]
        if mine:
            draw(mine, folder / f"decode-step-{model}.png")
    return [*table(rows), "", *targets(rows)]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Left: where the time of a step goes, at the batch nearest to 256.  Right: speed over fp32@1 by batch."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    batches = sorted({row["batch"] for row in rows})
    batch = min(batches, key=lambda b: abs(b - MAIN[1]))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    names = [policy.replace(":buffer=bf16", "") for policy in policies]
    colours = sns.color_palette("colorblind")
    with sns.axes_style("whitegrid"):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    shown = {row["policy"]: row for row in rows if row["batch"] == batch}
    at = [place for place, policy in enumerate(policies) if policy in shown]
    begin = [0.0] * len(at)
    for colour, part in zip(colours, PARTS, strict=False):
        widths = [shown[policies[place]][part] / 1e3 for place in at]
        left.barh(at, widths, left=begin, color=colour, label=LABELS[part], height=0.6)
        begin = [a + b for a, b in zip(begin, widths, strict=True)]
    for place, end in zip(at, begin, strict=True):
        row = shown[policies[place]]
        left.plot([row["us"] / 1e3] * 2, [place - 0.38, place + 0.38], color="black", linewidth=1.5)
        speed = "" if row["policy"] == BASELINE or not row["speedup"] else f", {row['speedup']:.2f}x"
        left.text(
            max(end, row["us"] / 1e3), place, f"  {row['us'] / 1e3:.2f} ms{speed}", va="center", fontsize=9
        )
    left.plot([], [], color="black", linewidth=1.5, label="whole step, measured")
    left.set(yticks=range(len(names)), yticklabels=names, xlabel="ms a step of the whole batch")
    left.set_title(f"{NAMES.get(rows[0]['model'], rows[0]['model'])}, batch {batch}", fontsize=11)
    left.set_xlim(0, 1.22 * max(max(begin), max(row["us"] for row in shown.values()) / 1e3))
    left.invert_yaxis()
    left.grid(visible=False, axis="y")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=8.5
    )
    lines = ["0.5", colours[9], colours[4], *colours[5:9]]
    for colour, policy, name in zip(lines, policies, names, strict=False):
        mine = [row for row in rows if row["policy"] == policy and row["speedup"]]
        right.plot([r["batch"] for r in mine], [r["speedup"] for r in mine], "o-", color=colour, label=name)
        if policy != BASELINE:
            right.plot([r["batch"] for r in mine], [r["bound"] for r in mine], ":", color=colour)
    right.plot([], [], ":", color="grey", label="Amdahl's bound")
    right.set_xscale("log", base=2)
    right.set(
        xticks=batches,
        xticklabels=[str(b) for b in batches],
        xlabel="batch",
        ylabel="times as fast as fp32@1",
    )
    right.minorticks_off()
    right.legend(frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
