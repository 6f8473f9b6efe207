"""Launches that encode read copies from stored checkpoints."""

from typing import Any

import torch
import triton
from torch import Tensor

from quantlab.kernels import target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.copies import encode_kernel
from quantlab.kernels.plain_copies import encode_plain
from quantlab.kernels.scales import global_options, recipe_of
from quantlab.schemes.pool import LayerPool

PROGRAMS = 4224
"""At most; they share the tiles of all rows among them."""


def encode(pool: LayerPool, rows: Tensor, count: Tensor, slots: Tensor, largest: Tensor) -> None:
    """Encode the read copy of the slots ``slots[rows[i]]`` for i below ``count``, from their stored checkpoints.

    rows: int32 (B,).  count: int32 (1,).  slots: int32 or int64.  largest: float32 (B, heads, parts), of the magnitudes
    of the checkpoint's values in some parts of each head, row i of it for the i-th of ``rows``; nvfp4 alone needs it.
    """
    if pool.policy.read_copy is not None and pool.policy.read_copy.name != "nvfp4":
        encode_plain(pool, rows, count, slots)
        return
    shape, copy = pool.shape, pool.policy.read_copy
    assert copy is not None
    assert pool.copy_codes is not None
    # Blocks of 16 lie one behind the other whatever the shape, which the kernel wants to be a power of two wide.
    columns = shape.key_dim if pool.checkpoint_scales is not None else shape.key_dim & -shape.key_dim
    height = shape.value_dim * shape.key_dim // columns
    # A lane takes a block: more of them a program cost registers, and with them the warps that hide each other.
    tile = min(8, height & -height)
    warps = max(1, min(4, tile * columns // 512))
    programs = min(PROGRAMS, rows.shape[0] * shape.heads * (height // tile))
    kernel: Any = encode_kernel
    kernel[(programs,)](
        rows,
        count,
        slots,
        largest,
        pool.checkpoint,
        pool.checkpoint_scales,
        pool.copy_codes.view(torch.int32),
        pool.copy_scales,
        pool.copy_global_scale,
        H=shape.heads,
        P=height,
        N=columns,
        R=tile,
        PARTS=largest.shape[2],
        LANES=triton.next_power_of_2(largest.shape[2]),
        WIDTH=16 // pool.checkpoint.element_size(),
        STORE=store_of(pool.policy.checkpoint),
        GLOBAL=global_options(),
        BLOCK=recipe_of(copy).options,
        num_warps=warps,
        **target.LAUNCH_OPTIONS,
    )
