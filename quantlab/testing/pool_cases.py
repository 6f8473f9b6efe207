"""The cases of the pools' conformance suite: every checkpoint, copy and buffer format, odd sizes, shapes of models."""

import torch

from quantlab.schemes import StateShape
from quantlab.testing.pools import PoolCase

BF16, FP16 = torch.bfloat16, torch.float16
SMALL = StateShape(2, 16, 32, 1)
TINY = StateShape(1, 16, 32, 1)
GROUPED = StateShape(6, 16, 64, 2)


def _cursors(policy: str) -> tuple[int, ...]:
    """An empty window, one that this step all but fills, and one that it fills."""
    window = int(policy.partition("@")[2].partition(":")[0])
    return (0, 0) if window == 1 else (0, window - 2, window - 1)


def _case(policy: str, shape: StateShape = SMALL, family: str = "mamba2", **options) -> PoolCase:
    return PoolCase(policy, family, shape, _cursors(policy), **options)


FAST = [
    _case("fp32@1", StateShape(1, 80, 64, 1), token=BF16, output=BF16),
    _case("fp16+sr@1", exact=True),
    _case("int8@1", foreign=True),
    _case("fp32@4"),
    _case("fp16@16:buffer=bf16", token=BF16),
    _case("fp16+sr/nvfp4@4:buffer=bf16", TINY, exact=True),
    _case("fp32/nvfp4@4:buffer=bf16", StateShape(1, 64, 32, 1), token=BF16),
    _case("fp16+sr/nvfp4+keyscale@4:buffer=bf16", StateShape(1, 64, 32, 1), token=BF16, spread=8),
    _case("int8/nvfp4+keyscale@4", TINY, spread=8),
    _case("fp32/fp8@4:buffer=bf16", TINY),
    _case("fp8+sr/mxfp4@4", TINY),
    _case("fp8+sr/nvfp4@4:buffer=fp16", TINY, token=FP16, foreign=True),
    _case("fp32/nvfp4@6:buffer=bf16", TINY, token=BF16, drafts=3),
]
"""Run in the interpreter in the fast tier."""

_DELTA = StateShape(2, 16, 32, 1)
_CHANNELS = StateShape(2, 16, 32, 2)
DELTA = [
    _case("fp16/nvfp4@4:buffer=bf16:contents=derived", _DELTA, "gated_delta", token=BF16),
    _case("fp16+sr/nvfp4@4:buffer=bf16", _CHANNELS, "kimi_delta"),
    _case("fp16/nvfp4+keyscale@4:buffer=bf16:contents=derived", _DELTA, "gated_delta", token=BF16, spread=8),
    _case("fp32/nvfp4+keyscale@4:buffer=bf16", _CHANNELS, "kimi_delta", spread=8),
    _case("fp32/mxfp4@4:buffer=bf16:contents=derived", TINY, "gated_delta", token=BF16),
    _case("fp16/fp8@4:contents=derived", TINY, "kimi_delta"),
]
"""The delta rules among them, whose own tests go further."""

