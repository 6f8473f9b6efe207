"""Layers of one cache that share the counters of their slots: what they do together, each in its turn.

A forward passes the layers one after another, and a token is over for the counters (``end_step``) when the last one is
through.  So an operation is opened by the first layer that asks for it, joined by the others, and closed by the last;
nobody but the layers themselves says when.  A step goes through the layers in the order in which the prompt did.  A
layer that comes twice, or out of turn, means that a forward was left in the middle: an error, as the layers are then
at different tokens.

Nothing in a step waits for the device: which operation is open, and which layers it has passed, is known on the host,
everything else is in device memory.  So a step can be captured in a CUDA graph, one forward at a time.
"""

import contextlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.recurrences import StepInputs
from quantlab.schemes import checks
from quantlab.schemes.backend import choose
from quantlab.schemes.drafts import CommitPlan
from quantlab.schemes.pool import LayerPool, SlotCounters, new_counters
from quantlab.schemes.pool_rows import (
    copy_counters,
    copy_slots,
    put_state,
    state_of,
    store_dense,
    taken_counters,
    taken_slots,
    with_room,
)
from quantlab.schemes.rules import number_text

Key: TypeAlias = tuple[int, int]
"""Of a pool in its group: layer number, and which of the layer's head groups."""

IN_TURN = ("step", "verify")
"""Operations of a forward, which passes the layers in the order of the prompt."""
_AFTER_DRAFTS = ("step", "verify", "store", "extend")
"""Operations that need to know first which drafts are accepted."""


@dataclass
class Operation:
    """What the layers are doing: its name, what all must ask for alike, what it works with, and who is through."""

    name: str
    argument: Any
    plan: Any = None
    done: set[Key] = field(default_factory=set)


