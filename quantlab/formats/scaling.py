"""Shared scales: FP32 per group, and NVFP4's E4M3 per 16 values under a FP32 global scale.

All arithmetic is float32 with true division, so that stored bits can be reproduced anywhere.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quantlab.formats import fused
from quantlab.formats.rounding import EXACT_BITS
from quantlab.formats.table import FLOAT_ELEMENTS

NVFP4_BLOCK = 16
SCALE_ELEMENT = FLOAT_ELEMENTS["e4m3"]
_CODE_MAX = FLOAT_ELEMENTS["e2m1"].max
_TINY = FLOAT_ELEMENTS["fp32"].smallest


@lru_cache
def largest_scale(*factors: float) -> float:
    """The largest float32 scale whose float32 product with ``factors``, taken in order, is finite.

    Without it a group that holds the largest float32 could decode to Inf, because its scale may round up.
    """
    scale = np.float32(np.finfo(np.float32).max / np.prod(factors))
    with np.errstate(over="ignore"):
        while not np.isfinite(np.multiply.reduce(np.array([scale, *factors], dtype=np.float32))):
            scale = np.nextafter(scale, np.float32(0))
    return float(scale)


def group_amax(x: Tensor, group: int) -> Tensor:
    """Largest magnitude of every ``group`` consecutive values, (..., K) -> (..., groups); NaN wins."""
    key_dim = x.shape[-1]
    if group == key_dim:
        return x.abs().amax(-1, keepdim=True)
    if key_dim % group:
        x = torch.nn.functional.pad(x, (0, group - key_dim % group))
    # Magnitudes order like their bit patterns, and short integer reductions are several times faster.
    return (x.view(torch.int32) & 0x7FFFFFFF).unflatten(-1, (-1, group)).amax(-1).view(torch.float32)


def align(x: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Views of x (..., K) and of its scales (..., groups) that broadcast against each other."""
    key_dim = x.shape[-1]
    if key_dim % group == 0:
        return x.unflatten(-1, (-1, group)), scales[..., None]
    return x, scales.repeat_interleave(group, dim=-1)[..., :key_dim]


def float32_scales(amax: Tensor, largest: float) -> Tensor:
    """amax / largest; 1.0 for a zero group; the smallest float32 where the quotient underflows to zero."""
    scales = (amax / largest).clamp_(min=_TINY, max=largest_scale(largest))
    return scales.masked_fill_(amax == 0, 1.0)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """Global scale from the amax of what shares it: amax / 2688 (= 448 * 6); 1.0 if amax is zero."""
    scale = amax / (SCALE_ELEMENT.max * _CODE_MAX)
    scale = scale.clamp_(min=_TINY, max=largest_scale(SCALE_ELEMENT.max, _CODE_MAX))
    return scale.masked_fill_(amax == 0, 1.0)


def nvfp4_block_scales(block_amax: Tensor, global_scale: Tensor | float) -> Tensor:
    """float32 values of the E4M3 block scales, all of them numbers that E4M3 holds.

    RNE(amax / (6 * global)), at most 448, at least 2^-9 unless the block is zero.
    """
    quotient = block_amax / (_CODE_MAX * global_scale)
    values = fused.round_values_(quotient, quotient, SCALE_ELEMENT, None, EXACT_BITS)
    return values.clamp_(min=SCALE_ELEMENT.smallest).masked_fill_(block_amax == 0, 0.0)


def divisors(scales: Tensor) -> Tensor:
    """The scales with 1.0 for zero: a zero scale decodes to zero whatever the code; 0/0 must not arise."""
    return scales.masked_fill(scales == 0, 1.0)
