"""The launches that a decode step makes under a table of policies, recorded without a device.

The launch functions themselves run, on tensors without memory; only the last call, which would compile and start a
kernel, is caught.  So what is compiled in the tests is what a step launches, constants and all.
"""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from triton.runtime import JITFunction

from quantlab.kernels import drafts, hand_off, steps
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.schemes import StateShape
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.pool import LayerPool, allocate_pool
from quantlab.schemes.steps import StepPlan

BATCH = 256

_NANO = StateShape(64, 64, 128, 8)
_ODD_VALUES = StateShape(96, 80, 128, 8)
_LONG_KEYS = StateShape(24, 128, 256, 1)
_GATED_DELTA = StateShape(32, 128, 128, 16)
_KIMI_DELTA = StateShape(32, 128, 128, 32)
_ODD_KEYS = StateShape(30, 192, 96, 30)

POLICIES = (
    # name, policy, family, shape, which of its kernels
    ("fp8_sr_long_keys", "fp8+sr@1", "mamba2", _LONG_KEYS, ("step",)),
    ("fp8_sr_window", "fp8+sr@16:buffer=bf16", "mamba2", _NANO, ("flush",)),
    (
        "fp32_nvfp4",
        "fp32/nvfp4@16:buffer=bf16",
        "mamba2",
        _NANO,
        ("window", "read_copy", "flush_head"),
    ),
    ("fp8_sr_nvfp4", "fp8+sr/nvfp4@16:buffer=bf16", "mamba2", _NANO, ("load", "encode")),
    (
        "fp8_sr_nvfp4_keyscale",
        "fp8+sr/nvfp4+keyscale@16:buffer=bf16",
        "mamba2",
        _NANO,
        ("read_copy", "flush_head", "encode_heads"),
    ),
    (
        "gdn",
        "fp32/nvfp4@16:buffer=bf16",
        "gated_delta",
        _GATED_DELTA,
        ("window_system", "product_fold", "read"),
    ),
    (
        "gdn_derived",
        "fp16+sr/nvfp4@16:buffer=bf16:contents=derived",
        "gated_delta",
        _ODD_KEYS,
        ("product_fold",),
    ),
    ("gdn_mxfp4", "fp16/mxfp4@16:buffer=bf16", "gated_delta", _ODD_KEYS, ("read",)),
    (
        "kda_keyscale",
        "fp8+sr/nvfp4+keyscale@16:buffer=bf16",
        "kimi_delta",
        _KIMI_DELTA,
        ("window_system", "product_fold"),
    ),
    ("kda_fp8", "fp32/fp8@16:buffer=bf16", "kimi_delta", _KIMI_DELTA, ("window_fold", "read")),
    ("fp16_mxfp4", "fp16/mxfp4@16:buffer=bf16", "mamba2", _NANO, ("read", "flush")),
    (
        "fp16_nvfp4_value_dim_80",
        "fp16/nvfp4@16:buffer=bf16",
        "mamba2",
        _ODD_VALUES,
        ("read_copy", "flush_head"),
    ),
)
"""A kernel that several policies launch alike stands here once."""

DRAFTS = 4
DRAFTED = (
    (
        "fp32_nvfp4_drafts",
        "fp32/nvfp4@16:buffer=bf16",
        "mamba2",
        _NANO,
        ("draft_window", "draft_read_copy"),
    ),
    (
        "gdn_drafts",
        "fp32/nvfp4@16:buffer=bf16",
        "gated_delta",
        _GATED_DELTA,
        ("head_draft_window", "draft_read"),
    ),
    ("kda_drafts", "fp32@16:buffer=bf16", "kimi_delta", _KIMI_DELTA, ("channel_draft_window",)),
)
"""As ``POLICIES``: what a verification of ``DRAFTS`` tokens and a commit launch."""


class Launch(NamedTuple):
    """A kernel with all its arguments by name, tensors without memory among them, and its launch options."""

    name: str
    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]


