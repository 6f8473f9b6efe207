"""What can be known to be wrong with an evaluation before a model runs and before anything is written."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantlab.errors import InputError, unknown_name
from quantlab.evals import benchmarks, gpqa
from quantlab.evals.plugin import TASK_FOLDER
from quantlab.models.reference import PREFIX, reference_folder
from quantlab.schemes import Policy, PolicyRules, parse_rules

BUILTIN_MODELS = {"builtin:tiny-mamba2": "mamba2", "builtin:tiny-gated-delta": "gated_delta"}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_policies(policies: Sequence[str | Path | Policy | PolicyRules]) -> list[PolicyRules]:
    """The parsed policies, each once.  InputError for a bad text or file, or an empty list."""
    parsed = list(dict.fromkeys(parse_rules(policy) for policy in policies))
    if not parsed:
        raise InputError("policies", list(policies), "at least one policy")
    return parsed


def check_model(model: str) -> Path | None:
    """The checked folder of ``model``: a folder, or "reference:" and a name.  None for the name of a built-in model,
    whose folder is yet to be made.  InputError for anything else.
    """
    if model.startswith(PREFIX):
        return reference_folder(model)
    if model.startswith("builtin:"):
        if model not in BUILTIN_MODELS:
            raise unknown_name("model", model, BUILTIN_MODELS)
        return None
    return check_model_folder(model)


def check_model_folder(folder: str | Path) -> Path:
    """InputError unless ``folder`` holds a readable config.json, weights and a tokenizer."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("model", str(folder), "a folder with a Hugging Face model")
    if not any(list(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise InputError("model", str(folder), f"weights in the folder ({' or '.join(_WEIGHTS)})")
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    def weights() -> None:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(
                str(file), framework="numpy"
            ):  # reads the header, which the file's size must match
                pass

    def tokenizer() -> None:
        # Without its files the library makes up a tokenizer that knows no text.
        if not AutoTokenizer.from_pretrained(folder, local_files_only=True)("A").input_ids:
            raise ValueError("it turns text into no tokens; are its files there?")

    def config() -> None:
        AutoConfig.from_pretrained(folder, local_files_only=True)

    for read in (config, weights, tokenizer):
        try:
            read()
        except Exception as error:  # whatever a broken file raises inside the library
            reason = str(error).strip() or type(error).__name__
            raise InputError("model", str(folder), f"a readable {read.__name__} ({reason})") from error
    return folder


def needs_data(tasks: Sequence[str]) -> list[str]:
    """Those of quantlab's own tasks whose documents come from local data; the others make theirs."""
    return sorted(task for task in set(tasks) & own_tasks() if task.startswith(tuple(_BENCHMARKS)))


def own_tasks() -> set[str]:
    return {path.stem for path in TASK_FOLDER.glob("*.yaml") if not path.stem.startswith("_")}


def check_data(tasks: Sequence[str], data: str | Path | None, choice_seed: int) -> None:
    """InputError unless each of ``tasks`` that needs data finds its documents in ``data``."""
    seen = set()
    for task in needs_data(tasks):
        prefix = next(prefix for prefix in _BENCHMARKS if task.startswith(prefix))
        subset = task.removeprefix(prefix).partition("_")[0] if prefix == "quantlab_gpqa_" else ""
        if (prefix, subset) not in seen:
            _BENCHMARKS[prefix](data, subset, choice_seed)
            seen.add((prefix, subset))


# What reads the documents of the tasks with this prefix from (data, subset, choice_seed).
_BENCHMARKS: dict[str, Callable[[str | Path | None, str, int], Any]] = {
    "quantlab_gpqa_": gpqa.documents,
    "quantlab_mmlu_pro_": lambda data, *_: benchmarks.mmlu_pro_documents(data),
    "quantlab_gsm8k_": lambda data, *_: benchmarks.number_documents(data, benchmarks.GSM8K),
    "quantlab_aime_": lambda data, *_: benchmarks.number_documents(data, benchmarks.AIME, highest=999),
}


def check_tasks(
    tasks: Sequence[str], data: str | Path | None, choice_seed: int, items: int | None = None
) -> Any:
    """A TaskManager that knows ``tasks``.  InputError for an unknown task and for data that does not fit.

    quantlab's own tasks come from the package; only when another name is asked for is lm-eval's own index
    read, which takes a quarter of a minute.
    """
    if not tasks:
        raise InputError("tasks", list(tasks), "at least one task")
    from lm_eval.tasks import TaskManager

    metadata: dict[str, Any] = {"gpqa_seed": choice_seed}
    if items is not None:
        metadata["items"] = items
    if data is not None:
        metadata["data"] = str(data)
    options: dict[str, Any] = {"include_path": [str(TASK_FOLDER)], "metadata": metadata}
    manager = TaskManager(include_defaults=False, **options)
    own = set(manager.all_tasks)
    if not set(tasks) <= own:
        manager = TaskManager(**options)
        for task in tasks:
            if task not in manager.all_tasks:
                raise InputError("task", task, f"a task of lm-eval or of quantlab ({', '.join(sorted(own))})")
    check_data(tasks, data, choice_seed)
    if data is not None and set(tasks) <= own_tasks() and not needs_data(tasks):
        raise InputError("data", str(data), f"tasks that read local data; {', '.join(tasks)} do not")
    return manager


def rounded_copies(rules: PolicyRules) -> dict[str, bool]:
    """Which stored copies hold rounded values in some layer or head."""
    return {
        "checkpoint": any(policy.checkpoint.rounded for policy in rules.policies),
        "read_copy": any(policy.read_copy is not None for policy in rules.policies),
    }


def check_requests(
    lm: Any,
    policies: Sequence[PolicyRules],
    tasks: dict[str, Any],
    limit: int | None,
    chat_template: bool = False,
) -> None:
    """Token counts of the prompts against the model's context and the policies' windows.

    InputError for a prompt that does not fit, with what may be generated behind it.  Warns where a policy's
    checkpoint would be stored and read back fewer than twice on the shortest scored prompt: then the hand-off alone
    is being measured.
    """
    counts = []
    if chat_template and not getattr(lm.tokenizer, "chat_template", None):
        raise InputError("chat_template", True, "a model whose tokenizer has a chat template")

    def prompt(text: str) -> str:
        return lm.apply_chat_template([{"role": "user", "content": text}]) if chat_template else text

    for task in tasks.values():
        generates = task.config.output_type == "generate_until"
        new = (task.config.generation_kwargs or {}).get("max_gen_toks", lm.max_gen_toks) if generates else 0
        found = [
            len(lm.tok_encode(prompt(task.doc_to_text(document))))
            for _, document in task.doc_iterator(rank=0, limit=limit, world_size=1)
        ]
        if not found:
            raise InputError("tasks", sorted(tasks), "at least one document")
        if max(found) > lm.max_length:
            raise InputError(
                "prompt length", max(found), f"at most {lm.max_length} tokens, the model's context"
            )
        if max(found) + int(new) > lm.max_length:
            room = lm.max_length - max(found)
            raise InputError(
                "max_gen_toks", new, f"at most {room}: the model's context is {lm.max_length} tokens"
            )
        # A generated answer reads its state back as often as it is long, which nobody knows yet.
        counts += [] if generates else found
    if lm.scoring != "decode" or not counts:
        return
    for rules in policies:
        # The hand-off after the first token, and one store each ``window`` tokens, the last of them read by
        # nobody.
        read_back = 1 + (min(counts) - 2) // max(policy.window for policy in rules.policies)
        if read_back < 2 and any(rounded_copies(rules).values()):
            warnings.warn(
                f"{rules}: the shortest prompt ({min(counts)} tokens) reads back about {max(read_back, 0)} "
                "store; a smaller window or longer prompts would exercise it",
                stacklevel=3,
            )
