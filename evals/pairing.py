"""Two runs, document by document; refused where they were not asked the same in the same way."""

import dataclasses
import json
import re
from typing import Any

import numpy as np

from quantlab.errors import InputError
from quantlab.evals.answer_arrays import Answers

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 60  # characters of a setting that a message quotes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Rows of base and candidate that hold the same document; ``missing``: documents that one of the two lacks.

    remarks: what the reader must know though it is no reason to refuse.
    """

    base: Answers
    candidate: Answers
    base_rows: np.ndarray
    candidate_rows: np.ndarray
    missing: int
    remarks: list[str]

    def of(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The paired rows of the array ``name`` of both; None where either run does not have it."""
        before, after = getattr(self.base, name), getattr(self.candidate, name)
        if before is None or after is None or (name == "length" and self.base.unit != self.candidate.unit):
            return None
        return before[self.base_rows], after[self.candidate_rows]

    def loglikelihood_change(self) -> float | None:
        """Mean of |difference| over all choices of all documents; None for generated answers.

        Equal infinite log-likelihoods did not change; infinite if one became infinite, NaN if one is.
        """
        before, after = self.base.loglikelihoods, self.candidate.loglikelihoods
        if before is None or after is None:
            return None
        changes = []
        for one, other in zip(self.base_rows, self.candidate_rows, strict=True):
            if before[one].shape != after[other].shape:
                found = f"{before[one].size} log-likelihoods as in the base, document {self.candidate.doc_ids[other]}"
                raise InputError("candidate", self.candidate.run.path, found)
            same = before[one] == after[other]
            # Not subtracted where equal: inf - inf would be NaN.
            changes.append(np.abs(np.where(same, 0.0, before[one]) - np.where(same, 0.0, after[other])))
        return float(np.concatenate(changes).mean())


def pair(base: Answers, candidate: Answers, *, allow_missing: bool = False, control: bool = False) -> Pairs:
    """Pair ``candidate`` with ``base`` by document hash.

    control: the candidate is another run of the base's own settings (A/A).  Raises InputError, one line that says what
    differs, for: one file given twice; the settings of the base in a candidate, or other ones in a control; another
    version, prompt protocol or scoring; other documents, prompts or targets; another number of repeats; missing
    documents unless ``allow_missing``.
    """
    who = "--aa" if control else "candidate"
    path = candidate.run.path
    _check_identity(base, candidate, who, control)
    differing = protocol_differences(base, candidate)
    if differing:
        raise InputError(who, path, f"the base's protocol; it differs in {'; '.join(differing)}")
    rows = {key: row for row, key in enumerate(base.keys)}
    other = {key: row for row, key in enumerate(candidate.keys)}
    shared = [key for key in base.keys if key in other]
    missing = len(rows) + len(other) - 2 * len(shared)
    if missing:
        _check_documents(base, candidate, who, set(shared), missing, allow_missing)
    base_rows, candidate_rows = (np.array([of[key] for key in shared], int) for of in (rows, other))
    for name, before, after in (
        ("prompt_hash", base.prompt_hashes, candidate.prompt_hashes),
        ("target_hash", base.target_hashes, candidate.target_hashes),
    ):
        unlike = sum(
            None not in (before[one], after[two]) and before[one] != after[two]
            for one, two in zip(base_rows, candidate_rows, strict=True)
        )
        if unlike:
            raise InputError(
                who, path, f"the base's prompts; {name} differs in {unlike} of {len(shared)} documents"
            )
    if base.repeats != candidate.repeats:
        answers = "1 answer" if base.repeats == 1 else f"{base.repeats} answers"
        expected = f"{answers} a document as in the base, not {candidate.repeats}"
        raise InputError(who, path, expected)
    return Pairs(
        base, candidate, base_rows, candidate_rows, missing, _remarks(base, candidate, missing, control)
    )


def protocol_differences(base: Answers, candidate: Answers) -> list[str]:
    """What of task, prompt and scoring differs, each with both values; empty where they agree.

    The seed of the shuffle is compared where there are no prompt hashes, which would prove the order.  Seeds of
    sampling, batch sizes and versions of libraries are no part of it.
    """
    if base.run.results is None or candidate.run.results is None:
        ours, theirs = {}, {}
    else:
        hashed = all(None not in answers.prompt_hashes for answers in (base, candidate))
        ours, theirs = (_protocol(answers, seeds=not hashed) for answers in (base, candidate))
    ours |= {"filter": base.filter, "metric": _metric(base), "record protocol": base.run.protocol}
    theirs |= {
        "filter": candidate.filter,
        "metric": _metric(candidate),
        "record protocol": candidate.run.protocol,
    }
    for name in ("filter", "metric", "record protocol"):
        # A record of quantlab has no filter, lm-eval's files no protocol of records.
        if ours[name] is None or theirs[name] is None:
            del ours[name], theirs[name]
    return [
        f"{name}: {_short(ours.get(name))} / {_short(theirs.get(name))}"
        for name in ours | theirs
        if _plain(ours.get(name)) != _plain(theirs.get(name))
    ]


