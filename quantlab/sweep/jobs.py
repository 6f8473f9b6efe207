"""What a worker does: run the points of one job and store each record as soon as it exists."""

import contextlib
import hashlib
import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantlab.errors import InputError, unknown_name
from quantlab.records import atomic_path, complete_record, content_hash, encode, save_record
from quantlab.sweep.environment import capture_environment

# Where each kind of block finds its run_points; a script block names its own file.
RUNNERS = {"drift": "quantlab.drift.point:run_points", "eval": "quantlab.evals.point:run_points"}
PROGRESS_EVERY = 0.25  # seconds between two progress events of one job
# What the code of a runner may end with.  Workers ignore the interrupt key, so an interrupt here is the runner's own.
RUNNER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)


class RunPoints(Protocol):
    """What a runner offers: records (environment left out) for points that share everything but the policy.

    ``on_progress(done, total)`` may be called as often as the runner likes, in any unit; ``on_progress("a few
    words")`` names what is being done.
    """

    def __call__(
        self, points: list[dict[str, Any]], *, threads: int, on_progress: Callable[..., None]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]: ...


@dataclass(frozen=True)
class Job:
    """Points that share everything but the policy: one stream, one shadow, one process.

    ``runner`` is "package.module:function" or "relative/path.py:function"; relative paths in it and in the
    points are relative to ``base``, so that no point names a machine's folders.
    """

    runner: str
    base: str
    label: str
    points: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` units of a job, in whatever unit its runner counts (total 0: unknown), or a few
    words.
    """

    done: float = 0.0
    total: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Stored:
    """The record of one point is on disk."""

    point_hash: str
    policy: str
    status: str
    message: str | None
    seconds: float


@dataclass(frozen=True)
class Died:
    """The process of a job ended without a word; ``message`` says how."""

    message: str


Event = Progress | Stored | Died


def resolve_runner(runner: str, base: str) -> Callable[..., Any]:
    """The function that ``runner`` names.  Raises InputError if the file or the function is not there."""
    place, _, name = runner.partition(":")
    if place.endswith(".py"):
        path = Path(base, place)
        specification = importlib.util.spec_from_file_location(f"quantlab_script_{path.stem}", path)
        if specification is None or specification.loader is None or not path.is_file():
            raise InputError("runner", runner, "a Python file beside the spec")
        module = importlib.util.module_from_spec(specification)
        # Dataclasses and pickling look a module up by its name.
        sys.modules[specification.name] = module
        # A script may import the files beside it, as it could when run by itself.
        sys.path.insert(0, str(path.parent.resolve()))
        specification.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise unknown_name("runner", name, [key for key in vars(module) if not key.startswith("_")])
    return getattr(module, name)


def run_and_store(job: Job, tell: Callable[[Event], None], *, folder: str, threads: int) -> None:
    """Run ``job`` and store every record in ``folder`` (absolute), telling each event.

    Whatever a runner raises, ``sys.exit`` included, and whatever cannot be stored as a record becomes a failed
    record of the points that it left without one; where several are left each is tried alone first, so that
    one bad policy does not take the others with it.  InputError is the user's to see and passes through, and a
    folder that takes no more files becomes one.
    """
    with contextlib.chdir(job.base):
        run_points: RunPoints | None = None
        broken = ""
        try:
            run_points = resolve_runner(job.runner, job.base)
        except InputError:
            raise
        except RUNNER_ERRORS as error:
            broken = _one_line(error)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(threads)
        environment = _environment(job, threads)
        remaining = {content_hash(point): point for point in job.points}
        told = 0.0

        def on_progress(done: float | str, total: float = 0.0) -> None:
            nonlocal told
            if isinstance(done, str):
                tell(Progress(text=done))
            elif time.monotonic() - told >= PROGRESS_EVERY:
                told = time.monotonic()
                tell(Progress(done, total))

        def store(point: dict[str, Any], result: Mapping[str, Any], seconds: float) -> None:
            if not isinstance(point, dict) or not isinstance(result, Mapping):
                raise TypeError(
                    f"runner {job.runner} has to give a point and a table of results, not {result}"
                )
            key = content_hash(point)
            if key not in remaining:
                raise ValueError(f"runner {job.runner} gave a record that nobody asked for: {point}")
            series = result.get("series")
            try:
                record = complete_record(
                    point, {**result, "series": None}, environment=environment, seconds=seconds
                )
                encode(record)
            except InputError as error:
                raise ValueError(f"the runner's result is not a record: {error}") from error
            try:
                record["series"] = _store_series(folder, key, series)
                save_record(folder, record)
            except OSError as error:
                expected = f"room for the next record ({error.strerror}); the same command resumes"
                raise InputError("output", folder, expected) from error
            del remaining[key]
            tell(Stored(key, point["policy"], record["status"], record["message"], record["seconds"]))

        def run(points: list[dict[str, Any]]) -> str:
            if run_points is None:
                return broken
            started = time.monotonic()
            try:
                for point, result in run_points(points, threads=threads, on_progress=on_progress):
                    store(point, result, time.monotonic() - started)
                    started = time.monotonic()
            except InputError:
                raise
            except RUNNER_ERRORS as error:
                return _one_line(error)
            return "the runner gave no record for this point"

        message = run(list(remaining.values()))
        for point in list(remaining.values()):
            if len(job.points) > 1:
                message = run([point])
            if content_hash(point) in remaining:
                store(point, {"status": "failed", "message": message}, 0.0)


def store_failure(job: Job, folder: str, threads: int, done: set[str], message: str) -> Iterator[Stored]:
    """Failed records for the points of ``job`` that are not in ``done``, written by the parent of a dead
    worker."""
    for point in job.points:
        key = content_hash(point)
        if key not in done:
            result = {"status": "failed", "message": message}
            save_record(folder, complete_record(point, result, environment=_environment(job, threads)))
            yield Stored(key, point["policy"], "failed", message, 0.0)


def script_hash(job: Job) -> str | None:
    """Hash of the runner's file if the spec named one: results of two versions of a script are told apart by
    it."""
    file = job.runner.partition(":")[0]
    if not file.endswith(".py"):
        return None
    return hashlib.sha256(Path(job.base, file).read_bytes()).hexdigest()[:16]


def _environment(job: Job, threads: int) -> dict[str, Any]:
    environment = capture_environment(threads)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        environment["gpu"] = torch.cuda.get_device_name()
    script = script_hash(job)
    return environment if script is None else environment | {"script": script}


def _one_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}, line {frame.lineno})"


def _store_series(folder: str, key: str, series: Any) -> str | None:
    """Write a table of columns (mapping, pandas or arrow table) as Parquet; returns its file name."""
    if series is None or isinstance(series, str):
        return series
    import pandas
    import pyarrow
    import pyarrow.parquet

    if isinstance(series, pandas.DataFrame):
        series = pyarrow.Table.from_pandas(series, preserve_index=False)
    elif isinstance(series, Mapping):
        series = pyarrow.table(dict(series))
    name = f"{key}.parquet"
    with atomic_path(Path(folder, name)) as temporary:
        pyarrow.parquet.write_table(series, temporary, compression="zstd")
    return name
