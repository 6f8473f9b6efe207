"""GPQA's questions from local data, and the same choice order on every machine.

The order of the four choices is a pure function of a seed and the question text, so it survives caches,
subsets, re-ordered files and other policies, and two runs can be paired question by question.
"""

import hashlib
from itertools import permutations
from pathlib import Path
from typing import Any

from quantlab.errors import InputError, unknown_name
from quantlab.evals.documents import as_test_split, in_order
from quantlab.evals.local_data import Source, cell_text, check_unicode, find_columns, read_table, refuse_row

QUESTION, CORRECT = "Question", "Correct Answer"
INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
COLUMNS = (QUESTION, CORRECT, *INCORRECT)
SUBSETS = ("diamond", "main", "extended")
REPOSITORY = "Idavidrein/gpqa"
_RECORD = "Record ID"
_ORDERS = tuple(permutations(range(4)))


def read_rows(data: str | Path | None, subset: str = "diamond") -> list[dict[str, str]]:
    """The rows of GPQA in the columns needed (and "Record ID"), all values text, in the order of the file.

    ``data`` as in ``local_data.read_table``; ``subset`` matters where a place holds several.  Raises InputError,
    argument "data": no readable data, missing columns (listed), no rows, or an empty cell in one of the columns
    needed (named by row number, never by content).
    """
    if subset not in SUBSETS:
        raise unknown_name("subset", subset, SUBSETS)
    rows = read_table(data, Source("GPQA", f"gpqa_{subset}", REPOSITORY))
    names = find_columns(rows, [(name,) for name in COLUMNS], data, "GPQA")
    read = []
    for number, row in enumerate(rows, 1):
        texts = {column: _clean(row.get(name)) for column, name in zip(COLUMNS, names, strict=True)}
        if empty := [column for column in COLUMNS if not texts[column]]:
            refuse_row(data, number, f"has no text in {empty[0]}")
        texts[_RECORD] = _clean(row.get(_RECORD))
        check_unicode(list(texts.values()), data, number)
        read.append(texts)
    return read


def arrange(row: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """One question with its choices in the order that (seed, question) decides.

    Returns question, choices (four), answer (index of the correct choice, 0 .. 3: choices may repeat, so text could
    not identify it) and record_id ("" where the file has none).
    """
    question = _clean(row[QUESTION])
    choices = [_clean(row[name]) for name in (CORRECT, *INCORRECT)]
    digest = hashlib.sha256(f"{seed}\n{question}".encode()).digest()
    # 2^256 / 24 leaves a bias of 1e-76: every order is equally likely.
    order = _ORDERS[int.from_bytes(digest, "big") % len(_ORDERS)]
    return {
        "question": question,
        "choices": [choices[which] for which in order],
        "answer": order.index(0),
        "record_id": _clean(row.get(_RECORD)),
    }


def gpqa(
    data: str | None = None,
    gpqa_path: str | None = None,
    gpqa_seed: int = 0,
    subset: str = "diamond",
    **_: Any,
) -> dict[str, Any]:
    """What lm-eval's ``custom_dataset`` calls with a task's metadata: {"test": dataset} of arranged questions.

    ``data`` and ``gpqa_path`` are two names of one thing.
    """
    if isinstance(gpqa_seed, bool) or not isinstance(gpqa_seed, int):
        raise InputError("gpqa_seed", gpqa_seed, "a whole number")
    return as_test_split(documents(gpqa_path if data is None else data, subset, gpqa_seed))


def documents(data: str | Path | None, subset: str = "diamond", seed: int = 0) -> list[dict[str, Any]]:
    """The arranged questions in the order in which they are asked."""
    return in_order([arrange(row, seed) for row in read_rows(data, subset)], data)


def _clean(text: Any) -> str:
    # The published table carries " [title]" marks and doubled blanks where a web page had mark-up.
    return cell_text(text).replace(" [title]", ". ").replace("  ", " ").strip()
