"""Tiny models as folders, and a few rows of the invented table."""

import csv
from pathlib import Path

import pytest

from quantlab.models import build_tiny

TABLE = Path(__file__).parents[2] / "experiments" / "quickstart" / "gpqa_made_up.csv"


@pytest.fixture(scope="session", params=["mamba2", pytest.param("gated_delta", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    return build_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def table(tmp_path):
    """Path of a table of three short questions: contexts of 100 tokens and more, of three lengths."""
    rows = list(csv.DictReader(TABLE.open(encoding="utf-8")))[:3]
    for number, row in enumerate(rows):
        row["Question"] = row["Question"][: 24 + 3 * number]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path
