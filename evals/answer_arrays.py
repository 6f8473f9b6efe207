"""What a run answered, as arrays: right or wrong, how long, whether at all; one row a document, one column a repeat."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from quantlab.errors import InputError, unknown_name
from quantlab.evals.result_files import TaskRun

CORRECT = ("correct", "acc", "exact_match")
"""Metrics that say whether an answer is right, in the order of preference."""
INVALID = "[invalid]"
"""What lm-eval's regex filters return where they find no answer."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """Documents in the order of their ids; arrays (documents, repeats), None where the files do not say.

    length: generated tokens or, where no file counts them, characters (``unit``).  key: (document hash, how many
    documents before it have the same).
    """

    run: TaskRun
    metric: str
    filter: str | None
    keys: list[tuple[str, int]]
    doc_ids: list[Any]
    prompt_hashes: list[str | None]
    target_hashes: list[str | None]
    correct: np.ndarray
    length: np.ndarray | None
    unit: str
    answered: np.ndarray | None
    truncated: np.ndarray | None
    loglikelihoods: list[np.ndarray] | None

    @property
    def repeats(self) -> int:
        return self.correct.shape[1]


def read_answers(run: TaskRun, metric: str | None = None, filter_name: str | None = None) -> Answers:
    """The answers of ``run`` by ``metric`` under one filter.

    Raises InputError for an unknown metric or filter, several filters of which none is chosen, a document that is there
    twice, a value that is no number from 0 to 1, and documents with different numbers of repeats.
    """
    where = str(run.source)
    documents, chosen = _filtered(run, filter_name)
    name = _metric(run, documents, metric)
    seen: set[Any] = set()
    for document in documents:
        identity = document.get("doc_id")
        if identity is not None and not isinstance(identity, int | str):
            raise InputError("samples", where, f"a number or text as doc_id, not a {type(identity).__name__}")
        if identity is not None and identity in seen:
            raise InputError("samples", where, f"each document once, doc_id {identity} is there twice")
        seen.add(identity)
        if not isinstance(document.get("doc_hash"), str):
            raise InputError("samples", where, f"a doc_hash in document {identity}")
    if all(isinstance(document.get("doc_id"), int) for document in documents):
        documents = sorted(documents, key=lambda document: document["doc_id"])

    counts: dict[str, int] = {}
    keys = []
    for document in documents:
        digest = document["doc_hash"]
        keys.append((digest, counts.get(digest, 0)))
        counts[digest] = counts.get(digest, 0) + 1

    correct = _array(documents, name, where, lambda document: document.get(name), _share)
    repeats = correct.shape[1]

    def optional(field: str, value: Callable[[dict[str, Any]], Any], check: Callable[[Any], float | None]):
        if any(value(document) is None for document in documents):
            return None
        return _array(documents, field, where, value, check, repeats)

    length, unit = optional("tokens", lambda document: document.get("tokens"), _count), "tokens"
    if length is None:
        length, unit = (
            optional("resps", lambda document: _texts(document, "resps", repeats), _characters),
            "characters",
        )
    answered = optional("answered", lambda document: document.get("answered"), _share)
    if answered is None:
        answered = optional(
            "filtered_resps", lambda document: _texts(document, "filtered_resps", repeats), _valid
        )
    likelihoods = [_loglikelihoods(document) for document in documents]
    return Answers(
        run=run,
        metric=name,
        filter=chosen,
        keys=keys,
        doc_ids=[document.get("doc_id") for document in documents],
        prompt_hashes=[document.get("prompt_hash") for document in documents],
        target_hashes=[document.get("target_hash") for document in documents],
        correct=correct,
        length=length,
        unit=unit,
        answered=answered,
        truncated=optional("finish", lambda document: document.get("finish"), _cut),
        loglikelihoods=None if any(one is None for one in likelihoods) else likelihoods,  # pyright: ignore[reportArgumentType]
    )


def _filtered(run: TaskRun, wanted: str | None) -> tuple[list[dict[str, Any]], str | None]:
    names = [document.get("filter") for document in run.documents]
    if not all(name is None or isinstance(name, str) for name in names):
        raise InputError("samples", str(run.source), "text as the filter of each document")
    names = list(dict.fromkeys(names))
    if names == [None]:
        return run.documents, None
    texts = [str(name) for name in names]
    if wanted is not None and wanted not in texts:
        raise unknown_name("--filter", wanted, texts)
    if wanted is None and len(texts) > 1 and "none" not in texts:
        raise InputError("--filter", None, f"one of {', '.join(texts)}: {run.source} has several")
    chosen = wanted or (texts[0] if len(texts) == 1 else "none")
    return [document for document in run.documents if str(document.get("filter")) == chosen], chosen


def _metric(run: TaskRun, documents: list[dict[str, Any]], wanted: str | None) -> str:
    listed = documents[0].get("metrics")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    names += [name for name in CORRECT if name in documents[0] and name not in names]
    if wanted is not None:
        # A record keeps one metric a document, whatever lm-eval called it.
        if wanted not in names and run.protocol is not None and wanted in CORRECT and "correct" in names:
            return "correct"
        if wanted not in names:
            raise unknown_name("--metric", wanted, names)
        if run.less_is_better(wanted):
            raise InputError("--metric", wanted, "a metric of which more is better: a loss is counted in it")
        return wanted
    name = next((name for name in CORRECT if name in names), None)
    if name is None:
        expected = (
            f"one of {', '.join(names)}"
            if names
            else f"documents with {' or '.join(CORRECT)} in {run.source}"
        )
        raise InputError("--metric", None, expected)
    return name


def _array(
    documents: list[dict[str, Any]],
    field: str,
    where: str,
    value: Callable[[dict[str, Any]], Any],
    check: Callable[[Any], float | None],
    repeats: int | None = None,
) -> np.ndarray:
    rows = []
    for document in documents:
        held = value(document)
        items = held if isinstance(held, list) else [held]
        row = [check(item) for item in items]
        if not row or any(number is None for number in row):
            shown = next((item for item, number in zip(items, row, strict=True) if number is None), held)
            # A text may be a question's or an answer's.
            shown = f"<{type(shown).__name__}>" if isinstance(shown, str | list | dict) and shown else shown
            expected = f"{_EXPECTED_VALUES[check.__name__]} in document {document.get('doc_id')} of {where}"
            raise InputError(field, shown, expected)
        if len(row) != (repeats or len(row)):
            expected = f"{repeats} values, one a repeat, in document {document.get('doc_id')} of {where}"
            raise InputError(field, len(row), expected)
        repeats = len(row)
        rows.append(row)
    return np.array(rows, float)


def _share(value: Any) -> float | None:
    fits = isinstance(value, bool | int | float) and 0 <= value <= 1
    return float(value) if fits else None


def _count(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if fits else None


def _characters(value: Any) -> float | None:
    return float(len(value)) if isinstance(value, str) else None


def _valid(value: Any) -> float | None:
    return float(value != INVALID) if isinstance(value, str) else None


def _cut(value: Any) -> float | None:
    return {"stop": 0.0, "length": 1.0}.get(value) if isinstance(value, str) else None


_EXPECTED_VALUES = {
    "_share": "a number from 0 to 1",
    "_count": "a finite number, at least 0",
    "_characters": "text",
    "_valid": "text",
    "_cut": "stop or length",
}


def _texts(document: dict[str, Any], field: str, repeats: int) -> list[str] | None:
    """Texts of a generative document, one a repeat that was scored; None for log-likelihoods and anything else."""
    held = document.get(field)
    if not isinstance(held, list) or len(held) != 1 or _is_loglikelihood(held[0]):
        return None
    texts = held[0] if isinstance(held[0], list) else [held[0]]
    if not all(isinstance(text, str) for text in texts) or len(texts) < repeats:
        return None
    # A filter that takes the first answer leaves the others unscored.
    return texts[:repeats]


def _is_loglikelihood(response: Any) -> bool:
    """lm-eval's pair: log-likelihood, whether greedy decoding gives the choice; as text in its samples files."""
    if not isinstance(response, list) or len(response) != 2:
        return False
    return str(response[1]) in ("True", "False")


def _loglikelihoods(document: dict[str, Any]) -> np.ndarray | None:
    held = document.get("loglikelihoods")
    if held is None:
        choices = document.get("filtered_resps")
        if not isinstance(choices, list) or not choices:
            return None
        if not all(_is_loglikelihood(choice) for choice in choices):
            return None
        held = [choice[0] for choice in choices]
    try:
        found = np.array([float(value) for value in held])
    except (TypeError, ValueError):
        return None
    return found if found.size else None
