"""Fit the costs of ``quantlab.kernels.choice`` to records of our kernels.

python experiments/kernels_h200/fit.py                          # of the records beside this file
python experiments/kernels_h200/fit.py results/kernels_h200
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from scipy.optimize import nnls

from quantlab.errors import InputError
from quantlab.kernels.bench_cases import OURS
from quantlab.kernels.choice import COSTS, work
from quantlab.report.speed import SHAPE, load_speed_records
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import parse_policy

HERE = Path(__file__).resolve().parent


def timed(records: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Our records of steps that have a time, each with its work."""
    found = []
    for record in records:
        point = record["point"]
        if point["implementation"] == OURS and "drafts" not in point and record["metrics"].get("us"):
            shape = StateShape(*(point[name] for name in SHAPE))
            amounts = work(parse_policy(point["policy"]), point["family"], shape, point["batch"])
            found.append((record, amounts))
    return found


def fit(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The costs, none negative, whose squared relative errors have the smallest sum."""
    cases = timed(records)
    times = np.array([record["metrics"]["us"] for record, _ in cases])
    amounts = np.array([[of.get(name, 0.0) for name in COSTS] for _, of in cases])
    costs, _ = nnls(amounts / times[:, None], np.ones(len(times)))
    return {name: float(cost) for name, cost in zip(COSTS, costs, strict=True)}


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else HERE
    records = load_speed_records(folder)
    if not timed(records):
        raise InputError("records folder", str(folder), "at least one of our records of steps with a time")
    found = fit(records)
    for name, cost in found.items():
        print(f"{name:<28} {cost:7.3f}  ({COSTS[name]:g} in use)")
    worst = max(
        timed(records),
        key=lambda case: abs(
            sum(found[name] * n for name, n in case[1].items()) / case[0]["metrics"]["us"] - 1
        ),
    )
    point, us = worst[0]["point"], worst[0]["metrics"]["us"]
    expected = sum(found[name] * n for name, n in worst[1].items())
    print(
        f"farthest off: {point['family']} batch {point['batch']} {point['policy']}, {expected:.1f} for {us:.1f} us"
    )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
