"""Randomised Hadamard rotation along the key dim: spreads an outlier over its neighbours before rounding.

x -> H diag(s) x with H the orthonormal Sylvester matrix and s random signs.  A key dim that is not a power of
two is rotated in blocks of its largest power-of-two divisor (96: three blocks of 32).

Both ways are orthonormal, so the error of a row keeps its length, and no value errs by more than the square root of
the block length times the largest error in the rotated basis, each up to the float32 roundings of ``rotate``.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantlab.formats.random import philox_4x32


def rotate(x: Tensor, seed: int | None, *, inverse: bool = False) -> Tensor:
    """x (..., K) rotated in its own dtype, or rotated back; x itself for seed None.

    The signs are the lowest bits of Philox words with key ``seed`` and counter (position // 4, 0, 0, 0), word =
    position % 4.  A dim K = m * 2^n costs n additions an element, each rounded once, and one multiplication.
    """
    if seed is None or x.numel() == 0:
        return x
    signs = _signs(x.shape[-1], seed).to(x.device, x.dtype)
    if inverse:
        return _butterflies(x) * signs
    return _butterflies(x * signs)


def largest_input(key_dim: int) -> float:
    """The largest magnitude whose rotation, stored at up to twice its size and rotated back, stays in float32.

    Either rotation adds ``block`` numbers and divides by its square root.
    """
    return torch.finfo(torch.float32).max / (2 * block_of(key_dim))


def block_of(key_dim: int) -> int:
    """Length of the blocks that are rotated: the largest power of two that divides ``key_dim``."""
    return key_dim & -key_dim


def _butterflies(x: Tensor) -> Tensor:
    """The orthonormal Sylvester matrix times every block of x."""
    block, shape = block_of(x.shape[-1]), x.shape
    x = x * (1 / math.sqrt(block))  # first, so that no sum exceeds what is asked for
    half = 1
    while half < block:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).reshape(shape)
        half *= 2
    return x


@lru_cache(maxsize=64)
def _signs(key_dim: int, seed: int) -> Tensor:
    """+-1 as float64 (key_dim,)."""
    counters = torch.zeros(-(-key_dim // 4), 4, dtype=torch.int64)
    counters[:, 0] = torch.arange(len(counters))
    words = philox_4x32(counters, (seed & 0xFFFFFFFF, seed >> 32)).flatten()[:key_dim]
    return 1.0 - 2.0 * (words & 1)
