"""Two policies on the same documents: what is different, how sure, and what could have been seen at all.

Imports no torch.  ``lost``: documents that the baseline got right and the policy got wrong; ``gained``: the
reverse.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from quantlab.errors import InputError


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided exact p-value of "a flip is as likely to lose as to gain" (McNemar 1947, binomial form).

    Given lost + gained = m flips, lost ~ Binomial(m, 1/2) under the hypothesis; 1.0 without flips.
    """
    _check_counts(lost, gained, lost + gained)
    flips = lost + gained
    return min(1.0, 2 * float(stats.binom.cdf(min(lost, gained), flips, 0.5))) if flips else 1.0


def paired_accuracy_interval(lost: int, gained: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of accuracy(policy) - accuracy(baseline) over ``n`` paired documents (Tango 1998, score
    interval).

    All differences that a two-sided score test at level 1 - confidence does not reject.  Unlike the Wald
    interval it has a width when no document flipped, and keeps its level at n of a few dozen.
    """
    _check_counts(lost, gained, n)
    limit = float(stats.norm.ppf((1 + confidence) / 2))
    difference = (gained - lost) / n

    def end(direction: float) -> float:
        def excess(delta: float) -> float:
            return abs(tango_score(lost, gained, n, delta)) - limit

        if abs(difference - direction) < 1e-12 or excess(direction) <= 0:
            return direction
        return float(optimize.brentq(excess, difference, direction, xtol=1e-10))  # pyright: ignore[reportArgumentType]

    return end(-1.0), end(1.0)


def tango_score(lost: int, gained: int, n: int, delta: float) -> float:
    """Score statistic of the hypothesis accuracy(policy) - accuracy(baseline) = ``delta``; N(0, 1) if it is
    true.

    Its variance is that of the multinomial whose P(lost) = q maximises the likelihood under the hypothesis
    (Tango 1998, Statistics in Medicine 17:891).
    """
    # With P(gained) = q + delta, the derivative of lost log q + gained log(q + delta) + rest log(1 - 2q -
    # delta) is zero where a q^2 + b q + c = 0; the larger root is the one in range.
    a = 2.0 * n
    b = -(lost + gained) + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    q = (-b + math.sqrt(max(b * b - 4 * a * c, 0.0))) / (2 * a)
    variance = n * (2 * q + delta - delta * delta)
    distance = gained - lost - n * delta
    if variance <= 1e-12 * n:
        return 0.0 if abs(distance) < 1e-9 * n else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def paired_mean_interval(
    differences: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """(mean, low, high) of paired differences, Student's t; low and high are NaN below two documents."""
    values = np.asarray(differences, float)
    if values.size == 0:
        raise InputError("differences", 0, "at least one paired document")
    mean = float(values.mean())
    if values.size < 2:
        return mean, math.nan, math.nan
    half = float(
        stats.t.ppf((1 + confidence) / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size)
    )
    return mean, mean - half, mean + half


def mcnemar_power(n: int, flip_rate: float, effect: float, level: float = 0.05) -> float:
    """Probability that the exact McNemar test rejects when P(lost) - P(gained) = ``effect``, P(flip) =
    ``flip_rate``.

    Exact: sums over the number of flips, Binomial(n, flip_rate), and over how many of them lose.
    """
    if not 0 <= abs(effect) <= flip_rate <= 1:
        raise InputError("effect", effect, f"at most the flip rate {flip_rate} in size")
    if flip_rate == 0:
        return 0.0
    spread = 8 * math.sqrt(n * flip_rate * (1 - flip_rate)) + 8
    flips = np.arange(
        max(0, math.floor(n * flip_rate - spread)), min(n, math.ceil(n * flip_rate + spread)) + 1
    )
    # Largest number of rarer flips that is still rejected: 2 P(X <= c) <= level; -1 if none is.
    critical = stats.binom.ppf(level / 2, flips, 0.5)
    critical = np.where(2 * stats.binom.cdf(critical, flips, 0.5) > level, critical - 1, critical)
    p_lose = (flip_rate + effect) / (2 * flip_rate)
    reject = stats.binom.cdf(critical, flips, p_lose) + stats.binom.cdf(critical, flips, 1 - p_lose)
    return float((stats.binom.pmf(flips, n, flip_rate) * np.where(critical >= 0, reject, 0.0)).sum())


def minimum_detectable_effect(n: int, flip_rate: float, level: float = 0.05, power: float = 0.8) -> float:
    """Smallest accuracy difference that ``n`` paired documents show with probability ``power``; inf if none
    would.

    ``flip_rate``: share of documents whose correctness changed.  Where an effect exceeds it, the rate is
    taken to be the effect itself, its smallest possible value.
    """
    if n < 1 or not 0 <= flip_rate <= 1:
        raise InputError("n, flip_rate", (n, flip_rate), "n >= 1 and a rate in [0, 1]")

    def lacking(effect: float) -> float:
        return mcnemar_power(n, max(flip_rate, effect), effect, level) - power

    if lacking(1.0) < 0:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if lacking(middle) < 0 else (low, middle)
    return high


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """A policy against the baseline on the documents that both scored; accuracies and differences as
    fractions."""

    n: int
    lost: int
    gained: int
    difference: float
    low: float
    high: float
    p_value: float
    detectable: float
    loglikelihood_change: float
    unpaired: int


def compare_documents(
    baseline: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> PairedComparison:
    """Pair two lists of {"hash", "correct"[, "loglikelihoods"]} by hash (repeats in order) and compare them.

    ``loglikelihood_change`` is the mean of |difference| over all choices of all paired documents, NaN for
    generated answers.  Raises InputError if no document is in both, and for several responses to a document:
    right and wrong are paired here, not shares.
    """
    theirs = _by_hash(baseline)
    ours = _by_hash(other)
    keys = [key for key in theirs if key in ours]
    if not keys:
        raise InputError("documents", len(ours), "at least one document hash in common with the baseline")
    before, after = ([_correct(documents[key]) for key in keys] for documents in (theirs, ours))
    lost = sum(was and not now for was, now in zip(before, after, strict=True))
    gained = sum(now and not was for was, now in zip(before, after, strict=True))
    changes = np.concatenate([_changes(theirs[key], ours[key]) for key in keys])
    n = len(keys)
    low, high = paired_accuracy_interval(lost, gained, n)
    return PairedComparison(
        n=n,
        lost=lost,
        gained=gained,
        difference=(gained - lost) / n,
        low=low,
        high=high,
        p_value=mcnemar_exact(lost, gained),
        detectable=minimum_detectable_effect(n, (lost + gained) / n),
        loglikelihood_change=float(changes.mean()) if changes.size else math.nan,
        unpaired=len(theirs) + len(ours) - 2 * n,
    )


def _correct(document: Mapping[str, Any]) -> bool:
    correct = document["correct"]
    if not isinstance(correct, list):
        return bool(correct)
    if len(correct) != 1:  # a list that is not empty is true, whatever it holds
        raise InputError("documents", document["hash"], f"one response to a document, not {len(correct)}")
    return bool(correct[0])


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> np.ndarray:
    one, other = (np.asarray(document.get("loglikelihoods", ()), float) for document in (before, after))
    if one.shape != other.shape:
        raise InputError(
            "documents", after["hash"], f"{one.size} log-likelihoods as in the baseline, not {other.size}"
        )
    return np.abs(one - other)


def _by_hash(documents: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    seen: dict[str, int] = {}
    found = {}
    for document in documents:
        name = str(document["hash"])
        seen[name] = seen.get(name, 0) + 1
        found[name, seen[name]] = document
    return found


def _check_counts(lost: int, gained: int, n: int) -> None:
    if min(lost, gained) < 0 or lost + gained > n or n < 0:
        raise InputError("lost, gained, n", (lost, gained, n), "counts with lost + gained <= n")
