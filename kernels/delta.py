"""Launches of the decode kernels of gated_delta and kimi_delta on a layer's pool: which policies they serve, and how.

A layer's step is at most three launches: the folds of the rows whose window is full, beside the coefficients of the
other rows' windows; the reads of these; and the read copy of what was folded.  With window 1 and no read copy it is
one, which rewrites the state.  ``delta_window``, ``delta_read``, ``delta_fold`` and ``delta_product`` have the
mathematics.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantlab.kernels import read_copies, target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.delta_fold import step_kernel, window_fold_kernel
from quantlab.kernels.delta_read import read_kernel
from quantlab.kernels.delta_tiles import inner_of
from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import room
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan
from quantlab.schemes.store import CHECKPOINT_PART

PHILOX_ROUNDS = 10
LARGEST_WINDOW = 64
"""A window's keys stay in the registers of one warp."""
PRODUCT_WINDOW = 16
"""Records and token that one tile of a matrix product holds."""


@dataclass(frozen=True)
class Tuning:
    """How the kernels of one layer are launched; None where the shape decides.

    read_rows, fold_rows: value rows of a tile.  read_registers, fold_registers: the most a thread may have.
    fold_programs: they share the tiles of the rows that flush.  product: whether a fold may be matrix products.
    """

    read_rows: int | None = None
    read_registers: int | None = None
    fold_rows: int | None = None
    fold_registers: int | None = None
    fold_programs: int | None = None
    product: bool = True


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> Any:
        given = {**self.arguments, **self.constants, **self.options, **target.LAUNCH_OPTIONS}
        return self.kernel[(self.programs,)](**given)


class Scratch(NamedTuple):
    """What one launch leaves for the next, uninitialised: see ``delta_window`` and ``delta_fold``."""

    coefficients: Tensor
    parts: Tensor | None
    halves: Tensor | None
    decays: Tensor
    vectors: Tensor | None
    largest: Tensor | None
    factors: Tensor | None


def served(policy: Policy, shape: StateShape, records: int | None) -> str | None:
    """Why the kernels do not serve a policy that the pool has a layout for, or None."""
    if policy.window > LARGEST_WINDOW:
        return f"a window above {LARGEST_WINDOW}"
    if policy.options.flush != "full":
        return f"flush={policy.options.flush}"
    if shape.value_dim % 16:
        return "a value dim that is no multiple of 16"
    if shape.key_dim % 32:
        return "a key dim that is no multiple of 32"
    if policy.read_copy is None:
        return None
    rest = shape.key_dim - _power_below(shape.key_dim)
    if rest and rest != _power_below(rest):
        return "a key dim that is neither a power of two nor the sum of two"
    if rest and policy.checkpoint.recipe is not None:
        return "a key dim that is no power of two with a scale a row"
    return None if policy.read_copy.name == "nvfp4" else f"a read copy of {policy.read_copy.name}"


def decode_gated_delta(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor) -> None:
    """One token of a gated_delta layer; arguments as ``quantlab.kernels.steps`` has checked them."""
    decode(pool, inputs, plan, output)


def decode_kimi_delta(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor) -> None:
    """One token of a kimi_delta layer, whose log_decay is (B, heads, key_dim)."""
    decode(pool, inputs, plan, output)


def decode(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, tuning: Tuning | None = None
) -> None:
    """One token of one layer, in one to three launches."""
    tuning = tuning or Tuning()
    if pool.policy.window == 1 and pool.policy.read_copy is None:
        step_launch(pool, inputs, plan, output, tuning).run()
        return
    scratch = scratch_of(pool, inputs, tuning)
    fold_launch(pool, inputs, plan, output, scratch, tuning).run()
    if pool.policy.window > 1:
        read_launch(pool, inputs, plan, output, scratch, tuning).run()
    if scratch.largest is not None:
        read_copies.encode(pool, plan.flush_rows, plan.flush_count, plan.slots, scratch.largest)


