"""A rate of two runs on the same questions, once or k times each: the difference, the tests, and what they can see.

Imports no torch.  One answer a question: exact McNemar, Tango's interval.  Several: ``clustered``.
"""

import dataclasses
from typing import Any

import numpy as np

from quantlab.errors import InputError
from quantlab.statistics.clustered import (
    FEWEST_CARRIERS,
    augmented_mean,
    bootstrap_interval,
    carriers,
    clustered_interval,
    clustered_p_value,
)
from quantlab.statistics.equivalence import Equivalence, equivalence_of_flips, equivalence_of_means
from quantlab.statistics.paired import mcnemar_exact, minimum_detectable_effect, paired_accuracy_interval
from quantlab.statistics.power import (
    LARGEST,
    clustered_detectable_effect,
    estimate_variance,
    questions_needed,
    repeats_needed,
)


@dataclasses.dataclass(frozen=True)
class RateComparison:
    """Rates and differences (candidate - base) as fractions.

    lost, gained: questions that the majority of the k answers had right and no longer has, and the reverse (k = 1:
    flips).  fell, rose: questions whose share of right answers went down, up.  bootstrap: BCa over questions, NaN where
    nothing differed.
    """

    n: int
    k: int
    base: float
    candidate: float
    difference: float
    low: float
    high: float
    p_value: float
    method: str
    test: str
    lost: int
    gained: int
    fell: int
    rose: int
    bootstrap: tuple[float, float]


def compare_rates(base: Any, candidate: Any, confidence: float = 0.95) -> RateComparison:
    """``base`` and ``candidate``: (n, k), row i the answers to question i, each from 0 (wrong) to 1 (right)."""
    before, after = _answers(base, candidate)
    n, k = before.shape
    differences = after.mean(1) - before.mean(1)
    fell, rose = int((differences < 0).sum()), int((differences > 0).sum())
    majority = after.mean(1) > 0.5, before.mean(1) > 0.5
    lost, gained = int((majority[1] & ~majority[0]).sum()), int((majority[0] & ~majority[1]).sum())
    if is_one_answer(before, after):
        low, high = paired_accuracy_interval(fell, rose, n, confidence)
        method, test = "Tango score interval", "exact McNemar"
        p_value = mcnemar_exact(fell, rose)
    else:
        interval = clustered_interval(differences, confidence)
        low, high, method, test = interval.low, interval.high, interval.method, "paired t over questions"
        p_value = clustered_p_value(differences)
    return RateComparison(
        n=n,
        k=k,
        base=float(before.mean()),
        candidate=float(after.mean()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=p_value,
        method=method,
        test=test,
        lost=lost,
        gained=gained,
        fell=fell,
        rose=rose,
        bootstrap=bootstrap_interval(differences, confidence),
    )


def equivalence(base: Any, candidate: Any, margin: float, confidence: float = 0.95) -> Equivalence:
    """Two one-sided tests on the same answers, by the method that ``compare_rates`` takes for them."""
    before, after = _answers(base, candidate)
    differences = after.mean(1) - before.mean(1)
    if is_one_answer(before, after):
        lost, gained = int((differences < 0).sum()), int((differences > 0).sum())
        return equivalence_of_flips(lost, gained, len(before), margin, confidence)
    return equivalence_of_means(differences, margin, confidence)


@dataclasses.dataclass(frozen=True)
class Reach:
    """What a study can see.

    detectable: smallest difference seen with probability 0.8; inf if none.  effect: the difference asked about.
    repeats: how many repeats on these questions would see it; None with ``repeats_known``: no number would; None
    without: one answer a question and no control run cannot tell.  questions: how many, at this k, would see it.
    """

    detectable: float
    effect: float
    repeats: int | None
    repeats_known: bool
    questions: int | None


def reach(
    base: Any, candidate: Any, effect: float, controls: Any = None, level: float = 0.05, power: float = 0.8
) -> Reach:
    """controls: (m, n) differences of other runs of the base from the base, for k = 1."""
    before, after = _answers(base, candidate)
    n, k = before.shape
    differences = after.mean(1) - before.mean(1)
    known = n > 1 and (k > 1 or (controls is not None and np.size(controls) > 0))
    few = carriers(differences) < FEWEST_CARRIERS
    if is_one_answer(before, after):
        rate = float((differences != 0).mean())
        detectable = minimum_detectable_effect(n, rate, level, power)
        # A flip rate below the effect is impossible once the effect is there.
        questions = questions_needed(effect, max(rate, effect) - effect * effect, level, power)
    else:
        spread = n * augmented_mean(differences)[1] ** 2
        detectable = clustered_detectable_effect(spread, n, level, power)
        questions = questions_needed(effect, spread, level, power) if spread else None
        if few:
            # As in the interval: the variance is not known, and a loss of whole questions may have gone unseen.
            detectable = max(detectable, minimum_detectable_effect(n, 0.0, level, power))
            unseen = _questions_without_flips(effect, level, power)
            questions = None if unseen is None else max(unseen, questions or 0)
    repeats = None
    if known and not few:
        repeats = repeats_needed(effect, estimate_variance(before, after, controls).shown, n, level, power)
        if repeats is not None and detectable > effect:
            # The exact test of single answers asks for more than the t test that repeats would allow.
            repeats = max(repeats, k + 1)
    return Reach(detectable, effect, repeats, known, questions)


def is_one_answer(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the exact tests of flips apply: one answer a question, right or wrong."""
    return before.shape[1] == 1 and bool(np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all())


def _questions_without_flips(effect: float, level: float, power: float) -> int | None:
    low, high = 1, 2
    while minimum_detectable_effect(high, 0.0, level, power) > effect:
        low, high = high, 2 * high
        if high > LARGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        seen = minimum_detectable_effect(middle, 0.0, level, power) <= effect
        low, high = (low, middle) if seen else (middle, high)
    return high


def _answers(base: Any, candidate: Any) -> tuple[np.ndarray, np.ndarray]:
    before, after = (np.asarray(answers, float) for answers in (base, candidate))
    if before.ndim != 2 or before.shape != after.shape or min(before.shape) < 1:
        raise InputError(
            "answers", [before.shape, after.shape], "two arrays (questions, repeats) of one shape"
        )
    both = np.concatenate([before, after])
    if not ((both >= 0) & (both <= 1)).all():
        raise InputError("answers", float(both[~((both >= 0) & (both <= 1))][0]), "numbers from 0 to 1")
    return before, after
