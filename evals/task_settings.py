"""What a run changes in the task files of generative tasks: how many responses, how long, how they are sampled."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantlab.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """None: as the task file says.  Raises InputError for a value out of range."""

    repeats: int | None = None
    """Responses to each document."""
    max_gen_toks: int | None = None
    """Generated tokens at most, thinking included."""
    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("repeats", "max_gen_toks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(name, value, "a whole number of at least 1")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise InputError("temperature", self.temperature, "a number of at least 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError("top_p", self.top_p, "a number above 0, at most 1")

    def as_dict(self) -> dict[str, Any]:
        """What is changed, and nothing else."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def with_sampling(manager: Any, tasks: Sequence[str], sampling: Sampling) -> list[Any]:
    """What lm-eval's TaskManager ``manager`` loads for ``tasks``: names, or whole configurations where some changes.

    A dictionary beside a name would not inherit the task file, so the file is read here.  Raises InputError where
    no task generates, where the responses of a task would be thrown away but for the first, and for several greedy
    responses, which would all be the same.
    """
    if not sampling.as_dict():
        return list(tasks)
    specs = [_changed(manager, task, sampling) for task in tasks]
    if all(isinstance(spec, str) for spec in specs):
        name, value = next(iter(sampling.as_dict().items()))
        raise InputError(name, value, f"at least one task that generates; {', '.join(tasks)} do not")
    return specs


def _changed(manager: Any, task: str, sampling: Sampling) -> str | dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(task)
    if entry is None or entry.yaml_path is None:  # a tag, or a task that is Python code
        return task
    config = copy.deepcopy(load_yaml(entry.yaml_path, resolve_func=True))
    if config.get("output_type", "generate_until") != "generate_until" or "task" not in config:
        return task
    options = dict(config.get("generation_kwargs") or {})
    changes = sampling.as_dict()
    repeats = changes.pop("repeats", None)
    options |= changes
    if "temperature" in changes:
        options["do_sample"] = changes["temperature"] > 0
    if "top_p" in changes and not options.get("do_sample"):
        raise InputError("top_p", sampling.top_p, f"a temperature above 0: {task} is greedy")
    if not options.get("do_sample"):
        options = {name: value for name, value in options.items() if name not in ("top_p", "top_k", "min_p")}
        if (repeats or config.get("repeats", 1)) > 1:
            raise InputError("repeats", repeats or config["repeats"], "1: greedy responses are all the same")
    config["generation_kwargs"] = options
    if repeats is not None:
        config["repeats"] = repeats
        keeping = [
            f
            for part in config.get("filter_list") or ()
            for f in part["filter"]
            if f["function"] == "take_first_k"
        ]
        for function in keeping:
            function["k"] = repeats
        if repeats > 1 and not keeping:
            raise InputError("repeats", repeats, f"1: {task} keeps the first response only")
    return config
