"""State recall: facts that a recurrent state has to keep while other keys are written again and again.

A sequence writes ``facts`` key-value pairs once and ``registers`` other pairs, in any order and from the same keys, so
that nothing marks a register when it is first written; then come ``updates`` slots of two tokens, each with a new value
of a register or, in the rest of the slots, two fillers.  A question names a key, and its value is to be found at "?",
then the letter of that value among four options, whose wrong ones are what other keys hold:

    k05 v33 k12 v01 ... k12 v40 f07 f30 ... Q k05 ? A v40 B v33 C v08 D v21 ANS B

Without registers (``updates`` slots of fillers) it is associative recall over a distance.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from quantlab.errors import InputError
from quantlab.models.reference import vocabulary as v

OPTIONS = len(v.LETTERS)
QUESTION_TOKENS = 5 + 2 * OPTIONS
"""Q k ? A v B v C v D v ANS letter"""

DRAWN_TOGETHER = 64
"""Documents of one generator."""

OTHER_VALUE = len(v.VALUES) // 2
"""How far the value of ``another_fact`` stands from the one in whose place it is put."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """How hard a question is.

    facts, registers: pairs written once, and pairs that are written again.  updates: slots behind them.
    share: of the slots that hold a new value of a register; the others hold fillers.  keys: how many there are to
    choose from, the first ones of the vocabulary.
    """

    facts: int = 24
    registers: int = 8
    updates: int = 152
    share: float = 1.0
    keys: int = 32

    def __post_init__(self) -> None:
        if not OPTIONS <= self.keys <= len(v.KEYS):
            raise InputError("keys", self.keys, f"{OPTIONS} to {len(v.KEYS)}")
        if self.facts < 1 or self.registers < 0 or not OPTIONS <= self.facts + self.registers <= self.keys:
            expected = f"at least one fact, and with the registers {OPTIONS} to {self.keys} keys"
            raise InputError("facts", (self.facts, self.registers), expected)
        if self.updates < 0:
            raise InputError("updates", self.updates, "at least 0")
        if not 0 <= self.share <= 1 or (self.share and not self.registers):
            raise InputError("share", self.share, "0 to 1, and 0 without registers")

    @property
    def tokens(self) -> int:
        """Of a context with one question, its answer included."""
        return 2 * (self.facts + self.registers + self.updates) + QUESTION_TOKENS


@dataclass(frozen=True)
class Questions:
    """``n`` sequences of one length.

    tokens: (n, T) ids.  recall: (n, q) where each "?" stands, letter: (n, q) where each ANS stands (what follows there
    is to be predicted).  value, choice: (n, q) the right value (0 .. 63) and option (0 .. 3).  options: (n, q, 4) the
    places of the options' values.
    """

    tokens: Ints
    recall: Ints
    letter: Ints
    value: Ints
    choice: Ints
    options: Ints


def questions(level: Level, count: int, seed: int) -> Questions:
    """``count`` sequences with one question about a fact each; the same on every machine, and of the same arguments the
    fewer begin the more.
    """
    facts, share = np.full(DRAWN_TOGETHER, level.facts), np.full(DRAWN_TOGETHER, level.share)
    drawn = [
        sequences(rng, facts, level.registers, level.updates, share, 1, level.keys, facts_only=True)
        for rng in generators(count, seed, 0x5EED)
    ]
    return Questions(
        **{
            f.name: np.concatenate([getattr(part, f.name) for part in drawn])[:count]
            for f in fields(Questions)
        }
    )


def another_fact(asked: Questions) -> tuple[Ints, Ints]:
    """(tokens (n, T), places (n,)): the sequences with another value of the asked fact, at these places.

    Of ``questions``, which ask each sequence for one fact; all stand at the same "?".
    """
    recall, rows = int(asked.recall[0, 0]), np.arange(len(asked.tokens))
    # The key and the value of a fact stand beside each other, and its key once before the question.
    places = (asked.tokens[:, : recall - 1] == asked.tokens[:, recall - 1 : recall]).argmax(1) + 1
    changed = asked.tokens.copy()
    changed[rows, places] = v.token(v.VALUES[0]) + (asked.value[:, 0] + OTHER_VALUE) % len(v.VALUES)
    return changed, places


def generators(count: int, seed: int, task: int) -> list[np.random.Generator]:
    """One for every DRAWN_TOGETHER of ``count`` documents."""
    blocks = range(-(-count // DRAWN_TOGETHER))
    return [np.random.Generator(np.random.Philox(key=[seed, (task << 32) + block])) for block in blocks]


def sequences(
    rng: np.random.Generator,
    facts: Ints,
    registers: int,
    updates: int,
    share: NDArray[np.float64],
    asked: int,
    among: int,
    *,
    facts_only: bool = False,
) -> Questions:
    """Sequences with ``asked`` questions each, behind each other.

    facts: (n,) pairs of each sequence that are written once.  Where there are fewer than the most, slots of fillers
    take the place of the others, so that all have one length.  share: (n,) of the update slots.  among: how many
    keys to choose from.  facts_only: ask about facts, not about registers.
    """
    count, most = len(facts), int(facts.max())
    rows = np.arange(count)[:, None]
    # Columns: the facts first, then the registers; a shorter row leaves out the last facts.
    keys = np.argsort(rng.random((count, among)), 1)[:, : most + registers]
    written = np.arange(most) < facts[:, None]
    written = np.concatenate([written, np.ones((count, registers), bool)], 1)
    held = rng.integers(len(v.VALUES), size=(count, most + registers))
    pairs = np.stack([v.token("k00") + keys, v.token("v00") + held], 2)
    order = np.argsort(rng.random((count, most + registers)), 1)
    head = np.where(written[..., None], pairs, _fillers(rng, (count, most + registers, 2)))
    parts = [head[rows, order].reshape(count, -1)]

    if updates:
        real = rng.random((count, updates)) < share[:, None]
        which = most + rng.integers(max(registers, 1), size=(count, updates))
        new = rng.integers(len(v.VALUES), size=(count, updates))
        slots = _fillers(rng, (count, updates, 2))
        if registers:
            write = np.stack([v.token("k00") + keys[rows, which], v.token("v00") + new], 2)
            slots = np.where(real[..., None], write, slots)
            for slot in range(updates):
                hit = real[:, slot].nonzero()[0]
                held[hit, which[hit, slot]] = new[hit, slot]
        parts.append(slots.reshape(count, -1))

    start = sum(part.shape[1] for part in parts)
    candidates = written & (np.arange(most + registers) < most) if facts_only else written
    found = [_question(rng, keys, held, written, candidates) for _ in range(asked)]
    first = start + QUESTION_TOKENS * np.arange(asked)
    whole = np.broadcast_to(first, (count, asked))
    return Questions(
        tokens=np.concatenate([*parts, *(each[0] for each in found)], 1),
        recall=whole + 2,
        letter=whole + QUESTION_TOKENS - 2,
        value=np.stack([each[1] for each in found], 1),
        choice=np.stack([each[2] for each in found], 1),
        options=whole[..., None] + 4 + 2 * np.arange(OPTIONS),
    )


def _question(
    rng: np.random.Generator,
    keys: Ints,
    held: Ints,
    written: NDArray[np.bool_],
    candidates: NDArray[np.bool_],
) -> tuple[Ints, Ints, Ints]:
    """Tokens (n, QUESTION_TOKENS), right values (n,), right options (n,)."""
    count = len(keys)
    rows = np.arange(count)
    asked = np.where(candidates, rng.random(keys.shape), -1.0).argmax(1)
    value = held[rows, asked]
    # Wrong options: values that keys hold, by lot; where there are too few, any other value.
    there = np.zeros((count, len(v.VALUES)))
    np.put_along_axis(there, np.where(written, held, value[:, None]), 1.0, 1)
    lot = there + rng.random(there.shape)
    lot[rows, value] = -1.0
    wrong = np.argsort(-lot, 1)[:, : OPTIONS - 1]
    choice = rng.integers(OPTIONS, size=count)
    options = np.empty((count, OPTIONS), np.int64)
    options[rows, choice] = value
    others = np.arange(OPTIONS) != choice[:, None]
    options[others] = wrong.reshape(-1)
    tokens = np.empty((count, QUESTION_TOKENS), np.int64)
    tokens[:, 0], tokens[:, 1], tokens[:, 2] = (
        v.token(v.QUESTION),
        v.token("k00") + keys[rows, asked],
        v.token(v.RECALL),
    )
    tokens[:, 3:-2:2] = [v.token(letter) for letter in v.LETTERS]
    tokens[:, 4:-2:2] = v.token("v00") + options
    tokens[:, -2], tokens[:, -1] = v.token(v.ANSWER), v.token("A") + choice
    return tokens, value, choice


def _fillers(rng: np.random.Generator, sizes: tuple[int, ...]) -> Ints:
    return v.token("f00") + rng.integers(len(v.FILLERS), size=sizes)
