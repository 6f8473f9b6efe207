"""Arguments of the kernels around a recurrence, looked at on the host before any launch: rows that may lie apart.

What a model passes are often columns of a wider matrix, the output of a projection: the numbers of a row are
neighbours, but behind each row there is something else.
"""

import math
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels.arguments import FLOATS, described, runs_here

Shape = tuple[int, ...]


def rows(
    name: str, given: Any, sizes: Shape, device: torch.device, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> int:
    """How many numbers lie from one row of ``given`` to the next; InputError unless it is a tensor of ``sizes``, in one
    of ``dtypes``, on ``device``, each row (all behind the first dimension) without gaps.
    """
    matching(name, given, sizes, dtypes)
    if given.device != device:
        raise InputError(name, f"{described(given)} on {given.device}", f"a tensor on {device}")
    if given.numel() and not given[0].is_contiguous():
        raise InputError(
            name, f"{described(given)} with strides {given.stride()}", "a tensor whose rows have no gaps"
        )
    return given.stride(0)


def whole(
    name: str, given: Any, sizes: Shape, device: torch.device, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """As ``rows``, of a tensor without gaps between its rows either."""
    rows(name, given, sizes, device, dtypes)
    if not given.is_contiguous():
        raise InputError(name, f"{described(given)} with strides {given.stride()}", "a contiguous tensor")


def matching(name: str, given: Any, sizes: Shape, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """InputError unless ``given`` is a tensor of ``sizes`` in one of ``dtypes``."""
    fits = isinstance(given, Tensor) and given.layout == torch.strided
    if not fits or given.dtype not in dtypes or given.shape != sizes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(name, described(given), f"{kinds} of shape {sizes}")


def batched(name: str, given: Any, dimensions: int) -> Tensor:
    """A tensor of at least ``dimensions`` dimensions that kernels run on; InputError if ``given`` is none."""
    if not isinstance(given, Tensor) or given.dtype not in FLOATS or given.ndim < dimensions:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise InputError(name, described(given), f"{kinds} of at least {dimensions} dimensions")
    runs_here(name, given.device)
    return given


def width(given: Tensor) -> int:
    """Numbers of a row."""
    return math.prod(given.shape[1:])


def target_dtype(given: Any, default: torch.dtype) -> torch.dtype:
    """``given``, or ``default`` for None; InputError unless kernels write it."""
    dtype = default if given is None else given
    if dtype not in FLOATS:
        raise InputError("dtype", given, "float32, bfloat16 or float16")
    return dtype
