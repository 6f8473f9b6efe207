"""Executors: one method, ``map_unordered``.  No other file knows where jobs run."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from quantlab.errors import InputError
from quantlab.sweep.jobs import Died, Event, Job

RunJob = Callable[[Job, Callable[[Event], None]], None]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Executor(Protocol):
    """Runs jobs anywhere and yields their events as they come."""

    def map_unordered(self, run: RunJob, jobs: Sequence[Job]) -> Iterator[tuple[Job, Event | None]]:
        """Yield (job, event), and (job, None) once a job has ended.  ``run`` is picklable.

        A worker that dies yields :class:`Died` for its job and the others go on; an exception of ``run`` is
        raised. Closing the iterator ends every worker.
        """
        ...


class LocalExecutor:
    """Processes of this machine, started by spawn, ``threads`` compute threads each.

    Every worker is a pool of its own: when a pool of several breaks, nobody can say which job broke it.
    """

    def __init__(self, workers: int | None = None, threads: int = 1):
        for name, value in (("workers", workers), ("threads", threads)):
            if value is not None and value < 1:
                raise InputError(name, value, "at least 1")
        self.workers = workers or _cores()
        self.threads = threads

    def map_unordered(self, run: RunJob, jobs: Sequence[Job]) -> Iterator[tuple[Job, Event | None]]:
        """See :class:`Executor`."""
        waiting = list(reversed(jobs))
        workers = [_Worker(self.threads) for _ in range(min(self.workers, len(jobs)))]
        try:
            while True:
                for worker in workers:
                    if worker.job is None and waiting:
                        worker.start(run, waiting.pop())
                busy = [worker for worker in workers if worker.job is not None]
                if not busy:
                    break
                multiprocessing.connection.wait([worker.reader for worker in busy], timeout=0.1)
                for worker in busy:
                    yield from worker.collect()
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        for worker in workers:
            worker.close()


class _Worker:
    """One pool of one process and the pipe that its events come through."""

    def __init__(self, threads: int):
        self.threads = threads
        self.job: Job | None = None
        self.process: Any = None
        self.pool: ProcessPoolExecutor | None = None
        self.reader: Any = None
        self.future: Future[None] | None = None

    def start(self, run: RunJob, job: Job) -> None:
        self.job = job
        if self.pool is not None:
            self.future = self.pool.submit(_call, run, job)
            return
        context = multiprocessing.get_context("spawn")
        self.reader, writer = context.Pipe(duplex=False)
        self.pool = ProcessPoolExecutor(1, mp_context=context, initializer=_initialise, initargs=(writer,))
        before = set(multiprocessing.active_children())
        with _worker_variables(self.threads):
            self.future = self.pool.submit(_call, run, job)
        self.process = next(iter(set(multiprocessing.active_children()) - before), None)
        # Only the worker holds the writing end now, so its death ends a half-sent event.
        writer.close()

    def collect(self) -> Iterator[tuple[Job, Event | None]]:
        job, future = self.job, self.future
        assert job is not None
        assert future is not None
        # Asked for before the pipe is emptied: a worker sends its last event before its future is done.
        done = future.done()
        with contextlib.suppress(EOFError, OSError):
            while self.reader.poll():
                yield job, self.reader.recv()
        if not done:
            return
        self.job = None
        try:
            future.result()
        except BrokenProcessPool:
            message = self._epitaph()
            self.kill()
            yield job, Died(message)
        yield job, None

    def _epitaph(self) -> str:
        if self.process is not None:
            self.process.join(timeout=5)
        code = None if self.process is None else self.process.exitcode
        if code is not None and code < 0:
            hint = ", often for want of memory" if -code == signal.SIGKILL else ""
            return f"the worker process was killed by {signal.Signals(-code).name}{hint}"
        return f"the worker process ended abruptly with exit status {code}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.close()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.reader.close()
        self.pool = self.process = None


_writer: Any = None


def _initialise(writer: Any) -> None:
    global _writer
    _writer = writer
    # The parent decides what an interrupt means; workers end when it says so, or when it is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _call(run: RunJob, job: Job) -> None:
    run(job, _writer.send)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


@contextlib.contextmanager
def _worker_variables(threads: int) -> Iterator[None]:
    # Libraries read these once, when they are loaded, so they must be set before the worker starts.  Progress bars
    # of libraries (tqdm) would run over the sweep's own lines.
    wanted = dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"TQDM_DISABLE": "1"}
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
