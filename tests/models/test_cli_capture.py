"""``quantlab capture`` and ``quantlab drift --model``: files replay, rows agree with Python, refusals are one line."""

import json
import random
import sys
from pathlib import Path

import pandas
import pytest
import torch

from quantlab import cli
from quantlab.drift import run_drift
from quantlab.models import capture, closed_loop
from quantlab.models.tiny import byte_tokenizer
from quantlab.records import load_records

ONE = pytest.mark.parametrize("kind", ["mamba2"], indirect=True)
MODEL = "builtin:tiny-mamba2"
PREFILL, STEPS = 7, 8
SIZE = ["--prefill", str(PREFILL), "--steps", str(STEPS), "--sequences", "2"]
POLICIES = ["fp32@16", "nvfp4@1"]
PIECE = 5  # bytes of the text that an output may not hold one behind the other


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Lower-case letters with nothing of a word in them; a byte is a token."""
    letters = random.Random(4)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(letters.choices("bcdfghjklmnpqrtvwxz", k=64)))
    return path


@pytest.fixture(scope="module")
def ids(text):
    """(2, PREFILL + STEPS + 1): consecutive pieces of the text."""
    tokens = byte_tokenizer()(text.read_text())["input_ids"]
    return torch.tensor(tokens[: 2 * (PREFILL + STEPS + 1)]).view(2, -1)


@pytest.fixture
def quantlab(monkeypatch, capsys):
    """The command line in this process: (exit status, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["quantlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return (left.value.code or 0, *capsys.readouterr())

    return run


def assert_holds_none_of(text, folder, *printed):
    data = text.read_bytes()
    pieces = {data[at : at + PIECE] for at in range(len(data) - PIECE)}
    ids = byte_tokenizer()(text.read_text())["input_ids"][:PIECE]
    tokens = [json.dumps(ids)[1:-1].encode(), torch.tensor(ids).numpy().tobytes()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    contents = [path.read_bytes() for path in files] + [out.encode() for out in printed]
    contents += [pandas.read_parquet(path).to_csv().encode() for path in files if path.suffix == ".parquet"]
    for content in contents:
        assert not any(piece in content for piece in (*tokens, *pieces))
    assert not any(str(text.parent) in str(content) for content in contents)


@ONE
def test_captured_files_replay_offline(model, ids, text, quantlab, tmp_path):
    out = tmp_path / "captured"
    command = ["capture", "--model", MODEL, "--text", text, *SIZE, "-o", out]
    status, printed, errors = quantlab(*command, "--json")
    assert (status, errors) == (0, "")
    # The pieces of a capture have no token to predict behind them.
    pieces = ids.reshape(-1)[: 2 * (PREFILL + STEPS)].view(2, -1)
    streams = capture(model, pieces, prefill=PREFILL, steps=STEPS)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["hash"] for row in rows] == [stream.hash for stream in streams.values()]
    assert sorted(path.name for path in out.iterdir()) == ["index.json", *(row["file"] for row in rows)]
    rules = tmp_path / "rules.toml"
    rules.write_text('default = "fp32@1"\n[[rule]]\nlayers = 1\npolicy = "nvfp4@4"\n')
    status, printed, _ = quantlab(
        "drift", "--stream", out / "layer-1.safetensors", "-p", "nvfp4@4", "-p", rules, "--json"
    )
    found = [json.loads(line) for line in printed.splitlines()]
    result = run_drift(streams[1], ["nvfp4@4"])
    metrics = result.metrics(result.runs[0])
    for row in found:  # the file knows which layer it is, so that the rule holds
        assert row["stream_hash"] == streams[1].hash
        for name in (
            "state_error",
            "read_error",
            "output_error",
            "predicted_output_error",
            "bytes_per_token",
        ):
            assert row[name] == metrics[name]
    assert_holds_none_of(text, out, printed)


def test_the_same_capture_again_does_nothing_and_another_one_is_refused(
    text, quantlab, tmp_path, monkeypatch
):
    out = tmp_path / "captured"
    command = ["capture", "--model", MODEL, "--text", text, "--prefill", "3", "--steps", "2", "--layers", "1"]
    assert quantlab(*command, "-o", out)[0] == 0
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(
        sys.modules["quantlab.models.capture"], "capture", lambda *_, **__: pytest.fail("ran")
    )
    assert quantlab(*command, "-o", out)[0] == 0
    for other in (["--steps", "3"], ["--layers", "0-1"], ["-p", "bf16@1"], ["--seed", "1"]):
        status, _, error = quantlab(*command, *other, "-o", out)
        assert status == 2
        assert "the same capture; something else is there" in error
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@ONE
def test_closed_loop_rows_records_and_resumption(model, ids, text, quantlab, tmp_path, monkeypatch):
    loop = ["drift", "--model", MODEL, "--text", text, *SIZE]
    out = tmp_path / "out"
    options = [part for policy in POLICIES for part in ("-p", policy)]
    status, printed, errors = quantlab(*loop, *options, "-o", out, "--json")
    assert (status, errors) == (0, "")
    found = closed_loop(model, ids, POLICIES, prompt=PREFILL, steps=STEPS)
    rows = [json.loads(line) for line in printed.splitlines()]
    for row, run in zip(rows, found.runs, strict=True):
        assert (row["policy"], row["status"]) == (run.policy, "ok")
        for name in (
            "kl",
            "nll",
            "baseline_nll",
            "top1_agreement",
            "first_divergence",
            "exercised",
            "bytes_per_token",
        ):
            assert row[name] == run.metrics[name]
        assert sum(part["tokens"] for part in row["agreement_by_margin"]) == row["tokens"] == 2 * STEPS
    table = pandas.read_csv(out / "closed_loop.csv")
    pandas.testing.assert_frame_equal(
        table.astype({"top1": "boolean"}), found.table, check_dtype=False, rtol=1e-15
    )
    assert {record["kind"] for record in load_records(out / "records")} == {"closed_loop"}

    # One policy more: the others are read back. All there: the model is not even loaded.
    texts = sys.modules["quantlab.models.texts"]
    load, loops = texts.load_weights, sys.modules["quantlab.models.closed_loop"]
    ran = []
    monkeypatch.setattr(loops, "closed_loop", lambda m, i, p, **o: ran.extend(p) or closed_loop(m, i, p, **o))
    status, again, _ = quantlab(*loop, *options, "-p", "bf16@1", "-o", out, "--json")
    assert [str(policy) for policy in ran] == ["bf16@1"]
    assert again.splitlines()[:2] == printed.splitlines()
    monkeypatch.setattr(texts, "load_weights", lambda _: pytest.fail("loaded"))
    status, again, _ = quantlab(*loop, *options, "-o", out)
    assert status == 0
    assert "Top-1 agreement by margin" in again
    monkeypatch.setattr(texts, "load_weights", load)
    assert_holds_none_of(text, out, printed, again)


@pytest.mark.slow
def test_a_report_takes_the_records(text, quantlab, tmp_path):
    options = ["-p", "nvfp4@1", "--prefill", "5", "--steps", "4", "-o", tmp_path]
    assert quantlab("drift", "--model", MODEL, "--text", text, *options)[0] == 0
    assert quantlab("report", tmp_path)[0] == 0
    (row,) = pandas.read_csv(tmp_path / "table.csv").to_dict("records")
    assert (row["kind"], row["policy"], row["tokens"]) == ("closed_loop", "nvfp4@1", 4)
    assert_holds_none_of(text, tmp_path)


def test_free_running_needs_no_text_behind_the_prompt(text, quantlab):
    loop = [
        "drift",
        "--model",
        MODEL,
        "--text",
        text,
        "--prefill",
        "60",
        "--steps",
        "6",
        "-p",
        "nvfp4@1",
        "--json",
    ]
    status, printed, _ = quantlab(*loop, "--mode", "free")
    assert status == 0
    row = json.loads(printed)
    (first,) = row["first_divergence"]
    assert row["tokens"] == (first or 6)
    assert row["nll"] is None
    status, _, error = quantlab(*loop)
    assert (status, error.count("\n")) == (2, 1)
    assert "at least 67 tokens, 1 x (a prefill of 60, 6 steps and one to predict); it has 64" in error


@pytest.fixture(scope="module")
def places(text, tmp_path_factory):
    """What bad commands name: a model of attention only, one without weights, texts that are none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("places")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **size)).save_pretrained(folder / "attention")
    byte_tokenizer().save_pretrained(folder / "attention")
    (folder / "empty").mkdir()
    (folder / "latin1.txt").write_bytes(b"caf\xe9" * 20)
    (folder / "taken").write_text("mine")
    return folder


def test_an_output_that_cannot_be_is_refused_before_the_work(text, quantlab, tmp_path, monkeypatch):
    never = lambda *_, **__: pytest.fail("it went to work")  # noqa: E731
    for name in ("capture", "closed_loop"):
        monkeypatch.setattr(sys.modules[f"quantlab.models.{name}"], name, never)
    size = ["--model", MODEL, "--text", text, "--prefill", "5", "--steps", "5", "-o"]
    assert quantlab("capture", *size, "/proc/nothing/x")[0] == 2
    assert quantlab("drift", "-p", "nvfp4@1", *size, "/proc/nothing/x")[0] == 2
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(sys.modules["quantlab.models.texts"], "load_weights", never)
    assert quantlab("capture", *size, tmp_path)[0] == 2


CAPTURE = f"capture --model {MODEL} --text TEXT --prefill 5 --steps 5 -o OUT"
LOOP = f"drift --model {MODEL} --text TEXT --prefill 5 --steps 5 -o OUT -p nvfp4@1"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (f"{CAPTURE} --layers 2", "layers 2: expected recurrent layers, which are 0-1"),
        (f"{CAPTURE} --layers 0-x", "layers '0-x': expected"),
        (f"{CAPTURE} --steps 99", "at least 104 tokens, 1 x (a prefill of 5 and 99 steps); it has 64"),
        (f"{CAPTURE} --steps 0", "--steps"),
        (f"{CAPTURE} --text nowhere.txt", "text 'nowhere.txt': expected a text file that can be read"),
        (f"{CAPTURE} --text PLACES/latin1.txt", "expected UTF-8 text, but byte 3 is not"),
        (f"{CAPTURE} --model nowhere", "model 'nowhere': expected a folder"),
        (f"{CAPTURE} --model PLACES/empty", "expected weights in the folder"),
        (f"{CAPTURE} --model PLACES/attention", "expected a model with recurrent layers"),
        (f"{CAPTURE} --model builtin:tiny-mamba3", "nearest: builtin:tiny-mamba2"),
        (f"{CAPTURE} -o PLACES/taken", "something else is there"),
        (f"{CAPTURE} -o PLACES", "something else is there"),
        (f"{CAPTURE} -o /proc/nothing/x", "output '/proc/nothing"),
        (f"{CAPTURE} -p fp33@1", "policy 'fp33@1'"),
        ("capture --text TEXT -o OUT", "--model: missing"),
        (f"{LOOP} --alpha 0.9", "alpha 0.9: expected no --model beside it"),
        (f"{LOOP} --stream x", "stream 'x': expected no --model beside it"),
        (f"{LOOP} --attribute", "attribute True: expected no --model beside it"),
        (f"{LOOP} --mode both", "mode 'both': expected one of forced, free"),
        (f"{LOOP} --sequences 6", "at least 66 tokens, 6 x (a prefill of 5, 5 steps and one to predict)"),
        (f"{LOOP} --model PLACES/attention", "expected a model with recurrent layers"),
        (f"{LOOP} -p fp33@1", "policy 'fp33@1'"),
        (f"{LOOP} -o PLACES/taken", "expected a folder, but a file is in the way"),
        (f"{LOOP} -o /proc/nothing/x", "output '/proc/nothing"),
        (f"{LOOP} -p PLACES/none.toml", "policy"),
        (f"drift --model {MODEL} -p nvfp4@1", "text None: expected a text file"),
        (f"drift --model {MODEL} --text TEXT", "policy None: expected at least one -p POLICY"),
        ("drift --text TEXT", "--model beside it"),
        ("drift --mode free", "mode 'free': expected --model beside it"),
        ("drift --prefill 4", "prefill 4: expected --model beside it"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(command, says, text, places, quantlab, tmp_path):
    out = tmp_path / "out"
    named = {"TEXT": text, "PLACES": places, "OUT": out}
    before = sorted(places.iterdir())
    for name, path in named.items():
        command = command.replace(name, str(path))
    status, printed, error = quantlab(*command.split())
    assert (status, printed) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not list(tmp_path.iterdir())
    assert sorted(places.iterdir()) == before
    assert Path(places / "taken").read_text() == "mine"
