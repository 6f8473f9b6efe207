"""What the reference models are trained on: batches of three tasks, a pure function of seed, stage and step.

Questions about a state's facts are most of the rows, the others running arithmetic and running text.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantlab.evals import manual_text, running_arithmetic
from quantlab.evals.state_recall import OPTIONS, QUESTION_TOKENS, Level, Questions, sequences
from quantlab.models.reference import vocabulary as v

ROWS, CROWDED_ROWS, ARITHMETIC_ROWS, TEXT_ROWS = 52, 12, 8, 4
"""With questions, those among them that crowd the state in the last stage, and the others."""
EASY_KEYS = Level().keys
REGISTER_SHARE = (0.2, 1.0)
LONGEST_PROBLEM = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum.

    facts: fewest and most of a row.  asked: questions a row.  crowded: most facts of CROWDED_ROWS, from all keys, which
    take the place of updates.
    """

    facts: tuple[int, int]
    registers: int
    updates: int
    asked: int
    crowded: int | None = None

    @property
    def tokens(self) -> int:
        return 2 * (self.facts[1] + self.registers + self.updates) + QUESTION_TOKENS * self.asked


STAGES = (
    Stage((2, 8), 4, 8, 6),
    Stage((4, 12), 8, 32, 6),
    Stage((8, 24), 8, 128, 8, crowded=40),
)


@dataclass(frozen=True)
class Batch:
    """tokens (rows, T): questions first.  follow: (rows - ROWS, T - 1) the next token of the other rows, -1 where it is
    not to be predicted.
    """

    questions: Questions
    tokens: Ints
    follow: Ints


def batch(seed: int, stage: int, step: int) -> Batch:
    rng = np.random.Generator(np.random.Philox(key=[seed, (stage << 40) + step]))
    chosen = STAGES[stage]
    rows = ROWS - CROWDED_ROWS if chosen.crowded else ROWS
    asked = _questions(rng, chosen, chosen.facts[1], chosen.updates, rows, EASY_KEYS)
    if chosen.crowded:
        updates = chosen.updates - (chosen.crowded - chosen.facts[1])
        crowded = _questions(rng, chosen, chosen.crowded, updates, CROWDED_ROWS, len(v.KEYS))
        joined = {name: np.concatenate([part, vars(crowded)[name]]) for name, part in vars(asked).items()}
        asked = Questions(**joined)
    count = asked.tokens.shape[1]
    arithmetic = [_problems(rng, count) for _ in range(ARITHMETIC_ROWS)]
    stream = _text()
    starts = rng.integers(len(stream) - count, size=TEXT_ROWS)
    text = stream[starts[:, None] + np.arange(count)]
    tokens = np.concatenate([asked.tokens, np.stack([row for row, _ in arithmetic]), text])
    follow = np.concatenate([np.stack([row for _, row in arithmetic]), text[:, 1:]])
    return Batch(asked, tokens, follow)


def _questions(
    rng: np.random.Generator, stage: Stage, most: int, updates: int, rows: int, keys: int
) -> Questions:
    facts = rng.integers(stage.facts[0], most + 1, size=rows)
    facts[0] = most  # decides the length
    share = rng.uniform(*REGISTER_SHARE, size=rows)
    return sequences(rng, facts, stage.registers, updates, share, stage.asked, keys)


def option_is_right(asked: Questions) -> NDArray[np.bool_]:
    """(n, q, 4)"""
    return np.arange(OPTIONS) == asked.choice[..., None]


def _problems(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """A row of problems behind each other, cut at ``count`` tokens, and what is to be predicted of it."""
    tokens, follow = [], []
    while sum(map(len, tokens)) < count:
        steps = int(rng.integers(2, LONGEST_PROBLEM + 1))
        prompt, rest = (part[0] for part in running_arithmetic.draw(rng, steps, 1))
        tokens += [prompt, rest]
        follow += [np.full(len(prompt), -1), rest]
    return np.concatenate(tokens)[:count], np.concatenate(follow)[1:count]


@functools.cache
def _text() -> Ints:
    ids = [v.tokenizer()(text).input_ids for text in manual_text.topics(held_out=False)]
    return np.concatenate([np.array(part, np.int64) for part in ids])
