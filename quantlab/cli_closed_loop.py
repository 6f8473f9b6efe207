"""``quantlab drift --model``: what policies do to a model's next-token distributions while it reads a text."""

import io
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantlab.errors import InputError, unknown_name
from quantlab.terminal import print_json, print_table, print_wrapped, progress

if TYPE_CHECKING:
    from quantlab.models.closed_loop import ClosedLoopRun
    from quantlab.models.texts import TextSource
    from quantlab.schemes import PolicyRules

BASELINE = "fp32@1"
_COLUMNS = {
    "policy": "policy",
    "status": "status",
    "kl": "KL, nats",
    "kl_largest": "largest KL",
    "top1_agreement": "top-1 agreement",
    "earliest_divergence": "first divergence",
    "tokens": "tokens",
    "nll": "nll",
    "baseline_nll": "nll of baseline",
    "exercised": "exercised",
    "bits_per_value": "bits/value",
    "bytes_per_token": "bytes/token",
}
_NARROW = ["policy", "status", "kl", "top1_agreement", "earliest_divergence", "bytes_per_token"]


def compare_on_text(
    model: Path,
    text: Path,
    policies: list[str],
    *,
    mode: str,
    prefill: int,
    steps: int,
    sequences: int,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Run and print the closed loop; with ``output`` only the policies that have no record there yet."""
    from quantlab.evals.run import model_folder
    from quantlab.models.closed_loop import MODES
    from quantlab.models.texts import quiet_transformers, read_text_source
    from quantlab.schemes import parse_rules

    quiet_transformers()
    if not policies:
        raise InputError("policy", None, f"at least one -p POLICY to hold against {BASELINE}")
    rules = list(dict.fromkeys(parse_rules(policy) for policy in policies))
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    forced = mode == "forced"  # free-running, the model itself says what comes behind the prompt
    wanted = (
        f"a prefill of {prefill}, {steps} steps and one to predict" if forced else f"a prefill of {prefill}"
    )
    with ExitStack() as stack:
        source = read_text_source(
            model_folder(str(model), stack),
            text,
            sequences=sequences,
            tokens=prefill + (steps + 1) * forced,
            needed=f"{sequences} x ({wanted})",
        )
        settings = {"mode": mode, "prefill": prefill, "steps": steps, "seed": seed}
        if output is None:
            runs = _run(source, rules, settings)
            rows = [
                {"policy": run.policy, "status": run.status, **run.metrics, "message": run.message}
                for run in runs
            ]
        else:
            rows = _run_and_store(source, rules, settings, output)
    if as_json:
        print_json(rows)
        return
    title = f"{source.about['model']}, {steps} steps {mode}, {sequences} sequence(s), against {BASELINE}"
    print_table(title, rows, list(_COLUMNS), _COLUMNS, (), _NARROW)
    print_table("Top-1 agreement by margin of the baseline, nats", *_by_margin(rows))
    for row in rows:
        for name in ("message", "warning"):
            if row[name]:
                print_wrapped(f"{row['policy']}: {row[name]}")
    if output is not None:
        typer.echo(f"records: {output / 'records'}, rows: {output / 'closed_loop.csv'}")


def _by_margin(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each bin that some policy has tokens in, a column for each policy: agreement (tokens)."""
    bins = []
    for found in zip(*(row["agreement_by_margin"] for row in rows), strict=True):
        if not any(one["tokens"] for one in found):
            continue
        high = "" if found[0]["high"] == float("inf") else f"{found[0]['high']:g}"
        cells = {
            row["policy"]: f"{one['agreement']:.3f} ({one['tokens']})" if one["tokens"] else None
            for row, one in zip(rows, found, strict=True)
        }
        bins.append({"margin": f"{found[0]['low']:g} - {high}".strip(), **cells})
    return bins, ["margin", *(row["policy"] for row in rows)]


def _run(
    source: "TextSource", rules: "list[PolicyRules]", settings: dict[str, Any]
) -> "tuple[ClosedLoopRun, ...]":
    from quantlab.models.closed_loop import closed_loop
    from quantlab.models.texts import load_weights

    model = load_weights(source.folder)
    with progress(f"{settings['steps']} steps", settings["steps"]) as advance:
        found = closed_loop(
            model,
            source.ids,
            rules,
            prompt=settings["prefill"],
            steps=settings["steps"],
            mode=settings["mode"],
            baseline=BASELINE,
            seed=settings["seed"],
            on_step=advance,
        )
    return found.runs


def _run_and_store(
    source: "TextSource", rules: "list[PolicyRules]", settings: dict[str, Any], output: Path
) -> list[dict[str, Any]]:
    """Rows of all policies; those without a record in ``output`` are run and stored, each with its steps as Parquet."""
    import pandas
    import torch

    from quantlab.records import (
        check_output_folder,
        check_output_place,
        complete_record,
        load_record,
        protocol_fingerprint,
        record_path,
        remove_stale,
        save_record,
        write_atomic,
    )
    from quantlab.sweep.environment import capture_environment

    shared = {"kind": "closed_loop", "baseline": BASELINE, **source.about, "sequences": len(source.ids)}
    shared |= {name: settings[name] for name in ("mode", "prefill", "steps")}
    shared |= {"rounding_seed": settings["seed"]} if settings["seed"] else {}
    points = {policy: {**shared, "policy": str(policy)} for policy in rules}
    folder = output.resolve() / "records"
    paths = {policy: record_path(folder, point) for policy, point in points.items()}
    records = {policy: load_record(path) for policy, path in paths.items() if path.exists()}
    fingerprint = protocol_fingerprint("closed_loop")
    records = {
        policy: record
        for policy, record in records.items()
        if record["status"] != "failed"
        and record["protocol"] == fingerprint
        and (folder / record["series"]).is_file()
    }
    missing = [policy for policy in rules if policy not in records]
    if missing:
        check_output_place(folder)  # made after the run: a model or policy that is refused leaves no folder
        started = time.monotonic()
        runs = _run(source, missing, settings)
        check_output_folder(folder)
        remove_stale(folder)
        environment = capture_environment(torch.get_num_threads())
        seconds = (time.monotonic() - started) / len(runs)  # all ran side by side; each is charged its share
        for policy, run in zip(missing, runs, strict=True):
            series = paths[policy].with_suffix(".parquet")
            buffer = io.BytesIO()
            run.table.to_parquet(buffer, index=False)
            write_atomic(series, buffer.getvalue())
            result = {
                "status": run.status,
                "message": run.message,
                "metrics": run.metrics,
                "series": series.name,
            }
            result["metrics"] |= {"text_hash": source.about["text_hash"]}
            record = complete_record(points[policy], result, environment=environment, seconds=seconds)
            save_record(folder, record)
            records[policy] = record
    tables = [pandas.read_parquet(folder / records[policy]["series"]) for policy in rules]
    write_atomic(
        output / "closed_loop.csv", pandas.concat(tables, ignore_index=True).to_csv(index=False).encode()
    )
    return [
        {
            "policy": str(policy),
            "status": records[policy]["status"],
            **records[policy]["metrics"],
            "message": records[policy]["message"],
        }
        for policy in rules
    ]