SLOW = [
    _case("fp32/nvfp4@4:buffer=bf16", StateShape(2, 48, 32, 1), token=BF16),
    *(_case(f"{name}@1") for name in ("bf16", "bf16+sr", "fp16", "fp8", "fp8+sr", "int8+sr")),
    *(_case(f"{name}@4:buffer=bf16") for name in ("bf16", "fp16+sr", "fp8+sr", "int8")),
    *(_case(f"{name}/nvfp4@4:buffer=bf16") for name in ("bf16+sr", "fp16", "fp8", "int8+sr")),
    _case("fp32/nvfp4@4"),
    _case("fp16/nvfp4@4:buffer=bf16", StateShape(2, 80, 32, 1), token=BF16),
    _case("fp32/nvfp4@16:buffer=bf16", GROUPED, token=BF16, output=BF16),
    _case("fp8+sr/nvfp4@16:buffer=bf16", GROUPED, exact=True),
    _case("fp16+sr/nvfp4@4:buffer=bf16", StateShape(1, 16, 256, 1), token=BF16),
    _case("fp16+sr/nvfp4@16:buffer=bf16", StateShape(2, 64, 64, 1), token=BF16, exact=True),
    _case("fp16/nvfp4@8:buffer=bf16", StateShape(2, 64, 256, 2), token=BF16),
    _case("fp8+sr/nvfp4@16:buffer=bf16", StateShape(2, 64, 128, 1), token=BF16, output=BF16),
    _case("int8/nvfp4@32:buffer=bf16", StateShape(1, 128, 64, 1), token=BF16),
    _case("fp16+sr@16:buffer=bf16", StateShape(3, 80, 64, 3), token=FP16, output=FP16),
    _case("fp32/nvfp4+keyscale@16:buffer=bf16", GROUPED, token=BF16, spread=8),
    _case("fp16/nvfp4+keyscale@4:buffer=bf16", StateShape(2, 80, 64, 1), token=BF16, output=BF16, spread=8),
    _case("fp32/nvfp4+keyscale@4:buffer=bf16", StateShape(2, 64, 128, 1), token=BF16, exact=True, spread=8),
    _case(
        "fp8+sr/nvfp4+keyscale@16:buffer=bf16", StateShape(1, 96, 128, 1), token=BF16, foreign=True, spread=8
    ),
    _case("int8+sr/nvfp4+keyscale@4:buffer=bf16", StateShape(1, 128, 64, 1), token=BF16, spread=8),
    _case("bf16+sr/nvfp4+keyscale@5:flush_read=copy", StateShape(2, 48, 32, 1), spread=8),
    _case("fp16+sr/nvfp4+keyscale@4:buffer=bf16", StateShape(1, 16, 256, 1), token=BF16, spread=8),
    _case("fp32/nvfp4+keyscale@6:buffer=bf16", StateShape(2, 64, 64, 1), token=BF16, drafts=3, spread=8),
    _case("int8/mxfp4@4"),
    _case("fp32/mxfp4@16:buffer=bf16", GROUPED, token=BF16),
    _case("fp16+sr/fp8@4:buffer=bf16", GROUPED, token=BF16),
    _case("fp16/nvfp4@4:flush_read=copy"),
    _case("fp16+sr/nvfp4@5:buffer=bf16:flush_read=copy", TINY, token=BF16),
    _case("fp32/fp8@3:flush_read=copy", StateShape(2, 48, 32, 1)),
    _case("fp32@2"),
    _case("fp16+sr@3:buffer=bf16", GROUPED, token=BF16),
    _case("fp32/nvfp4@6:buffer=bf16", StateShape(2, 80, 32, 1), token=BF16, foreign=True),
    _case("fp32/nvfp4@4:buffer=bf16", StateShape(2, 80, 64, 1), token=BF16),
    _case("fp16+sr/nvfp4@16:buffer=bf16", StateShape(1, 80, 128, 1), token=BF16, exact=True),
    _case("fp8+sr/nvfp4@4:buffer=bf16", StateShape(1, 96, 128, 1), token=BF16, output=BF16),
    _case("fp8/mxfp4@17:buffer=bf16"),
    _case("fp16+sr@7", GROUPED, drafts=2),
    _case("fp32/fp8@6:flush_read=copy", drafts=2),
    _case("fp16/nvfp4@10:buffer=bf16", StateShape(2, 64, 64, 1), token=BF16, drafts=4),
    _case("fp32/nvfp4@4:buffer=bf16", _DELTA, "gated_delta", token=BF16, drafts=4),
    _case("fp16+sr@6", _CHANNELS, "kimi_delta", drafts=2),
    _case("fp32@1", _DELTA, "gated_delta"),
    _case("fp8+sr/nvfp4@4", _DELTA, "gated_delta"),
    _case("fp32/nvfp4@4:key_read=checkpoint", _DELTA, "gated_delta"),
    _case("int8@4", _CHANNELS, "kimi_delta"),
    _case("bf16/nvfp4@4", StateShape(1, 192, 96, 1), "gated_delta"),
    _case("fp8@1", _DELTA, "gated_delta"),
    _case("bf16+sr@1", _CHANNELS, "kimi_delta"),
    _case("fp32/nvfp4@4:flush_read=copy", _DELTA, "gated_delta"),
    _case("fp8+sr/nvfp4+keyscale@4", StateShape(4, 16, 32, 2), "gated_delta", spread=8),
    _case("fp32/nvfp4+keyscale@4:key_read=checkpoint", _DELTA, "gated_delta", spread=8),
    _case("fp16+sr/nvfp4+keyscale@4:flush_read=copy", _DELTA, "gated_delta", spread=8),
    _case(
        "int8/nvfp4+keyscale@4:buffer=bf16", StateShape(1, 128, 64, 1), "gated_delta", token=BF16, spread=8
    ),
    _case("fp16+sr/nvfp4+keyscale@3:contents=derived", _CHANNELS, "kimi_delta", spread=8),
    _case("fp32/nvfp4+keyscale@20:buffer=bf16:flush_read=copy", _CHANNELS, "kimi_delta", spread=8),
    _case("fp16/nvfp4+keyscale@1:flush_read=copy", _CHANNELS, "kimi_delta", spread=8),
    _case("fp16+sr/mxfp4@4", StateShape(2, 16, 128, 1), "gated_delta"),
    _case("int8/mxfp4@3:flush_read=copy", StateShape(1, 48, 96, 1), "gated_delta"),
    _case("fp32/mxfp4@4:key_read=checkpoint:buffer=bf16", _CHANNELS, "kimi_delta", token=BF16),
    _case("fp32/mxfp4@1:flush_read=copy", _CHANNELS, "kimi_delta"),
    _case("fp32/fp8@4:buffer=bf16", StateShape(1, 16, 256, 1), "gated_delta", token=BF16),
    _case("fp32/fp8@4:buffer=bf16:contents=derived", StateShape(1, 48, 96, 1), "gated_delta", token=BF16),
    _case("fp8+sr/fp8@4:key_read=checkpoint", _DELTA, "gated_delta"),
    _case("bf16/fp8@4:flush_read=copy:contents=derived", _CHANNELS, "kimi_delta"),
]
"""Run in the interpreter in the slow tier."""

