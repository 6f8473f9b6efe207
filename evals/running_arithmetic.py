"""Running arithmetic with a scratch-pad: additions and subtractions modulo ten, one result a step.

    Start 3 s00 + 4 s01 - 2 s02 + 7 Work s00 + 4 7 s01 - 2 5 s02 + 7 2 Answer: 2 End

The prompt ends with "Work"; what follows is to be generated.  A step's name is a key and what it does is its value:
each line of the pad recalls a step, then does it.  The last result is the answer.
"""

import numpy as np
from numpy.typing import NDArray

from quantlab.errors import InputError
from quantlab.evals.state_recall import DRAWN_TOGETHER, generators
from quantlab.models.reference import vocabulary as v

Ints = NDArray[np.int64]
MODULUS = 10


def problems(steps: int, count: int, seed: int) -> tuple[Ints, Ints]:
    """Prompts (count, 3 + 3 steps) and what is to follow (count, 4 steps + 3), the same on every machine; the fewer
    begin the more.
    """
    drawn = [draw(rng, steps, DRAWN_TOGETHER) for rng in generators(count, seed, 0xADD)]
    prompts, rest = (np.concatenate(parts)[:count] for parts in zip(*drawn, strict=True))
    return prompts, rest


def draw(rng: np.random.Generator, steps: int, count: int) -> tuple[Ints, Ints]:
    """As ``problems``, from a generator.  Steps are named from s00 on."""
    if not 1 <= steps <= len(v.STEPS):
        raise InputError("steps", steps, f"1 to {len(v.STEPS)}")
    start = rng.integers(MODULUS, size=(count, 1))
    minus = rng.integers(2, size=(count, steps))
    amount = rng.integers(MODULUS, size=(count, steps))
    results = (start + np.cumsum(np.where(minus == 1, -amount, amount), 1)) % MODULUS
    names = np.broadcast_to(v.token("s00") + np.arange(steps), (count, steps))
    doing = np.stack(
        [names, np.where(minus == 1, v.token(v.MINUS), v.token(v.PLUS)), v.token("0") + amount], 2
    )
    pad = np.concatenate([doing, v.token("0") + results[..., None]], 2)

    def word(name: str) -> Ints:
        return np.full((count, 1), v.token(name))

    prompt = [word(v.START), v.token("0") + start, doing.reshape(count, -1), word(v.WORK)]
    rest = [pad.reshape(count, -1), word(v.RESULT), v.token("0") + results[:, -1:], word(v.END)]
    return np.concatenate(prompt, 1), np.concatenate(rest, 1)
