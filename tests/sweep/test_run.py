"""Sweeps that are stopped, killed, sharded or unlucky end in the same records as those that are not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quantlab
from quantlab import records
from quantlab.errors import InputError
from quantlab.sweep import LocalExecutor, expand, load_study, parse_shard, run_sweep

ROOT = Path(quantlab.__file__).parents[1]


def by_policy(folder):
    return {record["point"]["policy"]: record for record in records.load_records(folder)}


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


def test_records_appear_and_a_second_run_does_nothing(tmp_path, study):
    spec = study(["a", "series", "diverged"], ["a"])
    summary = run_sweep(spec, tmp_path / "out", workers=2, command="quantlab sweep spec.toml")
    assert (summary.points, summary.found, summary.ran) == (4, 0, 4)
    assert summary.statuses == {"ok": 3, "diverged": 1}
    assert sorted(calls(tmp_path)) == ["a", "a series diverged"]
    found = by_policy(summary.folder)
    assert found["diverged"]["message"] == "at step 3"
    assert found["a"]["metrics"]["threads"] == "1"
    assert found["a"]["environment"]["threads"] == found["a"]["metrics"]["told"] == 1
    assert found["a"]["metrics"]["pid"] != os.getpid()
    import pandas

    series = pandas.read_parquet(summary.folder / found["series"]["series"])
    assert series.to_dict("list") == {"step": [1, 2], "output_error": [0.5, 0.25]}
    about = json.loads((tmp_path / "out" / "study.json").read_text())
    assert about["command"] == "quantlab sweep spec.toml"

    before = {path: path.stat().st_mtime_ns for path in summary.folder.iterdir()}
    again = run_sweep(spec, tmp_path / "out", workers=2)
    assert (again.found, again.ran, again.statuses) == (4, 0, {"ok": 3, "diverged": 1})
    assert len(calls(tmp_path)) == 2
    assert {path: path.stat().st_mtime_ns for path in summary.folder.iterdir()} == before


def test_one_bad_policy_fails_alone_and_is_tried_again(tmp_path, study, capsys):
    spec = study(["a", "raise", "b", "silent"])
    summary = run_sweep(spec, tmp_path / "out", workers=1)
    assert summary.statuses == {"ok": 2, "failed": 2}
    found = by_policy(summary.folder)
    assert found["raise"]["message"].startswith("ValueError: too bad (runner.py, line ")
    assert "no record" in found["silent"]["message"]
    assert calls(tmp_path) == ["a raise b silent", "raise", "b", "silent"]
    # Mended: only what failed runs again.
    runner = tmp_path / "runner.py"
    runner.write_text(runner.read_text().replace('"raise"', '"-"').replace('"silent"', '"-"'))
    capsys.readouterr()
    summary = run_sweep(spec, tmp_path / "out", workers=1)
    assert (summary.found, summary.ran, summary.statuses) == (2, 2, {"ok": 4})
    assert calls(tmp_path)[-1] == "raise silent"
    lines = capsys.readouterr().err
    assert "2 points failed before" in lines
    assert "another version of the runner script" in lines


def test_killed_worker_is_a_failed_record_and_the_others_go_on(tmp_path, study):
    spec = study(["a", "kill", "b"], ["c"], ["d"])
    summary = run_sweep(spec, tmp_path / "out", workers=1)
    found = {(r["point"]["name"], r["point"]["policy"]): r for r in records.load_records(summary.folder)}
    assert {key: record["status"] for key, record in found.items()} == {
        ("block0", "a"): "ok",
        ("block0", "kill"): "failed",
        ("block0", "b"): "failed",
        ("block1", "c"): "ok",
        ("block2", "d"): "ok",
    }
    assert "SIGKILL" in found["block0", "kill"]["message"]


def test_input_error_of_a_worker_reaches_the_user(tmp_path, study):
    with pytest.raises(InputError, match="policy 'input': expected something else"):
        run_sweep(study(["input"]), tmp_path / "out", workers=1)
    assert list((tmp_path / "out" / "records").iterdir()) == []


def test_nothing_is_written_when_the_input_is_wrong(tmp_path, study, monkeypatch):
    spec = study(["a"], extra="polices = ['b']\n")
    with pytest.raises(InputError, match="nearest: policies"):
        run_sweep(spec, tmp_path / "out")

    def refuse(text):
        raise InputError("policy", text, "a policy")

    monkeypatch.setattr("quantlab.schemes.parse_policy", refuse, raising=False)
    with pytest.raises(InputError, match="policy 'a'"):
        run_sweep(study(["a"]), tmp_path / "out")
    with pytest.raises(InputError, match="workers"):
        LocalExecutor(workers=0)
    assert not (tmp_path / "out").exists()


def test_output_that_is_a_file_is_refused(tmp_path, study):
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="file is in the way"):
        run_sweep(study(["a"]), tmp_path / "out")


def test_shards_are_disjoint_and_their_union_is_the_whole(tmp_path, study):
    spec = study(["a", "b"], ["a"], ["c"])
    jobs = expand(load_study(spec), tmp_path)
    ran = []
    for shard in ((1, 2), (2, 2)):
        summary = run_sweep(spec, tmp_path / "out", workers=1, shard=shard)
        ran.append((summary.points, summary.ran))
    # What another shard has done in the shared folder does not move the borders.
    assert ran == [(3, 3), (1, 1)]
    stored = {path.stem for path in (tmp_path / "out" / "records").iterdir()}
    assert stored == {records.content_hash(point) for job in jobs for point in job.points}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "a/b", "-1/2", "1/0"])
def test_bad_shards(text):
    with pytest.raises(InputError, match="shard"):
        parse_shard(text)
    assert parse_shard("2/8") == (2, 8)


def test_records_of_another_protocol_are_computed_anew(tmp_path, study, monkeypatch, capsys):
    spec = study(["a"])
    run_sweep(spec, tmp_path / "out", workers=1)
    monkeypatch.setitem(records.PROTOCOLS, "scan", {"version": 99})
    # The worker process has the old protocol: what counts here is that the point is run.
    assert run_sweep(spec, tmp_path / "out", workers=1).ran == 1
    assert "another protocol" in capsys.readouterr().err


DRIVER = """
import sys
import quantlab.schemes
from quantlab.sweep import run_sweep
if __name__ == "__main__":
    quantlab.schemes.parse_policy = str
    print(run_sweep(sys.argv[1], sys.argv[2], workers=2))
