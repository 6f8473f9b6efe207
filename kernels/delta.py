"""Launches of the decode kernels of gated_delta and kimi_delta on a layer's pool: which policies they serve, and how.

A layer's step is at most three launches.  Where a fold is matrix products: what the windows give, coefficients or the
systems of those that are full; the folds of these with their read copies; and the reads of the others.  Elsewhere: the
folds of the rows whose window is full, beside the coefficients of the other rows' windows; the reads of these; and the
read copy of what was folded.  With window 1 and no read copy it is one, which rewrites the state.  ``delta_window``,
``delta_read``, ``delta_fold``, ``delta_systems`` and ``delta_product`` have the mathematics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantlab.kernels import delta_choices as choices
from quantlab.kernels import read_copies, target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.delta_choices import MULTIPROCESSORS, Tuning
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
    rest = shape.key_dim - choices.power_below(shape.key_dim)
    if rest and rest != choices.power_below(rest):
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
    if choices.by_product(pool, inputs, tuning):
        with target.beside(pool.device):
            product_launch(pool, inputs, plan, output, scratch, tuning).run()
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
    rows = choices.dividing(shape.value_dim, min(rows, 16))
    # Where nothing but memory counts, longer pieces of a row at a time.
    lanes = LANES_A_ROW if stochastic or (choices.by_key(pool) and rows > 8) else choices.long_lanes(pool)
    arguments = {
        **stored(pool),
        "positions": plan.positions,
        "slots": plan.slots,
        **token(inputs),
        "output": output,
        **random(pool),
    }
    constants = {
        **sizes(pool, tuning, lanes),
        "R": rows,
        "BY_KEY": choices.by_key(pool),
        "ROUNDS": PHILOX_ROUNDS,
    }
    programs = output.shape[0] * shape.heads * (shape.value_dim // rows)
    return Launch(step_kernel, programs, arguments, constants, choices.options(1, tuning.step_registers))


def scratch_of(
    pool: LayerPool, inputs: StepInputs | None, plan: StepPlan | CommitPlan, tuning: Tuning
) -> Scratch:
    """Memory between the launches of a step."""
    shape, by_key, batch = pool.shape, choices.by_key(pool), plan.slots.shape[0]

    def memory(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device=pool.device)

    heads, copy = shape.heads, pool.policy.read_copy is not None
    dense = not (copy and pool.policy.options.key_read == "copy")
    units = heads if by_key else shape.key_heads
    product, held = choices.by_product(pool, inputs, tuning), choices.held(pool)
    tiles, by_head = (
        shape.value_dim // choices.fold_rows(pool, inputs, tuning),
        read_copies.by_head(pool.policy.read_copy),
    )
    factors = None
    if by_key and pool.policy.window > 1 and not product:
        sizes = choices.fold_programs(pool, inputs, batch, tuning), held, shape.key_dim
        factors = torch.empty(sizes, dtype=torch.float32, device=pool.device)
    return Scratch(
        coefficients=memory(heads, 2, choices.held(pool)),
        parts=memory(heads, 6, choices.held(pool), dtype=torch.bfloat16) if copy else None,
        halves=memory(units, 4, shape.key_dim, dtype=torch.float16) if copy else None,
        decays=memory(heads, 2),
        vectors=memory(heads, 2, shape.key_dim) if by_key and dense else None,
        largest=memory(heads, tiles) if by_head and not product else None,
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
    product = choices.by_product(pool, inputs, tuning)
    rows = 16 if product else choices.fold_rows(pool, inputs, tuning)
    folds = choices.fold_programs(pool, inputs, batch, tuning)
    if product:
        folds = min(tuning.system_programs or MULTIPROCESSORS * 12, batch * shape.heads)
    windows = batch * (shape.heads if choices.by_key(pool) else shape.key_heads) if policy.window > 1 else 0
    if inputs is None:
        windows = 0
    arguments = {
        "positions": plan.positions,
        "slots": plan.slots,
        "flush_rows": plan.flush_rows,
        "flush_count": plan.flush_count,
        "origin": origin(pool),
        **copied(pool),
        **stored(pool),
        "k_buffer": pool.k_buffer,
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "beta_buffer": pool.beta_buffer,
        "log_decay_buffer": pool.log_decay_buffer,
        **token(inputs),
        "output": output,
        **scratch._asdict(),
        **random(pool),
        "folds": folds,
    }
    constants = {
        **sizes(pool, tuning),
        **window_sizes(pool, token=inputs is not None),
        "KEY_COPY": choices.key_copy(pool),
        "R": rows,
        "SIZE": choices.power_below(shape.key_dim),
        "HEADS": choices.power_from(shape.heads // shape.key_heads),
        "BY_KEY": choices.by_key(pool),
        "OUTPUT_COPY": policy.read_copy is not None and policy.options.flush_read == "copy",
        "ROUNDS": PHILOX_ROUNDS,
        "PRODUCT": product,
        "LEVELS": choices.held(pool).bit_length() - 1,
    }
    # Twelve blocks of a warp on a multiprocessor.
    registers = 168 if product or policy.checkpoint.name == "fp32" else None
    if not product:
        registers = tuning.fold_registers or registers
    return Launch(window_fold_kernel, folds + windows, arguments, constants, choices.options(1, registers))


def product_launch(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    output: Tensor | None,
    scratch: Scratch,
    tuning: Tuning,
) -> Launch:
    """The folds that are matrix products, from the systems that ``fold_launch`` prepared, and their read copies."""
    shape, rows, copy = pool.shape, choices.fold_rows(pool, inputs, tuning), pool.policy.read_copy
    codes, scales = pool.copy_codes, pool.copy_scales
    arguments = {
        "flush_rows": plan.flush_rows,
        "flush_count": plan.flush_count,
        "slots": plan.slots,
        "origin": origin(pool),
        "words": None if codes is None else codes.view(torch.int32),
        "scales": scales,
        "global_scale": pool.copy_global_scale,
        "code_halves": None if codes is None else codes.view(torch.int16),
        "scale_pairs": None if scales is None else scales.view(torch.int16),
        **stored(pool),
        "k_buffer": pool.k_buffer,
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        **{name: value for name, value in token(inputs).items() if name != "log_decay"},
        "output": output,
        **{name: getattr(scratch, name) for name in ("systems", "gammas", "keys_before", "keys_after")},
        **random(pool),
    }
    constants = {
        **{name: value for name, value in sizes(pool, tuning).items() if name not in ("LANES", "INNER")},
        **window_sizes(pool, token=inputs is not None),
        "R": rows,
        "BY_KEY": choices.by_key(pool),
        "KEY_COPY": choices.key_copy(pool),
        "ROUNDS": PHILOX_ROUNDS,
        "GLOBAL": None if copy is None else global_options(),
        "BLOCK": None if copy is None else recipe_of(copy).options,
        **choices.encoded_at_once(pool, rows // 16),
    }
    # Sixteen warps on a multiprocessor: a lane holds 64 numbers of a key dim of 128, and twice that does not fit.
    registers = tuning.fold_registers or (128 if shape.key_dim <= 128 else None)
    programs = choices.fold_programs(pool, inputs, plan.slots.shape[0], tuning)
    return Launch(product_fold_kernel, programs, arguments, constants, choices.options(rows // 16, registers))


def read_launch(
    pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor, scratch: Scratch, tuning: Tuning
) -> Launch:
    """The reads through the windows that are not full."""
    shape, copy = pool.shape, pool.policy.read_copy is not None
    if choices.key_copy(pool):
        most = 64 if shape.key_dim <= 128 else 16
    else:
        # Of a checkpoint alone as many bytes in flight whatever its format.
        most = 16 if copy else 64 // pool.checkpoint.element_size()
    rows = tuning.read_rows or choices.dividing(shape.value_dim, most)
    arguments = {
        **copied(pool),
        **stored(pool),
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "positions": plan.positions,
        "slots": plan.slots,
        "origin": origin(pool),
        **{name: value for name, value in token(inputs).items() if name != "log_decay"},
        **{name: getattr(scratch, name) for name in ("coefficients", "parts", "halves", "decays", "vectors")},
        "output": output,
    }
    constants = {
        **sizes(pool, tuning, LANES_A_ROW if copy else choices.long_lanes(pool)),
        **window_sizes(pool),
        "R": rows,
        "SIZE": choices.power_below(shape.key_dim),
        "COPY": copy,
        "BY_KEY": choices.by_key(pool),
        "KEY_COPY": choices.key_copy(pool),
    }
    programs = output.shape[0] * shape.heads * (shape.value_dim // rows)
    return Launch(read_kernel, programs, arguments, constants, choices.options(1, tuning.read_registers))


def origin(pool: LayerPool) -> Tensor | None:
    """Windows move along the ring where there is room for drafts and a window is not the whole ring."""
    moves = room(pool) and pool.policy.window % pool.records
    return pool.counters.origin if moves else None


def stored(pool: LayerPool) -> dict[str, Any]:
    return {"checkpoint": pool.checkpoint, "checkpoint_scales": pool.checkpoint_scales}


def copied(pool: LayerPool) -> dict[str, Any]:
    return dict(zip(("codes", "scales", "global_scale"), read_copies.words_of(pool), strict=True))


def token(inputs: StepInputs | None) -> dict[str, Any]:
    names = ("q", "k", "v", "log_decay", "beta")
    return dict.fromkeys(names) if inputs is None else {name: getattr(inputs, name) for name in names}


def random(pool: LayerPool) -> dict[str, Any]:
    """What names the checkpoint's random words."""
    counters = pool.counters
    return {
        "store_numbers": counters.store_numbers,
        "sequence_ids": counters.sequence_ids,
        "seed": counters.seed,
        "random_stream": 4 * pool.layer + CHECKPOINT_PART,
    }


def sizes(pool: LayerPool, tuning: Tuning, lanes: int = LANES_A_ROW) -> dict[str, Any]:
    shape = pool.shape
    lanes = tuning.lanes or lanes
    return {
        "H": shape.heads,
        "G": shape.key_heads,
        "V": shape.value_dim,
        "K": shape.key_dim,
        "KP": choices.power_from(shape.key_dim),
        "LANES": lanes,
        "INNER": inner_of(pool.checkpoint.element_size(), shape.key_dim, lanes),
        "STORE": store_of(pool.policy.checkpoint),
    }


def window_sizes(pool: LayerPool, *, token: bool = True) -> dict[str, int]:
    """A whole window without a token counts as one longer, with a token that is not there."""
    return {"L": pool.policy.window + (not token), "J": choices.held(pool), "RING": max(pool.records, 1)}
