"""The runner of eval points: points that share everything but the policy share one loaded model."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from quantlab.errors import InputError
from quantlab.evals.preflight import check_data, check_model, check_policies, check_tasks, own_tasks
from quantlab.evals.run import Evaluation, model_folder
from quantlab.evals.task_settings import Sampling

_DEFAULTS = {"data": None, "batch_size": 32, "limit": None, "seed": 0, "scoring": "decode", "items": None}
_DEFAULTS |= {"chat_template": False, "choice_seed": 0}
_SAMPLING = tuple(field.name for field in fields(Sampling))


def check_points(points: list[dict[str, Any]]) -> None:
    """Raise InputError for a data file, task or model folder that no run could use, before anything is written.

    lm-eval is asked only about tasks that are not quantlab's own: its index takes a quarter of a minute.
    """
    options = _DEFAULTS | points[0]
    if not set(options["tasks"]) <= own_tasks():
        check_tasks(options["tasks"], options["data"], options["choice_seed"])
    else:
        check_data(options["tasks"], options["data"], options["choice_seed"])
    check_model(options["model"])


def run_points(
    points: list[dict[str, Any]], *, threads: int, on_progress: Callable[..., None]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (point, record without environment) for each point, in order.

    A point: kind "eval", policy, model (a folder, a reference model, or a name of ``BUILTIN_MODELS``, built on the
    spot and removed afterwards), tasks, and optionally data, batch_size, limit, seed, scoring, items, chat_template,
    choice_seed, generation (arguments of ``QuantlabLM``) and repeats, max_gen_toks, temperature, top_p of ``Sampling``.
    All points of a call agree in all but the policy.
    ``on_progress(done, total)`` counts points.  Raises InputError for points that differ in more, and for whatever
    ``run_eval`` refuses before it runs, what its preflight without a sample finds included; a policy that the documents
    did not exercise becomes a record with status "not_exercised".
    """
    if not points:
        return
    # The sweep shows the progress of its workers; the hints of these two would run over it.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import torch
    import transformers

    transformers.logging.set_verbosity_error()

    torch.set_num_threads(threads)
    shared = {key: value for key, value in points[0].items() if key != "policy"}
    for point in points:
        if {key: value for key, value in point.items() if key != "policy"} != shared:
            raise InputError("points", point, "points that differ in the policy only")
    options = _DEFAULTS | shared
    policies = {point["policy"]: check_policies([point["policy"]])[0] for point in points}
    with ExitStack() as stack:
        folder = model_folder(options["model"], stack)
        evaluation = Evaluation(
            folder,
            list(policies.values()),
            options["tasks"],
            options["data"],
            options["batch_size"],
            options["limit"],
            options["seed"],
            options["scoring"],
            items=options["items"],
            chat_template=options["chat_template"],
            choice_seed=options["choice_seed"],
            generation={"quiet": True} | (options.get("generation") or {}),
            sampling=Sampling(**{name: options.get(name) for name in _SAMPLING}),
        )
        evaluation.preflight().require()
        for done, point in enumerate(points):
            on_progress(done, len(points))
            try:
                found = evaluation.preflight([policies[point["policy"]]])
                found.require()
                record, _, _ = evaluation.run(policies[point["policy"]])
                record["metrics"]["preflight"] = found.as_dict()
            except InputError as error:
                if error.argument != "policy":
                    raise
                record = {"kind": "eval", "status": "not_exercised", "message": str(error), "metrics": {}}
            yield point, {**record, "point": point}
        on_progress(len(points), len(points))


def run_point(point: dict[str, Any], *, threads: int = 1) -> dict[str, Any]:
    """The record (without environment) of a single point."""
    return next(run_points([point], threads=threads, on_progress=lambda *_: None))[1]
