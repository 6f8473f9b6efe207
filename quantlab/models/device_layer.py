"""One layer in pooled memory, with what interception and caches ask of a ``DecodeState``."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantlab.models.device_groups import LayerGroup
from quantlab.recurrences import Recurrence, StepInputs, get_recurrence
from quantlab.schemes import ByteLedger, DecodeState, checks
from quantlab.schemes.head_groups import fewest, groups_ledger, key_heads_of
from quantlab.schemes.ledger import StateShape, ledger
from quantlab.schemes.policy import Policy, effective_text
from quantlab.schemes.pool import LayerPool
from quantlab.schemes.pool_rows import dense_of, exercised_of, state_of
from quantlab.schemes.rules import HeadGroup, number_text


class DeviceLayer:
    """One layer's pool in a group, or that of some of its heads; ``part`` numbers those.

    It does what a ``DecodeState`` does, and keeps ``owner``, by which the layers to come find the group, alive.
    """

    def __init__(self, owner: object, group: LayerGroup, layer: int, part: int = 0):
        self._owner = owner
        self.group, self.layer, self._key = group, layer, (layer, part)

    def step(self, inputs: StepInputs) -> Tensor:
        """``DecodeState.step``: (batch, heads, value_dim), on the device."""
        return self.group.step(self._key, inputs)

    def verify(self, tokens: StepInputs) -> Tensor:
        """``DecodeState.verify``: (batch, T, heads, value_dim)."""
        return self.group.verify(self._key, tokens)

    def commit(self, counts: Tensor) -> None:
        """``DecodeState.commit``, for all layers of the group at once; the others are to be asked for the same."""
        self.group.commit(self._key, counts)

    def take_back(self, counts: Tensor) -> None:
        """``DecodeState.take_back``, once all layers of the group are asked for the same."""
        self.group.take_back(self._key, counts)

    def store(self, dense: Tensor) -> None:
        """``DecodeState.store``; dense: (batch, heads, value_dim, key_dim)."""
        self.group.store(self._key, dense)

    def extend(self, tokens: StepInputs) -> Tensor:
        """``DecodeState.extend``: (batch, T, heads, value_dim)."""
        return self.group.extend(self._key, tokens)

    def select(self, rows: Tensor) -> None:
        """``DecodeState.select``; all layers of the group are to be asked for the same.  rows may be on the device."""
        self.group.select(self._key, rows)

    def reset(self, rows: Tensor, initial: Tensor, sequence_ids: Tensor | None = None) -> None:
        """``DecodeState.reset``; all layers of the group are to be reset in the same rows."""
        self.group.reset(self._key, rows, initial, sequence_ids)

    def materialize(self, rows: Tensor | None = None) -> Tensor:
        """``DecodeState.materialize``: (n, heads, value_dim, key_dim), float32, on the device."""
        self.group.observe(self._key)
        return dense_of(self.pool, self._slots(rows))

    def decode_state(self, rows: Tensor | None = None) -> DecodeState:
        """The rows as a ``DecodeState`` of its own, on the CPU; its ``exercised`` starts over."""
        self.group.observe(self._key)
        return state_of(self.pool, self._slots(rows))

    @property
    def pool(self) -> LayerPool:
        """The layer's memory."""
        return self.group.pools[self._key]

    @property
    def policy(self) -> Policy:
        return self.pool.policy

    @property
    def shape(self) -> StateShape:
        return self.pool.shape

    @property
    def recurrence(self) -> Recurrence:
        return get_recurrence(self.pool.family)

    @property
    def batch(self) -> int:
        return self.pool.slots

    @property
    def drafts(self) -> int:
        """Tokens that one ``verify`` may take."""
        return self.group.drafts

    @property
    def cursor(self) -> Tensor:
        """Records in the window of each sequence (batch,)."""
        self.group.observe(self._key)
        return self.pool.counters.cursor.long()

    @property
    def pending(self) -> Tensor:
        """Drafts of each sequence that wait for ``commit`` (batch,)."""
        self.group.observe(self._key)
        return self.pool.counters.pending.long()

    @property
    def reach(self) -> Tensor:
        """Newest tokens of each sequence that ``take_back`` can undo (batch,)."""
        return self.group.reach(self._key)

    @property
    def ledger(self) -> ByteLedger:
        """Bytes of one sequence in this layer."""
        return ledger(self.policy, self.recurrence, self.shape)

    @property
    def effective_policy(self) -> str:
        """The policy with the defaults of this family filled in: what is in force."""
        return effective_text(self.policy, delta_rule=self.recurrence.delta_rule)

    @property
    def exercised(self) -> dict[str, int | None]:
        """``DecodeState.exercised``, but for stores that only drafts have read which were all taken back."""
        counts = self.exercised_rows(torch.arange(self.batch))
        return {part: None if c is None else int(c.min()) if len(c) else 0 for part, c in counts.items()}

    @property
    def held_as(self) -> str:
        """The dtype of the checkpoint's memory."""
        return self.pool.held_as

    def exercised_rows(self, rows: Tensor) -> dict[str, Tensor | None]:
        """``DecodeState.exercised_rows``."""
        slots = self._slots(rows)
        counts = exercised_of(self.pool, slots)
        if (copies := counts["read_copy"]) is not None:
            counts["read_copy"] = copies - self.group.unread_copies[slots]
        return counts

    def _slots(self, rows: Tensor | None) -> Tensor:
        if rows is None:
            return torch.arange(self.batch, device=self.pool.device)
        return checks.rows(rows, self.batch).to(self.pool.device)


