"""``quantlab eval`` goes on where it was stopped: policies that are done, and sequences of one that is not."""

import json
import os
import shutil
import signal
import time

import pytest

from quantlab.errors import InputError
from quantlab.evals.result_files import read_runs
from quantlab.evals.run import run_eval
from quantlab.models import build_tiny
from quantlab.models.decode_rows import EagerRows

MULTIPLE_CHOICE, GENERATION = "quantlab_gpqa_diamond_mc", "running_arithmetic"
POLICIES = ["fp32@1", "fp16+sr/nvfp4@4"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("mamba2", tmp_path_factory.mktemp("resume") / "mamba2")


def arithmetic(folder, output, policies=POLICIES, **options):
    options = {"items": 4, "generation": {"quiet": True, "generation_batch": 3}} | options
    return run_eval(folder, policies, [GENERATION], output=output, **options)


def never(*_, **__):
    raise AssertionError("evaluated")


def without_times(record):
    """What two runs of one evaluation agree in."""
    metrics = dict(record["metrics"])
    metrics.pop("lm_eval")
    metrics["generation"] = {
        name: value
        for name, value in metrics.get("generation", {}).items()
        if name not in ("seconds", "tokens_per_second", "resumed")
    }
    metrics.pop("op_hits")
    return {**record, "metrics": metrics, "seconds": None}


def test_what_is_done_is_not_done_again(folder, table, tmp_path, monkeypatch):
    def run(seed=0, policies=POLICIES, **options):
        return run_eval(
            folder, policies, [MULTIPLE_CHOICE], data=table, output=tmp_path / "out", seed=seed, **options
        )

    first = run()
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    monkeypatch.setattr("lm_eval.simple_evaluate", never)
    assert run() == first
    assert run(batch_size=2) == first  # a layout is no setting
    assert sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file()) == files
    for changes in ({"seed": 1}, {"limit": 2}, {"scoring": "boundary"}, {"policies": ["int8@1"]}):
        with pytest.raises(AssertionError, match="evaluated"):
            run(**changes)
    table.write_text(table.read_text().replace("keeper", "warden"))
    with pytest.raises(AssertionError, match="evaluated"):
        run()


def test_another_model_of_the_same_name_is_another_evaluation(folder, table, tmp_path, monkeypatch):
    place = tmp_path / "models" / folder.name
    shutil.copytree(folder, place)
    run_eval(place, ["fp32@1"], [MULTIPLE_CHOICE], data=table, output=tmp_path / "out", limit=1)
    monkeypatch.setattr("lm_eval.simple_evaluate", never)
    run_eval(place, ["fp32@1"], [MULTIPLE_CHOICE], data=table, output=tmp_path / "out", limit=1)
    shutil.rmtree(place)
    build_tiny("mamba2", place, seed=1)
    with pytest.raises(AssertionError, match="evaluated"):
        run_eval(place, ["fp32@1"], [MULTIPLE_CHOICE], data=table, output=tmp_path / "out", limit=1)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[1]",
        '{"a": 1}',
        '{"files": [], "record": {}}',
        '{"files": ["../x"], "record": {}}',
        "[" * 100_000,
    ],
)
def test_a_broken_record_is_none(folder, table, tmp_path, monkeypatch, text):
    arguments = {"data": table, "output": tmp_path / "out", "limit": 1}
    run_eval(folder, ["fp32@1"], [MULTIPLE_CHOICE], **arguments)
    (kept,) = (tmp_path / "out" / "fp32@1").glob("record_*.json")
    kept.write_bytes(kept.read_bytes()[:-9] if text is None else text.encode())
    monkeypatch.setattr("lm_eval.simple_evaluate", never)
    with pytest.raises(AssertionError, match="evaluated"):
        run_eval(folder, ["fp32@1"], [MULTIPLE_CHOICE], **arguments)


@pytest.mark.parametrize("pattern", ["results_*", "samples_*"])
def test_results_that_were_deleted_are_made_again_and_once(folder, table, tmp_path, pattern):
    def run():
        return run_eval(folder, ["fp32@1"], [MULTIPLE_CHOICE], data=table, output=tmp_path / "out")

    run()
    (gone,) = (tmp_path / "out" / "fp32@1").glob(pattern)
    gone.unlink()
    run()
    names = [path.name.split("_")[0] for path in (tmp_path / "out" / "fp32@1").iterdir()]
    assert sorted(names) == ["record", "results", "samples"]


