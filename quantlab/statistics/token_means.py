"""The mean of a number that every token has, where the tokens of one text belong together.  Imports no torch."""

import math
from typing import Any

import numpy as np
from scipy import stats

from quantlab.errors import InputError
from quantlab.statistics.clustered import Interval


def token_mean_interval(sums: Any, counts: Any, confidence: float = 0.95) -> Interval:
    """Mean over all tokens, sum of ``sums`` over sum of ``counts``, and its interval over texts.

    sums, counts: (texts,), of each text the sum of the number and how many tokens it has, at least one.  A ratio
    estimator with the standard error of its linearisation (Cochran, Sampling Techniques, 1977, chapter 6), clustered
    by text: sqrt(n / (n - 1) sum (S_i - m N_i)^2) / sum N_i, and Student's t of n - 1 degrees of freedom.  The ends
    are NaN for a single text.
    """
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    if sums.ndim != 1 or sums.shape != counts.shape or sums.size == 0:
        raise InputError("sums", list(sums.shape), "one number a text, and as many counts")
    if not (counts >= 1).all():
        raise InputError("counts", float(counts.min()), "at least one token in each text")
    n, total = sums.size, float(counts.sum())
    mean = float(sums.sum()) / total
    if n < 2:
        return Interval(mean, math.nan, math.nan, "a single text has no interval")
    rest = sums - mean * counts
    error = math.sqrt(n / (n - 1) * float(rest @ rest)) / total
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    return Interval(mean, mean - half, mean + half, "t over texts, ratio of sums")
