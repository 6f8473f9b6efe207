"""MMLU-Pro, GSM8K and AIME rows: what is read, and what is refused without a word of it."""

import csv
import json

import pytest

from quantlab.errors import InputError
from quantlab.evals.benchmarks import AIME, GSM8K, mmlu_pro_documents, number_documents


def written(tmp_path, rows):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return path


def test_mmlu_pro_keeps_the_published_order_and_reads_letters_and_places(tmp_path):
    options = [f"option {i}" for i in range(10)]
    rows = [
        {"question_id": i, "question": f"q{i}", "options": options, "answer": "ABCDEFGHIJ"[i]}
        for i in range(10)
    ]
    found = mmlu_pro_documents(written(tmp_path, rows))
    assert sorted((d["question"], d["answer"], d["record_id"]) for d in found) == [
        (f"q{i}", i, str(i)) for i in range(10)
    ]
    assert all(document["choices"] == options for document in found)
    places = [
        {"question": row["question"], "choices": options, "answer_index": i} for i, row in enumerate(rows)
    ]
    assert [d["answer"] for d in mmlu_pro_documents(written(tmp_path, places))] == [
        d["answer"] for d in found
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question_id", "question", "options", "answer"])
        writer.writeheader()
        writer.writerows(
            [row | {"options": (json.dumps, repr)[i % 2](options)} for i, row in enumerate(rows)]
        )
    assert mmlu_pro_documents(path) == found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": ["secret"]}, "row 1 has no list of 2 to 10 texts in options"),
        ({"options": ["secret"] * 11}, "row 1 has no list"),
        ({"options": "secret, text"}, "row 1 has no list"),
        ({"options": ["secret", None]}, "row 1 has no list"),
        ({"answer": "C"}, "row 1 names none of its choices in answer"),
        ({"answer": "secret"}, "row 1 names none"),
        ({"answer": 2}, "row 1 names none"),
        ({"answer": ""}, "row 1 names none"),
        ({"question": None}, "row 1 has no text in question"),
    ],
)
def test_an_mmlu_pro_row_that_does_not_fit_is_named(tmp_path, change, words):
    row = {"question": "secret question", "options": ["secret a", "secret b"], "answer": "A"}
    with pytest.raises(InputError, match=words) as caught:
        mmlu_pro_documents(written(tmp_path, [row | change]))
    assert "secret" not in str(caught.value)


def test_the_same_question_with_other_choices_is_another_one(tmp_path):
    row = {"question": "Which is true?", "options": ["a", "b"], "answer": "A"}
    assert len(mmlu_pro_documents(written(tmp_path, [row, row | {"options": ["a", "c"]}]))) == 2
    with pytest.raises(InputError, match="rows 1 and 2 ask the same"):
        mmlu_pro_documents(written(tmp_path, [row, row | {"options": ["b", "a"]}]))


def test_numbers_come_as_text_as_numbers_and_behind_worked_solutions(tmp_path):
    answers = ["12 / 2 = 6\n#### 6", "#### 1,234", 7, 8.0, "$9", "-3", "2.5", "042"]
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
    found = number_documents(written(tmp_path, rows), GSM8K)
    by_question = {d["question"]: d["answer"] for d in found}
    assert list(dict(sorted(by_question.items())).values()) == [
        "6",
        "1234",
        "7",
        "8",
        "9",
        "-3",
        "2.5",
        "042",
    ]
    (problem,) = number_documents(
        written(tmp_path, [{"ID": 1, "Problem": "p", "Answer": 73}]), AIME, highest=999
    )
    assert problem == {"question": "p", "answer": "73"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "secret"}, "missing: answer"),
        ({"answer": "1"}, "missing: question or problem"),
        ({"question": "secret", "answer": "secret"}, "row 1 has no number in answer"),
        ({"question": "secret", "answer": "1000"}, "row 1 has no whole number from 0 to 999"),
        ({"question": "secret", "answer": "-1"}, "row 1 has no whole number"),
        ({"question": "secret", "answer": "1.5"}, "row 1 has no whole number"),
        ({"question": " ", "answer": "1"}, "row 1 has no text in question"),
    ],
)
def test_an_aime_row_that_does_not_fit_is_named(tmp_path, row, words):
    with pytest.raises(InputError, match=words) as caught:
        number_documents(written(tmp_path, [row]), AIME, highest=999)
    assert "secret" not in str(caught.value)
