"""The lm-eval model, whole evaluations, and what is refused before anything is written."""

import json
import warnings

import pytest

from quantlab.errors import InputError
from quantlab.evals.model import QuantlabLM
from quantlab.evals.point import run_points
from quantlab.evals.run import run_eval
from quantlab.evals.task_settings import Sampling
from tests.evals import made_up

TASK = "quantlab_gpqa_diamond_mc"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def loglikelihoods(record):
    return [value for document in record["metrics"]["documents"] for value in document["loglikelihoods"]]


def test_an_evaluation_writes_lm_evals_results_with_the_policy_inside(folder, table, tmp_path):
    policies = ["fp32@1", "fp32/nvfp4@16", "nvfp4@1"]
    records = run_eval(folder, policies, [TASK], data=table, output=tmp_path / "out", batch_size=2)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["fp32--nvfp4@16", "fp32@1", "nvfp4@1"]
    for record, policy in zip(records, policies, strict=True):
        assert record["status"] == "ok"
        _, file, samples = sorted((tmp_path / "out" / policy.replace("/", "--")).iterdir())
        assert samples.name == file.name.replace("results_", f"samples_{TASK}_").replace(".json", ".jsonl")
        text, lines = file.read_text(), samples.read_text()
        documents = [json.loads(line) for line in lines.splitlines()]
        scored = [pair[0] for document in documents for pair in document["filtered_resps"]]
        assert scored == loglikelihoods(record)
        assert {key for document in documents for key in document} == {
            *("doc_id", "doc_hash", "prompt_hash", "target_hash"),
            *("filter", "metrics", "acc", "filtered_resps"),
        }
        results = json.loads(text)
        config = results["config"]
        assert config["policy"] == policy == record["point"]["policy"]
        assert config["scoring"] == "decode"
        assert config["exercised"] == record["metrics"]["exercised"]
        assert config["exercised"]["checkpoint"] > 5
        assert all(set(layers) == {"0", "1"} for layers in config["op_hits"].values())
        assert results["results"][TASK]["acc,none"] == record["metrics"]["tasks"][TASK]["acc"]
        assert record["metrics"]["tasks"][TASK]["n"] == 3
        assert "Ostrelle" not in text + lines  # no question text on disk
        assert "Ostrelle" not in json.dumps(record)
    exact, dual, rounded = map(loglikelihoods, records)
    assert len(exact) == 12
    change = [max(abs(a - b) for a, b in zip(exact, other, strict=True)) for other in (dual, rounded)]
    assert change[0] > 1e-3
    assert change[1] > 1e-3
    hashes = [[document["hash"] for document in record["metrics"]["documents"]] for record in records]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0])) == 3