def _protocol(answers: Answers, *, seeds: bool) -> dict[str, Any]:
    task, results, config = answers.run.task, answers.run.results or {}, answers.run.config

    def of_task(name: str) -> Any:
        held = results.get(name)
        return held.get(task) if isinstance(held, dict) else None

    settings = of_task("configs")
    settings = settings if isinstance(settings, dict) else {}
    found = {
        "task version": of_task("versions"),
        "n-shot": of_task("n-shot"),
        **{name: results.get(name) for name in ("chat_template_sha", "system_instruction_sha")},
        "fewshot_as_multiturn": results.get("fewshot_as_multiturn") or None,
        "gen_kwargs": _unseeded(config.get("gen_kwargs")),
        "generation_kwargs": _unseeded(settings.get("generation_kwargs")),
        "scoring": config.get("scoring"),
        **{
            name: settings.get(name)
            for name in ("output_type", "repeats", "filter_list", "metric_list", "process_results")
        },
    }
    if found["n-shot"]:
        found["fewshot_seed"] = config.get("fewshot_seed")
    if seeds:
        metadata = settings.get("metadata")
        found |= {
            name: value
            for name, value in (metadata if isinstance(metadata, dict) else {}).items()
            if name.endswith("seed")
        }
    return found


def _check_identity(base: Answers, candidate: Answers, who: str, control: bool) -> None:
    ours, theirs = base.run, candidate.run
    if ours.source.resolve() == theirs.source.resolve():
        expected = "another run than the base; a file says nothing about itself"
        raise InputError(who, theirs.path, expected)
    same = (ours.model, ours.policy) == (theirs.model, theirs.policy)
    if control and not same and ours.model and theirs.model:
        expected = f"another run of the base, {_name(ours)}, not one of {_name(theirs)}"
        raise InputError(who, theirs.path, expected)
    if not control and same and ours.policy is not None:
        expected = (
            f"another policy or model than the base, {_name(ours)}; give a second run of the base as --aa"
        )
        raise InputError(who, theirs.path, expected)


def _check_documents(
    base: Answers, candidate: Answers, who: str, shared: set[Any], missing: int, allowed: bool
) -> None:
    path = candidate.run.path
    names = {doc_id: key for doc_id, key in zip(base.doc_ids, base.keys, strict=True) if doc_id is not None}
    changed = sum(
        doc_id in names and names[doc_id] not in shared and key not in shared
        for doc_id, key in zip(candidate.doc_ids, candidate.keys, strict=True)
    )
    if changed:
        expected = (
            f"the base's documents; doc_hash differs in {changed} of {len(base.keys)} (another order of the "
        )
        raise InputError(who, path, f"{expected}choices, another seed of it, or other data)")
    if not shared:
        raise InputError(who, path, "at least one document in common with the base")
    if not allowed:
        absent, extra = len(base.keys) - len(shared), len(candidate.keys) - len(shared)
        expected = f"the base's {len(base.keys)} documents; {absent} missing, {extra} more"
        raise InputError(who, path, f"{expected}; --allow-missing compares the {len(shared)} that both have")


def _remarks(base: Answers, candidate: Answers, missing: int, control: bool) -> list[str]:
    found = []
    if missing:
        documents, verb = ("document", "is") if missing == 1 else ("documents", "are")
        found.append(f"{missing} {documents} that only one of the two runs has {verb} left out")
    for answers in dict.fromkeys((base.run.path, candidate.run.path)):
        run = base.run if answers == base.run.path else candidate.run
        if run.results is None:
            found.append(
                f"{answers}: no results file beside the samples, so version, template and scoring are unknown"
            )
    if None not in (base.run.policy, candidate.run.policy) and base.run.model != candidate.run.model:
        # Both policy and model differ: the difference is not the policy's.
        found.append(f"another model than the base: {base.run.model} / {candidate.run.model}")
    ours, theirs = base.run.results or {}, candidate.run.results or {}
    for name in ("lm_eval_version", "transformers_version", "model_dtype"):
        before, after = (
            held.get(name) or run.config.get(name)
            for held, run in ((ours, base.run), (theirs, candidate.run))
        )
        if not control and before and after and before != after:
            found.append(f"{name} differs: {before} / {after}")
    return found


def _metric(answers: Answers) -> str | None:
    # A record's "correct" is whichever of acc and exact_match the task has.
    return None if answers.metric == "correct" else answers.metric


def _name(run: Any) -> str:
    return f"{run.model} under {run.policy}" if run.policy else run.model


def _unseeded(arguments: Any) -> Any:
    """Generation settings but for the seed of sampling; lm-eval takes them as a table or as name=value,..."""
    if isinstance(arguments, str):
        return ",".join(part for part in arguments.split(",") if not part.strip().startswith("seed=")) or None
    if isinstance(arguments, dict):
        return {name: value for name, value in arguments.items() if name != "seed"} or None
    return arguments or None


def _plain(value: Any) -> str:
    """Functions are dumped with their address where their source is not known."""
    return _ADDRESS.sub("", json.dumps(value, sort_keys=True, default=str))


def _short(value: Any) -> str:
    text = " ".join(_plain(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
