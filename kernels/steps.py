"""``quantlab.schemes.steps`` on a device: the same functions with the same meaning, by Triton kernels.

Nothing here waits for the device, copies a tensor, or takes memory otherwise than through torch's allocator, so that a
step can be captured in a CUDA graph.  Seed, store numbers and sequence ids are read from device memory: a replayed
graph draws new random numbers as the counters move.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import arguments, delta, hand_off, mamba2_steps, target
from quantlab.kernels.slots import advance_kernel, plan_kernel
from quantlab.recurrences import StepInputs
from quantlab.schemes import checks
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy, parse_policy
from quantlab.schemes.pool import LayerPool, SlotCounters, unpoolable
from quantlab.schemes.steps import StepPlan

ADVANCED_ROWS = 128
"""Of one program that moves counters."""


class Family(NamedTuple):
    """The kernels of one recurrence.

    served(policy, shape, records) -> why they do not serve a policy that has a layout, or None.
    launch(pool, inputs, plan, output): one token of one layer, arguments checked.
    """

    served: Callable[[Policy, StateShape, int | None], str | None]
    launch: Callable[[LayerPool, StepInputs, StepPlan, Tensor], None]


FAMILIES = {
    "mamba2": Family(mamba2_steps.served, mamba2_steps.launch),
    "gated_delta": Family(delta.served, delta.decode_gated_delta),
    "kimi_delta": Family(delta.served, delta.decode_kimi_delta),
}


def served(policy: str | Policy, family: str, shape: StateShape, records: int | None = None) -> str | None:
    """What it is about ``policy``, for a layer of this shape, that no kernel serves; None if one decodes under it.

    records: ring positions of the pool's window, where they are not those of a pool without drafts.
    """
    return _served(parse_policy(policy), family, shape, records)


@functools.cache
def _served(policy: Policy, family: str, shape: StateShape, records: int | None) -> str | None:
    checks.whole_shape(shape)
    if reason := unpoolable(policy, family, shape):
        return f"what a pool has no layout for, which takes {reason}"
    if family not in FAMILIES:
        return f"the family {family}"
    return FAMILIES[family].served(policy, shape, records)


def begin_step(counters: SlotCounters, slots: Tensor, window: int) -> StepPlan:
    """Plan one token for the rows of a batch; see ``quantlab.schemes.steps``.

    Each slot stands at most once in ``slots``; a number that no slot has is skipped like padding.

    Raises:
        InputError: an argument's dtype, shape or device is wrong; names it.
    """
    arguments.counters(counters)
    arguments.slots(slots, counters)
    window = arguments.window(window)
    batch = slots.shape[0]
    positions, flush_rows, flush_count = (
        torch.empty((size,), dtype=torch.int32, device=slots.device) for size in (batch, batch, 1)
    )
    block = triton.next_power_of_2(max(batch, 1))
    given = counters.cursor, slots, positions, flush_rows, flush_count, batch, counters.slots
    launch(plan_kernel, 1, *given, WINDOW=window, BLOCK=block)
    return StepPlan(counters, window, slots, positions, flush_rows, flush_count)


def decode_token(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor | None = None) -> Tensor:
    """One token of one layer; see ``quantlab.schemes.steps``.

    Inputs and output are float32, bfloat16 or float16 and contiguous.

    Raises:
        InputError: an argument does not fit the pool, or no kernel serves the pool's policy; nothing was launched.
    """
    arguments.pool(pool)
    arguments.plan(plan, pool, StepPlan)
    arguments.token(inputs, pool, plan.slots.shape[0])
    if reason := served(pool.policy, pool.family, pool.shape, pool.records):
        raise InputError("pool", str(pool.policy), f"a policy that kernels serve, not {reason}")
    arguments.none_wait(plan, "step")
    output = arguments.output(output, pool, inputs)
    if output.numel():
        FAMILIES[pool.family].launch(pool, inputs, plan, output)
    return output


def end_step(plan: StepPlan) -> None:
    """Move the counters of the step's slots, once all layers are through.

    Raises:
        InputError: ``plan`` is not what ``begin_step`` returned.
    """
    plan = arguments.planned(plan, StepPlan)
    counters, batch = arguments.counters(plan.counters), plan.slots.shape[0]
    if batch:
        given = counters.cursor, plan.slots, counters.store_numbers, batch, counters.slots
        programs = -(-batch // ADVANCED_ROWS)
        launch(advance_kernel, programs, *given, WINDOW=plan.window, BLOCK=ADVANCED_ROWS)


def load_states(pool: LayerPool, slots: Tensor, initial: Tensor) -> None:
    """Hand prefill states to slots; see ``quantlab.schemes.steps``.

    Raises:
        InputError: an argument does not fit the pool, or no kernel serves the pool's policy; nothing was launched.
    """
    arguments.pool(pool)
    arguments.prefill(initial, slots, pool)
    if reason := served(pool.policy, pool.family, pool.shape):
        raise InputError("pool", str(pool.policy), f"a policy that kernels serve, not {reason}")
    if initial.numel():
        hand_off.launch(pool, slots, initial)


def launch(kernel: Any, programs: int, *given: Any, **meta: Any) -> None:
    """Run a kernel over the counters of slots."""
    kernel[(programs,)](*given, **meta, **target.LAUNCH_OPTIONS)
