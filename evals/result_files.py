"""Evaluated documents of a run, read from lm-eval's files of any model or from quantlab's own records.

lm-eval writes ``results_TIME.json`` and, with --log_samples, ``samples_TASK_TIME.jsonl`` beside it: one line per
document and filter.  A record of ``quantlab study`` holds its documents itself.  Imports neither torch nor lm-eval.
"""

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantlab.errors import InputError, unknown_name
from quantlab.records import RECORD_NAME, load_record

_TIME = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?"
_SAMPLES = re.compile(rf"samples_(?P<task>.+)_(?P<time>{_TIME})\.jsonl")
_RESULTS = re.compile(rf".+_(?P<time>{_TIME})\.json")
_LESS_IS_BETTER = ("no_answer", "truncated")
_EXPECTED = (
    "a results or samples file of lm-eval, a quantlab eval record, or a folder that holds those of one run"
)


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """One task of one run, as its files hold it.

    documents: lines of the samples file, or entries of a record with their values under lm-eval's names.
    results: lm-eval's results, None where the file is gone.  protocol: fingerprint of a record, None for lm-eval.
    """

    path: str
    source: Path
    task: str
    documents: list[dict[str, Any]]
    results: dict[str, Any] | None
    protocol: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        return _table(_table(self.results).get("config"))

    @property
    def policy(self) -> str | None:
        """Of quantlab's own runs; None for every other model."""
        policy = self.config.get("policy")
        return policy if isinstance(policy, str) else None

    def less_is_better(self, metric: str) -> bool:
        """As the task says in the results, or as quantlab's own tasks do where there are none."""
        if self.results is None:
            return metric in _LESS_IS_BETTER
        higher = _table(_table(self.results.get("higher_is_better")).get(self.task))
        return higher.get(metric, metric not in _LESS_IS_BETTER) is False

    @property
    def model(self) -> str:
        """As lm-eval was given it, without folders."""
        arguments = self.config.get("model_args")
        if isinstance(arguments, str):
            pairs = (part.partition("=") for part in arguments.split(","))
            arguments = {name.strip(): value for name, _, value in pairs}
        named = (
            _table(arguments).get("pretrained") or _table(arguments).get("model") or self.config.get("model")
        )
        return Path(str(named)).name if named else ""


def read_runs(path: str | Path, task: str | None = None) -> dict[str, TaskRun]:
    """The tasks of the one run at ``path``; of ``task`` alone if given.

    Raises InputError for a path without such files, results without samples, a task that is not there, and several
    runs of one task: which is meant, only the user knows.
    """
    place = Path(path)
    if not place.exists():
        raise InputError("run", str(path), "an existing file or folder")
    found: dict[str, list[TaskRun]] = defaultdict(list)
    for run in _runs(place, str(path), task):
        found[run.task].append(run)
    if task is not None and task not in found:
        raise unknown_name("--task", task, found or _tasks_at(place))
    if not found:
        raise InputError("run", str(path), _EXPECTED)
    for name, runs in found.items():
        if len(runs) > 1:
            listed = [f"{run.source} ({run.policy})" if run.policy else str(run.source) for run in runs[:4]]
            several = "; ".join(listed) + (" ..." if len(runs) > 4 else "")
            raise InputError(
                "run", str(path), f"one run of {name}, there are {len(runs)}; give one of: {several}"
            )
    return {name: runs[0] for name, runs in found.items()}


def _runs(place: Path, path: str, task: str | None) -> Iterator[TaskRun]:
    if place.is_dir():
        files = sorted(file for file in place.rglob("*.json*") if file.is_file())
        for file in files:
            if RECORD_NAME.fullmatch(file.name):
                yield from _record_runs(file, path, task, alone=False)
        samples = [file for file in files if _SAMPLES.fullmatch(file.name)]
        for file in samples:
            yield from _sample_runs(file, path, task)
        if not samples and any(_RESULTS.fullmatch(file.name) for file in files):
            raise _without_samples(path)
    elif place.suffix == ".jsonl":
        if not _SAMPLES.fullmatch(place.name):
            raise InputError("run", path, "the name that lm-eval gave it, samples_TASK_TIME.jsonl")
        yield from _sample_runs(place, path, task)
    elif RECORD_NAME.fullmatch(place.name):
        yield from _record_runs(place, path, task, alone=True)
    else:
        match = _RESULTS.fullmatch(place.name)
        if "results" not in _table(_json(place, path)) or match is None:
            raise InputError("run", path, _EXPECTED)
        beside = sorted(place.parent.glob(f"samples_*_{match['time']}.jsonl"))
        if not beside:
            raise _without_samples(path)
        for file in beside:
            yield from _sample_runs(file, path, task)


def _sample_runs(file: Path, path: str, task: str | None) -> Iterator[TaskRun]:
    match = _SAMPLES.fullmatch(file.name)
    if match is None or (task is not None and match["task"] != task):
        return
    results = next(iter(sorted(file.parent.glob(f"*_{match['time']}.json"))), None)
    held = None if results is None else _json(results, path)
    if results is not None and not isinstance(held, dict):
        raise InputError("run", path, f"one JSON object in {results.name}")
    run = TaskRun(path, file, match["task"], _lines(file), held)
    counted = _table(_table(_table(run.results).get("n-samples")).get(run.task)).get("effective")
    present = len({str(document.get("doc_id")) for document in run.documents})
    if isinstance(counted, int) and counted != present:
        raise InputError("samples", str(file), f"the {counted} documents of its results, not {present}")
    yield run


def _record_runs(file: Path, path: str, task: str | None, *, alone: bool) -> Iterator[TaskRun]:
    record = load_record(file)
    if record["kind"] != "eval" and not alone:
        return
    documents = record["metrics"].get("documents")
    if record["kind"] != "eval" or not isinstance(documents, list) or not documents:
        if alone:
            expected = (
                f"a record of an evaluation with documents (kind {record['kind']}, status {record['status']})"
            )
            raise InputError("run", path, expected)
        return
    results = record["metrics"].get("lm_eval")
    if not isinstance(results, dict):
        results = {"config": {"policy": record["point"]["policy"], "model": record["point"].get("model")}}
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("task"), str):
            raise InputError("run", path, f"documents with a task in {file.name}")
        by_task[document["task"]].append({"doc_hash": document.get("hash"), **document})
    for name, rows in by_task.items():
        if task in (None, name):
            yield TaskRun(path, file, name, rows, results, record["protocol"])


def _tasks_at(place: Path) -> list[str]:
    folder = place if place.is_dir() else place.parent
    return sorted(
        {match["task"] for file in folder.rglob("*.jsonl") if (match := _SAMPLES.fullmatch(file.name))}
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    documents = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                document = json.loads(line)
                if not isinstance(document, dict):
                    raise InputError("samples", str(file), f"a JSON object in line {number}")
                # The longest parts, which nothing here reads.
                documents.append(
                    {name: document[name] for name in document if name not in ("doc", "arguments")}
                )
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        number = len(documents) + 1
        raise InputError(
            "samples", str(file), f"one JSON object a line; document {number}: {error}"
        ) from error
    if not documents:
        raise InputError("samples", str(file), "at least one document, the file is empty")
    return documents


def _json(file: Path, path: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError("run", path, f"JSON in {file.name} ({error})") from error


def _without_samples(path: str) -> InputError:
    return InputError(
        "run", path, "samples_TASK_TIME.jsonl beside the results; run lm-eval with --log_samples"
    )


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
