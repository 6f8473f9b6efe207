"""Time every kernel of the README's tables on one GPU, beside its peers, and hold the ratios against their targets.

python experiments/kernels_h200/run.py --output results/kernels_h200 --peer vllm=PATH --peer replayssm=PATH
python experiments/kernels_h200/run.py --output results/kernels_h200 --only mamba2   # a part; the same command resumes
python experiments/kernels_h200/run.py --output results/kernels_h200 --report        # from the records alone
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quantlab.errors import InputError
from quantlab.kernels.bench_cases import OURS, Case, expand, parse_shape
from quantlab.kernels.bench_peers import PEERS, load_peers, offered, parse_peers
from quantlab.schemes import parse_policy

MAIN_BATCH = 256
BATCHES = (MAIN_BATCH, 512, 64, 8, 1, 32)
"""The most important first: a run that is cut off has it."""

MAMBA2 = (
    *("fp32@1", "fp16@1", "fp32@16", "fp16@16"),
    *("fp32/nvfp4@16", "fp16/nvfp4@16", "fp16+sr/nvfp4@16", "fp8+sr/nvfp4@16"),
)
DELTA = (
    *("fp32@1", "fp32@16", "fp32/nvfp4@16", "fp32/nvfp4@16:contents=derived"),
    *("fp16+sr/nvfp4@16", "fp8+sr/nvfp4@16"),
)
DRAFTS, VERIFIED = 4, ("fp32@16", "fp32/nvfp4@16", "fp16+sr/nvfp4@16")
OTHER_SHAPES = ("fp32@1", "fp32@16", "fp32/nvfp4@16", "fp16+sr/nvfp4@16")


@dataclass(frozen=True)
class Part:
    """Cases that one device call can hold: a family, its shapes, policies (buffer=bf16 is added) and batches; with
    drafts verifications of so many tokens in place of steps.
    """

    family: str
    shapes: tuple[str, ...]
    policies: tuple[str, ...]
    batches: tuple[int, ...]
    drafts: tuple[int, ...] = ()

    def cases(self, policies_of: Callable[[int], dict[str, list[str]]]) -> list[Case]:
        """policies_of: those that peers serve for so many drafts, 0 for steps."""
        peers = {} if self.drafts else policies_of(0)
        verifying = policies_of(self.drafts[0]) if self.drafts else {}
        policies = [with_bf16(text) for text in self.policies]
        return [
            case
            for shape in self.shapes
            for case in expand(
                self.family,
                parse_shape(shape),
                policies,
                list(self.batches),
                peers,
                self.drafts,
                verifying,
                chosen=True,
            )
        ]


PARTS = {
    "mamba2": Part("mamba2", ("64,64,128,8",), MAMBA2, BATCHES),
    "gated_delta": Part("gated_delta", ("32,128,128,16",), DELTA, BATCHES),
    "kimi_delta": Part("kimi_delta", ("32,128,128,32",), DELTA, BATCHES),
    "mamba2_shapes": Part(
        "mamba2",
        ("128,64,128,8", "96,80,128,8", "80,64,128,1", "24,128,256,1"),
        OTHER_SHAPES,
        (MAIN_BATCH,),
    ),
    "gated_delta_shapes": Part("gated_delta", ("64,128,128,16", "30,192,96,30"), OTHER_SHAPES, (MAIN_BATCH,)),
    **{
        f"{family}_drafts": Part(family, (shape,), VERIFIED, (MAIN_BATCH,), (DRAFTS,))
        for family, shape in (
            ("mamba2", "64,64,128,8"),
            ("gated_delta", "32,128,128,16"),
            ("kimi_delta", "32,128,128,32"),
        )
    },
}


@dataclass(frozen=True)
class Target:
    """How many times faster than a peer's kernel (or any of its kernels, if policy is None) ours is to be."""

    family: str
    policy: str
    peer: str
    peer_policy: str
    least: float


TARGETS = (
    Target("mamba2", "fp32/nvfp4@16", "vllm", "fp32@1", 4.5),
    Target("mamba2", "fp16+sr/nvfp4@16", "vllm", "fp32@1", 5.5),
    Target("mamba2", "fp8+sr/nvfp4@16", "vllm", "fp32@1", 6.0),
    Target("mamba2", "fp16/nvfp4@16", "replayssm", "fp32@16", 3.4),
    Target("mamba2", "fp32@16", "replayssm", "fp32@16", 1.0),
    Target("mamba2", "fp32@1", "vllm", "fp32@1", 1.0),
    Target("gated_delta", "fp32/nvfp4@16", "vllm", "fp32@1", 4.0),
    Target("gated_delta", "fp32/nvfp4@16:contents=derived", "vllm", "fp32@1", 4.0),
    Target("kimi_delta", "fp32/nvfp4@16", "fla", "fp32@1", 3.0),
)
"""At batch 256, of the first shape of each family."""
SMALL_BATCHES, SMALL_LEAST = (1, 8), 0.95
"""Where any policy is to be this fast against the fastest peer, by the kernels chosen for it (``kernels.choice``)."""
READ_SHARE = 0.70
"""Of the copy bandwidth, that a read kernel is to reach on its own bytes at batch 256."""
SHAPE_SHARE = 0.85
"""Of the first shape's share of the copy bandwidth, that another shape is to reach."""
DRAFT_LEAST = 1.8
"""How many times faster than a peer's verification, which stores an FP32 state for every draft, ours is to be."""


