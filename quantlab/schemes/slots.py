"""Slots: the decode states of many sequences in one pool, as a serving engine keeps them."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from quantlab.errors import InputError, unknown_name
from quantlab.recurrences import StepInputs
from quantlab.schemes import checks
from quantlab.schemes.layers import LayerState, start_layer
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.rows import DRAFTS
from quantlab.schemes.rules import PolicyRules

NULL_ROWS = {"negative": 0, "zero": 1}
"""First slot number that is not null: of a padded batch, rows below it belong to nobody."""

Slots = Sequence[int] | Tensor


class SlotPool:
    """A fixed number of slots, each free or held by one sequence of one layer, all under one policy, or under what
    rules say of ``layer``.

    The cursor, the store number and the sequence id belong to the slot and start over when it is allocated; they are
    never derived from token counts.  A forward names one slot for each row of its batch; rows with a null slot number
    (negative, or with ``null="zero"`` also 0, which is then reserved) are padding: whatever they hold is not looked at,
    and their output is zero.

    Errors are raised before anything is changed, so the pool stays usable.
    """

    def __init__(
        self,
        policy: str | Path | Policy | PolicyRules,
        family: str,
        shape: StateShape,
        slots: int,
        *,
        rates: Tensor | None = None,
        seed: int = 0,
        layer: int = 0,
        null: str = "negative",
        drafts: int = DRAFTS,
        arithmetic: torch.dtype | None = None,
    ):
        checks.whole_shape(shape)
        if not isinstance(null, str) or null not in NULL_ROWS:
            raise unknown_name("null", null, NULL_ROWS)
        self.first = NULL_ROWS[null]
        if not checks.is_integer(slots) or slots <= self.first:
            raise InputError("slots", slots, f"an integer above {self.first}")
        self._state = start_layer(
            policy,
            family,
            _zero_states(slots, shape),
            key_heads=shape.key_heads,
            rates=rates,
            seed=seed,
            layer=layer,
            drafts=drafts,
            arithmetic=arithmetic,
        )
        self._state.row_name = "slot"
        self._held = torch.zeros(slots, dtype=torch.bool)
        self._next_id = 0

    @property
    def slots(self) -> int:
        return len(self._held)

    @property
    def free_slots(self) -> list[int]:
        """Numbers of the slots that ``allocate`` can give."""
        return [n for n in (~self._held).nonzero()[:, 0].tolist() if n >= self.first]

    def allocate(self, initial: Tensor | None = None, sequence_id: int | None = None) -> int:
        """A free slot for a new sequence; it starts from ``initial`` (heads, value_dim, key_dim), zeros by default.

        sequence_id: names its random bits; by default one that this pool has not given yet.
        """
        slot = self._free_slots(1)[0]
        shape = self._state.shape
        full = (shape.heads, shape.value_dim, shape.key_dim)
        if initial is None:
            initial = torch.zeros(full)
        checks.tensor("initial", initial, full, f"shape {full}")
        self._begin(slot, initial, sequence_id)
        self._held[slot] = True
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; drafts and records in it are gone."""
        rows = self._rows([slot])
        self._state.discard(rows)
        self._held[rows] = False

    def copy(self, source: int, target: int) -> None:
        """Make a held slot what another one is, bit for bit."""
        rows = self._rows([source, target])
        self._place(rows[1:], self._taken(rows[:1]))

    def fork(self, slot: int, count: int = 1, sequence_ids: Sequence[int] | None = None) -> list[int]:
        """``count`` further slots with what ``slot`` holds.

        sequence_ids: of the forks; by default they keep the one they come from, and draw its random bits.
        """
        rows = self._rows([slot])
        if not checks.is_integer(count) or count < 1:
            raise InputError("count", count, "an integer of at least 1")
        ids = None if sequence_ids is None else checks.sequence_ids(sequence_ids, count)
        targets = self._free_slots(count)
        for number, target in enumerate(targets):
            self._place(torch.tensor([target]), self._taken(rows))
            if ids is not None:
                self._state.rename(torch.tensor([target]), ids[number : number + 1])
            self._held[target] = True
        return targets

    def select(self, slots: Slots, sources: Slots) -> None:
        """Make each of ``slots`` what the slot of the same place in ``sources`` was (which may repeat)."""
        rows, origins = self._rows(slots), self._rows(sources, distinct=False)
        if len(rows) != len(origins):
            raise InputError("sources", origins.tolist(), f"{len(rows)} slots")
        if len(rows) == 0:
            return
        distinct, places = origins.unique(return_inverse=True)
        taken = self._taken(distinct)
        taken.select(places)
        self._place(rows, taken)

    def reset(self, slot: int, initial: Tensor | None = None, sequence_id: int | None = None) -> None:
        """Start a new sequence in a held slot, as ``free`` and ``allocate`` of the same slot would."""
        self._rows([slot])
        shape = self._state.shape
        full = (shape.heads, shape.value_dim, shape.key_dim)
        initial = torch.zeros(full) if initial is None else initial
        checks.tensor("initial", initial, full, f"shape {full}")
        self._begin(slot, initial, sequence_id)

    def snapshot(self, slot: int) -> dict[str, Tensor]:
        """The prefix of a slot: its window is folded and stored, then the stored bits are copied out.

        Only a flush makes a snapshot that any engine can share: it holds no records.
        """
        rows = self._rows([slot])
        self._state.flush(rows)
        return self._state.save(rows)

    def preempt(self, slot: int) -> dict[str, Tensor]:
        """The slot's bits, records and cursor included, as tensors; the slot is free afterwards."""
        rows = self._rows([slot])
        saved = self._state.save(rows)
        self.free(slot)
        return saved

    def restore(self, saved: dict[str, Tensor]) -> int:
        """A free slot that holds what ``preempt`` or ``snapshot`` returned; it continues bit for bit."""
        state = self._restored(saved)
        slot = self._free_slots(1)[0]
        self._place(torch.tensor([slot]), state)
        self._held[slot] = True
        return slot

    def step(self, inputs: StepInputs, slots: Slots) -> Tensor:
        """One token for each slot: inputs with a row for each, output (n, heads, value_dim)."""
        return self._forward(slots, inputs, lambda tokens, rows, _: self._state.step(tokens, rows))

    def verify(self, tokens: StepInputs, slots: Slots, lengths: Tensor | None = None) -> Tensor:
        """``DecodeState.verify`` for each slot: (n, T, heads, value_dim)."""
        return self._forward(slots, tokens, self._state.verify, lengths)

    def extend(self, tokens: StepInputs, slots: Slots, lengths: Tensor | None = None) -> Tensor:
        """``DecodeState.extend`` for each slot: (n, T, heads, value_dim)."""
        return self._forward(slots, tokens, self._state.extend, lengths)

    def commit(self, counts: Tensor, slots: Slots) -> None:
        """``DecodeState.commit`` for each slot; counts of null rows are not looked at."""
        live, rows = self._live(slots)
        if not isinstance(counts, Tensor) or counts.ndim != 1 or len(counts) != len(live):
            raise InputError("counts", checks.describe(counts), f"one number for each of {len(live)} rows")
        self._state.commit(counts[live], rows)

    def flush(self, slots: Slots) -> None:
        """``DecodeState.flush`` for each slot."""
        self._state.flush(self._live(slots)[1])

    def materialize(self, slot: int) -> Tensor:
        """The dense logical state of a slot: (heads, value_dim, key_dim)."""
        return self._state.materialize(self._rows([slot]))[0]

    def cursor(self, slot: int) -> int:
        """Records in the window of a slot."""
        return int(self._state.cursor[self._rows([slot])])

    def pending(self, slot: int) -> int:
        """Drafts of a slot that wait for ``commit``."""
        return int(self._state.pending[self._rows([slot])])

    def _forward(
        self,
        slots: Slots,
        inputs: StepInputs,
        forward: Callable[[StepInputs, Tensor, Tensor | None], Tensor],
        lengths: Tensor | None = None,
    ) -> Tensor:
        live, rows = self._live(slots)
        checks.step_inputs(inputs)
        given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        for name, value in given.items():
            # Of the others the state says what shape they need; here they must have rows to pick from.
            least = 3 if name == "v" else 1
            plain = isinstance(value, Tensor) and value.ndim >= least and len(value) == len(live)
            if not plain and not (name == "beta" and value is None):
                expected = f"a tensor with one row for each of {len(live)} slots"
                raise InputError(name, checks.describe(value), expected)
        if lengths is not None:
            if not isinstance(lengths, Tensor) or lengths.ndim != 1 or len(lengths) != len(live):
                given = checks.describe(lengths)
                raise InputError("lengths", given, f"one number for each of {len(live)} rows")
            lengths = lengths[live]
        outputs = torch.zeros(inputs.v.shape, dtype=self._state.dtype)
        if len(rows):
            outputs[live] = forward(inputs.map(lambda t: t[live]), rows, lengths)
        return outputs

    def _live(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Which rows are not null (bool), and the slots of those."""
        numbers = self._numbers(slots)
        live = numbers >= self.first
        return live, self._rows(numbers[live])

    def _numbers(self, slots: Slots) -> Tensor:
        if isinstance(slots, Tensor):
            numbers = slots
        elif isinstance(slots, Sequence) and all(checks.is_integer(n) and abs(n) < 2**63 for n in slots):
            numbers = torch.tensor(list(slots), dtype=torch.int64)
        else:
            raise InputError("slots", slots, "integers")
        if numbers.dtype not in (torch.int64, torch.int32) or numbers.ndim != 1:
            raise InputError("slots", checks.describe(numbers), "int64 or int32 of shape (n,)")
        return numbers.cpu().to(torch.int64)

    def _rows(self, slots: Slots, *, distinct: bool = True) -> Tensor:
        """Held slots as row numbers."""
        numbers = self._numbers(slots)
        named = numbers.tolist()
        for slot in named:
            if not self.first <= slot < self.slots:
                raise InputError("slot", slot, f"a slot from {self.first} to {self.slots - 1}")
            if not self._held[slot]:
                held = int(self._held.sum())
                expected = f"a slot that a sequence holds ({held} of {self.slots - self.first} are held)"
                raise InputError("slot", f"{slot}, which is free", expected)
        if distinct and len(set(named)) != len(named):
            raise InputError("slots", named, "each slot at most once")
        return numbers

    def _free_slots(self, count: int) -> list[int]:
        free = self.free_slots
        if len(free) < count:
            total = self.slots - self.first
            raise InputError("slots", f"{len(free)} of {total} free", f"{count} free: free or preempt some")
        return free[:count]

    def _taken(self, rows: Tensor) -> LayerState:
        """A decode state of its own with what ``rows`` hold."""
        return self._restored(self._state.save(rows))

    def _restored(self, saved: dict[str, Tensor]) -> LayerState:
        """A state of the pool's kind."""
        return type(self._state).restore(saved)

    def _place(self, rows: Tensor, state: LayerState) -> None:
        self._state.place(rows, state)  # pyright: ignore[reportArgumentType]

    def _begin(self, slot: int, initial: Tensor, sequence_id: int | None) -> None:
        """Hand a prefill state to a slot; a sequence without a name gets the next one of this pool."""
        names = [self._next_id if sequence_id is None else sequence_id]
        self._state.reset(torch.tensor([slot]), initial[None], checks.sequence_ids(names, 1))
        if sequence_id is None:
            self._next_id += 1


def _zero_states(slots: int, shape: StateShape) -> Tensor:
    """Zeros (slots, heads, value_dim, key_dim); InputError if no memory of this machine could hold them."""
    try:
        return torch.zeros(slots, shape.heads, shape.value_dim, shape.key_dim)
    except (RuntimeError, OverflowError, TypeError) as error:
        gib = slots * shape.heads * shape.value_dim * shape.key_dim * 4 / 2**30
        raise InputError(
            "slots", slots, f"a number that fits in memory; a pool of it begins at {gib:.3g} GiB"
        ) from error
