"""One stored copy of the state: its bits, its rounding, its random numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from quantlab.formats import Encoded, Format
from quantlab.formats.random import random_words
from quantlab.formats.storage import check_encoded, map_tensors

CHECKPOINT_PART, READ_COPY_PART = 0, 1
# A float32 residual is at most a step of the format, below this; their sum then stays finite.
_RESIDUAL_ROOM = torch.finfo(torch.float32).max / 2


class Diverged(ArithmeticError):
    """A state that was about to be stored holds NaN or Inf.  A result, not a failure: drift records the step.

    Nothing has changed, so that the other rows can go on without those named.  rows: numbers of the rows (slots).
    """

    def __init__(self, what: str, rows: Sequence[int] = (), row_name: str = "row"):
        place = f" in {row_name} {', '.join(map(str, rows))}" if rows else ""
        super().__init__(f"{what}{place}")
        self.what, self.rows = what, list(rows)

    def __reduce__(self):
        return _diverged, (self.args[0], self.what, self.rows)


def _diverged(message: str, what: str, rows: list[int]) -> Diverged:
    """An exception as it was pickled."""
    error = Diverged(what, rows)
    error.args = (message,)
    return error


@dataclass(frozen=True)
class Preview:
    """A store that was only computed: decoded values, residual, and the counters of its rows."""

    decoded: Tensor
    residual: Tensor | Encoded | None
    numbers: Tensor
    sequence_ids: Tensor


class Store:
    """A copy of a batch's state (batch, heads, value_dim, key_dim) under one format.

    ``decoded`` is what readers see, in ``dtype``.  The codes are a function of the last dense value written and of the
    random words, so they are formed only when somebody asks for them (``encoded``): a simulated step needs the decoded
    values alone.
    ``numbers`` counts the stores of each sequence, 0 being the prefill hand-off; with ``sequence_ids`` and the seed it
    decides the stochastic bits, so that batch layout and slot moves change nothing.  ``live`` marks the rows whose
    ``decoded`` was not rounded yet.  heads: which of the layer's heads these are, if not all; they draw the bits that
    they draw in the whole layer.
    """

    def __init__(
        self,
        format: Format,
        part: int,
        *,
        dtype: torch.dtype,
        seed: int,
        layer: int,
        sequence_ids: Tensor,
        heads: Sequence[int] | None = None,
    ):
        self.format, self.part, self.seed, self.layer, self.heads = format, part, seed, layer, heads
        self.dtype = dtype
        self.sequence_ids = sequence_ids
        self.numbers = torch.full_like(sequence_ids, -1)
        self.live = torch.zeros_like(sequence_ids, dtype=torch.bool)
        self.decoded = torch.empty(0, device=sequence_ids.device)
        self.residual: Tensor | Encoded | None = None
        self._dense: Tensor | None = None
        self._encoded: Encoded | None = None

    def write(self, dense: Tensor, rows: Tensor | None = None, *, rounded: bool = True) -> None:
        """Round and store ``dense``: the whole batch, or the rows named by ``rows``.

        rounded=False keeps it as it is, in the dtype of the arithmetic: the codes, their number and the residual stay
        those of the last rounding (``live``).  Raises Diverged if ``dense`` holds NaN or Inf.
        """
        self.refuse(dense, rows)
        live = self.live.clone()
        live[slice(None) if rows is None else rows] = not rounded
        self.live = live
        if not rounded:
            self.decoded = dense if rows is None else self.decoded.index_copy(0, rows, dense)
            return
        if rows is None:
            self.numbers = self.numbers + 1
            self._dense, self._encoded = dense, None
            self.decoded, self.residual = self._round(dense, self.residual, self.numbers, self.sequence_ids)
            return
        numbers, ids = self.numbers[rows] + 1, self.sequence_ids[rows]
        residual = None if self.residual is None else _map(self.residual, lambda t: t[rows])
        encoded = self._encode(dense, residual, numbers, ids)
        self._encoded = _put_rows(self.encoded, rows, encoded)
        self._dense = None
        self.numbers = self.numbers.index_copy(0, rows, numbers)
        self.decoded = self.decoded.index_copy(0, rows, self._decode(encoded))
        self.residual = self._encoded.residual

    def hand_off(self, dense: Tensor, rows: Tensor | None = None, *, rounded: bool = True) -> None:
        """Store a prefill state: store number 0, residual zero.  Raises Diverged as ``write`` does."""
        self.refuse(dense, rows)
        if rows is None:
            self.numbers = torch.full_like(self.numbers, -1)
            self.residual = None
        else:
            self.numbers = self.numbers.index_fill(0, rows, -1)
            if self.residual is not None:
                # Codes of zero decode to zero under any scale.
                self.residual = _map(self.residual, lambda t: t.index_fill(0, rows, 0))
        if rounded:
            self.write(dense, rows)
            return
        # Memory of the codes must be there; what it holds is not looked at until the first rounding.
        self.write(torch.zeros_like(dense), rows)
        self.numbers = self.numbers - 1 if rows is None else self.numbers.index_fill(0, rows, -1)
        self.write(dense, rows, rounded=False)

    def preview(self, dense: Tensor, rows: Tensor | None, held: "Preview | None") -> "Preview":
        """What the next store would hold, stored nowhere; ``held`` is the store before it, if that is a preview too.

        A row that could not be stored is NaN: nobody has accepted it yet.
        """
        limit = torch.finfo(torch.float32).max if self.format.error_feedback is None else _RESIDUAL_ROOM
        fine = (dense.abs() <= limit).flatten(1).all(1)[:, None, None, None]
        dense = torch.where(fine, dense, 0.0)
        if held is None:
            residual, numbers, ids = self.residual, self.numbers, self.sequence_ids
            if rows is not None:
                residual = None if residual is None else _map(residual, lambda t: t[rows])
                numbers, ids = numbers[rows], ids[rows]
        else:
            residual, numbers, ids = held.residual, held.numbers, held.sequence_ids
        if not self.format.error_feedback:
            decoded = self.format.round(dense, self._words(dense.shape, numbers + 1, ids)).to(self.dtype)
            return Preview(torch.where(fine, decoded, torch.nan), None, numbers + 1, ids)
        encoded = self._encode(dense, residual, numbers + 1, ids)
        decoded = torch.where(fine, self._decode(encoded), torch.nan)
        return Preview(decoded, encoded.residual, numbers + 1, ids)

    def with_residual(self, held: Preview | None = None) -> Tensor:
        """Decoded + residual, of what is stored or of a preview: what that store was given, as far as it was kept."""
        decoded, residual = (self.decoded, self.residual) if held is None else (held.decoded, held.residual)
        if residual is None:
            return decoded
        values = decoded + self.format.residual_values(residual).to(self.dtype)
        return values if held is not None else torch.where(self.live[:, None, None, None], decoded, values)

    def refuse(self, dense: Tensor, rows: Tensor | None = None) -> None:
        """Raise Diverged, which names the rows, if ``dense`` cannot be stored."""
        # NaN and Inf never sum to a finite number; a sum of finite numbers may overflow, so that is looked at again.
        if not torch.isfinite(dense.sum()):
            _refuse_rows(~torch.isfinite(dense), rows, "the state holds NaN or Inf")
        if dense.dtype == torch.float64 and self.format.name != "fp64":
            _refuse_rows(dense.abs() > torch.finfo(torch.float32).max, rows, "the state is beyond float32")
        if self.format.error_feedback:
            what = "state and residual together are beyond float32"
            _refuse_rows(dense.abs() > _RESIDUAL_ROOM, rows, what)

    @property
    def encoded(self) -> Encoded:
        """The stored bits."""
        if self._encoded is None:
            assert self._dense is not None
            self._encoded = self._encode(self._dense, None, self.numbers, self.sequence_ids)
            self._dense = None
        return self._encoded

    def rename(self, rows: Tensor, sequence_ids: Tensor) -> None:
        """Give rows other sequence ids; what is stored already keeps the bits that the old ids drew."""
        if self._dense is not None:
            self._encoded, self._dense = self.encoded, None
        self.sequence_ids = self.sequence_ids.index_copy(0, rows, sequence_ids)

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the rows named by ``rows``; a repeated row draws the same random numbers as its origin."""
        self._encoded = map_tensors(self.encoded, lambda t: t[rows])
        self.residual = self._encoded.residual
        self.numbers, self.sequence_ids = self.numbers[rows], self.sequence_ids[rows]
        self.decoded, self.live = self.decoded[rows], self.live[rows]

    def place(self, rows: Tensor, other: "Store") -> None:
        """Make ``rows`` what the rows of ``other``, of the same format, are."""
        self._encoded = _put_rows(self.encoded, rows, other.encoded)
        self._dense, self.residual = None, self._encoded.residual
        self.decoded = self.decoded.index_copy(0, rows, other.decoded)
        self.numbers = self.numbers.index_copy(0, rows, other.numbers)
        self.sequence_ids = self.sequence_ids.index_copy(0, rows, other.sequence_ids)
        self.live = self.live.index_copy(0, rows, other.live)

    def tensors(self) -> dict[str, Tensor]:
        """The stored bits and counters, for ``save``."""
        counters = {"numbers": self.numbers, "sequence_ids": self.sequence_ids}
        unrounded = {"live": self.live, "unrounded": self.decoded} if bool(self.live.any()) else {}
        return _flat(self.encoded) | counters | unrounded

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``tensors`` returned."""
        encoded = _unflat(tensors)
        check_encoded(self.format, encoded, "stored")
        self._dense, self._encoded, self.residual = None, encoded, encoded.residual
        self.decoded = self._decode(encoded)
        self.numbers, self.sequence_ids = tensors["numbers"], tensors["sequence_ids"]
        if "live" in tensors or "unrounded" in tensors:
            self.live = tensors["live"].clone()
            self.decoded = torch.where(self.live[:, None, None, None], tensors["unrounded"], self.decoded)

    def _words(self, shape: torch.Size, numbers: Tensor, ids: Tensor) -> Tensor | None:
        if not self.format.stochastic:
            return None
        batch, heads, value_dim, key_dim = shape
        return random_words(
            (batch, heads, value_dim, key_dim),
            self.seed,
            numbers,
            ids,
            self.layer,
            self.part,
            heads=self.heads,
        )

    def _encode(
        self, dense: Tensor, residual: Tensor | Encoded | None, numbers: Tensor, ids: Tensor
    ) -> Encoded:
        return self.format.quantize(dense, self._words(dense.shape, numbers, ids), residual)

    def _round(
        self, dense: Tensor, residual: Tensor | Encoded | None, numbers: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor | Encoded | None]:
        if self.format.error_feedback:
            # The residual is part of the bits, so there is no way around the codes here.
            self._encoded = self._encode(dense, residual, numbers, ids)
            self._dense = None
            return self._decode(self._encoded), self._encoded.residual
        return self.format.round(dense, self._words(dense.shape, numbers, ids)).to(self.dtype), None

    def _decode(self, encoded: Encoded) -> Tensor:
        """The values in the dtype of the arithmetic: a rounded copy of an fp64 checkpoint decodes to float32."""
        return self.format.dequantize(encoded).to(self.dtype)


def _refuse_rows(wrong: Tensor, rows: Tensor | None, what: str) -> None:
    if bool(wrong.any()):
        found = wrong.flatten(1).any(1).nonzero()[:, 0]
        raise Diverged(what, (found if rows is None else rows[found]).tolist())


def _map(residual: Tensor | Encoded, function: Callable[[Tensor], Tensor]) -> Tensor | Encoded:
    return map_tensors(residual, function) if isinstance(residual, Encoded) else function(residual)


def _flat(encoded: Encoded, prefix: str = "") -> dict[str, Tensor]:
    """Tensors by name, those of an encoded residual as "residual.codes" and so on."""
    flat: dict[str, Tensor] = {}
    for part in fields(Encoded):
        value = getattr(encoded, part.name)
        if isinstance(value, Encoded):
            flat |= _flat(value, f"{prefix}{part.name}.")
        elif value is not None:
            flat[prefix + part.name] = value
    return flat


def _unflat(tensors: dict[str, Tensor], prefix: str = "") -> Encoded:
    parts: dict = {part.name: tensors.get(prefix + part.name) for part in fields(Encoded)}
    if f"{prefix}residual.codes" in tensors:
        parts["residual"] = _unflat(tensors, f"{prefix}residual.")
    return Encoded(**parts)


def _put_rows(target: Encoded, rows: Tensor, source: Encoded) -> Encoded:
    new = _flat(source)
    return _unflat({name: old.index_copy(0, rows, new[name]) for name, old in _flat(target).items()})
