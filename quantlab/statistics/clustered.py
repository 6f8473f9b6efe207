"""Two runs that answered each question k times: the question is the unit, never the answer.

The k answers to a question share its difficulty and what the policy does to it, so n * k answers are not n * k
observations.  Everything here works on the n differences of the means over the repeats.  Imports no torch.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from scipy import stats

from quantlab.errors import InputError

FEWEST_CARRIERS = 4
"""Below so many questions that carry the variance, its estimate is not relied upon alone."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean of paired differences and the interval around it; ``method`` says in words how it was made."""

    mean: float
    low: float
    high: float
    method: str


def question_means(answers: Any) -> np.ndarray:
    """Mean over the repeats of each question: (n, k) or (n,) -> (n,), float64.

    Raises InputError for no question, no repeat, more than two dimensions, and values that are not finite.
    """
    values = np.asarray(answers, float)
    if values.ndim not in (1, 2) or values.size == 0:
        raise InputError("answers", list(values.shape), "at least one question and one repeat, (n, k)")
    if not np.isfinite(values).all():
        raise InputError("answers", float(values[~np.isfinite(values)][0]), "finite numbers")
    return values if values.ndim == 1 else values.mean(1)


def carriers(differences: np.ndarray) -> float:
    """How many questions carry the variance: (sum d^2)^2 / sum d^4, from 0 (all zero) to n (all of one size)."""
    squares = np.asarray(differences, float) ** 2
    fourth = float((squares * squares).sum())
    return float(squares.sum()) ** 2 / fourth if fourth > 0 else 0.0


def clustered_interval(differences: Any, confidence: float = 0.95) -> Interval:
    """Interval of the mean of paired differences of n questions, each in [-1, 1].

    Student's t with half a question lost and half a question gained added, both of the size that carries the variance,
    sqrt(sum d^4 / sum d^2).  With k = 1 every flip has size 1 and this is the usual correction of 1/2 to either count
    of flips; with k > 1 it is next to nothing where many questions move a little, and what keeps the coverage where a
    few questions move a lot.  Where fewer than ``FEWEST_CARRIERS`` questions carry the variance (none, where nothing
    differed), the interval reaches at least as far as the score interval of n documents without a flip, z^2 / (n +
    z^2): that much may have happened unseen, whatever the differences that were seen.
    """
    values = _differences(differences)
    n = values.size
    centre, error = augmented_mean(values)
    half = float(stats.t.ppf((1 + confidence) / 2, n)) * error
    mean, low, high = float(values.mean()), centre - half, centre + half
    method = "t over questions"
    if carriers(values) < FEWEST_CARRIERS:
        unseen = _unseen(n, confidence)
        # A mean of nothing but zeros has no error of its own.
        low, high = (min(low, mean - unseen), max(high, mean + unseen)) if error else (-unseen, unseen)
        method = (
            "t over questions, fewer than four of them carry the variance: widened to the score interval of n "
            "documents without a flip"
            if error
            else "score interval of n documents without a flip: no question differed"
        )
    return Interval(mean, max(-1.0, low), min(1.0, high), method)


def clustered_p_value(differences: Any, null: float = 0.0, alternative: str = "two-sided") -> float:
    """p-value of "the mean difference is ``null``"; rejects at 1 - c where ``clustered_interval`` at c leaves it out.

    alternative: "two-sided", "greater" or "less" (of the mean than ``null``).
    """
    values = _differences(differences)
    n = values.size
    centre, error = augmented_mean(values)
    distance = centre - null
    t = distance / error if error else math.copysign(math.inf, distance) if distance else 0.0
    tail = float(stats.t.sf(abs(t), n))
    if carriers(values) < FEWEST_CARRIERS:
        apart = min(1.0, abs(float(values.mean()) - null))
        z = math.sqrt(n * apart / (1 - apart)) if apart < 1 else math.inf
        tail = max(tail, float(stats.norm.sf(z)))
    if alternative == "two-sided":
        return min(1.0, 2 * tail)
    towards = distance > 0 if alternative == "greater" else distance < 0
    return tail if towards else 1 - tail


def bootstrap_interval(
    differences: Any, confidence: float = 0.95, *, resamples: int = 9999, seed: int = 0, method: str = "BCa"
) -> tuple[float, float]:
    """Bootstrap over questions (scipy): method "BCa", "percentile" or "basic".  NaN where all differences are equal.

    Beside the default interval, not instead of it: a sample without the rare large loss cannot resample it.
    """
    values = _differences(differences)
    if values.size < 2 or np.ptp(values) == 0:
        return math.nan, math.nan
    found = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        # In memory at once: as many numbers as 1000 resamples of a benchmark have, whatever its size.
        batch=max(1, min(1000, 2**22 // values.size)),
        method=method,  # pyright: ignore[reportArgumentType]
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Mean of the candidate over mean of the base; NaN ends where the base's mean is not clearly above zero."""

    base: float
    candidate: float
    ratio: float
    low: float
    high: float
    p_value: float


def ratio_of_means(base: Any, candidate: Any, confidence: float = 0.95) -> Ratio:
    """Paired ratio of two positive means, such as generated tokens, over questions; interval of Fieller (1954).

    All ratios r at which the mean of candidate - r * base is not rejected by a t test over questions; p-value: of
    r = 1, the paired t test.
    """
    before, after = question_means(base), question_means(candidate)
    if before.shape != after.shape:
        raise InputError("candidate", after.size, f"{before.size} questions as in the base")
    n, x, y = before.size, float(before.mean()), float(after.mean())
    ratio = y / x if x else math.nan
    if n < 2:
        return Ratio(x, y, ratio, math.nan, math.nan, math.nan)
    covariance = np.cov(before, after) / n
    t2 = float(stats.t.ppf((1 + confidence) / 2, n - 1)) ** 2
    # (y - r x)^2 <= t^2 (v_yy - 2 r v_xy + r^2 v_xx), a quadratic in r.
    a = x * x - t2 * covariance[0, 0]
    b = x * y - t2 * covariance[0, 1]
    c = y * y - t2 * covariance[1, 1]
    root = math.sqrt(max(b * b - a * c, 0.0))
    low, high = ((b - root) / a, (b + root) / a) if a > 0 else (math.nan, math.nan)
    error = math.sqrt(max(float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]), 0.0))
    p_value = 2 * float(stats.t.sf(abs(y - x) / error, n - 1)) if error > 1e-12 * (x + y) else float(x == y)
    return Ratio(x, y, ratio, float(low), float(high), p_value)


def _differences(differences: Any) -> np.ndarray:
    values = question_means(differences)
    if np.abs(values).max() > 1 + 1e-12:
        raise InputError("differences", float(np.abs(values).max()), "differences of rates, from -1 to 1")
    return values


def augmented_mean(values: np.ndarray) -> tuple[float, float]:
    """(mean, its standard error) with half a question lost and half a question gained, n degrees of freedom."""
    n, squares = values.size, float((values * values).sum())
    size = float((values**4).sum()) / squares if squares else 0.0
    centre = float(values.sum()) / (n + 1)
    spread = max(squares + size - (n + 1) * centre * centre, 0.0)
    return centre, math.sqrt(spread / n / (n + 1))


def _unseen(n: int, confidence: float) -> float:
    z2 = float(stats.norm.ppf((1 + confidence) / 2)) ** 2
    return z2 / (n + z2)
