"""Evaluate one model on lm-eval tasks under several policies: one load, one results file a policy."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from quantlab.errors import InputError
from quantlab.evals.plugin import TASK_FOLDER
from quantlab.evals.preflight import (
    BUILTIN_MODELS,
    check_model,
    check_policies,
    check_requests,
    check_tasks,
    own_tasks,
)
from quantlab.evals.preflight_report import Check, Preflight, SampleSize
from quantlab.evals.preflight_requests import dtype_check, exercised_check, read_requests, request_checks
from quantlab.evals.resume import SIDECAR, evaluation_key, keep_record, kept_record, remove_unfinished
from quantlab.evals.samples import as_lines, record_documents
from quantlab.evals.sidecar import set_aside, strip_tokens
from quantlab.evals.task_settings import Sampling, with_sampling
from quantlab.records import check_output_folder, check_output_place
from quantlab.schemes import Diverged, Policy, PolicyRules

logger = logging.getLogger(__name__)


def run_eval(
    model: str | Path,
    policies: Sequence[str | Path | Policy | PolicyRules],
    tasks: Sequence[str],
    *,
    data: str | Path | None = None,
    output: str | Path,
    batch_size: int = 32,
    limit: int | None = None,
    seed: int = 0,
    scoring: str = "decode",
    device: str | None = None,
    items: int | None = None,
    sampling: Sampling | None = None,
    chat_template: bool = False,
    choice_seed: int = 0,
    log_samples_with_text: bool = False,
    generation: dict[str, Any] | None = None,
    preflight: SampleSize | None = None,
    preflight_only: bool = False,
    on_preflight: Callable[[Preflight], object] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate ``model`` under each policy; returns one record a policy.

    ``model``: a folder, "reference:" with a name of ``reference_models()``, or a name of BUILTIN_MODELS.

    ``output/<policy file name>/results_<time>.json`` is lm-eval's own results file, with the policy and
    what it did under "config"; ``samples_<task>_<time>.jsonl`` beside it holds each document's hashes, metrics and
    log-likelihoods.  No prompt, choice or response is written, unless ``log_samples_with_text`` asks for lm-eval's
    whole samples.

    ``data``: where quantlab's benchmark tasks find their documents (``local_data.read_table``).  ``seed`` names the
    random bits of stochastic rounding and of sampling, ``choice_seed`` the order of GPQA's choices: runs are paired
    where they asked the same, so a control run has another ``seed`` and the same ``choice_seed``.  ``limit``:
    documents of each task, the first ones; of quantlab's benchmarks that is a sample (``documents``).  ``items``:
    how many documents the reference models' tasks make.  ``sampling`` changes what task files say about generation.
    ``chat_template`` puts each prompt into the tokenizer's chat template as a user's turn.  ``generation``: arguments
    of ``QuantlabLM`` for generation, such as generation_batch, engine, sampling_seed, think_end_token and max_length.

    The same call goes on where it was stopped: a policy whose record is there, of the same model, data and settings,
    is not run again, and of one that was in the middle of generating, the sequences that had finished are taken from
    ``generations.jsonl`` in its folder.

    What would be asked is looked at before anything is scored (``preflight_requests``).  ``preflight``: how large a
    sample of responses is generated and looked at too, where a task generates and a policy is still to be run.
    ``on_preflight`` is given what was found, stops included (without it, warnings are logged); ``preflight_only``
    leaves it at that: nothing is written and no record returned.

    Raises InputError, before anything is written, for a model folder, policy, task or data file that cannot
    be used, and for a run that the preflight finds meaningless; and for a policy that the documents do not exercise.
    """
    parsed = check_policies(policies)
    records = []
    with ExitStack() as stack:
        place = model_folder(str(model), stack)
        evaluation = Evaluation(
            place,
            parsed,
            tasks,
            data,
            batch_size,
            limit,
            seed,
            scoring,
            device,
            items,
            sampling,
            chat_template,
            choice_seed,
            generation,
        )
        # Asked before the hours of evaluation, not after them.
        evaluation.check_fit(parsed)
        kept: dict[PolicyRules, dict[str, Any] | None] = {}
        keys: dict[PolicyRules, str] = {}
        if not preflight_only:
            check_output_place(output)
            for policy in parsed:
                keys[policy] = evaluation.key(policy, with_text=log_samples_with_text)
                kept[policy] = kept_record(Path(output) / policy.file_name, keys[policy])
        nothing_left = bool(kept) and all(kept.values())
        found = evaluation.preflight(parsed, sample=None if nothing_left else preflight)
        (on_preflight or _log_warnings)(found)
        found.require()
        if preflight_only:
            return []
        check_output_folder(output)
        for policy in parsed:
            check_output_place(Path(output) / policy.file_name)
        for policy in parsed:
            folder, key, record = Path(output) / policy.file_name, keys[policy], kept[policy]
            evaluation.use(policy)
            if record is None:
                set_aside(folder / SIDECAR)
                record, results, samples = evaluation.run(policy, sidecar=folder / SIDECAR)
                record["metrics"]["preflight"] = found.as_dict()
                remove_unfinished(folder, key)
                files = result_files(results, samples, with_text=log_samples_with_text)
                keep_record(folder, key, record, files)
            else:
                logger.info("%s: this evaluation is there already, in %s", policy, folder)
            evaluation.end(folder / SIDECAR, keep_tokens=log_samples_with_text)
            records.append(record)
    return records


