"""Two one-sided tests against their definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quantlab.errors import InputError
from quantlab.statistics.equivalence import equivalence_of_flips, equivalence_of_means
from quantlab.statistics.paired import paired_accuracy_interval, tango_score

MARGINS = st.sampled_from([0.01, 0.02, 0.05, 0.1])


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from([50, 198, 1000]), MARGINS)
def test_flips_are_two_score_tests(lost, gained, n, margin):
    found = equivalence_of_flips(lost, gained, n, margin)
    above = stats.norm.sf(tango_score(lost, gained, n, -margin))  # of "it loses the margin or more"
    below = stats.norm.cdf(tango_score(lost, gained, n, margin))
    assert found.p_value == max(above, below)
    assert (found.verdict == "within") == (above < 0.05 and below < 0.05)
    # The interval at 90 % decides the same, but for its own error of 1e-10.
    low, high = paired_accuracy_interval(lost, gained, n, 0.9)
    assert (found.low, found.high) == (low, high)
    if min(abs(low + margin), abs(high - margin)) > 1e-8:
        assert (found.verdict == "within") == (-margin < low and high < margin)
        assert (found.verdict == "beyond") == (high < -margin or low > margin)
        assert found.no_worse == (above < 0.05)


def test_means_agree_with_the_textbook_where_many_questions_move():
    """The added question is one of 3,001: the p-value of two t tests, to the square root of that."""
    differences = np.random.default_rng(0).normal(0.004, 0.1, 3000).clip(-1, 1)
    mean, error = differences.mean(), differences.std(ddof=1) / 3000**0.5
    expected = max(stats.t.sf((mean + 0.01) / error, 2999), stats.t.cdf((mean - 0.01) / error, 2999))
    found = equivalence_of_means(differences, 0.01)
    assert found.p_value == pytest.approx(expected, rel=0.02)
    assert found.verdict == "within"
    assert equivalence_of_means(differences - 0.03, 0.01).verdict == "beyond"
    assert equivalence_of_means(differences[:30], 0.01).verdict == "undecided"


@settings(deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=60).map(lambda v: np.array(v) / 4),
    MARGINS,
    st.sampled_from([0.9, 0.95, 0.99]),
)
def test_the_interval_and_the_tests_say_the_same_of_means(differences, margin, confidence):
    found = equivalence_of_means(differences, margin, confidence)
    if min(abs(found.low + margin), abs(found.high - margin)) > 1e-8:
        assert (found.verdict == "within") == (-margin < found.low and found.high < margin)


def test_no_difference_on_few_questions_is_no_equivalence():
    assert equivalence_of_means(np.zeros(50), 0.02).verdict == "undecided"
    assert equivalence_of_flips(0, 0, 50, 0.02).verdict == "undecided"
    # z = 1.645: z^2 / (n + z^2) < 0.02 from 133 documents on.
    for n, verdict in ((132, "undecided"), (133, "within")):
        assert equivalence_of_means(np.zeros(n), 0.02).verdict == verdict
        assert equivalence_of_flips(0, 0, n, 0.02).verdict == verdict


def test_a_loss_of_the_margin_is_rarely_called_within_it():
    """At the edge the two tests let at most 5 % through."""
    rng = np.random.default_rng(2)
    lost, gained = 0.06, 0.01
    drawn = rng.multinomial(2000, [lost, gained, 1 - lost - gained], 4000)
    within = np.mean([stats.norm.sf(tango_score(a, b, 2000, -0.05)) < 0.05 for a, b in drawn[:, :2].tolist()])
    assert within <= 0.05 + 4 * 0.0035  # Monte Carlo error 0.35 points


@pytest.mark.parametrize(
    ("margin", "confidence"), [(0, 0.95), (1, 0.95), (-0.1, 0.95), (0.1, 0.5), (0.1, 1.0)]
)
def test_what_no_test_has(margin, confidence):
    with pytest.raises(InputError):
        equivalence_of_flips(1, 1, 10, margin, confidence)
    with pytest.raises(InputError):
        equivalence_of_means([0.0, 0.1], margin, confidence)
