"""The half of a preflight that generates: a few responses under the baseline, looked at and generated once more.

They are the first tokens of the run's own responses under ``BASELINE``: prompts, seeds, sampling and engine are the
run's, and a response does not depend on what is beside it.  Only their number and their length are less.

When a sample stops a run.  A response is judged if it ended by itself, or if the run's own limit cut it off; where the
preflight's smaller limit did, it says nothing of the run.  If all are judged, there are ``LEAST`` or more, and none has
an answer, the run would be meaningless: were a response in two to have an answer, that would happen once in sixteen
times or less.  Everything milder is a warning.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantlab.evals.generated import Generated
from quantlab.evals.generating import Generation
from quantlab.evals.preflight_report import Check, SampleSize
from quantlab.evals.preflight_requests import Requested
from quantlab.schemes import Diverged

BASELINE = "fp32@1"
LEAST = 4
"""Responses that are enough to stop a run."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names that lm-eval knows for the limit."""
_QUARTER = 0.25


@dataclass(frozen=True)
class Sampled:
    """responses: each with whether an answer was found in it.  ids: the tokens of each, by ``Line.key``."""

    responses: tuple[tuple[Generated, bool], ...]
    ids: dict[tuple[str, int, int, int], tuple[int, ...] | None]


def sample_checks(lm: Any, asked: Sequence[Requested], size: SampleSize, *, seed: int) -> list[Check]:
    """Generate and judge a sample of each task that generates.  ``lm`` is left under ``BASELINE``."""
    found = []
    for one in asked:
        if one.generates:
            lm.use_policy(BASELINE, seed=seed)
            found += _checks(lm, one, size)
    return found


