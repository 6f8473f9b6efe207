"""The half of a preflight that generates nothing: what would be asked, in which order, under which protocol.

Prompts are those that lm-eval would send: its own code builds them, few-shot examples and chat template included.
"""

import contextlib
import hashlib
import inspect
import io
import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantlab.evals import answers, gpqa
from quantlab.evals.documents import LETTERS
from quantlab.evals.identity import tokenizer_identity
from quantlab.evals.preflight_report import Check
from quantlab.records import content_hash
from quantlab.schemes import Policy, PolicyRules

SURPRISING = 1e-3
"""A histogram of gold letters that chance gives more rarely is worth a word; a constant one stops the run."""
_DRAWS = 9_999


@dataclass(frozen=True)
class Requested:
    """A task and what it would ask.

    lengths: tokens of each different prompt of a document.  limit: generated tokens at most, 0 where answers are
    scored.
    """

    name: str
    task: Any
    instances: tuple[Any, ...]
    documents: tuple[dict[str, Any], ...]
    prompts: tuple[str, ...]
    lengths: tuple[int, ...]
    limit: int

    @property
    def generates(self) -> bool:
        return self.task.config.output_type == "generate_until"

    @property
    def repeats(self) -> int:
        return int(self.task.config.repeats or 1) if self.generates else 1


def read_requests(
    lm: Any, name: str, task: Any, limit: int | None, *, chat_template: bool, seed: int
) -> Requested:
    """What lm-eval would ask ``lm`` of the first ``limit`` documents of ``task``."""
    from lm_eval.models.utils import normalize_gen_kwargs

    if hasattr(task, "set_fewshot_seed"):
        task.set_fewshot_seed(seed=seed)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar for what takes no time
        task.build_all_requests(
            limit=limit,
            rank=0,
            world_size=1,
            apply_chat_template=chat_template,
            chat_template=lm.apply_chat_template if chat_template else None,
        )
    instances = tuple(task.instances)
    documents = {instance.doc_id: instance.doc for instance in instances}
    prompts = list(dict.fromkeys((instance.doc_id, instance.args[0]) for instance in instances))
    most = 0
    if task.config.output_type == "generate_until":
        options: list[dict[str, Any]] = [
            dict(normalize_gen_kwargs(dict(instance.args[1]), lm.max_gen_toks)) for instance in instances
        ]
        most = max(int(found["max_gen_toks"]) for found in options)
    texts = tuple(text for _, text in prompts)
    lengths = tuple(len(lm.tok_encode(text)) for text in texts)
    return Requested(name, task, instances, tuple(documents.values()), texts, lengths, most)


def request_checks(
    lm: Any,
    asked: Requested,
    *,
    chat_template: bool,
    choice_seed: int = 0,
    data: str | Path | None = None,
) -> list[Check]:
    """All of one task that needs no policy."""
    found = [documents_check(asked), gold_check(asked)]
    if asked.name.startswith("quantlab_gpqa_"):
        found.append(order_check(asked, data, choice_seed))
    found += [
        length_check(asked, lm.max_length),
        template_check(lm, asked, chat_template=chat_template),
        protocol_check(lm, asked, chat_template=chat_template, choice_seed=choice_seed),
    ]
    return [check for check in found if check is not None]


def documents_check(asked: Requested) -> Check:
    count, values = len(asked.documents), {"documents": len(asked.documents)}
    text = f"{count:,}"
    if asked.generates:
        most = count * asked.repeats * asked.limit
        values |= {"repeats": asked.repeats, "max_gen_toks": asked.limit, "generated_tokens_at_most": most}
        text += f" x {asked.repeats} responses; at most {most:,} generated tokens a policy"
    return Check("documents", text, task=asked.name, values=values)


def gold_check(asked: Requested) -> Check | None:
    """Where the right answers stand.  None for tasks without choices."""
    places = [place for document in asked.documents if (place := _gold(asked.task, document)) is not None]
    if not places:
        return None
    counts, p = gold_histogram(places)
    text = ", ".join(f"{letter} {count}" for letter, count in counts.items()) + f"; p = {p:.2g}"
    values = {"gold": counts, "p": p}
    constant = sum(count > 0 for count in counts.values()) == 1
    if constant and _p_constant([choices for _, choices in places]) < SURPRISING:
        change = "gold letters that differ; choices in a fixed order measure a liking for that letter"
        return Check("gold letters", text, "stop", change, asked.name, values)
    if p < SURPRISING:
        change = "every letter about as often: these documents favour a model that likes one letter"
        return Check("gold letters", text, "warn", change, asked.name, values)
    return Check("gold letters", text, task=asked.name, values=values)


