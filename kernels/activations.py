"""Activations of gates, in float32 and without overflow; a few units in the last place from torch's."""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import reciprocal

SOFTPLUS_THRESHOLD: tl.constexpr = tl.constexpr(20.0)
"""Of torch: above it softplus is the identity."""


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of float32 x."""
    # The exponential of -|x| is at most 1: no overflow, and a divisor from 1 to 2.
    below = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, below) * reciprocal(1.0 + below)


@triton.jit
def softplus(x):
    """log(1 + e^x) of float32 x, to the last places of small results, too."""
    below = tl.exp(-tl.abs(x))
    rounded = 1.0 + below
    # log(1 + u) = log(w) u / (w - 1) for w = 1 + u rounded: log(w) / (w - 1) hardly depends on w, and w - 1 is exact
    # (Goldberg, ACM Computing Surveys 23, 1991, theorem 4).
    exact = rounded - 1.0
    logarithm = tl.where(exact == 0.0, below, tl.log(rounded) * below * reciprocal(tl.maximum(exact, 1e-8)))
    return tl.where(x > SOFTPLUS_THRESHOLD, x, tl.maximum(x, 0.0) + logarithm)
