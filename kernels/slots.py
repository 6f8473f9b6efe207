"""The counters of a model's slots: which rows of a step work where, and how they move on.  All layers share them.

A slot number that no counter has is skipped like padding: it cannot be looked at before the launch without waiting for
the device, and nothing may be written out of bounds.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantlab.schemes.drafts import room
from quantlab.schemes.pool import LayerPool


def origin(pool: LayerPool) -> Tensor | None:
    """Windows move along the ring where there is room for drafts and a window is not the whole ring."""
    moves = room(pool) and pool.policy.window % pool.records
    return pool.counters.origin if moves else None


# Triton would compile anew for every number of rows that is 1 or a multiple of 16.


@triton.jit(do_not_specialize=("batch", "count"))
def plan_kernel(
    cursor, slots, positions, flush_rows, flush_count, batch, count, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """positions (B,): each row's cursor, -1 for a padded row; the rows that flush, in order, and their number.

    ``count``: slots that there are.  One program; BLOCK >= batch.
    """
    b = tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < batch, other=-1)
    position = tl.load(cursor + slot, mask=(slot >= 0) & (slot < count), other=-1)
    tl.store(positions + b, position, mask=b < batch)
    due = (position == WINDOW - 1).to(tl.int32)
    tl.store(flush_rows + tl.cumsum(due, 0) - 1, b, mask=due > 0)
    tl.store(flush_count, tl.sum(due, 0))


@triton.jit(do_not_specialize=("batch", "count"))
def advance_kernel(cursor, slots, store_numbers, batch, count, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """After all layers of a step: BLOCK rows a program."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < batch, other=-1)
    live = (slot >= 0) & (slot < count)
    at = tl.load(cursor + slot, mask=live, other=0)
    full = at == WINDOW - 1
    tl.store(cursor + slot, tl.where(full, 0, at + 1), mask=live)
    number = tl.load(store_numbers + slot, mask=live & full, other=0)
    tl.store(store_numbers + slot, number + 1, mask=live & full)


@triton.jit(do_not_specialize=("batch", "count"))
def hand_off_kernel(
    cursor, origin, pending, store_numbers, slots, rows, row_count, batch, count, BLOCK: tl.constexpr
):
    """The counters of slots (B,) that get a prefill state: empty window, store number 0.

    rows (B,): those of them whose slot there is, in order, and their number.  One program; BLOCK >= batch.
    """
    i = tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < batch, other=-1)
    live = (slot >= 0) & (slot < count)
    zero = tl.zeros((BLOCK,), dtype=tl.int32)
    tl.store(cursor + slot, zero, mask=live)
    tl.store(origin + slot, zero, mask=live)
    tl.store(pending + slot, zero, mask=live)
    tl.store(store_numbers + slot, zero.to(tl.int64), mask=live)
    found = live.to(tl.int32)
    tl.store(rows + tl.cumsum(found, 0) - 1, i, mask=live)
    tl.store(row_count, tl.sum(found, 0))


@triton.jit(do_not_specialize=("drafted", "batch", "count"))
def wait_kernel(pending, slots, drafted, batch, count, BLOCK: tl.constexpr):
    """After all layers of a verification: ``drafted`` tokens wait in every slot.  BLOCK rows a program."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < batch, other=-1)
    live = (slot >= 0) & (slot < count)
    tl.store(pending + slot, tl.zeros((BLOCK,), tl.int32) + drafted, mask=live)


@triton.jit(do_not_specialize=("batch", "count"))
def plan_commit_kernel(
    cursor, pending, slots, counts, positions, accepted, flush_rows, flush_count, batch, count, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``plan_kernel``; accepted (B,): counts, from 0 to what waits, 0 for a padded row.  A row flushes whose window
    they complete.
    """
    b = tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < batch, other=-1)
    live = (slot >= 0) & (slot < count)
    position = tl.load(cursor + slot, mask=live, other=-1)
    wanted = tl.load(counts + b, mask=live, other=0)
    taken = tl.maximum(tl.minimum(wanted, tl.load(pending + slot, mask=live, other=0)), 0)
    tl.store(positions + b, position, mask=b < batch)
    tl.store(accepted + b, taken, mask=b < batch)
    due = (position + taken >= WINDOW).to(tl.int32)
    tl.store(flush_rows + tl.cumsum(due, 0) - 1, b, mask=due > 0)
    tl.store(flush_count, tl.sum(due, 0))


@triton.jit(do_not_specialize=("batch", "count"))
def accept_kernel(
    cursor, origin, pending, store_numbers, slots, accepted, batch, count, WINDOW: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """After all layers of a commit: BLOCK rows a program.  LAST: the largest origin, one below a power of two."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < batch, other=-1)
    live = (slot >= 0) & (slot < count)
    held = tl.load(cursor + slot, mask=live, other=0) + tl.load(accepted + b, mask=live, other=0)
    stores = held // WINDOW
    start = tl.load(origin + slot, mask=live, other=0)
    number = tl.load(store_numbers + slot, mask=live, other=0)
    tl.store(cursor + slot, held - stores * WINDOW, mask=live)
    tl.store(origin + slot, (start + stores * WINDOW) & LAST, mask=live)
    tl.store(store_numbers + slot, number + stores, mask=live)
    tl.store(pending + slot, tl.zeros((BLOCK,), tl.int32), mask=live)
