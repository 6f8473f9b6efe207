"""k responses to a document: what they amount to, alone and through lm-eval's pipeline."""

import json
from fractions import Fraction
from itertools import combinations, product

import pytest
from lm_eval.api.model import LM

from quantlab.evals.generated import Generated
from quantlab.evals.generation_metrics import (
    aime_results,
    ends,
    letter_results,
    majority,
    measures,
    number_results,
    pass_at_k,
    total,
)
from quantlab.evals.plugin import TASK_FOLDER
from quantlab.evals.samples import record_documents, without_text
from tests.evals import made_up

DOCUMENT = {"question": "?", "choices": ["p", "q", "r", "s"], "answer": 1}


def test_numbers_of_one_document_by_hand():
    responses = [
        Generated("Answer: B", 10, "stop"),
        Generated("Answer: A", 30, "stop"),
        Generated("It could be", 64, "length"),
        Generated("I am sure. Answer: B", 20, "stop"),
    ]
    assert letter_results(DOCUMENT, [responses]) == {
        "avg_at_k": 0.5,
        "majority_at_k": 1.0,
        "pass_at_k": 1.0,
        "no_answer": 0.25,
        "truncated": 0.25,
        "mean_tokens": 31.0,
        "correct": [True, False, False, True],
        "answered": [True, True, False, True],
        "finish": ["stop", "stop", "length", "stop"],
        "tokens": [10, 30, 64, 20],
    }


def test_a_model_that_counts_no_tokens_is_given_none():
    found = letter_results(DOCUMENT, [["Answer: B", "Answer: C"]])
    assert found["correct"] == [True, False]
    assert {"truncated", "mean_tokens", "finish", "tokens"}.isdisjoint(found)
    mixed = letter_results(DOCUMENT, [["Answer: B", Generated("Answer: C", 1, "stop")]])
    assert "mean_tokens" not in mixed
    assert letter_results(DOCUMENT, ["Answer: B"])["avg_at_k"] == 1  # behind take_first


def test_a_response_that_was_cut_off_was_not_handed_in():
    thinking = "Perhaps the answer is B. Let me check"  # the prompt opened the thought
    for cut in (thinking, f"<think>{thinking}", "Answer: B"):
        found = letter_results(DOCUMENT, [[Generated(cut, 9, "length")]])
        assert (found["answered"], found["truncated"]) == ([False], 1.0)
    after = Generated(f"{thinking}</think>Answer: C", 9, "length")
    assert letter_results(DOCUMENT, [[after]])["answered"] == [True]
    # Without the reason for its end: another response shows that the model thinks first.
    found = letter_results(DOCUMENT, [[thinking, "x</think>Answer: B"]])
    assert found["answered"] == [False, True]


def test_numbers_are_compared_as_numbers():
    document = {"question": "?", "answer": "18"}
    found = number_results(document, [["Answer: $18.00", "#### 18", r"\boxed{17}", "18", "Answer: 2000"]])
    assert found["correct"] == [True, True, False, False, False]
    assert found["answered"] == [True, True, True, False, True]
    assert aime_results(document, [["Answer: 018", "Answer: 2000"]])["answered"] == [True, False]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_majority_is_the_mean_over_all_fair_ways_to_break_ties(k):
    for answers in product(["A", "B", "C", None], repeat=k):
        # By definition: every order of preference among the letters is as likely as another.
        votes = {letter: answers.count(letter) for letter in "ABC" if letter in answers}
        top = [letter for letter, count in votes.items() if count == max(votes.values())]
        expected = Fraction(top.count("B"), max(1, len(top)))
        assert majority(answers, "B") == pytest.approx(float(expected), abs=0)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (5, 2), (6, 6)])
def test_pass_at_k_counts_the_draws_that_hold_a_correct_response(n, k):
    for correct in range(n + 1):
        draws = list(combinations([i < correct for i in range(n)], k))
        expected = sum(any(draw) for draw in draws) / len(draws)
        assert pass_at_k(n, correct, k) == pytest.approx(
            expected, abs=1e-15
        )  # one rounding of a quotient below 1
        if k == 1:
            assert pass_at_k(n, correct, 1) == pytest.approx(correct / n, abs=1e-15)


