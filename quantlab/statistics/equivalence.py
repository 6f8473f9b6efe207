"""Whether a difference is shown to be small: two one-sided tests against a margin (Schuirmann 1987).

"Not significant" is not "no loss": few questions make any loss insignificant.  Here a small p-value says that the
difference is within the margin.  Imports no torch.
"""

import dataclasses
from typing import Any

from scipy import stats

from quantlab.errors import InputError
from quantlab.statistics.clustered import clustered_interval, clustered_p_value
from quantlab.statistics.paired import paired_accuracy_interval, tango_score

WITHIN, BEYOND, UNDECIDED = "within", "beyond", "undecided"


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests at level alpha; ``low`` and ``high``: the interval at 1 - 2 alpha that decides the same.

    verdict: "within" (the interval lies inside the margin), "beyond" (outside, on one side), "undecided".
    ``no_worse``: whether a loss of the margin or more is rejected, the lower of the two tests alone.
    """

    margin: float
    p_value: float
    low: float
    high: float
    verdict: str
    no_worse: bool


def equivalence_of_flips(
    lost: int, gained: int, n: int, margin: float, confidence: float = 0.95
) -> Equivalence:
    """For one answer a question: Tango's score test at -margin and at +margin; alpha = 1 - confidence."""
    _check(margin, confidence)
    p_value = max(
        float(stats.norm.sf(tango_score(lost, gained, n, -margin))),
        float(stats.norm.cdf(tango_score(lost, gained, n, margin))),
    )
    return _decide(
        margin, p_value, *paired_accuracy_interval(lost, gained, n, 2 * confidence - 1), confidence
    )


def equivalence_of_means(differences: Any, margin: float, confidence: float = 0.95) -> Equivalence:
    """For several answers a question: the one-sided tests of ``clustered_p_value``; alpha = 1 - confidence."""
    _check(margin, confidence)
    p_value = max(
        clustered_p_value(differences, -margin, "greater"), clustered_p_value(differences, margin, "less")
    )
    interval = clustered_interval(differences, 2 * confidence - 1)
    return _decide(margin, p_value, interval.low, interval.high, confidence)


def _decide(margin: float, p_value: float, low: float, high: float, confidence: float) -> Equivalence:
    inside = p_value < 1 - confidence
    outside = high < -margin or low > margin
    verdict = WITHIN if inside else BEYOND if outside else UNDECIDED
    return Equivalence(margin, p_value, low, high, verdict, low > -margin)


def _check(margin: float, confidence: float) -> None:
    if not 0 < margin < 1:
        raise InputError("margin", margin, "a share of the answers between 0 and 1")
    if not 0.5 < confidence < 1:
        raise InputError("confidence", confidence, "a number between 0.5 and 1")
