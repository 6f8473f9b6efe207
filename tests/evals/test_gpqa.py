"""GPQA files: what is read, what is refused, and the order of the choices."""

import csv
import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from quantlab.errors import InputError
from quantlab.evals.gpqa import COLUMNS, CORRECT, arrange, read_rows

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart"
ROW = dict(zip(COLUMNS, ("Why?", "yes", "no", "None", "4.0"), strict=True))


def text_of(arranged):
    return [arranged[f"choice{i}"] for i in (1, 2, 3, 4)]


def test_every_file_type_gives_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [ROW, {**ROW, "Question": 'With "quotes", commas\nand a line break?'}]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix in ("csv", "json", "jsonl", "parquet"):
        assert read_rows(tmp_path / f"a.{suffix}") == rows


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.csv", None, "a CSV, JSON, JSONL or Parquet file"),
        ("a.txt", "Question\n", "a CSV, JSON, JSONL or Parquet file"),
        (
            "a.csv",
            "Question,Correct Answer\nq,a\n",
            "missing: Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3",
        ),
        ("a.csv", ",".join(COLUMNS) + "\n", "at least one row"),
        ("a.json", "[" * 100_000, "RecursionError"),
        ("a.json", json.dumps([{**ROW, "Question": "\ud800"}]), "valid Unicode; row 1 is not"),
        ("a.csv", ",".join(COLUMNS) + "\nq,a,b,c,\n", "row 1 has none in Incorrect Answer 3"),
        ("a.json", "{", "on reading"),
        ("a.jsonl", "[1]", "on reading"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        read_rows(tmp_path / name)
    assert caught.value.argument == "data"
    assert "\n" not in str(caught.value)


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