def launches() -> list[Launch]:
    """Of the kernels that ``POLICIES`` and ``DRAFTED`` name, and of the one that plans a step."""
    found = []
    for name, policy, family, shape, wanted in POLICIES:
        pool = allocate_pool(policy, family, shape, BATCH, device="meta")[0]
        found += _named(name, wanted, recorded(lambda pool=pool: (decode(pool), _load(pool))))
    for name, policy, family, shape, wanted in DRAFTED:
        pool = allocate_pool(policy, family, shape, BATCH, drafts=DRAFTS, device="meta")[0]
        found += _named(name, wanted, recorded(lambda pool=pool: verify_and_commit(pool)))
    pool = allocate_pool("fp32@16", "mamba2", _NANO, BATCH, device="meta")[0]
    return found + recorded(lambda: _plan(pool))


def _named(name: str, wanted: tuple[str, ...], found: list[Launch]) -> list[Launch]:
    """The launches of ``wanted`` kernels, under names of their own."""
    made = {launch.name: launch for launch in found}
    missing = set(wanted) - set(made)
    assert not missing, f"{name} launches no {', '.join(sorted(missing))}, but {', '.join(sorted(made))}"
    return [made[kernel]._replace(name=f"{name}_{kernel}") for kernel in wanted]


def _plan(pool: LayerPool) -> None:
    with unittest.mock.patch.object(steps.arguments, "runs_here", lambda *_: None):
        steps.begin_step(pool.counters, _slots(), pool.policy.window)


def decode(pool: LayerPool) -> None:
    """One token of bfloat16 inputs."""
    shape, recurrence = pool.shape, get_recurrence(pool.family)
    keys, values = (shape.key_heads, shape.key_dim), (shape.heads, shape.value_dim)
    q, k, v = (_tensor(torch.bfloat16, *sizes) for sizes in (keys, keys, values))
    log_decay = _tensor(torch.float32, *recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim))
    beta = _tensor(torch.float32, shape.heads) if recurrence.delta_rule else None
    rows, count = _tensor(torch.int32), torch.empty((1,), dtype=torch.int32, device="meta")
    plan = StepPlan(pool.counters, pool.policy.window, _slots(), rows, rows, count)
    steps.FAMILIES[pool.family].launch(pool, StepInputs(q, k, v, log_decay, beta), plan, torch.empty_like(v))


def _load(pool: LayerPool) -> None:
    """A hand-off of float32 states."""
    hand_off.launch(pool, _slots(), _tensor(torch.float32, *pool.checkpoint.shape[1:]))


def verify_and_commit(pool: LayerPool) -> None:
    """Drafts of bfloat16."""
    shape, rows = pool.shape, _tensor(torch.int32)
    keys, values = (DRAFTS, shape.key_heads, shape.key_dim), (DRAFTS, shape.heads, shape.value_dim)
    q, k, v = (_tensor(torch.bfloat16, *sizes) for sizes in (keys, keys, values))
    recurrence = get_recurrence(pool.family)
    gate = recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim)
    log_decay = _tensor(torch.float32, DRAFTS, *gate)
    beta = _tensor(torch.float32, DRAFTS, shape.heads) if recurrence.delta_rule else None
    count, window = torch.empty((1,), dtype=torch.int32, device="meta"), pool.policy.window
    step = StepPlan(pool.counters, window, _slots(), rows, rows, count)
    family = drafts.FAMILIES[pool.family]
    family.verify(pool, StepInputs(q, k, v, log_decay, beta), step, torch.empty_like(v))
    family.commit(pool, CommitPlan(pool.counters, window, _slots(), rows, rows, rows, count))


def _slots() -> torch.Tensor:
    return _tensor(torch.int32)


def _tensor(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.empty((BATCH, *sizes), dtype=dtype, device="meta")


def recorded(function: Callable[[], object]) -> list[Launch]:
    """What ``function`` would launch, in order."""
    with _caught() as found:
        function()
    return found


@contextlib.contextmanager
def _caught() -> Iterator[list[Launch]]:
    found: list[Launch] = []

    def run(kernel: JITFunction[Any], *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, values, strict=False))
        given |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        name = kernel.__name__.removesuffix("_kernel")
        found.append(Launch(name, kernel, given, options))

    with unittest.mock.patch.object(JITFunction, "run", run):
        yield found
