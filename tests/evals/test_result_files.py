"""Reading lm-eval's files: what lm-eval itself writes, every layout that a user may point at, and broken files."""

import copy
import json

import numpy as np
import pytest

from quantlab.errors import InputError
from quantlab.evals.answer_arrays import read_answers
from quantlab.evals.result_files import read_runs
from quantlab.evals.samples import without_text
from quantlab.records import complete_record, save_record
from tests.evals.result_folders import TIME, digest, quiz, sample, write_run


def answers(path, metric=None, filter_name=None):
    (run,) = read_runs(path).values()
    return read_answers(run, metric, filter_name)


@pytest.fixture(scope="module")
def of_lm_eval(tmp_path_factory):
    """A folder that lm-eval wrote itself: its dummy model, a choice task and a generative one with two filters."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.dummy import DummyLM
    from lm_eval.tasks import TaskManager

    class Offline(DummyLM):
        tokenizer = None  # lm-eval would ask the hub for one

    rows = [{"q": f"question {i}", "gold": i % 2} for i in range(6)]
    shared = {
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "metadata": {"version": 1.0},
    }
    choice = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "doc_to_choice": ["yes", "no"],
        "metric_list": [{"metric": "acc"}],
    }
    first = {"function": "take_first"}
    pattern = {"function": "regex", "regex_pattern": r"answer is (\w+)"}
    generate = {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [{"name": "strict", "filter": [pattern, first]}, {"name": "plain", "filter": [first]}],
    }
    tracker = EvaluationTracker(output_path=str(tmp_path_factory.mktemp("lm_eval")))
    found = lm_eval.simple_evaluate(
        Offline(),
        tasks=[{**shared, **choice}, {**shared, **generate}],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        evaluation_tracker=tracker,
        bootstrap_iters=0,
    )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name, lines in samples.items():
        tracker.save_results_samples(task_name=name, samples=copy.deepcopy(lines))  # it changes them
    return tracker.output_path, found, samples


def test_what_lm_eval_writes_is_read(of_lm_eval):
    folder, results, samples = of_lm_eval
    runs = read_runs(folder)
    assert set(runs) == {"choose", "write"}
    chosen = read_answers(runs["choose"])
    assert chosen.metric == "acc"
    assert chosen.correct.shape == (6, 1)
    assert chosen.correct.mean() == pytest.approx(results["results"]["choose"]["acc,none"])
    assert chosen.loglikelihoods is not None
    likelihoods = [[float(response[0]) for response in line["filtered_resps"]] for line in samples["choose"]]
    assert np.array_equal(chosen.loglikelihoods, likelihoods)
    assert chosen.length is None
    assert chosen.answered is None

    with pytest.raises(InputError, match="one of strict, plain"):
        read_answers(runs["write"])
    with pytest.raises(InputError, match="nearest: strict"):
        read_answers(runs["write"], filter_name="strct")
    written = read_answers(runs["write"], filter_name="strict")
    assert written.metric == "exact_match"
    assert (written.unit, written.loglikelihoods) == ("characters", None)
    assert written.length is not None
    assert written.answered is not None
    # The dummy model answers "lol" to everything, in which the pattern finds no answer.
    assert set(written.length.ravel()) == {3.0}
    assert set(written.answered.ravel()) == {0.0}
    assert set(read_answers(runs["write"], filter_name="plain").answered.ravel()) == {1.0}


def test_samples_without_their_text_say_the_same(of_lm_eval, tmp_path):
    folder, _, samples = of_lm_eval
    lines = [without_text(line) for line in samples["choose"]]
    write_run(tmp_path / "plain", lines, task="choose")
    assert "question" not in (tmp_path / "plain" / f"samples_choose_{TIME}.jsonl").read_text()
    before, after = read_answers(read_runs(folder)["choose"]), answers(tmp_path / "plain")
    assert np.array_equal(before.correct, after.correct)
    assert before.keys == after.keys
    assert before.prompt_hashes == after.prompt_hashes
    # lm-eval's own files hold log-likelihoods as text.
    assert np.array_equal(
        before.loglikelihoods, [[float(pair[0]) for pair in line["filtered_resps"]] for line in lines]
    )


def test_no_text_of_a_generated_answer_is_kept():
    values = {"exact_match": [True, False], "finish": ["stop", "length"], "tokens": [7, 9], "said": "secret"}
    kept = without_text(sample(0, values))
    assert "secret" not in json.dumps({name: value for name, value in kept.items() if name != "metrics"})
    assert {name: kept[name] for name in ("exact_match", "finish", "tokens")} == {
        name: values[name] for name in ("exact_match", "finish", "tokens")
    }
    assert "filtered_resps" not in kept


def test_every_path_to_one_run(tmp_path):
    folder = write_run(tmp_path / "out" / "some__m", quiz([1, 0, 1]))
    paths = [tmp_path / "out", folder, folder / f"results_{TIME}.json", folder / f"samples_quiz_{TIME}.jsonl"]
    for path in paths:
        found = answers(path)
        assert found.correct.ravel().tolist() == [1, 0, 1]
        assert found.run.model == "m"
        assert found.run.policy is None


def test_output_path_that_ends_in_json(tmp_path):
    """lm-eval then puts NAME_TIME.json beside the samples."""
    folder = write_run(tmp_path, quiz([1, 0]))
    (folder / f"results_{TIME}.json").rename(folder / f"mine_{TIME}.json")
    assert answers(folder).run.results is not None
    assert answers(folder / f"mine_{TIME}.json").correct.ravel().tolist() == [1, 0]


def test_repeats_lengths_and_ends(tmp_path):
    columns = {
        "tokens": [[10, 20], [30, 40]],
        "finish": [["stop", "length"], ["stop", "stop"]],
        "answered": [[True, False], [True, True]],
    }
    found = answers(write_run(tmp_path, quiz([[True, False], [1.0, 1.0]], **columns)))
    assert found.repeats == 2
    assert found.correct.tolist() == [[1, 0], [1, 1]]
    assert (found.length.tolist(), found.unit) == ([[10, 20], [30, 40]], "tokens")
    assert found.truncated.tolist() == [[0, 1], [0, 0]]
    assert found.answered.tolist() == [[1, 0], [1, 1]]


def test_records_of_quantlab_hold_the_same(tmp_path):
    documents = [
        {"task": "quiz", "hash": digest(f"doc {i}"), "doc_id": i, "correct": [True, i > 0], "tokens": [5, 6]}
        | {"finish": ["stop", "length"], "answered": [True, False], "loglikelihoods": [-1.0, -2.0]}
        for i in range(3)
    ]
    point = {"kind": "eval", "policy": "fp32@1", "model": "m"}
    record = complete_record(point, {"metrics": {"documents": documents}}, environment={})
    path = save_record(tmp_path, record)
    for place in (path, tmp_path):
        found = answers(place)
        assert found.correct.tolist() == [[1, 0], [1, 1], [1, 1]]
        assert (found.run.policy, found.run.model) == ("fp32@1", "m")
        assert found.truncated[0].tolist() == [0, 1]
        assert found.loglikelihoods[2].tolist() == [-1, -2]
    # A record keeps one metric under one name.
    assert answers(path, metric="acc").metric == "correct"


def test_equal_documents_are_kept_apart(tmp_path):
    lines = [sample(i, {"acc": value}, doc_hash="same") for i, value in enumerate([1, 0, 0])]
    found = answers(write_run(tmp_path, list(reversed(lines))))
    assert found.keys == [("same", 0), ("same", 1), ("same", 2)]
    assert found.correct.ravel().tolist() == [1, 0, 0]


def test_several_runs_are_a_question_to_the_user(tmp_path):
    write_run(tmp_path / "one", quiz([1]))
    write_run(tmp_path / "two", quiz([0]))
    with pytest.raises(InputError, match="one run of quiz, there are 2; give one of"):
        read_runs(tmp_path)
    write_run(tmp_path / "one", quiz([1]), task="other", time="2026-11-30T11-00-00")
    assert set(read_runs(tmp_path / "one")) == {"quiz", "other"}
    assert set(read_runs(tmp_path / "one", "other")) == {"other"}
    with pytest.raises(InputError, match=r"one of other, quiz \(nearest: quiz\)"):
        read_runs(tmp_path / "one", "quizz")


def broken(change):
    def write(folder):
        write_run(folder, quiz([1, 0, 1]))
        change(folder / f"samples_quiz_{TIME}.jsonl")
        return folder

    return write


def runs_with(*values, **changes):
    return lambda folder: write_run(folder, quiz(values, **changes))


BROKEN = {
    "no such place": (lambda folder: folder / "nothing", "an existing file or folder"),
    "an empty folder": (lambda folder: folder, "a results or samples file of lm-eval"),
    "an empty file": (broken(lambda file: file.write_text("")), "the file is empty"),
    "not JSON": (broken(lambda file: file.write_text("{nonsense")), "one JSON object a line; document 1"),
    "a line that is no object": (broken(lambda file: file.write_text("[1]\n")), "a JSON object in line 1"),
    "results without samples": (broken(lambda file: file.unlink()), "--log_samples"),
    "a truncated samples file": (
        broken(lambda file: file.write_text("".join(file.read_text().splitlines(True)[:2]))),
        "the 3 documents of its results, not 2",
    ),
    "samples under another name": (
        broken(lambda file: file.rename(file.with_name("mine.jsonl"))),
        "--log_samples",
    ),
    "results that are not JSON": (
        broken(lambda file: file.with_name(f"results_{TIME}.json").write_text("{")),
        "JSON in results_",
    ),
    "NaN": (runs_with(1, float("nan")), "a number from 0 to 1 in document 1"),
    "text for a metric": (runs_with(1, "right"), "a number from 0 to 1 in document 1"),
    "a metric above 1": (runs_with(1, 7.5), "a number from 0 to 1 in document 1"),
    "no repeat at all": (runs_with(1, []), "a number from 0 to 1 in document 1"),
    "repeats that differ": (runs_with([1, 0], [1, 0, 1]), "2 values, one a repeat, in document 1"),
    "tokens of another number of repeats": (
        runs_with([1, 0], [1, 1], tokens=[[5, 5], [5]]),
        "2 values, one a repeat",
    ),
    "tokens that are no count": (runs_with(1, 0, tokens=[5, -1]), "a finite number, at least 0"),
    "an unknown end": (runs_with(1, 0, finish=["stop", "tired"]), "stop or length"),
    "a document twice": (
        lambda folder: write_run(folder, [*quiz([1, 0]), *quiz([1])]),
        "each document once, doc_id 0 is there twice",
    ),
    "text with several repeats": (runs_with([1, "secret"]), "'<str>': expected a number from 0 to 1"),
    "a table for a metric": (runs_with({"secret": 1}), "'<dict>': expected a number from 0 to 1"),
    "a list as a document's number": (runs_with(1, 0, doc_id=[[0], [1]]), "number or text as doc_id"),
    "a table as a filter": (
        lambda folder: write_run(folder, [sample(0, {"acc": 1}, filter={"secret": 1})]),
        "text as the filter",
    ),
    "results that are no object": (
        broken(lambda file: file.with_name(f"results_{TIME}.json").write_text("[1]")),
        "one JSON object in results_",
    ),
    "no hash": (
        lambda folder: write_run(folder, [sample(0, {"acc": 1}, doc_hash=None)]),
        "a doc_hash in document 0",
    ),
    "no metric that says right or wrong": (
        lambda folder: write_run(folder, [sample(0, {"bleu": 0.5, "f1": 0.1})]),
        "one of bleu, f1",
    ),
    "a metric that one document lacks": (
        lambda folder: write_run(folder, [sample(0, {"acc": 1}), sample(1, {"f1": 1})]),
        "a number from 0 to 1 in document 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_one_line(tmp_path, case):
    write, expected = BROKEN[case]
    with pytest.raises(InputError) as error:
        answers(write(tmp_path))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("told", [{"quiz": {"no_answer": False}}, {}, None])
def test_a_metric_of_which_less_is_better_counts_no_loss(tmp_path, told):
    lines = [sample(i, {"correct": 1, "no_answer": 1}) for i in range(2)]
    folder = write_run(tmp_path, lines, higher_is_better=told)
    with pytest.raises(InputError, match="--metric 'no_answer': expected a metric of which more is better"):
        answers(folder, metric="no_answer")
    (folder / f"results_{TIME}.json").unlink()
    with pytest.raises(InputError, match="more is better"):
        answers(folder, metric="no_answer")


def test_the_task_says_which_metric_is_better_low(tmp_path):
    lines = [sample(i, {"acc": 1, "toxicity": 0.5, "bleu": 0.5}) for i in range(2)]
    folder = write_run(tmp_path, lines, higher_is_better={"quiz": {"toxicity": False, "bleu": True}})
    assert answers(folder, metric="bleu").metric == "bleu"
    with pytest.raises(InputError, match="more is better"):
        answers(folder, metric="toxicity")


def test_an_unknown_metric_is_named(tmp_path):
    with pytest.raises(InputError, match=r"--metric 'exact': expected one of exact_match"):
        answers(write_run(tmp_path, quiz([1, 0])), metric="exact")


def test_a_named_metric_is_taken(tmp_path):
    folder = write_run(tmp_path, [sample(i, {"acc": 1, "acc_norm": i}) for i in range(2)])
    assert answers(folder).correct.ravel().tolist() == [1, 1]
    assert answers(folder, metric="acc_norm").correct.ravel().tolist() == [0, 1]


def test_other_files_named_by_hand(tmp_path):
    stray = tmp_path / "notes.json"
    stray.write_text("{}")
    other = tmp_path / "lines.jsonl"
    other.write_text("{}\n")
    for path, expected in ((stray, "a results or samples file"), (other, "samples_TASK_TIME.jsonl")):
        with pytest.raises(InputError, match=expected):
            read_runs(path)
    drift = complete_record({"kind": "drift", "policy": "fp32@1"}, {}, environment={})
    with pytest.raises(InputError, match=r"an evaluation with documents \(kind drift"):
        read_runs(save_record(tmp_path, drift))
    with pytest.raises(InputError, match="a results or samples file"):
        read_runs(tmp_path / "notes.json")
