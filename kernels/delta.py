"""Launches of the decode kernels of gated_delta and kimi_delta on a layer's pool: which policies they serve, and how.

A layer's step is at most three launches.  Where a fold is matrix products these are the systems of the windows that are
full, beside the coefficients of the other windows; the folds with their read copies; and beside these the reads of the
other rows.  Elsewhere they are the folds of the rows whose window is full, beside the coefficients of the others; the
reads of these; and the read copy of what was folded.  With window 1 and no read copy it is one, which rewrites the
state.  ``delta_window``, ``delta_read``, ``delta_fold``, ``delta_systems`` and ``delta_product`` have the mathematics;
``delta_flush`` launches the folds.
"""

from torch import Tensor

from quantlab.kernels import delta_choices as choices
from quantlab.kernels import read_copies, target
from quantlab.kernels.delta_choices import Tuning
from quantlab.kernels.delta_flush import fold_launch, product_launch, system_launch
from quantlab.kernels.delta_fold import step_kernel
from quantlab.kernels.delta_launch import (
    PHILOX_ROUNDS,
    Launch,
    Scratch,
    copied,
    random,
    scratch_of,
    sizes,
    stored,
    token,
    window_sizes,
)
from quantlab.kernels.delta_read import read_kernel
from quantlab.kernels.delta_tiles import LANES_A_ROW
from quantlab.kernels.slots import origin
from quantlab.recurrences import StepInputs
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan

LARGEST_WINDOW = 64
"""A window's keys stay in the registers of one warp."""


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
    if rest and policy.read_copy.key_scale:
        return "a key dim that is no power of two with key scales"
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
    if choices.by_product(pool, inputs, tuning):
        system_launch(pool, inputs, plan, scratch, tuning).run()
        with target.beside(pool.device):
            product_launch(pool, inputs, plan, output, scratch, tuning).run()
        read_launch(pool, inputs, plan, output, scratch, tuning).run()
        target.together(pool.device)
        return
    fold_launch(pool, inputs, plan, output, scratch, tuning).run()
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
