"""One self-contained page from a folder of records, and the tidy table beside it."""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from quantlab.records import STATUSES, check_output_folder, write_atomic
from quantlab.report import figures, tables
from quantlab.report.load import BASELINE, Collection, Record, load_collection, stream_key
from quantlab.report.style import PALETTE, VARIABLES, Style, policy_styles
from quantlab.report.verdict import BF16_ROUNDING, FLAT, answer, scientific, verdicts


def write_report(folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write report.html, table.csv and table.parquet to ``output`` (``folder`` by default); returns the
    page's path.

    ``folder``: what a sweep wrote, or a folder of record files.  Raises InputError, before anything is
    written, for records that may not be compared and for an output that cannot be written to.
    """
    collection = load_collection(folder)
    page = render(collection)
    target = check_output_folder(folder if output is None else output)
    table = tables.tidy_table(collection.records)
    write_atomic(target / "table.csv", table.to_csv(index=False).encode())
    buffer = io.BytesIO()
    _one_type_a_column(table).to_parquet(buffer, index=False)
    write_atomic(target / "table.parquet", buffer.getvalue())
    write_atomic(target / "report.html", page.encode())
    return target / "report.html"


def _one_type_a_column(table: pd.DataFrame) -> pd.DataFrame:
    # Parquet columns have one type; a script's parameter may be a number in one study and text in the next.
    table = table.copy()
    for name in table.columns:
        kinds = {type(value) for value in table[name].dropna()}
        mixed = len(kinds) > 1 and not kinds <= {int, float}
        # Nor does a column hold whole numbers of more than 64 bits.
        wide = any(isinstance(value, int) and abs(value) >= 2**63 for value in table[name].dropna())
        if table[name].dtype == object and (mixed or wide):
            table[name] = table[name].map(lambda value: value if value is None else str(value))
        elif table[name].dtype == object and kinds <= {int, float} and kinds:
            table[name] = pd.to_numeric(table[name])
    return table


def render(collection: Collection) -> str:
    """The page as HTML text; it asks for nothing outside itself."""
    drift = collection.of_kind("drift")
    scans = collection.of_kind("scan")
    policies = order_policies(collection.records)
    styles = policy_styles(policies)
    groups = tables.stream_groups(drift)
    drift_rows = tables.drift_rows(groups, policies)
    eval_rows = tables.eval_rows(collection.of_kind("eval"), policies)
    found = verdicts(policies, collection.records, drift_rows, eval_rows)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantlab.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": scientific, "size": _size, "percent": _percent, "points": _points}
    environment.globals |= {"isfinite": math.isfinite, "AGREEMENT": tables.AGREEMENT}
    return environment.get_template("report.html").render(
        about=collection.about,
        warnings=collection.warnings,
        answer=answer(found, len(groups), drift_rows),
        verdicts=found,
        swatch={policy: _swatch(style) for policy, style in styles.items()},
        palette=PALETTE,
        baseline=BASELINE,
        bf16=BF16_ROUNDING,
        flat=FLAT,
        streams=[_stream_section(name, group, drift_rows) for name, group in groups.items()],
        drift_panels=figures.drift_panels(groups, styles),
        cost_panels=figures.cost_panels(drift_rows, styles),
        scans=_scan_sections(scans, policies, styles),
        loops=_loop_sections(collection.of_kind("closed_loop"), policies),
        eval_rows=eval_rows,
        accuracy_panels=figures.accuracy_panels(eval_rows, styles),
        troubles=_troubles(collection.records),
        counts=_counts(collection.records),
        environments=_environments(collection.records),
    )


def _swatch(style: Style) -> str:
    color = f"var({VARIABLES[style.color]})"
    # Dashed lines share a colour with a solid one; their mark is hollow.
    return f"background:{color}" if style.dash in ("-", ":") else f"box-shadow:inset 0 0 0 2px {color}"


def order_policies(records: Sequence[Record]) -> list[str]:
    """Every policy once: the baseline, then from many stored bits to few, then by name."""
    bits: dict[str, float] = {}
    for record in records:
        value = record["metrics"].get("bits_per_value")
        bits[record["point"]["policy"]] = value or bits.get(record["point"]["policy"], 0.0)
    return sorted(bits, key=lambda policy: (policy != BASELINE, -bits[policy], policy))


def _stream_section(name: str, group: Sequence[Record], rows: Sequence[tables.DriftRow]) -> dict[str, Any]:
    mine = [row for row in rows if row.stream == name]
    # Policies that deviate for the same reason share one remark.
    remarks: dict[str, list[str]] = {}
    for row in mine:
        if row.comment:
            remarks.setdefault(row.comment, []).append(row.policy)
    size = tables.stream_size(group[0]["point"]["stream"])
    return {"name": name, "size": size, "rows": mine, "remarks": remarks}


def _policy_rows(records: Sequence[Record], policies: Sequence[str]) -> list[dict[str, Any]]:
    """A row a record that says something, in policy order."""
    return [
        {
            "policy": policy,
            "status": record["status"],
            "m": record["metrics"],
            "exercised": _exercised(record),
        }
        for policy in policies
        for record in records
        if record["point"]["policy"] == policy and record["status"] in ("ok", "diverged")
    ]


def _scan_sections(scans: Sequence[Record], policies: Sequence[str], styles: Any) -> list[dict[str, Any]]:
    """One section a trained recurrence: rows in policy order, its curves and its divergence."""
    sections = []
    for name in dict.fromkeys(record["point"].get("name", "trained recurrence") for record in scans):
        mine = [record for record in scans if record["point"].get("name", "trained recurrence") == name]
        rows = _policy_rows(mine, policies)
        # With several documents or lengths the worst one is drawn; the table has them all.
        divergence = {
            policy: max((r["m"].get("kl") or 0.0 for r in rows if r["policy"] == policy), default=None)
            for policy in dict.fromkeys(row["policy"] for row in rows if "kl" in row["m"])
        }
        panels = figures.drift_panels({f"{name}: output error per token": mine}, styles)
        dots = figures.dot_plot(
            divergence, styles, "KL divergence, nats", f"KL divergence, {name}", f"kl{len(sections)}"
        )
        if dots:
            panels.append((f"{name}: KL divergence of the labels", dots))
        sections.append({"name": name, "rows": rows, "panels": panels})
    return sections


def _loop_sections(loops: Sequence[Record], policies: Sequence[str]) -> list[dict[str, Any]]:
    """One section for each model, text and way of decoding: rows in policy order, and agreement by margin."""
    settings: dict[str, list[Record]] = {}
    for record in loops:
        settings.setdefault(stream_key(record), []).append(record)
    sections = []
    for mine in settings.values():
        rows = _policy_rows(mine, policies)
        bins = zip(*(row["m"].get("agreement_by_margin") or [] for row in rows), strict=False)
        held = [found for found in bins if any(one["tokens"] for one in found)]
        sections.append({"point": mine[0]["point"], "rows": rows, "bins": held})
    return sections


def _exercised(record: Record) -> dict[str, Any]:
    return {"checkpoint": None, "read_copy": None} | (record["metrics"].get("exercised") or {})


def _troubles(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every point whose status is not ok, and every point that came with a warning."""
    found = []
    for record in records:
        warning = record["metrics"].get("warning")
        if record["status"] != "ok" or warning:
            point = record["point"]
            where = ", ".join(f"{k} {v}" for k, v in point.items() if k not in ("kind", "policy"))
            if record["kind"] == "drift":
                where = ", ".join(f"{k} {v}" for k, v in point["stream"].items() if v is not None)
            reason = record["message"] or warning or "no reason was recorded"
            found.append(
                {"policy": point["policy"], "status": record["status"], "where": where, "reason": reason}
            )
    order = ("failed", "comparison_failed", "not_served", "not_exercised", "diverged", "ok")
    return sorted(found, key=lambda trouble: (order.index(trouble["status"]), trouble["policy"]))


def _counts(records: Sequence[Record]) -> dict[str, int]:
    counts: dict[str, int] = {status: 0 for status in STATUSES}
    for record in records:
        counts[record["status"]] += 1
    return counts


def _environments(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """(name, distinct values) of everything recorded about where the numbers were made."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        environment = dict(record["environment"])
        versions = environment.pop("versions", {})
        for key, value in (environment | versions).items():
            if value is not None:
                found.setdefault(key, {})[str(value)] = None
    for record in records:
        found.setdefault(f"protocol, {record['kind']}", {})[record["protocol"]] = None
    found["measured"] = {min(r["created"] for r in records): None, max(r["created"] for r in records): None}
    found["compute time"] = {f"{sum(record['seconds'] for record in records):,.0f} s": None}
    return [(key, list(values)) for key, values in found.items()]


def _size(value: float | None) -> str:
    """Bytes in KiB, three digits."""
    if value is None:
        return "–"
    kib = value / 1024
    return f"{kib:,.0f}" if kib >= 100 else f"{kib:.3g}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _points(value: float | None) -> str:
    """A signed difference of fractions, in percentage points, with a true minus sign."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:+.1f}".replace("-", "−")
