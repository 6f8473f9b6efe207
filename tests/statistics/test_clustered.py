"""Intervals over questions: against textbook limits, against inversion of their own test, at the edges."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quantlab.errors import InputError
from quantlab.statistics.clustered import (
    bootstrap_interval,
    carriers,
    clustered_interval,
    clustered_p_value,
    question_means,
    ratio_of_means,
)
from quantlab.statistics.paired import paired_accuracy_interval

QUARTERS = st.lists(st.integers(-4, 4), min_size=2, max_size=80).map(lambda values: np.array(values) / 4)


def test_means_are_over_the_repeats():
    assert question_means([[1, 0, 0, 1], [1, 1, 1, 1]]).tolist() == [0.5, 1.0]
    assert question_means([0.25, 1.0]).tolist() == [0.25, 1.0]
    for wrong in (np.zeros((0, 3)), np.zeros((3, 0)), np.zeros((1, 1, 1)), [[math.nan]], [[math.inf]]):
        with pytest.raises(InputError):
            question_means(wrong)


def test_many_questions_give_the_t_interval():
    differences = np.random.default_rng(1).normal(-0.02, 0.2, 5000).clip(-1, 1)
    low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    found = clustered_interval(differences)
    assert found.mean == pytest.approx(differences.mean())
    # For normal d the added question has d^2 = 3 s^2: 3 / (2 * 5000) of the width; the mean moves by 1 / 5001.
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-3 * (high - low))


@given(QUARTERS, st.sampled_from([0.8, 0.95, 0.99]))
@settings(deadline=None)
def test_the_interval_holds_what_the_test_does_not_reject(differences, confidence):
    found = clustered_interval(differences, confidence)
    assert -1 <= found.low <= found.mean <= found.high <= 1
    for end, inside in ((found.low, 1e-7), (found.high, -1e-7)):
        if abs(end) < 1:
            assert clustered_p_value(differences, end + inside) > 1 - confidence - 1e-9
            assert clustered_p_value(differences, end - inside) < 1 - confidence + 1e-9


@given(QUARTERS)
@settings(deadline=None)
def test_swapping_the_runs_mirrors_everything(differences):
    one, other = clustered_interval(differences), clustered_interval(-differences)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-12)
    assert clustered_p_value(differences) == pytest.approx(clustered_p_value(-differences), abs=1e-12)
    less, greater = (clustered_p_value(differences, 0.1, side) for side in ("less", "greater"))
    assert less + greater == pytest.approx(1)


@pytest.mark.parametrize("n", [20, 198, 1000])
def test_nothing_that_differs_is_no_certainty(n):
    found = clustered_interval(np.zeros(n))
    assert (found.low, found.high) == pytest.approx(paired_accuracy_interval(0, 0, n), abs=1e-9)
    assert "no question differed" in found.method
    assert clustered_p_value(np.zeros(n)) == 1.0
    # A first small change makes nobody surer.
    one = np.zeros(n)
    one[0] = 0.125
    moved = clustered_interval(one)
    assert moved.high - moved.low >= found.high - found.low - 1e-12
    assert "widened" in moved.method


def test_carriers_count_the_questions_that_matter():
    values = np.zeros(100)
    assert carriers(values) == 0
    values[:7] = -0.5
    assert carriers(values) == pytest.approx(7)
    values[7:50] = 0.01
    assert 7 < carriers(values) < 7.1


def test_bootstrap_is_of_questions():
    differences = np.random.default_rng(3).choice([-0.5, -0.25, 0, 0, 0, 0.25], 400)
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    for method in ("BCa", "percentile"):
        low, high = bootstrap_interval(differences, method=method)
        # 400 questions: skewness moves the ends by less than a tenth of the width, 9,999 resamples by a fiftieth.
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.1 * (high - low))
    assert bootstrap_interval(differences) == bootstrap_interval(differences)
    assert all(math.isnan(end) for end in bootstrap_interval(np.zeros(10)))


def test_a_ratio_is_fieller():
    """The ends are the ratios at which a paired t test of candidate - r * base stands at its limit."""
    rng = np.random.default_rng(4)
    base = rng.lognormal(9, 0.5, (198, 4))
    candidate = base * rng.normal(1.1, 0.2, base.shape)
    found = ratio_of_means(base, candidate)
    x, y = base.mean(1), candidate.mean(1)
    assert found.ratio == pytest.approx(y.mean() / x.mean())
    for end in (found.low, found.high):
        assert stats.ttest_1samp(y - end * x, 0).pvalue == pytest.approx(0.05, rel=1e-6)
    assert found.p_value == pytest.approx(stats.ttest_rel(y, x).pvalue, rel=1e-9)
    assert found.low < found.ratio < found.high


def test_ratios_at_the_edges():
    same = ratio_of_means([18.0, 20.0, 22.0], [18.0, 20.0, 22.0])
    assert (same.ratio, same.low, same.high, same.p_value) == pytest.approx((1, 1, 1, 1))
    twice = ratio_of_means([18.0, 20.0, 22.0], [36.0, 40.0, 44.0])
    assert (twice.ratio, twice.low, twice.high) == pytest.approx((2, 2, 2))
    assert math.isnan(ratio_of_means([1.0, 20.0, 90.0], [1.0, 20.0, 90.0]).low)  # may as well be near zero
    nothing = ratio_of_means([0.0, 0.0], [1.0, 3.0])
    assert math.isnan(nothing.ratio)
    assert math.isnan(nothing.low)
    assert math.isnan(ratio_of_means([5.0], [6.0]).low)
    with pytest.raises(InputError, match="3 questions as in the base"):
        ratio_of_means([1.0, 2.0, 3.0], [1.0])


def test_differences_of_rates_only():
    with pytest.raises(InputError, match="-1 to 1"):
        clustered_interval([3.0, 1.0])
