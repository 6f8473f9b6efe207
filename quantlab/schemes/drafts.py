"""Speculative decoding on pooled memory: what ``quantlab.kernels.drafts`` does on a GPU, done by ``DecodeState``.

    plan = begin_step(pools[0].counters, slots, window)
    for pool, tokens in zip(pools, layers): outputs = verify_tokens(pool, tokens, plan)
    end_verify(plan, drafted)
    plan = begin_commit(pools[0].counters, slots, counts, window)
    for pool in pools: commit_tokens(pool, plan)
    end_commit(plan)

A verification reads T drafted tokens of every row and stores no state: it leaves their records behind the cursor.  A
commit moves the cursor over those that were accepted, and folds the windows that they complete.  Pools are allocated
with ``drafts`` of at least T.  A batch row with a negative slot is padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.recurrences import StepInputs
from quantlab.schemes import checks
from quantlab.schemes.pool import LayerPool, SlotCounters
from quantlab.schemes.pool_rows import put_state, state_of
from quantlab.schemes.state import DecodeState
from quantlab.schemes.steps import StepPlan, check_slots, through_states

ORIGINS = (1 << 30) - 1
"""An origin counts up to here and starts over: every ring is a power of two no longer than that."""


@dataclass(frozen=True)
class CommitPlan:
    """Which slots a commit works on, how many drafts it accepts, and which of them fold.

    slots: int32 (B,).  positions: int32 (B,), the cursor of each row, -1 for padding.  counts: int32 (B,), accepted
    drafts, 0 for padding.  flush_rows: int32 (B,), the rows whose window these complete, in order, ``flush_count`` (1,)
    of them; undefined behind.
    """

    counters: SlotCounters
    window: int
    slots: Tensor
    positions: Tensor
    counts: Tensor
    flush_rows: Tensor
    flush_count: Tensor


def verify_tokens(
    pool: LayerPool, tokens: StepInputs, plan: StepPlan, output: Tensor | None = None
) -> Tensor:
    """Read T drafted tokens of one layer: (B, T, heads, value_dim) in the dtype of ``tokens.v``.

    tokens: with a token dimension T after the batch.  plan: of ``begin_step``.  output: written in place, rows of
    padding are left alone.  The drafts' records are written behind the cursor and nothing else changes; a draft behind
    the end of the window is read from a window that is longer by it.

    Raises:
        InputError: the pool has no room for so many drafts, or drafts of a slot wait for a commit.
    """
    drafted(pool, tokens)
    return through_states(pool, tokens, plan, output, DecodeState.verify)


def end_verify(plan: StepPlan, drafted: int) -> None:
    """Say that ``drafted`` tokens wait behind the cursor of every slot of the plan, once all layers are through."""
    plan.counters.pending[plan.slots[plan.slots >= 0].long()] = drafted


def begin_commit(counters: SlotCounters, slots: Tensor, counts: Tensor, window: int) -> CommitPlan:
    """Plan to accept the first ``counts[i]`` drafts of each row, int32 (B,), from 0 to those that wait; not looked at
    for padding.

    On a device a count that is out of range is taken for the end of the range next to it.
    """
    check_slots(counters, slots)
    if counts.dtype != torch.int32 or counts.shape != slots.shape:
        raise InputError("counts", checks.describe(counts), f"int32 of shape {tuple(slots.shape)}")
    at = slots.clamp(min=0).long()
    counts = torch.where(slots >= 0, counts, 0)
    wrong = (slots >= 0) & ((counts < 0) | (counts > counters.pending[at]))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        limit = int(counters.pending[at[row]])
        raise InputError(
            "counts", f"{int(counts[row])} of row {row}", f"0 to {limit}, the drafts that wait there"
        )
    positions = torch.where(slots >= 0, counters.cursor[at], -1).int()
    due = (positions + counts >= window).nonzero()[:, 0].int()
    flush_rows = torch.full_like(slots, -1)
    flush_rows[: len(due)] = due
    count = torch.tensor([len(due)], dtype=torch.int32, device=slots.device)
    return CommitPlan(counters, window, slots, positions, counts, flush_rows, count)


def commit_tokens(pool: LayerPool, plan: CommitPlan) -> None:
    """Accept drafts in one layer: every window that they complete is folded, rounded, stored and encoded.

    Stored bits change; the counters wait for ``end_commit``, and records are not moved.
    """
    live = (plan.slots >= 0).nonzero()[:, 0]
    slots = plan.slots[live].long()
    state = state_of(pool, slots)
    state.commit(plan.counts[live].cpu())
    put_state(pool, slots, state, counters=False, records=False)


def end_commit(plan: CommitPlan) -> None:
    """Move the counters of the plan's slots, once all layers are through: no draft waits any longer."""
    counters, live = plan.counters, plan.slots >= 0
    slots = plan.slots[live].long()
    held = counters.cursor[slots] + plan.counts[live]
    stores = held // plan.window
    counters.cursor[slots] = held - stores * plan.window
    counters.origin[slots] = (counters.origin[slots] + stores * plan.window) & ORIGINS
    counters.store_numbers[slots] += stores
    counters.pending[slots] = 0


def room(pool: LayerPool) -> int:
    """Drafts that fit behind a window that is all but full."""
    return max(0, pool.records - (pool.policy.window - 1))


def drafted(pool: LayerPool, tokens: StepInputs) -> int:
    """T of drafted tokens; InputError unless the pool has room for so many."""
    count = checks.token_count(tokens)
    if not 1 <= count <= room(pool):
        expected = f"1 to {room(pool)}, which the pool has room for (allocate_pool(..., drafts=))"
        raise InputError("tokens", f"{count} drafted tokens", expected)
    return count
