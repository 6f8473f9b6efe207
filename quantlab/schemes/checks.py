"""What a decode state accepts: each check names the argument, what it is and what was expected."""

import json
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError


def is_integer(value: object) -> bool:
    """An int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def describe(value: object) -> object:
    """A tensor's shape, with its dtype unless it is float32; anything else by its type."""
    if not isinstance(value, Tensor):
        return None if value is None else type(value).__name__
    if value.dtype == torch.float32:
        return tuple(value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def tensor(name: str, value: object, shape: tuple[int, ...] | None, expected: str) -> None:
    """InputError unless ``value`` is a tensor of real numbers, of ``shape`` if that is given."""
    if not isinstance(value, Tensor) or (shape is not None and tuple(value.shape) != shape):
        raise InputError(name, describe(value), expected)
    if value.is_complex() or value.dtype == torch.bool:
        raise InputError(name, describe(value), f"real numbers of {expected}")


def rows(value: object, batch: int, *, distinct: bool = False) -> Tensor:
    """``value`` as row numbers: int64 (n,), each from 0 to batch - 1, and each once if ``distinct``.

    int32 is taken too: it is what beam search reorders a cache with.
    """
    expected = f"row numbers from 0 to {batch - 1}" + (", each at most once" if distinct else "")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32) or value.ndim != 1:
        raise InputError("rows", describe(value), f"int64 or int32 of shape (n,), {expected}")
    value = value.cpu().to(torch.int64)
    outside = (value < 0) | (value >= batch)
    if bool(outside.any()) or (distinct and len(value.unique()) != len(value)):
        raise InputError("rows", value.tolist(), expected)
    return value


def sequence_ids(value: Any, count: int) -> Tensor:
    """``value`` as names of sequences: int64 (count,), in memory of its own."""
    expected = f"integers of shape ({count},)"
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("sequence_ids", value, expected) from None
    if ids.numel() == 0 and count == 0:
        return torch.zeros(0, dtype=torch.int64)
    if ids.dtype not in (torch.int64, torch.int32) or tuple(ids.shape) != (count,):
        raise InputError("sequence_ids", describe(ids), expected)
    return ids.cpu().to(torch.int64, copy=True)


def saved_meta(saved: Any, version: int) -> dict[str, Any]:
    """The ``meta`` text of a saved state, read."""
    try:
        meta = json.loads(bytes(saved["meta"].tolist()))
        found = meta["version"]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        raise InputError("saved state", type(saved).__name__, "what save() returned, with its meta") from None
    if found != version:
        raise InputError("saved state version", found, str(version))
    return meta
