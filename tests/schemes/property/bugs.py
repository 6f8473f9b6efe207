"""Ten bugs of the kind that a decode state has had, each a change to the real implementation while it lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from quantlab.recurrences import window
from quantlab.schemes.buffer import WindowBuffer
from quantlab.schemes.slots import SlotPool
from quantlab.schemes.state import DecodeState
from quantlab.schemes.store import Store


@dataclass(frozen=True)
class Bug:
    """target.name is replaced by change(what it was).  policy, family: where it shows."""

    title: str
    policy: str
    family: str
    target: Any
    name: str
    change: Callable[[Callable], Callable]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with patch.object(self.target, self.name, self.change(getattr(self.target, self.name))):
            yield


def _double_fold(right: Callable) -> Callable:
    """An explicit flush folds its records, and folds them again."""

    def flush(self: Any, rows: Any = None) -> None:
        once = self._folded

        def twice(rows: Any, first: Any = None) -> Any:
            return self._dense(once(rows, first), self._buffer.records(rows, raw=self._raw, first=first))

        with patch.object(self, "_folded", twice):
            right(self, rows)

    return flush


def _stale_record(right: Callable) -> Callable:
    """Records are looked for at the start of the ring, where those of the last window still lie."""

    def ordered(self: Any, rows: Any, length: int) -> Any:
        with patch.object(self, "origin", torch.zeros_like(self.origin)):
            return right(self, rows, length)

    return ordered


def _cursor_off_by_one(right: Callable) -> Callable:
    """A window counts as full one token too early."""

    def due(self: Any, rows: Any, count: int) -> Any:
        cursor = self._buffer.cursor if rows is None else self._buffer.cursor[rows]
        return cursor == self._window - 2

    return due


def _undecayed_buffer(right: Callable) -> Callable:
    """A record keeps the weight that it had when it was written."""
    return lambda log_decay: torch.zeros_like(log_decay)


def _leaked_row(right: Callable) -> Callable:
    """In a batch of ragged windows the shorter ones are read as far as the longest."""

    def records(self: Any, rows: Any = None, *, raw: bool = False, first: Any = None) -> Any:
        cursor = self.cursor
        with patch.object(self, "cursor", torch.full_like(cursor, int(cursor.max()) if len(cursor) else 0)):
            return right(self, rows, raw=raw, first=first)

    return records


def _forgotten_residual(right: Callable) -> Callable:
    """The residual is stored and never added."""
    return lambda self, dense, residual, numbers, ids: right(self, dense, None, numbers, ids)


def _stale_read_copy(right: Callable) -> Callable:
    """A store counts for the read copy too, but leaves it as it was."""

    def store(self: Any, dense: Any, rows: Any, **options: Any) -> None:
        copy = self._copy
        decoded = copy.decoded
        right(self, dense, rows, **options)
        copy.decoded = decoded

    return store


def _consumed_twice(right: Callable) -> Callable:
    """Of a window that accepted drafts complete, the last record stays for the next fold."""

    def drop(self: Any, rows: Any, count: Any = None) -> None:
        right(self, rows, None if count is None else count - 1)

    return drop


def _frozen_state(right: Callable) -> Callable:
    """A store draws its number and stores nothing."""

    def write(self: Any, dense: Any, rows: Any = None, **options: Any) -> None:
        decoded, handed_off = self.decoded, rows is None or bool((self.numbers[rows] < 0).any())
        right(self, dense, rows, **options)
        if not handed_off:
            self.decoded = decoded

    return write


def _wrong_slot(right: Callable) -> Callable:
    """Rows go to their slots in the order of the slots, not of the batch."""

    def live(self: Any, slots: Any) -> Any:
        used, rows = right(self, slots)
        return used, rows.sort().values

    return live


BUGS = (
    Bug("double fold", "bf16@4", "gated_delta", DecodeState, "flush", _double_fold),
    Bug("stale record", "fp32@4", "mamba2", WindowBuffer, "_ordered", _stale_record),
    Bug("cursor off by one", "fp32@4", "kimi_delta", DecodeState, "_due", _cursor_off_by_one),
    Bug("undecayed buffer", "fp16+sr@4", "kimi_delta", window, "_suffix", _undecayed_buffer),
    Bug("leaked row", "fp32@4", "mamba1", WindowBuffer, "records", _leaked_row),
    Bug("forgotten residual", "int8+ef@1", "gated_delta", Store, "_encode", _forgotten_residual),
    Bug("stale read copy", "fp32/nvfp4@4", "gated_delta", DecodeState, "_store", _stale_read_copy),
    Bug("replay consumed twice", "fp32@4", "gated_delta", WindowBuffer, "drop", _consumed_twice),
    Bug("frozen state", "nvfp4@4", "mamba1", Store, "write", _frozen_state),
    Bug("wrong slot", "fp32@1", "mamba2", SlotPool, "_live", _wrong_slot),
)
