"""Long runs: every step goes to disk, memory holds one block and the sums, and policies are shared among processes."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantlab.drift.head_policies import Followed, check_fits, of_heads, policies_on
from quantlab.drift.measure import RunningShadow, parse_policies
from quantlab.drift.predictor import predict_blocks, state_noise
from quantlab.drift.series import StatisticsFile, series_file
from quantlab.drift.sources import StreamSource, as_source
from quantlab.drift.streams import Stream
from quantlab.drift.summary import PolicySummary
from quantlab.drift.tracker import Schedule, Tracker
from quantlab.errors import InputError
from quantlab.schemes import Policy, PolicyRules

PROGRESS_EVERY = 0.25  # seconds between two messages of a process
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class LongResult:
    """All policies of one stream, without their steps; runs in the order of the policies.

    seconds: processor time of each policy's process, shared evenly among the policies that it ran.
    """

    stream_hash: str
    stream_meta: dict[str, Any]
    family: str
    steps: int
    sequences: int
    heads: int
    runs: tuple[PolicySummary, ...] = field(default=())
    seconds: tuple[float, ...] = field(default=())

    def metrics(self, run: PolicySummary) -> dict[str, Any]:
        """``PolicySummary.metrics`` on this stream."""
        return run.metrics(self.stream_hash)


def run_long(
    stream: "Stream | StreamSource",
    policies: "Sequence[str | Path | Policy | PolicyRules]",
    *,
    series: Mapping[Followed, Path] | None = None,
    seed: int = 0,
    dense: bool = False,
    turn: int | None = None,
    chunk: int | None = None,
    processes: int = 1,
    on_step: OnStep | None = None,
) -> LongResult:
    """``run_drift`` for streams of any length: the same numbers, but no step stays in memory.

    series: for each policy the Parquet file that its steps are written to (columns of ``DriftResult.table`` but the
    policy), which appears when the run is complete.  processes: the policies are shared among so many, each with the
    stream and a shadow of its own (made again, which costs less than handing them over).  on_step: called with the
    number of steps that every process has finished.  seed, dense, turn, chunk: as of ``run_drift``.
    Raises InputError like ``run_drift``, ChildProcessError if a process dies.
    """
    source, parsed = as_source(stream), parse_policies(policies)
    for policy in parsed:
        check_fits(policy, source)
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise InputError("processes", processes, "at least 1")
    schedule = Schedule(turn, chunk)
    shares = [
        _Share(
            source,
            share,
            {p: path for p, path in (series or {}).items() if p in share},
            seed,
            dense,
            schedule,
        )
        for share in share_policies(parsed, processes)
    ]
    found = [_run_share(shares[0], on_step)] if len(shares) == 1 else _run_in_processes(shares, on_step)
    hashes = {share.stream_hash for share in found}
    if len(hashes) != 1:
        raise RuntimeError(f"the processes read different streams: {sorted(hashes)}")
    runs = {run.policy: (run, share.seconds) for share in found for run in share.runs}
    return LongResult(
        stream_hash=hashes.pop(),
        stream_meta=dict(source.meta),
        family=source.family,
        steps=source.steps,
        sequences=source.batch,
        heads=source.heads,
        runs=tuple(runs[policy][0] for policy in parsed),
        seconds=tuple(runs[policy][1] for policy in parsed),
    )


def share_policies(policies: Sequence[Followed], processes: int) -> list[list[Followed]]:
    """The policies in at most ``processes`` parts of about equal cost, each in the order given."""
    parts: list[list[Followed]] = [[] for _ in range(min(processes, len(policies)))]
    load = [0.0] * len(parts)
    for policy in sorted(policies, key=_cost, reverse=True):
        lightest = load.index(min(load))
        parts[lightest].append(policy)
        load[lightest] += _cost(policy)
    return [sorted(part, key=list(policies).index) for part in parts]


def _cost(policy: Followed) -> float:
    """Time of a step beside others of the same stream: a read, and one store a window, dear where it draws words."""
    if isinstance(policy, PolicyRules):  # which heads follow which is not known here
        return max(map(_cost, policy.policies))
    stores = [store for store in (policy.checkpoint, policy.read_copy) if store is not None]
    rounding = sum(6.0 if store.stochastic else 0.5 for store in stores)
    return 1.0 + (1.0 + rounding) / policy.window


@dataclass(frozen=True)
class _Share:
    """What one process runs."""

    source: StreamSource
    policies: list[Followed]
    series: dict[Followed, Path]
    seed: int
    dense: bool
    schedule: Schedule


@dataclass(frozen=True)
class _Found:
    """What it came to."""

    stream_hash: str
    runs: list[PolicySummary]
    seconds: float


def _run_share(share: _Share, on_step: OnStep | None) -> _Found:
    started, source = time.process_time(), share.source
    schedule = share.schedule
    trackers = [Tracker(policy, source, share.seed, share.dense, schedule) for policy in share.policies]
    folder = next((path.parent for path in share.series.values()), None)
    statistics = StatisticsFile(source.steps, folder)
    shadow = RunningShadow(source, policies_on(share.policies, source) if schedule.predicted else [])
    with contextlib.ExitStack() as files:
        writers = {
            policy: files.enter_context(series_file(path, source.heads))
            for policy, path in share.series.items()
        }
        for block in shadow.run(trackers, on_step, schedule.block):
            exact = block.statistics
            statistics.add(block.first, exact)
            for tracker in trackers:
                curves = exact.curves or {}
                if all(group.policy in curves for group in tracker.groups):
                    predicted = of_heads(tracker.groups, source.heads, curves)
                    tracker.add_prediction(block.first, predicted, exact.output, exact.state)
                if tracker.policy in writers:
                    writers[tracker.policy].add(block.first, tracker.errors, exact.output, exact.state)
        whole = statistics.whole()
        # With channels that decay by themselves the prediction ran beside the shadow, block by block.
        for tracker in trackers if schedule.predicted and shadow.balances is None else ():
            found = [
                predict_blocks(group.policy, source.family, whole, state_noise(group.policy, shadow.middle))
                for group in tracker.groups
            ]
            for blocks in zip(*found, strict=True):
                first = blocks[0][0]
                parts = {g.policy: part for g, (_, part) in zip(tracker.groups, blocks, strict=True)}
                predicted = of_heads(tracker.groups, source.heads, parts)
                steps = slice(first - 1, first - 1 + len(predicted.output))
                tracker.add_prediction(first, predicted, whole.output[steps], whole.state[steps])
    seconds = (time.process_time() - started) / len(trackers)
    return _Found(source.hash, [tracker.summary() for tracker in trackers], seconds)


def _run_in_processes(shares: list[_Share], on_step: OnStep | None) -> list[_Found]:
    context = multiprocessing.get_context("spawn")
    workers, readers = [], []
    for share in shares:
        reader, writer = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(share, torch.get_num_threads(), writer), daemon=True)
        worker.start()
        writer.close()  # the worker's end is then the only one, and its death is the end of the pipe
        workers.append(worker)
        readers.append(reader)
    try:
        found = _collect(workers, readers, on_step)
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.join()
    return found


def _collect(workers: list, readers: list, on_step: OnStep | None) -> list[_Found]:
    done = [0] * len(readers)
    found: dict[int, _Found] = {}
    while len(found) < len(readers):
        waiting = [reader for i, reader in enumerate(readers) if i not in found]
        for ready in multiprocessing.connection.wait(waiting):
            i = readers.index(ready)
            try:
                message = readers[i].recv()
            except EOFError:
                workers[i].join()
                raise ChildProcessError(
                    f"a worker process died (exit status {workers[i].exitcode}); out of memory?"
                ) from None
            if isinstance(message, Exception):
                raise message
            if isinstance(message, _Found):
                found[i] = message
                continue
            done[i] = message
            if on_step is not None:
                on_step(min(done))
    return [found[i] for i in range(len(readers))]


def _work(share: _Share, threads: int, writer: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interrupt key is the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are put away
    torch.set_num_threads(threads)
    told = time.monotonic()

    def tell(number: int) -> None:
        nonlocal told
        if time.monotonic() - told >= PROGRESS_EVERY:
            told = time.monotonic()
            writer.send(number)

    try:
        try:
            writer.send(_run_share(share, tell))
        except (InputError, OSError, MemoryError, ArithmeticError, RuntimeError) as error:
            writer.send(error)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone: nobody to tell
