"""How an error grows with the number of decoded tokens: pooling, the growth exponent and its interval."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 12
BOOTSTRAP = 400
MINIMUM_UNITS = 16


@dataclass(frozen=True)
class Growth:
    """exponent: slope of log error against log step in the last 7/8 of a run (0 flat, 0.5 square root, 1 linear).

    low, high: 95 % interval, or None with fewer than 16 independent units (heads x sequences).
    """

    exponent: float
    low: float | None
    high: float | None


def log_bins(first: int, last: int, count: int) -> NDArray[np.int64]:
    """At most ``count`` + 1 distinct edges, log-spaced from ``first`` to ``last`` (both included, first >= 1)."""
    return np.unique(np.round(np.geomspace(first, last, count + 1)).astype(np.int64))


def pooled(error_squared: NDArray, reference_squared: NDArray) -> float:
    """sqrt(sum |e|^2 / sum |ref|^2) over everything that is not NaN.

    NaN if nothing is left, and where error and reference are both zero: no relative error; infinity if only the
    reference is.
    """
    valid = np.isfinite(error_squared) & np.isfinite(reference_squared)
    if not valid.any():
        return float("nan")
    return ratio(error_squared[valid].sum(), reference_squared[valid].sum())


def ratio(error: float, total: float) -> float:
    """sqrt(error / total) of two sums; NaN where both are zero, infinity where only the reference is."""
    if total > 0:
        return float(np.sqrt(error / total))
    return float("inf") if error > 0 else float("nan")


def growth_edges(steps: int, window: int) -> NDArray[np.int64]:
    """The bins of ``growth``: bin i holds the steps edges[i] .. edges[i + 1] - 1; too few of them in a short run."""
    windows = steps // window
    if windows < 3:
        return np.zeros(0, dtype=np.int64)
    return log_bins(max(1, windows // 8), windows, BINS) * window + 1


def growth(error_squared: NDArray, reference_squared: NDArray, *, window: int = 1, seed: int = 0) -> Growth:
    """The growth exponent of a run, with a bootstrap interval over units.

    error_squared, reference_squared: (steps, units), units = heads x sequences; every entry finite.  window: of the
    policy; bins hold whole windows, so that the sawtooth between two flushes is not taken for growth.  NaN if the run
    is too short for three bins, and if a bin has no error or no signal, so that it has no logarithm.
    """
    edges = growth_edges(len(error_squared), window)
    if len(edges) < 4:
        return Growth(float("nan"), None, None)
    last = int(edges[-1]) - 1
    error = np.add.reduceat(error_squared[:last], edges[:-1] - 1, axis=0)
    reference = np.add.reduceat(reference_squared[:last], edges[:-1] - 1, axis=0)
    return fit_growth(edges, error, reference, seed=seed)


def fit_growth(edges: NDArray[np.int64], error: NDArray, reference: NDArray, *, seed: int = 0) -> Growth:
    """``growth`` from sums of error and reference in the bins of ``growth_edges``, each (bins, units)."""
    if len(edges) < 4:
        return Growth(float("nan"), None, None)
    units = error.shape[1]
    centres = np.log(np.sqrt(edges[:-1] * (edges[1:] - 1)))
    centred = centres - centres.mean()

    def slopes(weights: NDArray) -> NDArray:
        # weights (draws, units) -> slope of each draw; log of the square, hence the half.
        with np.errstate(divide="ignore", invalid="ignore"):
            curves = 0.5 * np.log((weights @ error.T) / (weights @ reference.T))
            return (curves @ centred) / (centred @ centred)

    exponent = float(slopes(np.ones((1, units)))[0])
    if not np.isfinite(exponent):
        return Growth(float("nan"), None, None)
    if units < MINIMUM_UNITS:
        return Growth(exponent, None, None)
    draws = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), BOOTSTRAP)
    drawn = slopes(draws.astype(float))
    if not np.isfinite(drawn).all():  # so few units carry the error that a draw can miss all of them
        return Growth(exponent, None, None)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Growth(exponent, float(low), float(high))
