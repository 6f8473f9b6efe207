"""Random schedules on a SlotPool against an oracle that keeps every input in a list, and ten bugs that it must catch.

The tables are printed: ``pytest -m slow -rP tests/schemes/property``.
"""

from collections import Counter

import pytest

from quantlab.recurrences import RECURRENCES
from tests.schemes.property.bugs import BUGS
from tests.schemes.property.schedule import OPERATIONS, Failed, explore

FAMILIES = ("gated_delta", "mamba1", "kimi_delta", "mamba2")  # long and short ones in turn, for two workers
# One of each kind: every token stored, error feedback, replay, dual, ways to read, flush rules, schedules, roundings.
POLICIES = (
    "fp32@1",
    "bf16@1",
    "int8+ef@1",
    "int8+ef.int4@1",
    "fp32/nvfp4@1:flush_read=copy",
    "fp16+sr@4",
    "nvfp4@4",
    "fp32@5:buffer=bf16",
    "fp32@4:buffer=hilo",
    "fp32@4:buffer=bf16:current=buffer",
    "fp32/nvfp4@4",
    "fp16+sr/nvfp4+sr8@4",
    "fp8/nvfp4@4:flush_read=copy",
    "fp32@4:flush=early",
    "fp32/nvfp4@4:flush=early",
    "fp8/nvfp4@4:flush=early:flush_read=copy",
    "int8+ef@4:schedule=step",
    "nvfp4@4:schedule=chunk",
    "bf16/nvfp4@4:schedule=turn",
    "int8+ef@4:ef_read=include",
    "fp16+sr/nvfp4+rank2@4",
    "nvfp4+rank1+sr8@1",
    "int8+mean+ef@4",
    "nvfp4+keyscale+ef/nvfp4+keyscale@4",
    "fp32@4:sites=gate+q+k.fp16+v+d+state+buffer+output",
)
MATRIX_POLICIES = ("fp16@3:dot=bf16:sites=decay",)
DELTA_POLICIES = (
    "nvfp4@4:contents=derived",
    "fp32/nvfp4@4:key_read=checkpoint",
    "fp8/nvfp4@4:contents=derived:key_read=checkpoint:flush_read=copy",
    "fp32@4:sites=beta+d",
)
CELL, FAST_CELL = 200, 2
BUG_LIMIT = 1000
CHEAP_BUGS = ("cursor off by one", "forgotten residual", "wrong slot")


def policies_of(family: str) -> tuple[str, ...]:
    """Policies that the family can use: without a delta rule there is nothing to choose where S k is read."""
    found = POLICIES if family == "mamba1" else POLICIES + MATRIX_POLICIES
    return found + (DELTA_POLICIES if RECURRENCES[family].delta_rule else ())


def explore_family(family: str, cell: int, episodes: int) -> int:
    """Every operation at least ``cell`` times under every policy of the family; prints the table, returns the sum."""
    quota, tables, ties = dict.fromkeys(OPERATIONS, cell), {}, 0
    for policy in policies_of(family):
        tables[policy], tied = explore(policy, family, seed=len(tables), quota=quota, episodes=episodes)
        ties += tied
    print(table(family, tables), f"\nroundings within {ties} ties")
    for policy, counts in tables.items():
        assert all(counts[name] >= cell for name in OPERATIONS), (policy, counts)
    return sum(sum(counts.values()) for counts in tables.values())


def table(family: str, counts: dict[str, Counter[str]]) -> str:
    width = max(map(len, counts))
    lines = [f"{family:{width}} " + " ".join(f"{name:>8}" for name in OPERATIONS)]
    for policy, found in counts.items():
        lines.append(f"{policy:{width}} " + " ".join(f"{found[name]:8}" for name in OPERATIONS))
    total = sum(sum(found.values()) for found in counts.values())
    return "\n".join([*lines, f"{family}: {total} operations"])


@pytest.mark.parametrize(
    "family", [f if f == "mamba2" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_every_policy_does_every_operation(family):
    assert explore_family(family, FAST_CELL, episodes=2) >= 5000 / len(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules(family):
    assert explore_family(family, CELL, episodes=4) >= 100_000 / len(FAMILIES)


def caught_after(bug) -> int:
    quota = dict.fromkeys(OPERATIONS, BUG_LIMIT)
    explore(bug.policy, bug.family, seed=1, quota=quota, limit=BUG_LIMIT)
    with bug.applied(), pytest.raises(Failed) as failed:
        explore(bug.policy, bug.family, seed=1, quota=quota, limit=BUG_LIMIT, shrink=0)
    print(f"{bug.title}: after {failed.value.operations} operations, {str(failed.value).splitlines()[0]}")
    return failed.value.operations


@pytest.mark.parametrize("bug", [b for b in BUGS if b.title in CHEAP_BUGS], ids=lambda b: b.title)
def test_a_cheap_bug_is_caught(bug):
    assert caught_after(bug) <= BUG_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.title)
def test_a_bug_is_caught(bug):
    assert caught_after(bug) <= BUG_LIMIT
