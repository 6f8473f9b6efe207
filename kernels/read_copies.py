"""Read copies in the kernels: how each format is held, read and encoded.

    format   operand of tensor cores (``packed``)   float32 values   encoded
    nvfp4    ``half_operand``                       ``copy_tiles``   a whole head, which shares a scale: ``copies``
    mxfp4    ``power_operand``                      ``copy_tiles``   row by row: ``plain_copies``
    fp8      ``byte_operand``                       ``copy_tiles``   row by row: ``plain_copies``

nvfp4+keyscale is nvfp4, but for what it is multiplied by: a query times the scales of its columns (``key_scales``).

What a copy is a kernel sees by its memory.  A further format is a layout in ``quantlab.schemes.pool`` and a line of
this table.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from quantlab.formats import Format
from quantlab.kernels import target
from quantlab.kernels.checkpoints import Store, store_of
from quantlab.kernels.copies import encode_heads_kernel, encode_kernel
from quantlab.kernels.plain_copies import encode_plain
from quantlab.kernels.scales import global_options, recipe_of
from quantlab.schemes.pool import LayerPool

PROGRAMS = 4224
"""At most; they share the tiles of all rows among them."""


def by_head(copy: Format | None) -> bool:
    """Whether there is a read copy whose values of a head share a scale, so that all of them come before any code."""
    return copy is not None and copy.name == "nvfp4"


def words_of(pool: LayerPool) -> tuple[Tensor | None, ...]:
    """Codes as int32 words, scales, global scale and key scales of the read copy."""
    codes = None if pool.copy_codes is None else pool.copy_codes.view(torch.int32)
    return codes, pool.copy_scales, pool.copy_global_scale, pool.copy_key_scales


def dense_of(pool: LayerPool) -> tuple[Tensor | None, Tensor | None, Store | None]:
    """Codes and scales of the read copy and None, or where there is none of the checkpoint, and what its format makes
    of a tile.
    """
    if pool.policy.read_copy is None:
        return pool.checkpoint, pool.checkpoint_scales, store_of(pool.policy.checkpoint)
    return pool.copy_codes, pool.copy_scales, None


def encode(
    pool: LayerPool, rows: Tensor, count: Tensor, slots: Tensor, largest: Tensor | None = None
) -> None:
    """Encode the read copy of the slots ``slots[rows[i]]`` for i below ``count``, from their stored checkpoints.

    rows: int32 (B,).  count: int32 (1,).  slots: int32 or int64.  largest: float32 (B, heads, parts), of the magnitudes
    of the checkpoint's values in some parts of each head, row i of it for the i-th of ``rows``; nvfp4 alone needs it,
    without key scales.
    """
    if pool.copy_key_scales is not None:
        _encode_heads(pool, rows, count, slots)
        return
    if not by_head(pool.policy.read_copy):
        encode_plain(pool, rows, count, slots)
        return
    shape, copy = pool.shape, pool.policy.read_copy
    assert copy is not None
    assert largest is not None
    words, scales, global_scale, _ = words_of(pool)
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
        words,
        scales,
        global_scale,
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


def _encode_heads(pool: LayerPool, rows: Tensor, count: Tensor, slots: Tensor) -> None:
    """``encode`` with key scales, which all value rows of a head share: a program has whole heads."""
    shape, copy = pool.shape, pool.policy.read_copy
    assert copy is not None
    tile = min(16, shape.value_dim & -shape.value_dim)
    kernel: Any = encode_heads_kernel
    kernel[(min(PROGRAMS, rows.shape[0] * shape.heads),)](
        rows,
        count,
        slots,
        pool.checkpoint,
        pool.checkpoint_scales,
        *words_of(pool),
        H=shape.heads,
        P=shape.value_dim,
        N=shape.key_dim,
        R=tile,
        WIDTH=16 // pool.checkpoint.element_size(),
        STORE=store_of(pool.policy.checkpoint),
        GLOBAL=global_options(),
        BLOCK=recipe_of(copy).options,
        num_warps=max(1, min(4, tile * shape.key_dim // 512)),
        **target.LAUNCH_OPTIONS,
    )