_MAMBA2_SHAPES = ((64, 64, 128, 8), (128, 64, 128, 8), (96, 80, 128, 8), (80, 64, 128, 1), (24, 128, 256, 1))
_MAMBA2_POLICIES = (
    "fp32@1 fp16@1 fp16+sr@1 fp8+sr@1 fp32@16:buffer=bf16 fp16@16:buffer=bf16 fp8+sr@16:buffer=bf16 fp32@16 "
    "fp32/nvfp4@16:buffer=bf16 fp16+sr/nvfp4@16:buffer=bf16 fp8+sr/nvfp4@16:buffer=bf16 int8/nvfp4@16:buffer=bf16 "
    "fp32/nvfp4+keyscale@16:buffer=bf16 fp16+sr/nvfp4+keyscale@16:buffer=bf16 fp8/nvfp4+keyscale@16:buffer=bf16 "
    "fp16+sr/mxfp4@16:buffer=bf16 fp32/fp8@16:buffer=bf16"
).split()
_DELTA_SHAPES = ((32, 128, 128, 16), (64, 128, 128, 16), (30, 192, 96, 30))
_DELTA_POLICIES = (
    "fp32@1 fp32@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16:contents=derived "
    "fp16+sr/nvfp4@16:buffer=bf16 fp8+sr/nvfp4@16:buffer=bf16 fp16/mxfp4@16:buffer=bf16 "
    "fp32/nvfp4+keyscale@16:buffer=bf16 fp8+sr/nvfp4+keyscale@16:buffer=bf16:contents=derived "
    "fp32/mxfp4@16:buffer=bf16:contents=derived fp32/fp8@16:buffer=bf16 fp16/fp8@16:buffer=bf16:contents=derived"
).split()
MODELS = [
    *(_case(p, StateShape(*sizes), token=BF16) for sizes in _MAMBA2_SHAPES for p in _MAMBA2_POLICIES),
    *(
        _case(p, StateShape(*sizes), "gated_delta", token=BF16)
        for sizes in _DELTA_SHAPES
        for p in _DELTA_POLICIES
    ),
    *(_case(p, StateShape(32, 128, 128, 32), "kimi_delta", token=BF16) for p in _DELTA_POLICIES),
]
"""Layers of deployed models, for a GPU."""

CASES = {str(case): case for case in (*FAST, *DELTA, *SLOW, *MODELS)}