def gold_histogram(places: Sequence[tuple[int, int]]) -> tuple[dict[str, int], float]:
    """Counts by letter, and the probability of a Pearson statistic as large where every choice is as likely.

    places: (index of the right choice, number of choices) of each document.  The probability is that of 9,999 draws
    with a fixed seed, so it needs no large expected counts and allows for documents with other numbers of choices.
    """
    most = max(choices for _, choices in places)
    counts = np.bincount([place for place, _ in places], minlength=most)
    drawn = np.zeros((_DRAWS, most), dtype=np.int64)
    expected = np.zeros(most)
    generator = np.random.default_rng(0)
    for choices, documents in sorted(Counter(choices for _, choices in places).items()):
        drawn[:, :choices] += generator.multinomial(documents, np.full(choices, 1 / choices), size=_DRAWS)
        expected[:choices] += documents / choices
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Draws that tie with what was seen count; a sum in another order may round them apart.
    as_large = (((drawn - expected) ** 2 / expected).sum(1) >= statistic * (1 - 1e-9)).sum()
    letters = (LETTERS + "KLMNOPQRSTUVWXYZ")[:most]
    return dict(zip(letters, counts.tolist(), strict=False)), float((1 + as_large) / (1 + _DRAWS))


def order_check(asked: Requested, data: str | Path | None, choice_seed: int) -> Check:
    """Whether another choice seed moves the choices.  One order in 24 stays where it was."""
    subset = (asked.task.config.metadata or {}).get("subset", "diamond")
    orders = [
        [document["choices"] for document in gpqa.documents(data, subset, seed)]
        for seed in (choice_seed, choice_seed + 1)
    ]
    total = len(orders[0])
    moved = sum(here != there for here, there in zip(*orders, strict=True))
    text, values = f"another choice seed moves {moved:,} of {total:,}", {"moved": moved, "of": total}
    if moved == 0 and (1 / 24) ** total < SURPRISING:
        return Check("choice order", text, "stop", "choices whose order the seed decides", asked.name, values)
    return Check("choice order", text, task=asked.name, values=values)


def length_check(asked: Requested, context: int) -> Check:
    """Prompts, and what may be generated behind the longest, against the model's context."""
    low, middle, high = min(asked.lengths), int(statistics.median(asked.lengths)), max(asked.lengths)
    values = {"least": low, "median": middle, "most": high, "max_gen_toks": asked.limit, "context": context}
    text = f"{low:,} / {middle:,} / {high:,}"
    if asked.limit:
        text += f", with max_gen_toks {high + asked.limit:,}"
    text += f", of a context of {context:,}"
    if high + asked.limit > context and asked.task.config.output_type != "loglikelihood_rolling":
        what = f"max_gen_toks of at most {context - high:,}" if high < context else "shorter prompts"
        return Check("prompt tokens", text, "stop", what, asked.name, values)
    return Check("prompt tokens", text, task=asked.name, values=values)


def template_check(lm: Any, asked: Requested, *, chat_template: bool) -> Check:
    """Which chat template prompts stand in, and whether one is missing where a chat model is asked to write."""
    text = chat_template_text(lm)
    ends_thought = answers.THINK_CLOSE in getattr(lm.tokenizer, "all_special_tokens", ())
    values: dict[str, Any] = {"applied": chat_template, "sha256": None, "name": None}
    if text is None:
        return Check("chat template", "the tokenizer has none", task=asked.name, values=values)
    digest = hashlib.sha256(text.encode()).hexdigest()
    values |= {"sha256": digest, "name": "default"}
    shown = f"default, sha256 {digest[:16]}{'' if chat_template else ', not applied'}"
    if asked.generates and not chat_template:
        change = "--chat-template: the tokenizer has a template, and these prompts stand in none"
        return Check("chat template", shown, "warn", change, asked.name, values)
    if asked.generates and ends_thought and lm.think_end_token is None:
        change = (
            f"--think-end {answers.THINK_CLOSE}: it is a special token here, which leaves the text unseen"
        )
        return Check("chat template", shown, "warn", change, asked.name, values)
    return Check("chat template", shown, task=asked.name, values=values)


