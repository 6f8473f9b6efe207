"""Launches of the Mamba-2 decode kernels on a layer's pool: which policies they serve, and in which configuration.

Window 1 is one launch, ``step``.  Longer windows take ``window`` and ``read`` for the rows that do not flush, and
``flush`` for those that do; with flush_read=copy all rows are read before any is stored.  A verification is
``draft_window`` and ``draft_read``, a commit ``flush`` without a token.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from quantlab.kernels import read_copies, target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.flush import flush_kernel
from quantlab.kernels.flush_head import flush_head_kernel
from quantlab.kernels.mamba2 import read_copy_kernel, read_kernel, step_kernel, window_kernel
from quantlab.kernels.mamba2_drafts import draft_read_copy_kernel, draft_read_kernel, draft_window_kernel
from quantlab.kernels.plain_copies import copy_store_of
from quantlab.kernels.scales import global_options, recipe_of
from quantlab.kernels.slots import origin
from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan
from quantlab.schemes.store import CHECKPOINT_PART

PHILOX_ROUNDS = 10
MULTIPROCESSORS = 132
"""Of an H200, which the numbers of programs are for; any number is correct."""
REGISTERS = 65536
"""Of one multiprocessor."""
FEWEST_STEPS = 1024
"""Programs of a step below which tiles are halved: one row of a batch takes 4.1 us in 256 tiles of 16, 3.8 in 512 of 8
and 3.4 in 1024 of 4."""


@dataclass(frozen=True)
class Tiles:
    """Value rows and columns (0: all) of a tile, warps, stages of a pipelined loop, and the most registers a thread may
    have (None: any).
    """

    rows: int
    columns: int = 0
    warps: int = 1
    stages: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Configuration:
    """How the kernels of one layer are launched.  flush_programs: they share the work among them.

    head: of ``flush_head``, None where it does not serve the shape and the policy.
    """

    step: Tiles
    read: Tiles
    flush: Tiles
    flush_programs: int
    head: Tiles | None
    head_programs: int


@functools.cache
def configuration(policy: Policy, shape: StateShape, batch: int) -> Configuration:
    """Measured on one H200; a smaller tile where the value dim, or a long row, does not allow the best one."""
    stochastic, long = policy.checkpoint.stochastic, shape.key_dim > 128
    rows = _dividing(shape.value_dim, 8 if long else 16)
    while rows > 4 and batch * shape.heads * shape.value_dim // rows < FEWEST_STEPS:
        rows //= 2
    step = Tiles(rows, warps=2 if rows > 4 and (stochastic or policy.checkpoint.recipe) else 1)
    if read_copies.by_head(policy.read_copy):
        # Of a group's rows in one piece: a tile may hold the end of one head and the beginning of the next, unless
        # key scales give each head a query of its own.
        group_rows = shape.heads // shape.key_heads * shape.value_dim
        keyed = policy.read_copy is not None and policy.read_copy.key_scale
        wanted = _dividing(shape.value_dim if keyed else group_rows, 64)
        read_rows = wanted if wanted <= shape.value_dim else _dividing(shape.value_dim, wanted)
        registers = 96 if read_rows == 64 and not long else None
    else:
        best = 16 if (policy.read_copy or policy.checkpoint).name == "fp32" else 32
        read_rows, registers = _dividing(shape.value_dim, 16 if long else best), None
    read = Tiles(read_rows, registers=registers)
    rows16, columns = _dividing(shape.value_dim, 16), min(shape.key_dim, 128)
    if policy.checkpoint.recipe:  # a scale of a row needs all of it
        flush, programs = Tiles(rows16, shape.key_dim, warps=2), 528
    elif policy.read_copy is None:
        flush, programs = Tiles(rows16, columns, stages=3), 1056
    elif policy.checkpoint.name == "fp32":
        flush = Tiles(_dividing(shape.value_dim, 64), 64 if long else 32, warps=4)
        programs = 792 if read_copies.by_head(policy.read_copy) and not long else 528
    else:
        columns = min(columns, 32 if long and stochastic else 64)
        flush, programs = Tiles(_dividing(shape.value_dim, 64), columns, warps=4), 528
    head, head_programs = None, MULTIPROCESSORS
    narrow = shape.value_dim not in (64, 128)
    height = 16 if narrow else shape.value_dim  # of a tile
    warps = max(4, height // 16, height * shape.key_dim // 2048)  # 64 numbers a lane
    beside = warps * 16 // height  # warps that share a value row
    held = shape.value_dim * shape.key_dim // (32 * warps)
    fits = warps <= 8 and shape.key_dim >= 16 * beside and 64 <= shape.value_dim <= 128 and held <= 128
    if read_copies.by_head(policy.read_copy) and fits:
        head = Tiles(height, warps=warps, registers=168 if narrow or not stochastic else None)
        # Beside the reads one block a multiprocessor is best, as long as it does not take longer than they do.
        head_programs *= 3 if narrow else 2 if stochastic else 1
    return Configuration(step, read, flush, programs, head, head_programs)


def served(policy: Policy, shape: StateShape, records: int | None) -> str | None:
    """Why the kernels do not serve a policy that the pool has a layout for, or None."""
    window = policy.window
    if shape.value_dim % 16:
        return "a value dim that is no multiple of 16"
    if shape.key_dim < 32 or shape.key_dim & (shape.key_dim - 1):
        return "a key dim that is no power of two from 32 on"
    if records not in (None, triton.next_power_of_2(window - 1) if window > 1 else 0):
        return "room for drafts behind the window"
    if window == 1 and policy.read_copy is not None:
        return "flush_read=copy with a window of 1"
    return None


def served_drafts(policy: Policy, shape: StateShape) -> str | None:
    """Why the kernels do not verify drafts under a policy that the pool has a layout for, or None."""
    if policy.window == 1:
        return "drafts behind a window of 1"
    return served(policy, shape, None)


def launch(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: torch.Tensor) -> None:
    """One token of one layer; arguments as ``quantlab.kernels.steps`` has checked them."""
    chosen = configuration(pool.policy, pool.shape, plan.slots.shape[0])
    if pool.policy.window == 1:
        _step(pool, inputs, plan, output, chosen.step)
        return
    if _viewed(pool):
        _read(pool, inputs, plan, output, chosen.read)
        _flush(pool, plan, chosen, inputs)
    else:
        with target.beside(pool.device):
            _flush(pool, plan, chosen, inputs, output)
        _read(pool, inputs, plan, output, chosen.read)
        target.together(pool.device)


def _step(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: torch.Tensor, tiles: Tiles) -> None:
    shape, kernel = pool.shape, _any(step_kernel)
    programs = output.shape[0] * shape.heads * (shape.value_dim // tiles.rows)
    kernel[(programs,)](
        pool.checkpoint,
        pool.checkpoint_scales,
        plan.positions,
        plan.slots,
        *_token(inputs),
        output,
        *_random(pool),
        **_sizes(shape),
        R=tiles.rows,
        STORE=store_of(pool.policy.checkpoint),
        ROUNDS=PHILOX_ROUNDS,
        **_options(tiles),
    )


def _read(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: torch.Tensor, tiles: Tiles) -> None:
    shape, window, batch = pool.shape, pool.policy.window, output.shape[0]
    heads, groups, lanes, overlap = shape.heads, shape.key_heads, _lanes(pool), target.overlaps(pool.device)
    coefficients = torch.empty((batch, heads, lanes), dtype=torch.float32, device=pool.device)
    decays = torch.empty((batch, heads), dtype=torch.float32, device=pool.device)
    start, sizes = origin(pool), _sizes(shape)
    held = {"L": window, "J": lanes, "RING": pool.records, "VIEWED": _viewed(pool)}
    _any(window_kernel)[(batch * groups,)](
        plan.positions,
        plan.slots,
        start,
        pool.k_buffer,
        pool.log_decay_buffer,
        inputs.q,
        inputs.k,
        inputs.log_decay,
        coefficients,
        decays,
        **{name: sizes[name] for name in ("H", "G", "N")},
        **held,
        HEADS=triton.next_power_of_2(heads // groups),
        OVERLAP=overlap,
        **_options(Tiles(1)),
    )
    common = {**sizes, **held, "R": tiles.rows, "OVERLAP": overlap, **_options(tiles)}
    if overlap:
        common["launch_pdl"] = True
    programs = batch * heads * shape.value_dim // tiles.rows
    copy = pool.policy.read_copy
    if not read_copies.by_head(copy):
        codes, scales, store = read_copies.dense_of(pool)
        _any(read_kernel)[(programs,)](
            codes,
            scales,
            pool.d_buffer,
            plan.positions,
            plan.slots,
            start,
            inputs.q,
            inputs.v,
            coefficients,
            decays,
            output,
            STORE=store,
            **common,
        )
        return
    _any(read_copy_kernel)[(programs,)](
        *read_copies.words_of(pool),
        pool.d_buffer,
        plan.positions,
        plan.slots,
        start,
        inputs.q,
        inputs.v,
        coefficients,
        decays,
        output,
        **common,
    )


def _flush(
    pool: LayerPool,
    plan: StepPlan | CommitPlan,
    chosen: Configuration,
    inputs: StepInputs | None = None,
    output: torch.Tensor | None = None,
) -> None:
    """Fold, store and encode the rows that the plan says; with a token that completes the window, or with the record of
    one that stands in the ring.
    """
    shape, copy = pool.shape, pool.policy.read_copy
    by_head = read_copies.by_head(copy)
    if copy is None:
        codes, block = (None,) * 4, None
    elif by_head:
        codes, block = read_copies.words_of(pool), recipe_of(copy).options
    else:
        codes, block = (pool.copy_codes, pool.copy_scales, None, None), copy_store_of(copy)
    token = (None,) * 4 if inputs is None else _token(inputs)
    arguments = (
        plan.flush_rows,
        plan.flush_count,
        plan.slots,
        pool.checkpoint,
        pool.checkpoint_scales,
        *codes,
        pool.k_buffer,
        pool.d_buffer,
        pool.log_decay_buffer,
        origin(pool),
        *token,
        output,
        *_random(pool),
    )
    constants = {
        **_sizes(shape),
        "L": pool.policy.window,
        "J": _lanes(pool),
        "RING": pool.records,
        "STORE": store_of(pool.policy.checkpoint),
        "ROUNDS": PHILOX_ROUNDS,
        "GLOBAL": global_options() if by_head else None,
        "BLOCK": block,
    }
    heads, width = plan.slots.shape[0] * shape.heads, 16 // pool.checkpoint.element_size()
    if chosen.head is not None and _all_bfloat16(pool.k_buffer, pool.d_buffer, *token[1:3]):
        beside = chosen.head.warps * 16 // chosen.head.rows
        programs = chosen.head_programs if inputs is not None else _resident(chosen.head)
        _any(flush_head_kernel)[(min(programs, heads),)](
            *arguments,
            **constants,
            R=chosen.head.rows,
            RUN=min(width, shape.key_dim // (4 * beside)),
            WARPS=chosen.head.warps,
            **_options(chosen.head),
        )
        return
    tiles = chosen.flush
    items = heads * (1 if by_head else shape.value_dim // tiles.rows)
    _any(flush_kernel)[(min(chosen.flush_programs, items),)](
        *arguments,
        **constants,
        R=tiles.rows,
        C=tiles.columns,
        E=_dividing(shape.value_dim, 16),
        WIDTH=width,
        **_options(tiles),
    )


def _resident(tiles: Tiles) -> int:
    """Programs that the multiprocessors have registers for."""
    return MULTIPROCESSORS * max(1, REGISTERS // (32 * tiles.warps * (tiles.registers or 255)))


def verify(pool: LayerPool, tokens: StepInputs, plan: StepPlan, output: torch.Tensor) -> None:
    """Drafted tokens of one layer; arguments as ``quantlab.kernels.drafts`` has checked them."""
    shape, ring, copy = pool.shape, pool.records, pool.policy.read_copy
    batch, count = output.shape[:2]
    coefficients = torch.empty((batch, count, shape.heads, ring), dtype=torch.float32, device=pool.device)
    decays = torch.empty((batch, count, shape.heads), dtype=torch.float32, device=pool.device)
    sizes = {**_sizes(shape), "RING": ring, "T": count}
    _any(draft_window_kernel)[(batch * shape.key_heads,)](
        plan.positions,
        plan.slots,
        pool.counters.origin,
        pool.k_buffer,
        pool.log_decay_buffer,
        tokens.q,
        tokens.k,
        tokens.log_decay,
        coefficients,
        decays,
        **{name: sizes[name] for name in ("H", "G", "N", "RING", "T")},
        HEADS=triton.next_power_of_2(shape.heads // shape.key_heads),
        **_options(Tiles(1, warps=4)),
    )
    given = pool.d_buffer, plan.positions, plan.slots, pool.counters.origin, tokens.q, tokens.v
    if read_copies.by_head(copy):
        # More rows would not leave registers for the records and the queries of all tokens.
        tiles = Tiles(_dividing(shape.value_dim, 32 if shape.key_dim <= 128 else 16))
        programs = batch * shape.heads * shape.value_dim // tiles.rows
        _any(draft_read_copy_kernel)[(programs,)](
            *read_copies.words_of(pool),
            *given,
            coefficients,
            decays,
            output,
            **sizes,
            R=tiles.rows,
            COLUMNS=max(8, 2 * triton.next_power_of_2(count)),
            **_options(tiles),
        )
        return
    tiles = configuration(pool.policy, shape, batch).read
    codes, scales, store = read_copies.dense_of(pool)
    programs = batch * shape.heads * shape.value_dim // tiles.rows
    _any(draft_read_kernel)[(programs,)](
        codes,
        scales,
        *given,
        coefficients,
        decays,
        output,
        **sizes,
        R=tiles.rows,
        STORE=store,
        **_options(tiles),
    )


def commit(pool: LayerPool, plan: CommitPlan) -> None:
    """Fold, store and encode the windows that accepted drafts complete."""
    _flush(pool, plan, configuration(pool.policy, pool.shape, plan.slots.shape[0]))


def _lanes(pool: LayerPool) -> int:
    """A power of two from the window on."""
    return 1 << (pool.policy.window - 1).bit_length()


def _all_bfloat16(*tensors: torch.Tensor | None) -> bool:
    """Of those that there are."""
    return all(tensor is None or tensor.dtype == torch.bfloat16 for tensor in tensors)


def _viewed(pool: LayerPool) -> bool:
    """Whether a flush is read from the copy like any other token, before its store renews that."""
    return pool.policy.read_copy is not None and pool.policy.options.flush_read == "copy"


def _token(inputs: StepInputs) -> tuple[torch.Tensor, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.log_decay


def _random(pool: LayerPool) -> tuple[Any, ...]:
    """What names the checkpoint's random words."""
    counters = pool.counters
    return counters.store_numbers, counters.sequence_ids, counters.seed, 4 * pool.layer + CHECKPOINT_PART


def _sizes(shape: StateShape) -> dict[str, int]:
    return {"H": shape.heads, "G": shape.key_heads, "P": shape.value_dim, "N": shape.key_dim}


def _options(tiles: Tiles) -> dict[str, Any]:
    registers = {} if tiles.registers is None or target.interpreting() else {"maxnreg": tiles.registers}
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, **registers, **target.LAUNCH_OPTIONS}


def _any(kernel: Any) -> Any:
    """A kernel; a type checker does not know that it can be launched."""
    return kernel


def _dividing(value_dim: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``value_dim``."""
    return min(most, value_dim & -value_dim)
