"""What a study can see: against the normal formula, simulation of the variance, and the definitions inverted."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.statistics.power import (
    Variance,
    beta_within,
    clustered_detectable_effect,
    clustered_power,
    estimate_variance,
    fit_beta,
    questions_needed,
    repeats_needed,
)
from tests.statistics.studies import PUBLISHED, simulate


def test_published_rates_give_the_known_spread():
    a, b = PUBLISHED
    assert a / (a + b) == pytest.approx(0.5985, rel=1e-10)
    # pass@8 by quadrature-free moments: E[(1 - p)^8] = prod (b + i) / (a + b + i).
    missed = math.prod((b + i) / (a + b + i) for i in range(8))
    assert 1 - missed == pytest.approx(0.8535, rel=1e-9)
    assert beta_within(a, b) == pytest.approx(0.111, abs=5e-4)


@given(st.floats(0.05, 0.95), st.floats(0.05, 50), st.integers(2, 32))
@settings(deadline=None)
def test_a_fit_finds_the_distribution_that_made_the_rates(mean, size, k):
    a, b = mean * size, (1 - mean) * size
    pass_k = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    if pass_k - mean > 1e-6 and 1 - (1 - mean) ** k - pass_k > 1e-6:
        # pass@k is known to 1e-16 and its slope is above 1e-6 of the size here.
        assert fit_beta(mean, pass_k, k) == pytest.approx((a, b), rel=1e-5)


@pytest.mark.parametrize(
    "rates", [(0.6, 0.6, 8), (0.6, 0.5, 8), (0.5, 0.9999, 2), (0.6, 0.8, 1), (0.0, 0.5, 4)]
)
def test_rates_that_no_beta_has(rates):
    with pytest.raises(InputError, match="pass@1 < pass@k"):
        fit_beta(*rates)


@pytest.mark.parametrize(("k", "points"), [(1, 9.4), (4, 4.7), (8, 3.3), (16, 2.3), (32, 1.7)])
def test_the_known_table_of_detectable_effects(k, points):
    """Normal approximation on 198 questions: (1.960 + 0.842) sqrt(2 E[p (1 - p)] / (198 k))."""
    variance = 2 * beta_within(*PUBLISHED) / k
    found = 100 * clustered_detectable_effect(variance, 198)
    assert found == pytest.approx(points, abs=0.06)
    # At 197 degrees of freedom the quantiles of t are 0.6 % larger.
    assert found == pytest.approx(100 * 2.801585 * math.sqrt(variance / 198), rel=0.012)


@given(
    st.floats(1e-4, 1), st.integers(3, 2000), st.sampled_from([0.01, 0.05]), st.sampled_from([0.5, 0.8, 0.95])
)
@settings(deadline=None)
def test_detectable_is_where_the_power_is(variance, n, level, power):
    effect = clustered_detectable_effect(variance, n, level, power)
    assert clustered_power(effect, variance, n, level) == pytest.approx(power, abs=1e-6)


@given(st.floats(0.005, 0.2), st.floats(0, 0.02), st.floats(0.01, 0.3), st.sampled_from([50, 198, 1000]))
@settings(deadline=None)
def test_repeats_are_the_fewest_that_see_it(effect, spread, within, n):
    variance = Variance(spread, within)
    repeats = repeats_needed(effect, variance, n)
    if repeats is None:
        assert clustered_detectable_effect(variance.effect + within / 1e7, n) > effect * (1 - 1e-6)
        return
    assert clustered_detectable_effect(variance.at(repeats), n) <= effect * (1 + 1e-6)
    if repeats > 1:
        assert clustered_detectable_effect(variance.at(repeats - 1), n) > effect * (1 - 1e-6)


@given(st.floats(0.01, 0.2), st.floats(0.001, 0.5))
@settings(deadline=None)
def test_questions_are_the_fewest_that_see_it(effect, variance):
    n = questions_needed(effect, variance)
    assert n is not None
    assert clustered_detectable_effect(variance, n) <= effect
    assert n == 2 or clustered_detectable_effect(variance, n - 1) > effect


def test_no_number_of_repeats_undoes_what_differs_between_questions():
    a, b = PUBLISHED
    within = 2 * beta_within(a, b)
    assert repeats_needed(0.02, Variance(0.0, within), 198) == pytest.approx(22, abs=1)
    # 198 * 0.02^2 / 2.8^2 = 0.0101 is all the variance that 2 points leave.
    assert repeats_needed(0.02, Variance(0.0105, within), 198) is None
    assert questions_needed(0.02, 0.0105) > 198
    assert questions_needed(1e-6, 0.2) is None


def test_the_parts_of_the_variance_are_estimated_without_bias():
    """Every question loses a share of its right answers; or 10 % of the questions lose everything."""
    a, b = PUBLISHED
    mean, second = a / (a + b), a * (a + 1) / ((a + b) * (a + b + 1))
    for kind, spread in (
        ({"scale": 0.9}, 0.01 * (second - mean**2)),
        ({"broken": 0.1}, 0.1 * second - (0.1 * mean) ** 2),
    ):
        # E[q (1 - q)] of the candidate.
        after = 0.9 * (mean - second) if "broken" in kind else 0.9 * mean - 0.81 * second
        rng = np.random.default_rng(6)
        found = []
        for seed in range(40):
            shares = simulate(PUBLISHED, 4, 10, seed, **kind)[:2]
            for base, candidate in zip(*shares, strict=True):
                # The order of the answers to a question is exchangeable: any with this share will do.
                answers = [
                    (rng.permuted(np.arange(4) < np.rint(4 * s)[:, None], axis=1)) for s in (base, candidate)
                ]
                found.append(estimate_variance(*answers))
        assert np.mean([v.within for v in found]) == pytest.approx(mean - second + after, rel=0.01)
        excess = np.array([v.effect for v in found])
        # Cut off at zero it is biased upwards where the truth is near zero; 400 studies leave 5e-4.
        assert excess.mean() == pytest.approx(spread, abs=0.0035)
        if "broken" in kind:
            assert excess.mean() == pytest.approx(spread, rel=0.03)


def test_chance_alone_is_not_taken_for_a_difference_between_questions():
    wrong = 0
    rng = np.random.default_rng(7)
    for base, candidate in zip(*simulate(PUBLISHED, 4, 300, 8)[:2], strict=True):
        answers = [rng.permuted(np.arange(4) < np.rint(4 * s)[:, None], axis=1) for s in (base, candidate)]
        wrong += estimate_variance(*answers).shown.effect > 0
    # 5 % by design, Monte Carlo error 1.3 points; the estimate is skewed, so up to 3 points more.
    assert wrong / 300 <= 0.05 + 4 * 0.013 + 0.03


def test_single_answers_need_a_control():
    rng = np.random.default_rng(8)
    p = rng.beta(*PUBLISHED, 20000)
    base, again, candidate = (rng.random((20000, 1)) < p[:, None] for _ in range(3))
    with pytest.raises(InputError, match="two repeats or more, or a control"):
        estimate_variance(base, candidate)
    control = again[:, 0].astype(float) - base[:, 0]
    found = estimate_variance(base, candidate, control)
    # Flips of a run against itself are chance alone: 2 E[p (1 - p)].
    assert found.within == pytest.approx(2 * beta_within(*PUBLISHED), rel=0.05)
    assert found.shown.effect == 0.0


def test_edges_of_the_arguments():
    assert clustered_detectable_effect(0.1, 1) == math.inf
    assert clustered_detectable_effect(0.0, 10) == 0.0
    assert clustered_power(0.1, 0.1, 1) == 0.0
    for wrong in ({"level": 0.0}, {"level": 1.0}, {"power": 1.0}):
        with pytest.raises(InputError):
            clustered_detectable_effect(0.1, 10, **wrong)
    with pytest.raises(InputError):
        repeats_needed(0.0, Variance(0, 0.1), 10)
    with pytest.raises(InputError, match="one shape"):
        estimate_variance(np.zeros((3, 2)), np.zeros((3, 3)))