def model_folder(model: str, stack: ExitStack) -> Path:
    """The checked folder of ``model``; a built-in one is built on the spot and removed when ``stack`` closes."""
    if (folder := check_model(model)) is not None:
        return folder
    from quantlab.models import build_tiny

    parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantlab-")))
    return build_tiny(BUILTIN_MODELS[model], parent / model.partition(":")[2])


class Evaluation:
    """A loaded model and its tasks, checked and ready to run under one policy after another."""

    def __init__(
        self,
        folder: Path,
        policies: Sequence[PolicyRules],
        tasks: Sequence[str],
        data: str | Path | None,
        batch_size: int,
        limit: int | None,
        seed: int,
        scoring: str,
        device: str | None = None,
        items: int | None = None,
        sampling: Sampling | None = None,
        chat_template: bool = False,
        choice_seed: int = 0,
        generation: dict[str, Any] | None = None,
    ):
        self._data, self._generation = data, dict(generation or {})
        self._manager = check_tasks(tasks, data, choice_seed, items)
        sampling = Sampling() if sampling is None else sampling
        self._specs = with_sampling(self._manager, tasks, sampling)
        from quantlab.evals import model

        QuantlabLM: Any = model.QuantlabLM  # lm-eval's decorator hides the type of the class

        where = {} if device is None else {"device": device}
        self._name, self._tasks, self._limit, self._seed = folder.name, list(tasks), limit, seed
        self._batch_size, self._made = batch_size, {} if items is None else {"items": items}
        self._made |= sampling.as_dict() | ({"chat_template": True} if chat_template else {})
        self._made |= {"choice_seed": choice_seed} if choice_seed else {}
        self._chat_template = chat_template
        for policy in policies:
            QuantlabLM.check_scoring(scoring, policy)
        options = where | self._generation
        self._lm: Any = QuantlabLM(
            str(folder), policies[0], scoring=scoring, batch_size=batch_size, **options
        )
        tasks_of_run = self._manager.load(self._specs)["tasks"]
        check_requests(self._lm, policies, tasks_of_run, limit, chat_template)
        self._choice_seed = choice_seed
        self._asked = [
            read_requests(self._lm, name, task, limit, chat_template=chat_template, seed=seed)
            for name, task in tasks_of_run.items()
        ]

    def check_fit(self, policies: Sequence[PolicyRules]) -> None:
        """InputError for a policy that the recurrences of the model have no use for."""
        for policy in policies:
            self.use(policy)

    def use(self, policy: PolicyRules) -> None:
        """Take up ``policy``, with nothing done under it yet."""
        self._lm.use_policy(policy, seed=self._seed)

    @cached_property
    def _request_checks(self) -> list[Check]:
        options = {
            "chat_template": self._chat_template,
            "choice_seed": self._choice_seed,
            "data": self._data,
        }
        return [check for asked in self._asked for check in request_checks(self._lm, asked, **options)]

    def preflight(
        self, policies: Sequence[PolicyRules] = (), *, sample: SampleSize | None = None
    ) -> Preflight:
        """What would be asked, under which protocol, and what ``policies`` would do; with ``sample``, a few responses.

        Where the first half stops the run already, nothing is generated.
        """
        checks = list(self._request_checks)
        decodes = self._lm.scoring == "decode"
        checks += [
            exercised_check(asked, policy)
            for asked in self._asked
            for policy in policies
            if asked.generates or decodes
        ]
        for policy in policies:
            if self._lm.scoring != "prefill" or any(asked.generates for asked in self._asked):
                self.use(policy)
                checks.append(dtype_check(self._lm, policy))
        found = Preflight(tuple(checks))
        if sample is None or found.stops:
            return found
        from quantlab.evals.preflight_sample import sample_checks

        return found.with_checks(sample_checks(self._lm, self._asked, sample, seed=self._seed))

    def point(self, policy: PolicyRules) -> dict[str, Any]:
        """What is evaluated, as a record says it."""
        return {
            "kind": "eval",
            "policy": str(policy),
            "model": self._name,
            "tasks": self._tasks,
            "limit": self._limit,
            "seed": self._seed,
            "scoring": self._lm.scoring,
            **self._made,
        }

    def key(self, policy: PolicyRules, *, with_text: bool = False) -> str:
        """Hash of all that decides the record and the files of ``policy``."""
        from quantlab.evals.generating import settings_of

        self._lm.use_policy(policy, seed=self._seed)
        files = [
            *([TASK_FOLDER] if own_tasks() & set(self._tasks) else []),
            *([self._data] if self._data else []),
        ]
        settings = settings_of(self._lm) | self._generation | ({"with_text": True} if with_text else {})
        return evaluation_key(self.point(policy), settings, files)

    def end(self, sidecar: Path, *, keep_tokens: bool = False) -> None:
        """The record of a policy is written: its sidecar, if there is one, gives its tokens up."""
        self._lm.end_sidecar()
        if not keep_tokens:
            strip_tokens(sidecar)

    def run(
        self, policy: PolicyRules, *, sidecar: Path | None = None
    ) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, list[dict[str, Any]]]]:
        """(record, lm-eval's results without its samples, those by task) of one policy; results are None if the
        state diverged.  ``sidecar``: a file from which generations go on.
        """
        import lm_eval

        evaluate: Any = lm_eval.simple_evaluate  # its decorator hides the signature

        started = time.monotonic()
        record: dict[str, Any] = {
            "kind": "eval",
            "status": "ok",
            "message": None,
            "point": self.point(policy),
            "metrics": {},
        }
        record |= {"curve": None, "series": None}
        # Its tokens stay until the results are on the disk.
        self._lm.use_policy(policy, seed=self._seed, sidecar=sidecar, keep_tokens=True)
        try:
            results = evaluate(
                self._lm,
                model_args={"pretrained": self._name, "policy": str(policy), "scoring": self._lm.scoring},
                tasks=self._specs,
                task_manager=self._manager,
                batch_size=self._batch_size,
                limit=self._limit,
                log_samples=True,
                apply_chat_template=self._chat_template,
                random_seed=self._seed,
                numpy_random_seed=self._seed,
                torch_random_seed=self._seed,
                fewshot_random_seed=self._seed,
            )
        except Diverged as error:
            metrics = self._lm.interception.report.as_dict()
            diverged = {"status": "diverged", "message": str(error), "metrics": metrics}
            return record | diverged | {"seconds": time.monotonic() - started}, None, {}
        if results is None:
            raise InputError("RANK", os.environ.get("RANK"), "the main process: only rank 0 holds results")
        plain: dict[str, Any] = json.loads(_dump(results))
        samples = plain.pop("samples", {})
        record["message"] = plain["config"]["warning"]
        record["metrics"] = _metrics(plain, samples)
        return record | {"seconds": time.monotonic() - started}, plain, samples


