"""The documents of quantlab's benchmark tasks: their order, their repeats, and what one costs to ask.

Documents come in the order of a digest of their content: the first n of them, which is what a limit takes, are a
sample that depends on neither the order of the file nor the machine, and a larger limit holds a smaller one.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from quantlab.errors import InputError

LETTERS = "ABCDEFGHIJ"


def in_order(documents: Sequence[dict[str, Any]], data: Any) -> list[dict[str, Any]]:
    """``documents`` (in the order of the file) by digest.

    Raises InputError for two that ask the same with the same choices, named by row number: paired by content, they
    would count twice.
    """
    seen: dict[str, int] = {}
    digests = []
    for row, document in enumerate(documents, 1):
        content = "\n".join([document["question"], *sorted(document.get("choices", ()))])
        digest = hashlib.sha256(content.encode()).hexdigest()
        if digest in seen:
            problem = f"each question once; rows {seen[digest]} and {row} ask the same"
            raise InputError("data", None if data is None else str(data), problem)
        seen[digest] = row
        digests.append(digest)
    return [
        document for _, document in sorted(zip(digests, documents, strict=True), key=lambda pair: pair[0])
    ]


def as_test_split(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What lm-eval's ``custom_dataset`` returns.  In memory: no cache outlives the run."""
    from datasets import Dataset

    return {"test": Dataset.from_list(list(documents))}


def letters(document: dict[str, Any]) -> str:
    """The letters of the document's choices, "ABCD" for four."""
    return LETTERS[: len(document["choices"])]
