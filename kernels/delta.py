"""Launches of the decode kernels of gated_delta and kimi_delta on a layer's pool: which policies they serve, and how.

A layer's step is at most three launches.  Where a fold is matrix products: what the windows give, coefficients or the
systems of those that are full; the folds of these with their read copies; and the reads of the others.  Elsewhere: the
folds of the rows whose window is full, beside the coefficients of the other rows' windows; the reads of these; and the
read copy of what was folded.  With window 1 and no read copy it is one, which rewrites the state.  ``delta_window``,
``delta_read``, ``delta_fold``, ``delta_systems`` and ``delta_product`` have the mathematics.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantlab.kernels import read_copies, target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.delta_fold import step_kernel, window_fold_kernel
from quantlab.kernels.delta_product import product_fold_kernel
from quantlab.kernels.delta_read import read_kernel
from quantlab.kernels.delta_tiles import LANES_A_ROW, inner_of
from quantlab.kernels.scales import global_options, recipe_of
from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import CommitPlan, room
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan
from quantlab.schemes.store import CHECKPOINT_PART

PHILOX_ROUNDS = 10
LARGEST_WINDOW = 64
"""A window's keys stay in the registers of one warp."""
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
    """What one launch leaves for the next, uninitialised: see ``delta_window``, ``delta_fold``, ``delta_systems``."""

    coefficients: Tensor
    parts: Tensor | None
    halves: Tensor | None
    decays: Tensor
    vectors: Tensor | None
    largest: Tensor | None
    factors: Tensor | None
    systems: Tensor | None
    gammas: Tensor | None
    keys_before: Tensor | None
    keys_after: Tensor | None


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
    if rest and policy.checkpoint.recipe is not None and read_copies.by_head(policy.read_copy):
        return "a key dim that is no power of two with a scale a row"
    return None


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
    scratch = scratch_of(pool, inputs, plan, tuning)
    fold_launch(pool, inputs, plan, output, scratch, tuning).run()
    if by_product(pool, inputs, tuning):
        with target.beside(pool.device):
            _product_and_copy(pool, inputs, plan, output, scratch, tuning)
        read_launch(pool, inputs, plan, output, scratch, tuning).run()
        target.together(pool.device)
        return
    if pool.policy.window > 1:
        read_launch(pool, inputs, plan, output, scratch, tuning).run()
    if pool.policy.read_copy is not None:
        read_copies.encode(pool, plan.flush_rows, plan.flush_count, plan.slots, scratch.largest)


