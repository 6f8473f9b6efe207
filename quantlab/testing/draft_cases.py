"""The cases of the conformance suite of drafts: 2 to 8 of them, cursors around a full window, every accept count."""

import torch

from quantlab.schemes import StateShape
from quantlab.testing.pool_cases import BF16, FP16, GROUPED, TINY
from quantlab.testing.pool_drafts import DraftCase

_SMALL = StateShape(2, 16, 32, 1)


def _case(policy: str, drafts: int, shape: StateShape = TINY, **options) -> DraftCase:
    """Rows at an empty window, near its end and at its end; none, some and all drafts are accepted, twice."""
    window = int(policy.partition("@")[2].partition(":")[0])
    cursors = (0, window - 2, window - 1)
    accepted = ((drafts, 0, drafts), (1, drafts, drafts - 1))
    return DraftCase(policy, "mamba2", shape, cursors, drafts=drafts, accepted=accepted, **options)


FAST = [
    _case("fp32/nvfp4@4:buffer=bf16", 3, token=BF16),
    _case("fp16+sr@4", 2, exact=True),
    _case("fp8+sr/mxfp4@4", 4, foreign=True),
]
"""Run in the interpreter in the fast tier."""

SLOW = [
    _case("fp32@4", 3, _SMALL),
    _case("fp32@8:buffer=bf16", 8, token=BF16, output=BF16),
    _case("fp16+sr/nvfp4@4:buffer=bf16", 4, exact=True),
    _case("fp32/nvfp4@4", 4, StateShape(2, 48, 32, 1)),
    _case("int8+sr/nvfp4@8:buffer=fp16", 8, token=FP16, output=FP16, foreign=True),
    _case("fp16/nvfp4@16:buffer=bf16", 5, GROUPED, token=BF16, output=BF16),
    _case("fp8+sr/nvfp4@16:buffer=bf16", 7, GROUPED),
    _case("fp16+sr/nvfp4@8:buffer=bf16", 5, StateShape(2, 64, 64, 1), token=BF16),
    _case("bf16/fp8@4:buffer=bf16", 2, StateShape(3, 80, 64, 3), token=torch.float32),
    _case("fp32/nvfp4@8:buffer=bf16", 6, StateShape(1, 16, 256, 1)),
    _case("fp16/nvfp4@6:buffer=bf16:flush_read=copy", 3),
    _case("fp32/mxfp4@3", 2),
]
"""Run in the interpreter in the slow tier."""

_SHAPES = ((64, 64, 128, 8), (96, 80, 128, 8), (80, 64, 128, 1), (24, 128, 256, 1))
_POLICIES = (
    "fp32@16 fp16+sr@16:buffer=bf16 fp32/nvfp4@16:buffer=bf16 fp16+sr/nvfp4@16:buffer=bf16 "
    "fp8+sr/nvfp4@16:buffer=bf16 fp16/mxfp4@16:buffer=bf16"
).split()
MODELS = [
    _case(policy, drafts, StateShape(*sizes), token=BF16)
    for sizes in _SHAPES
    for policy in _POLICIES
    for drafts in (4, 8)
]
"""Layers of deployed models, for a GPU."""

CASES = {str(case): case for case in (*FAST, *SLOW, *MODELS)}
