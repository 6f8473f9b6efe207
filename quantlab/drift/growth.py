"""How an error grows with the number of decoded tokens: pooling, the growth exponent and its interval."""

import itertools
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
    total = reference_squared[valid].sum()
    if not valid.any():
        return float("nan")
    error = error_squared[valid].sum()
    if total > 0:
        return float(np.sqrt(error / total))
    return float("inf") if error > 0 else float("nan")


def pooled_curve(
    error_squared: NDArray, reference_squared: NDArray, edges: NDArray[np.int64]
) -> tuple[NDArray, NDArray]:
    """Pooled error in each bin of steps (step 1 is row 0): (geometric centre of the bin, error).

    error_squared, reference_squared: (steps, units).  A bin without a measured value, or without a finite relative
    error, holds NaN, so that curves over the same edges stay side by side.
    """
    centres, values = [], []
    for low, high in itertools.pairwise(edges if len(edges) > 1 else [*edges, *edges]):
        start, stop = low - 1, (high if high == edges[-1] else high - 1)
        value = pooled(error_squared[start:stop], reference_squared[start:stop])
        centres.append(np.sqrt(low * max(stop, low)))
        values.append(value if np.isfinite(value) else np.nan)
    return np.asarray(centres), np.asarray(values)


def growth(error_squared: NDArray, reference_squared: NDArray, *, window: int = 1, seed: int = 0) -> Growth:
    """The growth exponent of a run, with a bootstrap interval over units.

    error_squared, reference_squared: (steps, units), units = heads x sequences; every entry finite.  window: of the
    policy; bins hold whole windows, so that the sawtooth between two flushes is not taken for growth.  NaN if the run
    is too short for three bins, and if a bin has no error or no signal, so that it has no logarithm.
    """
    steps, units = error_squared.shape
    windows = steps // window
    if windows < 3:
        return Growth(float("nan"), None, None)
    edges = log_bins(max(1, windows // 8), windows, BINS) * window + 1
    if len(edges) < 4:
        return Growth(float("nan"), None, None)
    # Bin i holds the steps edges[i] .. edges[i + 1] - 1, counted from 1.
    last = int(edges[-1]) - 1
    error = np.add.reduceat(error_squared[:last], edges[:-1] - 1, axis=0)
    reference = np.add.reduceat(reference_squared[:last], edges[:-1] - 1, axis=0)
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
