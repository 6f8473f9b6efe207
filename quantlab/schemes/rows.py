"""What a decode state holds: the stored copies and the window of each row, and what can be done with rows."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded
from quantlab.recurrences import Records, StepInputs, fold, get_recurrence
from quantlab.schemes import checks, saving
from quantlab.schemes.arithmetic import arithmetic_of
from quantlab.schemes.buffer import WindowBuffer, writable
from quantlab.schemes.fits import check_policy_fits
from quantlab.schemes.ledger import ByteLedger, StateShape, ledger, uses_raw
from quantlab.schemes.policy import Policy, effective_text
from quantlab.schemes.sites import parse_sites
from quantlab.schemes.store import CHECKPOINT_PART, READ_COPY_PART, Diverged, Store

DRAFTS = 8
"""Drafted tokens that a window has room for unless it is told otherwise."""


class StateRows:
    """Checkpoint, read copy and window of a batch; ``DecodeState`` decodes with them.

    Rows, where an operation takes them, are distinct row numbers (n,).
    """

    def __init__(
        self,
        policy: Policy,
        family: str,
        shape: StateShape,
        batch: int,
        *,
        rates: Tensor | None = None,
        seed: int = 0,
        layer: int = 0,
        sequence_ids: Tensor | None = None,
        drafts: int = DRAFTS,
        arithmetic: torch.dtype | None = None,
        heads: Sequence[int] | None = None,
        device: torch.device = checks.CPU,
    ):
        self.policy, self.recurrence, self.shape = policy, get_recurrence(family), shape
        self.seed, self.layer, self.drafts, self.device = seed, layer, drafts, device
        self.row_name = "row"  # what error messages call it
        check_policy_fits(policy, family)
        self.dtype = checks.arithmetic(arithmetic, policy)
        self.rates = None if rates is None else rates.detach().to(self.dtype, copy=True)
        names = torch.arange(batch) if sequence_ids is None else sequence_ids
        ids = checks.sequence_ids(names, batch, device)
        # Of some heads of a layer alone: their numbers there, which name their random bits.
        self.heads = None if heads is None else checks.head_numbers(heads, shape.heads)
        common = {
            "dtype": self.dtype,
            "seed": seed,
            "layer": layer,
            "sequence_ids": ids,
            "heads": self.heads,
        }
        self._checkpoint = Store(policy.checkpoint, CHECKPOINT_PART, **common)
        self._copy = Store(policy.read_copy, READ_COPY_PART, **common) if policy.read_copy else None
        self._options = options = policy.options
        # A replay with per-token rounding folds, in effect, token by token.
        self._window = 1 if options.schedule == "step" else policy.window
        self._early = options.flush == "early"
        self._raw = uses_raw(policy, self.recurrence)
        site = parse_sites(options.sites).get("buffer")
        self._buffer = WindowBuffer(self._window, drafts, options.buffer, self._raw, site)
        self._buffer.allocate(batch, device)
        self._maths = arithmetic_of(policy, self.recurrence, self.rates, self._buffer.round)
        parts = ["checkpoint"] + (["read_copy"] if self._copy else [])
        self._unread = {part: torch.ones_like(ids, dtype=torch.bool) for part in parts}
        self._read_stores = {part: torch.zeros_like(ids) for part in parts}

    def materialize(self, rows: Tensor | None = None) -> Tensor:
        """The dense logical state, decoded checkpoint + window, drafts left out: (n, heads, value_dim, key_dim)."""
        rows = self._entered_rows(rows)
        return self._dense(take(self._checkpoint.decoded, rows), self._buffer.records(rows, raw=self._raw))

    def read_state(self, rows: Tensor | None = None) -> Tensor:
        """The dense state that reads see, read copy (or checkpoint) + window."""
        rows = self._entered_rows(rows)
        records = self._buffer.records(rows)
        base, _ = self._views(rows)
        # Reads have products of their own: the rounding of a fold's (``dot=``) is none of theirs.
        return fold(self.recurrence, base, records, self.rates) if len(records) else base.clone()

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or fork rows in place: row i becomes the old row ``rows[i]`` (integers, 0 to batch - 1).

        A fork keeps the sequence id, and with it the random bits, of the row it comes from.
        """
        rows = checks.rows(rows, self.batch, device=self.device)
        for store in self._stores().values():
            store.select(rows)
        self._buffer.select(rows)
        self._unread = {part: flags[rows] for part, flags in self._unread.items()}
        self._read_stores = {part: counts[rows] for part, counts in self._read_stores.items()}

    def reset(self, rows: Tensor, initial: Tensor, sequence_ids: Tensor | None = None) -> None:
        """Hand a prefill state to ``rows`` (integers, each at most once): window empty, store number 0.

        initial: (len(rows), heads, value_dim, key_dim).  sequence_ids: int64 (len(rows),), names of the new sequences;
        without them the rows keep theirs, and draw the random bits of the sequences that they follow.
        """
        rows = self._distinct(rows)
        initial = self._checked_initial(initial, len(rows))
        with self._all_or_nothing():
            if sequence_ids is not None:
                self.rename(rows, sequence_ids)
            self._hand_off(initial, rows)

    def discard(self, rows: Tensor) -> None:
        """Forget the records and drafts of ``rows``: their sequences are over."""
        self._buffer.clear(self._distinct(rows))

    def rename(self, rows: Tensor, sequence_ids: Tensor) -> None:
        """Give ``rows`` other sequence ids, and with them other random bits from the next store on."""
        rows = self._distinct(rows)
        ids = checks.sequence_ids(sequence_ids, len(rows), self.device)
        for store in self._stores().values():
            store.rename(rows, ids)

    def hand_off(self, initial: Tensor) -> None:
        """Hand a prefill state (batch, heads, value_dim, key_dim) to every row: rounded once into every copy."""
        initial = self._checked_initial(initial, self.batch)
        with self._all_or_nothing():
            self._hand_off(initial, None)

    @property
    def batch(self) -> int:
        return self._buffer.cursor.shape[0]

    @property
    def cursor(self) -> Tensor:
        """Records in the window of each sequence (batch,)."""
        return self._buffer.cursor.clone()

    @property
    def pending(self) -> Tensor:
        """Drafts of each sequence that wait for ``commit`` (batch,)."""
        return self._buffer.pending.clone()

    def check_drafts(self, count: int, rows: Tensor | None = None) -> None:
        """InputError unless a ``verify`` of ``count`` tokens finds room behind the window."""
        limit = min(self.drafts, self._window) if self._early else self.drafts
        if not 1 <= count <= limit:
            at = f"{count} drafted tokens at {self._place(rows, 0)}"
            raise InputError("tokens", at, f"1 to {limit}: what the window of {self.policy} has room for")

    @property
    def reach(self) -> Tensor:
        """Newest tokens of each sequence that ``take_back`` can undo (batch,): drafts, and records since a flush."""
        return self._buffer.cursor + self._buffer.pending

    @property
    def read_copy_bits(self) -> Encoded:
        """The stored bits of the read copy; InputError if the policy has none."""
        if self._copy is None:
            raise InputError("policy", str(self.policy), "a read copy (checkpoint/copy@window)")
        return self._copy.encoded

    @property
    def window_tensors(self) -> dict[str, Tensor]:
        """Records by field (batch, window, ...), oldest first, undefined behind a cursor; {} before the first."""
        return self._buffer.ordered()

    @property
    def ledger(self) -> ByteLedger:
        """Bytes of one sequence in this layer."""
        return ledger(self.policy, self.recurrence, self.shape)

    @property
    def bits_per_value(self) -> float:
        """All bits held for a state element, window included."""
        return self.ledger.bits_per_value

    @property
    def effective_policy(self) -> str:
        """The policy with the defaults of this family filled in: what is in force."""
        return effective_text(self.policy, delta_rule=self.recurrence.delta_rule)

    @property
    def exercised(self) -> dict[str, int | None]:
        """Distinct stores (hand-off included) that a later step read back, minimum over rows, for each copy."""
        counts = {part: int(c.min()) if len(c) else 0 for part, c in self._read_stores.items()}
        return {"checkpoint": counts["checkpoint"], "read_copy": counts.get("read_copy")}

    @property
    def held_as(self) -> str:
        """What the checkpoint's numbers take in memory here: decoded values, which the format's bits are made of."""
        return (
            f"{str(self.dtype).removeprefix('torch.')}, the decoded values of {self._checkpoint.format.text}"
        )

    def exercised_rows(self, rows: Tensor) -> dict[str, Tensor | None]:
        """``exercised`` of each of ``rows`` (n,)."""
        rows = checks.rows(rows, self.batch, device=self.device)
        counts = {part: counts[rows] for part, counts in self._read_stores.items()}
        return {"checkpoint": counts["checkpoint"], "read_copy": counts.get("read_copy")}

    def save(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """All that a restart needs, as tensors: stored bits, window, cursors, counters, and a ``meta`` text.

        rows: of these rows alone.  Raises InputError between ``verify`` and ``commit``: drafts are nobody's state yet.
        """
        rows = self._entered_rows(rows)
        self._refuse_drafts(rows, "save")
        return saving.tensors(self, rows)

    @classmethod
    def restore(cls, saved: dict[str, Tensor]) -> Self:
        """The state that ``save`` described; it continues bit for bit.  Raises InputError for anything else."""
        return saving.restored(cls, saved)

    def place(self, rows: Tensor, other: "StateRows") -> None:
        """Make ``rows`` what the rows of ``other`` are, bit for bit: a copy, a fork, or a restore into a slot.

        Raises InputError unless ``other`` has the same policy, family, shape, seed and layer, and len(rows) rows.
        """
        rows = self._distinct(rows)
        self.check_place(rows, other)
        saving.place(self, rows, other)

    def check_place(self, rows: Tensor, other: "StateRows") -> None:
        """The InputError of ``place``, or nothing."""
        other._refuse_drafts(None, "place")
        saving.check_place(self, rows, other)

    def _views(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The decoded states that serve S q and S k."""
        checkpoint = self._checkpoint
        if self._copy is None:
            view = checkpoint.with_residual() if self._options.ef_read == "include" else checkpoint.decoded
            view = self._maths.base(take(view, rows))
            return view, view
        copy = self._maths.base(take(self._copy.decoded, rows))
        if self._options.key_read == "copy":
            return copy, copy
        return copy, self._maths.base(take(checkpoint.decoded, rows))

    def _dense(self, base: Tensor, records: Records) -> Tensor:
        """base + records; raw records get their d from the base."""
        if len(records) == 0:
            return base.clone()  # the caller's to change
        if self._raw:
            records = self._maths.deltas(base, records)
        return self._maths.fold(base, records)

    def _folded(self, rows: Tensor | None, first: int | None = None) -> Tensor:
        """Checkpoint + window (its ``first`` records) for a store: the checkpoint was read."""
        self._note_read("checkpoint", rows)
        base = self._maths.base(take(self._checkpoint.decoded, rows))
        return self._dense(base, self._buffer.records(rows, raw=self._raw, first=first))

    def _store(self, dense: Tensor, rows: Tensor | None, *, rounded: bool | None = None) -> None:
        """Write the checkpoint, rounded or as the schedule has it, and from it the read copy."""
        if rounded is None:
            rounded = self._options.schedule in ("flush", "step")
        self._checkpoint.write(dense, rows, rounded=rounded)
        if self._copy:
            self._copy.write(take(self._checkpoint.decoded, rows), rows)
        self._stored(rows, rounded)

    def _hand_off(self, initial: Tensor, rows: Tensor | None) -> None:
        rounded = self._options.schedule != "turn"
        self._checkpoint.hand_off(initial, rows, rounded=rounded)
        if self._copy:
            self._copy.hand_off(take(self._checkpoint.decoded, rows), rows)
        self._buffer.clear(rows)
        self._stored(rows, rounded)
        for part, counts in self._read_stores.items():
            self._read_stores[part] = writable(counts)
            self._read_stores[part][slice(None) if rows is None else rows] = 0

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Diverged leaves everything as it was, whichever rows were stored before it; it names rows as users do."""
        # Stores replace their tensors; the window's memory behind a cursor is nobody's.
        stores = [(store, dict(vars(store))) for store in self._stores().values()]
        buffer = self._buffer
        window = [n.clone() for n in (buffer.origin, buffer.cursor, buffer.pending)]
        unread = {part: flags.clone() for part, flags in self._unread.items()}
        read_stores = {part: counts.clone() for part, counts in self._read_stores.items()}
        try:
            yield
        except Diverged as error:
            for store, held in stores:
                vars(store).update(held)
            buffer.origin, buffer.cursor, buffer.pending = window
            self._unread, self._read_stores = unread, read_stores
            raise Diverged(error.what, error.rows, self.row_name) from None

    def _stored(self, rows: Tensor | None, rounded: bool) -> None:
        for part, flags in self._unread.items():
            self._unread[part] = writable(flags)
            self._unread[part][slice(None) if rows is None else rows] = rounded or part == "read_copy"

    def _note_read(self, part: str, rows: Tensor | None) -> None:
        self._unread[part] = unread = writable(self._unread[part])
        self._read_stores[part] = writable(self._read_stores[part])
        if rows is None:
            self._read_stores[part] += unread
            unread.zero_()
        else:
            self._read_stores[part][rows] += unread[rows]
            unread[rows] = False

    def _stores(self) -> dict[str, Store]:
        return {"checkpoint": self._checkpoint} | ({"read_copy": self._copy} if self._copy else {})

    def _count(self, rows: Tensor | None) -> int:
        return self.batch if rows is None else len(rows)

    def _entered_rows(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else self._distinct(rows)

    def _distinct(self, rows: Tensor) -> Tensor:
        return checks.rows(rows, self.batch, distinct=True, device=self.device)

    def _all_rows(self) -> Tensor:
        return torch.arange(self.batch, device=self.device)

    def _entered(self, inputs: StepInputs, rows: Tensor | None, count: int | None = None) -> StepInputs:
        checks.tokens(inputs, self.recurrence, self.shape, self._count(rows), count, self.device)
        return self._maths.entering(inputs.map(lambda t: t.detach().to(self.dtype)))

    def _checked_initial(self, initial: Tensor, batch: int) -> Tensor:
        expected = (batch, self.shape.heads, self.shape.value_dim, self.shape.key_dim)
        checks.tensor("initial", initial, expected, f"shape {expected}", self.device)
        return initial.detach().to(self.dtype, copy=True)  # the caller may go on to change it

    def _place(self, rows: Tensor | None, index: int) -> str:
        """Where a row stands, for an error message."""
        row = index if rows is None else int(rows[index]) if len(rows) else 0
        if row >= self.batch:
            return f"no {self.row_name}"
        return f"{self.row_name} {row}, cursor {int(self._buffer.cursor[row])}"

    def _refuse_drafts(self, rows: Tensor | None, operation: str) -> None:
        pending = self._buffer.pending if rows is None else self._buffer.pending[rows]
        if bool(pending.any()):
            index = int(pending.nonzero()[0, 0])
            at = f"{operation} with {int(pending[index])} drafts pending in {self._place(rows, index)}"
            raise InputError("operation", at, f"commit first, of at most {int(pending[index])} drafts")


def take(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]
