"""How the launches of a delta rule's layer are made: rows, lanes, registers and programs, as measured on one H200."""

from dataclasses import dataclass

import torch

from quantlab.kernels import read_copies, target
from quantlab.kernels.delta_tiles import LANES_A_ROW
from quantlab.recurrences import StepInputs
from quantlab.schemes.pool import LayerPool

MULTIPROCESSORS = 132
"""Of an H200."""
PRODUCT_WINDOW = 16
"""Records and token that one tile of a matrix product holds."""


@dataclass(frozen=True)
class Tuning:
    """How the kernels of one layer are launched; None where the shape decides.

    step_rows, read_rows, fold_rows: value rows of a tile.  step_registers and its like: the most a thread may have.
    fold_programs: they share the tiles of the rows that flush.  product: whether a fold may be matrix products, whose
    systems ``system_programs`` share.  lanes: of a warp that share a value row of a dense state.
    """

    step_rows: int | None = None
    step_registers: int | None = None
    read_rows: int | None = None
    read_registers: int | None = None
    fold_rows: int | None = None
    fold_registers: int | None = None
    fold_programs: int | None = None
    product: bool = True
    system_programs: int | None = None
    lanes: int | None = None


def by_product(pool: LayerPool, inputs: StepInputs | None, tuning: Tuning) -> bool:
    """Whether a fold, without a token where inputs are None, is done by matrix products.  Under one decay a head keys
    are then bfloat16.
    """
    policy, keys = pool.policy, pool.k_buffer
    copy = policy.read_copy
    return (
        tuning.product
        and 1 < policy.window <= PRODUCT_WINDOW
        and keys is not None
        and (copy is None or read_copies.by_head(copy))
        and (inputs is None or copy is None or policy.options.flush_read == "exact")
        and (by_key(pool) or keys.dtype == (keys if inputs is None else inputs.k).dtype == torch.bfloat16)
    )


def fold_rows(pool: LayerPool, inputs: StepInputs | None, tuning: Tuning) -> int:
    """Of a product sixteen rows a warp, and four warps where the value dim allows it."""
    if by_product(pool, inputs, tuning):
        return tuning.fold_rows or dividing(pool.shape.value_dim, 64)
    return tuning.fold_rows or warp_rows(pool)


def warp_rows(pool: LayerPool) -> int:
    """Value rows that a warp rewrites at a time; random words take the registers of half of them."""
    return 8 if pool.policy.checkpoint.stochastic else 16


def fold_programs(pool: LayerPool, inputs: StepInputs | None, batch: int, tuning: Tuning) -> int:
    """As many as the multiprocessors of an H200 hold at a time; each has as many tiles as it takes.  Products with a
    copy, a head a time, leave room for the reads beside them.
    """
    rows, product = fold_rows(pool, inputs, tuning), by_product(pool, inputs, tuning)
    items = batch * pool.shape.heads
    if product and pool.policy.read_copy is not None:
        held = 3
    else:
        items *= pool.shape.value_dim // rows
        held = 16 // (rows // 16) if product else 12
    return min(tuning.fold_programs or MULTIPROCESSORS * held, items)


def long_lanes(pool: LayerPool) -> int:
    """Twice ``LANES_A_ROW`` where a row has 16 bytes for each of them."""
    row_bytes = power_from(pool.shape.key_dim) * pool.checkpoint.element_size()
    return 2 * LANES_A_ROW if row_bytes >= 32 * LANES_A_ROW else LANES_A_ROW


def by_key(pool: LayerPool) -> bool:
    return pool.family == "kimi_delta"


def held(pool: LayerPool) -> int:
    """Positions of a window's records and the token in a tile."""
    return power_from(max(PRODUCT_WINDOW, pool.policy.window))


def key_copy(pool: LayerPool) -> bool:
    """Whether the read copy serves S k."""
    return pool.policy.read_copy is not None and pool.policy.options.key_read == "copy"


def options(warps: int, registers: int | None) -> dict[str, int]:
    limited = {} if registers is None or target.interpreting() else {"maxnreg": registers}
    return {"num_warps": warps, **limited}


def dividing(value_dim: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``value_dim``."""
    return min(most, value_dim & -value_dim)


def power_from(number: int) -> int:
    """The smallest power of two from ``number`` on."""
    return 1 << max(number - 1, 0).bit_length()


def power_below(number: int) -> int:
    """The largest power of two up to ``number``."""
    return 1 << (number.bit_length() - 1)