def test_rules_for_layers_are_a_policy_too(folder, table, tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text('default = "fp32@1"\n[[rule]]\nlayers = 1\npolicy = "nvfp4@1"\n')
    (record,) = run_eval(folder, [path], [TASK], data=table, output=tmp_path / "out", limit=1)
    assert record["point"]["policy"] == "fp32@1; layers 1: nvfp4@1"
    (written,) = (tmp_path / "out").iterdir()
    assert written.name.startswith("mixed-")
    (file,) = written.glob("results_*.json")
    config = json.loads(file.read_text())["config"]
    assert config["coverage"] == {"0": {"fp32@1": 1.0}, "1": {"nvfp4@1": 1.0}}
    assert config["touched"] == {"0": 1.0, "1": 1.0}
    with pytest.raises(InputError, match=r"^scoring .*never touches"):
        run_eval(folder, [path], [TASK], data=table, output=tmp_path / "none", scoring="prefill")


@pytest.mark.slow
def test_points_share_a_model_and_agree_with_whole_evaluations(table, tmp_path):
    point = {
        "kind": "eval",
        "model": "builtin:tiny-mamba2",
        "tasks": [TASK],
        "data": str(table),
        "batch_size": 3,
    }
    points = [{**point, "policy": policy} for policy in ("fp32@1", "int8@4")]
    told = []
    found = list(run_points(points, threads=1, on_progress=lambda *a: told.append(a)))
    assert [p for p, _ in found] == points
    assert all(record["point"] == p and record["status"] == "ok" for p, record in found)
    assert told[-1] == (2, 2)
    for key in ("tmp", "tasks/quantlab"):  # a record travels: no folder of this machine in it
        assert key not in json.dumps(found[0][1]["metrics"]["lm_eval"]["config"])
        assert key not in json.dumps(
            found[0][1]["metrics"]["lm_eval"]["configs"][TASK]["metadata"]["config_source"]
        )
    again = list(run_points(points[:1], threads=1, on_progress=lambda *_: None))
    assert loglikelihoods(again[0][1]) == loglikelihoods(found[0][1])
    with pytest.raises(InputError, match="differ in the policy only"):
        list(run_points([points[0], {**points[1], "limit": 1}], threads=1, on_progress=lambda *_: None))
    with pytest.raises(InputError, match="builtin:tiny-gated-delta"):
        list(run_points([{**points[0], "model": "builtin:tiny"}], threads=1, on_progress=lambda *_: None))


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "nowhere"},
        {"policies": ["nvfp5@1"]},
        {"policies": []},
        {"tasks": ["quantlab_gpqa_diamant"]},
        {"tasks": []},
        {"data": None},
        {"data": "missing.csv"},
        {"scoring": "parallel"},
        {"scoring": "prefill", "policies": ["nvfp4@1"]},
        {"batch_size": "auto"},
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(folder, table, tmp_path, wrong, monkeypatch):
    from lm_eval import tasks

    # lm-eval's own index takes a quarter of a minute to read; that the name is in neither is the point here.
    real = tasks.TaskManager
    monkeypatch.setattr(
        tasks, "TaskManager", lambda **options: real(**{**options, "include_defaults": False})
    )
    arguments = {"model": folder, "policies": ["fp32@1"], "tasks": [TASK], "data": table} | wrong
    with pytest.raises(InputError) as caught:
        run_eval(output=tmp_path / "out", **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_readable_model_is_refused(folder, table, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(InputError, match="readable config"):
        run_eval(broken, ["fp32@1"], [TASK], data=table, output=tmp_path / "out")
    shutil.copy(folder / "config.json", broken)
    weights = (folder / "model.safetensors").read_bytes()
    for text in (weights[:500], weights[:-8], b""):
        (broken / "model.safetensors").write_bytes(text)
        with pytest.raises(InputError, match="readable weights"):
            run_eval(broken, ["fp32@1"], [TASK], data=table, output=tmp_path / "out")
    shutil.copy(folder / "model.safetensors", broken)
    for file in broken.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="readable tokenizer"):
        run_eval(broken, ["fp32@1"], [TASK], data=table, output=tmp_path / "out")
    (broken / "model.safetensors").unlink()
    with pytest.raises(InputError, match="weights"):
        run_eval(broken, ["fp32@1"], [TASK], data=table, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def requests(lm, pairs, kind="loglikelihood"):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=("t", i, 1))
        for i, pair in enumerate(pairs)
    ]


def test_prefill_scoring_is_lm_evals_own_and_fp32_decode_agrees_with_it(folder):
    from lm_eval.models.huggingface import HFLM

    pairs = [
        ("The keeper of Hob Valley", " rings"),
        ("The keeper of Hob Valley", " sleeps"),
        ("A bell", " is heard"),
    ]
    stock = HFLM(str(folder), device="cpu", softmax_dtype="float32", batch_size=2)
    expected = stock.loglikelihood(requests(stock, pairs), disable_tqdm=True)
    lm = QuantlabLM(str(folder), scoring="prefill", device="cpu", batch_size=2)
    assert lm.loglikelihood(requests(lm, pairs), disable_tqdm=True) == expected
    for scoring in ("decode", "boundary"):
        lm = QuantlabLM(str(folder), scoring=scoring, device="cpu", batch_size=2)
        found = lm.loglikelihood(requests(lm, pairs), disable_tqdm=True)
        # Seven tokens at most, each with the float32 noise derived in test_scoring.py (2e-5).
        assert max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)) < 7 * 2e-5


def test_generation_runs_under_the_policy(folder):
    prompts = [
        ("The keeper of Hob Valley", {"until": ["\n\n"], "max_gen_toks": 12}),
        ("A bell", {"until": ["\n\n"], "max_gen_toks": 12}),
    ]
    exact = QuantlabLM(str(folder), "fp32@1", device="cpu", batch_size=2)
    alone = QuantlabLM(str(folder), "fp32@1", device="cpu", batch_size=1)
    texts = exact.generate_until(requests(exact, prompts, "generate_until"), disable_tqdm=True)
    assert texts == alone.generate_until(requests(alone, prompts, "generate_until"), disable_tqdm=True)
    coarse = QuantlabLM(str(folder), "e2m1@1", device="cpu", batch_size=2)
    assert coarse.generate_until(requests(coarse, prompts, "generate_until"), disable_tqdm=True) != texts
    assert coarse.get_model_info()["exercised"]["checkpoint"] >= 10