def test_order_of_responses_changes_no_number():
    answers = ["B", "A", None, "B", "C"]
    numbers = [
        {
            name: value
            for name, value in measures([""] * 5, list(order), "B").items()
            if not isinstance(value, list)
        }
        for order in (answers, answers[::-1], answers[2:] + answers[:2])
    ]
    assert numbers[0] == numbers[1] == numbers[2]


def test_sums_over_documents():
    assert total([[True, False], [True, True]]) == 3
    assert ends([["stop", "length"], ["stop", "stop"]]) == {"stop": 3, "length": 1}


class Scripted(LM):
    """Answers A, B, C, ... in turn to the repeats of each request, cut off each third time."""

    def __init__(self, counts=True):
        super().__init__()
        self.counts, self.calls, self.seen = counts, {}, []

    def loglikelihood(self, requests):
        return [(-1.0 - len(request.args[1]) - i, False) for i, request in enumerate(requests)]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        responses = []
        for request in requests:
            prompt, options = request.args
            self.seen.append((prompt, options))
            n = self.calls[prompt] = self.calls.get(prompt, -1) + 1
            text = f"{made_up.CANARY} reasons.\nAnswer: {'ABCD'[n % 4]}"
            responses.append(
                Generated(text, 7 + n, "length" if n % 3 == 2 else "stop") if self.counts else text
            )
        return responses


def evaluate(task, path, lm, **metadata):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=[str(TASK_FOLDER)], include_defaults=False, metadata={"data": str(path), **metadata}
    )
    return lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, log_samples=True)  # pyright: ignore


@pytest.fixture(scope="module")
def gpqa_path(tmp_path_factory):
    return made_up.write(tmp_path_factory.mktemp("data") / "a.csv", made_up.rows(6, words=20))


@pytest.mark.parametrize("subset", ["diamond", "main", "extended"])
def test_lm_evals_pipeline_carries_tokens_and_ends(gpqa_path, subset):
    lm = Scripted()
    task = f"quantlab_gpqa_{subset}_gen"
    results = evaluate(task, gpqa_path, lm)
    assert len(lm.seen) == 6 * 8
    (options,) = {json.dumps(options) for _, options in lm.seen}
    assert json.loads(options) == {
        "until": [],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "max_gen_toks": 32768,
    }
    values = results["results"][task]
    # Of A B C D A B C D the third and the sixth are cut off; each letter is right for some documents.
    assert values["no_answer,all"] == values["truncated,all"] == 2 / 8
    assert values["mean_tokens,all"] == 7 + 3.5
    assert values["pass_at_k,all"] == 1.0
    assert values["tokens,all"] == 6 * 84
    assert values["finish,all"] == {"stop": 36, "length": 12}
    assert values["answered,all"] == 36
    golds = [sample["target"] for sample in results["samples"][task]]
    right = {"A": 2, "B": 1, "C": 1, "D": 2}  # of A B - D A - C D
    assert values["avg_at_k,all"] == pytest.approx(sum(right[gold] for gold in golds) / 48, abs=1e-15)
    assert values["majority_at_k,all"] == pytest.approx(sum(gold in "AD" for gold in golds) / 12, abs=1e-15)
    assert values["avg_at_k_stderr,all"] > 0
    for sample in results["samples"][task]:
        (responses,) = sample["filtered_resps"]
        assert [type(response) for response in responses] == [Generated] * 8
        assert sample["tokens"] == [response.tokens for response in responses]
        assert [type(response) for response in sample["resps"][0]] == [Generated] * 8


def test_a_record_holds_what_comparing_needs_and_no_text(gpqa_path):
    task = "quantlab_gpqa_diamond_gen"
    samples = json.loads(json.dumps(evaluate(task, gpqa_path, Scripted())["samples"]))
    assert made_up.CANARY in json.dumps(samples)
    documents = record_documents(samples)
    assert [set(document) for document in documents] == [
        {"task", "hash", "doc_id", "correct", "answered", "finish", "tokens"}
    ] * 6
    assert all(
        len(document[name]) == 8 for document in documents for name in ("correct", "answered", "tokens")
    )
    for kept in (documents, [without_text(sample) for sample in samples[task]]):
        assert made_up.CANARY not in json.dumps(kept)
        assert "Answer" not in json.dumps(kept)
    two = samples[task][0] | {"filtered_resps": [["two", "texts"]], "correct": [True, False]}
    (document,) = record_documents({task: [two]})
    assert document["correct"] == [True, False]
    assert "loglikelihoods" not in document


