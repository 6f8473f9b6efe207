"""Prefill states into slots: rounded once into the checkpoint and from there into the read copy, windows empty."""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.kernels import read_copies, target
from quantlab.kernels.checkpoints import store_of, store_tile
from quantlab.kernels.decode import widened
from quantlab.kernels.slots import hand_off_kernel
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.store import CHECKPOINT_PART

PHILOX_ROUNDS = 10
TILE_ROWS = 16


# Triton would compile anew for a stream that is a multiple of 16.
@triton.jit(do_not_specialize=("stream",))
def load_kernel(
    initial, rows, row_count, slots, checkpoint, checkpoint_scales, largest, sequence_ids, seed, stream,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """R value rows of the i-th of ``rows`` a program, a head's tiles one after another.  COLUMNS: K or the power of two
    above it.  largest (n, H, tiles): of |stored|; None without a read copy.
    """
    TILES: tl.constexpr = (V + R - 1) // R
    pid = tl.program_id(0)
    i, h, tile = pid // (H * TILES), (pid // TILES) % H, pid % TILES
    if i >= tl.load(row_count):
        return
    row = tl.load(rows + i)
    slot = tl.load(slots + row).to(tl.int64)
    v, column = tile * R + tl.arange(0, R), tl.arange(0, COLUMNS)
    inside = (v < V)[:, None] & (column < K)[None, :]
    within = v[:, None] * K + column[None, :]
    x = widened(tl.load(initial + (row.to(tl.int64) * H + h) * (V * K) + within, mask=inside, other=0))
    quad = ((h * V + v)[:, None] * (K // 4) + tl.arange(0, COLUMNS // 4)[None, :]).to(tl.uint32)
    sequence, key = tl.load(sequence_ids + slot).to(tl.uint32), tl.load(seed)
    number = sequence & 0  # the hand-off
    scales_at = None
    if checkpoint_scales is not None:
        scales_at = checkpoint_scales + (slot * H + h) * V + v
    at = checkpoint + (slot * H + h) * (V * K) + within
    stored = store_tile(
        at, scales_at, inside, x, quad, number, sequence, stream.to(tl.uint32), key, STORE, ROUNDS
    )
    if largest is not None:
        tl.store(largest + (i * H + h) * TILES + tile, stored)


def launch(pool: LayerPool, slots: Tensor, initial: Tensor) -> None:
    """Fill the slots (n,), their counters too, from ``initial`` (n, heads, value_dim, key_dim); arguments checked."""
    shape, counters, count = pool.shape, pool.counters, slots.shape[0]
    rows = torch.empty((count,), dtype=torch.int32, device=pool.device)
    row_count = torch.empty((1,), dtype=torch.int32, device=pool.device)
    kernel: Any = hand_off_kernel
    moved = counters.cursor, counters.origin, counters.pending, counters.store_numbers
    block = triton.next_power_of_2(count)
    kernel[(1,)](*moved, slots, rows, row_count, count, counters.slots, BLOCK=block, **target.LAUNCH_OPTIONS)
    tile = TILE_ROWS
    tiles = -(-shape.value_dim // tile)
    largest = None
    if pool.policy.read_copy is not None:
        largest = torch.empty((count, shape.heads, tiles), dtype=torch.float32, device=pool.device)
    kernel = load_kernel
    kernel[(count * shape.heads * tiles,)](
        initial,
        rows,
        row_count,
        slots,
        pool.checkpoint,
        pool.checkpoint_scales,
        largest,
        counters.sequence_ids,
        counters.seed,
        4 * pool.layer + CHECKPOINT_PART,
        H=shape.heads,
        V=shape.value_dim,
        K=shape.key_dim,
        R=tile,
        COLUMNS=triton.next_power_of_2(shape.key_dim),
        STORE=store_of(pool.policy.checkpoint),
        ROUNDS=PHILOX_ROUNDS,
        num_warps=4,
        **target.LAUNCH_OPTIONS,
    )
    if largest is not None:
        read_copies.encode(pool, rows, row_count, slots, largest)
