"""``quantlab claims``: what it prints, and how it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantlab.cli_claims import _short

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
    ],
)
def test_a_measured_figure_has_the_digits_of_the_printed_one(value, expected, text):
    assert _short(value, expected) == text


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
