"""What the decode kernels accept, looked at on the host before any launch and without waiting for the device.

The numbers in device memory cannot be looked at so: a slot number that no slot has is skipped like padding, and that
each slot stands at most once in a batch, and that no drafts of it wait for a commit when tokens are read, is the
caller's promise.  On the CPU, where the interpreter runs, they are.
"""

import functools
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import target
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.schemes.checks import is_integer
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import MAXIMUM_WINDOW
from quantlab.schemes.pool import LayerPool, SlotCounters, allocate_pool
from quantlab.schemes.steps import StepPlan, check_numbers

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)

Plan = TypeVar("Plan", StepPlan, CommitPlan)

_checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Pools, counters and plans that passed, by identity: their tensors do not change any more."""


def counters(given: object) -> SlotCounters:
    """InputError unless ``given`` are counters that kernels can work on."""
    if not isinstance(given, SlotCounters):
        raise InputError("counters", type(given).__name__, "SlotCounters")
    if _checked.get(id(given)) is given:
        return given
    if not isinstance(given.cursor, Tensor) or given.cursor.ndim != 1:
        raise InputError("counters.cursor", described(given.cursor), "int32 of shape (slots,)")
    device, slots = given.cursor.device, tuple(given.cursor.shape)
    for name in ("cursor", "origin", "pending"):
        tensor(f"counters.{name}", getattr(given, name), (torch.int32,), slots, device)
    for name in ("store_numbers", "sequence_ids"):
        tensor(f"counters.{name}", getattr(given, name), (torch.int64,), slots, device)
    tensor("counters.seed", given.seed, (torch.int64,), (1,), device)
    runs_here("counters", device)
    _checked[id(given)] = given
    return given


def pool(given: object) -> LayerPool:
    """InputError unless ``given`` is a layer's memory that kernels can work on."""
    if not isinstance(given, LayerPool):
        raise InputError("pool", type(given).__name__, "a LayerPool")
    if _checked.get(id(given)) is given:
        return given
    shared, wanted = counters(given.counters), vars(_layout(given))
    for name, expected in wanted.items():
        value = getattr(given, name)
        if isinstance(expected, Tensor):
            sizes = (shared.slots, *expected.shape[1:])
            tensor(f"pool.{name}", value, (expected.dtype,), sizes, shared.cursor.device)
        elif expected is None and value is not None:
            raise InputError(f"pool.{name}", described(value), f"None under {given.policy}")
    if given.copy_codes is not None and given.copy_codes.data_ptr() % 4:
        value = f"{described(given.copy_codes)} at offset {given.copy_codes.storage_offset()}"
        raise InputError("pool.copy_codes", value, "memory that starts at a multiple of 4 bytes")
    _checked[id(given)] = given
    return given


def _layout(mine: LayerPool) -> LayerPool:
    """A pool of the same policy and shape as it should be, without memory."""
    least, ring = mine.policy.window - 1, mine.k_buffer
    if ring is not None and (not isinstance(ring, Tensor) or ring.ndim != 4):
        raise InputError("pool.k_buffer", described(ring), "a tensor of 4 dimensions, the third of records")
    if mine.records < least:
        value = f"{mine.records} ring positions"
        raise InputError("pool.k_buffer", value, f"at least {least} for the window of {mine.policy}")
    drafts = mine.records - least if mine.records else 0
    return allocate_pool(mine.policy, mine.family, mine.shape, 1, drafts=drafts, device="meta")[0]


def slots(given: object, shared: SlotCounters) -> Tensor:
    """InputError unless ``given`` are slot numbers int32 (B,)."""
    if not isinstance(given, Tensor) or given.ndim != 1:
        raise InputError("slots", described(given), "int32 of shape (B,)")
    tensor("slots", given, (torch.int32,), (given.shape[0],), shared.cursor.device)
    if given.device.type == "cpu":
        check_numbers(shared, given)
    return given


def window(given: object) -> int:
    """InputError unless ``given`` is a window."""
    if not is_integer(given) or not 1 <= given <= MAXIMUM_WINDOW:  # type: ignore[operator]
        raise InputError("window", given, f"an integer from 1 to {MAXIMUM_WINDOW}")
    return given  # type: ignore[return-value]


def plan(given: object, mine: LayerPool, kind: type[Plan]) -> Plan:
    """InputError unless ``given`` is a plan, of a kind, of the pool's counters and window."""
    given = planned(given, kind)
    if given.counters is not mine.counters:
        raise InputError("plan", "of other counters", "a plan of the pool's own counters, pool.counters")
    if given.window != mine.policy.window:
        value = f"for a window of {given.window}"
        raise InputError("plan", value, f"a plan for the window of {mine.policy}, {mine.policy.window}")
    return given


def planned(given: object, kind: type[Plan]) -> Plan:
    """InputError unless ``given`` is a plan of a kind."""
    if not isinstance(given, kind):
        maker = "begin_step" if kind is StepPlan else "begin_commit"
        raise InputError("plan", type(given).__name__, f"what {maker} returned")
    if _checked.get(id(given)) is given:
        return given
    device = counters(given.counters).cursor.device
    window(given.window)
    batch = given.slots.shape[:1] if isinstance(given.slots, Tensor) else ()
    for name, value in vars(given).items():
        if name not in ("counters", "window"):
            sizes = (1,) if name == "flush_count" else tuple(batch)
            tensor(f"plan.{name}", value, (torch.int32,), sizes, device)
    _checked[id(given)] = given
    return given