class DeviceHeadGroups:
    """A layer whose heads follow different policies, each group of heads a ``DeviceLayer``; as ``HeadGroups``."""

    def __init__(self, parts: Sequence[DeviceLayer], groups: Sequence[HeadGroup], shape: StateShape):
        self.parts, self.groups, self.shape = tuple(parts), tuple(groups), shape
        repeat, device = shape.heads // shape.key_heads, parts[0].pool.device
        heads = [torch.tensor(group.heads, device=device) for group in groups]
        keys = [torch.tensor(key_heads_of(group.heads, repeat), device=device) for group in groups]
        self._heads = [
            {"q": k, "k": k, "v": h, "log_decay": h, "beta": h} for h, k in zip(heads, keys, strict=True)
        ]
        self._order = torch.cat(heads).argsort()

    def step(self, inputs: StepInputs) -> Tensor:
        """``DecodeState.step``: (batch, heads, value_dim)."""
        parts = zip(self.parts, self._heads, strict=True)
        return self._joined([part.step(_picked(inputs, heads, 1)) for part, heads in parts], 1)

    def verify(self, tokens: StepInputs) -> Tensor:
        """``DecodeState.verify``: (batch, T, heads, value_dim)."""
        parts = zip(self.parts, self._heads, strict=True)
        return self._joined([part.verify(_picked(tokens, heads, 2)) for part, heads in parts], 2)

    def extend(self, tokens: StepInputs) -> Tensor:
        """``DecodeState.extend``: (batch, T, heads, value_dim)."""
        parts = zip(self.parts, self._heads, strict=True)
        return self._joined([part.extend(_picked(tokens, heads, 2)) for part, heads in parts], 2)

    def commit(self, counts: Tensor) -> None:
        """``DecodeState.commit``."""
        for part in self.parts:
            part.commit(counts)

    def take_back(self, counts: Tensor) -> None:
        """``DecodeState.take_back``; ``reach`` is the least over the groups."""
        reach = self.reach.cpu()
        checks.counts(counts, reach, lambda row: f"row {row}", "tokens since the last flush of a group")
        for part in self.parts:
            part.take_back(counts)

    def store(self, dense: Tensor) -> None:
        """``DecodeState.store``; dense: (batch, heads, value_dim, key_dim)."""
        for part, heads in zip(self.parts, self._heads, strict=True):
            part.store(dense.index_select(1, heads["v"]))

    def select(self, rows: Tensor) -> None:
        """``DecodeState.select``."""
        for part in self.parts:
            part.select(rows)

    def reset(self, rows: Tensor, initial: Tensor, sequence_ids: Tensor | None = None) -> None:
        """``DecodeState.reset``; initial: (len(rows), heads, value_dim, key_dim)."""
        for part, heads in zip(self.parts, self._heads, strict=True):
            part.reset(rows, initial.to(heads["v"].device).index_select(1, heads["v"]), sequence_ids)

    def materialize(self, rows: Tensor | None = None) -> Tensor:
        """``DecodeState.materialize``: (n, heads, value_dim, key_dim)."""
        return self._joined([part.materialize(rows) for part in self.parts], 1)

    @property
    def layer(self) -> int:
        return self.parts[0].layer

    @property
    def recurrence(self) -> Recurrence:
        return self.parts[0].recurrence

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def drafts(self) -> int:
        """Tokens that one ``verify`` may take."""
        return self.parts[0].drafts

    @property
    def cursor(self) -> Tensor:
        """Records in the fullest window of each sequence (batch,)."""
        return torch.stack([part.cursor for part in self.parts]).amax(0)

    @property
    def pending(self) -> Tensor:
        """Drafts of each sequence that wait for ``commit`` (batch,)."""
        return torch.stack([part.pending for part in self.parts]).amax(0)

    @property
    def reach(self) -> Tensor:
        """Newest tokens of each sequence that ``take_back`` can undo in every group (batch,)."""
        return torch.stack([part.reach for part in self.parts]).amin(0)

    @property
    def ledger(self) -> ByteLedger:
        """Bytes of one sequence in this layer."""
        return groups_ledger(self.groups, self.recurrence, self.shape)

    @property
    def effective_policy(self) -> str:
        """Each group with the defaults of this family filled in: what is in force."""
        return "; ".join(
            f"heads {number_text(group.heads)}: {part.effective_policy}"
            for group, part in zip(self.groups, self.parts, strict=True)
        )

    @property
    def exercised(self) -> dict[str, int | None]:
        """``DecodeState.exercised``, minimum over the groups that have such a copy."""
        found = [part.exercised for part in self.parts]
        copies = [counts["read_copy"] for counts in found if counts["read_copy"] is not None]
        return {
            "checkpoint": min(counts["checkpoint"] or 0 for counts in found),
            "read_copy": min(copies, default=None),
        }

    @property
    def held_as(self) -> str:
        """``DeviceLayer.held_as`` of each group."""
        return "; ".join(dict.fromkeys(part.held_as for part in self.parts))

    def exercised_rows(self, rows: Tensor) -> dict[str, Tensor | None]:
        """``DecodeState.exercised_rows``, minimum over the groups that have such a copy."""
        return fewest([part.exercised_rows(rows) for part in self.parts])

    def _joined(self, parts: list[Tensor], dim: int) -> Tensor:
        return torch.cat(parts, dim).index_select(dim, self._order)


def part_shapes(groups: Sequence[HeadGroup], shape: StateShape) -> list[StateShape]:
    """The shape of each group's pool."""
    repeat = shape.heads // shape.key_heads
    return [
        replace(shape, heads=len(group.heads), key_heads=len(key_heads_of(group.heads, repeat)))
        for group in groups
    ]


def _picked(inputs: StepInputs, heads: dict[str, Tensor], dim: int) -> StepInputs:
    own = {
        name: value.index_select(dim, heads[name])
        for name, value in vars(inputs).items()
        if value is not None
    }
    return StepInputs(**own)
