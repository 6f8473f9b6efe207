"""The steps of a long run, on disk: errors as Parquet while it goes, statistics of the shadow in a scratch file."""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantlab.drift.predictor import StreamStatistics
from quantlab.drift.sums import StepErrors

GROUP_ROWS = 2**16
"""Rows of a Parquet row group, at least."""


def step_columns(
    first: int, heads: int, errors: StepErrors, output: NDArray, state: NDArray
) -> dict[str, NDArray]:
    """Tidy columns of the steps from ``first`` on: step, sequence, head, the errors relative to the norm of the exact
    value in the same head and step, and those norms.  output, state: squared norms of the exact ones, (steps, units).
    """
    steps, units = output.shape
    unit = np.tile(np.arange(units), steps)

    def relative(error: NDArray, reference: NDArray | float) -> NDArray:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.sqrt(error / reference).reshape(-1).astype(np.float32)

    return {
        "step": np.repeat(np.arange(first, first + steps), units),
        "sequence": unit // heads,
        "head": unit % heads,
        "state_error": relative(errors.state, state),
        "read_error": relative(errors.read, state),
        "output_error": relative(errors.output, output),
        "output_reference": relative(output, 1.0),
        "state_reference": relative(state, 1.0),
    }


class SeriesWriter:
    """Writes ``step_columns`` of one policy as Parquet; ``series_file`` makes one."""

    def __init__(self, path: Path, heads: int):
        self.path, self.heads = path, heads
        self._waiting: list[dict[str, NDArray]] = []
        self._rows = 0
        self._writer = None

    def add(self, first: int, errors: StepErrors, output: NDArray, state: NDArray) -> None:
        """The steps from ``first`` on."""
        columns = step_columns(first, self.heads, errors, output, state)
        self._waiting.append(columns)
        self._rows += len(columns["step"])
        if self._rows >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left and the file's footer."""
        if self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow
        import pyarrow.parquet

        names = self._waiting[0]
        table = pyarrow.table({n: np.concatenate([part[n] for part in self._waiting]) for n in names})
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self.path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._waiting, self._rows = [], 0


@contextlib.contextmanager
def series_file(path: Path, heads: int) -> Iterator[SeriesWriter]:
    """A writer for ``path``, which appears under its name only when the run is complete."""
    from quantlab.records import atomic_path

    with atomic_path(path) as temporary:
        writer = SeriesWriter(temporary, heads)
        try:
            yield writer
        finally:
            writer.close()


class StatisticsFile:
    """The shadow's statistics of a whole run, in a scratch file that no folder names: memory for one block is enough,
    and nothing is left behind by a process that is killed."""

    def __init__(self, steps: int, folder: Path | None = None):
        self.steps, self.folder = steps, folder
        self._fixed: dict[str, Any] = {}
        self._names: list[str] = []
        self._arrays: NDArray | None = None

    def add(self, first: int, block: StreamStatistics) -> None:
        """The statistics of the steps from ``first`` on."""
        values = vars(block)
        if self._arrays is None:
            self._names = [name for name, value in values.items() if np.ndim(value) == 2]
            left = {name: value for name, value in values.items() if name not in self._names}
            self._fixed = left | {"curves": None}  # finished predictions are used block by block
            with tempfile.TemporaryFile(dir=self.folder) as file:
                shape = (len(self._names), self.steps, block.output.shape[1])
                # A write to a mapped page that the disk has no room for would kill the process.
                os.posix_fallocate(file.fileno(), 0, 8 * math.prod(shape))
                self._arrays = np.memmap(file, dtype=np.float64, mode="r+", shape=shape)
        for row, name in enumerate(self._names):
            self._arrays[row, first - 1 : first - 1 + len(values[name])] = values[name]

    def whole(self) -> StreamStatistics:
        """The statistics of the whole run; their pages come from the file as they are read."""
        assert self._arrays is not None
        arrays: dict[str, Any] = {name: np.asarray(self._arrays[row]) for row, name in enumerate(self._names)}
        return StreamStatistics(**self._fixed, **arrays)
