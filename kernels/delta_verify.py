"""Launches of drafts of gated_delta and kimi_delta on a layer's pool: which policies they serve, and how.

A verification is two launches, ``draft_window`` and ``draft_read``; a commit is the fold of ``delta`` without a token,
and the read copy of what was folded.
"""

import torch
from torch import Tensor

from quantlab.kernels import delta, delta_launch, read_copies
from quantlab.kernels import delta_choices as choices
from quantlab.kernels.delta_choices import Tuning
from quantlab.kernels.delta_drafts import (
    channel_draft_window_kernel,
    draft_read_kernel,
    head_draft_window_kernel,
)
from quantlab.kernels.delta_flush import fold_launch, product_launch, system_launch
from quantlab.kernels.delta_launch import Launch
from quantlab.kernels.slots import origin
from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan

MOST_DRAFTS = 16
"""Four columns of a matrix product each."""


def served(policy: Policy, shape: StateShape) -> str | None:
    """Why the kernels do not verify drafts under a policy that the pool has a layout for, or None."""
    if policy.window == 1:
        return "drafts behind a window of 1"
    if policy.read_copy is not None and policy.read_copy.name != "nvfp4":
        return f"a read copy of {policy.read_copy.name}"
    return delta.served(policy, shape, None)


def verify(
    pool: LayerPool, tokens: StepInputs, plan: StepPlan, output: Tensor, tuning: Tuning | None = None
) -> None:
    """Drafted tokens of one layer; arguments as ``quantlab.kernels.drafts`` has checked them."""
    tuning = tuning or Tuning()
    scratch = scratch_of(pool, *output.shape[:2])
    window_launch(pool, tokens, plan, scratch).run()
    read_launch(pool, tokens, plan, output, scratch, tuning).run()


def commit(pool: LayerPool, plan: CommitPlan, tuning: Tuning | None = None) -> None:
    """Fold, store and encode the windows that accepted drafts complete."""
    tuning = tuning or Tuning()
    scratch = delta_launch.scratch_of(pool, None, plan, tuning)
    if choices.by_product(pool, None, tuning):
        system_launch(pool, None, plan, scratch, tuning).run()
        product_launch(pool, None, plan, None, scratch, tuning).run()
        return
    fold_launch(pool, None, plan, None, scratch, tuning).run()
    if scratch.largest is not None:
        read_copies.encode(pool, plan.flush_rows, plan.flush_count, plan.slots, scratch.largest)


def scratch_of(pool: LayerPool, batch: int, count: int) -> dict[str, Tensor | None]:
    """What the window launch leaves for the read, uninitialised; see ``delta_drafts``."""
    shape, by_key = pool.shape, choices.by_key(pool)

    def memory(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device=pool.device)

    heads, padded, copy = shape.heads, _padded(count), pool.policy.read_copy is not None
    units = heads if by_key or pool.copy_key_scales is not None else shape.key_heads
    halves = memory(units, 4 * padded, shape.key_dim, dtype=torch.float16) if copy else None
    dense = by_key and not choices.key_copy(pool)
    return {
        "coefficients": memory(heads, count, 2, choices.held(pool)),
        "pairs": memory(heads, count, 2, padded),
        "halves": halves,
        "decays": memory(heads, count, 2),
        "vectors": memory(heads, count, 2, shape.key_dim) if dense else None,
    }


def window_launch(
    pool: LayerPool, tokens: StepInputs, plan: StepPlan, scratch: dict[str, Tensor | None]
) -> Launch:
    """Coefficients of windows and drafts; keys and gates behind the window."""
    shape, by_key = pool.shape, choices.by_key(pool)
    given = delta_launch.token(tokens)
    arguments = {
        "positions": plan.positions,
        "slots": plan.slots,
        "origin": origin(pool),
        "k_buffer": pool.k_buffer,
        "log_decay_buffer": pool.log_decay_buffer,
        "beta_buffer": pool.beta_buffer,
        **{name: given[name] for name in ("q", "k", "log_decay", "beta")},
        **scratch,
        "key_scales": pool.copy_key_scales,
    }
    sizes = delta_launch.sizes(pool, Tuning())
    constants = {
        **{name: sizes[name] for name in ("H", "G", "K", "KP")},
        **_window_sizes(pool, tokens.v.shape[1]),
        "SIZE": choices.power_below(shape.key_dim),
        "KEY_COPY": choices.key_copy(pool),
    }
    batch, kernel = plan.slots.shape[0], channel_draft_window_kernel
    if not by_key:
        kernel = head_draft_window_kernel
        del arguments["vectors"]
        constants["HEADS"] = choices.power_from(shape.heads // shape.key_heads)
    units = shape.heads if by_key else shape.key_heads
    return Launch(kernel, batch * units, arguments, constants, choices.options(1, None))


def read_launch(
    pool: LayerPool,
    tokens: StepInputs,
    plan: StepPlan,
    output: Tensor,
    scratch: dict[str, Tensor | None],
    tuning: Tuning,
) -> Launch:
    """Outputs of all drafts, and their d behind the window."""
    shape, copy, count = pool.shape, pool.policy.read_copy is not None, output.shape[1]
    if choices.key_copy(pool):
        # More rows would not leave registers for the columns of all drafts.
        best = 32 if shape.key_dim <= 128 and count <= 8 else 16
    else:
        best = 16 if copy else 64 // pool.checkpoint.element_size()
    rows = tuning.read_rows or choices.dividing(shape.value_dim, best)
    given = delta_launch.token(tokens)
    arguments = {
        **delta_launch.copied(pool),
        **delta_launch.stored(pool),
        "d_buffer": pool.d_buffer,
        "v_buffer": pool.v_buffer,
        "positions": plan.positions,
        "slots": plan.slots,
        "origin": origin(pool),
        **{name: given[name] for name in ("q", "k", "v", "beta")},
        **scratch,
        "output": output,
    }
    constants = {
        **delta_launch.sizes(pool, tuning),
        **_window_sizes(pool, count),
        "R": rows,
        "SIZE": choices.power_below(shape.key_dim),
        "COPY": copy,
        "BY_KEY": choices.by_key(pool),
        "KEY_COPY": choices.key_copy(pool),
    }
    programs = output.shape[0] * shape.heads * (shape.value_dim // rows)
    return Launch(
        draft_read_kernel, programs, arguments, constants, choices.options(1, tuning.read_registers)
    )


def _window_sizes(pool: LayerPool, count: int) -> dict[str, int]:
    return {"J": choices.held(pool), "RING": pool.records, "T": count, "TP": _padded(count)}


def _padded(count: int) -> int:
    """Drafts that a product has columns for: they come in fours."""
    return max(4, choices.power_from(count))
