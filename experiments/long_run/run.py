"""Eight policies over a long stream, with the time that it took: one JSON object a policy, then one for the run."""

import argparse
import os
import resource
import time

import torch

from quantlab.drift import block_stream, run_long
from quantlab.terminal import print_json, progress

POLICIES = (
    "fp32@1",
    "bf16@1",
    "fp16+sr@1",
    "int8@16",
    "nvfp4@16",
    "fp8/nvfp4@16",
    "fp16+sr/nvfp4@16",
    "fp32/nvfp4@16",
)
KEPT = ("output_error", "predicted_output_error", "growth_exponent", "growth_ci", "output_bias")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", default="mamba2", help="mamba2 (64 x 128), gated_delta, kimi_delta (128 x 128)"
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--alpha", type=float, default=0.999)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    source = block_stream(
        chosen.family, heads=chosen.heads, sequences=1, steps=chosen.steps, alpha=chosen.alpha
    )
    started = time.monotonic()
    with progress(f"{chosen.steps} steps", chosen.steps) as advance:
        result = run_long(source, POLICIES, processes=chosen.workers, on_step=advance)
    wall = time.monotonic() - started
    rows = []
    for run, seconds in zip(result.runs, result.seconds, strict=True):
        metrics = result.metrics(run)
        rows.append({"policy": str(run.policy), "status": run.status} | {key: metrics[key] for key in KEPT})
        rows[-1]["processor_seconds"] = seconds
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    rows.append(
        vars(chosen)
        | {"stream_hash": result.stream_hash, "wall_seconds": wall, "processor_seconds": sum(result.seconds)}
        | {
            "peak_mib_of_a_process": peak / 1024,
            "torch": torch.__version__,
            "cores": len(os.sched_getaffinity(0)),
        }
    )
    print_json(rows)


if __name__ == "__main__":
    main()
