"""The window: up to L records of recent inputs of each sequence, with one cursor a sequence."""

import torch
from torch import Tensor

from quantlab.recurrences import Records, StepInputs

_ROUND = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WindowBuffer:
    """Records (k, d, log_decay and, for raw contents, v and beta) of the tokens since the last flush.

    Vectors (k, d, v) are held in the buffer format; log_decay and beta always in the compute dtype, as serving engines
    keep them.  Memory beyond a cursor is never read: it starts as NaN, and reads mask it by selection.
    """

    def __init__(self, window: int, format: str, raw: bool):
        self.window, self.format, self.raw = window, format, raw
        self.fields: dict[str, Tensor] = {}
        self.cursor = torch.zeros(0, dtype=torch.int64)

    def allocate(self, batch: int) -> None:
        """Start empty for ``batch`` sequences; memory is taken when the first record gives the shapes."""
        self.fields, self.cursor = {}, torch.zeros(batch, dtype=torch.int64)

    def round(self, x: Tensor) -> Tensor:
        """``x`` as the buffer would give it back."""
        narrow = _ROUND[self.format]
        return x if narrow is None else x.to(narrow).to(x.dtype)

    def append(self, inputs: StepInputs, d: Tensor, rows: Tensor | None) -> None:
        """Write one record at the cursor of each row (all rows, or those in ``rows``) and advance it."""
        values = {"k": self.round(inputs.k), "d": self.round(d), "log_decay": inputs.log_decay}
        if self.raw:
            assert inputs.beta is not None
            values |= {"v": self.round(inputs.v), "beta": inputs.beta}
        batch = self.cursor.shape[0]
        where = torch.arange(batch) if rows is None else rows
        at = self.cursor[where]
        uniform = rows is None and bool((at == at[0]).all())
        for name, value in values.items():
            if name not in self.fields:
                self.fields[name] = value.new_full((batch, self.window, *value.shape[1:]), torch.nan)
            if uniform:
                self.fields[name][:, int(at[0])] = value
            else:
                self.fields[name][where, at] = value[where]
        self.cursor[where] = at + 1

    def records(self, rows: Tensor | None = None, *, raw: bool = False) -> Records:
        """The records written so far, of all rows or those in ``rows``.

        A row with fewer records than the longest one is padded with tokens that change nothing (d = 0, no decay).
        """
        cursor = self.cursor if rows is None else self.cursor[rows]
        length = int(cursor.max()) if len(cursor) else 0
        used = {}
        for name, value in self.fields.items():
            value = value[:, :length] if rows is None else value[rows, :length]
            if bool((cursor < length).any()):
                valid = torch.arange(length) < cursor[:, None]
                value = torch.where(valid.view(*valid.shape, *[1] * (value.ndim - 2)), value, 0.0)
            used[name] = value
        if not used:
            return EMPTY
        if raw:
            return Records(used["k"], None, used["log_decay"], used["v"], used["beta"])
        return Records(used["k"], used["d"], used["log_decay"])

    def clear(self, rows: Tensor | None) -> None:
        """A flush or a hand-off: the cursor goes back, the memory stays."""
        if rows is None:
            self.cursor.zero_()
        else:
            self.cursor[rows] = 0

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) rows."""
        self.fields = {name: value[rows] for name, value in self.fields.items()}
        self.cursor = self.cursor[rows]


EMPTY = Records(torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0))


def with_current(records: Records, inputs: StepInputs, d: Tensor | None, *, raw: bool) -> Records:
    """``records`` followed by the current token, unrounded.  raw: v and beta are carried instead of d."""
    token = Records(
        k=inputs.k[:, None],
        d=None if raw or d is None else d[:, None],
        log_decay=inputs.log_decay[:, None],
        v=inputs.v[:, None] if raw else None,
        beta=inputs.beta[:, None] if raw and inputs.beta is not None else None,
    )
    if len(records) == 0:
        return token

    def join(name: str) -> Tensor | None:
        old, new = getattr(records, name), getattr(token, name)
        return None if new is None else torch.cat([old, new], 1)

    k, log_decay = join("k"), join("log_decay")
    assert k is not None
    assert log_decay is not None
    return Records(k, join("d"), log_decay, join("v"), join("beta"))
