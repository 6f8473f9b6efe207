"""MMLU-Pro, and problems whose answer is a number (GSM8K, AIME), from local data in the columns they are published in.

Choices keep the published order: they come with a gold letter, and no row says which choice was written first.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

from quantlab.evals.documents import LETTERS, as_test_split, in_order
from quantlab.evals.local_data import (
    Rows,
    Source,
    cell_text,
    check_unicode,
    find_columns,
    read_table,
    refuse_row,
)

MMLU_PRO = Source("MMLU-Pro", "default")
GSM8K = Source("GSM8K", "main")
AIME = Source("AIME")
_QUESTION, _ANSWER = ("question", "problem"), ("answer",)


def mmlu_pro(data: str | None = None, **_: Any) -> dict[str, Any]:
    """For lm-eval's ``custom_dataset``: question, choices (2 to 10), answer (index), record_id."""
    return as_test_split(mmlu_pro_documents(data))


def gsm8k(data: str | None = None, **_: Any) -> dict[str, Any]:
    """For lm-eval's ``custom_dataset``: question, answer (a number as text)."""
    return as_test_split(number_documents(data, GSM8K))


def aime(data: str | None = None, **_: Any) -> dict[str, Any]:
    """For lm-eval's ``custom_dataset``: question, answer (a whole number, 0 to 999, as text)."""
    return as_test_split(number_documents(data, AIME, highest=999))


def mmlu_pro_documents(data: str | Path | None) -> list[dict[str, Any]]:
    """Rows with question, options (a list, in CSV as text) and answer (a letter) or answer_index.

    Raises InputError, argument "data", for data that is not there or does not fit; rows are named by number.
    """
    rows = read_table(data, MMLU_PRO)
    question, options, answer = find_columns(
        rows, [("question",), ("options", "choices"), ("answer", "answer_index")], data, MMLU_PRO.title
    )
    record = _optional(rows, "question_id")
    documents = []
    for number, row in enumerate(rows, 1):
        text, choices = cell_text(row.get(question)), _choices(row.get(options))
        if not text:
            refuse_row(data, number, f"has no text in {question}")
        if not 2 <= len(choices) <= len(LETTERS) or not all(choices):
            refuse_row(data, number, f"has no list of 2 to {len(LETTERS)} texts in {options}")
        gold = cell_text(row.get(answer)).upper()
        place = int(gold) if re.fullmatch(r"\d{1,2}", gold) else LETTERS.find(gold) if len(gold) == 1 else -1
        if not 0 <= place < len(choices):
            refuse_row(data, number, f"names none of its choices in {answer}")
        check_unicode([text, *choices], data, number)
        identity = cell_text(row.get(record)) if record else ""
        documents.append({"question": text, "choices": choices, "answer": place, "record_id": identity})
    return in_order(documents, data)


def number_documents(
    data: str | Path | None, source: Source, highest: int | None = None
) -> list[dict[str, Any]]:
    """Rows with question (or problem) and answer; a worked solution that ends in "#### 72" is the number alone.

    Raises InputError, argument "data", for data that is not there or does not fit; rows are named by number.
    """
    rows = read_table(data, source)
    question, answer = find_columns(rows, [_QUESTION, _ANSWER], data, source.title)
    documents = []
    for number, row in enumerate(rows, 1):
        text = cell_text(row.get(question))
        gold = cell_text(row.get(answer)).rpartition("####")[2].strip().replace(",", "").removeprefix("$")
        gold = gold.removesuffix(".0")  # what a table makes of a whole number
        if not text:
            refuse_row(data, number, f"has no text in {question}")
        if not re.fullmatch(r"-?\d{1,40}(\.\d{1,40})?", gold):
            refuse_row(data, number, f"has no number in {answer}")
        if highest is not None and not (gold.isdigit() and int(gold) <= highest):
            refuse_row(data, number, f"has no whole number from 0 to {highest} in {answer}")
        check_unicode([text], data, number)
        documents.append({"question": text, "answer": gold})
    return in_order(documents, data)


def _optional(rows: Rows, name: str) -> str | None:
    return next((column for column in rows[0] if column is not None and column.lower() == name), None)


def _choices(value: Any) -> list[str]:
    if isinstance(value, str):  # CSV holds a list as JSON, or as Python prints one
        for parse in (json.loads, ast.literal_eval):
            try:
                value = parse(value)
                break
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return [cell_text(choice) for choice in value] if isinstance(value, list | tuple) else []
