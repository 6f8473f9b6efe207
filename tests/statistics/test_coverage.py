"""Does the 95 % interval hold the truth 95 times in 100?  Studies are simulated, nothing of the interval is assumed."""

import numpy as np
import pytest

from quantlab.statistics.clustered import clustered_p_value
from quantlab.statistics.paired import mcnemar_exact, minimum_detectable_effect
from quantlab.statistics.power import beta_within, clustered_detectable_effect
from tests.statistics.studies import (
    PUBLISHED,
    QUESTIONS,
    SKEWED,
    coverage,
    pooled_coverage,
    simulate,
)

# 2,000 studies have a Monte Carlo error of 0.5 points at 95 %.
STUDIES = 2000
CASES = {
    "published, no effect": (PUBLISHED, {}),
    "published, 5 % of the questions broken": (PUBLISHED, {"broken": 0.05}),
    "skewed, no effect": (SKEWED, {}),
    "skewed, 3 % of all right answers lost": (SKEWED, {"scale": 0.97}),
    "skewed, 5 % of the questions broken": (SKEWED, {"broken": 0.05}),
}


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_the_interval_covers_as_often_as_it_says(case, k):
    population, effect = CASES[case]
    base, candidate, true = simulate(population, k, STUDIES, seed=k, **effect)
    assert 0.93 <= coverage(base, candidate, true, k) <= 0.97


@pytest.mark.parametrize(
    "case", ["published, 5 % of the questions broken", "skewed, 5 % of the questions broken"]
)
def test_pooling_the_answers_does_not_cover(case):
    """The control: the same studies, the answers taken for independent."""
    population, effect = CASES[case]
    base, candidate, true = simulate(population, 8, STUDIES, seed=8, **effect)
    assert pooled_coverage(base, candidate, true, 8) < 0.9
    # With one answer a question there is nothing to pool wrongly.
    one = simulate(population, 1, STUDIES, seed=1, **effect)
    assert 0.93 <= pooled_coverage(*one, 1) <= 0.97


@pytest.mark.parametrize("k", [2, 4, 8, 16])
def test_a_loss_of_a_few_whole_questions_among_certain_ones(k):
    """Accuracies near 0 or 1, one question in a hundred broken: two of 198, none in 14 % of the studies.

    Where none is seen, only an interval that allows for the unseen can hold the loss: it may cover more, never less.
    A plain t interval covers 86 %.
    """
    population = (0.995 * 0.3, 0.005 * 0.3)
    base, candidate, true = simulate(population, k, 8000, seed=k, broken=0.01)
    assert coverage(base, candidate, true, k) >= 0.95
    differences = candidate - base
    half = 1.972 * differences.std(1, ddof=1) / QUESTIONS**0.5
    assert (np.abs(differences.mean(1) - true) <= half).mean() < 0.9


def test_the_weakest_case():
    """Two whole questions broken under the noise of twenty others: where none is seen, nothing warns of them."""
    base, candidate, true = simulate(SKEWED, 8, 20000, seed=3, broken=0.01)
    # Monte Carlo error 0.2 points.
    assert 0.915 <= coverage(base, candidate, true, 8) <= 0.97


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("population", [PUBLISHED, (4.0, 2.0)], ids=["published", "Beta(4, 2)"])
def test_the_power_at_the_detectable_effect_is_what_was_asked_for(population, k):
    """Every right answer is lost with probability c: the variance of one question's difference follows from c."""
    a, b = population
    mean, second = a / (a + b), a * (a + 1) / ((a + b) * (a + b + 1))

    def variance(c):
        spread = c * c * (second - mean * mean)
        kept = (1 - c) * mean - (1 - c) ** 2 * second
        return spread + (beta_within(a, b) + kept) / k

    c = 0.0
    for _ in range(50):  # a contraction: the variance hardly depends on c
        c = clustered_detectable_effect(variance(c), QUESTIONS) / mean
    studies = 6000  # Monte Carlo error 0.5 points at 80 %
    base, candidate, true = simulate(population, k, studies, seed=10 + k, scale=1 - c)
    assert true == pytest.approx(-c * mean)
    rejected = np.mean([clustered_p_value(differences) < 0.05 for differences in candidate - base])
    assert 0.78 <= rejected <= 0.82


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_the_power_of_single_answers(rate):
    """Flips drawn as counts: the exact test at the effect that is printed for it."""
    effect = minimum_detectable_effect(QUESTIONS, rate)
    lost, gained = (max(rate, effect) + effect) / 2, (max(rate, effect) - effect) / 2
    drawn = np.random.default_rng(5).multinomial(QUESTIONS, [lost, gained, 1 - lost - gained], 20000)
    p_values = {tuple(pair): mcnemar_exact(*pair) for pair in np.unique(drawn[:, :2], axis=0).tolist()}
    rejected = np.mean([p_values[tuple(pair)] < 0.05 for pair in drawn[:, :2].tolist()])
    # 20,000 draws: Monte Carlo error 0.28 points.
    assert 0.78 <= rejected <= 0.82


def test_the_level_of_the_test():
    base, candidate, _ = simulate(PUBLISHED, 4, 6000, seed=77)
    rejected = np.mean([clustered_p_value(differences) < 0.05 for differences in candidate - base])
    # Four Monte Carlo errors of 0.28 points.
    assert abs(rejected - 0.05) < 0.0113
