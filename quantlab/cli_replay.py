"""``quantlab eval --replay``: fixed reasoning traces, read under every policy."""

import csv
import io
from pathlib import Path
from typing import Any

import typer

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, print_wrapped

_COLUMNS = {
    "policy": "policy",
    "status": "status",
    "kl": "KL/token, nats",
    "kl_interval": "95 % over traces",
    "top1_agreement": "top-1 agreement",
    "first_divergence": "first divergence, median",
    "traces_diverging": "traces that diverge",
    "change": "answer log-odds",
    "change_interval": "95 % paired",
    "flips": "lost / gained",
    "p_value": "McNemar p",
    "exercised": "exercised",
    "bytes_per_token": "bytes/token",
}
_NARROW = ["policy", "status", "kl", "kl_interval", "top1_agreement", "change", "change_interval", "flips"]


def replay(
    model: Path,
    source: Path,
    policies: list[str] | None,
    *,
    output: Path,
    batch_size: int,
    limit: int | None,
    seed: int,
    max_length: int | None,
    as_json: bool,
    without: dict[str, Any],
) -> None:
    """Run and print; ``without``: options of other evaluations, none of which may be given."""
    import torch

    from quantlab.evals.replay_run import BASELINE, run_replay
    from quantlab.sweep.environment import capture_environment

    for name, value in without.items():
        if value:
            raise InputError(name, value, "not to be given with --replay, whose traces are fixed")
    if not policies:
        raise InputError("policy", None, f"at least one -p POLICY to hold against {BASELINE}")
    records = run_replay(
        model,
        source,
        policies,
        output=output,
        environment=capture_environment(torch.get_num_threads()),
        batch_size=batch_size,
        limit=limit,
        seed=seed,
        max_length=max_length,
    )
    _write_lines(records, output / "replay.csv")
    if as_json:
        print_json([_row(record) for record in records])
        return
    about = records[0]["point"]
    title = (
        f"{about['model']}: {about['traces']} traces, {about['tokens']:,} response tokens, against {BASELINE}"
    )
    print_table(title, [_shown(record) for record in records], list(_COLUMNS), _COLUMNS, (), _NARROW)
    rows, columns = _by_position(records)
    if rows:
        print_table("Mean KL by place in the response, nats", rows, columns)
    for record in records:
        for text in (record["message"], record["metrics"].get("warning")):
            if text:
                print_wrapped(f"{record['point']['policy']}: {text}")
    typer.echo(f"records: {output / 'records'}, a line a trace: {output / 'replay.csv'}")


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """What ``--json`` prints of a policy: everything but the lines of single traces, which replay.csv has."""
    kept = {name: value for name, value in record["metrics"].items() if name != "per_trace"}
    return {
        "policy": record["point"]["policy"],
        "status": record["status"],
        **kept,
        "message": record["message"],
    }


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    row = _row(record)
    answers = row.pop("answers", None) or {}
    row |= {name: answers.get(name) for name in ("change", "change_interval", "p_value")}
    return row | {"flips": f"{answers['lost']} / {answers['gained']}" if answers else None}


def _by_position(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row a bin of positions, a column a policy that has numbers."""
    measured = [record for record in records if record["status"] == "ok"]
    rows = []
    for bins in zip(*(record["metrics"]["by_position"] for record in measured), strict=True):
        cells = {r["point"]["policy"]: one["kl"] for r, one in zip(measured, bins, strict=True)}
        rows.append(
            {"tokens": f"{bins[0]['first']} - {bins[0]['last']}", "traces": bins[0]["traces"], **cells}
        )
    return rows, ["tokens", "traces", *(record["point"]["policy"] for record in measured)]


def _write_lines(records: list[dict[str, Any]], path: Path) -> None:
    from quantlab.records import write_atomic

    lines = [
        {"policy": record["point"]["policy"], **line}
        for record in records
        for line in record["metrics"].get("per_trace", ())
    ]
    names = list(dict.fromkeys(name for line in lines for name in line if name != "exercised"))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names or ["policy"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(path, buffer.getvalue().encode())