def _checks(lm: Any, asked: Requested, size: SampleSize) -> list[Check]:
    layouts = lm.device.type == "cpu"
    limit = min(size.tokens, asked.limit)
    requests = _requests(asked, size, limit)
    if not lm.quiet:
        times = "three times" if layouts else "twice"
        text = f"preflight: {len(requests)} responses of at most {limit:,} tokens, {times}"
        print(f"{text} ({asked.name}); --no-preflight leaves them out", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        first = _generate(lm, asked, requests)
        again = _generate(lm, asked, requests)
        other = _apart(lm, asked, requests) if layouts else None
    except Diverged as error:
        change = f"a model whose state stays finite under {BASELINE} ({error})"
        return [Check("sample", f"{BASELINE} diverged", "stop", change, asked.name)]
    made = [sampled for sampled in (first, again, other) if sampled is not None]
    tokens = sum(len(ids or ()) for sampled in made for ids in sampled.ids.values())
    # Seconds are for the reader alone: a record of the same run is the same record.
    cost = f"{tokens:,} tokens in {time.monotonic() - began:.1f} s"
    return [
        Check("sample", cost, task=asked.name, values={"generated_tokens": tokens}),
        answers_check(asked, first, limit),
        twice_check(asked, first, again, lm.device.type),
        *([] if other is None else [layout_check(asked, first, other)]),
    ]


def answers_check(asked: Requested, sampled: Sampled, limit: int) -> Check:
    """Truncation and extraction on a sample that was cut off at ``limit`` tokens."""
    responses = sampled.responses
    total = len(responses)
    ended = [(response, answered) for response, answered in responses if response.finish == "stop"]
    cut = total - len(ended)
    own = limit == asked.limit
    judged = responses if own else tuple(ended)
    answered = sum(found for _, found in responses)
    lost = sum(not found for _, found in judged)
    values = {
        "responses": total,
        "limit": limit,
        "cut_off_by": "max_gen_toks" if own else "preflight",
        "cut_off": cut,
        "judged": len(judged),
        "answered": answered,
        "judged_without_answer": lost,
    }
    text = f"{total} responses: {cut} cut off at {limit:,} tokens, {answered} with an answer"

    def made(verdict: Any, change: str) -> Check:
        return Check("answers", text, verdict, change, asked.name, values)

    if len(judged) == total and lost == total and total >= LEAST:
        wanted = (
            "a larger --max-gen-toks"
            if 2 * cut >= total
            else "a prompt to which the model answers (--chat-template, --think-end, --max-gen-toks)"
        )
        return made("stop", f"at least one answer, or no run: {wanted}; --no-preflight runs it as it is")
    if not judged:
        change = (
            f"more than {limit:,} --preflight-tokens, to judge truncation and answers before the run: "
            f"its own limit is {asked.limit:,}"
        )
        return made("warn", change)
    if own and cut >= _QUARTER * total:
        return made("warn", "a larger --max-gen-toks: what is cut off in a thought counts as wrong")
    if lost >= _QUARTER * len(judged):
        return made("warn", "a look at --chat-template and --think-end: what has no answer counts as wrong")
    return made("ok", "")


def twice_check(asked: Requested, first: Sampled, again: Sampled, device: str) -> Check:
    """Same seed and batch, same tokens."""
    return _equality("run twice", asked, first, again, f"the same tokens from the same seed on {device}")


def layout_check(asked: Requested, first: Sampled, other: Sampled) -> Check:
    """Each document in a batch of its own: a CPU gives the same tokens, a GPU promises that for one batch alone."""
    return _equality("other batch", asked, first, other, "the same tokens in any batch on a CPU")


def _equality(name: str, asked: Requested, first: Sampled, other: Sampled, wanted: str) -> Check:
    total = len(first.ids)
    same = sum(other.ids.get(key) == ids for key, ids in first.ids.items())
    text, values = f"{same} of {total} responses are the same", {"same": same, "of": total}
    verdict = "ok" if same == total else "stop"
    return Check(name, text, verdict, "" if verdict == "ok" else wanted, asked.name, values)


def _requests(asked: Requested, size: SampleSize, limit: int) -> list[Any]:
    """lm-eval's requests of the first documents, each as often as it is repeated, with another limit."""
    chosen = list(dict.fromkeys(instance.doc_id for instance in asked.instances))[: size.documents]
    found = []
    for instance in asked.instances:
        if instance.doc_id in chosen:
            context, options = instance.args
            options = {name: value for name, value in options.items() if name not in _LIMITS}
            arguments = (context, options | {"max_gen_toks": limit})
            # A fresh one: the task's own request must stay as it is.
            made = replace(instance, arguments=arguments, resps=[], filtered_resps={})
            found += [made] * min(size.repeats, asked.repeats)
    return found


def _generate(lm: Any, asked: Requested, requests: list[Any]) -> Sampled:
    generation = Generation(lm)
    texts = generation.run(requests, None, quiet=True)
    ids = {line.key: line.ids for line in generation.lines}
    return Sampled(tuple(_judged(asked, requests, texts)), ids)


def _apart(lm: Any, asked: Requested, requests: list[Any]) -> Sampled:
    """The documents one after the other."""
    of_document = [
        [request for request in requests if request.doc_id == document]
        for document in dict.fromkeys(request.doc_id for request in requests)
    ]
    parts = [_generate(lm, asked, some) for some in of_document]
    ids = {key: tokens for part in parts for key, tokens in part.ids.items()}
    return Sampled(tuple(pair for part in parts for pair in part.responses), ids)


def _judged(asked: Requested, requests: list[Any], texts: list[Generated]) -> list[tuple[Generated, bool]]:
    """Each response with whether the task's own filters and scoring find an answer in it."""
    once = list({id(request): request for request in requests}.values())
    by_request = [
        [text for one, text in zip(requests, texts, strict=True) if one is request] for request in once
    ]
    for request, responses in zip(once, by_request, strict=True):
        # A filter that keeps the first k wants k: the sample's come again until they are enough.
        request.resps = (responses * asked.repeats)[: max(asked.repeats, len(responses))]
    kept = asked.task._instances
    asked.task._instances = once
    try:
        asked.task.apply_filters()
    finally:
        asked.task._instances = kept
    found = []
    for request, responses in zip(once, by_request, strict=True):
        answered = [False] * len(responses)
        for filtered in request.filtered_resps.values():
            flags = _answered(asked.task, request.doc, filtered)[: len(responses)]
            answered = [a or b for a, b in zip(answered, flags, strict=False)] or answered
        found += zip(responses, answered, strict=False)
    return found


def _answered(task: Any, document: dict[str, Any], filtered: Any) -> list[bool]:
    """What the task says itself, or whether a filter left something (lm-eval's word for nothing is [invalid])."""
    if callable(task.config.process_results):
        told = task.process_results(document, [filtered]).get("answered")
        if isinstance(told, list):
            return [bool(one) for one in told]
    texts = [filtered] if isinstance(filtered, str) else list(filtered)
    return [str(text).strip() not in ("", "[invalid]") for text in texts]
