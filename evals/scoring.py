"""Teacher-forced decode: the log-likelihood of continuations, every token read through the decode state.

All sequences of a batch start at position 0 and none is padded.  A row leaves the batch when its sequence
ends and is forked when its context ends, once for each continuation, so at every step every row is a real
token at the same position.  No mask, no position bookkeeping, no pad token that could leak into a state:
which sequences share a batch cannot matter.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.models.forwards import CachedForward
from quantlab.models.interception import Interception, decode_states, select_rows

Score = tuple[float, bool]  # log-likelihood in nats, and whether greedy decoding would have said the same


@dataclass(frozen=True)
class Item:
    """A context and the continuations to score after it, as token ids; none is empty."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]


@dataclass
class _Row:
    item: int
    choice: int | None  # None while the row is still in its context
    tokens: tuple[int, ...]
    total: float = 0.0
    greedy: bool = True


def sequence_id(tokens: tuple[int, ...]) -> int:
    """A name for a sequence that depends on its tokens alone: stochastic rounding must not see the batch
    layout.
    """
    text = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


@torch.no_grad()
def score_batch(
    model: nn.Module, interception: Interception, items: list[Item], *, prefill: bool, device: Any = "cpu"
) -> list[list[Score]]:
    """Scores of every continuation of every item.

    ``prefill=False`` decodes each context token by token; ``prefill=True`` (contexts of equal length) runs
    the contexts through one dense prefill, so that the state is rounded once at its end, and decodes the
    continuations. The softmax is float32 whatever the logits are.
    """
    scores: list[list[Score | None]] = [[None] * len(item.continuations) for item in items]
    rows = [_Row(index, None, item.context) for index, item in enumerate(items)]
    interception.sequence_ids = torch.tensor([sequence_id(item.context) for item in items])
    forward = CachedForward(model)
    cache = forward.cache

    def read(tokens: list[tuple[int, ...]]) -> Tensor:
        return forward(torch.tensor(tokens, device=device))

    position = len(items[0].context) if prefill else 1
    with interception:
        logits = read([row.tokens[:position] for row in rows])
        while True:
            rows, origin, ended = _advance(rows, position, logits, items, scores)
            if ended:
                # Every row has read the same number of tokens, so an ended one cannot hide behind the others.
                for state in decode_states(cache).values():
                    interception.report.count(state)
            if not rows:
                return scores  # pyright: ignore[reportReturnType]
            if origin is not None:
                select_rows(cache, torch.tensor(origin, device=device))
            logits = read([row.tokens[position : position + 1] for row in rows])
            position += 1


def _advance(
    rows: list[_Row], position: int, logits: Tensor, items: list[Item], scores: list[list[Score | None]]
) -> tuple[list[_Row], list[int] | None, bool]:
    """Score the tokens at ``position`` and say which rows go on.

    Returns the rows that read on, for each the old row whose state it takes (None: all as before), and
    whether any row ended here.
    """
    if all(row.choice is None and len(row.tokens) > position for row in rows):
        return rows, None, False
    branches: list[tuple[int, _Row]] = []  # (old row, the row as it scores its next token)
    for index, row in enumerate(rows):
        if row.choice is None and len(row.tokens) == position:
            for choice, continuation in enumerate(items[row.item].continuations):
                branches.append((index, _Row(row.item, choice, row.tokens + continuation)))
        else:
            branches.append((index, row))
    scored = [pair for pair in branches if pair[1].choice is not None]
    at = torch.tensor([index for index, _ in scored], device=logits.device)
    tokens = torch.tensor([row.tokens[position] for _, row in scored], device=logits.device)
    distribution = torch.log_softmax(logits.float(), -1)
    values = distribution[at, tokens].tolist()
    best = (distribution.argmax(-1)[at] == tokens).tolist()
    for (_, row), value, agreed in zip(scored, values, best, strict=True):
        row.total += value
        row.greedy = row.greedy and agreed
    going, origin = [], []
    for index, row in branches:
        if row.choice is not None and len(row.tokens) == position + 1:
            scores[row.item][row.choice] = (row.total, row.greedy)
        else:
            going.append(row)
            origin.append(index)
    unchanged = origin == list(range(len(rows)))
    return going, None if unchanged else origin, len(going) < len(branches)
