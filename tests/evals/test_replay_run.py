"""``quantlab eval --replay`` on the command line: tables, records without text, going on, and what is refused."""

import json
import math

import numpy as np
import pandas
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.errors import InputError
from quantlab.evals import replay_run
from quantlab.evals.replay_run import run_replay
from quantlab.evals.run import run_eval
from quantlab.models import build_tiny
from quantlab.models.reference import vocabulary
from quantlab.records import load_records
from tests.evals.made_up import CANARY
from tests.evals.spoiling import spoil

POLICIES = ("fp32@1", "nvfp4+sr@1")
MODEL = "builtin:tiny-mamba2"


@pytest.fixture
def source(tmp_path):
    """Six traces of several lengths, with canaries in ids, prompts and responses."""
    path = tmp_path / "traces.jsonl"
    rows = [
        {
            "id": f"{CANARY} {n}",
            "prompt": CANARY + "?" * (n % 4),
            "response": CANARY + "," * n + f" Answer: {'ABCD'[n % 4]}",
            "answer": "ABCD"[n % 3],
        }
        for n in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replay(source, output, policies=POLICIES, **options):
    options = {"batch_size": 4, "environment": {}, **options}
    return run_replay(MODEL, source, list(policies), output=output, **options)


def without_times(record):
    return {name: value for name, value in record.items() if name not in ("seconds", "created")}


def test_records_have_numbers_and_no_text(source, tmp_path):
    out = tmp_path / "out"
    exact, coarse = records = replay(source, out)
    assert [record["status"] for record in records] == ["ok"] * 2
    assert (exact["metrics"]["kl"], exact["metrics"]["top1_agreement"]) == (0.0, 1.0)
    assert coarse["metrics"]["kl"] > 0
    assert coarse["metrics"]["answers"]["traces"] == 6
    assert coarse["metrics"]["answers"]["change"] != 0 == exact["metrics"]["answers"]["change"]
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    # One byte is one token here.
    assert coarse["metrics"]["tokens"] == sum(len(line["response"]) for line in lines)
    for record in records:
        series = pandas.read_parquet(out / "records" / record["series"])
        assert len(series) == record["metrics"]["tokens"]
        assert series["kl"].mean() == pytest.approx(record["metrics"]["kl"], rel=1e-12)
        by_trace = series.groupby("trace")["kl"].mean()
        assert by_trace.tolist() == pytest.approx(
            [line["kl"] for line in record["metrics"]["per_trace"]], rel=1e-12
        )
        assert [record["metrics"]["per_trace"][n]["trace"] for n in range(6)] == list(range(6))
    assert not list((out / "records").glob("parts_*"))
    # Neither texts nor their tokens, of which four in a row are looked for as lists are written.
    tokenizer = AutoTokenizer.from_pretrained(build_tiny("mamba2", tmp_path / "model"))
    ids = [str(token) for token in tokenizer(CANARY, add_special_tokens=False)["input_ids"][1:5]]
    tokens = [gap.join(ids) for gap in (",", ", ", "\n", " ")]
    for path in out.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert CANARY.encode() not in data
        assert not any(text.encode() in data for text in tokens)
        if path.suffix == ".parquet":
            assert set(pandas.read_parquet(path)) == {
                "trace",
                "token",
                "kl",
                "top1",
                "margin",
                "nll",
                "baseline_nll",
            }


def test_the_batch_size_decides_nothing(source, tmp_path):
    one, other = (replay(source, tmp_path / str(size), batch_size=size) for size in (2, 6))
    assert [record["metrics"] for record in one] == [record["metrics"] for record in other]


def test_killed_in_the_middle_it_ends_as_if_nothing_had_been(source, tmp_path, monkeypatch):
    policies, options = (*POLICIES, "bf16@1"), {"batch_size": 2}
    expected = [without_times(r) for r in replay(source, tmp_path / "undisturbed", policies, **options)]
    out, run, read, batches = tmp_path / "out", replay_run.replay_batch, [], 2
    replay(source, out, POLICIES[:1], **options)

    def counted(baseline, decoders, traces, **options):
        if len(read) == batches:
            raise KeyboardInterrupt
        read.append((len(decoders), len(traces)))
        return run(baseline, decoders, traces, **options)

    monkeypatch.setattr(replay_run, "replay_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        replay(source, out, policies, **options)
    assert read == [(2, 2)] * 2  # the policy that is done is not read again
    assert len(load_records(out / "records")) == 1
    broken = min((out / "records").glob("parts_*/*.npz"))
    broken.write_bytes(broken.read_bytes()[:100])
    read.clear()
    batches = 9
    assert [without_times(record) for record in replay(source, out, policies, **options)] == expected
    # What was cut off costs its policy its batch; of the rest only the last batch was missing.
    assert sorted(read) == [(1, 2), (2, 2)]
    assert not list((out / "records").glob("parts_*"))
    read.clear()
    replay(source, out, policies)
    assert not read


def test_other_traces_models_and_seeds_are_other_records(source, tmp_path):
    first = replay(source, tmp_path, ["bf16@1"])
    for options in ({"limit": 3}, {"seed": 1}):
        (record,) = replay(source, tmp_path, ["bf16@1"], **options)
        assert record["point"] != first[0]["point"]
    assert len(load_records(tmp_path / "records")) == 3


def test_a_policy_that_nobody_read_has_no_numbers(source, tmp_path):
    (record,) = replay(source, tmp_path, ["fp32/nvfp4@256"], limit=2)
    assert record["status"] == "not_exercised"
    assert "kl" not in record["metrics"]
    assert record["series"] is None
    assert "no stored state was read back in trace 0" in record["message"]


def test_a_policy_that_diverges_is_a_record_and_the_others_go_on(source, tmp_path, monkeypatch):
    expected = replay(source, tmp_path / "undisturbed", ["nvfp4+sr@1"])
    with monkeypatch.context() as patch:
        spoil(patch, "bf16@1", 20, lambda logits: logits * math.nan)
        lost, other = replay(source, tmp_path / "out", ["bf16@1", "nvfp4+sr@1"])
        assert without_times(other) == without_times(expected[0])
    assert (lost["status"], lost["metrics"]["diverged_at"], lost["series"]) == ("diverged", 20, None)
    assert "kl" not in lost["metrics"]
    assert lost["message"] == "at step 20, the logits are NaN or Inf"
    assert replay(source, tmp_path / "out", ["bf16@1"]) == [
        lost
    ]  # a result, and no failure to be tried again
    assert not list((tmp_path / "out" / "records").glob("parts_*"))


def command(*arguments):
    return CliRunner().invoke(app, ["eval", "--model", MODEL, *map(str, arguments)])


def test_the_table_and_json(source, tmp_path):
    given = ("--replay", source, "-p", "bf16@1", "-p", "fp32/nvfp4@256", "-o", tmp_path / "out")
    shown = command(*given)
    assert shown.exit_code == 0, shown.output
    for words in (
        "KL/token",
        "top-1 agreement",
        "answer log-odds",
        "lost / gained",
        "Mean KL by place",
        "not_exercised",
    ):
        assert words in shown.output
    ok, unread = [
        json.loads(line) for line in command(*given, "--json").stdout.splitlines() if line[0] == "{"
    ]
    assert (ok["status"], unread["status"]) == ("ok", "not_exercised")
    assert ok["kl_interval"][0] <= ok["kl"] <= ok["kl_interval"][1]
    assert "per_trace" not in ok
    assert CANARY not in shown.output
    lines = pandas.read_csv(tmp_path / "out" / "replay.csv")
    assert set(lines["policy"]) == {"bf16@1"}
    assert len(lines) == 6


REFUSED = {
    ("--data", "x.csv"): "data 'x.csv': expected not to be given with --replay",
    ("--temperature", "1.0"): "temperature 1.0: expected not to be given with --replay",
    ("-p", "nvfp5@1"): "nvfp5",
    ("--max-length", "30"): "at most 30 tokens",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_does_not_go_together_is_refused_before_anything_is_written(arguments, source, tmp_path):
    found = command("--replay", source, "-p", "bf16@1", "-o", tmp_path / "out", *arguments)
    assert found.exit_code != 0
    assert isinstance(found.exception, InputError)
    assert REFUSED[arguments] in str(found.exception)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="at least one -p POLICY"):
        raise command("--replay", source).exception


def test_a_run_with_its_text_is_a_source(tmp_path):
    options = {"items": 3, "log_samples_with_text": True, "generation": {"max_length": 400}}
    run_eval("reference:gated_delta", ["fp32@1"], ["running_arithmetic"], output=tmp_path / "run", **options)
    records = run_replay(
        "reference:gated_delta",
        tmp_path / "run" / "fp32@1",
        ["fp32@1", "int8@1"],
        output=tmp_path / "out",
        environment={},
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "fp32@1" / "generations.jsonl").read_text().splitlines()[1:]
    ]
    exact, rounded = (record["metrics"] for record in records)
    lines = sorted((row["prompt_tokens"], len(row["ids"])) for row in rows)
    assert sorted((line["prompt_tokens"], line["tokens"]) for line in exact["per_trace"]) == lines
    # Greedy responses are the likeliest tokens: of V tokens none other is likelier than e^-margin times that one, so
    # 1 <= p (1 + (V - 1) e^-margin).
    series = pandas.read_parquet(tmp_path / "out" / "records" / records[0]["series"])
    bound = np.log1p((vocabulary.VOCABULARY_SIZE - 1) * np.exp(-series["margin"]))
    assert (series["baseline_nll"] <= bound + 1e-12).all()
    assert exact["answers"]["traces"] == 3
    assert exact["answers"]["baseline_right"] == sum(
        json.loads(line)["exact_match"]
        for line in next((tmp_path / "run" / "fp32@1").glob("samples_*")).open()
    )
    assert rounded["kl"] > 0
