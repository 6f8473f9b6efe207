"""Decode kernels of gated_delta and kimi_delta on pooled memory: what launches them.

A layer's step is at most three launches: the folds of the rows whose window is full, beside the coefficients of the
other rows' windows; the reads of these; and the read copy of what was folded.  With window 1 and no read copy it is
one, which rewrites the state.  ``delta_window``, ``delta_read`` and ``delta_fold`` have the mathematics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats.table import FLOAT_ELEMENTS
from quantlab.kernels import target
from quantlab.kernels.checkpoints import store_of
from quantlab.kernels.delta_fold import step_kernel, window_fold_kernel
from quantlab.kernels.delta_read import read_kernel
from quantlab.kernels.delta_tiles import inner_of
from quantlab.recurrences import StepInputs
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.steps import StepPlan

ROUNDS = 10
LARGEST_WINDOW = 64
"""A window's keys stay in the registers of one warp."""
WIDTH = 8
"""Columns in a row that a lane owns of the tensor cores' left operand, as Triton 3.6 to 3.9 lay it out."""

_ELEMENTS = {
    torch.float32: None,
    torch.bfloat16: FLOAT_ELEMENTS["bf16"],
    torch.float16: FLOAT_ELEMENTS["fp16"],
}


class Launch(NamedTuple):
    """One kernel launch: ``kernel[grid](**arguments, **constants, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> Any:
        return self.kernel[self.grid](
            **self.arguments, **self.constants, **self.options, **target.LAUNCH_OPTIONS
        )


def decode_gated_delta(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor) -> None:
    """One token of a gated_delta layer: output (B, heads, value_dim); see ``quantlab.schemes.steps.decode_token``.

    inputs: contiguous, on the pool's device, of the shapes of the pool; beta is there.

    Raises:
        InputError: the policy's window, or the shape, is one that the kernels have no layout for.
    """
    decode(pool, inputs, plan, output)


def decode_kimi_delta(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor) -> None:
    """``decode_gated_delta`` of a kimi_delta layer, whose log_decay is (B, heads, key_dim)."""
    decode(pool, inputs, plan, output)


def decode(pool: LayerPool, inputs: StepInputs, plan: StepPlan, output: Tensor) -> None:
    if reason := unserved(pool):
        raise InputError("pool", f"{pool.policy} of {pool.shape}", reason)
    for launch in launches(pool, inputs, plan, output):
        launch.run()


def unserved(pool: LayerPool) -> str | None:
    """What a pool would need for the kernels to serve it, or None."""
    shape = pool.shape
    if pool.policy.window > LARGEST_WINDOW:
        return f"a window of at most {LARGEST_WINDOW}"
    if pool.policy.options.flush != "full":
        return "flush=full"
    if shape.value_dim % 16:
        return "a value dim in whole tiles of 16"
    if shape.key_dim % 4 or shape.key_dim < 16:
        return "a key dim in whole runs of 4, at least 16"
    rest = shape.key_dim - _power_below(shape.key_dim)
    packed = pool.policy.read_copy is not None and pool.policy.read_copy.name == "nvfp4"
    if packed and rest and rest != _power_below(rest):
        return "a key dim that is a power of two, or the sum of two"
    return None


def launches(
    pool: LayerPool,
    inputs: StepInputs,
    plan: StepPlan,
    output: Tensor,
    *,
    read_rows: int = 0,
    read_tiles: int = 0,
    read_stages: int = 1,
    fold_rows: int = 16,
    fold_warps: int = 1,
    folds: int = 0,
) -> list[Launch]:
    """What one token of one layer runs, in order.  The numbers are for tuning; 0 is the default of the shape."""
    shape, policy, counters = pool.shape, pool.policy, pool.counters
    batch = len(plan.slots)
    if batch == 0:
        return []
    shared = {
        "H": shape.heads,
        "G": shape.key_heads,
        "V": shape.value_dim,
        "K": shape.key_dim,
        "KP": _power_from(shape.key_dim),
        "INNER": inner_of(pool.checkpoint.element_size(), shape.key_dim),
        "STORE": store_of(policy.checkpoint),
        "OUT": _ELEMENTS[output.dtype],
        "NATIVE": not target.interpreting(),
    }
    by_key = pool.family == "kimi_delta"
    token = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "log_decay": inputs.log_decay, "beta": inputs.beta}
    random = {
        "store_numbers": counters.store_numbers,
        "sequence_ids": counters.sequence_ids,
        "seed": counters.seed,
        "stream": 4 * pool.layer,
    }
    stored = {"checkpoint": pool.checkpoint, "checkpoint_scales": pool.checkpoint_scales}
    if policy.window == 1 and policy.read_copy is None:
        grid = (batch * shape.heads * (shape.value_dim // fold_rows),)
        arguments = {**stored, "slots": plan.slots, **token, "output": output, **random}
        constants = {**shared, "R": fold_rows, "BY_KEY": by_key, "ROUNDS": ROUNDS}
        return [Launch(step_kernel, grid, arguments, constants, {"num_warps": fold_warps})]

    held = _power_from(max(16, policy.window))
    window = {"L": policy.window, "J": held, "RING": max(pool.records, 1)}
    copy = None if policy.read_copy is None else policy.read_copy.name
    copied = {"codes": pool.copy_codes, "scales": pool.copy_scales, "global_scale": pool.copy_global_scale}
    reading = {
        "COPY": copy,
        "COPY_ELEMENT": None if policy.read_copy is None else policy.read_copy.element,
        "KEY_COPY": copy is not None and policy.options.key_read == "copy",
    }
    # Drafts behind a cursor move a window's origin, and nothing else does.
    origin = counters.origin if pool.records > _power_from(max(policy.window - 1, 1)) else None
    empty = {"dtype": torch.float32, "device": pool.device}
    coefficients = torch.empty((batch, shape.heads, 2, held), **empty)
    decays = None if by_key else torch.empty((batch, shape.heads), **empty)
    vectors = torch.empty((batch, shape.heads, 2, shape.key_dim), **empty) if by_key else None
    bfloat = torch.bfloat16
    product = (
        not by_key
        and pool.raw
        and held == 16
        and policy.options.flush_read == "exact"
        and pool.k_buffer is not None
        and pool.k_buffer.dtype == inputs.k.dtype == bfloat
        and policy.checkpoint.name == "fp32"
        and shape.value_dim % fold_rows == 0
    )
    parts = _power_from(shape.value_dim // fold_rows)
    largest = None if copy is None else torch.empty((batch, shape.heads, parts), **empty)
    made = {"coefficients": coefficients, "decays": decays, "vectors": vectors}

    tiles = batch * shape.heads * (shape.value_dim // fold_rows)
    folds = folds or min(tiles, 16 if target.interpreting() else FOLD_PROGRAMS)
    windows = batch * (shape.heads if by_key else shape.key_heads) if policy.window > 1 else 0
    fold = Launch(
        window_fold_kernel,
        (folds + windows,),
        {
            "positions": plan.positions,
            "slots": plan.slots,
            "flush_rows": plan.flush_rows,
            "flush_count": plan.flush_count,
            "origin": origin,
            **copied,
            **stored,
            "k_buffer": pool.k_buffer,
            "d_buffer": pool.d_buffer,
            "v_buffer": pool.v_buffer,
            "beta_buffer": pool.beta_buffer,
            "log_decay_buffer": pool.log_decay_buffer,
            **token,
            "output": output,
            **made,
            "largest": largest,
            **random,
            "folds": folds,
        },
        {
            **shared,
            **window,
            **reading,
            "R": fold_rows,
            "PARTS": parts,
            "HEADS": _power_from(shape.heads // shape.key_heads),
            "BY_KEY": by_key,
            "OUTPUT_COPY": copy is not None and policy.options.flush_read == "copy",
            "ELEMENT": None if pool.k_buffer is None else _ELEMENTS[pool.k_buffer.dtype],
            "ROUNDS": ROUNDS,
            "PRODUCT": product,
            "LEVELS": held.bit_length() - 1,
            "WARPS": fold_warps,
        },
        {"num_warps": fold_warps},
    )
    if policy.window == 1:
        return [fold]

    packed = copy == "nvfp4"
    most = read_rows or (64 if packed and reading["KEY_COPY"] else 16)
    rows = next(r for r in (64, 32, 16) if r <= most and shape.value_dim % r == 0)
    unit_tiles = (1 if by_key else shape.heads // shape.key_heads) * (shape.value_dim // rows)
    several = read_tiles or (4 if packed else 1)
    several = next(n for n in range(min(several, unit_tiles), 0, -1) if unit_tiles % n == 0)
    codes = pool.copy_codes
    read = Launch(
        read_kernel,
        (batch * (shape.heads if by_key else shape.key_heads) * (unit_tiles // several),),
        {
            **copied,
            "codes": codes.view(torch.int32) if packed and codes is not None else codes,
            **stored,
            "d_buffer": pool.d_buffer,
            "v_buffer": pool.v_buffer,
            "positions": plan.positions,
            "slots": plan.slots,
            "origin": origin,
            **{name: value for name, value in token.items() if name != "log_decay"},
            **made,
            "output": output,
        },
        {
            **shared,
            **window,
            **reading,
            "R": rows,
            "TILES": several,
            "STAGES": read_stages,
            "SIZE": _power_below(shape.key_dim),
            "WIDTH": WIDTH,
            "ELEMENT": _ELEMENTS[pool.d_buffer.dtype] if pool.d_buffer is not None else None,
        },
        {"num_warps": 1},
    )
    return [fold, read]


FOLD_PROGRAMS = 2112
"""Sixteen on each of the 132 multiprocessors of an H200."""


def _power_from(number: int) -> int:
    """The smallest power of two from ``number`` on."""
    return 1 << max(number - 1, 0).bit_length()


def _power_below(number: int) -> int:
    """The largest power of two up to ``number``."""
    return 1 << (number.bit_length() - 1)
