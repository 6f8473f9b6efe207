"""Paired statistics against scipy, against direct maximisation of the likelihood, and by enumeration."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from quantlab.errors import InputError
from quantlab.statistics.paired import (
    compare_documents,
    mcnemar_exact,
    mcnemar_power,
    minimum_detectable_effect,
    paired_accuracy_interval,
    paired_mean_interval,
    tango_score,
)

COUNTS = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 60))


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(lost, gained):
    flips = lost + gained
    expected = stats.binomtest(lost, flips, 0.5).pvalue if flips else 1.0
    # Both sum the same binomial terms in float64; a few hundred roundings at most.
    assert mcnemar_exact(lost, gained) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.floats(-0.9, 0.9))
def test_score_uses_the_constrained_maximum_of_the_likelihood(counts, delta):
    lost, gained, rest = counts
    n = lost + gained + rest
    low, high = max(0.0, -delta), (1 - delta) / 2

    def loss(q):
        terms = ((lost, q), (gained, q + delta), (rest, 1 - 2 * q - delta))
        return -sum(count * math.log(max(p, 1e-300)) for count, p in terms if count)

    q = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    variance = n * (2 * q + delta - delta * delta)
    if variance > 1e-3:
        # minimize_scalar finds q to about sqrt(eps) = 1e-8 of a flat optimum; the score moves by half of
        # that.
        assert tango_score(lost, gained, n, delta) == pytest.approx(
            (gained - lost - n * delta) / math.sqrt(variance), rel=1e-4, abs=1e-6
        )


@settings(deadline=None, max_examples=60)
@given(COUNTS)
def test_interval_ends_where_the_score_test_starts_to_reject(counts):
    lost, gained, rest = counts
    n = lost + gained + rest
    low, high = paired_accuracy_interval(lost, gained, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    for end in (low, high):
        if abs(end) < 1:
            # brentq: end within 1e-10; the score's slope is at most n / sqrt(variance) ~ 1e4 here.
            assert abs(tango_score(lost, gained, n, end)) == pytest.approx(1.959964, abs=1e-4)
    assert paired_accuracy_interval(gained, lost, n) == pytest.approx((-high, -low), abs=1e-8)


def test_interval_without_flips_has_the_width_of_the_score_test():
    # With no flips the score is -n d / sqrt(n d (1 - d)), so |score| = z at d = z^2 / (n + z^2).
    z2 = 1.959964**2
    low, high = paired_accuracy_interval(0, 0, 198)
    assert high == pytest.approx(z2 / (198 + z2), rel=1e-5)
    assert low == -high


@pytest.mark.parametrize(("p_lost", "p_gained"), [(0.1, 0.1), (0.2, 0.05), (0.02, 0.02), (0.3, 0.3)])
def test_interval_covers_as_often_as_it_says(p_lost, p_gained):
    """Every outcome of 40 documents, weighted by its probability."""
    n, covered = 40, 0.0
    for lost in range(n + 1):
        for gained in range(n + 1 - lost):
            weight = stats.multinomial.pmf(
                [lost, gained, n - lost - gained], n, [p_lost, p_gained, 1 - p_lost - p_gained]
            )
            if weight > 1e-9:
                score = tango_score(lost, gained, n, p_gained - p_lost)
                covered += weight * (abs(score) <= 1.959964)
    # Newcombe (1998) and Tango (1998) report coverage of the score interval between .93 and .99 at this size.
    assert 0.93 <= covered <= 0.995


def test_mean_interval_is_the_t_interval():
    values = np.random.default_rng(0).normal(0.3, 1, 50)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert paired_mean_interval(values) == pytest.approx(
        (values.mean(), expected.low, expected.high), rel=1e-12
    )
    assert math.isnan(paired_mean_interval([1.0])[1])


@pytest.mark.parametrize(("n", "rate", "effect"), [(30, 0.3, 0.2), (50, 0.1, 0.1), (20, 0.5, 0.0)])
def test_power_by_enumeration(n, rate, effect):
    lose, gain = (rate + effect) / 2, (rate - effect) / 2
    expected = sum(
        stats.multinomial.pmf([lost, gained, n - lost - gained], n, [lose, gain, 1 - rate])
        for lost in range(n + 1)
        for gained in range(n + 1 - lost)
        if mcnemar_exact(lost, gained) <= 0.05
    )
    # Terms outside 8 standard deviations are left out: below 1e-14 in total.
    assert mcnemar_power(n, rate, effect) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("n", "rate"), [(198, 0.1), (198, 0.0), (1000, 0.02), (40, 0.3)])
def test_detectable_effect_is_where_the_power_crosses(n, rate):
    effect = minimum_detectable_effect(n, rate)
    assert mcnemar_power(n, max(rate, effect), effect) >= 0.8
    below = effect - 1e-6
    assert mcnemar_power(n, max(rate, below), below) < 0.8


def test_too_few_documents_detect_nothing():
    # Five flips, all in one direction, have p = 2/32 > 0.05.
    assert minimum_detectable_effect(5, 0.0) == math.inf
    assert minimum_detectable_effect(6, 0.0) < 1


def documents(correct, shift=0.0):
    return [
        {"hash": f"h{i}", "correct": c, "loglikelihoods": [-1.0 + shift, -2.0]} for i, c in enumerate(correct)
    ]


def test_comparison_pairs_by_hash():
    base = documents([True, True, False, False])
    other = list(reversed(documents([True, False, True, False], shift=0.5)))
    found = compare_documents(base, [*other, {"hash": "extra", "correct": True, "loglikelihoods": [0, 0]}])
    assert (found.n, found.lost, found.gained, found.difference, found.unpaired) == (4, 1, 1, 0.0, 1)
    assert found.loglikelihood_change == 0.25  # one of two choices moved by 0.5
    with pytest.raises(InputError, match="in common"):
        compare_documents(base, [{"hash": "x", "correct": True, "loglikelihoods": [0]}])


def test_generated_answers_have_no_loglikelihoods():
    base, other = ([{"hash": "a", "correct": c}] for c in (True, False))
    found = compare_documents(base, other)
    assert found.lost == 1
    assert math.isnan(found.loglikelihood_change)
    with pytest.raises(InputError, match="0 log-likelihoods as in the baseline, not 2"):
        compare_documents([{"hash": "h0", "correct": True}], documents([True]))


def test_a_list_of_responses_is_right_when_its_one_response_is():
    base, other = ([{"hash": "a", "correct": [c]}] for c in (True, False))
    assert compare_documents(base, other).lost == 1
    with pytest.raises(InputError, match="one response to a document, not 2"):
        compare_documents(base, [{"hash": "a", "correct": [False, False]}])


def test_repeated_documents_are_paired_in_order():
    base = documents([True]) * 2
    other = documents([True]) + documents([False])
    assert compare_documents(base, other).lost == 1


@pytest.mark.parametrize("counts", [(-1, 0, 5), (3, 3, 5)])
def test_impossible_counts(counts):
    with pytest.raises(InputError):
        paired_accuracy_interval(*counts)
