"""``quantlab drift --attribute`` prints the ladder, and refuses what it cannot do, in one line."""

import json

import pytest

from quantlab import cli

DRIFT = ["drift", "--steps", "32", "--heads", "2", "--sequences", "1", "--value-dim", "16", "--key-dim", "32"]


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["quantlab", *DRIFT, *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    return left.value.code, captured.out, captured.err


def test_parts_and_whole(monkeypatch, capsys):
    arguments = ["--attribute", "-p", "fp32/nvfp4@8:buffer=bf16", "--json"]
    status, out, _ = run(monkeypatch, capsys, *arguments)
    assert not status
    ladder = json.loads(out)
    assert [rung["suspect"] for rung in ladder["rungs"]] == ["read_copy=nvfp4", "buffer=bf16", "float32"]
    assert ladder["whole"]["suspect"] == "all together"
    assert sum(rung["share"] for rung in ladder["rungs"]) == pytest.approx(1.0)
    assert ladder["quadrature"] == pytest.approx(ladder["whole"]["output_error"], rel=0.1)


def test_the_table_says_whether_parts_are_independent(monkeypatch, capsys):
    status, out, _ = run(monkeypatch, capsys, "--attribute", "-p", "bf16@1:sites=output", "--alpha", "0.9")
    assert not status
    assert "all together" in out
    assert "independent parts" in out


def test_a_clamped_step_size_is_found_on_a_saved_stream(monkeypatch, capsys, tmp_path):
    """The stream file keeps the decay rates, so that the step sizes are known again."""
    path = str(tmp_path / "stream.safetensors")
    suspects = ["--attribute", "--suspect", "dt_clamp=0.1", "--suspect", "store=bf16", "--json"]
    status, made, _ = run(monkeypatch, capsys, "--family", "mamba2", "--save-stream", path, *suspects)
    assert not status
    monkeypatch.setattr("sys.argv", ["quantlab", "drift", "--stream", path, *suspects])
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(capsys.readouterr().out)["rungs"] == json.loads(made)["rungs"]
    assert json.loads(made)["rungs"][0]["suspect"] == "dt_clamp=0.1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suspect", "beta"], "suspect 'beta': expected --attribute"),
        (["--attribute", "--suspect", "betta"], "expected a site (beta, gate"),
        (["--attribute", "--suspect", "beta", "--suspect", "beta"], "each suspect once"),
        (["--attribute", "--turn", "4"], "turn '4': expected no --attribute"),
        (["--attribute", "-o", "somewhere"], "output 'somewhere': expected no --attribute"),
        (["--attribute", "--family", "mamba1", "--suspect", "decay"], "every element decays by itself"),
    ],
)
def test_wrong_use_ends_with_one_line(monkeypatch, capsys, arguments, says):
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert out == ""