@pytest.mark.parametrize("written", range(4))
def test_a_disk_that_fills_up_at_any_file_leaves_one_run(folder, tmp_path, monkeypatch, written):
    """Of the record, the samples and the results the first ``written`` get through, and a fourth write is of none."""
    place, real = tmp_path / "out" / "fp32@1", os.replace
    count = []

    def full(source, target, **options):
        if "generations" not in str(target):
            count.append(target)
            if len(count) > written:
                raise OSError(28, "No space left on device")
        return real(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        if written < 3:
            with pytest.raises(OSError, match="No space"):
                arithmetic(folder, tmp_path / "out", ["fp32@1"])
            assert not list(place.glob("results_*"))  # they come last
        else:
            arithmetic(folder, tmp_path / "out", ["fp32@1"])
    assert len(count) == min(written + 1, 3)
    (record,) = arithmetic(folder, tmp_path / "out", ["fp32@1"])
    assert record["metrics"]["generation"]["resumed"] == (4 if written < 3 else 0)
    assert list(read_runs(place)) == [GENERATION]
    names = [path.name.split("_")[0] for path in place.iterdir()]
    assert sorted(names) == ["generations.jsonl", "record", "results", "samples"]


def test_generations_leave_counts_and_no_tokens(folder, tmp_path):
    records = arithmetic(folder, tmp_path / "out")
    for record in records:
        place = tmp_path / "out" / record["point"]["policy"].replace("/", "--")
        assert {path.name.split("_")[0] for path in place.iterdir()} == {
            "generations.jsonl",
            "record",
            "results",
            "samples",
        }
        header, *rows = map(json.loads, (place / "generations.jsonl").read_text().splitlines())
        assert header["over"] is True
        assert header["settings"]["policy"] == record["point"]["policy"]
        assert [row["ids"] for row in rows] == [None] * 4
        told = record["metrics"]["generation"]
        assert told["sequences"] == 4
        assert told["generated_tokens"] == sum(row["tokens"] for row in rows)
    # Another evaluation in the same folder: what is over is set aside.
    arithmetic(folder, tmp_path / "out", ["fp32@1"], seed=3)
    place = tmp_path / "out" / "fp32@1"
    assert (
        json.loads((place / "generations.jsonl").read_text().splitlines()[0])["settings"]["state_seed"] == 3
    )
    (aside,) = place.glob("generations_*.jsonl")
    assert json.loads(aside.read_text().splitlines()[0])["settings"]["state_seed"] == 0


@pytest.mark.slow
def test_killed_in_the_middle_it_ends_as_if_nothing_had_been(folder, tmp_path, monkeypatch):
    expected = arithmetic(folder, tmp_path / "undisturbed")
    step, out = EagerRows.step, tmp_path / "out"

    def slowly(self, tokens):
        time.sleep(0.002)
        return step(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(EagerRows, "step", slowly)
        for lines in (2, 3):
            child = os.fork()
            if child == 0:
                try:
                    arithmetic(folder, out)
                finally:
                    os._exit(0)
            sidecar = out / "fp16+sr--nvfp4@4" / "generations.jsonl"
            while not sidecar.exists() or sidecar.read_bytes().count(b"\n") < lines:
                time.sleep(0.001)
                assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
            assert not list(sidecar.parent.glob("results_*"))  # half a policy is none
            assert len(list((out / "fp32@1").glob("results_*"))) == 1
    again = arithmetic(folder, out)
    assert [without_times(record) for record in again] == [without_times(record) for record in expected]
    assert again[1]["metrics"]["generation"]["resumed"] >= 2
    rows = [
        sorted((place / "fp16+sr--nvfp4@4" / "generations.jsonl").read_text().splitlines())
        for place in (tmp_path / "undisturbed", out)
    ]
    assert rows[0] == rows[1]


def test_other_settings_beside_a_half_finished_run_are_one_line(folder, tmp_path, monkeypatch):
    real, calls = EagerRows.step, []

    def fails(self, tokens):
        calls.append(1)
        if len(calls) > 150:
            raise KeyboardInterrupt
        return real(self, tokens)

    options = {"generation": {"quiet": True, "generation_batch": 1}, "items": 20}
    monkeypatch.setattr(EagerRows, "step", fails)
    with pytest.raises(KeyboardInterrupt):
        arithmetic(folder, tmp_path / "out", ["fp32@1"], **options)
    with pytest.raises(InputError, match=r"^sidecar .*state_seed 0 then, 3 now"):
        arithmetic(folder, tmp_path / "out", ["fp32@1"], seed=3, **options)
