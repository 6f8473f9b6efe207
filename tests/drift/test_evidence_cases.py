"""Every public case as a test, and the rule that gives the verdicts."""

import math

import numpy as np
import pytest
import torch

from quantlab.drift.evidence import CASES, Figure, Measured, get_case, outcomes, run_cases
from quantlab.drift.evidence.case import mean_over, pooled_over
from quantlab.drift.evidence.gates import bias_statistic
from quantlab.drift.evidence.slots import GEOMETRIES, rollback, slot_hazards
from quantlab.drift.evidence.streams import gdn, gdn_stream
from quantlab.errors import InputError
from quantlab.schemes.buffer import WindowBuffer

FAST = ("B5", "B7", "B11", "B15")

INT8_CLOSED = ((0.9, 1), (0.99, 1), (0.999, 1), (0.999, 16), (0.999, 32))
DISAGREE = {
    "B1": {"thread alpha 0.9 RN", "thread alpha 0.9 SR", "thread alpha 0.9 EF", "thread alpha 0.99 SR"},
    "B2": {"slope a chunk, no EF"},
    "B10": {"alpha 0.99 bf16", "FP32 ring"},
    "B12": {"every token, alpha 0.99"},
    "B18": {"eps int8", *(f"formula int8@{window} alpha {alpha}" for alpha, window in INT8_CLOSED)},
}
"""Figures that we do not reproduce, each with the reason beside it in its case."""

CASE_TESTS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", CASE_TESTS)
def test_case(name):
    with torch.inference_mode():
        found = outcomes(get_case(name))
    disagreeing = {outcome.figure.name for outcome in found if outcome.verdict == "disagree"}
    assert disagreeing == DISAGREE.get(name, set()), [o.row for o in found if o.verdict == "disagree"]
    for outcome in found:
        if outcome.verdict != "agree":
            assert outcome.figure.why, outcome.figure.name


def test_there_are_eighteen_cases_with_figures_of_their_own():
    assert list(CASES) == [f"B{number}" for number in range(1, 19)]
    for case in CASES.values():
        names = [figure.name for figure in case.figures]
        assert len(set(names)) == len(names), case.name


def test_the_table_fits_a_hundred_columns():
    longest = max(len(figure.name) for case in CASES.values() for figure in case.figures)
    expected = max(len(figure.expected) for case in CASES.values() for figure in case.figures)
    # case 4, measured 8, tolerance 8, verdict 14; a cell has two spaces and a border.
    assert 4 + longest + expected + 8 + 8 + 14 + 6 * 3 + 1 <= 100


def test_a_figure_may_differ_by_its_last_digit_and_by_sampling():
    figure = Figure("f", "0.0142", units=4)
    assert figure.judge(Measured(0.01424)) == "agree"
    assert figure.judge(Measured(0.01426)) == "disagree"
    # Four standard errors: 4 * .0005 * sqrt(1/4 + 1/4) = .0014.
    assert figure.tolerance(Measured(0.0, 0.0005, 4)) == pytest.approx(5e-5 + 0.0014, rel=0.02)
    assert Figure("f", "6.87e-3").tolerance(Measured(0.0)) == pytest.approx(5e-6)
    assert Figure("f", "1.0").judge(Measured(math.nan)) == "disagree"


@pytest.mark.parametrize(
    ("expected", "good", "bad"), [("<= 1e-6", 1e-6, 2e-6), (">= 0.8", 0.8, 0.79), ("= 0", 0.0, 1e-300)]
)
def test_a_bound_is_what_it_says(expected, good, bad):
    assert Figure("f", expected).judge(Measured(good)) == "agree"
    assert Figure("f", expected).judge(Measured(bad, 1.0)) == "disagree"
    assert Figure("f", expected, comparable=False).judge(Measured(bad)) == "not comparable"


def test_an_unknown_bound_is_refused():
    with pytest.raises(InputError, match="expected"):
        Figure("f", "about 3")


def test_the_spread_is_that_of_one_unit():
    generator = np.random.default_rng(0)
    values = generator.normal(10, 2, 4000)
    assert mean_over(values).spread == pytest.approx(2, rel=0.05)
    # Pooled: the root of a mean of squares; delta method: spread = sd(x^2) / (2 value).
    squares = values[None] ** 2
    pooled = pooled_over(squares, np.ones_like(squares))
    assert pooled.spread == pytest.approx(squares.std() / (2 * pooled.value), rel=0.05)


@pytest.mark.slow
def test_cases_run_in_processes():
    found = {case.name: len(rows) for case, rows in run_cases([get_case("B7"), get_case("B5")], workers=2)}
    assert found == {name: len(CASES[name].figures) for name in ("B5", "B7")}


def test_b1_and_b12_in_short():
    """B1's alpha .9 column, both read points, on 32 tokens of rows that are independent anyhow."""
    from quantlab.drift.evidence.storage import _read_after_store
    from quantlab.drift.evidence.streams import output_errors

    stream = gdn(0.9, 64, False, beta=0.5, value_dim=32)
    before, after = output_errors(stream, ["int8@1"])["int8@1"], _read_after_store(stream, "int8@1")
    # The new token dilutes the error by sqrt(rho): .9 * sqrt(1 - .75 / 128).
    assert before.value / after.value == pytest.approx(0.9 * math.sqrt(1 - 0.75 / 128), rel=0.01)


@pytest.mark.parametrize("null", ["negative", "zero"])
def test_b16_in_short(null):
    report = slot_hazards("fp16@4:buffer=bf16", GEOMETRIES[0], null, 24)
    assert report.states == 0
    assert report.unfinite == 0
    assert report.difference < 1e-5


def test_b16_sees_records_that_outlive_their_sequence(monkeypatch):
    monkeypatch.setattr(WindowBuffer, "clear", lambda self, rows: None)
    report = slot_hazards("fp16@4:buffer=bf16", GEOMETRIES[0], "negative", 24)
    assert report.states > 0 or report.difference > 1e-3


def test_b17_in_short_and_broken(monkeypatch):
    stream = gdn_stream(torch.full((32, 2, 2), 0.97).log(), seed=15, key_dim=32, value_dim=16)
    for accepted in range(5):
        assert rollback("int8@16", stream, 4, accepted, 13) == (True, 0.0)
    accept = WindowBuffer.accept
    monkeypatch.setattr(WindowBuffer, "accept", lambda self, counts, rows: accept(self, self.pending, rows))
    same, _ = rollback("int8@16", stream, 4, 1, 3)
    assert not same


def test_b15_sees_a_store_number_that_does_not_advance():
    fresh, frozen = (bias_statistic(64, 1024, repeated=r) for r in (False, True))
    assert fresh == pytest.approx(1, abs=4 * math.sqrt(2 / 1024))
    assert frozen > 40
