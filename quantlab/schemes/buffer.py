"""The window: a ring of records of recent inputs of each sequence, with one origin and one cursor a sequence."""

from dataclasses import replace

import torch
from torch import Tensor

from quantlab.formats import Format, parse
from quantlab.recurrences import Records, StepInputs
from quantlab.recurrences.window import EMPTY
from quantlab.schemes.sites import narrow

_BFLOAT16 = parse("bf16")


class WindowBuffer:
    """Records (k, d, log_decay and, for raw contents, v and beta) of the tokens since the last flush.

    Row b holds ``cursor[b]`` records that count and, behind them, ``pending[b]`` drafts that are not accepted yet, from
    ring position ``origin[b]`` on.  So accepting and rejecting drafts, and dropping records that were folded while
    later ones stay, are moves of these three numbers.  Memory outside is never read: it starts as NaN, and reads mask
    it by selection.

    Vectors (k, d, v) are held in the buffer format; log_decay and beta in the dtype of the arithmetic, as serving
    engines keep them, unless the rounding site ``buffer`` narrows every field.
    """

    def __init__(self, window: int, drafts: int, format: str, raw: bool, site: Format | None = None):
        self.window, self.format, self.raw, self.site = window, format, raw, site
        self.capacity = 1 << (max(1, window - 1 + drafts) - 1).bit_length()
        self.fields: dict[str, Tensor] = {}
        self.origin = self.cursor = self.pending = torch.zeros(0, dtype=torch.int64)

    def allocate(self, batch: int, device: torch.device) -> None:
        """Start empty for ``batch`` sequences; memory is taken when the first record gives the shapes."""
        self.fields = {}
        self.origin, self.cursor, self.pending = (
            torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(3)
        )

    def round(self, x: Tensor) -> Tensor:
        """A vector as the buffer would give it back."""
        if self.format == "hilo":
            high = narrow(x, _BFLOAT16)
            x = high + narrow(x - high, _BFLOAT16)
        elif self.format != "fp32":
            x = narrow(x, parse(self.format))
        return x if self.site is None else narrow(x, self.site)

    def kept(self, records: Records) -> Records:
        """``records`` as the buffer would give them back."""
        records = replace(records, k=self.round(records.k))
        for name in ("d", "v"):
            if (value := getattr(records, name)) is not None:
                records = replace(records, **{name: self.round(value)})
        if self.site is None:
            return records
        beta = None if records.beta is None else narrow(records.beta, self.site)
        return replace(records, log_decay=narrow(records.log_decay, self.site), beta=beta)

    def append(self, records: Records, rows: Tensor | None, lengths: Tensor | None = None) -> None:
        """Write records (n, T, ...) behind what each row holds: as accepted tokens, or as drafts with ``lengths``.

        What stands behind a row's length is not written: the ring may have no room for it.
        """
        batch, count, device = self.cursor.shape[0], len(records), self.cursor.device
        where = torch.arange(batch, device=device) if rows is None else rows
        at = self.origin[where] + self.cursor[where]
        kept = self.kept(records)
        first = int(at[0]) % self.capacity if len(at) else 0
        uniform = rows is None and first + count <= self.capacity and bool((at == at[:1]).all())
        ahead = torch.arange(count, device=device)
        used = torch.ones(len(at), count, dtype=torch.bool, device=device)
        if lengths is not None:
            used = ahead < lengths[:, None]
        uniform = uniform and bool(used.all())
        index = ((at[:, None] + ahead) % self.capacity)[used]
        written = where[:, None].expand(-1, count)[used]
        for name in ("k", "d", "log_decay", *(("v", "beta") if self.raw else ())):
            value = getattr(kept, name)
            assert value is not None
            if name not in self.fields:
                self.fields[name] = value.new_full((batch, self.capacity, *value.shape[2:]), torch.nan)
            self.fields[name] = kept_field = writable(self.fields[name])
            if uniform:
                kept_field[:, first : first + count] = value
            else:
                kept_field[written, index] = value[used]
        self._own_numbers()
        if lengths is None:
            self.cursor[where] += count
        else:
            self.pending[where] = lengths

    def records(self, rows: Tensor | None = None, *, raw: bool = False, first: int | None = None) -> Records:
        """The accepted records of all rows or those in ``rows``, oldest first; at most the ``first`` ones.

        A row with fewer records than the longest one is padded with tokens that change nothing (d = 0, no decay).
        """
        cursor = self.cursor if rows is None else self.cursor[rows]
        if first is not None:
            cursor = cursor.clamp(max=first)
        length = int(cursor.max()) if len(cursor) else 0
        if length == 0 or not self.fields:
            return EMPTY
        used = self._ordered(rows, length)
        if bool((cursor < length).any()):
            valid = torch.arange(length, device=cursor.device) < cursor[:, None]
            for name, value in used.items():
                mask = valid.view(*valid.shape, *[1] * (value.ndim - 2))
                used[name] = torch.where(mask, value, 0.0)
        if raw:
            return Records(used["k"], None, used["log_decay"], used["v"], used["beta"])
        return Records(used["k"], used["d"], used["log_decay"])

    def accept(self, counts: Tensor, rows: Tensor | None) -> None:
        """The first ``counts`` drafts of each row become records; the others are gone."""
        where = slice(None) if rows is None else rows
        self._own_numbers()
        self.cursor[where] += counts
        self.pending[where] = 0

    def rewind(self, counts: Tensor, rows: Tensor | None) -> None:
        """Forget the newest ``counts`` records of the rows."""
        self._own_numbers()
        self.cursor[slice(None) if rows is None else rows] -= counts

    def drop(self, rows: Tensor | None, count: int | None = None) -> None:
        """Forget the oldest ``count`` records (all by default) of the rows; the memory stays."""
        where = slice(None) if rows is None else rows
        self._own_numbers()
        dropped = self.cursor[where] if count is None else self.cursor[where].clamp(max=count)
        left = self.cursor[where] - dropped
        origin = (self.origin[where] + dropped) % self.capacity
        # An empty ring starts over, so that records of rows in step stay one block of memory.
        empty = (left == 0) & (self.pending[where] == 0)
        self.origin[where] = torch.where(empty, 0, origin)
        self.cursor[where] = left

    def clear(self, rows: Tensor | None) -> None:
        """A hand-off: no records, no drafts."""
        where = slice(None) if rows is None else rows
        self._own_numbers()
        for numbers in (self.origin, self.cursor, self.pending):
            numbers[where] = 0

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) rows."""
        self.fields = {name: value[rows] for name, value in self.fields.items()}
        self.origin, self.cursor, self.pending = self.origin[rows], self.cursor[rows], self.pending[rows]

    def place(self, rows: Tensor, other: "WindowBuffer") -> None:
        """Make ``rows`` what the rows of ``other`` are."""
        for name, value in other.fields.items():
            if name not in self.fields:
                self.fields[name] = value.new_full((len(self.cursor), *value.shape[1:]), torch.nan)
            self.fields[name] = writable(self.fields[name])
            self.fields[name][rows] = value
        self._own_numbers()
        self.origin[rows], self.cursor[rows], self.pending[rows] = other.origin, other.cursor, other.pending

    def _own_numbers(self) -> None:
        self.origin, self.cursor, self.pending = map(writable, (self.origin, self.cursor, self.pending))

    def used(self) -> Tensor:
        """Which ring positions hold a record or a draft: bool (batch, capacity)."""
        behind = (
            torch.arange(self.capacity, device=self.origin.device) - self.origin[:, None]
        ) % self.capacity
        return behind < (self.cursor + self.pending)[:, None]

    def ordered(self) -> dict[str, Tensor]:
        """The fields (batch, window, ...) in one block of memory, oldest record first; undefined behind each cursor."""
        found = self._ordered(None, min(self.window, self.capacity)) if self.fields else {}
        return {name: value.contiguous() for name, value in found.items()}

    def _ordered(self, rows: Tensor | None, length: int) -> dict[str, Tensor]:
        origin = self.origin if rows is None else self.origin[rows]
        if not bool(origin.any()):
            picked = slice(None) if rows is None else rows
            return {name: value[picked, :length] for name, value in self.fields.items()}
        where = torch.arange(len(self.cursor), device=origin.device) if rows is None else rows
        index = (origin[:, None] + torch.arange(length, device=origin.device)) % self.capacity
        return {name: value[where[:, None], index] for name, value in self.fields.items()}


def writable(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy where torch forbids to write to it: it was made in inference mode, which is over."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def token_records(tokens: StepInputs, d: Tensor, *, raw: bool) -> Records:
    """Tokens as records.  raw: v and beta are carried too, so that d can be derived again."""
    return Records(tokens.k, d, tokens.log_decay, tokens.v if raw else None, tokens.beta if raw else None)


def joined(records: Records, token: Records) -> Records:
    """``records`` followed by ``token``; fields that either lacks are left out."""
    if len(records) == 0:
        return token

    def join(name: str) -> Tensor | None:
        old, new = getattr(records, name), getattr(token, name)
        return None if old is None or new is None else torch.cat([old, new], 1)

    k, log_decay = join("k"), join("log_decay")
    assert k is not None
    assert log_decay is not None
    return Records(k, join("d"), log_decay, join("v"), join("beta"))
