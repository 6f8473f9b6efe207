"""``quantlab claims``: what others have published, measured again."""

import os
import re
import sys
import textwrap
import time
from typing import Annotated

import numpy as np
import typer

from quantlab.terminal import print_json, print_table, progress

WIDTH = 100

claims_app = typer.Typer(
    help="Published figures, measured again: expected, measured, verdict.",
    epilog="Examples: [bold]quantlab claims evidence[/bold], [bold]quantlab claims evidence B1 B9 --json[/bold]",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    no_args_is_help=True,
)


@claims_app.callback()
def claims() -> None:
    """Published figures, measured again: expected, measured, verdict."""


@claims_app.command(epilog="Example: [bold]quantlab claims evidence B5 B15[/bold]")
def evidence(
    cases: Annotated[
        list[str] | None, typer.Argument(help="Cases, e.g. B1 B9 (default: all).", metavar="[CASE]...")
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="More sequences and draws, mostly four times as many: sharper verdicts."),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Name the cases, run none.")] = False,
    workers: Annotated[int | None, typer.Option(help="Worker processes (default: all cores).", min=1)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a figure instead of a table.")
    ] = False,
) -> None:
    """The public numeric cases B1 to B18 of state storage, replay, slots and random numbers.

    A verdict compares our number with the printed one: they may differ by half a unit of its last digit and four
    standard errors of both runs.  "not comparable": the source withholds what the number depends on.
    """
    from quantlab.drift.evidence import CASES, get_case, run_cases

    chosen = [get_case(name) for name in dict.fromkeys(cases or CASES)]
    if list_only:
        rows = [{"case": case.name, "figures": len(case.figures), "gist": case.gist} for case in chosen]
        if as_json:
            print_json(rows)
        else:
            print_table("Public numeric cases", rows, ["case", "figures", "gist"])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the worker processes
    found, started = {}, time.monotonic()
    with progress(f"{len(chosen)} cases", len(chosen)) as advance:
        for case, measured in run_cases(chosen, full=full, workers=workers):
            found[case.name] = measured
            if advance is not None:
                advance(len(found))
            else:
                seconds = time.monotonic() - started
                print(
                    f"{case.name} done, {len(found)} of {len(chosen)}, {seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    rows = [outcome.row for case in chosen for outcome in found[case.name]]
    if as_json:
        print_json(rows)
        return
    for case in chosen:
        for line in textwrap.wrap(f"{case.name}  {case.gist}", WIDTH, subsequent_indent="     "):
            typer.echo(line)
    columns = ["case", "figure", "expected", "measured", "tolerance", "verdict"]
    names = {"tolerance": "within"}
    shown = [
        row
        | {
            "expected": _expected(str(row["expected"]), row["measured"]),
            "measured": _short(row["measured"], str(row["expected"])),
            "tolerance": _short(row["tolerance"]),
        }
        for row in rows
    ]
    right = ("expected", "measured", "tolerance")
    narrow = [column for column in columns if column != "tolerance"]
    print_table("Public figures, measured again", shown, columns, names, right, narrow)
    # One explanation for the figures that share it.
    remarks: dict[tuple[object, object], list[str]] = {}
    for row in rows:
        if row["verdict"] != "agree":
            remarks.setdefault((row["verdict"], row["why"]), []).append(f"{row['case']} {row['figure']}")
    for (verdict, why), figures in remarks.items():
        text = f"{verdict}: {'; '.join(figures)}: {why or 'no explanation yet'}"
        typer.echo()
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="    "):
            typer.echo(line)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows)
        for verdict in ("agree", "disagree", "not comparable")
    }
    typer.echo()
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _expected(text: str, measured: object) -> str:
    """As the source prints it; a condition that holds or does not, in the words of ``_short``."""
    return {"= 1": "yes", "= 0": "no"}.get(text, text) if _is_condition(measured) else text


def _short(value: object, like: str = "") -> str | None:
    """Three digits, or as many as the number in ``like`` is printed with; a condition as yes or no."""
    if value is None:
        return None
    if _is_condition(value):
        return "yes" if value else "no"
    mantissa = re.search(r"\d+\.?\d*|\.\d+", like)
    printed = len(mantissa[0].replace(".", "").lstrip("0")) if mantissa else 0
    return f"{float(str(value)):.{max(3, printed)}g}"


def _is_condition(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))
