"""The naive pool: a dictionary of sequences, and what each operation is to refuse."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.schemes.property.oracle import Sequence, run
from tests.schemes.property.rules import Array, Rules, Token

Objections = list[tuple[str, ...]]
"""For every reason to refuse an operation: the words that the message must have."""


@dataclass
class NaivePool:
    rules: Rules
    slots: int
    first: int
    """Slot numbers below are null rows."""
    held: dict[int, Sequence] = field(default_factory=dict)
    next_id: int = 0

    @property
    def free_slots(self) -> list[int]:
        return [n for n in range(self.first, self.slots) if n not in self.held]

    def live(self, slots: list[int]) -> list[tuple[int, int]]:
        """(row, slot) of the rows that are not null."""
        return [(row, slot) for row, slot in enumerate(slots) if slot >= self.first]

    # -- operations
    def new_id(self, given: int | None) -> int:
        if given is not None:
            return given
        self.next_id += 1
        return self.next_id - 1

    def allocate(self, initial: Array, sequence_id: int | None) -> int:
        slot = self.free_slots[0]
        self.held[slot] = Sequence(self.rules, 0)
        self.reset(slot, initial, sequence_id)
        return slot

    def reset(self, slot: int, initial: Array, sequence_id: int | None) -> None:
        self.held[slot].sequence_id = self.new_id(sequence_id)
        run(self.rules, [self.held[slot].hand_off(initial)])

    def fork(self, slot: int, count: int, sequence_ids: list[int] | None) -> list[int]:
        targets = self.free_slots[:count]
        for number, target in enumerate(targets):
            self.held[target] = self.held[slot].clone()
            if sequence_ids is not None:
                self.held[target].sequence_id = sequence_ids[number]
        return targets

    def select(self, slots: list[int], sources: list[int]) -> None:
        taken = [self.held[source].clone() for source in sources]
        self.held |= dict(zip(slots, taken, strict=True))

    def restore(self, sequence: Sequence) -> int:
        slot = self.free_slots[0]
        self.held[slot] = sequence.clone()
        return slot

    def step(self, tokens: list[list[Token]], slots: list[int]) -> Array:
        return self.forward(tokens, slots, 1, lambda s, row: s.step(row[0]))[:, 0]

    def verify(self, tokens: list[list[Token]], slots: list[int], count: int) -> Array:
        return self.forward(tokens, slots, count, lambda s, row: s.verify(row))

    def extend(self, tokens: list[list[Token]], slots: list[int], count: int) -> Array:
        return self.forward(tokens, slots, count, lambda s, row: s.extend(row))

    def forward(self, tokens: list[list[Token]], slots: list[int], count: int, work: Callable) -> Array:
        """Outputs (n, count, heads, value_dim): zero for null rows and behind the tokens of a row."""
        rows = self.live(slots)
        found = run(self.rules, [work(self.held[slot], tokens[row]) for row, slot in rows])
        outputs = np.zeros((len(slots), count, self.rules.heads, self.rules.value_dim))
        for (row, _), output in zip(rows, found, strict=True):
            values = output if isinstance(output, list) else [output]
            outputs[row, : len(values)] = values if values else 0.0
        return outputs

    def commit(self, counts: list[int], slots: list[int]) -> None:
        run(self.rules, [self.held[slot].commit(counts[row]) for row, slot in self.live(slots)])

    def flush(self, slots: list[int]) -> None:
        run(self.rules, [self.held[slot].flush() for _, slot in self.live(slots)])

    # -- refusals
    def objections(self, name: str, arguments: dict[str, Any]) -> Objections:
        return getattr(self, f"objections_to_{name}", lambda **_: [])(**arguments)

    def at(self, slot: int) -> str:
        return f"slot {slot}, cursor {len(self.held[slot].window)}"

    def not_held(self, slots: list[int], *, distinct: bool = True) -> Objections:
        found: Objections = []
        last = self.slots - 1
        for slot in slots:
            if not self.first <= slot < self.slots:
                found.append((f"slot {slot}", f"a slot from {self.first} to {last}"))
            elif slot not in self.held:
                free = f"{len(self.held)} of {self.slots - self.first} are held"
                found.append((f"slot '{slot}, which is free'", free))
        if distinct and len(set(slots)) < len(slots):
            found.append(("slots", "each slot at most once"))
        return found

    def drafting(self, slots: list[int], operation: str) -> Objections:
        """Operations on sequences that drafts are pending in."""
        found: Objections = []
        for slot in slots:
            pending = len(self.held[slot].drafts) if slot in self.held else 0
            if pending:
                at = f"{operation} with {pending} drafts pending in {self.at(slot)}"
                found.append((at, f"commit first, of at most {pending} drafts"))
        return found

    def no_room(self, count: int) -> Objections:
        free = len(self.free_slots)
        return (
            [] if free >= count else [("slots", f"{free} of {self.slots - self.first} free", f"{count} free")]
        )

    def objections_to_allocate(self, **_: Any) -> Objections:
        return self.no_room(1)

    def objections_to_restore(self, **_: Any) -> Objections:
        return self.no_room(1)

    def objections_to_free(self, slot: int) -> Objections:
        return self.not_held([slot])

    def objections_to_reset(self, slot: int, **_: Any) -> Objections:
        return self.not_held([slot])

    def objections_to_read(self, slot: int) -> Objections:
        return self.not_held([slot])

    def objections_to_copy(self, source: int, target: int) -> Objections:
        return self.not_held([source, target]) + self.drafting([source], "save")

    def objections_to_fork(self, slot: int, count: int, **_: Any) -> Objections:
        return self.not_held([slot]) + self.no_room(count) + self.drafting([slot], "save")

    def objections_to_select(self, slots: list[int], sources: list[int]) -> Objections:
        found = self.not_held(slots) + self.not_held(sources, distinct=False)
        return found + self.drafting(sources, "save")

    def objections_to_preempt(self, slot: int) -> Objections:
        return self.not_held([slot]) + self.drafting([slot], "save")

    def objections_to_snapshot(self, slot: int) -> Objections:
        return self.not_held([slot]) + self.drafting([slot], "flush")

    def objections_to_file(self) -> Objections:
        return self.drafting(list(self.held), "save")

    def objections_to_flush(self, slots: list[int]) -> Objections:
        used = [slot for _, slot in self.live(slots)]
        return self.not_held(used) + self.drafting(used, "flush")

    def objections_to_step(self, slots: list[int], spoil: str | None = None, **_: Any) -> Objections:
        return self.forward_objections(slots, "step", spoil)

    def objections_to_extend(self, slots: list[int], spoil: str | None = None, **_: Any) -> Objections:
        return self.forward_objections(slots, "extend", spoil)

    def objections_to_verify(
        self, slots: list[int], count: int, spoil: str | None = None, **_: Any
    ) -> Objections:
        found = self.forward_objections(slots, "verify", spoil)
        if count > self.rules.most_drafts and self.live(slots):
            limit = f"1 to {self.rules.most_drafts}: what the window"
            slot = self.live(slots)[0][1]
            where = self.at(slot) if slot in self.held else "slot"
            found.append((f"{count} drafted tokens at {where}", limit))
        return found

    def forward_objections(self, slots: list[int], operation: str, spoil: str | None) -> Objections:
        used = [slot for _, slot in self.live(slots)]
        if not used:
            return []
        found = self.not_held(used) + self.drafting(used, operation)
        return found + ([(f"{spoil} '", "expected shape (")] if spoil else [])

    def objections_to_commit(self, slots: list[int], counts: list[int]) -> Objections:
        rows = self.live(slots)
        found = self.not_held([slot for _, slot in rows])
        for row, slot in rows:
            pending = len(self.held[slot].drafts) if slot in self.held else 0
            if slot in self.held and not 0 <= counts[row] <= pending:
                found.append((f"{counts[row]} at {self.at(slot)}", f"0 to {pending} drafts pending"))
        return found