def test_nothing_is_truncated(folder):
    lm = QuantlabLM(str(folder), max_length=16, device="cpu")
    with pytest.raises(InputError, match="at most 16 tokens"):
        lm.loglikelihood(requests(lm, [("A context of more than sixteen bytes", " x")]), disable_tqdm=True)
    options = {"until": ["\n"], "max_gen_toks": 12}
    with pytest.raises(InputError, match="at most 16 tokens"):
        lm.generate_until(requests(lm, [("Ten bytes.", options)], "generate_until"), disable_tqdm=True)


def test_a_policy_that_is_hardly_exercised_warns_and_an_untouched_one_fails(folder):
    lm = QuantlabLM(str(folder), "nvfp4@16", scoring="boundary", device="cpu")
    with pytest.warns(UserWarning, match="only 1 rounded store"):
        lm.loglikelihood(requests(lm, [("A bell", " rings")]), disable_tqdm=True)
    assert "only 1 rounded store" in lm.get_model_info()["warning"]
    lm.use_policy("nvfp4@1")
    # One token of continuation: its probability comes from the prefill, no state is ever read.
    with pytest.raises(InputError, match="touched nothing"):
        lm._loglikelihood_tokens([(None, [1, 2, 3], [4])], disable_tqdm=True)


def test_the_model_argument_text_of_lm_eval_carries_a_policy(folder):
    from lm_eval.api.registry import get_model

    from quantlab.evals import plugin

    plugin.register()
    text = f"pretrained={folder},policy=fp32/nvfp4@16:buffer=bf16:key_read=checkpoint,scoring=decode,seed=4"
    options = {"batch_size": "3", "device": "cpu"}
    if "mamba2" in str(folder):
        text = text.replace(":key_read=checkpoint", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm = get_model("quantlab").create_from_arg_string(text, options)
    assert lm.get_model_info()["policy"].startswith("fp32/nvfp4@16:buffer=bf16")
    assert lm.get_model_info()["policy_seed"] == 4
    assert lm.batch_size == 3


def never_scored(*_, **__):
    raise AssertionError("scored")


def test_a_file_in_the_way_is_refused_before_a_document_is_scored(folder, table, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.simple_evaluate", never_scored)
    output = tmp_path / "out"
    output.write_text("a file")
    with pytest.raises(InputError, match="file is in the way"):
        run_eval(folder, ["fp32@1"], [TASK], data=table, output=output)
    assert [path.name for path in tmp_path.iterdir() if path != table] == ["out"]


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)  # a delta rule fits every policy
def test_a_policy_that_does_not_fit_is_refused_before_a_document_is_scored(
    folder, table, tmp_path, monkeypatch
):
    monkeypatch.setattr("lm_eval.simple_evaluate", never_scored)
    policies = ["fp32@1", "fp32@4:contents=raw"]
    with pytest.raises(InputError, match="delta rule only"):
        run_eval(folder, policies, [TASK], data=table, output=tmp_path / "out")
    assert [path for path in tmp_path.iterdir() if path != table] == []


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
def test_a_file_where_a_policy_goes_is_refused_before_the_first_one_runs(
    folder, table, tmp_path, monkeypatch
):
    monkeypatch.setattr("lm_eval.simple_evaluate", never_scored)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "nvfp4@1").write_text("notes")
    with pytest.raises(InputError, match=r"output .*nvfp4@1': expected a folder"):
        run_eval(folder, ["fp32@1", "nvfp4@1"], [TASK], data=table, output=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["nvfp4@1"]


GEN = "quantlab_gpqa_diamond_gen"


@pytest.fixture
def invented(tmp_path):
    return made_up.write(tmp_path / "invented.csv", made_up.rows(4, words=10))


@pytest.mark.parametrize("with_text", [False, True])
def test_no_file_holds_a_question_or_a_choice_unless_that_is_asked_for(folder, invented, tmp_path, with_text):
    records = run_eval(
        folder,
        ["fp32@1", "nvfp4@1"],
        [TASK, GEN],
        data=invented,
        output=tmp_path / "out",
        limit=2,
        sampling=Sampling(repeats=2, max_gen_toks=8),
        log_samples_with_text=with_text,
    )
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    names = sorted(file.name.rsplit("_", 1)[0] for file in files)
    assert names == sorted(
        ["generations.jsonl", "record", "results", f"samples_{TASK}", f"samples_{GEN}"] * 2
    )
    holding = {file.name.rsplit("_", 1)[0] for file in files if made_up.CANARY.encode() in file.read_bytes()}
    assert holding == ({f"samples_{TASK}", f"samples_{GEN}"} if with_text else set())
    assert made_up.CANARY not in json.dumps(records)
    for record in records:
        assert record["point"]["repeats"] == 2
        assert record["point"]["max_gen_toks"] == 8
        by_task = {
            task: [d for d in record["metrics"]["documents"] if d["task"] == task] for task in (TASK, GEN)
        }
        assert [len(document["correct"]) for document in by_task[GEN]] == [2, 2]
        assert [document["hash"] for document in by_task[GEN]] == [
            document["hash"] for document in by_task[TASK]
        ]
    # What a later comparison reads, and that it belongs to these documents.
    for file in (tmp_path / "out" / "fp32@1").glob(f"samples_{GEN}_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [{key: line[key] for key in ("doc_id", "doc_hash", "correct")} for line in lines]
        documents = [d for d in records[0]["metrics"]["documents"] if d["task"] == GEN]
        assert kept == [
            {"doc_id": d["doc_id"], "doc_hash": d["hash"], "correct": d["correct"]} for d in documents
        ]
        assert ("doc" in lines[0]) == with_text


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
def test_requests_are_those_of_the_data_that_is_given(folder, invented, tmp_path):
    """lm-eval could keep requests by the task's name alone (test_traps_tasks.py)."""
    other = made_up.write(tmp_path / "other.csv", made_up.rows(4, words=10, seed=1))
    hashes = [
        {
            d["hash"]
            for r in run_eval(folder, ["fp32@1"], [TASK], data=data, output=tmp_path / "o", limit=1)
            for d in r["metrics"]["documents"]
        }
        for data in (invented, other)
    ]
    assert hashes[0].isdisjoint(hashes[1])


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sampling": Sampling(max_gen_toks=1 << 20)},
            r"^max_gen_toks 1048576: expected at most \d+: the model's context",
        ),
        ({"sampling": Sampling(temperature=0)}, "all the same"),
        ({"tasks": [TASK], "sampling": Sampling(repeats=2)}, "at least one task that generates"),
        ({"tasks": ["state_recall"]}, "tasks that read local data"),
        ({"data": "hub", "tasks": ["quantlab_gsm8k_gen"]}, "GSM8K in a CSV"),
        ({"tasks": ["quantlab_gsm8k_gen"]}, "missing: answer"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_a_document_is(
    folder, invented, tmp_path, monkeypatch, change, words
):
    monkeypatch.setattr("lm_eval.simple_evaluate", never_scored)
    arguments = {"tasks": [GEN], "data": invented, "output": tmp_path / "out"} | change
    with pytest.raises(InputError, match=words):
        run_eval(folder, ["fp32@1"], **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
def test_a_chat_template_wraps_what_is_asked(folder, invented, tmp_path):
    import shutil

    settings = {"tasks": [GEN], "data": invented, "limit": 1, "log_samples_with_text": True}
    settings |= {"chat_template": True, "sampling": Sampling(repeats=2, max_gen_toks=16)}
    with pytest.raises(InputError, match="has a chat template"):
        run_eval(folder, ["fp32@1"], output=tmp_path / "out", **settings)
    chatty = shutil.copytree(folder, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("<user>{{ messages[0]['content'] }}<model>")
    (record,) = run_eval(chatty, ["fp32@1"], output=tmp_path / "out", **settings)
    assert record["point"]["chat_template"] is True
    (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    prompt = json.loads(file.read_text())["arguments"][0][0]
    assert prompt.startswith("<user>Exactly one of the choices")
    assert prompt.endswith("Answer: A/B/C/D<model>")


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
def test_the_command_line_shows_what_sampled_answers_amount_to(folder, invented, tmp_path):
    from typer.testing import CliRunner

    from quantlab.cli import app

    command = f"eval --model {folder} --tasks {GEN} --data {invented} --limit 1 -o {tmp_path / 'out'} --json"
    done = CliRunner().invoke(app, f"{command} --repeats 2 --max-gen-toks 4 --temperature 0.7 --top-p 0.9")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row[f"{GEN} avg_at_k"] == 0.0
    assert row[f"{GEN} no_answer"] == 1.0
    (file,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(file.read_text())["configs"][GEN]
    assert config["repeats"] == 2
    wanted = {"until": [], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_gen_toks": 4}
    assert config["generation_kwargs"] == wanted


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
def test_a_seed_changes_no_document_and_a_choice_seed_changes_the_choices(folder, invented, tmp_path):
    def hashes(**seeds):
        (record,) = run_eval(folder, ["fp32@1"], [TASK], data=invented, output=tmp_path / "out", **seeds)
        return [document["hash"] for document in record["metrics"]["documents"]], record["point"]

    first, point = hashes()
    assert "choice_seed" not in point  # points of earlier runs keep their names
    assert hashes(seed=5)[0] == first
    other, point = hashes(choice_seed=5)
    assert point["choice_seed"] == 5
    assert other != first
