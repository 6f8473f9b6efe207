"""Simulated studies: questions with probabilities from a Beta distribution, answered k times by base and candidate."""

import functools

import numpy as np

from quantlab.statistics.clustered import clustered_interval
from quantlab.statistics.paired import paired_accuracy_interval
from quantlab.statistics.power import fit_beta

PUBLISHED = fit_beta(0.5985, 0.8535, 8)
"""pass@1 and pass@8 of Nemotron-Nano-9B-v2 on GPQA-Diamond."""
SKEWED = (0.97 * 1.5, 0.03 * 1.5)
"""Mean 97 %, most questions always right."""
QUESTIONS = 198


def simulate(population, k, studies, seed, *, scale=1.0, broken=0.0):
    """(base, candidate, true difference): shares of right answers, (studies, questions).

    scale: the candidate's probability, relative to the base's, at every question.  broken: share of the questions,
    drawn anew in every study, that the candidate never gets right.
    """
    rng = np.random.default_rng(seed)
    p = rng.beta(*population, (studies, QUESTIONS))
    q = scale * p * (rng.random(p.shape) >= broken)
    mean = population[0] / sum(population)
    true = (scale * (1 - broken) - 1) * mean
    return rng.binomial(k, p) / k, rng.binomial(k, q) / k, true


_tango = functools.lru_cache(None)(paired_accuracy_interval)


def coverage(base, candidate, true, k):
    """Share of the studies whose default 95 % interval holds the true difference."""
    hits = 0
    for differences in candidate - base:
        if k == 1:
            low, high = _tango(int((differences < 0).sum()), int((differences > 0).sum()), differences.size)
        else:
            interval = clustered_interval(differences)
            low, high = interval.low, interval.high
        hits += low <= true <= high
    return hits / len(base)


def pooled_coverage(base, candidate, true, k):
    """The same of an interval that takes the n * k differences of single answers for independent."""
    wrong_then_right = (base * (1 - candidate) + candidate * (1 - base)).mean(1)
    mean = (candidate - base).mean(1)
    half = 1.959964 * np.sqrt((wrong_then_right - mean**2) / (base.shape[1] * k))
    return float((np.abs(mean - true) <= half).mean())
