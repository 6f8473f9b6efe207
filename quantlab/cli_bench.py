"""``quantlab bench``: how long a decode step takes, of its own bytes and beside other kernels."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, text_of

if TYPE_CHECKING:
    from quantlab.kernels.bench_cases import Case
    from quantlab.schemes.ledger import StateShape

EPILOG = (
    "Example: [bold]quantlab bench --model Nemotron-3-Nano-30B-A3B -p fp32@1 -p fp32/nvfp4@16:buffer=bf16 "
    "--batch 256 --dry-run[/bold]"
)
POLICIES = (
    "fp32@1",
    "fp32@16:buffer=bf16",
    "fp32/nvfp4@16:buffer=bf16",
    "fp16+sr/nvfp4@16:buffer=bf16",
    "fp8+sr/nvfp4@16:buffer=bf16",
)
BATCHES = (1, 8, 64, 256)
SHAPES = {"mamba2": "64,64,128,8", "gated_delta": "32,128,128,16", "kimi_delta": "32,128,128,32"}
DRY_BANDWIDTH = 4.2
FAILED = ("comparison_failed", "failed")
"""Statuses of ours that end with exit status 1; a peer's failure is a line."""

Offered = Callable[[int], dict[str, list[str]]]
"""Drafts, 0 for steps -> the policies that each peer serves."""

_NAMES = {
    "batch": "batch",
    "who": "kernels",
    "policy": "policy",
    "drafts": "drafts",
    "us": "us",
    "quartiles": "quartiles",
    "megabytes": "MB",
    "of_copy": "% of copy",
    "against_peer": "x of peer",
    "peer": "best peer",
    "against_baseline": "x of fp32@1",
    "chosen": "chosen",
    "chosen_against_peer": "x of peer, chosen",
    "kernels": "launches",
    "status": "status",
}
_RIGHT = [
    *("batch", "drafts", "us", "quartiles", "megabytes"),
    *("of_copy", "against_peer", "against_baseline", "chosen_against_peer"),
]


def bench(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A published model: the shape of its layers.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="mamba2, gated_delta or kimi_delta (default: mamba2).")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HEADS,VALUE_DIM,KEY_DIM,KEY_HEADS",
            help="Of a layer; repeat for several (default: "
            f"{'; '.join(f'{name} {text}' for name, text in SHAPES.items())}).",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Policy text; repeat for several (default: fp32@1 and, with buffer=bf16, fp32@16, fp32/nvfp4@16, "
            "fp16+sr/nvfp4@16 and fp8+sr/nvfp4@16).",
            metavar="POLICY",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Rows decoded together, 1 to 1024; repeat for several (default: {', '.join(map(str, BATCHES))})."
        ),
    ] = None,
    drafts: Annotated[
        list[int] | None,
        typer.Option(
            metavar="T",
            help="Policies with a window verify T tokens and commit them all, against T steps; repeatable.",
        ),
    ] = None,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose", help="Where another policy's kernels are chosen at a batch, time those too."
        ),
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PATH]",
            help="Kernels to time beside ours: vllm, replayssm, mamba_ssm or fla, installed or from a source tree; "
            "those that have the family.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for records, table and figures.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Time what has a record in the folder too.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cases, their bytes and the wall; needs no GPU.")
    ] = False,
    bandwidth: Annotated[
        float | None, typer.Option(help=f"Of --dry-run, in TB/s (default: {DRY_BANDWIDTH}).", min=1e-3)
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Folder with records: draw table and figures from them, time nothing.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line instead of a table.")
    ] = False,
) -> None:
    """Time one decode step of one layer, amortised over the window, after a comparison with plain torch."""
    if figure is not None:
        given = {"model": model, "family": family, "shape": shape, "policy": policy, "batch": batch}
        given |= {"drafts": drafts, "choose": choose, "peer": peer, "again": again, "dry-run": dry_run}
        _only("figure", given | {"bandwidth": bandwidth}, "shows every record of its folder")
        _redraw(figure, output or figure, as_json)
        return
    if bandwidth is not None and not dry_run:
        raise InputError("bandwidth", bandwidth, "--dry-run: a run measures the copy itself")
    from quantlab.kernels.bench_peers import offered, parse_peers

    family, shapes = _layers(model, family, shape)
    wanted = parse_peers(peer or [])

    def cases_of(offered: Offered) -> "list[Case]":
        return _cases(family, shapes, policy, batch, offered, drafts, choose)

    if dry_run:
        _only("dry-run", {"output": output, "again": again}, "times nothing and keeps no record")
        cases = cases_of(lambda drafts: {name: offered(name, family, drafts) for name in wanted})
        _list(cases, bandwidth or DRY_BANDWIDTH, as_json)
        return
    cases_of(lambda drafts: {})  # refuses bad input before anything is imported or allocated
    _measure(family, cases_of, wanted, output, again, as_json)


