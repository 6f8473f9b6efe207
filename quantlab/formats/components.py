"""Common components: what the rows of a head's state share is stored beside the codes, which then hold the rest.

A block scale follows the largest magnitude of its block, so the error of a copy is relative to the whole state.
Where one component dominates, what a head remembers of a single token is small beside it and drowns in that error.
``+rank<r>`` takes the r largest singular components of every (V, K) matrix out of x before anything else happens to
it, ``+mean`` the mean over the value rows, one number a key column.  Reading adds them again.

Rank.  x = sum over i of s_i u_i v_i^T with s_1 >= s_2 >= ...: the sum of the first r terms leaves less energy than any
other matrix of rank r, the sum over i > r of s_i^2 (Eckart and Young 1936).  Component i is stored as two float16
vectors, sqrt(s_i) u_i (value dim) and sqrt(s_i) v_i (key dim).  With s_i in one of the two a state of 1e5 in 128 x 128
would need 1e7, beyond float16; its root is 3.6e3.  s_i enters as at most 65504^2, so that no factor overflows, and
what is left of a larger one stays with the codes; so does what is lost when factors of tiny states underflow.
Each stored vector is off by at most (2^-11 + 2^-24) sqrt(s_i) + 2^-25 sqrt(its length) in norm, from one rounding to
float32 and one to float16; the bound of a component follows from the product of the two.

Mean.  One float16 vector over the key dim, the row that is nearest to all rows; saturated at +-65504.

The rest is formed from the stored float16 factors, never from the exact component, so a factor's rounding is no error
of the copy.  Products of two float16 numbers are exact in float32 and are added in the order of the components, so
that the decoded component is the same on every device and in every batch.

Codes are a function of the state alone: LAPACK (through numpy) works in float64 on the host, matrix by matrix, so no
row of a batch depends on another; of the two signs of (u_i, v_i) the one is taken that makes the largest magnitude of
v_i positive, the first of equal ones; a component below the numerical rank, s_i <= max(V, K) 2^-52 s_1, is zero, as
its direction is rounding noise.  Equal singular values leave the choice of their directions to LAPACK, and another
build of LAPACK may round a factor the other way where it lies within 1e-15 of a tie.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantlab.errors import InputError

DTYPE = torch.float16
LARGEST_RANK = 8
MEAN = "mean"
COMPONENTS = (MEAN, *(f"rank{r}" for r in range(1, LARGEST_RANK + 1)))


@dataclass(frozen=True)
class Component:
    """float16 factors.  key: (..., r, K).  value: (..., V, r), or None where every value row takes the one key row."""

    key: Tensor
    value: Tensor | None = None

    def decode(self) -> Tensor:
        """float32 (..., V, K), or (..., 1, K) for every row; r - 1 roundings, of the sums."""
        key = self.key.to(torch.float32)
        if self.value is None:
            return key
        value = self.value.to(torch.float32)
        total = value[..., :, :1] * key[..., :1, :]
        for i in range(1, key.shape[-2]):
            total = total + value[..., :, i : i + 1] * key[..., i : i + 1, :]
        return total


def rank_of(name: str) -> int | None:
    """r of "rank<r>", None for the mean."""
    return None if name == MEAN else int(name.removeprefix("rank"))


def component_shapes(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of the key and value factors of values (..., V, K)."""
    *lead, value_dim, key_dim = shape
    rank = rank_of(name)
    if rank is None:
        return (*lead, 1, key_dim), None
    return (*lead, rank, key_dim), (*lead, value_dim, rank)


def check_component_shape(name: str, shape: tuple[int, ...], argument: str, text: str) -> None:
    """InputError unless matrices (..., V, K) have the component: with no smaller dims than its rank."""
    rank = rank_of(name) or 0
    if min(shape[-2:]) < rank:
        expected = f"at least {rank} value rows and {rank} key columns for {text}"
        raise InputError(argument, shape, expected)


def component_of(x: Tensor, name: str) -> Component:
    """The component ``name`` of x (..., V, K), float32 or float64.

    A NaN counts as zero and an Inf as the largest float32: what becomes of them is up to the codes.
    """
    largest = torch.finfo(torch.float32).max
    x = x.to(torch.float64).nan_to_num(nan=0.0, posinf=largest, neginf=-largest)
    rank = rank_of(name)
    if rank is None:
        return Component(_to_float16(_mean_row(x)))
    key, value = _singular_factors(x.cpu().numpy(), rank)
    return Component(*(_to_float16(torch.from_numpy(factor).to(x.device)) for factor in (key, value)))


def _mean_row(x: Tensor) -> Tensor:
    """(..., 1, K).  Row after row, because the order of a library's sum may depend on the batch."""
    if x.shape[-2] == 0:
        return x.new_zeros((*x.shape[:-2], 1, x.shape[-1]))
    total = x[..., :1, :]
    for row in range(1, x.shape[-2]):
        total = total + x[..., row : row + 1, :]
    return total / x.shape[-2]


def _singular_factors(x: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """sqrt(s) v^T (..., r, K) and u sqrt(s) (..., V, r) of the ``rank`` largest singular components."""
    left, singular, right = np.linalg.svd(x, full_matrices=False)
    left, largest, right = left[..., :rank], singular[..., :rank], right[..., :rank, :]
    noise = max(x.shape[-2:]) * np.finfo(np.float64).eps * singular[..., :1]
    limit = torch.finfo(DTYPE).max
    roots = np.where(largest > noise, np.minimum(np.sqrt(largest), limit), 0.0)
    places = np.abs(right).argmax(-1, keepdims=True)
    signs = np.where(np.take_along_axis(right, places, -1) < 0, -1.0, 1.0)
    # Adding zero drops the sign of zeros.
    key, value = right * signs * roots[..., None], left * signs[..., None, :, 0] * roots[..., None, :]
    return key + 0.0, value + 0.0


def _to_float16(x: Tensor) -> Tensor:
    largest = torch.finfo(DTYPE).max
    return x.clamp(-largest, largest).to(torch.float32).to(DTYPE)
