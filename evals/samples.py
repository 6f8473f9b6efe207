"""Samples without their text: what a paired comparison needs of a document, and nothing that gives a question away."""

from typing import Any

_NAMES = ("doc_id", "doc_hash", "prompt_hash", "target_hash", "filter", "metrics")
_FINISHES = ("stop", "length")


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
    return isinstance(value, bool | int | float) or value in _FINISHES


def _is_loglikelihood(response: Any) -> bool:
    """(log-likelihood, whether greedy decoding gives the choice)."""
    if not isinstance(response, list | tuple) or len(response) != 2:
        return False
    number, greedy = response
    return isinstance(number, int | float) and isinstance(greedy, bool)
