"""The cases of the conformance suite of drafts: 2 to 8 of them, cursors around a full window, every accept count."""

import torch

from quantlab.schemes import StateShape
from quantlab.testing.pool_cases import BF16, FP16, GROUPED, TINY
from quantlab.testing.pool_drafts import DraftCase

_SMALL = StateShape(2, 16, 32, 1)


def _case(policy: str, drafts: int, shape: StateShape = TINY, family: str = "mamba2", **options) -> DraftCase:
    """Rows at an empty window, near its end and at its end; none, some and all drafts are accepted, twice."""
    window = int(policy.partition("@")[2].partition(":")[0])
    cursors = (0, window - 2, window - 1)
    accepted = ((drafts, 0, drafts), (1, drafts, drafts - 1))
    return DraftCase(policy, family, shape, cursors, drafts=drafts, accepted=accepted, **options)


def _heads(policy: str, drafts: int, shape: StateShape = TINY, **options) -> DraftCase:
    return _case(policy, drafts, shape, "gated_delta", **options)


def _channels(policy: str, drafts: int, shape: StateShape = TINY, **options) -> DraftCase:
    return _case(policy, drafts, shape, "kimi_delta", **options)


FAST = [
    _case("fp32/nvfp4@4:buffer=bf16", 3, token=BF16),
    _case("fp16+sr@4", 2, exact=True),
    _case("fp16+sr/nvfp4+keyscale@4:buffer=bf16", 3, token=BF16, spread=8),
    _heads("fp32/nvfp4@4:buffer=bf16", 3, token=BF16),
    _channels("fp16/nvfp4@4", 3),
]
"""Run in the interpreter in the fast tier."""

SLOW = [
    _heads("fp16+sr@4:contents=derived", 2, foreign=True),
    _case("fp8+sr/mxfp4@4", 4, foreign=True),
    _case("fp32@4", 3, _SMALL),
    _case("fp32@8:buffer=bf16", 8, token=BF16, output=BF16),
    _case("fp16+sr/nvfp4@4:buffer=bf16", 4, exact=True),
    _case("fp32/nvfp4@4", 4, StateShape(2, 48, 32, 1)),
    _case(
        "fp32/nvfp4+keyscale@8:buffer=bf16", 6, StateShape(2, 80, 64, 1), token=BF16, output=BF16, spread=8
    ),
    _case("int8+sr/nvfp4@8:buffer=fp16", 8, token=FP16, output=FP16, foreign=True),
    _case("fp16/nvfp4@16:buffer=bf16", 5, GROUPED, token=BF16, output=BF16),
    _case("fp8+sr/nvfp4@16:buffer=bf16", 7, GROUPED),
    _case("fp16+sr/nvfp4@8:buffer=bf16", 5, StateShape(2, 64, 64, 1), token=BF16),
    _case("bf16/fp8@4:buffer=bf16", 2, StateShape(3, 80, 64, 3), token=torch.float32),
    _case("fp32/nvfp4@8:buffer=bf16", 6, StateShape(1, 16, 256, 1)),
    _case("fp16/nvfp4@6:buffer=bf16:flush_read=copy", 3),
    _case("fp32/mxfp4@3", 2),
    _heads("fp32/nvfp4@4:buffer=bf16:contents=derived", 4, token=BF16, output=BF16),
    _heads("fp32/nvfp4+keyscale@4:buffer=bf16", 3, StateShape(2, 16, 64, 1), token=BF16, spread=8),
    _heads("fp16+sr/nvfp4+keyscale@4:key_read=checkpoint", 4, spread=8),
    _channels("fp16/nvfp4+keyscale@4:buffer=bf16", 4, token=BF16, output=BF16, spread=8),
    _heads("fp32@16:buffer=bf16", 5, _SMALL, token=BF16),
    _heads("fp32@4", 3, _SMALL, foreign=True),
    _heads("fp32/nvfp4@4:key_read=checkpoint", 4),
    _heads("fp32/nvfp4@4:contents=derived:flush_read=copy", 2),
    _heads("int8+sr/nvfp4@8:buffer=fp16", 8, token=FP16, output=FP16),
    _heads("bf16/nvfp4@3:buffer=bf16", 3, StateShape(1, 16, 96, 1), token=BF16),
    _heads("fp8+sr@20:buffer=bf16", 9),
    _channels("fp32@4:buffer=bf16:contents=derived", 4, _SMALL, token=BF16),
    _channels("fp32/nvfp4@12", 5),
    _channels("fp8+sr/nvfp4@4:buffer=bf16", 4, token=BF16, output=BF16),
    _channels("fp32/nvfp4@4:key_read=checkpoint:contents=derived", 2),
    _channels("fp16+sr@3", 3, StateShape(1, 48, 96, 1)),
]
"""Run in the interpreter in the slow tier."""

_SHAPES = ((64, 64, 128, 8), (96, 80, 128, 8), (80, 64, 128, 1), (24, 128, 256, 1))
_POLICIES = (
    "fp32@16 fp16+sr@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16 fp16+sr/nvfp4@16:buffer=bf16 "
    "fp8+sr/nvfp4@16:buffer=bf16 fp16/mxfp4@16:buffer=bf16 fp16+sr/nvfp4+keyscale@16:buffer=bf16"
).split()
_DELTA_POLICIES = (
    "fp32@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16:contents=derived "
    "fp16+sr/nvfp4@16:buffer=bf16 fp8+sr/nvfp4@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16:key_read=checkpoint fp32@16 "
    "fp32/nvfp4+keyscale@16:buffer=bf16"
).split()
_DELTA_LAYERS = (
    ("gated_delta", (32, 128, 128, 16)),
    ("gated_delta", (30, 192, 96, 30)),
    ("kimi_delta", (32, 128, 128, 32)),
)
MODELS = [
    *(
        _case(policy, drafts, StateShape(*sizes), token=BF16)
        for sizes in _SHAPES
        for policy in _POLICIES
        for drafts in (4, 8)
    ),
    *(
        _case(policy, drafts, StateShape(*sizes), family, token=BF16)
        for family, sizes in _DELTA_LAYERS
        for policy in _DELTA_POLICIES
        for drafts in (1, 4, 8)
    ),
]
"""Layers of deployed models, for a GPU."""

CASES = {str(case): case for case in (*FAST, *SLOW, *MODELS)}