def step_launch(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, tuning: Tuning
) -> Launch:
    """The state of every row rewritten."""
    shape, stochastic = pool.shape, pool.policy.checkpoint.stochastic
    rows = tuning.step_rows or (4 if stochastic else 2 * (16 // pool.checkpoint.element_size()))
    rows = _dividing(shape.value_dim, min(rows, 16))
    # Where nothing but memory counts, longer pieces of a row at a time.
    lanes = LANES_A_ROW if stochastic or (_by_key(pool) and rows > 8) else _long_lanes(pool)
    arguments = {
        **_stored(pool),
        "positions": plan.positions,
        "slots": plan.slots,
        **_token(inputs),
        "output": output,
        **_random(pool),
    }
    constants = {**_sizes(pool, tuning, lanes), "R": rows, "BY_KEY": _by_key(pool), "ROUNDS": PHILOX_ROUNDS}
    programs = output.shape[0] * shape.heads * (shape.value_dim // rows)
    return Launch(step_kernel, programs, arguments, constants, _options(1, tuning.step_registers))


def scratch_of(
    pool: LayerPool, inputs: StepInputs | None, plan: StepPlan | CommitPlan, tuning: Tuning
) -> Scratch:
    """Memory between the launches of a step."""
    shape, by_key, batch = pool.shape, _by_key(pool), plan.slots.shape[0]

    def memory(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device=pool.device)

    heads, copy = shape.heads, pool.policy.read_copy is not None
    dense = not (copy and pool.policy.options.key_read == "copy")
    units = heads if by_key else shape.key_heads
    product, held = by_product(pool, inputs, tuning), _held(pool)
    tiles = shape.value_dim // _fold_rows(pool, inputs, tuning)
    whole = product and tiles == 1
    factors = None
    if by_key and pool.policy.window > 1 and not product:
        sizes = _fold_programs(pool, inputs, batch, tuning), held, shape.key_dim
        factors = torch.empty(sizes, dtype=torch.float32, device=pool.device)
    return Scratch(
        coefficients=memory(heads, 2, _held(pool)),
        parts=memory(heads, 6, _held(pool), dtype=torch.bfloat16) if copy else None,
        halves=memory(units, 4, shape.key_dim, dtype=torch.float16) if copy else None,
        decays=memory(heads, 2),
        vectors=memory(heads, 2, shape.key_dim) if by_key and dense else None,
        largest=memory(heads, tiles) if read_copies.by_head(pool.policy.read_copy) and not whole else None,
        factors=factors,
        systems=memory(heads, held, held) if product else None,
        gammas=memory(heads, shape.key_dim if by_key else held) if product else None,
        keys_before=memory(heads, held, shape.key_dim) if product and by_key else None,
        keys_after=memory(heads, held, shape.key_dim) if product and by_key else None,
    )


def fold_launch(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    output: Tensor | None,
    scratch: Scratch,
    tuning: Tuning,
) -> Launch:
    """The folds, or the systems of those that are matrix products; and the coefficients of the other windows.

    Without a token (inputs and output None) only whole windows are folded.
    """
    shape, policy, batch = pool.shape, pool.policy, plan.slots.shape[0]
    product = by_product(pool, inputs, tuning)
    rows = 16 if product else _fold_rows(pool, inputs, tuning)
    folds = _fold_programs(pool, inputs, batch, tuning)
    if product:
        folds = min(tuning.system_programs or MULTIPROCESSORS * 12, batch * shape.heads)
    windows = batch * (shape.heads if _by_key(pool) else shape.key_heads) if policy.window > 1 else 0
    if inputs is None:
        windows = 0
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
        **_sizes(pool, tuning),
        **_window_sizes(pool, token=inputs is not None),
        "KEY_COPY": _key_copy(pool),
        "R": rows,
        "SIZE": _power_below(shape.key_dim),
        "HEADS": _power_from(shape.heads // shape.key_heads),
        "BY_KEY": _by_key(pool),
        "OUTPUT_COPY": policy.read_copy is not None and policy.options.flush_read == "copy",
        "ROUNDS": PHILOX_ROUNDS,
        "PRODUCT": product,
        "LEVELS": _held(pool).bit_length() - 1,
    }
    # Twelve blocks of a warp on a multiprocessor.
    registers = 168 if product or policy.checkpoint.name == "fp32" else None
    if not product:
        registers = tuning.fold_registers or registers
    return Launch(window_fold_kernel, folds + windows, arguments, constants, _options(1, registers))


def product_launch(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    output: Tensor | None,
    scratch: Scratch,
    tuning: Tuning,
) -> Launch:
    """The folds that are matrix products, from the systems that ``fold_launch`` prepared."""
    shape, rows, copy = pool.shape, _fold_rows(pool, inputs, tuning), pool.policy.read_copy
    codes, scales = pool.copy_codes, pool.copy_scales
    arguments = {
        "flush_rows": plan.flush_rows,
        "flush_count": plan.flush_count,
        "slots": plan.slots,
        "origin": _origin(pool),
        "words": None if codes is None else codes.view(torch.int32),
        "scales": scales,
        "global_scale": pool.copy_global_scale,
        "code_halves": None if codes is None else codes.view(torch.int16),
        "scale_pairs": None if scales is None else scales.view(torch.int16),
        **_stored(pool),
        "k_buffer": pool.k_buffer,
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        **{name: value for name, value in _token(inputs).items() if name != "log_decay"},
        "output": output,
        **{
            name: getattr(scratch, name)
            for name in ("largest", "systems", "gammas", "keys_before", "keys_after")
        },
        **_random(pool),
    }
    constants = {
        **{name: value for name, value in _sizes(pool, tuning).items() if name not in ("LANES", "INNER")},
        **_window_sizes(pool, token=inputs is not None),
        "R": rows,
        "BY_KEY": _by_key(pool),
        "KEY_COPY": _key_copy(pool),
        "ROUNDS": PHILOX_ROUNDS,
        "GLOBAL": None if copy is None else global_options(),
        "BLOCK": None if copy is None else recipe_of(copy).options,
    }
    # Sixteen warps on a multiprocessor: a lane holds 64 numbers of a key dim of 128, and twice that does not fit.
    registers = tuning.fold_registers or (128 if shape.key_dim <= 128 else None)
    programs = _fold_programs(pool, inputs, plan.slots.shape[0], tuning)
    return Launch(product_fold_kernel, programs, arguments, constants, _options(rows // 16, registers))


def _product_and_copy(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    output: Tensor | None,
    scratch: Scratch,
    tuning: Tuning,
) -> None:
    product_launch(pool, inputs, plan, output, scratch, tuning).run()
    if scratch.largest is not None:
        read_copies.encode(pool, plan.flush_rows, plan.flush_count, plan.slots, scratch.largest)


def read_launch(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, scratch: Scratch, tuning: Tuning
) -> Launch:
    """The reads through the windows that are not full."""
    shape, copy = pool.shape, pool.policy.read_copy is not None
    if _key_copy(pool):
        most = 64 if shape.key_dim <= 128 else 16
    else:
        # Of a checkpoint alone as many bytes in flight whatever its format.
        most = 16 if copy else 64 // pool.checkpoint.element_size()
    rows = tuning.read_rows or _dividing(shape.value_dim, most)
    arguments = {
        **_copied(pool),
        **_stored(pool),
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "positions": plan.positions,
        "slots": plan.slots,
        "origin": _origin(pool),
        **{name: value for name, value in _token(inputs).items() if name != "log_decay"},
        **{name: getattr(scratch, name) for name in ("coefficients", "parts", "halves", "decays", "vectors")},
        "output": output,
    }
    constants = {
        **_sizes(pool, tuning, LANES_A_ROW if copy else _long_lanes(pool)),
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
        and (_by_key(pool) or keys.dtype == (keys if inputs is None else inputs.k).dtype == torch.bfloat16)
    )


def _fold_rows(pool: LayerPool, inputs: StepInputs | None, tuning: Tuning) -> int:
    """Of a product sixteen rows a warp, and eight warps, or a whole head, where the value dim allows it."""
    if by_product(pool, inputs, tuning):
        return tuning.fold_rows or _dividing(pool.shape.value_dim, 128)
    return tuning.fold_rows or _warp_rows(pool)


def _warp_rows(pool: LayerPool) -> int:
    """Value rows that a warp rewrites at a time; random words take the registers of half of them."""
    return 8 if pool.policy.checkpoint.stochastic else 16


def _fold_programs(pool: LayerPool, inputs: StepInputs | None, batch: int, tuning: Tuning) -> int:
    """As many as the multiprocessors of an H200 hold at a time; each has as many tiles as it takes."""
    rows = _fold_rows(pool, inputs, tuning)
    tiles = batch * pool.shape.heads * (pool.shape.value_dim // rows)
    held = 16 // (rows // 16) if by_product(pool, inputs, tuning) else 12
    if by_product(pool, inputs, tuning) and pool.v_buffer is None:
        held //= 2  # room for the reads beside them
    return min(tuning.fold_programs or MULTIPROCESSORS * held, tiles)


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
    return dict(zip(("codes", "scales", "global_scale"), read_copies.words_of(pool), strict=True))


def _token(inputs: StepInputs | None) -> dict[str, Any]:
    names = ("q", "k", "v", "log_decay", "beta")
    return dict.fromkeys(names) if inputs is None else {name: getattr(inputs, name) for name in names}


def _random(pool: LayerPool) -> dict[str, Any]:
    """What names the checkpoint's random words."""
    counters = pool.counters
    return {
        "store_numbers": counters.store_numbers,
        "sequence_ids": counters.sequence_ids,
        "seed": counters.seed,
        "random_stream": 4 * pool.layer + CHECKPOINT_PART,
    }


def _long_lanes(pool: LayerPool) -> int:
    """Twice ``LANES_A_ROW`` where a row has 16 bytes for each of them."""
    row_bytes = _power_from(pool.shape.key_dim) * pool.checkpoint.element_size()
    return 2 * LANES_A_ROW if row_bytes >= 32 * LANES_A_ROW else LANES_A_ROW


def _sizes(pool: LayerPool, tuning: Tuning, lanes: int = LANES_A_ROW) -> dict[str, Any]:
    shape = pool.shape
    lanes = tuning.lanes or lanes
    return {
        "H": shape.heads,
        "G": shape.key_heads,
        "V": shape.value_dim,
        "K": shape.key_dim,
        "KP": _power_from(shape.key_dim),
        "LANES": lanes,
        "INNER": inner_of(pool.checkpoint.element_size(), shape.key_dim, lanes),
        "STORE": store_of(pool.policy.checkpoint),
    }


def _window_sizes(pool: LayerPool, *, token: bool = True) -> dict[str, int]:
    """A whole window without a token counts as one longer, with a token that is not there."""
    return {"L": pool.policy.window + (not token), "J": _held(pool), "RING": max(pool.records, 1)}


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
