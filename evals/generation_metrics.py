"""What k sampled responses to one document amount to.

Per document, as lists of k in the order of sampling: correct, answered, and where the responses are ``Generated``
finish and tokens.  As numbers: avg_at_k (pass@1 averaged over k), majority_at_k, pass_at_k, no_answer, and where they
are ``Generated`` truncated and mean_tokens.  Responses of a model that tells no token counts have none: nothing is
made up for them.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from quantlab.evals.answers import THINK_CLOSE, extract_letter, extract_number
from quantlab.evals.documents import LETTERS, letters
from quantlab.evals.generated import FINISHES, Generated


def letter_results(document: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """lm-eval's ``process_results`` for a multiple-choice document (``answer``: index of the correct choice)."""
    responses = _responses(results)
    names = letters(document)
    answers = [
        extract_letter(r, names, thinking=t) for r, t in zip(responses, _thoughts(responses), strict=True)
    ]
    return measures(responses, answers, LETTERS[document["answer"]])


def number_results(document: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """lm-eval's ``process_results`` for a document whose ``answer`` is a number."""
    return _number_results(document, results)


def aime_results(document: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """The same where only whole numbers from 0 to 999 are answers."""
    return _number_results(document, results, lowest=0, highest=999)


def measures(responses: Sequence[str], answers: Sequence[Hashable | None], gold: Hashable) -> dict[str, Any]:
    """The numbers and lists of one document from its responses and the answers read from them (None: no answer)."""
    k = len(responses)
    correct = [answer is not None and answer == gold for answer in answers]
    found: dict[str, Any] = {
        "avg_at_k": sum(correct) / k,
        "majority_at_k": majority(answers, gold),
        "pass_at_k": pass_at_k(k, sum(correct), k),
        "no_answer": sum(answer is None for answer in answers) / k,
        "correct": correct,
        "answered": [answer is not None for answer in answers],
    }
    told = [response for response in responses if isinstance(response, Generated)]
    if len(told) == k:
        found |= {
            "truncated": sum(response.finish == "length" for response in told) / k,
            "mean_tokens": sum(response.tokens for response in told) / k,
            "finish": [response.finish for response in told],
            "tokens": [response.tokens for response in told],
        }
    return found


def majority(answers: Sequence[Hashable | None], gold: Hashable) -> float:
    """Probability that a vote elects ``gold`` when ties are broken by a fair draw; None (no answer) does not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    elected = [answer for answer, count in votes.items() if count == most]
    return 1 / len(elected) if gold in elected else 0.0


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n responses, drawn without putting back, hold one of the ``correct`` ones.

    1 - C(n - correct, k) / C(n, k), the unbiased estimator of Chen et al., "Evaluating Large Language Models Trained
    on Code" (2021), equation 1; with k = n it says whether any is correct.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def total(lists: Sequence[Sequence[float]]) -> float:
    """lm-eval's aggregation of lists of k: the sum over all responses of all documents."""
    return sum(sum(values) for values in lists)


def ends(lists: Sequence[Sequence[str]]) -> dict[str, int]:
    """lm-eval's aggregation of the reasons for which responses ended: how many for each."""
    counts = Counter(finish for finishes in lists for finish in finishes)
    return {finish: counts[finish] for finish in FINISHES}


def _number_results(document: dict[str, Any], results: Sequence[Any], **bounds: int) -> dict[str, Any]:
    from decimal import Decimal

    responses = _responses(results)
    answers = [
        extract_number(r, thinking=t, **bounds) for r, t in zip(responses, _thoughts(responses), strict=True)
    ]
    return measures(responses, answers, Decimal(document["answer"]))


def _responses(results: Sequence[Any]) -> list[str]:
    # One request a document: its filtered responses, a list behind take_first_k, a text behind take_first.
    (responses,) = results
    return [responses] if isinstance(responses, str) else list(responses)


def _thoughts(responses: Sequence[str]) -> list[bool]:
    """For each response, whether it counts as thought until "</think>".

    A response that was cut off has not been handed in: where a prompt opens the thought nothing but the limit tells.
    One that ended counts so too when the model closed a thought in another response to the same document.
    """
    thinks = any(THINK_CLOSE in response for response in responses)
    return [thinks or (isinstance(r, Generated) and r.finish == "length") for r in responses]
