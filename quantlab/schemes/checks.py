"""What a decode state accepts: each check names the argument, what it is and what was expected."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.recurrences import Recurrence, StepInputs, get_recurrence
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import MAXIMUM_WINDOW, Policy

CPU = torch.device("cpu")


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


def tensor(
    name: str,
    value: object,
    shape: tuple[int, ...] | None,
    expected: str,
    device: torch.device | None = None,
) -> None:
    """InputError unless ``value`` is a tensor of real numbers, of ``shape`` and on ``device`` if these are given."""
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided or value.is_quantized):
        raise InputError(name, f"{value.layout} {value.dtype}", f"a plain dense tensor, {expected}")
    if isinstance(value, Tensor) and (value.is_meta or (device is not None and value.device != device)):
        where = "a device that holds numbers" if device is None else f"{device}, where the state is"
        raise InputError(name, f"a tensor on {value.device}", f"one on {where}")
    if not isinstance(value, Tensor) or (shape is not None and tuple(value.shape) != shape):
        raise InputError(name, describe(value), expected)
    if value.is_complex() or value.dtype == torch.bool:
        raise InputError(name, describe(value), f"real numbers of {expected}")


def rows(value: object, batch: int, *, distinct: bool = False, device: torch.device = CPU) -> Tensor:
    """``value`` as row numbers: int64 (n,) on ``device``, each from 0 to batch - 1, and each once if ``distinct``.

    int32 is taken too: it is what beam search reorders a cache with.
    """
    expected = f"row numbers from 0 to {batch - 1}" + (", each at most once" if distinct else "")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32) or value.ndim != 1:
        raise InputError("rows", describe(value), f"int64 or int32 of shape (n,), {expected}")
    numbers = value.tolist()  # a few numbers: faster looked at in Python than by tensor operations
    outside = any(not 0 <= number < batch for number in numbers)
    if outside or (distinct and len(set(numbers)) != len(numbers)):
        raise InputError("rows", numbers, expected)
    return value.to(device, torch.int64)


def sequence_ids(value: Any, count: int, device: torch.device = CPU) -> Tensor:
    """``value`` as names of sequences: int64 (count,) on ``device``, in memory of its own."""
    expected = f"integers of shape ({count},)"
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("sequence_ids", value, expected) from None
    if ids.numel() == 0 and count == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    if ids.dtype not in (torch.int64, torch.int32) or tuple(ids.shape) != (count,):
        raise InputError("sequence_ids", describe(ids), expected)
    return ids.to(device, torch.int64, copy=True)


def saved_meta(saved: Any, version: int | str) -> dict[str, Any]:
    """The ``meta`` text of a saved state, read."""
    try:
        meta = json.loads(bytes(saved["meta"].tolist()))
        found = meta["version"]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError):
        raise InputError("saved state", type(saved).__name__, "what save() returned, with its meta") from None
    if found != version:
        raise InputError("saved state version", found, str(version))
    return meta


def arithmetic(dtype: torch.dtype | None, policy: Policy) -> torch.dtype:
    """The dtype of everything but the stores: what is asked for, or the one that the checkpoint needs."""
    wide = policy.checkpoint.name == "fp64"
    if dtype is None:
        return torch.float64 if wide else torch.float32
    if dtype not in (torch.float32, torch.float64) or (wide and dtype == torch.float32):
        allowed = "torch.float64" if wide else "torch.float32 or torch.float64"
        raise InputError("arithmetic", dtype, allowed)
    return dtype


def state_shape(heads: int, value_dim: int, key_dim: int, key_heads: int | None) -> StateShape:
    """The shape of a layer's state; key_heads None means one a head."""
    groups = heads if key_heads is None else key_heads
    if not is_integer(groups) or groups < 1 or heads % groups:
        raise InputError("key_heads", groups, f"a divisor of heads = {heads}")
    return StateShape(heads, value_dim, key_dim, groups)


def whole_shape(shape: object) -> None:
    """InputError unless ``shape`` is a StateShape of integers above zero, its key heads a divisor of the heads."""
    if not isinstance(shape, StateShape) or not all(is_integer(n) and n > 0 for n in vars(shape).values()):
        raise InputError("shape", shape, "a StateShape of integers above zero")
    state_shape(shape.heads, shape.value_dim, shape.key_dim, shape.key_heads)


