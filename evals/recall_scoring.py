"""Answers to state-recall questions, every token read through the decode state: the letter and the value behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantlab.evals.scoring import sequence_id
from quantlab.evals.state_recall import OPTIONS, Questions
from quantlab.models.forwards import CachedForward
from quantlab.models.interception import Interception, decode_states
from quantlab.models.reference import vocabulary as v


@dataclass(frozen=True)
class Answers:
    """Of n questions: whether letter and value (the likeliest of 64) are right, (n,) each."""

    letter: NDArray[np.bool_]
    value: NDArray[np.bool_]


@torch.no_grad()
def answer(
    model: nn.Module,
    interception: Interception,
    asked: Questions,
    *,
    device: Any = "cpu",
    at_once: int = 2000,
    on_token: Callable[[int, int], object] = lambda done, total: None,
) -> Answers:
    """Decode each sequence of one question under the policy of ``interception``, ``at_once`` beside each other.

    on_token(done, total) is called now and then.  Raises Diverged where a state stops being finite.
    """
    letters, values = [], []
    count, length = asked.tokens.shape
    for first in range(0, count, at_once):
        tokens = torch.from_numpy(asked.tokens[first : first + at_once]).to(device)
        names = [sequence_id(tuple(row)) for row in asked.tokens[first : first + at_once].tolist()]
        interception.sequence_ids = torch.tensor(names)
        recall, letter = int(asked.recall[0, 0]), int(asked.letter[0, 0])
        forward = CachedForward(model)
        with interception:
            for place in range(letter + 1):
                logits = forward(tokens[:, place : place + 1])
                if place == recall:
                    values.append(_best(logits, v.token("v00"), len(v.VALUES)))
                if place == letter:
                    letters.append(_best(logits, v.token("A"), OPTIONS))
                on_token(first * length + place * len(tokens), count * length)
            for state in decode_states(forward.cache).values():
                interception.report.count(state)
    return Answers(np.concatenate(letters) == asked.choice[:, 0], np.concatenate(values) == asked.value[:, 0])


def _best(logits: torch.Tensor, first: int, count: int) -> NDArray[np.int64]:
    return logits[:, first : first + count].argmax(-1).cpu().numpy()