def step_launch(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, tuning: Tuning
) -> Launch:
    """The state of every row rewritten."""
    shape, rows = pool.shape, tuning.fold_rows or 16
    arguments = {
        **_stored(pool),
        "positions": plan.positions,
        "slots": plan.slots,
        **_token(inputs),
        "output": output,
        **_random(pool),
    }
    constants = {**_sizes(pool), "R": rows, "BY_KEY": _by_key(pool), "ROUNDS": PHILOX_ROUNDS}
    programs = output.shape[0] * shape.heads * (shape.value_dim // rows)
    return Launch(step_kernel, programs, arguments, constants, _options(1, tuning.fold_registers))


def scratch_of(pool: LayerPool, inputs: StepInputs, tuning: Tuning) -> Scratch:
    """Memory between the launches of a step."""
    shape, by_key, batch = pool.shape, _by_key(pool), inputs.v.shape[0]

    def memory(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device=pool.device)

    heads, copy = shape.heads, pool.policy.read_copy is not None
    dense = not (copy and pool.policy.options.key_read == "copy")
    units = heads if by_key else shape.key_heads
    tiles = shape.value_dim // _fold_rows(pool, inputs, tuning)
    factors = None
    if by_key and pool.policy.window > 1:
        sizes = _fold_programs(pool, inputs, tuning), _held(pool), shape.key_dim
        factors = torch.empty(sizes, dtype=torch.float32, device=pool.device)
    return Scratch(
        coefficients=memory(heads, 2, _held(pool)),
        parts=memory(heads, 6, _held(pool), dtype=torch.bfloat16) if copy else None,
        halves=memory(units, 4, shape.key_dim, dtype=torch.float16) if copy else None,
        decays=memory(heads, 2),
        vectors=memory(heads, 2, shape.key_dim) if by_key and dense else None,
        largest=memory(heads, tiles) if copy else None,
        factors=factors,
    )


def fold_launch(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, scratch: Scratch, tuning: Tuning
) -> Launch:
    """The folds, and the coefficients of the windows that are not full."""
    shape, policy, batch = pool.shape, pool.policy, output.shape[0]
    rows, product = _fold_rows(pool, inputs, tuning), by_product(pool, inputs, tuning)
    warps = _fold_warps(pool, inputs, tuning)
    folds = _fold_programs(pool, inputs, tuning)
    windows = batch * (shape.heads if _by_key(pool) else shape.key_heads) if policy.window > 1 else 0
    arguments = {
        "positions": plan.positions,
        "slots": plan.slots,
        "flush_rows": plan.flush_rows,
        "flush_count": plan.flush_count,
        "origin": _origin(pool),
        **_copied(pool),
        **_stored(pool),
        "k_buffer": pool.k_buffer,
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "beta_buffer": pool.beta_buffer,
        "log_decay_buffer": pool.log_decay_buffer,
        **_token(inputs),
        "output": output,
        **scratch._asdict(),
        **_random(pool),
        "folds": folds,
    }
    constants = {
        **_sizes(pool),
        **_window_sizes(pool),
        "KEY_COPY": _key_copy(pool),
        "R": rows,
        "SIZE": _power_below(shape.key_dim),
        "HEADS": _power_from(shape.heads // shape.key_heads),
        "BY_KEY": _by_key(pool),
        "OUTPUT_COPY": policy.read_copy is not None and policy.options.flush_read == "copy",
        "ROUNDS": PHILOX_ROUNDS,
        "PRODUCT": product,
        "LEVELS": _held(pool).bit_length() - 1,
        "WARPS": warps,
    }
    # Three blocks of four warps, or twelve of one, on a multiprocessor.
    registers = tuning.fold_registers or (168 if policy.checkpoint.name == "fp32" else None)
    return Launch(window_fold_kernel, folds + windows, arguments, constants, _options(warps, registers))


def read_launch(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, scratch: Scratch, tuning: Tuning
) -> Launch:
    """The reads through the windows that are not full."""
    shape, copy = pool.shape, pool.policy.read_copy is not None
    rows = tuning.read_rows or _dividing(
        shape.value_dim, 64 if _key_copy(pool) and shape.key_dim <= 128 else 16
    )
    arguments = {
        **_copied(pool),
        **_stored(pool),
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "positions": plan.positions,
        "slots": plan.slots,
        "origin": _origin(pool),
        **{name: value for name, value in _token(inputs).items() if name != "log_decay"},
        **{name: value for name, value in scratch._asdict().items() if name not in ("largest", "factors")},
        "output": output,
    }
    constants = {
        **_sizes(pool),
        **_window_sizes(pool),
        "R": rows,
        "SIZE": _power_below(shape.key_dim),
        "COPY": copy,
        "BY_KEY": _by_key(pool),
        "KEY_COPY": _key_copy(pool),
    }
    programs = output.shape[0] * shape.heads * (shape.value_dim // rows)
    return Launch(read_kernel, programs, arguments, constants, _options(1, tuning.read_registers))


def by_product(pool: LayerPool, inputs: StepInputs | None, tuning: Tuning) -> bool:
    """Whether a fold is done by matrix products: bfloat16 windows and tokens (inputs None for a fold without one), one
    decay a head, an FP32 checkpoint.
    """
    policy, key_dim = pool.policy, pool.shape.key_dim
    rest = key_dim - _power_from(key_dim) // 2
    return (
        tuning.product
        and not _by_key(pool)
        and 1 < policy.window <= PRODUCT_WINDOW
        and policy.checkpoint.name == "fp32"
        and (inputs is None or policy.read_copy is None or policy.options.flush_read == "exact")
        and pool.k_buffer is not None
        and pool.k_buffer.dtype == torch.bfloat16
        and (inputs is None or inputs.k.dtype == torch.bfloat16)
        and rest == _power_below(rest)
    )


def _fold_rows(pool: LayerPool, inputs: StepInputs, tuning: Tuning) -> int:
    """Sixteen rows a warp.  Products of four warps become asynchronous ones on Blackwell, where Triton 3.7 does not
    compile this tile's layout.
    """
    return tuning.fold_rows if tuning.fold_rows and by_product(pool, inputs, tuning) else 16


def _fold_programs(pool: LayerPool, inputs: StepInputs, tuning: Tuning) -> int:
    """As many as the multiprocessors of an H200 hold at a time; each has as many tiles as it takes."""
    warps = _fold_warps(pool, inputs, tuning)
    tiles = inputs.v.shape[0] * pool.shape.heads * (pool.shape.value_dim // _fold_rows(pool, inputs, tuning))
    return min(tuning.fold_programs or 132 * (12 // warps), tiles)


def _fold_warps(pool: LayerPool, inputs: StepInputs, tuning: Tuning) -> int:
    return _fold_rows(pool, inputs, tuning) // 16 if by_product(pool, inputs, tuning) else 1


def _by_key(pool: LayerPool) -> bool:
    return pool.family == "kimi_delta"


def _held(pool: LayerPool) -> int:
    """Positions of a window's records and the token in a tile."""
    return _power_from(max(PRODUCT_WINDOW, pool.policy.window))


def _origin(pool: LayerPool) -> Tensor | None:
    """Windows move along the ring where there is room for drafts and a window is not the whole ring."""
    moves = room(pool) and pool.policy.window % pool.records
    return pool.counters.origin if moves else None


def _stored(pool: LayerPool) -> dict[str, Any]:
    return {"checkpoint": pool.checkpoint, "checkpoint_scales": pool.checkpoint_scales}


def _copied(pool: LayerPool) -> dict[str, Any]:
    codes = pool.copy_codes
    words = None if codes is None else codes.view(torch.int32)
    return {"codes": words, "scales": pool.copy_scales, "global_scale": pool.copy_global_scale}


def _token(inputs: StepInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in ("q", "k", "v", "log_decay", "beta")}


def _random(pool: LayerPool) -> dict[str, Any]:
    """What names the checkpoint's random words."""
    counters = pool.counters
    return {
        "store_numbers": counters.store_numbers,
        "sequence_ids": counters.sequence_ids,
        "seed": counters.seed,
        "random_stream": 4 * pool.layer + CHECKPOINT_PART,
    }


def _sizes(pool: LayerPool) -> dict[str, Any]:
    shape = pool.shape
    return {
        "H": shape.heads,
        "G": shape.key_heads,
        "V": shape.value_dim,
        "K": shape.key_dim,
        "KP": _power_from(shape.key_dim),
        "INNER": inner_of(pool.checkpoint.element_size(), shape.key_dim),
        "STORE": store_of(pool.policy.checkpoint),
    }


def _window_sizes(pool: LayerPool) -> dict[str, int]:
    return {"L": pool.policy.window, "J": _held(pool), "RING": max(pool.records, 1)}


def _key_copy(pool: LayerPool) -> bool:
    """Whether the read copy serves S k."""
    return pool.policy.read_copy is not None and pool.policy.options.key_read == "copy"


def _options(warps: int, registers: int | None) -> dict[str, int]:
    limited = {} if registers is None or target.interpreting() else {"maxnreg": registers}
    return {"num_warps": warps, **limited}


def _dividing(value_dim: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``value_dim``."""
    return min(most, value_dim & -value_dim)


def _power_from(number: int) -> int:
    """The smallest power of two from ``number`` on."""
    return 1 << max(number - 1, 0).bit_length()


def _power_below(number: int) -> int:
    """The largest power of two up to ``number``."""
    return 1 << (number.bit_length() - 1)
