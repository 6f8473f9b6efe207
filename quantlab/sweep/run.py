"""The sweep: expand, drop what is done, run the rest, store each record as soon as it exists."""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
from collections import Counter
from pathlib import Path

from quantlab.errors import InputError
from quantlab.records import (
    check_output_folder,
    load_record,
    protocol_fingerprint,
    record_path,
    remove_stale,
    write_atomic,
)
from quantlab.sweep.executor import Executor, LocalExecutor
from quantlab.sweep.jobs import Died, Job, Stored, run_and_store, script_hash, store_failure
from quantlab.sweep.progress import Reporter
from quantlab.sweep.spec import Quick, expand, load_study


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a sweep did: points asked for, found done, run now, and how many records have each status."""

    folder: Path
    points: int
    found: int
    ran: int
    statuses: dict[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.points} points: {self.found} done before, {self.ran} run now ({parts}); in {self.folder}"
        )


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` -> (2, 8): part 2 of 8, counted from 1.  Raises InputError."""
    index, slash, count = text.partition("/")
    numbers = slash and f"{index}{count}".isascii() and max(len(index), len(count)) <= 9
    if numbers and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise InputError("shard", text, "i/n with 1 <= i <= n, for example 2/8")


def run_sweep(
    spec: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    quick: bool = False,
    shard: tuple[int, int] | None = None,
    workers: int | None = None,
    threads: int = 1,
    executor: Executor | None = None,
    command: str | None = None,
    terminal: bool | None = None,
) -> Summary:
    """Run the study in the file ``spec``; records go to ``output``/records, title and command to
    ``output``/study.json.

    Points whose record exists with another status than failed are not run again, so the same command resumes.
    ``shard`` (i, n) takes every n-th job; shards may share ``output``.  ``workers`` processes (all cores by
    default) of ``threads`` threads each, unless another ``executor`` is given.  ``command`` is what the
    report prints under "how to re-run".  Raises InputError before anything is written for whatever can be
    known by then; later, records that are stored stay.  KeyboardInterrupt says in one line how to resume and
    passes on.
    """
    spec = Path(spec)
    study = load_study(spec)
    if quick and study.quick == Quick():
        raise InputError("quick", True, "a [quick] table in the spec that says what to leave out")
    jobs = expand(study, spec.parent, quick=quick)
    if shard is not None:
        jobs = jobs[shard[0] - 1 :: shard[1]]
    executor = executor or LocalExecutor(workers, threads)
    _ask_runners(jobs)
    records = check_output_folder(Path(output).resolve() / "records")
    remove_stale(records)
    todo, found, notes = _todo(jobs, records)
    points = sum(len(job.points) for job in jobs)
    waiting = sum(len(job.points) for job in todo)
    about = {"title": study.title, "description": study.description, "command": command, "quick": quick}
    about_text = json.dumps(about | {"spec": spec.read_text(encoding="utf-8")}, indent=1) + "\n"
    write_atomic(records.parent / "study.json", about_text.encode())

    run = functools.partial(run_and_store, folder=str(records), threads=threads)
    done: dict[int, set[str]] = {id(job): set() for job in todo}
    with Reporter(waiting, terminal=terminal) as reporter:
        for note in notes:
            reporter.line(note)
        reporter.line(f"{study.title}: {points} points, {sum(found.values())} done before, {waiting} to run")
        events = iter(executor.map_unordered(run, todo)) if todo else iter(())
        try:
            for job, event in events:
                if isinstance(event, Died):
                    for stored in store_failure(job, str(records), threads, done[id(job)], event.message):
                        found[stored.status] += 1
                        reporter.event(job, stored)
                    continue
                if isinstance(event, Stored):
                    done[id(job)].add(event.point_hash)
                    found[event.status] += 1
                reporter.event(job, event)
        except KeyboardInterrupt:
            reporter.line(
                f"interrupted: {reporter.stored} of {waiting} points are stored; the same command resumes"
            )
            raise
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()
            remove_stale(records)
    return Summary(records, points, points - waiting, reporter.stored, dict(found))


def _ask_runners(jobs: list[Job]) -> None:
    """Let every runner of the package refuse points before anything is written, if it offers
    ``check_points``."""
    for job in jobs:
        module, _, _ = job.runner.partition(":")
        if not module.endswith(".py"):
            check = getattr(importlib.import_module(module), "check_points", None)
            if check is not None:
                with contextlib.chdir(job.base):
                    check(list(job.points))


def _todo(jobs: list[Job], records: Path) -> tuple[list[Job], Counter[str], list[str]]:
    """Jobs without their finished points, statuses of the finished ones, and lines that the user should
    read."""
    todo: list[Job] = []
    found: Counter[str] = Counter()
    failed = outdated = changed = 0
    for job in jobs:
        script = script_hash(job)
        missing = []
        for point in job.points:
            path = record_path(records, point)
            record = load_record(path) if path.exists() else None
            if record is None:
                missing.append(point)
            elif record["status"] == "failed":
                failed += 1
                missing.append(point)
            elif record["protocol"] != protocol_fingerprint(point["kind"]):
                outdated += 1
                missing.append(point)
            else:
                changed += record["environment"].get("script") != script
                found[record["status"]] += 1
        if missing:
            todo.append(dataclasses.replace(job, points=tuple(missing)))
    notes = []
    if failed:
        notes.append(f"{failed} points failed before and are tried again")
    if outdated:
        notes.append(f"{outdated} records were measured under another protocol and are computed anew")
    if changed:
        notes.append(
            f"warning: {changed} records come from another version of the runner script; delete them to redo"
        )
    return todo, found, notes
