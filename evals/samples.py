"""Samples without their text: what a paired comparison needs of a document, and nothing that gives a question away.

Questions of gated benchmarks must not be published, and files get published: text is kept only where it is asked for.
"""

import json
from collections.abc import Sequence
from typing import Any

from quantlab.evals.generated import FINISHES

_NAMES = ("doc_id", "doc_hash", "prompt_hash", "target_hash", "filter", "metrics")
_LISTS = ("tokens", "finish", "answered")
_MEASURES = ("acc", "exact_match")


def record_documents(samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For a record: {"task", "hash", "doc_id"} and, where there are any, "correct" (bool, or a list of k bools for k
    responses), "tokens", "finish", "answered" (lists of k), "loglikelihoods" (one a choice), and "filter" where a task
    has several.
    """
    found = []
    for task, rows in samples.items():
        several = len({row.get("filter") for row in rows}) > 1
        for row in rows:
            document: dict[str, Any] = {"task": task, "hash": row["doc_hash"], "doc_id": row["doc_id"]}
            if several:
                document["filter"] = row["filter"]
            choices = row["filtered_resps"]
            if choices and all(_is_loglikelihood(choice) for choice in choices):
                document["loglikelihoods"] = [float(choice[0]) for choice in choices]
            for measure in _MEASURES:
                if measure in row:
                    document["correct"] = bool(row[measure])
            if isinstance(row.get("correct"), list):
                document["correct"] = row["correct"]
                document |= {name: row[name] for name in _LISTS if name in row}
            found.append(document)
    return found


def as_lines(samples: Sequence[dict[str, Any]], *, with_text: bool) -> bytes:
    """The content of a samples file."""
    kept = samples if with_text else [without_text(sample) for sample in samples]
    return "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept).encode()


def without_text(sample: dict[str, Any]) -> dict[str, Any]:
    """One line of lm-eval's samples file with identity, hashes, filter, metrics and log-likelihoods of choices only.

    Under lm-eval's names, so that whatever reads its files reads this.  Values of metrics are kept where they are
    numbers, booleans, reasons to stop, or lists of these; prompts, targets and responses are not.
    """
    kept = {name: sample[name] for name in _NAMES if name in sample}
    for metric in sample.get("metrics", ()):
        if metric in sample and metric not in kept and _is_number(sample[metric]):
            kept[metric] = sample[metric]
    choices = sample.get("filtered_resps")
    if isinstance(choices, list | tuple) and all(_is_loglikelihood(choice) for choice in choices):
        kept["filtered_resps"] = [list(choice) for choice in choices]
    return kept


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_number(item) for item in value)
    return isinstance(value, bool | int | float) or value in FINISHES


def _is_loglikelihood(response: Any) -> bool:
    """(log-likelihood, whether greedy decoding gives the choice)."""
    if not isinstance(response, list | tuple) or len(response) != 2:
        return False
    number, greedy = response
    return isinstance(number, int | float) and isinstance(greedy, bool)
