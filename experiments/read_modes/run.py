"""Which read mode of a dual checkpoint has the smaller error, and what in the keys decides it.

python experiments/read_modes/run.py            # all streams, about two minutes
python experiments/read_modes/run.py --json
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.read_modes.capture import capture
from experiments.read_modes.streams import Statistics, aligned, draw, erased
from quantlab.drift import Stream, run_drift

MODES = {
    "derived": "fp32/nvfp4@{}:contents=derived:flush_read=copy",
    "raw": "fp32/nvfp4@{}:flush_read=copy",
    "checkpoint": "fp32/nvfp4@{}:key_read=checkpoint:flush_read=copy",
    "raw, exact flush": "fp32/nvfp4@{}",
}
"""What serves S k and what a flush folds; the copy serves S q in all."""

STREAMS = {
    "unit Gaussian": Statistics(),
    "unit Gaussian, alpha .9": Statistics(alpha=0.9),
    "unit Gaussian, alpha .999": Statistics(alpha=0.999),
    "v within 1 % of S k": Statistics(near=True),
    "common mean .12 (SiLU)": Statistics(mean=0.12),
    "common mean .5": Statistics(mean=0.5),
    "rank 32": Statistics(rank=32),
    "rank 8": Statistics(rank=8),
    "rank 8, free queries": Statistics(rank=8, free_queries=True),
    "rank 8, v within 1 % of S k": Statistics(rank=8, near=True),
    "half the queries recent keys": Statistics(recent=0.5),
    "half of q along its own key": Statistics(own=0.5),
    "KDA, unit Gaussian": Statistics(family="kimi_delta"),
    "KDA, rank 8": Statistics(family="kimi_delta", rank=8),
    "KDA, half the queries recent keys": Statistics(family="kimi_delta", recent=0.5),
}


def measure(stream: Stream, window: int) -> dict[str, float]:
    """Output error of each mode (second half), and what the theory makes of the stream's keys and queries."""
    result = run_drift(stream, [mode.format(window) for mode in MODES.values()])
    found = {name: result.metrics(run)["output_error"] for name, run in zip(MODES, result.runs, strict=True)}
    left = erased(stream, window)
    return found | {
        "state, derived": result.metrics(result.runs[0])["state_error"],
        "q in span": aligned(stream, window),
        "raw / checkpoint": found["raw"] / found["checkpoint"],
        "predicted": left**0.5,
    }


def rows(steps: int) -> Iterator[dict[str, float | str]]:
    """One row a stream."""
    for name, statistics in STREAMS.items():
        yield {"stream": name, **measure(draw(statistics, steps), 16)}
    for number, layer in enumerate(capture(steps)):
        for window in (4, 16):
            yield {"stream": f"captured, layer {number}, L = {window}", **measure(layer, window)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Read modes of a dual checkpoint on streams of varied keys.")
    parser.add_argument("--steps", type=int, default=384, help="decoded tokens of each stream")
    parser.add_argument("--json", action="store_true", help="one JSON object a stream")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for number, row in enumerate(rows(arguments.steps)):
        if arguments.json:
            print(json.dumps(row), flush=True)
            continue
        names = [name for name in row if name != "stream"]
        if number == 0:
            print(" " * 34 + "  ".join(f"{name:>10}" for name in names))
        cells = "  ".join(f"{row[name]:{max(10, len(name))}.3g}" for name in names)
        print(f"{row['stream']:34}{cells}", flush=True)


if __name__ == "__main__":
    main()
