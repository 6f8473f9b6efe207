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
    edges = np.unique(np.round(np.geomspace(first, last, count + 1)).astype(np.int64))
    return edges


def pooled(error_squared: NDArray, reference_squared: NDArray) -> float:
    """sqrt(sum |e|^2 / sum |ref|^2) over everything that is not NaN; NaN if nothing is left."""
    valid = np.isfinite(error_squared) & np.isfinite(reference_squared)
    total = reference_squared[valid].sum()
    if not valid.any():
        return float("nan")
    return float(np.sqrt(error_squared[valid].sum() / total)) if total > 0 else float("inf")


def pooled_curve(
    error_squared: NDArray, reference_squared: NDArray, edges: NDArray[np.int64]
) -> tuple[NDArray, NDArray]:
    """Pooled error in each bin of steps (step 1 is row 0): (geometric centre of the bin, error).

    error_squared, reference_squared: (steps, units); bins without a measured value are left out.
    """
    centres, values = [], []
    for low, high in itertools.pairwise(edges):
        start, stop = low - 1, (high if high == edges[-1] else high - 1)
        value = pooled(error_squared[start:stop], reference_squared[start:stop])
        if np.isfinite(value):
            centres.append(np.sqrt(low * max(stop, low)))
            values.append(value)
    return np.asarray(centres), np.asarray(values)


def growth(error_squared: NDArray, reference_squared: NDArray, *, window: int = 1, seed: int = 0) -> Growth:
    """The growth exponent of a run, with a bootstrap interval over units.

    error_squared, reference_squared: (steps, units), units = heads x sequences; every entry finite.  window: of the
    policy; bins hold whole windows, so that the sawtooth between two flushes is not taken for growth.  NaN if the run
    is too short for three bins.
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
    if units < MINIMUM_UNITS or not np.isfinite(exponent):
        return Growth(exponent, None, None)
    draws = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), BOOTSTRAP)
    low, high = np.quantile(slopes(draws.astype(float)), [0.025, 0.975])
    return Growth(exponent, float(low), float(high))
