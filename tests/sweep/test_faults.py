"""Whatever the code of a runner does, and whatever the disk does, each point ends in a record or in one line."""

import os

import pytest

from quantlab import records
from quantlab.drift import save_stream, synthetic_stream
from quantlab.errors import InputError
from quantlab.sweep import Job, expand, load_study, run_sweep
from quantlab.sweep.jobs import run_and_store

POINTS = tuple({"kind": "scan", "name": "s", "policy": policy} for policy in ("good", "bad"))
BODY = """
import sys
def run_points(points, *, threads, on_progress):
    for point in points:
        if point["policy"] == "good":
            yield point, {"metrics": {"kl": 0.5}}
            continue
        %s
"""


def outcome(tmp_path, text, points=POINTS):
    """(events, records by policy) of one job whose runner has the source ``text``, run in this process."""
    (tmp_path / "runner.py").write_text(text)
    folder = tmp_path / "records"
    folder.mkdir()
    events = []
    job = Job("runner.py:run_points", str(tmp_path), "s", points)
    run_and_store(job, events.append, folder=str(folder), threads=1)
    return events, {record["point"]["policy"]: record for record in records.load_records(folder)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sys.exit('done')", "SystemExit: done"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("yield point, {'metrics': {'x': object()}}", "record value 'object'"),
        ("yield point, {'metricss': {}}", "nearest: metrics"),
        ("yield point, {'status': 'failed'}", "a reason"),
        ("yield point, {'message': 'nan'}", "stand for numbers"),
        ("yield point, {'series': {'a': [1, 2], 'b': [1]}}", "ArrowInvalid"),
        ("yield point, None", "a table of results, not None"),
        ("yield object(), {}", "TypeError"),
        ("yield {**point, 'x': 1}, {}", "a record that nobody asked for"),
    ],
)
def test_whatever_a_runner_does_to_one_point_is_a_failed_record(tmp_path, line, says):
    _, found = outcome(tmp_path, BODY % line)
    assert found["good"]["status"] == "ok"
    assert found["bad"]["status"] == "failed"
    assert says in found["bad"]["message"]
    # Nothing of the refused result is left, temporary files included.
    assert len(os.listdir(tmp_path / "records")) == 2


@pytest.mark.parametrize("line", ["raise ValueError('no such data')", "import sys; sys.exit(3)"])
def test_a_runner_that_cannot_be_loaded_fails_all_its_points(tmp_path, line):
    _, found = outcome(tmp_path, f"{line}\ndef run_points(points, *, threads, on_progress): pass\n")
    assert [record["status"] for record in found.values()] == ["failed", "failed"]
    assert "(runner.py, line 1)" in found["good"]["message"]


def test_a_full_disk_ends_the_sweep_in_one_line(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantlab.records.record.write_atomic", full)
    with pytest.raises(InputError, match=r"output .*No space left on device.*the same command resumes"):
        outcome(tmp_path, BODY % "pass")
    assert list((tmp_path / "records").iterdir()) == []


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("[[eval]]\nmodel = 'builtin:tiny-mamba2'\ntasks = ['quantlab_gpqa_diamond_mc']\n", "data None"),
        (
            "[[eval]]\nmodel = 'builtin:tiny-mamba2'\ntasks = ['quantlab_gpqa_diamond_mc']\ndata = 'q.csv'\n",
            "missing: Correct Answer",
        ),
        (
            "[[eval]]\nmodel = '.'\ntasks = ['quantlab_gpqa_diamond_mc']\ndata = 'good.csv'\n",
            "weights in the folder",
        ),
        ("[[drift]]\nstream_file = 's'\npolicies = ['nvfp4@4:contents=raw']\n", "delta rule only"),
        ("[[drift]]\nfamily = 'mamba2'\nalpha = []\n", "alpha"),
        ("[[drift]]\nfamily = 'mamba2'\nseed = []\n", "seed"),
        ("[[drift]]\nfamily = 'mamba2'\nseed = 9223372036854775808\n", "less than 9223372036854775808"),
    ],
)
def test_what_no_worker_could_run_is_refused_before_anything_is_written(tmp_path, block, says):
    (tmp_path / "q.csv").write_text("Question\nwhy\n")
    columns = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"
    (tmp_path / "good.csv").write_text(f"{columns}\nwhy,a,b,c,d\n")
    save_stream(
        synthetic_stream("mamba2", alpha=0.9, steps=2, heads=1, key_dim=8, value_dim=4), tmp_path / "s"
    )
    (tmp_path / "spec.toml").write_text(f"title = 't'\npolicies = ['fp32@1']\n{block}")
    with pytest.raises(InputError) as error:
        run_sweep(tmp_path / "spec.toml", tmp_path / "out", workers=1)
    assert says in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_spec_may_begin_with_a_byte_order_mark(tmp_path):
    text = "title = 't'\npolicies = ['fp32@1']\n[[drift]]\nfamily = 'mamba2'\n"
    (tmp_path / "spec.toml").write_text(text, encoding="utf-8-sig")
    assert len(expand(load_study(tmp_path / "spec.toml"), tmp_path)) == 1


def test_a_damaged_record_says_what_to_do(tmp_path):
    for text in ("", "{", "[" * 100_000):
        (tmp_path / "0123456789abcdef.json").write_text(text)
        with pytest.raises(InputError, match="delete the file to have it computed anew"):
            records.load_records(tmp_path)