"""


def start_sweep(tmp_path, spec):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(driver), str(spec), str(tmp_path / "out")]
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs with interrupts ignored, and they inherit it: the tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / "records").glob("*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    return process


def session_is_empty(process):
    """No process of the sweep is left; waits, as workers notice the end of their parent by themselves."""
    for _ in range(200):
        members = subprocess.run(
            ["ps", "-o", "pid=,stat=", "-s", str(process.pid)], capture_output=True, text=True
        )
        if all("Z" in line for line in members.stdout.splitlines()):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_resume_after_the_sweep_was_stopped_in_the_middle(tmp_path, study, name):
    blocks = [[f"slow{j}" for j in range(6)], [f"slow{j}" for j in range(6, 12)]]
    spec = study(*blocks)
    process = start_sweep(tmp_path, spec)
    if name == "SIGKILL":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: the whole process group hears it
    _, errors = process.communicate(timeout=60)
    assert session_is_empty(process)
    folder = tmp_path / "out" / "records"
    done = records.load_records(folder)  # every file there is a whole record
    assert 0 < len(done) < 12
    if name == "SIGINT":
        assert "points are stored; the same command resumes" in errors
        assert not list(folder.glob(".*"))
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    summary = run_sweep(spec, tmp_path / "out", workers=2)
    assert (summary.found, summary.ran) == (len(done), 12 - len(done))
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert len(list(folder.iterdir())) == 12
