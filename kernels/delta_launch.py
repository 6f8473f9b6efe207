"""What the launches of a delta rule's layer have in common: their memory between each other, and their arguments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantlab.kernels import delta_choices as choices
from quantlab.kernels import read_copies, target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.delta_choices import Tuning
from quantlab.kernels.delta_tiles import LANES_A_ROW, inner_of
from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan
from quantlab.schemes.store import CHECKPOINT_PART

PHILOX_ROUNDS = 10


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


def scratch_of(
    pool: LayerPool, inputs: StepInputs | None, plan: StepPlan | CommitPlan, tuning: Tuning
) -> Scratch:
    """Memory between the launches of a step."""
    shape, by_key, batch = pool.shape, choices.by_key(pool), plan.slots.shape[0]

    def memory(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device=pool.device)

    heads, copy = shape.heads, pool.policy.read_copy is not None
    dense = not (copy and pool.policy.options.key_read == "copy")
    units = heads if by_key or pool.copy_key_scales is not None else shape.key_heads
    product, held = choices.by_product(pool, inputs, tuning), choices.held(pool)
    tiles = shape.value_dim // choices.fold_rows(pool, inputs, tuning)
    factors, parts = None, (heads, 3, held, shape.key_dim)
    turned = (heads, 3 if by_key else 1, shape.key_dim, held)
    if by_key and pool.policy.window > 1 and not product:
        programs = choices.fold_programs(pool, inputs, batch, tuning)
        factors = torch.empty((programs, held, shape.key_dim), dtype=torch.float32, device=pool.device)
    return Scratch(
        coefficients=memory(heads, 2, choices.held(pool)),
        parts=memory(heads, 6, choices.held(pool), dtype=torch.bfloat16) if copy else None,
        halves=memory(units, 4, shape.key_dim, dtype=torch.float16) if copy else None,
        decays=memory(heads, 2),
        vectors=memory(heads, 2, shape.key_dim) if by_key and dense else None,
        largest=memory(heads, tiles) if read_copies.by_head(pool.policy.read_copy) and not product else None,
        factors=factors,
        systems=memory(heads, held, held) if product else None,
        gammas=memory(heads, *((2, shape.key_dim) if by_key else (held,))) if product else None,
        keys_before=memory(*parts, dtype=torch.bfloat16) if product and by_key else None,
        keys_after=memory(*turned, dtype=torch.bfloat16) if product else None,
    )


def stored(pool: LayerPool) -> dict[str, Any]:
    return {"checkpoint": pool.checkpoint, "checkpoint_scales": pool.checkpoint_scales}


def copied(pool: LayerPool) -> dict[str, Any]:
    names = "codes", "scales", "global_scale", "key_scales"
    return dict(zip(names, read_copies.words_of(pool), strict=True))


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


def coefficient_sizes(pool: LayerPool) -> dict[str, Any]:
    """What decides the code of a window's coefficients."""
    shape = pool.shape
    return {
        "SIZE": choices.power_below(shape.key_dim),
        "HEADS": choices.power_from(shape.heads // shape.key_heads),
        "BY_KEY": choices.by_key(pool),
        "KEY_COPY": choices.key_copy(pool),
    }
