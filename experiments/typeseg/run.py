"""A trained Mamba-1 with its decode state under a policy: what rounding the state does to the labels it gives.

    python experiments/typeseg/run.py --policy fp32@1 --policy nvfp4@1

``run_points`` is what ``quantlab sweep`` calls; the command line prints the same numbers as a table.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.typeseg import corpus, network
from experiments.typeseg.measures import label_divergence, label_flips, relative_error
from experiments.typeseg.scans import SAMPLE_EVERY, DivergedError, PolicyScan, Reference, run_reference
from quantlab.drift.growth import log_bins
from quantlab.errors import InputError, unknown_name
from quantlab.schemes import parse_policy

POLICIES = (
    "fp32@1",
    "bf16@1",
    "fp16@1",
    "fp8@1",
    "int8@1",
    "int8+ef@1",
    "nvfp4@1",
    "fp32@16",
    "nvfp4@16",
    "fp32/nvfp4@16",
    "fp16/nvfp4@16",
)
LENGTH = 512
CURVE_BINS = 12

Progress = Callable[[float, float], None]


def run_points(
    points: Sequence[dict[str, Any]], *, threads: int = 1, on_progress: Progress | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """One record a point; the points differ in the policy only, so that they share one reference.

    A point: kind "scan", policy, documents (names of ``corpus.DOCUMENTS`` or any "a+b"; default: those eight), length
    (characters of each, default 512), seed (of stochastic rounding, default 0); a sweep adds name and runner.
    ``on_progress(done, total)`` counts layers.  Raises InputError before any work for a point that is not one.
    """
    points = list(points)
    if not points:
        return
    shared = [_params(point) for point in points]
    if any(value != shared[0] for value in shared):
        raise InputError("points", len(points), "points that differ in the policy only")
    policies = [parse_policy(point["policy"]) for point in points]
    names, length, seed = shared[0]
    byte_tokens = network.tokens([corpus.document(name, length) for name in names])
    torch.set_num_threads(threads)
    tell = on_progress or (lambda _done, _total: None)
    layers, total = network.layer_count(), (1 + len(points)) * network.layer_count()
    reference = run_reference(byte_tokens, policies)
    tell(layers, total)
    for index, (point, policy) in enumerate(zip(points, policies, strict=True), 1):
        started = time.perf_counter()
        run = PolicyScan(
            policy, reference, seed, after_layer=partial(_tell_layer, tell, index * layers, total)
        )
        try:
            logits = network.forward(byte_tokens, run.scan)
        except DivergedError as error:
            record = {"status": "diverged", "message": str(error), "curve": None}
            record["metrics"] = {"text_hash": corpus.corpus_hash(names, length), "diverged_at": error.step}
        else:
            record = {"status": "ok", "message": None, "curve": _curve(run)}
            record["metrics"] = {
                "text_hash": corpus.corpus_hash(names, length),
                "diverged_at": None,
                **_label_metrics(reference, logits, names),
                **_scan_metrics(run),
            }
            if record["metrics"]["exercised"]["checkpoint"] == 0:
                record |= {"status": "not_exercised", "message": "no stored checkpoint was read back"}
        yield point, {"kind": "scan", "series": None, **record, "seconds": time.perf_counter() - started}


def _tell_layer(tell: Progress, before: int, total: int, layer: int) -> None:
    tell(before + layer + 1, total)


def run_point(point: dict[str, Any]) -> dict[str, Any]:
    """The record of one point, on one thread."""
    return next(iter(run_points([point])))[1]


def make_points(policies: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
    """Points for ``policies`` that share ``fields`` (see :func:`run_points`)."""
    return [{"kind": "scan", "policy": str(parse_policy(policy)), **fields} for policy in policies]


def _params(point: dict[str, Any]) -> tuple[tuple[str, ...], int, int]:
    if point.get("kind") != "scan":
        raise InputError("kind", point.get("kind"), "scan")
    defaults = {"documents": list(corpus.DOCUMENTS), "length": LENGTH, "seed": 0}
    for key in point:
        if key not in {"kind", "name", "runner", "policy", *defaults}:
            raise unknown_name("point field", key, defaults)
    names, length, seed = (point.get(key, default) for key, default in defaults.items())
    if not isinstance(names, list | tuple) or not names:
        raise InputError("documents", names, "a list of names such as html+json")
    for key, value in (("length", length), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(key, value, "a whole number of at least 0")
    # Growth needs [T/8, T] to hold several bins, and the sampled states must reach into the second half.
    if length < 8 * SAMPLE_EVERY:
        raise InputError("length", length, f"at least {8 * SAMPLE_EVERY} characters")
    return tuple(names), length, seed


def _label_metrics(reference: Reference, logits: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    divergence, flips = label_divergence(reference.logits, logits), label_flips(reference.logits, logits)
    return {
        "kl": float(divergence.mean()),
        "label_flips": float(flips.mean()),
        "logit_error": relative_error(reference.logits, logits),
        "positions": int(divergence.size),
        "documents": {
            name: {"kl": float(divergence[i].mean()), "label_flips": float(flips[i].mean())}
            for i, name in enumerate(names)
        },
    }


def _scan_metrics(run: PolicyScan) -> dict[str, Any]:
    """Errors over the second half of the run, pooled over the scans and for each of them; costs summed over scans."""
    errors = {"output_error": run.output, "state_error": run.state, "read_error": run.read}
    directions = len(network.DIRECTIONS)
    rows = run.rows // directions
    scans = [
        {"layer": layer, "direction": direction}
        | {name: e.pooled(layer, slice(i * rows, (i + 1) * rows)) for name, e in errors.items()}
        for layer in range(len(run.layers))
        for i, direction in enumerate(network.DIRECTIONS)
    ]
    ledgers = [state.ledger for state in run.layers]
    exercised = [state.exercised for state in run.layers]
    copies = [counts for e in exercised if (counts := e["read_copy"]) is not None]
    growth = run.output.growth_fit()
    return {
        **{name: energies.pooled() for name, energies in errors.items()},
        "predicted_output_error": run.predicted_output_error(),
        "growth_exponent": growth.exponent,
        "growth_ci": [growth.low, growth.high],
        "scans": scans,
        "exercised": {
            "checkpoint": min(e["checkpoint"] or 0 for e in exercised),
            "read_copy": min(copies) if copies else None,
        },
        "bits_per_value": ledgers[0].bits_per_value,
        "bytes_per_token": directions * sum(ledger.bytes_per_token for ledger in ledgers),
        "bytes_read_per_token": directions * sum(ledger.bytes_read_per_token for ledger in ledgers),
        "bytes_written_per_token": directions * sum(ledger.bytes_written_per_token for ledger in ledgers),
        "effective_policy": run.layers[0].effective_policy,
    }


def _curve(run: PolicyScan) -> dict[str, list[float]]:
    """Pooled errors in log-spaced bins of the step, each wide enough to hold a sampled state."""
    edges = np.append(1, log_bins(2 * SAMPLE_EVERY, run.output.steps, CURVE_BINS))
    edges = edges[np.append(True, np.diff(edges) >= SAMPLE_EVERY)]
    curves = {"output_error": run.output, "state_error": run.state, "read_error": run.read}
    values = {name: energies.curve(edges) for name, energies in curves.items()}
    step = values["output_error"][0]
    return {"step": step.tolist()} | {name: curve.tolist() for name, (_, curve) in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row a policy; ``--json`` one object a policy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", action="append", help="default: those of study.toml")
    parser.add_argument("--length", type=int, default=LENGTH, help="characters of each document")
    parser.add_argument("--seed", type=int, default=0, help="of stochastic rounding")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        points = make_points(options.policy or POLICIES, length=options.length, seed=options.seed)
        for point, record in run_points(points, threads=options.threads):
            print(json.dumps({**point, **record}) if options.json else _row(point, record), flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _row(point: dict[str, Any], record: dict[str, Any]) -> str:
    m = record["metrics"]
    if record["status"] != "ok":
        return f"{point['policy']:<16} {record['status']}: {record['message']}"
    errors = "  ".join(f"{n} {m[n + '_error']:.2e}" for n in ("logit", "state", "read", "output"))
    predicted = m["predicted_output_error"]
    return (
        f"{point['policy']:<16} KL {m['kl']:.2e}  flips {m['label_flips']:.4f}  {errors}"
        f"  predicted {'-' if predicted is None else format(predicted, '.2e')}  growth {m['growth_exponent']:+.2f}"
        f"  bits {m['bits_per_value']:.1f}  {record['seconds']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
