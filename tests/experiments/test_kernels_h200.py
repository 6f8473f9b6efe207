"""experiments/kernels_h200/run.py without a GPU: what it reports and refuses."""

import importlib

import pytest

from quantlab.errors import InputError

script = importlib.import_module("experiments.kernels_h200.run")


def test_a_ratio_that_rounds_to_its_target_is_shown_to_miss_it():
    assert script._line("x", 0.8471, 0.85, "").split()[:3] == ["0.847", "NOT", "MET"]
    assert script._line("x", 0.8501, 0.85, "").split()[:2] == ["0.85", "met"]


def test_a_peer_that_is_none_is_refused_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run.py", "--output", str(tmp_path / "none"), "--peer", "vlm"])
    with pytest.raises(InputError, match=r"^peer 'vlm': expected one of fla,"):
        script.main()
    assert not (tmp_path / "none").exists()