def test_scored_choices_keep_one_bool_and_their_likelihoods(gpqa_path):
    task = "quantlab_gpqa_main_mc"
    samples = json.loads(json.dumps(evaluate(task, gpqa_path, Scripted())["samples"]))
    for document, line in zip(record_documents(samples), map(without_text, samples[task]), strict=True):
        assert set(document) == {"task", "hash", "doc_id", "correct", "loglikelihoods"}
        assert isinstance(document["correct"], bool)
        assert [pair[0] for pair in line["filtered_resps"]] == document["loglikelihoods"]
        assert len(document["loglikelihoods"]) == 4
        assert line["acc"] == float(document["correct"])


def test_both_ways_of_asking_ask_the_same_documents(gpqa_path):
    hashes = [
        [
            d["hash"]
            for d in record_documents(
                json.loads(json.dumps(evaluate(task, gpqa_path, Scripted())["samples"]))
            )
        ]
        for task in ("quantlab_gpqa_diamond_mc", "quantlab_gpqa_diamond_gen")
    ]
    assert hashes[0] == hashes[1]


def test_text_in_a_metric_stays_out_of_a_file_without_text():
    sample = {"doc_id": 0, "filter": "none", "doc_hash": "a", "prompt_hash": "b", "target_hash": "c"}
    sample |= {
        "metrics": ["bleu", "f1", "pair"],
        "bleu": ["reference text", "response"],
        "f1": 0.5,
        "pair": [1, 2.5],
    }
    kept = without_text(sample | {"filtered_resps": ["response"]})
    assert (kept["f1"], kept["pair"]) == (0.5, [1, 2.5])
    assert "bleu" not in kept
    assert "text" not in json.dumps(kept)


def test_documents_under_several_filters_say_which():
    base = {"doc_id": 0, "doc_hash": "a", "filtered_resps": ["x"], "exact_match": 1.0}
    documents = record_documents({"t": [base | {"filter": "strict"}, base | {"filter": "flexible"}]})
    assert [document["filter"] for document in documents] == ["strict", "flexible"]


def test_an_empty_measure_of_a_plain_model_is_absent_from_results(gpqa_path):
    values = evaluate("quantlab_gpqa_diamond_gen", gpqa_path, Scripted(counts=False))["results"]
    (numbers,) = values.values()
    assert "no_answer,all" in numbers
    assert not any(name.startswith(("tokens", "truncated", "mean_tokens", "finish")) for name in numbers)


def rows_file(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_the_other_benchmarks_run_from_local_rows(tmp_path):
    options = [f"{made_up.CANARY} {i}" for i in range(10)]
    mmlu = rows_file(
        tmp_path, [{"question_id": i, "question": f"q{i}", "options": options, "answer": "B"} for i in (1, 2)]
    )
    lm = Scripted()
    values = evaluate("quantlab_mmlu_pro_gen", mmlu, lm)["results"]["quantlab_mmlu_pro_gen"]
    assert values["avg_at_k,all"] == 1 / 8
    assert "Answer: A/B/C/D/E/F/G/H/I/J" in lm.seen[0][0]
    assert evaluate("quantlab_mmlu_pro_mc", mmlu, Scripted())["results"]["quantlab_mmlu_pro_mc"][
        "acc,none"
    ] in (0, 0.5, 1)
    problems = rows_file(tmp_path, [{"Problem": "1 + 1", "Answer": "2"}, {"Problem": "2 + 2", "Answer": 4}])
    for name in ("aime", "gsm8k"):
        values = evaluate(f"quantlab_{name}_gen", problems, Scripted())["results"][f"quantlab_{name}_gen"]
        assert values["no_answer,all"] == 1.0