def _measure(
    family: str,
    cases_of: "Callable[[Offered], list[Case]]",
    wanted: dict[str, Path | None],
    output: Path | None,
    again: bool,
    as_json: bool,
) -> None:
    import torch

    from quantlab.kernels.bench import run_cases
    from quantlab.kernels.bench_peers import load_peers
    from quantlab.kernels.bench_timing import GraphTimer, gpu_environment, obstacle
    from quantlab.records import check_output_folder, remove_stale
    from quantlab.report.speed import check_stored, speed_rows
    from quantlab.sweep.environment import capture_environment

    if reason := obstacle():
        raise InputError("device", "none", reason)
    folder = None if output is None else check_output_folder(check_output_folder(output) / "records")
    if folder is not None:
        remove_stale(folder)
        check_stored(folder)
    peers, notes = load_peers(wanted)
    for note in notes:
        _say(note)
    cases = cases_of(lambda count: {name: peer.policies(family, count) for name, peer in peers.items()})
    timer = GraphTimer()
    progress = _Progress(len(cases))
    records = run_cases(
        cases,
        timer,
        environment=capture_environment(torch.get_num_threads()) | gpu_environment(timer),
        peers=peers,
        folder=folder,
        again=again,
        show=progress.show,
    )
    rows = list(speed_rows(records))
    _print(rows, as_json)
    if output is not None:
        _write(output)
    if any(row["implementation"] == "quantlab" and row["status"] in FAILED for row in rows):
        raise typer.Exit(1)


