"""experiments/kernels_h200/run.py without a GPU: what it reports and refuses."""

import importlib

import pytest

script = importlib.import_module("experiments.kernels_h200.run")


def test_a_ratio_that_rounds_to_its_target_is_shown_to_miss_it():
    assert script._line("x", 0.8471, 0.85, "").split()[:3] == ["0.847", "NOT", "MET"]
    assert script._line("x", 0.8501, 0.85, "").split()[:2] == ["0.85", "met"]


@pytest.mark.parametrize(
    ("given", "message"),
    [(("--report",), "a folder with records of an earlier run"), (("--peer", "vlm"), "error: peer 'vlm': expected one of fla,")],
)
def test_what_cannot_be_done_ends_with_one_line(tmp_path, monkeypatch, given, message):
    monkeypatch.setattr("sys.argv", ["run.py", "--output", str(tmp_path / "none"), *given])
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert message in str(raised.value)
    assert not (tmp_path / "none").exists()
