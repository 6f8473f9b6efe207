"""``quantlab claims``: what it prints, and how it refuses."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.cli_claims import _short
from quantlab.drift.evidence.case import Case, Figure, Measured, outcomes

ROOT = Path(__file__).resolve().parents[1]


def quantlab(*arguments):
    command = [sys.executable, "-m", "quantlab.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


@pytest.mark.slow
def test_claims_prints_expected_measured_and_verdict():
    done = quantlab("claims", "evidence", "B7", "B5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("toy, each step" in line and "= 2" in line and "agree" in line for line in lines)
    assert (
        any("not comparable" in line and "generator" in line for line in lines) or "generator" in done.stdout
    )
    assert "0 disagree" in lines[-1]
    assert "B7 done, 1 of 2" in done.stderr or "B7 done, 2 of 2" in done.stderr


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        (0.6224593312018546, "0.62245935", "0.62245933"),
        (0.62109375, "= 0.62109375", "0.62109375"),
        (2029.4, ">= 1000", "2029"),
        (2.24e-7, "3e-7", "2.24e-07"),
        (0.0063, ".0061", "0.0063"),
        (None, "1", None),
        (True, "= 1", "yes"),
        (np.bool_(False), "= 1", "no"),
        (256, "= 256", "256"),
        (float("nan"), "0.1", "nan"),
        (float("inf"), ">= 1e4", "inf"),
    ],
)
def test_a_measured_figure_has_the_digits_of_the_printed_one(value, expected, text):
    assert _short(value, expected) == text


KINDS = {
    "condition that holds": (True, "= 1", ["yes", "yes", "agree"]),
    "condition that fails": (False, "= 1", ["yes", "no", "disagree"]),
    "condition, none expected": (np.bool_(False), "= 0", ["no", "no", "agree"]),
    "count": (np.int64(256), "= 256", ["= 256", "256", "agree"]),
    "plain": (0.0142, ".0142", [".0142", "0.0142", "agree"]),
    "single": (np.float32(0.5), "<= 1e-6", ["<= 1e-6", "0.5", "disagree"]),
    "not a number": (math.nan, "0.1", ["0.1", "nan", "disagree"]),
    "infinite": (math.inf, ">= 1e4", [">= 1e4", "inf", "agree"]),
    "tiny, below zero": (-1e-300, "<= 1e-6", ["<= 1e-6", "-1e-300", "agree"]),
}


@pytest.fixture
def one_of_each(monkeypatch):
    """A case that measures every kind of value that a case may return."""
    figures = tuple(Figure(name, text) for name, (_, text, _) in KINDS.items())
    figures += (Figure("sampled", "0.5"), Figure("bare", "0.5", comparable=False))
    values = {name: Measured(value) for name, (value, _, _) in KINDS.items()}
    values |= {"sampled": Measured(0.49, 0.1, 8), "bare": 0.4}
    case = Case("B1", "one of each", figures, lambda full: values)
    monkeypatch.setattr("quantlab.drift.evidence.get_case", lambda name: case)
    monkeypatch.setattr(
        "quantlab.drift.evidence.run_cases", lambda chosen, **_: [(case, outcomes(case)) for case in chosen]
    )


def test_the_table_prints_every_kind_of_value(one_of_each):
    done = CliRunner().invoke(app, ["claims", "evidence", "B1"])
    assert done.exception is None, done.exception
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.output.splitlines()]
    found = {row[1]: [row[2], row[3], row[5]] for row in rows if len(row) == 6}
    for name, (_, _, cells) in KINDS.items():
        assert found[name] == cells, name
    assert found["sampled"] == ["0.5", "0.49", "agree"]
    assert found["bare"] == ["0.5", "0.4", "not comparable"]


def test_every_kind_of_value_is_a_line_of_json(one_of_each):
    done = CliRunner().invoke(app, ["claims", "evidence", "B1", "--json"])
    assert done.exception is None, done.exception
    rows = [json.loads(line, parse_constant=pytest.fail) for line in done.output.splitlines() if "{" in line]
    assert {row["figure"] for row in rows} == {*KINDS, "sampled", "bare"}


@pytest.mark.slow
def test_claims_as_json_and_as_a_list():
    done = quantlab("claims", "evidence", "B11", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"case", "figure", "expected", "measured", "tolerance", "verdict", "why"} == set(rows[0])
    listed = quantlab("claims", "evidence", "--list", "--json")
    assert len(listed.stdout.splitlines()) == 18
    wrong = quantlab("claims", "evidence", "B19")
    assert wrong.returncode == 2
    assert len(wrong.stderr.splitlines()) == 1
    assert "B18" in wrong.stderr
