"""Records as tables: one tidy row a record (and task), and the summaries that the report decides from."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from quantlab.report.load import BASELINE, Record, stream_key, stream_name
from quantlab.statistics.paired import PairedComparison, compare_documents

# Nested or long: in the records only.
UNTABLED = ("documents", "tasks", "op_hits", "scans", "lm_eval", "agreement_by_margin", "first_divergence")
AGREEMENT = 1.4  # measured and predicted error agree if their ratio is within this factor (design section 5)


def tidy_table(records: Iterable[Record]) -> pd.DataFrame:
    """One row a record, one row a task for eval records: point and metrics flattened with dots, no
    per-document data."""
    rows = []
    for record in records:
        row = {"kind": record["kind"], "status": record["status"], "message": record["message"]}
        row |= _flat({key: value for key, value in record["point"].items() if key != "kind"})
        metrics = {k: v for k, v in record["metrics"].items() if k not in UNTABLED}
        if metrics.get("growth_ci"):
            metrics["growth_low"], metrics["growth_high"] = metrics.pop("growth_ci")
        row |= _flat(metrics)
        row |= {"seconds": record["seconds"], "created": record["created"], "protocol": record["protocol"]}
        tasks = eval_tasks(record) if record["kind"] == "eval" else {}
        rows += [row | {"task": task} | _flat(values) for task, values in tasks.items()] or [row]
    return pd.DataFrame(rows)


def eval_tasks(record: Record) -> dict[str, dict[str, Any]]:
    """Results by task of an eval record."""
    metrics = record["metrics"]
    tasks = metrics.get("tasks")
    if isinstance(tasks, dict):
        return tasks
    return {name: value for name, value in metrics.items() if isinstance(value, dict) and "acc" in value}


def task_documents(record: Record, task: str) -> list[dict[str, Any]]:
    """Documents of one task that were judged right or wrong."""
    documents = record["metrics"].get("documents") or []
    if isinstance(documents, dict):
        documents = documents.get(task, [])
    return [
        document for document in documents if document.get("task", task) == task and "correct" in document
    ]


@dataclass(frozen=True)
class DriftRow:
    """One policy on one kind of stream, pooled over seeds.

    Errors are root mean squares over seeds, costs and counts the same for each seed (minimum of the counts);
    the growth interval is the widest of the seeds'.  None where a number does not exist.
    """

    stream: str
    layer: str
    policy: str
    status: str
    seeds: int
    state_error: float | None
    read_error: float | None
    output_error: float | None
    growth: float | None
    growth_low: float | None
    growth_high: float | None
    predicted: float | None
    ratio: float | None
    comment: str | None
    checkpoint_stores: int | None
    copy_stores: int | None
    bits: float | None
    bytes_per_token: float | None
    diverged_at: int | None


def stream_groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Drift records by stream, seeds together, keyed by a unique heading; in order of family and alpha."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        shared = {key: value for key, value in record["point"]["stream"].items() if key != "seed"}
        groups[str(sorted(shared.items(), key=str))].append(record)
    ordered = sorted(groups.values(), key=lambda group: _order(group[0]["point"]["stream"]))
    names = [stream_name(group[0]["point"]["stream"]) for group in ordered]
    found = {}
    for name, group in zip(names, ordered, strict=True):
        stream = group[0]["point"]["stream"]
        # Two streams may differ only in size; then the size belongs into the heading.
        found[name if names.count(name) == 1 else f"{name}, {stream_size(stream)}"] = group
    return found


def stream_size(stream: dict[str, Any]) -> str:
    """Size of a stream in words."""
    if "file" in stream:
        return f"content {stream['hash']}"
    return (
        f"{stream['steps']} tokens, {stream['heads']} heads of {stream['value_dim']}×{stream['key_dim']}, "
        f"{stream['sequences']} sequences"
    )


def _layer(stream: dict[str, Any]) -> str:
    """What decides the bytes of a state: family and size."""
    if "file" in stream:
        return stream_name(stream)
    return f"{stream['family']}, {stream['heads']} heads of {stream['value_dim']}×{stream['key_dim']}"


def drift_rows(groups: dict[str, list[Record]], policies: Sequence[str]) -> list[DriftRow]:
    """A row for each stream and policy that has records with status ok or diverged, in the order of
    ``policies``."""
    rows = []
    for name, group in groups.items():
        for policy in policies:
            mine = [r for r in group if r["point"]["policy"] == policy and r["status"] in ("ok", "diverged")]
            if mine:
                rows.append(_drift_row(name, policy, mine))
    return rows


def _drift_row(stream: str, policy: str, records: list[Record]) -> DriftRow:
    metrics = [record["metrics"] for record in records]
    diverged = [
        m.get("diverged_at") for r, m in zip(records, metrics, strict=True) if r["status"] == "diverged"
    ]
    measured, predicted = (
        _rms(m.get(name) for m in metrics) for name in ("output_error", "predicted_output_error")
    )
    ratio = measured / predicted if measured is not None and predicted and math.isfinite(predicted) else None
    if ratio is not None and not math.isfinite(ratio):
        ratio = None
    lows, highs = zip(*((m.get("growth_ci") or [None, None]) for m in metrics), strict=True)
    exercised = [m.get("exercised") or {} for m in metrics]
    row = DriftRow(
        stream=stream,
        layer=_layer(records[0]["point"]["stream"]),
        policy=policy,
        status="diverged" if diverged else "ok",
        seeds=len(records),
        state_error=_rms(m.get("state_error") for m in metrics),
        read_error=_rms(m.get("read_error") for m in metrics),
        output_error=measured,
        growth=_mean(m.get("growth_exponent") for m in metrics),
        growth_low=min(lows) if None not in lows else None,
        growth_high=max(highs) if None not in highs else None,
        predicted=predicted,
        ratio=ratio,
        comment=None,
        checkpoint_stores=_least(e.get("checkpoint") for e in exercised),
        copy_stores=_least(e.get("read_copy") for e in exercised),
        bits=_mean(m.get("bits_per_value") for m in metrics),
        bytes_per_token=_mean(m.get("bytes_per_token") for m in metrics),
        diverged_at=min((step for step in diverged if step is not None), default=None),
    )
    return DriftRow(**{**vars(row), "comment": _comment(row, metrics)})


def _comment(row: DriftRow, metrics: list[dict[str, Any]]) -> str | None:
    """A plain sentence wherever the prediction does not describe the measurement."""
    warning = next((m["warning"] for m in metrics if m.get("warning")), None)
    if row.status == "diverged":
        where = "" if row.diverged_at is None else f" at token {row.diverged_at}"
        return (
            f"Diverged{where}: rounding grows faster than the decay forgets it, so there is no error level."
        )
    if row.ratio is None or 1 / AGREEMENT <= row.ratio <= AGREEMENT:
        return warning
    side = f"{row.ratio:.1f} times" if row.ratio > 1 else f"1/{1 / row.ratio:.1f} of"
    # The runner knows best; a note that only repeats the ratio says no reason.
    notes = [m.get("prediction_note") for m in metrics]
    note = next((note for note in notes if note and not note.startswith("measured")), None)
    if note:
        why = note
    elif not all(m.get("steady", True) for m in metrics):
        why = (
            "the error had not levelled off when the run ended, and levels are what the prediction is good at"
        )
    elif "nvfp4" in row.policy or "mxfp4" in row.policy:
        why = (
            "4-bit rounding errors are neither small nor independent of the state, as the prediction "
            "assumes; fast decay shows it most, because each store then holds mostly new values"
        )
    elif row.output_error is not None and row.output_error < 1e-5:
        why = "at this level the arithmetic of the step counts as much as the store, and it is not predicted"
    else:
        why = "the prediction assumes independent, zero-mean rounding errors and one decay for every head"
    return f"Measured {side} the predicted error: {why}." + (f" {warning}" if warning else "")


@dataclass(frozen=True)
class EvalRow:
    """One policy on one task of one model, paired against fp32@1 where both are there."""

    model: str
    task: str
    policy: str
    accuracy: float | None
    n: int | None
    checkpoint_stores: int | None
    copy_stores: int | None
    op_hits: str
    bits: float | None
    bytes_per_token: float | None
    paired: PairedComparison | None


def eval_rows(records: Sequence[Record], policies: Sequence[str]) -> list[EvalRow]:
    """A row for each model, task and policy with status ok."""
    usable = [record for record in records if record["status"] == "ok"]
    rows = []
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in usable:
        groups[stream_key(record)].append(record)
    for group in groups.values():
        by_policy = {record["point"]["policy"]: record for record in group}
        baseline = by_policy.get(BASELINE)
        for task in dict.fromkeys(task for record in group for task in eval_tasks(record)):
            for policy in (policy for policy in policies if policy in by_policy):
                rows.append(_eval_row(by_policy[policy], baseline, task))
    return rows


def _eval_row(record: Record, baseline: Record | None, task: str) -> EvalRow:
    metrics, values = record["metrics"], eval_tasks(record).get(task, {})
    documents = task_documents(record, task)
    paired = None
    theirs = task_documents(baseline, task) if baseline is not None and record is not baseline else []
    if documents and theirs and not any(_repeated(document) for document in (*documents, *theirs)):
        paired = compare_documents(theirs, documents)
    exercised = metrics.get("exercised") or {}
    return EvalRow(
        model=record["point"].get("model", ""),
        task=task,
        policy=record["point"]["policy"],
        accuracy=values.get("acc", values.get("avg_at_k")),
        n=values.get("n") or len(documents) or None,
        checkpoint_stores=exercised.get("checkpoint"),
        copy_stores=exercised.get("read_copy"),
        op_hits=_hits(metrics.get("op_hits") or {}),
        bits=metrics.get("bits_per_value"),
        bytes_per_token=metrics.get("bytes_per_token"),
        paired=paired,
    )


def _repeated(document: dict[str, Any]) -> bool:
    """Several responses, so a share of correct ones, which no exact test of pairs takes."""
    return isinstance(document["correct"], list) and len(document["correct"]) != 1


def _hits(op_hits: dict[str, Any]) -> str:
    texts = []
    for name, layers in op_hits.items():
        counts = list(layers.values()) if isinstance(layers, dict) else [layers]
        low, high = min(counts, default=0), max(counts, default=0)
        each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        texts.append(f"{name}: {len(counts)} layers × {each}")
    return "; ".join(texts)


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        elif isinstance(item, list):
            flat |= {f"{prefix}{key}": ", ".join(map(str, item))}
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _numbers(values: Iterable[Any]) -> list[float] | None:
    found = list(values)
    return None if not found or any(value is None for value in found) else [float(value) for value in found]


def _rms(values: Iterable[Any]) -> float | None:
    found = _numbers(values)
    return None if found is None else float(np.sqrt(np.mean(np.square(found))))


def _mean(values: Iterable[Any]) -> float | None:
    found = _numbers(values)
    mean = None if found is None else float(np.mean(found))
    return None if mean is None or math.isnan(mean) else mean


def _least(values: Iterable[Any]) -> int | None:
    found = _numbers(values)
    return None if found is None else int(min(found))


def _order(stream: dict[str, Any]) -> tuple[str, str, float]:
    return (
        str(stream.get("family", stream.get("file"))),
        str(stream.get("preset")),
        stream.get("alpha") or 0.0,
    )
