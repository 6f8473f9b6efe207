"""Key scales: a power of two for every key column of a head's matrix, above whatever scales the format has.

Blocks of most formats lie along the key dim, so a block holds elements of 16 or 32 key columns.  Where the columns of
a state differ in size, as those of a nearly rank-one state do (row v is about u_v w, and w is what differs), the large
columns set the scale and the small ones, which may be what a query reads, are rounded by the large ones' step.
``+keyscale`` divides every column of the (V, K) matrix by 2^e with 2^e <= its largest magnitude < 2^(e + 1), so that
each block holds numbers of one size, and multiplies after decoding.  A column's error is then relative to its own
largest magnitude: without float32 roundings of scales at most twice that magnitude times what the format errs by
relative to a block's.

Stored is e as an E8M0 byte, (..., 1, K); -127 for smaller, 1 for a column of zeros.  A NaN counts as zero, an Inf as
the largest float32.  Both operations are exact in float32 but where a quotient falls below 2^-149; products are limited
to the largest float32.  The scale is that of what the codes encode: of what a component leaves, behind a rotation,
residual included, so a residual is not scaled.  A read costs K products a head: sum over k of (q_k 2^e_k) codes_vk,
so that a kernel scales the query and reads codes as it did.

Per-channel scales of cached keys are the same remedy for the same disease (KIVI, arXiv 2402.02750).
"""

import torch
from torch import Tensor

from quantlab.formats.mx import SCALE_BIAS, decode_scales

DTYPE = torch.uint8
_LARGEST = torch.finfo(torch.float32).max


def key_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the bytes for values (..., V, K)."""
    return (*shape[:-2], 1, shape[-1])


def key_scales(x: Tensor) -> Tensor:
    """E8M0 bytes (..., 1, K) of x (..., V, K), float32 or float64; exact, so equal numbers have equal bytes."""
    if x.shape[-2] == 0:
        return torch.full(key_scale_shape(tuple(x.shape)), SCALE_BIAS, dtype=DTYPE, device=x.device)
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=_LARGEST)
    largest = magnitude.amax(-2, keepdim=True)
    exponents = torch.frexp(largest).exponent - 1
    exponents = exponents.clamp(-SCALE_BIAS, SCALE_BIAS).masked_fill(largest == 0, 0)
    return (exponents + SCALE_BIAS).to(DTYPE)


def divide_by_scales(x: Tensor, scales: Tensor) -> Tensor:
    """x in its own dtype, every column divided by its scale."""
    return x / decode_scales(scales).to(x.dtype)


def times_scales(values: Tensor, scales: Tensor) -> Tensor:
    """float32: the inverse, limited to finite numbers; a NaN stays."""
    return (values * decode_scales(scales)).clamp(-_LARGEST, _LARGEST)
