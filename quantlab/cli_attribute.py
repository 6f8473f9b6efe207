"""``quantlab drift --attribute``: the parts of a policy, one at a time."""

from typing import TYPE_CHECKING, Any

import typer

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, progress

if TYPE_CHECKING:
    from quantlab.drift import Stream
    from quantlab.schemes import Policy

INTERACTION = 0.1
"""Parts whose squares add up to the whole within this are called independent."""
_COLUMNS = {
    "suspect": "suspect alone",
    "policy": "as a policy",
    "status": "status",
    "output_error": "output error",
    "state_error": "state error",
    "share": "share",
}


_NARROW = ["suspect", "output_error", "state_error", "share"]


def attribute_policies(
    stream: "Stream", policies: "list[Policy]", suspects: list[str] | None, seed: int, *, as_json: bool
) -> None:
    """Print the ladder of each policy: every suspect alone, and the whole."""
    from quantlab.drift.attribution import attribute, names_of, parts_of, suspect

    for policy in policies:
        for name in names_of(policy, stream, suspects):
            suspect(name, policy, stream)  # a wrong name ends here, before anything runs
    for policy in policies:
        with progress(f"{policy}, {stream.steps} steps", stream.steps) as advance:
            ladder = attribute(stream, policy, suspects, seed=seed, on_step=advance)
        rows: list[dict[str, Any]] = [
            {"suspect": rung.name}
            | {key: getattr(rung, key) for key in ("policy", "status")}
            | {key: getattr(rung, key) for key in ("output_error", "state_error", "share", "diverged_at")}
            for rung in (*ladder.rungs, ladder.whole)
        ]
        in_parts = not suspects and bool(parts_of(policy))
        rows[-1]["suspect"] = "all together" if in_parts else "the policy itself"
        if as_json:
            about = {"policy": str(policy), "stream_hash": stream.hash, "quadrature": ladder.quadrature}
            print_json([about | {"rungs": rows[:-1], "whole": rows[-1]}])
            continue
        for row in rows:
            row["share"] = None if row["share"] is None else f"{row['share']:.2%}"
        title = f"{stream.family}, {stream.steps} steps, {stream.heads} heads x {stream.batch}, {policy}"
        selections = [_NARROW] if all(row["status"] == "ok" for row in rows) else []
        print_table(title, rows, list(_COLUMNS), _COLUMNS, (), *selections)
        if in_parts:
            whole, sum_of_parts = ladder.whole.output_error, ladder.quadrature
            independent = abs(sum_of_parts - whole) <= INTERACTION * whole
            verdict = "independent parts" if independent else "the parts hide or feed one another"
            typer.echo(
                f"Root of the parts' sum of squares {sum_of_parts:.3g}, all together {whole:.3g}: {verdict}."
            )


def check_alone(given: dict[str, Any]) -> None:
    """InputError for an option that means nothing beside --attribute."""
    for name, value in given.items():
        if value is not None:
            raise InputError(
                name, str(value), "no --attribute, which runs one stream in memory, token by token"
            )
