"""Decoding on pooled memory: what ``quantlab.kernels.steps`` does on a GPU, done by ``DecodeState`` on the CPU.

    plan = begin_step(pools[0].counters, slots)
    for pool, inputs in zip(pools, layers): output = decode_token(pool, inputs, plan)
    end_step(plan)

A batch row with a negative slot is padding: its inputs are not looked at and its output is not written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.recurrences import StepInputs
from quantlab.schemes import checks
from quantlab.schemes.pool import LayerPool, SlotCounters
from quantlab.schemes.pool_rows import put_state, state_of
from quantlab.schemes.state import DecodeState, start


@dataclass(frozen=True)
class StepPlan:
    """Which slots a step works on, and which of them flush.

    slots: int32 (B,).  positions: int32 (B,), the cursor of each row, -1 for padding.  flush_rows: int32 (B,), the rows
    whose window this token fills, in order, ``flush_count`` (1,) of them; undefined behind.
    """

    counters: SlotCounters
    window: int
    slots: Tensor
    positions: Tensor
    flush_rows: Tensor
    flush_count: Tensor


def begin_step(counters: SlotCounters, slots: Tensor, window: int) -> StepPlan:
    """Plan one token for the rows of a batch, ``slots`` int32 (B,), each slot at most once, negative for padding."""
    check_slots(counters, slots)
    positions = torch.where(slots >= 0, counters.cursor[slots.clamp(min=0).long()], -1).int()
    due = (positions == window - 1).nonzero()[:, 0].int()
    flush_rows = torch.full_like(slots, -1)
    flush_rows[: len(due)] = due
    count = torch.tensor([len(due)], dtype=torch.int32, device=slots.device)
    return StepPlan(counters, window, slots, positions, flush_rows, count)


def decode_token(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor | None = None) -> Tensor:
    """One token of one layer: (B, heads, value_dim) in the dtype of ``inputs.v``; rows of padding are left alone.

    Stored bits and records change; the counters wait for ``end_step``.
    """
    return through_states(pool, inputs, plan, output, DecodeState.step)


def through_states(
    pool: LayerPool,
    inputs: StepInputs,
    plan: StepPlan,
    output: Tensor | None,
    forward: Callable[[DecodeState, StepInputs], Tensor],
) -> Tensor:
    """``forward`` of the plan's slots as a ``DecodeState``, put back without counters: (B, ...) like ``inputs.v``."""
    if output is None:
        output = torch.zeros_like(inputs.v)
    live = (plan.slots >= 0).nonzero()[:, 0]
    slots = plan.slots[live].long()
    state = state_of(pool, slots)
    output[live] = forward(state, inputs.map(lambda t: t[live].cpu())).to(output)
    put_state(pool, slots, state, counters=False)
    return output


def end_step(plan: StepPlan) -> None:
    """Move the counters of the step's slots, once all layers are through."""
    counters, slots = plan.counters, plan.slots[plan.slots >= 0].long()
    flushed = counters.cursor[slots] == plan.window - 1
    counters.cursor[slots] = torch.where(flushed, 0, counters.cursor[slots] + 1)
    counters.store_numbers[slots] += flushed


def load_states(pool: LayerPool, slots: Tensor, initial: Tensor) -> None:
    """Hand prefill states (n, H, V, K) to the slots (n,): rounded once into every copy, window empty."""
    state = start(
        pool.policy,
        pool.family,
        initial.cpu(),
        key_heads=pool.shape.key_heads,
        seed=int(pool.counters.seed),
        layer=pool.layer,
        sequence_ids=pool.counters.sequence_ids[slots.long()].cpu(),
    )
    put_state(pool, slots.long(), state)


def check_slots(counters: SlotCounters, slots: Tensor) -> None:
    """InputError unless ``slots`` are int32 (B,) slot numbers, each at most once, or negative."""
    if slots.dtype != torch.int32 or slots.ndim != 1:
        raise InputError("slots", checks.describe(slots), "int32 of shape (B,)")
    check_numbers(counters, slots)


def check_numbers(counters: SlotCounters, slots: Tensor) -> None:
    """InputError unless the numbers of ``slots`` (B,) are of slots, each at most once, or negative."""
    numbers = slots[slots >= 0].tolist()
    if len(set(numbers)) != len(numbers) or any(n >= counters.slots for n in numbers):
        raise InputError(
            "slots", numbers, f"slot numbers below {counters.slots}, each at most once, or negative"
        )
