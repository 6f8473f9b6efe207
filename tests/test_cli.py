"""The command line: every verb runs, has help with an example, and ends with one line and status 2 on bad input."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from quantlab import cli
from quantlab.cli import app
from quantlab.records import load_records

ROOT = Path(__file__).resolve().parents[1]
VERBS = [
    "study",
    "sweep",
    "report",
    "compare",
    "drift",
    "capture",
    "eval",
    "predict",
    "size",
    "formats",
    "explain",
    "claims",
    "bench",
]


def quantlab(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "quantlab.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


@pytest.fixture
def printed(monkeypatch, capsys):
    """The command line in this process, which must succeed: what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["quantlab", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        return capsys.readouterr().out

    return run


def test_verbs_have_help_with_an_example():
    commands = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert set(commands) == set(VERBS)
    for name, command in commands.items():
        assert command.help, name
        assert f"quantlab {name}" in command.epilog
    shown = quantlab("drift", "--help")
    assert shown.returncode == 0
    assert "Example: quantlab drift" in shown.stdout


def test_drift_prints_one_object_a_policy(printed):
    arguments = "drift --family gated_delta --alpha 0.99 --steps 64 --heads 2 --seed 0 --json"
    output = printed(*f"{arguments} --policy fp32/nvfp4@16 --policy nvfp4@1".split())
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["policy"] for row in rows] == ["fp32/nvfp4@16", "nvfp4@1"]
    promised = "policy status state_error read_error output_error growth_exponent growth_ci"
    promised += " predicted_output_error exercised bits_per_value bytes_per_token"
    assert set(promised.split()) <= set(rows[0])
    assert rows[0]["exercised"] == {"checkpoint": 4, "read_copy": 4}
    # Of each head: 4-bit codes, an 8-bit scale for 16 of them, one 32-bit global scale; read and written every token.
    heads, value_dim, key_dim = 2, 128, 128
    copy = heads * (value_dim * key_dim * 4.5 / 8 + 4)
    assert rows[1]["bytes_per_token"] == 2 * copy


def test_drift_reads_the_stream_it_saved(tmp_path, printed):
    file = tmp_path / "s.safetensors"
    size = "--heads 1 --value-dim 16 --key-dim 32"
    made = printed(*f"drift --alpha 0.9 --steps 20 {size} -p nvfp4@4 --json --save-stream {file}".split())
    read = printed("drift", "--stream", str(file), "-p", "nvfp4@4", "--json")
    assert json.loads(made) == json.loads(read)


