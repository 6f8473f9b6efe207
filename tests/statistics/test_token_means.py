"""The mean over tokens, its interval over texts."""

import math

import numpy as np
import pytest
import scipy.stats

from quantlab.errors import InputError
from quantlab.statistics.paired import paired_mean_interval
from quantlab.statistics.token_means import token_mean_interval


def test_with_texts_of_one_length_it_is_the_t_interval_of_their_means():
    sums = np.random.default_rng(0).gamma(2.0, size=9)
    found = token_mean_interval(sums * 5, [5] * 9)
    assert (found.mean, found.low, found.high) == pytest.approx(paired_mean_interval(list(sums)), rel=1e-12)


def test_two_texts_by_hand():
    found = token_mean_interval([3.0, 8.0], [1, 3])
    assert found.mean == 11 / 4
    # By hand: residuals 3 - 11/4 = 1/4 and 8 - 33/4 = -1/4.
    error = math.sqrt(2 * 2 / 16) / 4
    assert found.high - found.mean == pytest.approx(scipy.stats.t.ppf(0.975, 1) * error, rel=1e-12)


def test_coverage_where_tokens_of_a_text_belong_together():
    """Texts of 10 to 200 tokens, each token off by its text's own effect: 95 % of 2000 intervals hold the truth.

    Were tokens counted as independent, intervals would be too short by a factor of sqrt(1 + 104 * 0.5) > 7.  Four
    standard deviations of a share of 2000 are 4 sqrt(.05 * .95 / 2000) = 0.02; the linearisation is off by the order of
    1 / n, 0.005 for 200 texts.
    """
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(2000):
        counts = rng.integers(10, 201, 200)
        effect = rng.normal(size=200)
        sums = counts * (1.0 + effect) + rng.normal(size=200) * np.sqrt(counts)
        found = token_mean_interval(sums, counts)
        held += found.low <= 1.0 <= found.high
    assert abs(held / 2000 - 0.95) < 0.025


def test_one_text_has_no_interval():
    found = token_mean_interval([3.0], [2])
    assert found.mean == 1.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize(("sums", "counts"), [([], []), ([1.0], [0]), ([1.0, 2.0], [1]), ([[1.0]], [[1]])])
def test_what_has_no_mean_is_refused(sums, counts):
    with pytest.raises(InputError):
        token_mean_interval(sums, counts)
