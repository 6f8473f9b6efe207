"""The decode state of a layer whose heads follow different policies: one ``DecodeState`` for each group of heads.

Heads share nothing but their keys and queries, so a head in a group holds the bits that it would hold if its policy
were that of the whole layer, those of stochastic rounding included.  (Sums over a window may run in another order
beside other heads: before the state is rounded, the last place shows it.)
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.recurrences import Recurrence, StepInputs
from quantlab.schemes import checks
from quantlab.schemes.ledger import ByteLedger, StateShape, add_ledgers, ledger
from quantlab.schemes.rules import HeadGroup, number_text
from quantlab.schemes.state import DecodeState
from quantlab.schemes.store import Diverged

SAVE_VERSION = "1 of head groups"


class HeadGroups:
    """What ``DecodeState`` is, for heads in groups; ``start_groups`` and ``start_layer`` make one.

    Inputs, outputs, states and rows are those of the whole layer.  ``cursor`` is the fullest window's, ``exercised``
    the least over the groups, ``ledger`` their sum.  ``states`` holds the decode state of each group, in the order of
    ``groups``.  What raises, Diverged in one group included, leaves every group as it was.
    """

    def __init__(self, states: Sequence[DecodeState], key_heads: int):
        first = states[0]
        self.states = tuple(states)
        self.groups = tuple(HeadGroup(state.policy, _heads_of(state)) for state in states)
        heads = [head for group in self.groups for head in group.heads]
        self.shape = StateShape(len(heads), first.shape.value_dim, first.shape.key_dim, key_heads)
        self.recurrence, self.seed, self.layer, self.drafts = (
            first.recurrence,
            first.seed,
            first.layer,
            first.drafts,
        )
        self._heads = [torch.tensor(group.heads, device=self.device) for group in self.groups]
        repeat = len(heads) // key_heads
        self._key_heads = [
            torch.tensor(key_heads_of(group.heads, repeat), device=self.device) for group in self.groups
        ]
        self._order = torch.tensor(heads, device=self.device).argsort()

    def step(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """``DecodeState.step``: the output (n, heads, value_dim)."""
        checks.tokens(inputs, self.recurrence, self.shape, self._count(rows), None, self.device)
        with self._together():
            return self._joined([state.step(i, rows) for state, i in self._split(inputs, 1)], 1)

    def verify(self, tokens: StepInputs, rows: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """``DecodeState.verify``: (n, T, heads, value_dim).  Every group must have room for T drafts."""
        count = self._checked(tokens, rows)
        for state in self.states:
            state.check_drafts(count, rows)
        with self._together():
            return self._joined([state.verify(i, rows, lengths) for state, i in self._split(tokens, 2)], 2)

    def extend(self, tokens: StepInputs, rows: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """``DecodeState.extend``: (n, T, heads, value_dim)."""
        self._checked(tokens, rows)
        with self._together():
            return self._joined([state.extend(i, rows, lengths) for state, i in self._split(tokens, 2)], 2)

    def commit(self, counts: Tensor, rows: Tensor | None = None) -> None:
        """``DecodeState.commit``."""
        with self._together():
            for state in self.states:
                state.commit(counts, rows)

    def take_back(self, counts: Tensor, rows: Tensor | None = None) -> None:
        """``DecodeState.take_back``; ``reach`` is the least over the groups."""
        rows = None if rows is None else checks.rows(rows, self.batch, distinct=True)
        reach = self.reach if rows is None else self.reach[rows]
        counts = checks.counts(
            counts, reach, lambda row: f"{self.row_name} {row}", "tokens since the last flush of a group"
        )
        with self._together():
            for state in self.states:
                state.take_back(counts, rows)

    def store(self, dense: Tensor, rows: Tensor | None = None) -> None:
        """``DecodeState.store``; dense: (n, heads, value_dim, key_dim)."""
        self._check_initial(dense, self._count(rows))
        with self._together():
            for state, heads in zip(self.states, self._heads, strict=True):
                state.store(dense.index_select(1, heads), rows)

    def flush(self, rows: Tensor | None = None) -> None:
        """``DecodeState.flush``."""
        with self._together():
            for state in self.states:
                state.flush(rows)

    def materialize(self, rows: Tensor | None = None) -> Tensor:
        """``DecodeState.materialize``: (n, heads, value_dim, key_dim)."""
        return self._joined([state.materialize(rows) for state in self.states], 1)

    def read_state(self, rows: Tensor | None = None) -> Tensor:
        """``DecodeState.read_state``: (n, heads, value_dim, key_dim)."""
        return self._joined([state.read_state(rows) for state in self.states], 1)

    def select(self, rows: Tensor) -> None:
        """``DecodeState.select``."""
        for state in self.states:
            state.select(rows)

    def reset(self, rows: Tensor, initial: Tensor, sequence_ids: Tensor | None = None) -> None:
        """``DecodeState.reset``; initial: (len(rows), heads, value_dim, key_dim)."""
        rows = checks.rows(rows, self.batch, distinct=True, device=self.device)
        self._check_initial(initial, len(rows))
        with self._together():
            for state, heads in zip(self.states, self._heads, strict=True):
                state.reset(rows, initial.index_select(1, heads), sequence_ids)

    def hand_off(self, initial: Tensor) -> None:
        """``DecodeState.hand_off``; initial: (batch, heads, value_dim, key_dim)."""
        self._check_initial(initial, self.batch)
        with self._together():
            for state, heads in zip(self.states, self._heads, strict=True):
                state.hand_off(initial.index_select(1, heads))

    def discard(self, rows: Tensor) -> None:
        """``DecodeState.discard``."""
        for state in self.states:
            state.discard(rows)

    def rename(self, rows: Tensor, sequence_ids: Tensor) -> None:
        """``DecodeState.rename``."""
        for state in self.states:
            state.rename(rows, sequence_ids)

    def save(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """All that a restart needs: what ``DecodeState.save`` gives of each group, and a ``meta`` text."""
        meta = {"version": SAVE_VERSION, "groups": len(self.states), "key_heads": self.shape.key_heads}
        saved = {"meta": torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)}
        for number, state in enumerate(self.states):
            saved |= {f"group{number}.{name}": value for name, value in state.save(rows).items()}
        return saved

    @classmethod
    def restore(cls, saved: dict[str, Tensor]) -> "HeadGroups":
        """The state that ``save`` described; it continues bit for bit.  Raises InputError for anything else."""
        meta = checks.saved_meta(saved, SAVE_VERSION)
        count: Any = meta.get("groups")
        key_heads: Any = meta.get("key_heads")
        if not checks.is_integer(count) or count < 1 or not checks.is_integer(key_heads):
            raise InputError("saved state", meta, "a number of groups and of key heads")
        prefixes = [f"group{number}." for number in range(count)]
        unknown = [n for n in saved if n != "meta" and not n.startswith(tuple(prefixes))]
        if unknown:
            raise InputError("saved state", sorted(unknown), "none but the tensors of save()")
        states = []
        for prefix in prefixes:
            own = {n.removeprefix(prefix): value for n, value in saved.items() if n.startswith(prefix)}
            states.append(DecodeState.restore(own))
        try:
            _check_states(states, key_heads)
        except InputError as error:
            raise InputError("saved state", f"{error.argument} {error.value}", error.expected) from error
        return cls(states, key_heads)

    def place(self, rows: Tensor, other: "HeadGroups") -> None:
        """``DecodeState.place``; the other state has the same groups."""
        if not isinstance(other, HeadGroups) or other.groups != self.groups:
            found = other.effective_policy if isinstance(other, HeadGroups) else type(other).__name__
            raise InputError("groups of the state to place", found, self.effective_policy)
        rows = checks.rows(rows, self.batch, distinct=True, device=self.device)
        for state, theirs in zip(self.states, other.states, strict=True):
            state.check_place(rows, theirs)
        for state, theirs in zip(self.states, other.states, strict=True):
            state.place(rows, theirs)

    @property
    def batch(self) -> int:
        return self.states[0].batch

    @property
    def device(self) -> torch.device:
        return self.states[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of outputs: float64 as soon as one group computes in it."""
        wide = any(state.dtype == torch.float64 for state in self.states)
        return torch.float64 if wide else torch.float32

    @property
    def cursor(self) -> Tensor:
        """Records in the fullest window of each sequence (batch,)."""
        return torch.stack([state.cursor for state in self.states]).amax(0)

    @property
    def pending(self) -> Tensor:
        """Drafts of each sequence that wait for ``commit`` (batch,)."""
        return self.states[0].pending

    @property
    def reach(self) -> Tensor:
        """Newest tokens of each sequence that ``take_back`` can undo in every group (batch,)."""
        return torch.stack([state.reach for state in self.states]).amin(0)

    @property
    def row_name(self) -> str:
        """What error messages call a row."""
        return self.states[0].row_name

    @row_name.setter
    def row_name(self, name: str) -> None:
        for state in self.states:
            state.row_name = name

    @property
    def ledger(self) -> ByteLedger:
        """Bytes of one sequence in this layer.  A group's window holds each key head once that its heads use."""
        return groups_ledger(self.groups, self.recurrence, self.shape)

    @property
    def bits_per_value(self) -> float:
        """All bits held for a state element, windows included."""
        return self.ledger.bits_per_value

    @property
    def effective_policy(self) -> str:
        """Each group with the defaults of this family filled in: what is in force."""
        return "; ".join(
            f"heads {number_text(group.heads)}: {state.effective_policy}"
            for group, state in zip(self.groups, self.states, strict=True)
        )

    @property
    def exercised(self) -> dict[str, int | None]:
        """``DecodeState.exercised``, minimum over the groups that have such a copy."""
        found = [state.exercised for state in self.states]
        copies = [counts["read_copy"] for counts in found if counts["read_copy"] is not None]
        return {
            "checkpoint": min(counts["checkpoint"] or 0 for counts in found),
            "read_copy": min(copies, default=None),
        }

    @property
    def held_as(self) -> str:
        """``DecodeState.held_as`` of each group."""
        return "; ".join(dict.fromkeys(state.held_as for state in self.states))

    def exercised_rows(self, rows: Tensor) -> dict[str, Tensor | None]:
        """``DecodeState.exercised_rows``, minimum over the groups that have such a copy."""
        return fewest([state.exercised_rows(rows) for state in self.states])

    def _split(self, inputs: StepInputs, dim: int) -> list[tuple[DecodeState, StepInputs]]:
        """The inputs of each group; heads are dimension ``dim``."""
        found = []
        for state, heads, key_heads in zip(self.states, self._heads, self._key_heads, strict=True):
            own = {
                name: value.index_select(dim, key_heads if name in ("q", "k") else heads)
                for name, value in vars(inputs).items()
                if value is not None
            }
            found.append((state, StepInputs(**own)))
        return found

    def _joined(self, parts: list[Tensor], dim: int) -> Tensor:
        """Tensors of the groups as one of the layer, heads in their order."""
        wide = self.dtype
        return torch.cat([part.to(wide) for part in parts], dim).index_select(dim, self._order)

    def _count(self, rows: Tensor | None) -> int:
        return self.batch if rows is None else len(checks.rows(rows, self.batch, distinct=True))

    def _checked(self, tokens: StepInputs, rows: Tensor | None) -> int:
        """T of the tokens, whose shapes are right."""
        count = checks.token_count(tokens)
        checks.tokens(tokens, self.recurrence, self.shape, self._count(rows), count, self.device)
        return count

    def _check_initial(self, initial: Tensor, count: int) -> None:
        expected = (count, self.shape.heads, self.shape.value_dim, self.shape.key_dim)
        checks.tensor("initial", initial, expected, f"shape {expected}", self.device)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Diverged in one group leaves all of them as they were."""
        # With flush=early a group that went before has written over records that it dropped.
        early = [state._buffer for state in self.states if state.policy.options.flush == "early"]
        held = [{name: value.clone() for name, value in buffer.fields.items()} for buffer in early]
        with contextlib.ExitStack() as stack:
            for state in self.states:
                stack.enter_context(state._all_or_nothing())
            try:
                yield
            except Diverged:
                for buffer, fields in zip(early, held, strict=True):
                    buffer.fields = fields
                raise


def groups_ledger(groups: Sequence[HeadGroup], recurrence: Recurrence, shape: StateShape) -> ByteLedger:
    """Bytes of one sequence in a layer of ``shape`` whose heads follow the policies of ``groups``."""
    repeat = shape.heads // shape.key_heads
    return add_ledgers(
        ledger(
            group.policy,
            recurrence,
            replace(shape, heads=len(group.heads), key_heads=len({head // repeat for head in group.heads})),
        )
        for group in groups
    )


def key_heads_of(heads: Sequence[int], repeat: int) -> list[int]:
    """Key heads of a group whose heads, ascending, use them in equal blocks, as a state of its own asks.

    repeat: heads that share a key head in the whole layer.  Each key head once if all serve as many heads of the group,
    otherwise one for each head.
    """
    used = Counter(head // repeat for head in heads)
    if len(set(used.values())) == 1:
        return list(used)
    return [head // repeat for head in heads]


def _heads_of(state: DecodeState) -> tuple[int, ...]:
    assert state.heads is not None
    return state.heads


def check_groups(groups: Sequence[HeadGroup], heads: int) -> None:
    """InputError unless every head from 0 to ``heads`` - 1 is in one group, once."""
    if not groups or not all(isinstance(group, HeadGroup) for group in groups):
        raise InputError("groups", groups, "at least one HeadGroup")
    for group in groups:
        checks.head_numbers(group.heads, len(group.heads))
    named = sorted(head for group in groups for head in group.heads)
    if named != list(range(heads)) or not all(group.heads for group in groups):
        raise InputError("groups", list(map(str, groups)), f"each head from 0 to {heads - 1} once")


def _check_states(states: Sequence[DecodeState], key_heads: int) -> None:
    """InputError unless restored states are the groups of one layer."""
    if any(state.heads is None for state in states):
        raise InputError("heads", None, "the head numbers of every group")
    first = states[0]
    heads = sum(state.shape.heads for state in states)
    checks.state_shape(heads, first.shape.value_dim, first.shape.key_dim, key_heads)
    check_groups([HeadGroup(state.policy, _heads_of(state)) for state in states], heads)
    for state in states:
        own = len(key_heads_of(_heads_of(state), heads // key_heads))
        shape = StateShape(len(_heads_of(state)), first.shape.value_dim, first.shape.key_dim, own)
        for name, mine, theirs in (
            ("shape", shape, state.shape),
            ("family", first.recurrence.name, state.recurrence.name),
            ("seed", first.seed, state.seed),
            ("layer", first.layer, state.layer),
            ("drafts", first.drafts, state.drafts),
            ("batch", first.batch, state.batch),
        ):
            if mine != theirs:
                raise InputError(name, theirs, f"{mine}, as of the other groups")


def fewest(counts: Sequence[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """The elementwise minimum of counts by copy, over those that have it."""
    found: dict[str, Tensor | None] = {"checkpoint": None, "read_copy": None}
    for one in counts:
        for part, count in one.items():
            held = found[part]
            found[part] = count if held is None else held if count is None else torch.minimum(held, count)
    return found