def with_bf16(text: str) -> str:
    """With bfloat16 records, as speed rows always are; @1 has none."""
    policy = parse_policy(text)
    return str(policy) if policy.window == 1 else str(parse_policy(f"{policy}:buffer=bf16"))


def main() -> None:
    options = _options()
    parse_peers(options.peer)
    if options.list:
        for name in options.only:
            part = PARTS[name]
            cases = part.cases(
                lambda drafts, part=part: {peer: offered(peer, part.family, drafts) for peer in PEERS}
            )
            print(f"{name}: {len(cases)} cases")
            for case in cases:
                print(f"  {case.label}")
        return
    rows, left = [], 0
    for output, names in folders(options.output, options.only).items():
        if names and not options.report:
            left += _measure(options, names, output / "records")
        if any((output / "records").glob("*.json")):
            rows += _report(output)
    if options.report and not rows:
        raise InputError("output", str(options.output), "a folder with records of an earlier run")
    for line in held(rows):
        print(line)
    if left:
        print(f"{left} cases are left: the time was up; the same command goes on", file=sys.stderr)
    wrong = [row for row in rows if row["status"] in ("failed", "comparison_failed")]
    for row in wrong:
        where = f"{row['family']} {_shape(row)} batch {row['batch']}, {row['implementation']} {row['policy']}"
        print(f"{row['status']}: {where}: {row['message']}", file=sys.stderr)
    sys.exit(1 if any(row["implementation"] == OURS for row in wrong) else 0)


def folders(output: Path, names: Sequence[str]) -> dict[Path, list[str]]:
    """Where the records of which parts are kept: those of drafts apart, as fp32@1 stands in both groups and has one
    record, of the last run.
    """
    drafted = [name for name in names if PARTS[name].drafts]
    return {output: [name for name in names if name not in drafted], output / "drafts": drafted}


def _measure(options: argparse.Namespace, names: Sequence[str], folder: Path) -> int:
    """Time what has no record yet; returns how many cases were not reached."""
    import torch

    from quantlab.kernels.bench import run_cases
    from quantlab.kernels.bench_timing import GraphTimer, gpu_environment, obstacle
    from quantlab.records import check_output_folder
    from quantlab.report.speed import check_stored
    from quantlab.sweep.environment import capture_environment

    if reason := obstacle():
        sys.exit(f"error: this needs {reason}")
    check_output_folder(folder)
    check_stored(folder)
    peers, notes = load_peers(parse_peers(options.peer))
    for note in notes:
        print(note, file=sys.stderr)
    parts = [PARTS[name] for name in names]
    cases = [
        case
        for part in parts
        for case in part.cases(
            lambda drafts, part=part: {
                name: peer.policies(part.family, drafts) for name, peer in peers.items()
            }
        )
    ]
    timer, begun = GraphTimer(options.measure_seconds), time.monotonic()

    def show(record: dict[str, Any], timed: bool) -> None:
        point, us = record["point"], record["metrics"].get("us")
        text = f"{us:9.2f} us" if us else f"{record['status']}: {record['message']}"
        where = (
            f"{point['family']} {point['heads']},{point['value_dim']},{point['key_dim']},{point['key_heads']}"
        )
        print(
            f"{time.monotonic() - begun:6.1f} s  {where} batch {point['batch']:>4} "
            f"{point['implementation']:>9} {point['policy']:<44} {text}{'' if timed else ' (record)'}",
            file=sys.stderr,
            flush=True,
        )

    records = run_cases(
        cases,
        timer,
        environment=capture_environment(torch.get_num_threads()) | gpu_environment(timer),
        peers=peers,
        folder=folder,
        again=options.again,
        single_kernels=lambda case: case.batch == MAIN_BATCH,
        deadline=begun + options.seconds,
        show=show,
    )
    return len(cases) - len(records)


def _report(output: Path) -> list[dict[str, Any]]:
    from quantlab.report.speed import draw_speed, in_order, load_speed_records, speed_csv, speed_rows

    rows = in_order(list(speed_rows(load_speed_records(output))))
    speed_csv(rows, output / "bench.csv")
    draw_speed(rows, output)
    return rows


