"""``quantlab eval --preflight``: what was found before a run, as a table, and its warnings before any other run."""

from typing import TYPE_CHECKING, Any

import typer

from quantlab.terminal import print_json, print_table, print_wrapped

if TYPE_CHECKING:
    from quantlab.evals.preflight_report import Preflight


def show(found: "Preflight", title: str, *, as_json: bool = False) -> None:
    """Every check; behind the table, what to change where a check warns.  What stops a run is the caller's to raise."""
    if as_json:
        print_json([check.as_dict() for check in found.checks])
        return
    rows: list[dict[str, Any]] = [
        {"check": check.name, "task": check.task, "found": check.found, "verdict": check.verdict}
        for check in found.checks
    ]
    several = len({check.task for check in found.checks if check.task}) > 1
    columns = ["check", *(["task"] if several else []), "verdict", "found"]
    print_table(title, rows, columns)
    for check in found.warnings:
        print_wrapped(f"warning: {check.error}")
    if not found.stops:
        print_wrapped("preflight: nothing stops this run")


def tell_warnings(found: "Preflight") -> None:
    """The warnings of a run that goes on, beside its results."""
    for check in found.warnings:
        typer.echo(f"warning: {check.error}", err=True)