def test_explain_and_predict_and_formats(printed):
    about = json.loads(printed("explain", "fp16+sr/nvfp4@16", "--json"))
    assert "contents=raw:key_read=copy:flush_read=exact:current=exact" in about["in_force"]
    for policy, kernel in (
        ("fp16+sr/nvfp4+keyscale@16", "decode kernels, on a GPU"),
        ("int8+ef@1", "none, torch serves every step: no kernel serves what a pool has no layout for"),
    ):
        assert json.loads(printed("explain", policy, "--json"))["kernel"].startswith(kernel)
    rows = [json.loads(line) for line in printed("predict", "nvfp4@1", "--json").splitlines()]
    assert rows[0]["alpha 0.999"] == "inf"
    assert "nvfp4" in printed("formats")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("drift -p fp33@1", ["policy", "'fp33@1'", "nearest: fp32"]),
        ("drift -p fp32@0", ["policy", "'fp32@0'", "window of at least 1"]),
        ("drift -p fp32/nvfp4@16:key_read=checkpoint --family mamba2", ["policy", "delta rule only"]),
        ("drift --family mamba3", ["family", "'mamba3'", "nearest: mamba2"]),
        ("drift --alpha 1.5", ["alpha", "1.5"]),
        ("drift --steps 0", ["--steps"]),
        ("drift --stream nowhere.safetensors", ["nowhere.safetensors"]),
        ("drift --alpha 0.9 --steps 4 --save-stream /proc/nothing/x", ["/proc/nothing/x"]),
        ("drift --beta 0.5", ["beta 0.5", "preset realistic"]),
        ("drift --family mamba2 --alpha 0.9 --beta 0.5", ["beta 0.5", "no delta rule"]),
        ("drift --preset= --steps 4", ["preset ''", "evidence"]),
        ("drift --steps 99999999999999 --heads 1", ["stream", "99999999999999", "GiB"]),
        ("drift --heads 99999999999999999999", ["stream", "99999999999999999999", "GiB"]),
        ("drift --seed 9223372036854775808", ["--seed"]),
        ("drift -p fp32@99999999999999999999999", ["policy", "at most 65536"]),
        ("drift -p bf16+sr\u0663@1", ["policy", "\u0663"]),
        ("drift --steps 8 --save-stream left -p fp33@1", ["policy", "'fp33@1'"]),
        (
            "drift --steps 8 --save-stream left --family mamba2 -p fp32/nvfp4@16:key_read=checkpoint",
            ["delta rule only"],
        ),
        ("drift --stream x --steps 8 --alpha 0.5", ["alpha 0.5", "the stream file decides it"]),
        ("predict fp32@1 --key-dim 99999999999999999999", ["key_dim", "GiB"]),
        ("explain fp32@1 --heads 99999999999", ["state", "heads 99999999999", "GiB"]),
        ("predict fp32@1 --alpha 1.0", ["alpha", "1.0"]),
        ("predict fp32@1 --alpha 1e-300", ["alpha", "1e-300", "no token remembers"]),
        ("predict fp32@1 --family mamba2 --alpha 0.9 --beta 0.5", ["beta", "no beta with mamba2"]),
        ("predict fp32@1 --config nowhere", ["config", "config.json"]),
        ("predict fp32@1 --config nowhere --alpha 0.9", ["alpha", "the config decides it"]),
        ("explain fp32@16:dot=tf64", ["dot as one of ieee, tf32"]),
        ("explain fp32@1 --heads 4 --key-heads 3", ["key_heads", "3"]),
        ("study nowhere", ["study", "'nowhere'"]),
        (f"study {ROOT / 'experiments' / 'typeseg' / 'run.py'}", ["spec", "valid TOML"]),
        ("sweep nowhere.toml -o out", ["spec", "'nowhere.toml'"]),
        ("report nowhere", ["nowhere"]),
        ("eval --model nowhere --data x.csv", ["model", "nowhere"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, names, tmp_path, monkeypatch, capfd):
    # In this process: a new one takes seconds to import torch, and nothing here depends on it.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quantlab", *arguments.split()])
    with pytest.raises(SystemExit) as left:
        cli.main()
    stderr = capfd.readouterr().err
    assert left.value.code == 2, stderr
    for name in names:
        assert name in stderr
    assert "Traceback" not in stderr
    if stderr.startswith("error: "):
        assert len(stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_input_leaves_the_process_with_status_2(tmp_path):
    done = quantlab("drift", "-p", "fp33@1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: policy")
    assert len(done.stderr.strip().splitlines()) == 1


def test_running_out_of_memory_or_disk_is_one_line(monkeypatch, capsys):
    import torch

    from quantlab import cli

    def fails(error):
        def formats_table():
            raise error

        return formats_table

    with pytest.raises(RuntimeError) as caught:  # what the allocator itself says
        torch.empty(2**50)
    for error, words in (
        (caught.value, "out of memory"),
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device", "x.json"), "No space left on device x.json"),
    ):
        monkeypatch.setattr("quantlab.formats.format_rows", fails(error))
        monkeypatch.setattr(sys, "argv", ["quantlab", "formats"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert words in shown
        assert len(shown.splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quantlab.cli", "formats"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "error: No space left on device\n"


SLOW_RUNNER = """
import time
def run_points(points, *, threads, on_progress):
    for point in points:
        time.sleep(0.5)
        yield point, {}
"""


def test_termination_says_how_to_resume_and_leaves_whole_records(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_RUNNER)
    policies = [f"fp32@{window}" for window in range(1, 61)]
    block = '[[script]]\nname = "s"\nrunner = "slow.py:run_points"\n'
    (tmp_path / "spec.toml").write_text(f'title = "t"\npolicies = {policies}\n{block}')
    command = [sys.executable, "-m", "quantlab.cli", "sweep", "spec.toml", "-o", "out", "--workers", "1"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    for _ in range(1200):
        if list(tmp_path.glob("out/records/*.json")) or process.poll() is not None:
            break
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "points are stored; the same command resumes" in errors
    assert "Traceback" not in errors
    assert 0 < len(load_records(tmp_path / "out" / "records")) < 60
    assert not list(tmp_path.glob("out/records/.*"))


def test_a_drift_with_turns_has_no_prediction_and_says_so_once(printed):
    output = printed(*"drift --turn 8 --steps 16 --heads 1 -p int8@1 -p int8@4".split())
    assert output.splitlines()[-1] == "No prediction, no growth: there is none with --turn."
    assert "nan" not in output
    assert output.count("prediction") == 1


@pytest.mark.parametrize(("heads", "said"), [(7, True), (8, False)])
def test_a_missing_interval_of_the_growth_is_explained(heads, said, printed):
    arguments = f"drift --alpha 0.9 --steps 64 --heads {heads} --value-dim 16 --key-dim 16 -p int8@1"
    output = printed(*arguments.split())
    assert ("No interval of the growth: 14 of at least 16 units (heads x sequences)." in output) == said


def test_turns_have_no_growth(printed):
    arguments = "drift --alpha 0.9 --steps 64 --heads 8 --value-dim 16 --key-dim 16 -p int8@1 --turn 8 --json"
    row = json.loads(printed(*arguments.split()))
    assert (row["growth_exponent"], row["growth_ci"], row["predicted_output_error"]) == (None, None, None)