def held(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line a target: what was reached, or that there is no pair of records of one run."""
    for target in TARGETS:
        mine = _timed(rows, target.family, OURS, with_bf16(target.policy), MAIN_BATCH)
        wanted = parse_policy(with_bf16(target.peer_policy))
        theirs = [
            row
            for row in _timed(rows, target.family, target.peer, None, MAIN_BATCH)
            if _stores(row["policy"]) == _stores(str(wanted))
        ]
        text = (
            f"{target.family} {target.policy} against {target.peer} {target.peer_policy}, batch {MAIN_BATCH}"
        )
        pairs = [(a, b) for a in mine for b in theirs if a["run"] == b["run"]]
        yield _line(text, pairs[0][1]["us"] / pairs[0][0]["us"] if pairs else None, target.least, "x")
    for name in ("mamba2", "gated_delta", "kimi_delta"):
        for batch in SMALL_BATCHES:
            for row in _timed(rows, name, OURS, None, batch):
                yield _small(f"{name} {row['policy']}, batch {batch}", row)
    for row in rows:
        if row["drafts"] and row["us"] and row["implementation"] == OURS:
            peer = row["peer"] or "a peer"
            text = f"{row['family']} {row['policy']}: {row['drafts']} drafts against {peer}, a state for each"
            yield _line(text, row["against_peer"], DRAFT_LEAST, "x")
        elif row["us"] and row["implementation"] == OURS and row["batch"] == MAIN_BATCH:
            where = f"{row['family']} {_shape(row)} {row['policy']}"
            if "read" in row["launches"]:
                yield _line(
                    f"{where}: read kernel, of the copy", row["launches"]["read"]["of_copy"], READ_SHARE, ""
                )
            if _shape(row) != PARTS[row["family"]].shapes[0]:
                first = _timed(rows, row["family"], OURS, row["policy"], MAIN_BATCH)
                share = row["of_copy"] / first[0]["of_copy"] if first else None
                yield _line(
                    f"{where}: share of the copy over that of the first shape", share, SHAPE_SHARE, ""
                )


def _small(text: str, row: dict[str, Any]) -> str:
    """By the kernels that are chosen for the policy at the batch, if a choice was recorded; and by the policy's own,
    or with peers that are no rivals of the chosen ones, where that differs.
    """
    if row["chosen"] in (None, row["policy"]):
        return _line(
            f"{text}: its own kernels against {_peer_of(row)}", row["against_peer"], SMALL_LEAST, "x"
        )
    text += f": chosen {row['chosen']} against {_peer_of(row, 'chosen_')}"
    if row["against_peer"] is not None:
        text += f" (its own kernels {row['against_peer']:.2f}x of {_peer_of(row)}"
        differs = (row["chosen_peer"], row["chosen_peer_policy"]) != (row["peer"], row["peer_policy"])
        if differs and row["chosen_us"]:
            text += f", the chosen {row['against_peer'] * row['us'] / row['chosen_us']:.2f}x of that"
        text += ")"
    return _line(text, row["chosen_against_peer"], SMALL_LEAST, "x")


def _peer_of(row: dict[str, Any], which: str = "") -> str:
    peer, policy = row[f"{which}peer"], row[f"{which}peer_policy"]
    return f"{peer} {policy}" if peer else "the fastest peer"


def _timed(
    rows: Sequence[dict[str, Any]], family: str, implementation: str, policy: str | None, batch: int
) -> list[dict[str, Any]]:
    """Of the family's first shape."""
    return [
        row
        for row in rows
        if row["us"]
        and not row["drafts"]
        and (row["family"], row["implementation"], row["batch"]) == (family, implementation, batch)
        and _shape(row) == PARTS[family].shapes[0]
        and policy in (None, row["policy"])
    ]


def _shape(row: dict[str, Any]) -> str:
    return f"{row['heads']},{row['value_dim']},{row['key_dim']},{row['key_heads']}"


def _stores(text: str) -> tuple[str, int]:
    policy = parse_policy(text)
    return policy.checkpoint.text, policy.window


def _line(text: str, value: float | None, least: float, unit: str) -> str:
    if value is None:
        return f"{'no pair':>8}          {text}"
    digits = 2 if (round(value, 2) >= least) == (value >= least) else 3  # .85 is not met if it is .847
    return f"{value:7.{digits}f}{unit:<1} {'met' if value >= least else 'NOT MET':>8} (>= {least:g})  {text}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/kernels_h200"),
        help="folder with the folder records (default: %(default)s)",
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="a part; repeat for several (default: all)"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="installed, or its source tree; repeat",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=480,
        help="no group of cases begins after so many (default: %(default)g)",
    )
    parser.add_argument(
        "--measure-seconds",
        type=_seconds,
        default=0.12,
        help="of replays for each time (default: %(default)g)",
    )
    parser.add_argument("--again", action="store_true", help="time what has a record too")
    parser.add_argument("--list", action="store_true", help="list the cases, of every peer; needs no GPU")
    parser.add_argument(
        "--report", action="store_true", help="a line a target, bench.csv and figures, from the records alone"
    )
    options = parser.parse_args()
    options.only = options.only or list(PARTS)
    return options


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted; records that were stored stay, and the same command goes on from them")
