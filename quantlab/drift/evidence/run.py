"""Run cases, several processes at a time."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence

import torch

from quantlab.drift.evidence.case import Case, Outcome, outcomes

# Processor seconds of a default run, roughly: the long ones start first, so that no worker waits for a last one.
LONG = ("B3", "B9", "B12", "B18", "B10", "B1", "B16", "B4", "B2", "B13", "B17")


def run_cases(
    cases: Sequence[Case], *, full: bool = False, workers: int | None = None
) -> Iterator[tuple[Case, list[Outcome]]]:
    """The outcomes of each case, as it finishes.  workers: processes (default: one a core, at most one a case)."""
    count = min(workers or len(os.sched_getaffinity(0)), len(cases))
    if count <= 1:
        for case in cases:
            yield case, _run(case.name, full)
        return
    order = sorted(cases, key=lambda case: LONG.index(case.name) if case.name in LONG else len(LONG))
    # A forked child would inherit torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, context, initializer=_one_thread) as pool:
        running = {pool.submit(_run, case.name, full): case for case in order}
        try:
            for done in concurrent.futures.as_completed(running):
                yield running[done], done.result()
        except BaseException:  # also the caller that stops listening: what has not started need not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run(name: str, full: bool) -> list[Outcome]:
    from quantlab.drift.evidence import get_case  # a function cannot be sent to a process, a name can

    with torch.inference_mode():
        return outcomes(get_case(name), full)
