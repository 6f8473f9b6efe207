"""What a study of n questions, k times each, can see; how many repeats or questions would see more.  No torch.

The difference of one question has the variance effect + within / k.  ``effect``: variance over questions of the true
difference; no number of repeats lessens it.  ``within``: p (1 - p) of base and candidate together, mean over
questions.  Miller 2024 (arXiv 2411.00640) has the same decomposition.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from quantlab.errors import InputError

LARGEST = 10**7
"""No study has more repeats or questions; what needs more is not to be had."""


@dataclasses.dataclass(frozen=True)
class Variance:
    """Parts of the variance of one question's difference; ``effect_error``: standard error of ``effect``."""

    effect: float
    within: float
    effect_error: float = 0.0

    def at(self, k: float) -> float:
        return self.effect + self.within / k

    @property
    def shown(self) -> "Variance":
        """With an effect variance of zero where the data do not show (one-sided 5 %) that it is more.

        The estimate scatters around zero where a policy does the same to every question; taken at face value, half
        of such studies would be told that no number of repeats helps.
        """
        z = float(stats.norm.ppf(0.95))
        return self if self.effect > z * self.effect_error else dataclasses.replace(self, effect=0.0)


def estimate_variance(base: Any, candidate: Any, controls: Any = None) -> Variance:
    """From answers (n, k), k >= 2; or, with k = 1, from ``controls`` (m, n): differences of the base from itself.

    Raises InputError for k = 1 without controls: one answer cannot tell chance from a change.
    """
    before, after = (np.asarray(answers, float) for answers in (base, candidate))
    if before.ndim != 2 or before.shape != after.shape or min(before.shape) < 1 or before.shape[0] < 2:
        raise InputError(
            "answers", [before.shape, after.shape], "two arrays (n, k) of one shape, n at least 2"
        )
    n, k = before.shape
    differences = after.mean(1) - before.mean(1)
    if k > 1:
        within = before.var(1, ddof=1) + after.var(1, ddof=1)
    elif controls is not None and np.size(controls):
        within = (np.asarray(controls, float).reshape(-1, n) ** 2).mean(0)
    else:
        raise InputError("answers", k, "two repeats or more, or a control run of the base")
    excess = (differences - differences.mean()) ** 2 * n / (n - 1) - within / k
    return Variance(
        max(0.0, float(excess.mean())), float(within.mean()), float(excess.std(ddof=1)) / math.sqrt(n)
    )


def clustered_power(effect: float, variance: float, n: int, level: float = 0.05) -> float:
    """Probability that a paired t test over n questions rejects; ``variance``: of one question's difference."""
    _check(level=level)
    if n < 2:
        return 0.0
    if variance <= 0:
        return 1.0 if effect else level
    critical = float(stats.t.ppf(1 - level / 2, n - 1))
    shift = abs(effect) / math.sqrt(variance / n)
    # The other tail is below level / 2 and, where power matters, below 1e-6; scipy's is NaN far out there.
    return float(stats.nct.sf(critical, n - 1, shift)) if shift < 30 else 1.0


def clustered_detectable_effect(variance: float, n: int, level: float = 0.05, power: float = 0.8) -> float:
    """Smallest true mean difference that n questions show with probability ``power``; inf below two questions."""
    _check(level=level, power=power)
    if n < 2:
        return math.inf
    if variance <= 0:
        return 0.0
    error = math.sqrt(variance / n)
    ends = (1e-6 * error, 30 * error) if n > 2 else (1e-6 * error, 1e3 * error)
    found: Any = optimize.brentq(
        lambda d: clustered_power(d, variance, n, level) - power, *ends, xtol=1e-9 * error
    )
    return float(found)


def repeats_needed(
    effect: float, variance: Variance, n: int, level: float = 0.05, power: float = 0.8
) -> int | None:
    """Fewest repeats with which n questions see ``effect``; None: never, needs more questions."""
    _check(effect=abs(effect), level=level, power=power)
    # The detectable effect is proportional to the square root of the variance.
    unit = clustered_detectable_effect(1.0, n, level, power)
    room = (effect / unit) ** 2 - variance.effect
    if room <= 0:
        return None
    repeats = max(1, math.ceil(variance.within / room - 1e-9))
    return repeats if repeats <= LARGEST else None


def questions_needed(effect: float, variance: float, level: float = 0.05, power: float = 0.8) -> int | None:
    """Fewest questions that see ``effect`` where one question's difference has ``variance``; None beyond LARGEST."""
    _check(effect=abs(effect), level=level, power=power)
    low, high = 1, 2
    while clustered_detectable_effect(variance, high, level, power) > abs(effect):
        low, high = high, 2 * high
        if high > 2 * LARGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        seen = clustered_detectable_effect(variance, middle, level, power) <= abs(effect)
        low, high = (low, middle) if seen else (middle, high)
    return high


def fit_beta(pass_1: float, pass_k: float, k: int) -> tuple[float, float]:
    """(a, b) of the Beta distribution of the questions' p that has these pass@1 and pass@k.

    pass@1 = a / (a + b); pass@k = 1 - E[(1 - p)^k] = 1 - B(a, b + k) / B(a, b).  Raises InputError for rates that no
    Beta has: pass@1 < pass@k < 1 - (1 - pass@1)^k, where questions of one difficulty would be.
    """
    most = 1 - (1 - pass_1) ** k if k > 1 and 0 < pass_1 < 1 else math.nan
    if not pass_1 < pass_k < most:
        raise InputError("pass_1, pass_k, k", (pass_1, pass_k, k), "pass@1 < pass@k < 1 - (1 - pass@1)^k")

    def excess(log_size: float) -> float:
        a, b = pass_1 * math.exp(log_size), (1 - pass_1) * math.exp(log_size)
        return -math.expm1(float(special.betaln(a, b + k) - special.betaln(a, b))) - pass_k

    size = math.exp(float(optimize.brentq(excess, -20.0, 20.0, xtol=1e-12)))  # pyright: ignore[reportArgumentType]
    return pass_1 * size, (1 - pass_1) * size


def beta_within(a: float, b: float) -> float:
    """E[p (1 - p)] of Beta(a, b): the variance of one answer given its question, mean over questions."""
    return a * b / ((a + b) * (a + b + 1))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise InputError(name, value, "a number between 0 and 1")
