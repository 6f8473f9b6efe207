"""Which policy's kernels decode the fastest at a batch, among those that keep at least what the policy keeps.

    pools = allocate_pool(step_policy(policy, "mamba2", shape, batch), "mamba2", shape, slots)

With few rows the launches of a replay, which wait for each other, cost more than the bytes that they save.  What may
then stand in is ``fp32@1``, whatever the policy stores, as a choice must not lower accuracy: it rounds neither a
checkpoint nor records, and is read without the error of a copy.  What it leaves is float32 arithmetic, which it does at
every token: 2e-7 of the state where ``fp32@16`` has 1e-7 and ``fp16+sr@16`` 4e-4.  A rounding checkpoint's own window 1
is no stand-in: ``fp16+sr@1`` rounds 16 times where ``fp16+sr@16`` rounds once.  A policy with window 1 and no copy is a
step already and stays.

The price is memory, 4 bytes a number: ``Choice.slot_bytes`` says how much.
"""

from dataclasses import dataclass

from quantlab.errors import InputError, unknown_name
from quantlab.recurrences import DecayAxis, get_recurrence
from quantlab.schemes import checks
from quantlab.schemes.fits import check_policy_fits
from quantlab.schemes.ledger import StateShape, ledger
from quantlab.schemes.policy import Policy, parse_policy

STAND_IN = parse_policy("fp32@1")
KINDS = {"mamba2": "mamba2", "gated_delta": "delta", "kimi_delta": "delta"}
"""Of the costs that a family's replay has."""

COSTS = {
    "launch": 2.4,
    "megabytes": 0.25,
    "mamba2 chain": 2.1,
    "mamba2 flush": 0.75,
    "delta chain": 5.8,
    "delta flush": 6.1,
    "million numbers of a copy": 0.12,
    "million random numbers": 2.2,
    "flush by key": 14.0,
    "million folded by key": 3.7,
}
"""Microseconds on one H200 of each unit of ``work``: least squares of the relative error over the records of
``experiments/kernels_h200``, by its ``fit.py``.  A megabyte in .25 is 95 % of what a copy moves there."""


@dataclass(frozen=True)
class Choice:
    """policy: whose kernels are to decode.  expected: microseconds of a step of one layer by policy text, the given
    one first.  slot_bytes: held for a sequence in one layer, by policy text.
    """

    policy: Policy
    expected: dict[str, float]
    slot_bytes: dict[str, float]


def step_policy(policy: str | Policy, family: str, shape: StateShape, batch: int) -> Policy:
    """The policy to allocate a pool with, for steps of ``batch`` rows: the given one or ``fp32@1``.

    Not for pools with room for drafts, whose verification needs the window.

    Raises:
        InputError: the policy does not fit the family, or batch or shape are no sizes.
    """
    return choose(policy, family, shape, batch).policy


def choose(policy: str | Policy, family: str, shape: StateShape, batch: int) -> Choice:
    """``step_policy`` with its reasons."""
    given = parse_policy(policy)
    if family not in KINDS:
        raise unknown_name("family", family, KINDS)
    check_policy_fits(given, family)
    checks.whole_shape(shape)
    if not checks.is_integer(batch) or batch < 1:
        raise InputError("batch", batch, "a whole number of rows from 1 on")
    candidates = [given] if rewrites(given) else [given, STAND_IN]
    expected = {str(one): microseconds(one, family, shape, batch) for one in candidates}
    held = {str(one): ledger(one, get_recurrence(family), shape).bytes_held for one in candidates}
    fastest = min(candidates, key=lambda one: expected[str(one)])
    return Choice(fastest, expected, held)


def rewrites(policy: Policy) -> bool:
    """Whether a step is one launch that stores the state, and nothing else."""
    return policy.window == 1 and policy.read_copy is None


def microseconds(policy: Policy, family: str, shape: StateShape, batch: int) -> float:
    """What a step of one layer is expected to take, rows spread evenly over the window; within a third of what was
    measured with windows of 16 at batch 1 to 512.
    """
    return sum(COSTS[name] * amount for name, amount in work(policy, family, shape, batch).items())


def work(policy: Policy, family: str, shape: StateShape, batch: int) -> dict[str, float]:
    """What a step of one layer has to wait for, by name of its cost.

    A launch and the bytes of the ledger; and of a replay the launches that wait for each other (chain), a flush in the
    share of the steps in which any row has one, which takes a while however few they are (as if it were two where it
    rounds stochastically), and the work that does not hide behind bytes.
    """
    recurrence = get_recurrence(family)
    found = {"launch": 1.0, "megabytes": batch * ledger(policy, recurrence, shape).bytes_per_token / 1e6}
    if rewrites(policy):
        return found
    kind, stochastic = KINDS[family], policy.checkpoint.stochastic
    millions, folds = batch * shape.values / 1e6, 1 / policy.window
    found[f"{kind} chain"] = 1.0
    found[f"{kind} flush"] = min(1.0, batch * folds) * (2 if stochastic else 1)
    if policy.read_copy is not None:
        found["million numbers of a copy"] = millions * (1 - folds)
    if stochastic:
        found["million random numbers"] = millions * folds
    if recurrence.axis is DecayAxis.KEY:
        found["flush by key"] = min(1.0, batch * folds)
        found["million folded by key"] = millions * folds
    return found
