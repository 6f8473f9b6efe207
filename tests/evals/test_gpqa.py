"""GPQA's rows: what is refused, and the order of the choices and of the questions."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from quantlab.errors import InputError
from quantlab.evals.gpqa import COLUMNS, CORRECT, arrange, documents, gpqa, read_rows
from tests.evals import made_up

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart"
ROW = dict(zip(COLUMNS, ("Why?", "yes", "no", "None", "4.0"), strict=True))


def text_of(arranged):
    return arranged["choices"]


def test_rows_are_text_in_the_columns_needed(tmp_path):
    path = tmp_path / "a.json"
    odd = {
        "question ": "Why?",
        "CORRECT ANSWER": 4.0,
        "Incorrect Answer 1": " nan",
        "Incorrect Answer 2": "None",
    }
    path.write_text(json.dumps([{**odd, "Incorrect Answer 3": "x  [title] y", "Explanation": None}]))
    (row,) = read_rows(path)
    assert list(row.values()) == ["Why?", "4.0", "nan", "None", "x . y", ""]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"Question": "q", CORRECT: "a"}],
            "missing: Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3",
        ),
        ([], "at least one row"),
        ([{**ROW, "Question": "\ud800"}], "row 1 is not valid Unicode"),
        (
            [ROW, {**ROW, "Question": "q", "Incorrect Answer 3": " "}],
            "row 2 has no text in Incorrect Answer 3",
        ),
        ([{**ROW, "Incorrect Answer 2": float("nan")}], "row 1 has no text in Incorrect Answer 2"),
        ([ROW, {**ROW, "Question": "q"}, ROW], "rows 1 and 3 ask the same"),
        (
            [ROW, {**ROW, CORRECT: ROW["Incorrect Answer 1"], "Incorrect Answer 1": ROW[CORRECT]}],
            "rows 1 and 2",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named_and_not_quoted(tmp_path, rows, words):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(InputError, match=words) as caught:
        documents(path)
    assert caught.value.argument == "data"
    assert "\n" not in str(caught.value)
    assert "Why" not in str(caught.value)


def test_an_unknown_subset_is_refused(tmp_path):
    with pytest.raises(InputError, match="diamond"):
        read_rows(tmp_path, "diamant")


def test_the_order_is_a_function_of_seed_and_question():
    first = arrange(ROW)
    assert arrange(dict(reversed(ROW.items()))) == first
    assert sorted(text_of(first)) == sorted(ROW[name] for name in COLUMNS[1:])
    assert text_of(first)[first["answer"]] == ROW[CORRECT]
    # Pinned: another order would make results incomparable with those of earlier releases.
    assert [arrange(ROW, seed)["answer"] for seed in range(8)] == [2, 0, 1, 1, 3, 3, 1, 0]


def test_every_place_and_every_order_is_equally_likely():
    questions = [arrange({**ROW, "Question": f"Question {i}?"}) for i in range(2400)]
    orders = Counter(tuple(text_of(question)) for question in questions)
    # 24 orders, 100 each on average, standard deviation 10: five of them leave room for 24 draws.
    assert len(orders) == 24
    assert all(50 < count < 150 for count in orders.values())


def test_documents_come_in_an_order_that_neither_the_file_nor_the_seed_decides(tmp_path):
    table = made_up.rows(40, words=10)
    path = made_up.write(tmp_path / "a.csv", table)
    again = made_up.write(tmp_path / "b.csv", table[::-1])
    asked = documents(path)
    assert documents(again) == asked
    assert [d["question"] for d in documents(path, seed=1)] == [d["question"] for d in asked]
    # 1 of 40! orders is the file's own.
    assert [d["record_id"] for d in asked] != [row["Record ID"] for row in table]
    # A part of the table keeps its order: what one row is asked as does not depend on the others.
    half = documents(made_up.write(tmp_path / "c.csv", table[:20]))
    assert half == [d for d in asked if d in half]


def test_both_names_of_the_data_give_the_same_documents(tmp_path):
    path = str(made_up.write(tmp_path / "a.csv", made_up.rows(3, words=10)))
    rows = gpqa(data=path)["test"].to_list()
    assert rows == gpqa(gpqa_path=path)["test"].to_list() == documents(path)


def test_equal_choice_texts_keep_the_right_gold():
    twins = {**ROW, "Incorrect Answer 1": ROW[CORRECT]}
    assert [arrange(twins, seed)["answer"] for seed in range(8)] == [
        arrange(ROW, seed)["answer"] for seed in range(8)
    ]


def test_the_invented_table_is_what_its_script_writes(tmp_path):
    spec = importlib.util.spec_from_file_location("made_up", QUICKSTART / "make_gpqa_made_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(tmp_path / "again.csv")
    committed = QUICKSTART / "gpqa_made_up.csv"
    assert (tmp_path / "again.csv").read_bytes() == committed.read_bytes()
    rows = read_rows(committed)
    assert len(rows) >= 64
    assert len({row["Question"] for row in rows}) == len(rows)
    assert all(len(row["Question"].encode()) > 120 for row in rows)
    assert all(len({row[name] for name in COLUMNS[1:]}) == 4 for row in rows)


@pytest.mark.parametrize("seed", ["x", "1", 1.5, True, None])
def test_a_seed_that_is_no_whole_number_is_refused(tmp_path, seed):
    table = made_up.write(tmp_path / "a.csv", made_up.rows(2, words=10))
    with pytest.raises(InputError, match=r"^gpqa_seed"):
        gpqa(data=str(table), gpqa_seed=seed)