class _Progress:
    """A line a case on standard error."""

    def __init__(self, total: int):
        self.total, self.done = total, 0

    def show(self, record: dict[str, Any], timed: bool) -> None:
        self.done += 1
        point, us = record["point"], record["metrics"].get("us")
        shape = ",".join(str(point[name]) for name in ("heads", "value_dim", "key_dim", "key_heads"))
        drafts = f" {point['drafts']} drafts" if "drafts" in point else ""
        who = f"{point['implementation']} {point['policy']}{drafts}"
        case = f"{point['family']} {shape} batch {point['batch']}, {who}"
        result = f"{us:.2f} us" if us else record["status"]
        tail = f": {record['message']}" if record["message"] else ""
        took = f" ({record['seconds']:.1f} s)" if timed else " (from its record)"
        _say(f"[{self.done}/{self.total}] {case} | {result}{tail}{took}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _only(name: str, others: dict[str, Any], what: str) -> None:
    for other, value in others.items():
        if value:
            raise InputError(other, value, f"nothing beside --{name}, which {what}")


def _layers(
    model: str | None, family: str | None, shapes: list[str] | None
) -> "tuple[str, list[StateShape]]":
    from quantlab.errors import unknown_name
    from quantlab.kernels.bench_cases import parse_shape

    if model is not None:
        from quantlab.models.published import published

        if family is not None or shapes:
            raise InputError("model", model, "a model, or a family and shapes, not both")
        geometry = published(model)
        family, found = geometry.family, [geometry.shape]
    else:
        family = family or "mamba2"
        found = [parse_shape(text) for text in shapes or [SHAPES.get(family, "")] if text]
    if family not in SHAPES:
        raise unknown_name("family", family, SHAPES)
    return family, found


def _cases(
    family: str,
    shapes: "list[StateShape]",
    policy: list[str] | None,
    batch: list[int] | None,
    offered: Offered,
    drafts: list[int] | None,
    choose: bool,
) -> "list[Case]":
    from quantlab.kernels.bench_cases import expand

    given = policy or list(POLICIES), batch or list(BATCHES), offered(0), drafts or [], offered(1), choose
    return [case for shape in shapes for case in expand(family, shape, *given)]


def _list(cases: "list[Case]", bandwidth: float, as_json: bool) -> None:
    from quantlab.kernels.bench_cases import launch_bytes, shape_text, traffic

    rows = []
    for case in cases:
        found = traffic(case)
        rows.append(
            {
                "family": case.family,
                "shape": shape_text(case.shape),
                "batch": case.batch,
                "implementation": case.implementation,
                "policy": case.policy,
                "drafts": case.drafts or None,
                "bytes": found.bytes,
                "read": sum(found.read.values()),
                "written": sum(found.written.values()),
                "token_bytes": found.tokens,
                "wall_us": found.bytes / (bandwidth * 1e6),
                "launches": launch_bytes(case),
                "not_served": _not_served(case),
            }
        )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row |= {name: f"{row[name] / 1e6:,.2f}" for name in ("bytes", "read", "written", "token_bytes")}
        row["wall_us"] = f"{row['wall_us']:,.2f}"
    names = {
        "implementation": "kernels",
        "read": "read MB",
        "written": "write MB",
        "bytes": "MB",
        "token_bytes": "tokens MB",
        "wall_us": f"us at {bandwidth:g} TB/s",
    }
    columns = [
        "shape",
        "batch",
        "implementation",
        "policy",
        *(["drafts"] if any(case.drafts for case in cases) else []),
        "read",
        "written",
        "bytes",
        "token_bytes",
        "wall_us",
    ]
    right = ["batch", "drafts", "read", "written", "bytes", "token_bytes", "wall_us"]
    what = _timed(any(case.drafts for case in cases))
    title = f"{cases[0].family}: what {what} of a layer moves, amortised over the window"
    print_table(title, rows, columns, names, right, ["batch", "policy", "bytes", "wall_us"])
    reasons = {(row["policy"], row["shape"]): row["not_served"] for row in rows if row["not_served"]}
    for (text, shape), reason in reasons.items():
        typer.echo(f"{text} at {shape}, not served by kernels: {reason}")


def _not_served(case: "Case") -> str | None:
    """Why no kernel of ours serves it."""
    from quantlab.kernels import drafts, steps

    if case.implementation != "quantlab":
        return None
    return (drafts if case.drafts else steps).served(case.policy, case.family, case.shape)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    for key in dict.fromkeys(_layer(row) for row in rows):
        mine = [_shown(row) for row in rows if _layer(row) == key]
        columns = [name for name in _NAMES if any(row[name] not in (None, "") for row in mine)]
        narrow = [name for name in columns if name not in ("quartiles", "megabytes", "kernels", "who")]
        what = _timed(any(row["drafts"] for row in mine))
        print_table(f"{key}: {what} of a layer", mine, columns, _NAMES, _RIGHT, narrow)
        _print_launches([row for row in rows if _layer(row) == key])
    for row in rows:
        if row["message"]:
            who = row["policy"] if row["implementation"] == "quantlab" else row["implementation"]
            who += f" with {row['drafts']} drafts" if row["drafts"] else ""
            typer.echo(f"{who} at batch {row['batch']}, {row['status']}: {row['message']}")


def _timed(drafts: object) -> str:
    return "a step, or a verification of drafts and its commit," if drafts else "a step"


def _layer(row: dict[str, Any]) -> str:
    shape = ",".join(str(row[name]) for name in ("heads", "value_dim", "key_dim", "key_heads"))
    return f"{row['family']} {shape}, {row['device']}"


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    def fixed(value: float | None, digits: int, unit: float = 1.0) -> str | None:
        return None if value is None else f"{value / unit:,.{digits}f}"

    other = row["chosen"] not in (None, row["policy"])
    quartiles = None if row["us"] is None else f"{row['us_lower']:.2f}-{row['us_upper']:.2f}"
    return {
        "batch": row["batch"],
        "who": row["implementation"],
        "policy": row["policy"],
        "drafts": row["drafts"],
        "us": fixed(row["us"], 2),
        "quartiles": quartiles,
        "megabytes": fixed(row["bytes"], 2, 1e6),
        "of_copy": fixed(row["of_copy"], 1, 0.01),
        "against_peer": fixed(row["against_peer"], 2),
        "peer": row["peer"] and f"{row['peer']} {row['peer_policy']}",
        "against_baseline": fixed(row["against_baseline"], 2),
        "chosen": row["chosen"] if other else None,
        "chosen_against_peer": fixed(row["chosen_against_peer"], 2) if other else None,
        "kernels": row["kernels"],
        "status": None if row["status"] == "ok" else row["status"],
    }


def _print_launches(rows: list[dict[str, Any]]) -> None:
    """Single kernels, where the launchers tell them apart."""
    found = []
    for row in rows:
        for name, launch in row["launches"].items():
            share = launch.get("of_copy")
            found.append(
                {
                    "batch": row["batch"],
                    "policy": row["policy"],
                    "part": name,
                    "kernel": " + ".join(launch["kernels"]),
                    "us": f"{launch['us']:.2f}",
                    "megabytes": f"{launch['bytes'] / 1e6:,.2f}" if "bytes" in launch else None,
                    "of_copy": None if share is None else f"{100 * share:.1f}",
                }
            )
    if found:
        names = {"us": "us alone", "megabytes": "MB", "of_copy": "% of copy"}
        print_table("Single kernels", found, list(found[0]), names, ["batch", "us", "megabytes", "of_copy"])


def _redraw(folder: Path, output: Path, as_json: bool) -> None:
    from quantlab.records import check_output_folder
    from quantlab.report.speed import in_order, load_speed_records, speed_rows

    rows = in_order(list(speed_rows(load_speed_records(folder))))
    check_output_folder(output)
    _print(rows, as_json)
    _write(output, folder)


def _write(output: Path, folder: Path | None = None) -> None:
    """Table and figures of every record in the folder, this run's and older ones."""
    from quantlab.report.speed import draw_speed, in_order, load_speed_records, speed_csv, speed_rows

    rows = in_order(list(speed_rows(load_speed_records(folder or output))))
    paths = [speed_csv(rows, output / "bench.csv"), *draw_speed(rows, output)]
    _say(f"written: {', '.join(text_of(str(path)) for path in paths)}")