def chat_template_text(lm: Any) -> str | None:
    """The tokenizer's template for a chat without tools; None if it has none."""
    template = getattr(lm.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return lm.tokenizer.get_chat_template()
    return template or None


def protocol_check(lm: Any, asked: Requested, *, chat_template: bool, choice_seed: int) -> Check:
    """Hashes of all that two runs must share to be compared, and one of them together.  Seeds of sampling differ."""
    from lm_eval.utils import handle_non_serializable

    config = asked.task.config
    texts = [
        json.dumps(document, default=handle_non_serializable, sort_keys=True) for document in asked.documents
    ]
    template = chat_template_text(lm) if chat_template else None
    parts: dict[str, Any] = {
        "task": content_hash(
            {
                "name": asked.name,
                "version": str((config.metadata or {}).get("version")),
                **{name: _plain(getattr(config, name, None)) for name in _OF_TASK},
                "metrics": [str(metric.get("metric")) for metric in config.metric_list or ()],
            }
        ),
        "documents": content_hash(texts),
        "prompts": content_hash(list(asked.prompts)),
        "sampling": {"repeats": asked.repeats, **_plain(config.generation_kwargs or {})}
        if asked.generates
        else None,
        "choice_seed": choice_seed,
        "extraction": hashlib.sha256(inspect.getsource(answers).encode()).hexdigest()[:16],
        "tokenizer": tokenizer_identity(lm.tokenizer),
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "think_end_token": lm.think_end_token,
        "scoring": lm.scoring,
    }
    fingerprint = content_hash(parts)
    values = {"fingerprint": fingerprint, **parts}
    text = (
        f"{fingerprint}: task {parts['task']}, prompts {parts['prompts']}, extraction {parts['extraction']}"
    )
    return Check("protocol", text, task=asked.name, values=values)


def exercised_check(asked: Requested, rules: PolicyRules) -> Check:
    """How often a rounded store can be read back: at most, in the longest response; at least, in a scored prompt.

    The hand-off of the prompt is store 0, and token ``window`` makes store 1, which the token behind it reads: a
    policy whose first store comes later than the longest response measures the hand-off alone.
    """
    # The first token of a response comes from the prompt; a scored prompt is handed off after its first token.
    steps = (asked.limit if asked.generates else min(asked.lengths)) - 1
    rounded = [policy for policy in rules.policies if _rounds(policy)]
    reads = max((_reads(policy, steps) for policy in rounded), default=0)
    values: dict[str, Any] = {"policy": str(rules), "steps": steps, "stores_read": reads}
    if not rounded:
        return Check("exercised", f"{rules}: nothing is rounded", task=asked.name, values=values)
    bound = "at most" if asked.generates else "at least"
    text = f"{rules}: {bound} {reads:,} stores read back in {steps:,} steps"
    if reads >= 2 or not asked.generates:  # of short prompts ``check_requests`` warns
        return Check("exercised", text, task=asked.name, values=values)
    if any(policy.options.schedule in ("chunk", "turn") for policy in rounded):
        change = (
            "nothing, if the rounding of prompts is what is asked for: this schedule stores none in between"
        )
        return Check("exercised", text, "warn", change, asked.name, values)
    window = min(policy.window for policy in rounded)
    change = (
        f"max_gen_toks above {window + 1:,} or a smaller window: the first store would come behind the end"
    )
    return Check("exercised", text, "stop", change, asked.name, values, argument="policy")


def dtype_check(lm: Any, rules: PolicyRules) -> Check:
    """In which dtype the model keeps its state, and in which the policy's memory was allocated."""
    import torch

    from quantlab.models.forwards import CachedForward

    with torch.no_grad(), lm.interception:
        CachedForward(lm.model)(torch.zeros((1, 2), dtype=torch.int64, device=lm.device))
    report = lm.interception.report.as_dict()
    held = dict(sorted(Counter(report["state_held_as"].values()).items()))
    values = {
        "policy": str(rules),
        "state_dtype_of_the_model": report["state_dtype_of_the_model"],
        "layers_held_as": held,
    }
    layers = ", ".join(f"{count} layers held as {dtype}" for dtype, count in held.items())
    own = report["state_dtype_of_the_model"]
    text = f"{rules}: {layers}; the model's own is {own}"
    if own != "float32":
        change = "float32 from the model: what prompts hand over is rounded before any policy is"
        return Check("state dtype", text, "warn", change, values=values)
    return Check("state dtype", text, values=values)


_OF_TASK = (
    "output_type",
    "num_fewshot",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
    "filter_list",
)


def _gold(task: Any, document: dict[str, Any]) -> tuple[int, int] | None:
    choices, answer = document.get("choices"), document.get("answer")
    if isinstance(choices, list) and type(answer) is int:
        return answer, len(choices)
    if task.config.output_type != "multiple_choice":
        return None
    target, named = task.doc_to_target(document), task.doc_to_choice(document)
    if isinstance(target, str) and target in named:
        target = named.index(target)
    return (target, len(named)) if type(target) is int and 0 <= target < len(named) else None


def _p_constant(choices: Sequence[int]) -> float:
    """Probability that chance puts all right answers into one place."""
    logs = -np.log(np.array(choices, dtype=np.float64)).sum()
    return float(min(choices) * np.exp(logs))


def _rounds(policy: Policy) -> bool:
    return policy.checkpoint.rounded or policy.read_copy is not None


def _reads(policy: Policy, steps: int) -> int:
    if policy.options.schedule in ("chunk", "turn"):
        return min(1, steps)
    window = 1 if policy.options.schedule == "step" else policy.window
    return -(-steps // window)


def _plain(value: Any) -> Any:
    """Functions by their names: their addresses change."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Callable):
        return getattr(value, "__qualname__", type(value).__name__)
    return value