def _log_warnings(found: Preflight) -> None:
    for check in found.warnings:
        logger.warning("%s", check.error)


def result_files(
    results: dict[str, Any] | None, samples: dict[str, list[dict[str, Any]]], *, with_text: bool = False
) -> dict[str, bytes]:
    """lm-eval's results file and its samples files under lm-eval's own kind of names: content by name.

    The results come last: where they are, their samples are.  None of a policy whose state diverged.
    """
    if results is None:
        return {}
    second, rest = divmod(
        time.time_ns(), 10**9
    )  # one reading of the clock, or a second could be one too early
    stamp = f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime(second))}.{rest // 1000:06d}"
    files = {
        f"samples_{task}_{stamp}.jsonl": as_lines(rows, with_text=with_text) for task, rows in samples.items()
    }
    return files | {f"results_{stamp}.json": json.dumps(results, indent=2, ensure_ascii=False).encode()}


def _dump(results: Any) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(results, default=handle_non_serializable, ensure_ascii=False)


def _metrics(results: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Numbers per task, what the policy did, and the documents without their text."""
    tasks = {
        task: {
            **{
                name.partition(",")[0]: value
                for name, value in values.items()
                if isinstance(value, int | float)
            },
            "n": results["n-samples"][task]["effective"],
        }
        for task, values in results["results"].items()
        if task in results["n-samples"]
    }
    config = results["config"]
    names = (
        "exercised",
        "op_hits",
        "effective_policy",
        "bits_per_value",
        "bytes_per_token",
        "conv_state_bytes",
    )
    names += ("bytes_read_per_token", "bytes_written_per_token", "ledger", "state_held_as", "generation")
    return {
        "tasks": tasks,
        **{name: config[name] for name in names if name in config},
        "warning": config["warning"],
        "documents": record_documents(samples),
        "lm_eval": _portable(results),
    }


def _portable(results: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's results without what names this machine: folders become base names, its host report goes."""
    config = results["config"] | {"model": Path(str(results["config"]["model"])).name}
    configs = {}
    for task, settings in results["configs"].items():
        metadata = settings.get("metadata") or {}
        if "config_source" in metadata:
            metadata = metadata | {"config_source": Path(metadata["config_source"]).name}
        configs[task] = settings | {"metadata": metadata}
    kept = {key: value for key, value in results.items() if key != "pretty_env_info"}
    return kept | {"config": config, "configs": configs}
