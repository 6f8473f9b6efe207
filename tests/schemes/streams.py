"""Small streams, and the ways to run them, that the tests of decode states share."""

import copy
import functools

import torch

from quantlab.drift import synthetic_stream
from quantlab.recurrences import StepInputs
from quantlab.schemes import start


def stream(family, **changes):
    shape = {
        "heads": 4,
        "key_heads": 2,
        "steps": 13,
        "sequences": 3,
        "value_dim": 16,
        "key_dim": 32,
        "seed": 5,
    }
    return made(family, **(shape | changes))


def made(family, **options):
    """A realistic stream of its own for each caller; made once, as its prefill takes longer than most tests do."""
    return copy.deepcopy(_made(family, tuple(sorted(options.items()))))


@functools.cache
def _made(family, options):
    return synthetic_stream(family, preset="realistic", **dict(options))


def begin(policy, s, rows=None, **changes):
    initial = s.initial if rows is None else s.initial[rows]
    options = {"key_heads": s.key_heads, "rates": s.rates, "seed": 11} | changes
    return start(policy, s.family, initial, **options)


def run(state, s, first=0, last=None, rows=None):
    """Outputs (steps, rows, heads, value_dim) of single steps."""

    def take(t):
        return t if rows is None else t[rows]

    steps = range(first, s.steps if last is None else last)
    return torch.stack([state.step(s.step(t).map(take)) for t in steps])


def tokens(s, first, last):
    """Steps of a stream as tokens of one forward."""
    found = [s.step(t) for t in range(first, last)]
    names = ("q", "k", "v", "log_decay", "beta")
    stacked = {
        n: None if getattr(found[0], n) is None else torch.stack([getattr(i, n) for i in found], 1)
        for n in names
    }
    return StepInputs(**stacked)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def bits(state):
    """What ``save`` holds, NaN comparable."""
    return {n: t.nan_to_num(7.0) if t.is_floating_point() else t for n, t in state.save().items()}


def same_bits(one, other):
    one, other = bits(one), bits(other)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