class LayerGroup:
    """Pools of one window on one device, and their shared counters.  A row of the batch is the slot of its number.

    drafts: tokens that one ``verify`` may take.  ``room``: for how many the rings have room now; kernels of a step want
    none, so there is room only while drafts are read.  ``unread_copies``: int64 (batch,), stores of each sequence whose
    read copies were replaced before a token read them.
    """

    def __init__(self, window: int, sequence_ids: Tensor, seed: int, drafts: int):
        self.window, self.drafts, self.room = window, drafts, 0
        self.counters = new_counters(sequence_ids, seed)
        self.slots = _numbers(self.counters)
        self.unread_copies = torch.zeros_like(sequence_ids)
        self.pools: dict[Key, LayerPool] = {}
        self._decode: dict[Key, Callable[..., Tensor]] = {}
        self._commit_tokens: dict[Key, Callable[[LayerPool, CommitPlan], None]] = {}
        self._open: Operation | None = None
        self._waiting = False
        self._told: set[Key] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerGroup":
        copy = memo[id(self)] = object.__new__(LayerGroup)
        with torch.inference_mode(
            False
        ):  # memory that was made in inference mode could not be written outside of it
            vars(copy).update(deepcopy(vars(self), memo))
        return copy

    @property
    def device(self) -> torch.device:
        return self.slots.device

    def add(self, key: Key, pool: LayerPool, initial: Tensor) -> None:
        """One more layer, whose prefill ended in ``initial`` (batch, heads, value_dim, key_dim)."""
        load = self._function("steps.load_states", pool.policy, pool.family, pool.shape)
        load(pool, self.slots, initial.contiguous())
        self._decode[key] = self._function("steps.decode_token", pool.policy, pool.family, pool.shape)
        self.pools[key] = pool

    # -- tokens
    def step(self, key: Key, inputs: StepInputs) -> Tensor:
        """Decode one token in one layer."""
        with self._operation(key, "step") as operation:
            return self._decode[key](self.pools[key], inputs.map(Tensor.contiguous), operation.plan)

    def verify(self, key: Key, tokens: StepInputs) -> Tensor:
        """Read drafts in one layer; they wait for ``commit`` or ``take_back``."""
        count = checks.token_count(tokens)
        with self._operation(key, "verify", count) as operation:
            pool = self.pools[key]
            work = pool.policy, pool.family, pool.shape, count
            self._commit_tokens[key] = self._function("drafts.commit_tokens", *work)
            verify = self._function("drafts.verify_tokens", *work)
            return verify(pool, tokens.map(Tensor.contiguous), operation.plan)

    def commit(self, key: Key, counts: Tensor) -> None:
        """Accept the first ``counts[i]`` drafts of each row, in all layers at once.

        The first layer goes on with its next token before the second one is asked, so the others find it done.
        """
        self.observe(key)
        if key in self._told:
            self._told.discard(key)
            return
        self._refuse_open(key)
        if self._waiting:
            self._commit(counts)
            self._told = set(self.pools) - {key}

    def take_back(self, key: Key, counts: Tensor) -> None:
        """Undo the newest ``counts[i]`` tokens of each row, drafts first; those left over are accepted."""
        reach = self.reach(key).cpu()
        counts = checks.counts(counts, reach, lambda row: f"row {row}", "tokens since the last flush")
        with self._operation(key, "take_back", tuple(counts.tolist())) as operation:
            operation.plan = counts.int()

    def store(self, key: Key, dense: Tensor) -> None:
        """Store what a chunk of a prompt left on top of ``materialize``."""
        with self._operation(key, "store"):
            store_dense(self.pools[key], self.slots.long(), dense)

    def extend(self, key: Key, tokens: StepInputs) -> Tensor:
        """A chunk of a prompt, on the CPU: outputs (batch, T, heads, value_dim)."""
        with self._operation(key, "extend"):
            pool, slots = self.pools[key], self.slots.long()
            state = state_of(pool, slots)
            outputs = state.extend(tokens.map(Tensor.cpu))
            put_state(pool, slots, state, counters=False, records=False)
            return outputs.to(self.device)

    # -- rows
    def select(self, key: Key, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``, in place or, if there are more or fewer of them, in other memory."""
        if rows.device.type == "cpu":  # on a device nobody looks at them
            rows = checks.rows(rows, self.counters.slots)
        with self._operation(key, "select", len(rows)) as operation:
            if operation.plan is None:
                rows = rows.to(self.device, torch.int64)
                with torch.inference_mode(False):
                    other = None if len(rows) == len(self.slots) else taken_counters(self.counters, rows)
                operation.plan = rows, other
            rows, other = operation.plan
            if other is None:
                copy_slots([self.pools[key]], rows, self.slots.long(), counters=False)
            else:
                with torch.inference_mode(False):
                    self.pools[key] = taken_slots(self.pools[key], rows, other)

    def reset(self, key: Key, rows: Tensor, initial: Tensor, sequence_ids: Tensor | None) -> None:
        """Hand prefill states to ``rows``: window empty, store number 0, and other names if there are any."""
        rows = checks.rows(rows, self.counters.slots, distinct=True)
        ids = None if sequence_ids is None else checks.sequence_ids(sequence_ids, len(rows))
        argument = tuple(rows.tolist()), None if ids is None else tuple(ids.tolist())
        with self._operation(key, "reset", argument) as operation:
            operation.plan = rows = rows.to(self.device)
            if ids is not None:
                self.counters.sequence_ids[rows] = ids.to(self.device)
            pool = self.pools[key]
            load = self._function("steps.load_states", pool.policy, pool.family, pool.shape)
            load(pool, rows.int(), initial.to(self.device).contiguous())

    def observe(self, key: Key) -> None:
        """Let the counters say where the layer stands; InputError if the layers stand at different tokens."""
        operation = self._open
        if operation is None or key not in operation.done:
            return
        if operation.name != "verify" or len(operation.done) < len(self.pools):
            raise self._broken(operation, key)
        self._close(operation)

    def reach(self, key: Key) -> Tensor:
        """Newest tokens of each row that ``take_back`` can undo (batch,)."""
        self.observe(key)
        return (self.counters.cursor + self.counters.pending).long()

    @contextlib.contextmanager
    def _operation(self, key: Key, name: str, argument: Any = None) -> Iterator[Operation]:
        operation = self._joined(key, name, argument)
        try:
            yield operation
        except BaseException:
            if not operation.done:  # nothing has happened
                self._open = None
            raise
        operation.done.add(key)
        # A prompt whose last tokens are drafts brings its layers in one after another: only the next operation knows
        # that there are no more of them.
        if len(operation.done) == len(self.pools) and name != "verify":
            self._close(operation)

    def _joined(self, key: Key, name: str, argument: Any) -> Operation:
        operation = self._open
        if (
            operation is None
            or key in operation.done
            or (operation.name, operation.argument) != (name, argument)
        ):
            self.observe(key)
            self._refuse_open(key)
            if self._waiting and name in _AFTER_DRAFTS:
                raise InputError("operation", f"{name} with drafts pending at layer {key[0]}", "commit first")
            operation = Operation(name, argument)
        if name in IN_TURN and key != list(self.pools)[len(operation.done)]:
            raise self._broken(operation, key)
        if self._open is None:
            self._begin(operation)
            self._open = operation
        return operation

    def _begin(self, operation: Operation) -> None:
        if operation.name not in IN_TURN:
            return
        wanted = operation.argument or 0
        if wanted > self.drafts:
            raise InputError(
                "tokens", f"{wanted} drafted tokens", f"1 to {self.drafts}: what there is room for"
            )
        if wanted > self.room or (self.room and not wanted):
            self._make_room(self.drafts if wanted else 0)
        begin = self._function("steps.begin_step")
        operation.plan = begin(self.counters, self.slots, self.window)

    def _close(self, operation: Operation) -> None:
        self._open = None
        counters, plan = self.counters, operation.plan
        match operation.name:
            case "step":
                self._function("steps.end_step")(plan)
            case "verify":
                self._function("drafts.end_verify")(plan, operation.argument)
                self._waiting = True
            case "take_back":
                counts = plan.to(self.device)
                counters.cursor.sub_((counts - counters.pending).clamp(min=0))
                if self._waiting:
                    self._commit((counters.pending - counts).clamp(min=0))
            case "store" | "extend":
                self.unread_copies += counters.cursor == 0
                counters.cursor.zero_()
                counters.origin.zero_()
                counters.store_numbers.add_(1)
            case "reset":
                self.unread_copies[plan] = 0
            case "select":
                self._selected(*plan)

    def _selected(self, rows: Tensor, other: SlotCounters | None) -> None:
        if other is None:
            copy_counters(self.counters, rows, self.slots.long())
            self.unread_copies.copy_(self.unread_copies[rows])
            return
        self.counters = other
        with torch.inference_mode(False):
            self.slots, self.unread_copies = _numbers(other), self.unread_copies[rows]

    def _commit(self, counts: Tensor) -> None:
        begin, end = self._function("drafts.begin_commit"), self._function("drafts.end_commit")
        plan = begin(self.counters, self.slots, counts.to(self.device, torch.int32), self.window)
        # Of several windows that are folded at once, only the last one's read copy will be read.
        stores = (self.counters.cursor + plan.counts) // self.window
        self.unread_copies += (stores - 1).clamp(min=0)
        for key, pool in self.pools.items():
            self._commit_tokens[key](pool, plan)
        end(plan)
        self._waiting = False

    def _make_room(self, drafts: int) -> None:
        with torch.inference_mode(False):
            self.pools = {key: with_room(pool, drafts) for key, pool in self.pools.items()}
        self.counters.origin.zero_()
        self.room = drafts

    def _function(self, name: str, *work: Any) -> Callable[..., Any]:
        return choose(name, self.device, *work).function

    def _refuse_open(self, key: Key) -> None:
        if self._open is not None:
            raise self._broken(self._open, key)

    def _broken(self, operation: Operation, key: Key) -> InputError:
        missing = {layer for layer, _ in self.pools.keys() - operation.done}
        passed = {layer for layer, _ in operation.done}
        behind = f"after {operation.name} at layers {number_text(passed)}" if passed else "first"
        found = f"layer {key[0]} comes {behind}, not at layers {number_text(missing)}"
        return InputError(
            "cache",
            found,
            "every layer once a forward, in the order of the prompt: where one was passed over or an exception ended a "
            "forward, the sequences are lost; start again from a prompt",
        )


def _numbers(counters: SlotCounters) -> Tensor:
    """The slots of a batch that fills its memory: int32 (batch,)."""
    return torch.arange(counters.slots, dtype=torch.int32, device=counters.cursor.device)
