"""``quantlab predict --budget``: which policy each head of a model takes within a budget of bytes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, print_wrapped

if TYPE_CHECKING:
    from quantlab.drift.budget import Allocation

_SHARE = {"layer": "layer", "bytes_per_token": "bytes", "fraction": "part", "output_error": "output error"}
_SINGLE = {
    "policy": "policy",
    "heads": "heads here",
    "fraction": "part of the bytes",
    "output_error": "output error",
    "refused": "not for",
}


def spend(
    budget: float,
    policies: list[str] | None,
    folder: Path | None,
    gate_spread: float,
    output: Path | None,
    mixed_windows: bool,
    as_json: bool,
) -> None:
    """``--budget``: choose, explain, and write rules."""
    from quantlab.drift.budget import LADDER, allocate
    from quantlab.drift.model_heads import read_heads
    from quantlab.models.config_geometry import read_config

    if folder is None:
        raise InputError("budget", budget, "--model beside it, the folder of a Hugging Face model")
    if output is not None and (output.suffix.lower() != ".toml" or not output.resolve().parent.is_dir()):
        raise InputError("output", str(output), "a file that ends in .toml, in a folder that exists")
    found = read_heads(folder, gate_spread)
    if not found.complete:
        expected = f"weights of each recurrent layer of its config, not of {len(found.layers)}"
        raise InputError("model", str(folder), expected)
    shape = read_config(folder).shape
    allocation = allocate(
        found.statistics, shape, found.layers, budget, policies or LADDER, one_window=not mixed_windows
    )
    if output is not None:
        _write_rules(output, allocation, found.statistics.source)
    if as_json:
        print_json([_allocation_as_object(allocation, found.statistics.source)])
        return
    _print_allocation(allocation, folder.resolve().name)
    print_wrapped(f"Heads: {found.statistics.source}.")
    if output is None:
        print_wrapped(
            "--output rules.toml writes this as rules, which run_with_policy(model, 'rules.toml') takes."
        )
    else:
        print_wrapped(f"rules: {output}")


def _write_rules(path: Path, allocation: "Allocation", source: str) -> None:
    from quantlab.records import write_atomic

    rules = allocation.rules(path.stem)
    rules.check(dict.fromkeys(allocation.layers, allocation.shape.heads), allocation.family)
    comment = (
        f"# quantlab predict --budget {allocation.budget:g}: {_fraction(allocation):.4f} of the bytes of"
        f" {allocation.baseline}, predicted output error {allocation.output_error:.3g}\n# {source}"
    )
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in comment)
    try:
        write_atomic(path, f"{printable}\n{rules.toml()}".encode())
    except OSError as error:
        raise InputError("output", str(path), f"a file that can be written ({error.strerror})") from None


def _fraction(allocation: "Allocation") -> float:
    return allocation.bytes_per_token / allocation.baseline_bytes


def _layer_rows(allocation: "Allocation") -> list[dict[str, Any]]:
    whole = allocation.baseline_bytes / len(allocation.layers)
    return [
        {
            "layer": share.layer,
            "policies": {str(p): n for p, n in zip(allocation.ladder, share.counts, strict=True) if n},
            "bytes_per_token": share.bytes_per_token,
            "fraction": share.bytes_per_token / whole,
            "output_error": share.output_error,
        }
        for share in allocation.by_layer
    ]


def _single_rows(allocation: "Allocation") -> list[dict[str, Any]]:
    given = np.bincount(allocation.choices.ravel(), minlength=len(allocation.ladder))
    return [
        {
            "policy": str(one.policy),
            "heads": int(count),
            "bytes_per_token": one.bytes_per_token,
            "fraction": one.bytes_per_token / allocation.baseline_bytes,
            "output_error": None if one.refused else one.output_error,
            "refused": one.refused,
            "refusals": reasons,
        }
        for one, count, reasons in zip(allocation.single, given, allocation.refusals, strict=True)
    ]


def _allocation_as_object(allocation: "Allocation", source: str) -> dict[str, Any]:
    best = allocation.best_single
    return {
        "budget": allocation.budget,
        "baseline": str(allocation.baseline),
        "baseline_bytes_per_token": allocation.baseline_bytes,
        "bytes_per_token": allocation.bytes_per_token,
        "fraction": _fraction(allocation),
        "output_error": allocation.output_error,
        "bound": allocation.bound,
        "unpredicted": allocation.unpredicted,
        "one_policy": None
        if best is None
        else {
            "policy": str(best.policy),
            "bytes_per_token": best.bytes_per_token,
            "output_error": best.output_error,
        },
        "policies": _single_rows(allocation),
        "layers": _layer_rows(allocation),
        "source": source,
        "rules": allocation.rules().toml(),
    }


def _print_allocation(allocation: "Allocation", name: str) -> None:
    from quantlab.schemes.policy import Options

    short = [str(replace(policy, options=Options())) for policy in allocation.ladder]
    labels = {
        str(policy): text if short.count(text) == 1 else str(policy)
        for policy, text in zip(allocation.ladder, short, strict=True)
    }
    layers = _layer_rows(allocation)
    used = [text for text in labels if any(text in row["policies"] for row in layers)]
    rows = [row | {text: row["policies"].get(text, 0) for text in used} for row in layers]
    total = {"layer": "all", "bytes_per_token": allocation.bytes_per_token, "fraction": _fraction(allocation)}
    total |= {text: sum(row[text] for row in rows) for text in used}
    total["output_error"] = allocation.output_error
    rows = [row | {"bytes_per_token": f"{row['bytes_per_token']:,.0f}"} for row in [*rows, total]]
    title = f"{name}: heads of each layer at each policy, bytes a token, predicted error"
    columns = ["layer", *used, "bytes_per_token", "fraction", "output_error"]
    print_table(title, rows, columns, labels | _SHARE, ("layer", "bytes_per_token"))
    print_table("One policy for all heads", _single_rows(allocation), list(_SINGLE), _SINGLE)
    for line in _allocation_notes(allocation):
        print_wrapped(line)


def _allocation_notes(allocation: "Allocation") -> list[str]:
    lines = [
        f"Bytes: {allocation.bytes_per_token:,.0f} a token, read and written by the states of one sequence,"
        f" {_fraction(allocation):.4f} of {allocation.baseline_bytes:,.0f} with {allocation.baseline}"
        f" (budget {allocation.budget:g}; convolution states not counted).",
        f"Predicted output error: {allocation.output_error:.3g}, the root mean square over the heads of the error"
        f" relative to each head's own output; no choice within this budget has less than {allocation.bound:.3g}.",
    ]
    best = allocation.best_single
    if best is None:
        lines.append("One policy for all heads: none within this budget suits every head.")
    else:
        lines.append(
            f"One policy for all heads within the same budget: {best.policy}, {best.output_error:.3g} at"
            f" {best.bytes_per_token / allocation.baseline_bytes:.4f} of the bytes."
        )
        # To the digits that are shown; less than a mixture it never has.
        if f"{best.output_error:.3g}" == f"{allocation.output_error:.3g}":
            lines.append(f"A mixture gains nothing here: {best.policy} for the whole model is as good.")
    for policy, reasons in zip(allocation.ladder, allocation.refusals, strict=True):
        if reasons:
            told = ", ".join(f"{reason} in {count} head(s)" for reason, count in reasons.items())
            lines.append(f"{policy}: {told}, which do not get it.")
    if allocation.unpredicted:
        lines.append(
            f"{allocation.unpredicted} head(s) forget too little for a prediction: they get the widest policy, and no"
            " error here counts them."
        )
    return lines
