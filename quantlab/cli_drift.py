"""``quantlab drift``: the error of policies per decoded token, on one stream."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantlab.cli_attribute import attribute_policies, check_alone
from quantlab.cli_closed_loop import compare_on_text
from quantlab.errors import InputError
from quantlab.terminal import fix_threads, print_json, print_table, print_wrapped, progress

if TYPE_CHECKING:
    from quantlab.drift import Stream, StreamSource
    from quantlab.drift.head_policies import Followed

EPILOG = (
    "Example: [bold]quantlab drift --family gated_delta --alpha 0.99 -p fp32/nvfp4@16 -p nvfp4@1[/bold]\n\n"
    "Example: [bold]quantlab drift --model DIR --text FILE -p fp32/nvfp4@16 -p nvfp4@1[/bold]"
)
# What a stream file decides, so that it cannot be asked for beside one.
_MADE_ONLY = (
    "family",
    "alpha",
    "steps",
    "heads",
    "sequences",
    "preset",
    "beta",
    "key_heads",
    "value_dim",
    "key_dim",
    "negative_eigenvalues",
)
# What a model decides, so that it cannot be asked for beside one; and what only a model has a use for.
_NO_MODEL = (
    *(name for name in _MADE_ONLY if name not in ("steps", "sequences")),
    *("turn", "chunk", "stream", "save_stream", "workers", "attribute", "suspect"),
)
_MODEL_ONLY = ("text", "mode", "prefill")
_COLUMNS = {
    "policy": "policy",
    "status": "status",
    "state_error": "state error",
    "read_error": "read error",
    "output_error": "output error",
    "predicted_output_error": "predicted",
    "growth_exponent": "growth",
    "growth_ci": "95 % interval",
    "exercised": "exercised",
    "bits_per_value": "bits/value",
    "bytes_per_token": "bytes/token",
}
_NARROW = [
    "policy",
    "status",
    "output_error",
    "predicted_output_error",
    "growth_exponent",
    "bits_per_value",
    "bytes_per_token",
]
_NARROWEST = ["policy", "output_error", "predicted_output_error", "growth_exponent", "bytes_per_token"]
_KEYS = (
    *(key for key in _COLUMNS if key not in ("policy", "status")),
    "predicted_state_error",
    "output_bias",
    "diverged_at",
    "effective_policy",
    "stream_hash",
    "warning",
    "prediction_note",
)


def drift(
    context: typer.Context,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Policy text, e.g. fp32/nvfp4@16, or rules for single heads (a .toml file); repeat for several.",
            metavar="POLICY",
        ),
    ] = None,
    family: Annotated[
        str, typer.Option("--family", help="gated_delta, kimi_delta, mamba2 or mamba1.")
    ] = "gated_delta",
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Decay per step of every head (presets evidence and near); default: realistic heads."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Decoded tokens.", min=1)] = 1024,
    heads: Annotated[int, typer.Option(help="Heads of the layer.", min=1)] = 8,
    sequences: Annotated[
        int,
        typer.Option(help="Independent sequences; with --model pieces of the text, 1 unless given.", min=1),
    ] = 2,
    seed: Annotated[
        int, typer.Option(help="Of the stream and of stochastic rounding.", min=0, max=2**63 - 1)
    ] = 0,
    preset: Annotated[
        str | None, typer.Option(help="evidence (default with --alpha), realistic (default) or near.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Constant write strength (delta rules, presets evidence and near).")
    ] = None,
    negative_eigenvalues: Annotated[
        bool, typer.Option("--negative-eigenvalues", help="Write strengths twice as large (delta rules).")
    ] = False,
    key_heads: Annotated[
        int | None, typer.Option(help="Key heads, a divisor of the heads (default: as many).", min=1)
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Value dim of a head (default: 128; Mamba 64).", min=1)
    ] = None,
    key_dim: Annotated[
        int | None, typer.Option(help="Key dim of a head (default: 128; mamba1 16).", min=1)
    ] = None,
    turn: Annotated[
        int | None, typer.Option(help="Tokens of a turn; at its end every state is flushed.", min=1)
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens taken at once, as a prefill chunk, instead of one.", min=1)
    ] = None,
    stream: Annotated[Path | None, typer.Option(help="A stream file instead of a made stream.")] = None,
    save_stream: Annotated[Path | None, typer.Option(help="Also write the stream to this file.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Folder of a Hugging Face model, or builtin:tiny-mamba2: compare its next tokens with those under"
            " fp32@1.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="With --model: UTF-8 text that it reads.")] = None,
    mode: Annotated[
        str, typer.Option(help="With --model: forced (reads the text) or free (reads its own choices).")
    ] = "forced",
    prefill: Annotated[int, typer.Option(help="With --model: tokens of the prompt.", min=1)] = 128,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for records and for every step as Parquet; runs of any length."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes with --output (default: all cores).", min=1)
    ] = None,
    attribute: Annotated[
        bool, typer.Option("--attribute", help="The parts of each policy one at a time, and their shares.")
    ] = False,
    suspect: Annotated[
        list[str] | None,
        typer.Option(
            help="With --attribute: a site (beta, k.fp16), store=bf16, dot=tf32, dt_clamp=0.1 ...; repeat."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line instead of a table.")
    ] = False,
) -> None:
    """Measure the error of policies per decoded token, on one stream, beside a float64 shadow.

    With --model and --text it is the closed loop: how far a model's next-token distributions under each policy are from
    those under fp32@1 while it decodes.

    With --output the stream is made, or read, block by block and no step stays in memory; a made stream then has other
    values than without it.  The same command goes on with the policies that have no record yet.
    """
    from quantlab import drift as drifts
    from quantlab.drift.growth import MINIMUM_UNITS
    from quantlab.drift.head_policies import check_fits, parse_followed
    from quantlab.drift.sources import as_source
    from quantlab.schemes import PolicyRules

    fix_threads()
    _check_given(context, _NO_MODEL if model is not None else _MODEL_ONLY, model)
    if model is not None:
        if text is None:
            raise InputError("text", None, "a text file for the model to read")
        compare_on_text(
            model,
            text,
            policy or [],
            mode=mode,
            prefill=prefill,
            steps=steps,
            sequences=sequences if _is_given(context, "sequences") else 1,
            seed=seed,
            output=output,
            as_json=as_json,
        )
        return
    policies = list(dict.fromkeys(parse_followed(text) for text in policy or ["fp32@1"]))
    if stream is not None:
        for name in _MADE_ONLY:
            if _is_given(context, name):
                raise InputError(name, context.params[name], "nothing, as the stream file decides it")
    if output is None and workers is not None:
        raise InputError("workers", workers, "--output, without which there is one process")
    if output is not None and save_stream is not None:
        raise InputError("save_stream", str(save_stream), "no --output, with which no stream is in memory")
    if attribute:
        check_alone({"output": output, "turn": turn, "chunk": chunk})
        for rules in policies:
            if isinstance(rules, PolicyRules):
                raise InputError("policy", str(rules), "one policy for all heads with --attribute")
    elif suspect:
        raise InputError("suspect", suspect[0], "--attribute")
    settings = {"seed": seed, "turn": turn, "chunk": chunk}
    options: dict[str, Any] = {
        "preset": preset,
        "heads": heads,
        "steps": steps,
        "alpha": alpha,
        "seed": seed,
        "sequences": sequences,
        "key_heads": key_heads,
        "value_dim": value_dim,
        "key_dim": key_dim,
        "beta": beta,
        "negative_eigenvalues": negative_eigenvalues,
    }
    if output is not None:
        if stream is not None:
            source = drifts.open_source({"file": str(stream)})
            description: dict[str, Any] = {"file": str(stream), "hash": source.hash}
        else:
            source = drifts.block_stream(family, **options)
            description = {"family": family, **source.meta}
        for parsed in policies:
            check_fits(parsed, source)
        rows = _run_and_store(source, description, policies, settings, output, workers)
        digest = rows[0]["stream_hash"]
    else:
        source = drifts.synthetic_stream(family, **options) if stream is None else drifts.load_stream(stream)
        for parsed in policies:
            check_fits(parsed, as_source(source))
        if save_stream is not None:
            drifts.save_stream(source, save_stream)
        if attribute:
            single = [parsed for parsed in policies if not isinstance(parsed, PolicyRules)]
            attribute_policies(source, single, suspect, seed, as_json=as_json)
            return
        rows, digest = _run_in_memory(source, policies, settings)
    rearranged = turn is not None or chunk is not None
    rows = [_stated(row, growth=not rearranged) for row in rows]
    if as_json:
        print_json(rows)
        return
    title = f"{source.family}, {source.steps} steps, {source.heads} heads x {source.batch}, stream {digest}"
    # A narrow terminal may leave out the status only where it says nothing.
    selections = [_NARROW, _NARROWEST] if all(row["status"] == "ok" for row in rows) else [_NARROW]
    print_table(title, rows, list(_COLUMNS), _COLUMNS, (), *selections)
    for row in rows:
        for key in ("warning",) if rearranged else ("warning", "prediction_note"):
            if row[key]:
                print_wrapped(f"{row['policy']}: {row[key]}")
    units = source.heads * source.batch
    if rearranged:
        print_wrapped(
            f"No prediction, no growth: there is none with {'--turn' if chunk is None else '--chunk'}."
        )
    elif units < MINIMUM_UNITS:
        print_wrapped(
            f"No interval of the growth: {units} of at least {MINIMUM_UNITS} units (heads x sequences)."
        )
    if output is not None:
        typer.echo(f"records: {output / 'records'}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the option stands on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _check_given(context: typer.Context, names: tuple[str, ...], model: Path | None) -> None:
    """InputError for options that ask for something else than a model, or for something of a model without one."""
    for name in names:
        if _is_given(context, name):
            value = context.params[name]
            value = str(value) if isinstance(value, Path) else value
            raise InputError(name, value, "--model beside it" if model is None else "no --model beside it")


def _stated(row: dict[str, Any], *, growth: bool) -> dict[str, Any]:
    """None, which a table shows as "-" and JSON as null, for a number that there is not.

    growth: False where stores do not fall on the ends of windows, which the bins of a growth exponent hold whole.
    """
    absent = {} if growth else dict.fromkeys(("growth_exponent", "growth_ci"))
    numbers = {key: None for key, value in row.items() if isinstance(value, float) and math.isnan(value)}
    return row | numbers | absent


def _row(policy: "Followed", status: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {"policy": str(policy), "status": status} | {key: metrics[key] for key in _KEYS}


def _run_in_memory(
    stream: "Stream", policies: "list[Followed]", settings: dict[str, Any]
) -> tuple[list[dict[str, Any]], str]:
    from quantlab.drift import run_drift

    with progress(f"{stream.steps} steps", stream.steps) as advance:
        result = run_drift(stream, policies, on_step=advance, **settings)
    return [_row(run.policy, run.status, result.metrics(run)) for run in result.runs], result.stream_hash


def _run_and_store(
    source: "StreamSource",
    description: dict[str, Any],
    policies: "list[Followed]",
    settings: dict[str, Any],
    output: Path,
    workers: int | None,
) -> list[dict[str, Any]]:
    """Rows of all policies; those without a record of this stream in ``output`` are run and stored."""
    import torch

    from quantlab.drift import run_long
    from quantlab.drift.point import result_of
    from quantlab.records import (
        check_output_folder,
        complete_record,
        load_record,
        protocol_fingerprint,
        record_path,
        remove_stale,
        save_record,
    )
    from quantlab.sweep.environment import capture_environment

    folder = check_output_folder(output.resolve() / "records")
    remove_stale(folder)
    drawn = {"rounding_seed": settings["seed"]} if settings["seed"] else {}
    drawn |= {name: settings[name] for name in ("turn", "chunk") if settings[name] is not None}
    points = {
        policy: {"kind": "drift", "stream": description, "policy": str(policy), **drawn}
        for policy in policies
    }
    paths = {policy: record_path(folder, point) for policy, point in points.items()}
    records = {policy: load_record(path) for policy, path in paths.items() if path.exists()}
    fingerprint = protocol_fingerprint("drift")
    records = {
        policy: record
        for policy, record in records.items()
        if record["status"] != "failed" and record["protocol"] == fingerprint
    }
    missing = [policy for policy in policies if policy not in records]
    if missing:
        series = {policy: paths[policy].with_suffix(".parquet") for policy in missing}
        processes = workers or len(os.sched_getaffinity(0))
        with progress(f"{source.steps} steps", source.steps) as advance:
            try:
                result = run_long(
                    source, missing, series=series, processes=processes, on_step=advance, **settings
                )
            finally:
                remove_stale(folder)
        environment = capture_environment(torch.get_num_threads())
        for run, seconds in zip(result.runs, result.seconds, strict=True):
            found = result_of(run, result.metrics(run)) | {"series": series[run.policy].name}
            record = complete_record(points[run.policy], found, environment=environment, seconds=seconds)
            save_record(folder, record)
            records[run.policy] = record
    return [_row(policy, records[policy]["status"], records[policy]["metrics"]) for policy in policies]
