"""Shared scales: FP32 per group, and NVFP4's E4M3 per 16 values under a FP32 global scale.

All arithmetic is float32 with true division, so that stored bits can be reproduced anywhere.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quantlab.formats.rounding import decode_element, encode_element
from quantlab.formats.table import ELEMENTS, Element

NVFP4_BLOCK = 16
_E4M3 = ELEMENTS["e4m3"]
_E2M1 = ELEMENTS["e2m1"]
assert isinstance(_E4M3, Element)
SCALE_ELEMENT = _E4M3
_TINY = ELEMENTS["fp32"].smallest


@lru_cache
def largest_scale(*factors: float) -> float:
    """The largest float32 scale whose float32 product with ``factors``, taken in order, is finite.

    Without it a group that holds the largest float32 could decode to Inf, because its scale may round up.
    """
    product = np.float32(1)
    for factor in factors:
        product *= np.float32(factor)
    scale = np.finfo(np.float32).max / product
    with np.errstate(over="ignore"):
        while not np.isfinite(np.prod(np.array([scale, *factors], dtype=np.float32), dtype=np.float32)):
            scale = np.nextafter(scale, np.float32(0))
    return float(scale)


def group_amax(x: Tensor, group: int) -> Tensor:
    """Largest magnitude of every ``group`` consecutive values: (..., K) -> (..., ceil(K/group))."""
    key_dim = x.shape[-1]
    if group == key_dim:
        return x.abs().amax(-1, keepdim=True)
    if key_dim % group:
        x = torch.nn.functional.pad(x, (0, group - key_dim % group))
    return x.unflatten(-1, (-1, group)).abs().amax(-1)


def expand_groups(scales: Tensor, group: int, key_dim: int) -> Tensor:
    """(..., groups) -> (..., K): every value's scale."""
    return scales.repeat_interleave(group, dim=-1)[..., :key_dim]


def float32_scales(amax: Tensor, largest: float) -> Tensor:
    """amax / largest; 1.0 for a zero group; the smallest float32 where the quotient underflows to zero."""
    scales = (amax / largest).clamp(min=_TINY, max=largest_scale(largest))
    return torch.where(amax == 0, 1.0, scales)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """Global scale from the amax of what shares it: amax / 2688 (= 448 * 6); 1.0 if amax is zero."""
    scale = amax / (SCALE_ELEMENT.max * _E2M1.max)
    scale = scale.clamp(min=_TINY, max=largest_scale(SCALE_ELEMENT.max, _E2M1.max))
    return torch.where(amax == 0, 1.0, scale)


def nvfp4_block_scales(block_amax: Tensor, global_scale: Tensor | float) -> Tensor:
    """Stored E4M3 bytes (uint8): RNE(amax / (6 * global)), at most 448, at least 2^-9 unless the block is zero."""
    quotient = block_amax / (_E2M1.max * global_scale)
    codes = encode_element(quotient, SCALE_ELEMENT)
    return torch.where(block_amax == 0, 0, codes.clamp(min=1)).to(torch.uint8)


def nvfp4_decoded_scales(scale_bytes: Tensor, global_scale: Tensor | float) -> Tensor:
    """float32 multiplier of every block: E4M3 value times global scale."""
    return decode_element(scale_bytes, SCALE_ELEMENT) * global_scale


def divisor(scales: Tensor) -> Tensor:
    """The scales with 1.0 for zero: a zero scale decodes to zero whatever the code, and 0/0 must not arise."""
    return torch.where(scales == 0, 1.0, scales)
