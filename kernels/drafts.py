"""``quantlab.schemes.drafts`` on a device: the same functions with the same meaning, by Triton kernels.

As in ``quantlab.kernels.steps``, nothing waits for the device: how many drafts are accepted is read from device memory,
and so is which windows they complete.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import arguments, delta_verify, mamba2_steps
from quantlab.kernels.slots import accept_kernel, plan_commit_kernel, wait_kernel
from quantlab.kernels.steps import ADVANCED_ROWS, launch
from quantlab.recurrences import StepInputs
from quantlab.schemes import checks
from quantlab.schemes.drafts import ORIGINS, CommitPlan, room
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import MAXIMUM_WINDOW, Policy, parse_policy
from quantlab.schemes.pool import LayerPool, SlotCounters, unpoolable
from quantlab.schemes.steps import StepPlan


class Family(NamedTuple):
    """The kernels of one recurrence that verify and commit.

    served(policy, shape) -> why they do not serve a policy that has a layout, or None.  verify(pool, tokens, plan,
    output), commit(pool, plan): of one layer, arguments checked.  most: drafts of one verification.
    """

    served: Callable[[Policy, StateShape], str | None]
    verify: Callable[[LayerPool, StepInputs, StepPlan, Tensor], None]
    commit: Callable[[LayerPool, CommitPlan], None]
    most: int


_DELTA = Family(delta_verify.served, delta_verify.verify, delta_verify.commit, delta_verify.MOST_DRAFTS)
FAMILIES = {
    "mamba2": Family(mamba2_steps.served_drafts, mamba2_steps.verify, mamba2_steps.commit, MAXIMUM_WINDOW),
    "gated_delta": _DELTA,
    "kimi_delta": _DELTA,
}


def served(policy: str | Policy, family: str, shape: StateShape, count: int = 1) -> str | None:
    """What it is about ``policy``, for a layer of this shape, for which no kernel verifies drafts; None if one does.

    count: of one verification.
    """
    policy = parse_policy(policy)
    checks.whole_shape(shape)
    if reason := unpoolable(policy, family, shape):
        return f"what a pool has no layout for, which takes {reason}"
    if family not in FAMILIES:
        return f"drafts of the family {family}"
    if reason := FAMILIES[family].served(policy, shape):
        return reason
    most = min(policy.window, FAMILIES[family].most)
    return None if count <= most else f"{count} drafts at once, more than {most}"


def verify_tokens(
    pool: LayerPool, tokens: StepInputs, plan: StepPlan, output: Tensor | None = None
) -> Tensor:
    """Read drafted tokens of one layer; see ``quantlab.schemes.drafts``.

    At most a window of them, and 16 of a delta rule.  Inputs and output are float32, bfloat16 or float16, contiguous.

    Raises:
        InputError: an argument does not fit the pool, or no kernel serves the pool's policy; nothing was launched.
    """
    arguments.pool(pool)
    arguments.plan(plan, pool, StepPlan)
    _serve(pool)
    family = FAMILIES[pool.family]
    most = min(room(pool), pool.policy.window, family.most)
    arguments.drafts(tokens, pool, plan.slots.shape[0], most)
    arguments.none_wait(plan, "verify")
    output = arguments.output(output, pool, tokens)
    if output.numel():
        family.verify(pool, tokens, plan, output)
    return output


def end_verify(plan: StepPlan, drafted: int) -> None:
    """Say that ``drafted`` tokens wait behind the cursor of every slot of the plan, once all layers are through.

    Raises:
        InputError: ``plan`` is not what ``begin_step`` returned, or ``drafted`` is no number of tokens that can have
            been verified.
    """
    counters, batch = arguments.counters(arguments.planned(plan, StepPlan).counters), plan.slots.shape[0]
    # Kernels verify a window at most, but torch reads more where pools have the room, and these are its counters too.
    if not checks.is_integer(drafted) or not 1 <= drafted < 2**31:
        raise InputError("drafted", drafted, "as many tokens as were verified, 1 at least")
    if batch:
        given = counters.pending, plan.slots, drafted, batch, counters.slots
        launch(wait_kernel, -(-batch // ADVANCED_ROWS), *given, BLOCK=ADVANCED_ROWS)


def begin_commit(counters: SlotCounters, slots: Tensor, counts: Tensor, window: int) -> CommitPlan:
    """Plan to accept the first ``counts[i]`` drafts of each row; see ``quantlab.schemes.drafts``.

    A count below 0 is taken for 0, one above the drafts that wait for all of them.

    Raises:
        InputError: an argument's dtype, shape or device is wrong; names it.
    """
    arguments.counters(counters)
    arguments.slots(slots, counters)
    arguments.counts(counts, slots)
    window = arguments.window(window)
    batch = slots.shape[0]
    positions, accepted, flush_rows, flush_count = (
        torch.empty((size,), dtype=torch.int32, device=slots.device) for size in (batch, batch, batch, 1)
    )
    block = triton.next_power_of_2(max(batch, 1))
    read = counters.cursor, counters.pending, slots, counts
    written = positions, accepted, flush_rows, flush_count
    launch(plan_commit_kernel, 1, *read, *written, batch, counters.slots, WINDOW=window, BLOCK=block)
    return CommitPlan(counters, window, slots, positions, accepted, flush_rows, flush_count)


def commit_tokens(pool: LayerPool, plan: CommitPlan) -> None:
    """Fold, store and encode the windows of one layer that accepted drafts complete; see ``quantlab.schemes.drafts``.

    Raises:
        InputError: an argument does not fit the pool, or no kernel serves the pool's policy; nothing was launched.
    """
    arguments.pool(pool)
    arguments.plan(plan, pool, CommitPlan)
    _serve(pool)
    if plan.slots.shape[0]:
        FAMILIES[pool.family].commit(pool, plan)


def end_commit(plan: CommitPlan) -> None:
    """Move the counters of the plan's slots, once all layers are through.

    Raises:
        InputError: ``plan`` is not what ``begin_commit`` returned.
    """
    counters, batch = arguments.counters(arguments.planned(plan, CommitPlan).counters), plan.slots.shape[0]
    if batch:
        moved = counters.cursor, counters.origin, counters.pending, counters.store_numbers
        given = *moved, plan.slots, plan.counts, batch, counters.slots
        programs = -(-batch // ADVANCED_ROWS)
        launch(accept_kernel, programs, *given, WINDOW=plan.window, LAST=ORIGINS, BLOCK=ADVANCED_ROWS)


def _serve(pool: LayerPool) -> None:
    if reason := served(pool.policy, pool.family, pool.shape):
        raise InputError(
            "pool", str(pool.policy), f"a policy under which kernels verify drafts, not {reason}"
        )
