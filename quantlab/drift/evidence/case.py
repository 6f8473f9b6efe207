"""What a public figure is, what we measure against it, and when the two agree.

A verdict is arithmetic on three quantities, none of them chosen: the digits that the source prints, the spread between
the independent units (heads x sequences) of our own run, and the number of units on either side.  Two honest runs of
the same experiment differ by

    half a unit of the last printed digit  +  FACTOR * spread * sqrt(1 / our units + 1 / units of the source)

and by more once in fifteen thousand comparisons of normal figures.  A bound (at most, at least, exactly) is what its
text says; where the bound is ours, the figure's ``why`` derives it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from quantlab.errors import InputError

FACTOR = 4.0
PUBLIC_HEADS = 4
"""Heads in the protocol that most of the public figures name."""


@dataclass(frozen=True)
class Measured:
    """A number of ours.  spread: standard deviation of the same number taken from one unit; units: how many there are.

    What is exact, or counted, has no spread.  A condition is True or False, expected as "= 1" or "= 0".
    """

    value: float | bool
    spread: float = 0.0
    units: int = 1


@dataclass(frozen=True)
class Figure:
    """One number of a source.

    expected: as the source prints it ("0.0142", "6.87e-3": the digits count), or a bound: "<= 1e-6", ">= 1e4", "= 0".
    units: independent units behind the source's number.  why: how a bound of ours follows, what makes the figure not
    comparable, or, for one that we do not reproduce, who is right.  comparable: False where the source withholds what
    the number depends on.
    """

    name: str
    expected: str
    units: int = PUBLIC_HEADS
    why: str = ""
    comparable: bool = True

    def __post_init__(self) -> None:
        self.judge(Measured(0.0))  # an unreadable text is found where it is written

    def judge(self, measured: Measured) -> str:
        """ "agree", "disagree" or "not comparable"."""
        relation, _, number = self.expected.rpartition(" ")
        value, found = float(number), measured.value
        holds = {
            "<=": found <= value,
            ">=": found >= value,
            "=": found == value,
            "": abs(found - value) <= self.tolerance(measured),
        }
        if relation not in holds:
            raise InputError("expected", self.expected, "a number, or one behind <=, >= or =")
        if not self.comparable:
            return "not comparable"
        return "agree" if holds[relation] else "disagree"

    def tolerance(self, measured: Measured) -> float:
        """By how much two honest runs may differ; 0 for a bound."""
        relation, _, number = self.expected.rpartition(" ")
        if relation:
            return 0.0
        exponent = Decimal(number).as_tuple().exponent
        assert isinstance(exponent, int)
        sampling = measured.spread * math.sqrt(1 / measured.units + 1 / self.units)
        return 0.5 * 10.0**exponent + FACTOR * sampling


@dataclass(frozen=True)
class Case:
    """A public experiment that anybody can repeat.

    name: of the reference file, "B1".  gist: what it says.  run(full) -> measured numbers by figure name; full: more
    sequences and longer runs.
    """

    name: str
    gist: str
    figures: tuple[Figure, ...]
    run: Callable[[bool], Mapping[str, Measured | float]]


@dataclass(frozen=True)
class Outcome:
    """One figure, measured."""

    case: str
    figure: Figure
    measured: Measured

    @property
    def verdict(self) -> str:
        return self.figure.judge(self.measured)

    @property
    def row(self) -> dict[str, object]:
        """For a table or a JSON line."""
        tolerance = self.figure.tolerance(self.measured)
        return {
            "case": self.case,
            "figure": self.figure.name,
            "expected": self.figure.expected,
            "measured": self.measured.value,
            "tolerance": tolerance or None,
            "verdict": self.verdict,
            "why": self.figure.why or None,
        }


def outcomes(case: Case, full: bool = False) -> list[Outcome]:
    """Run a case.  Every figure must have been measured, and nothing else."""
    found = case.run(full)
    names = [figure.name for figure in case.figures]
    assert sorted(found) == sorted(names), (case.name, sorted(set(found) ^ set(names)))
    return [
        Outcome(case.name, figure, value if isinstance(value, Measured) else Measured(float(value)))
        for figure in case.figures
        for value in [found[figure.name]]
    ]


def pooled_over(error: NDArray, reference: NDArray) -> Measured:
    """sqrt(sum |e|^2 / sum |ref|^2) of (steps, units) arrays, and its spread between units by leaving one out."""
    e, r = error.sum(0), reference.sum(0)
    return _left_out(lambda kept: math.sqrt(e[kept].sum() / r[kept].sum()), len(e))


def mean_over(values: NDArray) -> Measured:
    """The mean of one number a unit."""
    return Measured(float(values.mean()), float(values.std(ddof=1)), len(values))


def ratio_over(numerator: NDArray, denominator: NDArray) -> Measured:
    """sum of one over sum of the other, (units,) each."""
    return _left_out(lambda kept: float(numerator[kept].sum() / denominator[kept].sum()), len(numerator))


def _left_out(statistic: Callable[[NDArray], float], units: int) -> Measured:
    everyone = np.ones(units, dtype=bool)
    without = []
    for unit in range(units):
        kept = everyone.copy()
        kept[unit] = False
        without.append(statistic(kept))
    # The jackknife variance of the whole, times the units, is that of one unit.
    spread = math.sqrt((units - 1) * np.var(without) * units)
    return Measured(statistic(everyone), spread, units)