def initial(value: object) -> tuple[int, int, int, int]:
    """(batch, heads, value_dim, key_dim) of a prefill state."""
    tensor("initial", value, None, "shape (batch, heads, value_dim, key_dim)")
    assert isinstance(value, Tensor)
    if value.ndim != 4 or 0 in value.shape[1:]:
        expected = "shape (batch, heads, value_dim, key_dim) above zero"
        raise InputError("initial", tuple(value.shape), expected)
    batch, heads, value_dim, key_dim = value.shape
    return batch, heads, value_dim, key_dim


def head_numbers(value: object, count: int) -> tuple[int, ...]:
    """Numbers in their layer of ``count`` heads: ascending, so that heads of one key head stay side by side."""
    numbers = list(value) if isinstance(value, list | tuple) else []
    plain = len(numbers) == count and all(is_integer(n) and n >= 0 for n in numbers)
    if not plain or numbers != sorted(set(numbers)):
        raise InputError("heads", value, f"{count} head numbers that go up")
    return tuple(numbers)


def options(
    family: str,
    shape: StateShape,
    rates: object,
    seed: int,
    layer: int,
    drafts: int,
    device: torch.device,
) -> None:
    """InputError for what a decode state of ``family`` cannot be made with."""
    for name, value in (("seed", seed), ("layer", layer)):
        if not is_integer(value):
            raise InputError(name, value, "an integer")
    if not is_integer(drafts) or not 0 <= drafts <= MAXIMUM_WINDOW:
        raise InputError("drafts", drafts, f"an integer from 0 to {MAXIMUM_WINDOW}")
    expected = (shape.heads, shape.value_dim, shape.key_dim)
    if get_recurrence(family).needs_rates:
        tensor("rates", rates, expected, f"shape {expected}", device)
    elif rates is not None:
        raise InputError("rates", describe(rates), f"None: {family} has no rates")


def step_inputs(inputs: object) -> None:
    """InputError unless ``inputs`` are StepInputs."""
    if not isinstance(inputs, StepInputs):
        raise InputError("inputs", type(inputs).__name__, "StepInputs")


def token_count(inputs: StepInputs) -> int:
    """T of tokens (batch, T, heads, value_dim)."""
    step_inputs(inputs)
    if not isinstance(inputs.v, Tensor) or inputs.v.ndim != 4:
        raise InputError("v", describe(inputs.v), "shape (batch, tokens, heads, value_dim)")
    return inputs.v.shape[1]


def tokens(
    inputs: StepInputs,
    recurrence: Recurrence,
    shape: StateShape,
    batch: int,
    count: int | None,
    device: torch.device,
) -> None:
    """InputError unless ``inputs`` are one token of ``batch`` rows, or ``count`` tokens if that is given."""
    step_inputs(inputs)
    lead = (batch,) if count is None else (batch, count)
    expected: dict[str, tuple[int, ...]] = {
        "q": (*lead, shape.key_heads, shape.key_dim),
        "k": (*lead, shape.key_heads, shape.key_dim),
        "v": (*lead, shape.heads, shape.value_dim),
        "log_decay": (*lead, *recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim)),
    }
    if recurrence.delta_rule:
        expected["beta"] = (*lead, shape.heads)
    for name, wanted in expected.items():
        tensor(name, getattr(inputs, name), wanted, f"shape {wanted}", device)


def lengths(value: object, batch: int, count: int, device: torch.device = CPU) -> Tensor:
    """Tokens of each row that count: int64 (batch,), each from 0 to ``count``; all of them by default."""
    whole = torch.full((batch,), count, device=device)
    return whole if value is None else _numbers("lengths", value, batch, whole, lambda row: f"row {row}")


def counts(
    value: object, limits: Tensor, place: Callable[[int], str], what: str = "drafts pending"
) -> Tensor:
    """Tokens of each row, accepted drafts unless ``what`` says otherwise: int64, each from 0 to its limit."""
    return _numbers("counts", value, len(limits), limits, place, what)


def _numbers(
    name: str, value: object, batch: int, limits: Tensor, place: Callable[[int], str], what: str = "tokens"
) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32) or value.ndim != 1:
        raise InputError(name, describe(value), f"int64 or int32 of shape ({batch},)")
    if len(value) != batch:
        raise InputError(name, tuple(value.shape), f"shape ({batch},): one number a row")
    value = value.to(limits.device, torch.int64)
    wrong = (value < 0) | (value > limits)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise InputError(name, f"{int(value[row])} at {place(row)}", f"0 to {int(limits[row])} {what}")
    return value
