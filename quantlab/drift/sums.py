"""What a run keeps of its errors when it does not keep every step: sums in bins of steps, and where it was lost.

Rows are added in the order of the steps, one after the other, so that neither the length of the blocks nor whether a
run is held in memory changes a bit of any sum.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantlab.drift.growth import Growth, fit_growth, growth_edges, log_bins, ratio

CURVE_BINS = 48
DIVERGED_ERROR = 10.0  # more error than ten times the signal: nothing of the state is left
LOST_SPAN = 16


@dataclass(frozen=True)
class StepErrors:
    """Errors of consecutive steps, each (steps, units), units = sequences x heads, NaN where not measured.

    output, state, read: squared norm of the difference to the shadow; gain: inner product of the output's error with
    the exact output.
    """

    output: NDArray
    state: NDArray
    read: NDArray
    gain: NDArray


class BinnedSums:
    """Sums of an error and its reference over bins of steps: bin i holds the steps bounds[i] .. bounds[i + 1] - 1.

    Entries where either is not finite are left out of both; ``count`` says how many were taken.
    """

    def __init__(self, bounds: NDArray[np.int64], units: int):
        bins = max(0, len(bounds) - 1)
        self.bounds = bounds
        self.error, self.reference = np.zeros((bins, units)), np.zeros((bins, units))
        self.count = np.zeros(bins, dtype=np.int64)

    def add(self, first: int, error: NDArray, reference: NDArray) -> None:
        """The steps ``first``, ``first`` + 1, ..., each a row (units,)."""
        last = first + len(error)
        start = max(0, int(np.searchsorted(self.bounds, first, side="right")) - 1)
        stop = min(len(self.count), int(np.searchsorted(self.bounds, last, side="left")))
        if start >= stop:
            return
        valid = np.isfinite(error) & np.isfinite(reference)
        error, reference = np.where(valid, error, 0.0), np.where(valid, reference, 0.0)
        for i in range(start, stop):
            rows = slice(max(int(self.bounds[i]), first) - first, min(int(self.bounds[i + 1]), last) - first)
            self.error[i] = _continued(self.error[i], error[rows])
            self.reference[i] = _continued(self.reference[i], reference[rows])
            self.count[i] += int(valid[rows].sum())

    def pooled(self, i: int = 0) -> float:
        """sqrt(sum error / sum reference) of one bin, over its units; NaN if it holds nothing (see ``ratio``)."""
        if self.count[i] == 0:
            return float("nan")
        return ratio(float(self.error[i].sum()), float(self.reference[i].sum()))

    def curve(self) -> tuple[NDArray, NDArray]:
        """(geometric centre, pooled error) of every bin; NaN where there is no finite relative error."""
        edges = [(int(low), int(high) - 1) for low, high in itertools.pairwise(self.bounds)]
        values = np.asarray([self.pooled(i) for i in range(len(edges))])
        return np.asarray([np.sqrt(low * high) for low, high in edges]), np.where(
            np.isfinite(values), values, np.nan
        )


def _continued(total: NDArray, rows: NDArray) -> NDArray:
    """((total + rows[0]) + rows[1]) + ..., whatever number of rows comes at once."""
    return np.cumsum(np.concatenate([total[None], rows]), axis=0)[-1]


class LostAt:
    """The first step of the first span of 16 in which the error, pooled over heads, is above ten times the signal."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._first = 1
        self._error, self._exact = np.zeros(0), np.zeros(0)

    def add(self, error: NDArray, reference: NDArray) -> None:
        if self.step is not None:
            return
        self._error = np.concatenate([self._error, error.sum(1)])
        self._exact = np.concatenate([self._exact, reference.sum(1)])
        whole = len(self._error) // LOST_SPAN * LOST_SPAN
        blocks = self._error[:whole].reshape(-1, LOST_SPAN).sum(1)
        exact = self._exact[:whole].reshape(-1, LOST_SPAN).sum(1)
        lost = np.flatnonzero(blocks > DIVERGED_ERROR**2 * exact)
        if len(lost):
            self.step = self._first + int(lost[0]) * LOST_SPAN
        self._first += whole
        self._error, self._exact = self._error[whole:], self._exact[whole:]


class RunSums:
    """All sums of one policy's run of ``steps`` steps: its metrics, its curve and its growth come from here."""

    def __init__(self, steps: int, units: int, window: int):
        self.steps, self.units, self.window = steps, units, window
        half = np.asarray([steps // 2 + 1, steps + 1])
        self.half = {
            name: BinnedSums(half, units)
            for name in ("output", "state", "read", "gain", "predicted_output", "predicted_state", "signal")
        }
        edges = log_bins(1, steps, CURVE_BINS)
        bounds = np.asarray([*edges[:-1], steps + 1]) if len(edges) > 1 else np.asarray([1, steps + 1])
        self.curve = {
            name: BinnedSums(bounds, units) for name in ("output", "state", "read", "predicted_output")
        }
        self.growing = BinnedSums(growth_edges(steps, window), units)
        self.lost = LostAt()

    def add(self, first: int, errors: StepErrors, output: NDArray, state: NDArray) -> None:
        """The steps from ``first`` on; output, state: squared norms of the exact ones, (steps, units)."""
        for sums in (self.half, self.curve):
            sums["output"].add(first, errors.output, output)
            sums["state"].add(first, errors.state, state)
            sums["read"].add(first, errors.read, state)
        self.half["gain"].add(first, errors.gain, output)
        self.half["signal"].add(first, output, output)
        self.growing.add(first, errors.output, output)
        self.lost.add(errors.output, output)

    def add_prediction(
        self, first: int, predicted_output: NDArray, predicted_state: NDArray, output: NDArray, state: NDArray
    ) -> None:
        """The closed form on the same steps."""
        self.half["predicted_output"].add(first, predicted_output, output)
        self.half["predicted_state"].add(first, predicted_state, state)
        self.curve["predicted_output"].add(first, predicted_output, output)

    def growth(self) -> Growth:
        """The growth exponent of the output error; NaN where the run turned NaN."""
        if int(self.curve["output"].count.sum()) < self.steps * self.units:
            return Growth(float("nan"), None, None)
        return fit_growth(self.growing.bounds, self.growing.error, self.growing.reference)