def none_wait(given: StepPlan, operation: str) -> None:
    """InputError if drafts of a slot of the plan wait for a commit; looked at on the CPU alone."""
    pending = given.counters.pending
    if pending.device.type != "cpu":
        return
    inside = given.slots[(given.slots >= 0) & (given.slots < len(pending))]
    for slot in inside[pending[inside.long()] > 0].tolist():
        value = f"{operation} with {int(pending[slot])} drafts pending in slot {slot}"
        raise InputError("operation", value, "a commit first, of none of them at least")


def counts(given: object, slots: Tensor) -> Tensor:
    """InputError unless ``given`` are int32 (B,), one a row of ``slots``."""
    tensor("counts", given, (torch.int32,), tuple(slots.shape), slots.device)
    return given  # type: ignore[return-value]


def token(given: object, mine: LayerPool, batch: int) -> StepInputs:
    """InputError unless ``given`` is one token of ``batch`` rows, in memory that kernels can read."""
    return _inputs("inputs", given, mine, (batch,))


def drafts(given: object, mine: LayerPool, batch: int, most: int) -> StepInputs:
    """InputError unless ``given`` are 1 to ``most`` drafts of ``batch`` rows, in memory that kernels can read."""
    if not isinstance(given, StepInputs):
        raise InputError("tokens", type(given).__name__, "StepInputs")
    if not isinstance(given.v, Tensor):
        raise InputError("tokens.v", described(given.v), "a tensor of shape (B, T, heads, value_dim)")
    count = given.v.shape[1] if given.v.ndim == 4 else 1
    if not 1 <= count <= most:
        expected = f"1 to {most}, which the pool has room for and which complete one window at most"
        raise InputError("tokens", f"{count} drafted tokens", expected)
    return _inputs("tokens", given, mine, (batch, count))


def _inputs(argument: str, given: object, mine: LayerPool, lead: tuple[int, ...]) -> StepInputs:
    if not isinstance(given, StepInputs):
        raise InputError(argument, type(given).__name__, "StepInputs")
    for name, sizes in _token_shapes(mine.family, mine.shape).items():
        tensor(f"{argument}.{name}", getattr(given, name), FLOATS, (*lead, *sizes), mine.device)
    return given


@functools.cache
def _token_shapes(family: str, shape: StateShape) -> dict[str, tuple[int, ...]]:
    """Shapes of one row's token."""
    recurrence, keys = get_recurrence(family), (shape.key_heads, shape.key_dim)
    found: dict[str, tuple[int, ...]] = {"q": keys, "k": keys, "v": (shape.heads, shape.value_dim)}
    found["log_decay"] = recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim)
    if recurrence.delta_rule:
        found["beta"] = (shape.heads,)
    return found


def output(given: Tensor | None, mine: LayerPool, inputs: StepInputs) -> Tensor:
    """``given``, or zeros in the dtype of ``inputs.v``; InputError unless kernels can write to it."""
    if given is None:
        return torch.zeros_like(inputs.v)
    tensor("output", given, FLOATS, tuple(inputs.v.shape), mine.device)
    return given


def prefill(given: object, numbers: object, mine: LayerPool) -> tuple[Tensor, Tensor]:
    """Slots (n,) and prefill states (n, heads, value_dim, key_dim); InputError unless kernels can read them."""
    shape = mine.shape
    if not isinstance(numbers, Tensor) or numbers.ndim != 1:
        raise InputError("slots", described(numbers), "int32 or int64 of shape (n,)")
    count = numbers.shape[0]
    tensor("slots", numbers, INTEGERS, (count,), mine.device)
    tensor("initial", given, FLOATS, (count, shape.heads, shape.value_dim, shape.key_dim), mine.device)
    if numbers.device.type == "cpu":
        check_numbers(mine.counters, numbers)
    assert isinstance(given, Tensor)
    return numbers, given


def tensor(
    name: str, given: Any, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...], device: torch.device
) -> None:
    """InputError unless ``given`` is a contiguous tensor of one of the dtypes, of ``sizes``, on ``device``."""
    fits = isinstance(given, Tensor) and given.layout == torch.strided
    if fits and given.dtype in dtypes and given.shape == sizes:
        if given.device != device:
            value = f"{described(given)} on {given.device}"
            raise InputError(name, value, f"a tensor on {device} like the slots")
        if not given.is_contiguous():
            value = f"{described(given)} with strides {given.stride()}"
            raise InputError(name, value, "a contiguous tensor")
        return
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise InputError(name, described(given), f"{kinds} of shape {sizes}")


def runs_here(name: str, device: torch.device) -> None:
    """InputError unless kernels run on ``device``."""
    if reason := target.obstacle(device):
        raise InputError(name, f"tensors on {device}", f"a device that runs kernels: {reason}")


def described(value: object) -> object:
    """A tensor by dtype and shape, anything else by its type."""
    if not isinstance(value, Tensor):
        return None if value is None else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
