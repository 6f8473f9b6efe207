"""experiments/generation_speed without a GPU: its tiny form, its comparison, and the study on a CPU."""

import json
import sys
from argparse import Namespace

import pytest
import torch

from experiments.generation_speed import run, study
from quantlab.records import load_record


def tiny(tmp_path, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--output", str(tmp_path), *options])
    run.main()
    return [load_record(path) for path in sorted((tmp_path / "records").glob("*.json"))]


def test_the_tiny_form_writes_whole_records(tmp_path, monkeypatch, capsys):
    records = tiny(tmp_path, monkeypatch)
    assert {record["point"]["policy"] for record in records} == set(run.POLICIES)
    for record in records:
        found = record["metrics"]
        assert record["status"] == "ok"
        assert found["tokens"] == 3 * 2 * 9
        # Four rows for six sequences of eight steps: two turns.  The first token of each comes from its prompt.
        assert found["steps"] == 2 * 8
        assert found["seconds"] == pytest.approx(found["prefill_seconds"] + found["decode_seconds"])
        assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    assert capsys.readouterr().out.count("tokens/s") == 2


def test_what_generates_something_else_has_no_speed(tmp_path, monkeypatch, capsys):
    from quantlab.models.decode_rows import GraphRows

    step = GraphRows.step
    monkeypatch.setattr(GraphRows, "step", lambda self, tokens: -step(self, tokens))
    (record,) = tiny(tmp_path, monkeypatch, "--policy", "fp32@1")
    assert record["status"] == "comparison_failed"
    assert record["metrics"] == {}
    assert "sequences differ" in capsys.readouterr().out


def test_a_wrong_policy_is_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        tiny(tmp_path, monkeypatch, "--policy", "nvfp5@1")
    assert "nvfp5" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_published_geometry_is_compared_first():
    """On the CPU both sides are the same kind of arithmetic: the comparison itself has to pass."""
    from experiments.decode_step.check import cut
    from experiments.decode_step.models import random_model

    small = random_model(cut("nano_4b"), torch.device("cpu"), torch.float32)
    assert run.check(lambda where: small.to(where), torch.device("cpu")) is None


def test_the_study_goes_through_the_model_class():
    options = Namespace(
        model="reference:gated_delta", questions=2, repeats=2, new=3, batch=64, policy=["fp32@1", "nvfp4@1"]
    )
    rows = list(study.measure(options))
    assert [row["policy"] for row in rows] == ["fp32@1", "nvfp4@1"]
    assert all(row["tokens_per_second"] * row["seconds"] == pytest.approx(12) for row in rows)
    json.dumps(rows)
