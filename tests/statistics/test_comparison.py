"""The comparison of two runs: one answer a question, several, none that differ."""

import math

import numpy as np
import pytest

from quantlab.errors import InputError
from quantlab.statistics.comparison import compare_rates, equivalence, reach
from quantlab.statistics.paired import mcnemar_exact, minimum_detectable_effect, paired_accuracy_interval


def test_single_answers_are_flips():
    base = np.array([1] * 120 + [0] * 78)[:, None]
    candidate = base.copy()
    candidate[:9], candidate[120:124] = 0, 1
    found = compare_rates(base, candidate)
    assert (found.n, found.k, found.lost, found.gained, found.fell, found.rose) == (198, 1, 9, 4, 9, 4)
    assert found.difference == pytest.approx(-5 / 198)
    assert (found.low, found.high) == paired_accuracy_interval(9, 4, 198)
    assert found.p_value == mcnemar_exact(9, 4)
    assert (found.method, found.test) == ("Tango score interval", "exact McNemar")
    assert reach(base, candidate, 0.02).detectable == minimum_detectable_effect(198, 13 / 198)


@pytest.mark.parametrize(
    ("lost", "gained", "p_value"),
    [
        # Two-sided binomial probabilities in lowest terms, by Pascal's triangle.
        (0, 5, 2 / 32),
        (0, 6, 2 / 64),
        (1, 7, 2 * (1 + 8) / 256),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (5, 5, 1.0),
        # Agresti, Categorical Data Analysis, ratings of the prime minister: 86 against 150, z^2 = 17.36.
        (86, 150, 3.7e-5),
    ],
)
def test_exact_mcnemar_in_print(lost, gained, p_value):
    assert mcnemar_exact(lost, gained) == pytest.approx(p_value, rel=0.02 if p_value < 1e-3 else 1e-12)


def test_repeats_are_never_pooled():
    """Doubling every answer adds no question: interval and p-value stay."""
    rng = np.random.default_rng(0)
    base, candidate = rng.random((2, 100, 3)) < 0.6
    once, twice = compare_rates(base, candidate), compare_rates(np.tile(base, 2), np.tile(candidate, 2))
    assert twice.k == 6
    assert (once.low, once.high, once.p_value) == (twice.low, twice.high, twice.p_value)


def test_flips_of_several_answers_are_those_of_the_majority():
    base = np.array([[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]])
    candidate = np.array([[1, 0, 0], [1, 0, 1], [1, 1, 0], [0, 0, 0]])
    found = compare_rates(base, candidate)
    assert (found.lost, found.gained, found.fell, found.rose) == (1, 1, 2, 1)


def test_scores_between_right_and_wrong_are_means():
    rng = np.random.default_rng(1)
    base = rng.random((50, 1))
    found = compare_rates(base, (base * 0.9))
    assert found.test == "paired t over questions"
    assert found.low < found.difference < found.high < 0


@pytest.mark.parametrize("k", [1, 4])
def test_nothing_that_differs_can_still_see_something(k):
    same = np.ones((198, k))
    found = compare_rates(same, same)
    assert found.p_value == 1.0
    assert found.high - found.low == pytest.approx(2 * 0.01903, abs=1e-4)
    assert math.isnan(found.bootstrap[0])
    seen = reach(same, same, 0.02, controls=np.zeros((1, 198)) if k == 1 else None)
    assert seen.detectable == minimum_detectable_effect(198, 0.0)
    # Runs that repeat themselves: only more questions show more.
    assert (seen.repeats, seen.repeats_known) == (None, True)
    assert seen.questions > 198
    assert equivalence(same, same, 0.02).verdict == "within"


def test_one_answer_cannot_say_how_many_repeats():
    rng = np.random.default_rng(2)
    p = rng.beta(0.5, 0.34, 198)
    base, again, candidate = (rng.random((198, 1)) < p[:, None] for _ in range(3))
    assert not reach(base, candidate, 0.02).repeats_known
    seen = reach(base, candidate, 0.02, controls=[again[:, 0].astype(float) - base[:, 0]])
    assert seen.repeats_known
    assert 10 < seen.repeats < 40  # 22 in the long run; one control run has 20 % of scatter


def test_repeats_that_the_exact_test_has_not():
    rng = np.random.default_rng(3)
    p = rng.beta(0.5, 0.34, 198)
    base, again, candidate = (rng.random((198, 1)) < p[:, None] for _ in range(3))
    control = [again[:, 0].astype(float) - base[:, 0]]
    seen = reach(base, candidate, 0.1, controls=control)
    # A t test of one answer would just see ten points, the exact test does not: one repeat more than there is.
    assert seen.detectable > 0.1
    assert seen.repeats == 2


@pytest.mark.parametrize(
    ("base", "candidate"),
    [
        (np.zeros((3, 2)), np.zeros((3, 3))),
        (np.zeros((3, 2)), np.zeros((2, 2))),
        (np.zeros(3), np.zeros(3)),
        (np.zeros((0, 2)), np.zeros((0, 2))),
        (np.full((3, 2), 2.0), np.zeros((3, 2))),
        (np.full((3, 2), math.nan), np.zeros((3, 2))),
    ],
)
def test_what_cannot_be_compared(base, candidate):
    for compare in (compare_rates, lambda a, b: equivalence(a, b, 0.02), lambda a, b: reach(a, b, 0.02)):
        with pytest.raises(InputError):
            compare(base, candidate)
