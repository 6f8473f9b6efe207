"""What the user sees while a sweep runs: bars on a terminal, one line a record elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

from quantlab.sweep.jobs import Event, Job, Progress, Stored

LINE_EVERY = 30.0  # seconds between two "still running" lines of one job


class Reporter:
    """Context manager that is told every event.  Writes to standard error: standard output belongs to
    results."""

    def __init__(self, points: int, *, terminal: bool | None = None):
        self.points = points
        self.stored = 0
        self.terminal = sys.stderr.isatty() if terminal is None else terminal
        self._last: dict[str, float] = {}
        self._bars: Any = None
        self._tasks: dict[int, Any] = {}

    def __enter__(self) -> "Reporter":
        if self.terminal:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=Console(stderr=True))
            self._bars.start()
            self._total = self._bars.add_task("points", total=self.points)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Print one line of its own, above the bars if there are any."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def event(self, job: Job, event: Event | None) -> None:
        """Show one event of an executor; None says that the job has ended."""
        if isinstance(event, Stored):
            self.stored += 1
            tail = f": {event.message}" if event.message else ""
            count = f"[{self.stored}/{self.points}]"
            self.line(f"{count} {job.label} | {event.policy} | {event.status}{tail} ({event.seconds:.1f} s)")
            if self._bars is not None:
                self._bars.update(self._total, completed=self.stored)
        elif isinstance(event, Progress):
            self._progress(job, event)
        elif event is None and id(job) in self._tasks:
            self._bars.remove_task(self._tasks.pop(id(job)))

    def _progress(self, job: Job, event: Progress) -> None:
        if self._bars is not None:
            if id(job) not in self._tasks:
                self._tasks[id(job)] = self._bars.add_task(job.label, total=None)
            task = self._tasks[id(job)]
            if event.text:
                self._bars.update(task, description=f"{job.label}: {event.text}")
            else:
                self._bars.update(
                    task, description=job.label, completed=event.done, total=event.total or None
                )
            return
        last = self._last.setdefault(job.label, time.monotonic())
        if time.monotonic() - last >= LINE_EVERY:
            self._last[job.label] = time.monotonic()
            share = f"{100 * event.done / event.total:.0f} %" if event.total else event.text or "running"
            self.line(f"  {job.label}: {share}")
