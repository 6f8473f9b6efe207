"""GPQA-shaped multiple choice from a local file: never from the network, and the same choice order on every
machine.

The order of the four choices is a pure function of a seed and the question text, so it survives caches,
subsets, re-ordered files and other policies, and two runs can be paired question by question.
"""

import csv
import hashlib
import json
from itertools import permutations
from pathlib import Path
from typing import Any

from quantlab.errors import InputError

QUESTION, CORRECT = "Question", "Correct Answer"
INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
COLUMNS = (QUESTION, CORRECT, *INCORRECT)
_ORDERS = tuple(permutations(range(4)))
_EXPECTED_FILE = "a CSV, JSON, JSONL or Parquet file with GPQA's columns"


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a local GPQA file (.csv, .json, .jsonl or .parquet), all values text.

    Raises InputError, argument "data": no readable file, missing columns (listed), no rows, or an empty
    cell in one of the columns needed (named by row number, never by content).
    """
    path = Path(path)
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers or not path.is_file():
        raise InputError("data", str(path), _EXPECTED_FILE)
    try:
        rows = readers[path.suffix.lower()](path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise InputError(
            "data", str(path), f"{_EXPECTED_FILE} ({type(error).__name__} on reading)"
        ) from error
    if not rows:
        raise InputError("data", str(path), "at least one row")
    missing = [name for name in COLUMNS if name not in rows[0]]
    if missing:
        raise InputError("data", str(path), f"GPQA's columns; missing: {', '.join(missing)}")
    for number, row in enumerate(rows, 1):
        empty = [name for name in COLUMNS if not _clean(row.get(name))]
        if empty:
            raise InputError(
                "data", str(path), f"text in every column needed; row {number} has none in {empty[0]}"
            )
        try:  # JSON can spell halves of characters, which no tokenizer and no hash takes
            "".join(_clean(value) for value in row.values()).encode()
        except UnicodeEncodeError as error:
            raise InputError("data", str(path), f"text that is valid Unicode; row {number} is not") from error
    return rows


def arrange(row: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """One question with its choices in the order that (seed, question) decides.

    Returns question, choice1 .. choice4, answer (index of the correct choice, 0 .. 3: choices may repeat,
    so text could not identify it) and record_id ("" where the file has none).
    """
    question = _clean(row[QUESTION])
    choices = [_clean(row[name]) for name in (CORRECT, *INCORRECT)]
    digest = hashlib.sha256(f"{seed}\n{question}".encode()).digest()
    # 2^256 / 24 leaves a bias of 1e-76: every order is equally likely.
    order = _ORDERS[int.from_bytes(digest, "big") % len(_ORDERS)]
    return {
        "question": question,
        **{f"choice{place}": choices[which] for place, which in enumerate(order, 1)},
        "answer": order.index(0),
        "record_id": _clean(row.get("Record ID")),
    }


def dataset(gpqa_path: str | None = None, gpqa_seed: int = 0, **_: Any) -> dict[str, Any]:
    """What lm-eval's ``custom_dataset`` calls, with its ``--metadata``: {"test": dataset} of arranged
    questions.
    """
    if gpqa_path is None:
        raise InputError("data", None, f"{_EXPECTED_FILE} (metadata gpqa_path=FILE)")
    from datasets import Dataset

    return {"test": Dataset.from_list([arrange(row, int(gpqa_seed)) for row in read_rows(gpqa_path)])}


def _clean(text: Any) -> str:
    # The published table carries " [title]" marks and doubled blanks where a web page had mark-up.
    return "" if text is None else str(text).replace(" [title]", ". ").replace("  ", " ").strip()


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file, strict=True))


def _read_json(path: Path) -> list[dict[str, str]]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError("not a list of objects")
    return value


def _read_jsonl(path: Path) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("not objects, one a line")
    return rows


def _read_parquet(path: Path) -> list[dict[str, str]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()
