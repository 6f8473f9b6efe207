"""What a report says of closed-loop records: each number at its policy, agreement by margin, free and forced apart."""

import math
import re

import pytest

from quantlab import records
from quantlab.errors import InputError
from quantlab.report import load_collection
from quantlab.report.load import Collection
from quantlab.report.page import render
from tests.report.conftest import ENVIRONMENT

ABOUT = {"title": "t", "description": "", "command": None, "spec": None, "quick": True}


def record(policy, mode="forced", status="ok", **metrics):
    point = {"kind": "closed_loop", "policy": policy, "baseline": "fp32@1", "model": "tiny", "mode": mode}
    point |= {"steps": 64, "sequences": 2, "prefill": 9, "text_hash": "0" * 16}
    bins = [
        {"low": 0.0, "high": 0.01, "tokens": 0, "agreement": None},
        {"low": 0.01, "high": 3.0, "tokens": 100, "agreement": 0.875},
        {"low": 3.0, "high": math.inf, "tokens": 28, "agreement": 1.0},
    ]
    found = {
        "kl": 0.0123,
        "kl_largest": 1.75,
        "top1_agreement": 0.9023,
        "tokens": 128,
        "earliest_divergence": 17,
    }
    found |= {"nll": 2.713, "baseline_nll": 2.701, "agreement_by_margin": bins, "bits_per_value": 4.5}
    found |= {
        "exercised": {"checkpoint": 4, "read_copy": None},
        "bytes_per_token": 2048.0,
        "diverged_at": None,
    }
    result = {
        "status": status,
        "message": "lost" if status == "diverged" else None,
        "metrics": found | metrics,
    }
    return records.complete_record(point, result, environment=ENVIRONMENT)


def text_of(found):
    page = re.sub(r"<(style|svg).*?</\1>", "", render(Collection(found, ABOUT, [])), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_every_number_of_a_policy_is_in_its_row():
    lost = {"status": "diverged", "diverged_at": 5, "agreement_by_margin": []}
    page = text_of(
        [record("nvfp4@16"), record("int8@1", earliest_divergence=None), record("nvfp4@1", **lost)]
    )
    assert "What tiny says next, forced" in page
    assert "nvfp4@16 0.012 1.8 90.23 128 17 2.713 / 2.701 4 / – 4.50 2 " in page
    assert "int8@1 0.012 1.8 90.23 128 none" in page
    assert "nvfp4@1 diverged at step 5" in page


def test_agreement_by_margin_leaves_out_empty_bins():
    page = text_of([record("nvfp4@16"), record("int8@1")])
    assert "from 0 to 0.01" not in page
    assert "from 0.01 to 3 87.5 100 87.5 100 from 3 on 100.0 28 100.0 28" in page


def test_modes_are_sections_of_their_own():
    page = text_of([record("nvfp4@16"), record("nvfp4@16", mode="free", nll=None, baseline_nll=None)])
    assert page.index("tiny says next, forced") != page.index("tiny says next, free")
    assert "– / – 4 / –" in page


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, "text")
            for name in ("kl", "kl_largest", "top1_agreement", "tokens", "nll", "earliest_divergence")
        ),
        *(
            ("agreement_by_margin", value)
            for value in ("text", [1], [{"low": 0}], [{"low": 0, "high": 1, "tokens": "x"}])
        ),
    ],
)
def test_what_no_table_can_show_is_refused(tmp_path, name, value):
    records.save_record(tmp_path, record("nvfp4@16", **{name: value}))
    with pytest.raises(InputError, match=rf"metrics\.{name}"):
        load_collection(tmp_path)
