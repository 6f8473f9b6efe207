"""The reference models' tasks as lm-eval reads them: datasets of plain text, made on the spot.

lm-eval calls these with the metadata of a task file, in which ``items`` is how many documents there are.
"""

from typing import Any

from quantlab.errors import InputError
from quantlab.evals import manual_text, running_arithmetic
from quantlab.evals.state_recall import Level, questions
from quantlab.models.reference import vocabulary as v

TEXT_BYTES = 256
"""Of one document of running text."""


def state_recall(
    items: int = 198,
    facts: int = 24,
    registers: int = 8,
    updates: int = 152,
    share: float = 1.0,
    keys: int = 32,
    items_seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """prompt: up to the letter, recall_prompt: up to "?"; answer: index of the right letter, value: the right word."""
    level = Level(int(facts), int(registers), int(updates), float(share), int(keys))
    asked = questions(level, _count(items), int(items_seed))
    rows = [
        {
            "prompt": v.text(tokens[: letter + 1]),
            "recall_prompt": v.text(tokens[: recall + 1]),
            "answer": int(choice),
            "value": v.VALUES[value],
        }
        for tokens, letter, recall, choice, value in zip(
            asked.tokens,
            asked.letter[:, 0],
            asked.recall[:, 0],
            asked.choice[:, 0],
            asked.value[:, 0],
            strict=True,
        )
    ]
    return _test(rows)


def arithmetic(items: int = 198, steps: int = 8, items_seed: int = 0, **_: Any) -> dict[str, Any]:
    """prompt: up to "Work"; answer: the last result."""
    prompts, rest = running_arithmetic.problems(int(steps), _count(items), int(items_seed))
    return _test(
        [
            {"prompt": v.text(p), "answer": v.text(r[-2:-1]).strip()}
            for p, r in zip(prompts, rest, strict=True)
        ]
    )


def text(items: int | None = None, **_: Any) -> dict[str, Any]:
    """text: pieces of TEXT_BYTES bytes of the topics that are held out, the first ``items`` of them."""
    pieces = []
    for topic in manual_text.topics(held_out=True):
        data = topic.encode()
        cuts = [data[i : i + TEXT_BYTES] for i in range(0, len(data) - TEXT_BYTES + 1, TEXT_BYTES)]
        pieces += [cut.decode(errors="ignore") for cut in cuts]
    return _test([{"text": piece} for piece in pieces[: None if items is None else _count(items)]])


def _count(items: Any) -> int:
    if isinstance(items, bool) or not isinstance(items, int) or items < 1:
        raise InputError("items", items, "a whole number of at least 1")
    return items


def _test(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(rows)}
