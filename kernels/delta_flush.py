"""Launches that fold the full windows of a delta rule's layer: record by record, or by matrix products."""

from typing import Any

import torch
from torch import Tensor

from quantlab.kernels import delta_choices as choices
from quantlab.kernels.delta_choices import Tuning
from quantlab.kernels.delta_fold import window_fold_kernel
from quantlab.kernels.delta_launch import (
    PHILOX_ROUNDS,
    Launch,
    Scratch,
    coefficient_sizes,
    copied,
    random,
    sizes,
    stored,
    token,
    window_sizes,
)
from quantlab.kernels.delta_product import product_fold_kernel
from quantlab.kernels.delta_systems import window_system_kernel
from quantlab.kernels.scales import global_options, recipe_of
from quantlab.kernels.slots import origin
from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan


def fold_launch(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    output: Tensor | None,
    scratch: Scratch,
    tuning: Tuning,
) -> Launch:
    """The folds record by record, and the coefficients of the windows that are not full.

    Without a token (inputs and output None) only whole windows are folded.
    """
    shape, policy, batch = pool.shape, pool.policy, plan.slots.shape[0]
    folds = choices.fold_programs(pool, inputs, batch, tuning)
    windows = batch * (shape.heads if choices.by_key(pool) else shape.key_heads) if policy.window > 1 else 0
    if inputs is None:
        windows = 0
    names = "coefficients", "parts", "halves", "decays", "vectors", "largest", "factors"
    arguments = {
        **flushing(pool, plan),
        "positions": plan.positions,
        **copied(pool),
        **stored(pool),
        "k_buffer": pool.k_buffer,
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "beta_buffer": pool.beta_buffer,
        "log_decay_buffer": pool.log_decay_buffer,
        **token(inputs),
        "output": output,
        **{name: getattr(scratch, name) for name in names},
        **random(pool),
        "folds": folds,
    }
    constants = {
        **sizes(pool, tuning),
        **window_sizes(pool, token=inputs is not None),
        **coefficient_sizes(pool),
        "R": choices.fold_rows(pool, inputs, tuning),
        "OUTPUT_COPY": policy.read_copy is not None and policy.options.flush_read == "copy",
        "ROUNDS": PHILOX_ROUNDS,
    }
    # Twelve blocks of a warp on a multiprocessor.
    registers = tuning.fold_registers or (168 if policy.checkpoint.name == "fp32" else None)
    return Launch(window_fold_kernel, folds + windows, arguments, constants, choices.options(1, registers))


def flushing(pool: LayerPool, plan: StepPlan | CommitPlan) -> dict[str, Any]:
    """The rows whose windows are full, and where these begin."""
    return {
        "flush_rows": plan.flush_rows,
        "flush_count": plan.flush_count,
        "slots": plan.slots,
        "origin": origin(pool),
    }


def system_launch(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    scratch: Scratch,
    tuning: Tuning,
) -> Launch:
    """The systems of the windows that are full, and the coefficients of those that are not.

    Without a token (inputs None) the systems of whole windows alone.
    """
    names = (
        "coefficients",
        "parts",
        "halves",
        "decays",
        "vectors",
        "systems",
        "gammas",
        "keys_before",
        "keys_after",
    )
    shape, batch = pool.shape, plan.slots.shape[0]
    shares = min(tuning.system_programs or 12 * choices.MULTIPROCESSORS, batch * shape.heads)
    units = shape.heads if choices.by_key(pool) else shape.key_heads
    arguments = {
        **flushing(pool, plan),
        "positions": plan.positions,
        "k_buffer": pool.k_buffer,
        "beta_buffer": pool.beta_buffer,
        "log_decay_buffer": pool.log_decay_buffer,
        **{name: value for name, value in token(inputs).items() if name != "v"},
        **{name: getattr(scratch, name) for name in names},
        "key_scales": pool.copy_key_scales,
        "shares": shares,
    }
    constants = {
        **{name: value for name, value in sizes(pool, tuning).items() if name in ("H", "G", "K", "KP")},
        **window_sizes(pool, token=inputs is not None),
        **coefficient_sizes(pool),
    }
    windows = 0 if inputs is None else batch * units
    # Twelve blocks of a warp on a multiprocessor.
    return Launch(window_system_kernel, shares + windows, arguments, constants, choices.options(1, 168))


def product_launch(
    pool: LayerPool,
    inputs: StepInputs | None,
    plan: StepPlan | CommitPlan,
    output: Tensor | None,
    scratch: Scratch,
    tuning: Tuning,
) -> Launch:
    """The folds that are matrix products, from the systems that ``system_launch`` prepared."""
    shape, rows, copy = pool.shape, choices.fold_rows(pool, inputs, tuning), pool.policy.read_copy
    codes, scales = pool.copy_codes, pool.copy_scales
    arguments = {
        **flushing(pool, plan),
        "words": None if codes is None else codes.view(torch.int32),
        "scales": scales,
        "global_scale": pool.copy_global_scale,
        "key_scales": pool.copy_key_scales,
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
    }
    # A lane holds 64 numbers of a key dim of 128, and twice that does not fit.
    held = 168 if copy is not None else 128
    registers = tuning.fold_registers or (held if shape.key_dim <= 128 else None)
    programs = choices.fold_programs(pool, inputs, plan.slots.shape[0], tuning)
    return Launch(product_fold_kernel, programs, arguments, constants, choices.options(rows // 16, registers))
