"""``quantlab predict``: the closed form, for a decay, for a model's heads, or for captured inputs."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from quantlab.cli_budget import spend
from quantlab.cli_fact import LARGEST_WRITES, predict_facts
from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, print_wrapped

if TYPE_CHECKING:
    from quantlab.drift.heads import HeadStatistics
    from quantlab.drift.risks import HeadRisks

SMALLEST_ALPHA, LARGEST_ALPHA = 1e-6, 1 - 6e-8
DEFAULT_ALPHAS = (0.9, 0.99, 0.999)
_QUANTILES = (0.05, 0.5, 0.95)

_COLUMNS = {
    "policy": "policy",
    "group": "heads",
    "half_life": "half-life",
    "state_error": "state error",
    "output_error": "output error",
    "margin": "margin",
    "stagnation": "lost moves",
    "headroom": "headroom",
    "divergence": "divergence",
    "test_length": "test length",
}
_NARROW = ["policy", "group", "state_error", "output_error", "margin", "stagnation", "test_length"]
_NARROWEST = ["policy", "group", "output_error", "margin"]


def predict(
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            help="Policy texts; with --budget those to choose from (default: six, FP32 to NVFP4).",
            metavar="POLICY...",
            show_default=False,
        ),
    ] = None,
    family: Annotated[
        str, typer.Option("--family", help="gated_delta, kimi_delta, mamba2 or mamba1.")
    ] = "gated_delta",
    alpha: Annotated[
        list[float] | None, typer.Option(help="Decay per step; repeat for several (default .9 .99 .999).")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Constant write strength of a delta rule; default sigmoid(N(0, 1)).")
    ] = None,
    key_dim: Annotated[
        int | None, typer.Option(help="Key dim of a head (default: 128; mamba1 16).", min=1)
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Value dim of a head (default: 128; Mamba 64).", min=1)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "--config",
            help="Folder of a Hugging Face model: config.json, and weights if they are there; or builtin:tiny-mamba2.",
        ),
    ] = None,
    stream: Annotated[
        Path | None, typer.Option(help="A stream file: captured or saved decode inputs.")
    ] = None,
    gate_spread: Annotated[
        float, typer.Option(help="With --model: standard deviation of the gate's projected input.", min=0.0)
    ] = 0.0,
    budget: Annotated[
        float | None,
        typer.Option(
            help="With --model: choose a policy for each head so that the states' bytes, read and written per token,"
            " are at most this part of those of fp32@1, and the predicted error is least."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="With --budget: a TOML file of rules by layer and head, to be written.",
            dir_okay=False,
        ),
    ] = None,
    mixed_windows: Annotated[
        bool,
        typer.Option(
            "--mixed-windows", help="With --budget: heads of a layer may differ in window (CPU only)."
        ),
    ] = False,
    writes: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LARGEST_WRITES,
            help="With --model reference:NAME: the error of a read that asks for one fact behind so many writes, over"
            " what the fact says in it.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object a line instead of a table."),
    ] = False,
) -> None:
    """Predict errors and risks of a long run in closed form; no policy is run."""
    from quantlab.drift.risks import head_risks
    from quantlab.schemes import check_policy_fits, parse_policy

    alone = {"alpha": alpha, "beta": beta, "value_dim": value_dim, "key_dim": key_dim, "stream": stream}
    if budget is not None:
        for name, value in (alone | {"writes": writes}).items():
            if value is not None:
                raise InputError(name, str(value), "no --budget, which is for the heads of a --model")
        with ExitStack() as stack:
            folder = _folder(config, stack)
            spend(budget, policies, folder, gate_spread, output, mixed_windows, as_json)
        return
    for name, value in {"output": output, "mixed_windows": mixed_windows or None}.items():
        if value is not None:
            raise InputError(name, str(value), "--budget beside it")
    if writes is not None:
        for name, value in alone.items():
            if value is not None:
                raise InputError(name, str(value), "no --writes, which is for a reference model")
        predict_facts(str(config), policies, writes, as_json)
        return
    if not policies:
        raise InputError("policy", None, "at least one policy text, or --model and --budget")
    with ExitStack() as stack:
        folder = _folder(config, stack)
        heads = _heads(family, alpha, beta, value_dim, key_dim, folder, stream, gate_spread)
    constant = config is None and stream is None
    found = []
    for parsed in dict.fromkeys(map(parse_policy, policies)):
        check_policy_fits(parsed, heads.family)
        found.append(head_risks(parsed, heads))
    if as_json and constant:
        print_json([_by_alpha(heads, risks) for risks in found])
        return
    if as_json:
        print_json([row for risks in found for row in _per_head(heads, risks)])
        return
    if constant:
        rows = [row | {"group": row["head"]} for risks in found for row in _per_head(heads, risks)]
    else:
        rows = [row for risks in found for row in _quantiles(heads, risks)]
    title = f"Predicted for {heads.family}, {heads.heads} head(s): long run"
    print_table(title, rows, list(_COLUMNS), _COLUMNS, (), _NARROW, _NARROWEST)
    print_wrapped(f"Heads: {heads.source}.")
    for line in _notes(heads, found, constant):
        print_wrapped(line)


def _folder(model: Path | None, stack: ExitStack) -> Path | None:
    """What --model names; a built-in one is there until ``stack`` closes."""
    # Any other needs no weights here, unlike in an evaluation.
    if not str(model).startswith(("builtin:", "reference:")):
        return model
    from quantlab.evals.run import model_folder
    from quantlab.models.texts import quiet_transformers

    quiet_transformers()
    return model_folder(str(model), stack)


def _heads(
    family: str,
    alpha: list[float] | None,
    beta: float | None,
    value_dim: int | None,
    key_dim: int | None,
    config: Path | None,
    stream: Path | None,
    gate_spread: float,
) -> "HeadStatistics":
    from quantlab.drift import heads_of_decay, heads_of_stream, load_stream
    from quantlab.drift.model_heads import heads_of_folder
    from quantlab.recurrences import DecayAxis, get_recurrence

    if config is not None and stream is not None:
        raise InputError("stream", str(stream), "one of --model and --stream")
    given = {"alpha": alpha, "beta": beta, "value_dim": value_dim, "key_dim": key_dim}
    if config is not None or stream is not None:
        for name, value in given.items():
            if value is not None:
                decides = "the config" if config is not None else "the stream file"
                raise InputError(name, value, f"nothing, as {decides} decides it")
    if config is not None:
        return heads_of_folder(config, gate_spread)
    if stream is not None:
        return heads_of_stream(load_stream(stream))
    recurrence = get_recurrence(family)
    alphas = alpha or list(DEFAULT_ALPHAS)
    for value in alphas:
        if not SMALLEST_ALPHA <= value <= LARGEST_ALPHA:
            expected = (
                f"a decay per step from {SMALLEST_ALPHA:g}, below which no token remembers the one before, to 1 - 6e-8,"
                " above which float32 has no number but 1"
            )
            raise InputError("alpha", value, expected)
    if beta is not None and not (recurrence.delta_rule and 0 <= beta <= 2):
        expected = "a write strength in [0, 2]" if recurrence.delta_rule else f"no beta with {family}"
        raise InputError("beta", beta, expected)
    channels = {DecayAxis.HEAD: (1,), DecayAxis.KEY: (1,), DecayAxis.ELEMENT: (1, 1)}[recurrence.axis]
    logs = np.log(np.array(alphas)).reshape(-1, *channels)
    return heads_of_decay(
        family,
        logs,
        beta=beta,
        value_dim=value_dim,
        key_dim=key_dim,
        names=tuple(f"alpha {a:g}" for a in alphas),
    )


def _per_head(heads: "HeadStatistics", risks: "HeadRisks") -> list[dict[str, Any]]:
    """One row a head, under the names of the JSON output."""
    errors = risks.errors
    columns = {
        "half_life": heads.half_life,
        "state_error": errors.state,
        "output_error": errors.output,
        "margin": errors.margin,
        "stagnation": risks.stagnation,
        "headroom": risks.headroom,
        "divergence": risks.divergence,
        "test_length": risks.test_length,
        "largest": risks.largest,
        "rounding": errors.noise,
    }
    flags = {"diverges": errors.diverges & (errors.noise > 0), "needs_stochastic": risks.needs_stochastic}
    return [
        {"policy": str(risks.policy), "head": heads.names[h]}
        | {name: float(values[h]) for name, values in columns.items()}
        | {name: bool(values[h]) for name, values in flags.items()}
        for h in range(heads.heads)
    ]


def _by_alpha(heads: "HeadStatistics", risks: "HeadRisks") -> dict[str, Any]:
    """One row a policy: the output error at each alpha, and everything else under ``heads``."""
    rows = _per_head(heads, risks)
    errors = {row["head"]: row["output_error"] for row in rows}
    return {"policy": str(risks.policy), **errors, "heads": rows}


def _quantiles(heads: "HeadStatistics", risks: "HeadRisks") -> list[dict[str, Any]]:
    """Quantiles over the heads, each column by itself, and the head with the largest output error."""
    rows = _per_head(heads, risks)
    numbers = [name for name in _COLUMNS if name not in ("policy", "group")]
    found: list[dict[str, Any]] = []
    for quantile in _QUANTILES:
        row: dict[str, Any] = {"policy": str(risks.policy), "group": f"{quantile:.0%} of heads"}
        for name in numbers:
            ordered = sorted(r[name] for r in rows)
            # No interpolation: infinite entries stay what they are.
            row[name] = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
        found.append(row)
    worst = max(rows, key=lambda r: (r["diverges"], r["output_error"]))
    found.append(worst | {"group": f"worst: {worst['head']}"})
    return found


def _notes(heads: "HeadStatistics", found: "list[HeadRisks]", constant: bool) -> list[str]:
    lines = [
        "Margin: (1 - rho^L) / eps^2, below 1 the state diverges.  Lost moves: stores that leave an element where it"
        " is.  Headroom: powers of two to the largest number.  Divergence: tokens until two float32 implementations"
        " differ by half the rounding error.  Test length: tokens below which a comparison says nothing."
    ]
    if not constant:
        lines.append(
            '"5% of heads": that share of the heads has this value or a smaller one, each column by itself.'
        )
    if heads.largest is None:
        lines.append("Headroom takes v ~ N(0, 1) (Mamba: x and B too) and grows or shrinks with their size.")
    for risks in found:
        count = int((risks.errors.diverges & (risks.errors.noise > 0)).sum())
        if count:
            lines.append(
                f"{risks.policy}: inf, rounding noise outgrows the decay in {count} of {heads.heads} head(s)."
            )
        count = int(risks.needs_stochastic.sum())
        if count:
            lines.append(
                f"{risks.policy}: in {count} of {heads.heads} head(s) most moves are below half a unit in the last"
                " place, so that errors add up instead of averaging out: use +sr or +ef."
            )
        count = int((risks.headroom < 1).sum())
        if count:
            lines.append(
                f"{risks.policy}: less than a factor of 2 to overflow in {count} of {heads.heads} head(s)."
            )
    return lines
