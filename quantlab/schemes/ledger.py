"""What a policy costs in bytes: read and written per decoded token, and held per sequence, part by part."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.recurrences import Recurrence
from quantlab.schemes.policy import Policy

_BUFFER_BYTES = {"bf16": 2, "fp16": 2, "hilo": 4}


@dataclass(frozen=True)
class StateShape:
    """Of one layer: heads, value_dim, key_dim, key_heads."""

    heads: int
    value_dim: int
    key_dim: int
    key_heads: int

    @property
    def values(self) -> int:
        return self.heads * self.value_dim * self.key_dim


@dataclass(frozen=True)
class ByteLedger:
    """Bytes of one sequence in one layer.

    read, written: per decoded token, by part, amortised over the window.  held: per slot, by part.
    values: number of state elements, for ``bits_per_value``.
    """

    read: dict[str, float] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    values: int = 0

    @property
    def bytes_read_per_token(self) -> float:
        return sum(self.read.values())

    @property
    def bytes_written_per_token(self) -> float:
        return sum(self.written.values())

    @property
    def bytes_per_token(self) -> float:
        """Read plus written."""
        return self.bytes_read_per_token + self.bytes_written_per_token

    @property
    def bytes_held(self) -> float:
        return sum(self.held.values())

    @property
    def bits_per_value(self) -> float:
        """All bits held for a state element: codes, scales, residual, read copy and the window's records."""
        return 8 * self.bytes_held / self.values


@dataclass(frozen=True)
class VerifyLedger:
    """Bytes of one sequence in one layer under speculative decoding.

    tokens: verified by a forward (the drafts and the token before them).  accepted: of these.
    read, written: per forward, by part.  held: per request, by part, room for the drafts included.
    """

    tokens: int
    accepted: int
    read: dict[str, float]
    written: dict[str, float]
    held: dict[str, float]

    @property
    def bytes_per_forward(self) -> float:
        """Read plus written."""
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def bytes_per_token(self) -> float:
        """Read plus written, for each accepted token."""
        return self.bytes_per_forward / self.accepted

    @property
    def bytes_held(self) -> float:
        return sum(self.held.values())


def add_ledgers(ledgers: Iterable[ByteLedger]) -> ByteLedger:
    """Bytes of one sequence in several layers, or groups of heads, part by part."""
    total = ByteLedger()
    for one in ledgers:
        total = ByteLedger(
            _summed(total.read, one.read),
            _summed(total.written, one.written),
            _summed(total.held, one.held),
            total.values + one.values,
        )
    return total


def ledger(policy: Policy, recurrence: Recurrence, shape: StateShape, drafts: int = 0) -> ByteLedger:
    """The byte ledger of ``policy`` for one sequence of one layer of ``shape``, decoding token by token.

    Counted as a kernel would move them: a step reads the copy that serves it and the records before it; a fold reads
    the checkpoint and what it needs of the records, and writes every copy.

    - Records: k, v and d in the buffer's format (hilo: two bfloat16), beta and gates in the arithmetic's dtype.
      ``contents=raw`` keeps, besides (k, v, beta, g), the d of the window as the read view produced it, because
      re-solving it at each step would cost a triangular solve.
    - ``flush=early``: a cycle of window - 1 tokens.  Its fold takes the history alone, the token that comes with it
      reads what the fold holds on chip, and every token is written as a record.
    - ``schedule=step``: (k, v, beta, g) and no d, because the replay that rounds after every token forms it again; a
      residual takes part in every replay, so each step reads it.
    - ``schedule=chunk``, ``turn``: between stores the state stays in the arithmetic's dtype, and that is what a slot
      holds and a fold moves ("working state").  A residual waits in the slot.
    - ``ef_read=include``: each step reads the residual.
    - drafts: room for drafted tokens behind the window, held only.  The ring is charged at window - 1 + drafts
      records; an engine that rounds its capacity up to a power of two holds more.

    ``current``, ``dot`` and ``sites`` decide roundings and move no byte of their own.
    """
    sizes = _sizes(policy, recurrence, shape)
    options = policy.options
    records = policy.window - 1  # that a fold finds
    early = options.flush == "early"
    period = policy.window - early
    plain = period - 1  # of a cycle of ``period`` steps, all but the one that folds
    delta, raw = recurrence.delta_rule, uses_raw(policy, recurrence)
    # A full flush may serve its own token from the copy; an early one serves it from what it just folded.
    fold_reads_copy = (
        policy.read_copy is not None
        and not early
        and (options.flush_read == "copy" or (delta and not raw and options.key_read == "copy"))
    )
    fold_record = sizes.fold_record + (sizes.d if fold_reads_copy and raw else 0)
    read, written = _parts(
        sizes,
        checkpoint_reads=((plain if sizes.always_checkpoint else 0) + 1) / period,
        copy_reads=(plain + fold_reads_copy) / period,
        residual_reads=((plain if sizes.always_residual else 0) + 1) / period,
        folds=1 / period,
        buffer_read=(sizes.read_record * records * (records - 1) / 2 + fold_record * records) / period,
        buffer_written=sizes.kept_record * records / period,
    )
    return ByteLedger(read, written, _held(sizes, records + drafts), shape.values)


def verify_ledger(
    policy: Policy, recurrence: Recurrence, shape: StateShape, tokens: int, accepted: int
) -> VerifyLedger:
    """Speculative decoding with the window: each forward verifies ``tokens`` tokens, ``accepted`` of which stay.

    A forward reads, once for all its tokens, the copy that serves them and the records before them, and writes one
    record a token; a rejected one is overwritten, never read.  With ``flush=full`` the commit folds complete windows
    in a launch of its own, since only then the count is known: it reads checkpoint and records again.  With
    ``flush=early`` a forward that finds cursor + 2 tokens > window folds the history first and serves its tokens from
    what it holds on chip.  Averaged over the cycle of cursors that a constant count leads to.

    With window 1 and with ``schedule=step`` a draft's record is (k, v, beta, g): the commit steps through it.
    Raises InputError unless 1 <= accepted <= tokens.
    """
    _check_counts(tokens, accepted)
    sizes = _sizes(policy, recurrence, shape)
    early = policy.options.flush == "early"
    follow = _early_cursor if early else _full_cursor
    totals = {"checkpoint": 0, "copy": 0, "residual": 0, "folds": 0, "read": 0, "fold": 0}
    cycle = _cycle(lambda cursor: follow(cursor, policy.window, tokens, accepted)[0])
    for cursor in cycle:
        folded = follow(cursor, policy.window, tokens, accepted)[1]
        served_on_chip = early and folded > 0
        totals["folds"] += folded > 0
        totals["fold"] += folded
        totals["checkpoint"] += (folded > 0) + (sizes.always_checkpoint and not served_on_chip)
        totals["copy"] += not served_on_chip
        totals["residual"] += (folded > 0) + (sizes.always_residual and not served_on_chip)
        totals["read"] += 0 if served_on_chip else cursor
    mean = {name: total / len(cycle) for name, total in totals.items()}
    read, written = _parts(
        sizes,
        checkpoint_reads=mean["checkpoint"],
        copy_reads=mean["copy"],
        residual_reads=mean["residual"],
        folds=mean["folds"],
        buffer_read=sizes.read_record * mean["read"] + sizes.fold_record * mean["fold"],
        buffer_written=sizes.kept_record * tokens,
    )
    return VerifyLedger(tokens, accepted, read, written, _held(sizes, policy.window - 1 + tokens))


def native_verify_ledger(store: Format, shape: StateShape, tokens: int, accepted: int) -> VerifyLedger:
    """The baseline without a window: a forward reads the state of the last accepted token and stores one a token.

    A request holds ``tokens`` states, one of which is live (vLLM's native path; SGLang scatters the live one out of
    as many intermediate states).  Residuals belong to a state and are stored with it.
    """
    _check_counts(tokens, accepted)
    parts = _bytes(store, (shape.heads, shape.value_dim, shape.key_dim))
    state = _nonzero(
        {"checkpoint": parts["copy"], "padding": parts["padding"], "residual": parts["residual"]}
    )
    stored = {name: tokens * size for name, size in state.items()}
    return VerifyLedger(tokens, accepted, state, stored, dict(stored))


def record_bytes(policy: Policy, recurrence: Recurrence, shape: StateShape) -> dict[str, int]:
    """Bytes of each field that a token can leave in the window: k, d, gate, and for a delta rule v and beta.

    An engine's ring of derived contents has ``window`` records of k, d and gate.
    """
    scalar = _scalar(policy)
    width = scalar if policy.options.buffer == "fp32" else _BUFFER_BYTES[policy.options.buffer]
    gate = math.prod(recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim))
    fields = {
        "k": shape.key_heads * shape.key_dim * width,
        "d": shape.heads * shape.value_dim * width,
        "gate": gate * scalar,
    }
    if recurrence.delta_rule:
        fields |= {"v": fields["d"], "beta": shape.heads * scalar}
    return fields


def uses_raw(policy: Policy, recurrence: Recurrence) -> bool:
    """Whether records hold raw inputs and a flush re-derives d from the checkpoint.

    With window 1 that is the case where no read copy serves S k: the checkpoint is what a token reads anyhow.
    """
    if not recurrence.delta_rule or policy.options.contents == "derived":
        return False
    return policy.window > 1 or policy.read_copy is None


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what moves, for one sequence of one layer, and what every read has to touch."""

    checkpoint: dict[str, float]
    copy: dict[str, float]
    state_part: str
    residual_moves: bool
    read_record: int
    fold_record: int
    kept_record: int
    d: int
    always_checkpoint: bool
    always_residual: bool


def _sizes(policy: Policy, recurrence: Recurrence, shape: StateShape) -> _Sizes:
    options, delta = policy.options, recurrence.delta_rule
    full = (shape.heads, shape.value_dim, shape.key_dim)
    checkpoint = _bytes(policy.checkpoint, full)
    copy = _bytes(policy.read_copy, full) if policy.read_copy else dict.fromkeys(checkpoint, 0.0)
    working = options.schedule in ("chunk", "turn")
    if working:
        checkpoint |= {"copy": float(shape.values * _scalar(policy)), "padding": 0.0}

    fields = record_bytes(policy, recurrence, shape)
    derived = fields["k"] + fields["d"] + fields["gate"]
    inputs = derived + fields.get("beta", 0)  # v is as wide as d
    read, fold, kept = derived, derived, derived
    if options.schedule == "step" or policy.window == 1:
        read = fold = kept = inputs
    elif uses_raw(policy, recurrence):
        fold, kept = inputs, inputs + fields["d"]
    return _Sizes(
        checkpoint,
        copy,
        state_part="working state" if working else "checkpoint",
        residual_moves=not working,
        read_record=read,
        fold_record=fold,
        kept_record=kept,
        d=fields["d"],
        always_checkpoint=policy.read_copy is None or (delta and options.key_read == "checkpoint"),
        always_residual=options.ef_read == "include" or options.schedule == "step",
    )


def _parts(
    sizes: _Sizes,
    *,
    checkpoint_reads: float,
    copy_reads: float,
    residual_reads: float,
    folds: float,
    buffer_read: float,
    buffer_written: float,
) -> tuple[dict[str, float], dict[str, float]]:
    """(read, written) by part, from how often each thing moves."""
    # A short last block is padded: those bytes move with the others, and are named.
    checkpoint, copy = sizes.checkpoint, sizes.copy
    residual = checkpoint["residual"] if sizes.residual_moves else 0.0
    read = {
        sizes.state_part: checkpoint["copy"] * checkpoint_reads,
        "read copy": copy["copy"] * copy_reads,
        "padding": checkpoint["padding"] * checkpoint_reads + copy["padding"] * copy_reads,
        "residual": residual * residual_reads,
        "buffer": buffer_read,
    }
    written = {
        sizes.state_part: checkpoint["copy"] * folds,
        "read copy": copy["copy"] * folds,
        "padding": (checkpoint["padding"] + copy["padding"]) * folds,
        "residual": residual * folds,
        "buffer": buffer_written,
    }
    return _nonzero(read), _nonzero(written)


def _held(sizes: _Sizes, records: int) -> dict[str, float]:
    held = {
        sizes.state_part: sizes.checkpoint["copy"],
        "read copy": sizes.copy["copy"],
        "padding": sizes.checkpoint["padding"] + sizes.copy["padding"],
        "residual": sizes.checkpoint["residual"],
        "buffer": float(sizes.kept_record * records),
    }
    return _nonzero(held)


def _full_cursor(cursor: int, window: int, tokens: int, accepted: int) -> tuple[int, int]:
    """(cursor after the commit, records that it folds): complete windows are folded."""
    folded = (cursor + accepted) // window * window
    return cursor + accepted - folded, folded


def _early_cursor(cursor: int, window: int, tokens: int, accepted: int) -> tuple[int, int]:
    """(cursor after the commit, records that the forward folds): the history, if the next one might not fit."""
    if cursor + 2 * tokens > window:
        return accepted, cursor
    return cursor + accepted, 0


def _cycle(follow: Callable[[int], int]) -> list[int]:
    """The cursors that repeat for ever, from an empty window."""
    seen: dict[int, int] = {}
    path, cursor = [], 0
    while cursor not in seen:
        seen[cursor] = len(path)
        path.append(cursor)
        cursor = follow(cursor)
    return path[seen[cursor] :]


def _check_counts(tokens: int, accepted: int) -> None:
    if tokens < 1:
        raise InputError("tokens", tokens, "at least one token a forward")
    if not 1 <= accepted <= tokens:
        raise InputError("accepted", accepted, f"1 to {tokens}, the tokens that a forward verifies")


def _scalar(policy: Policy) -> int:
    """Bytes of one number in the dtype of the arithmetic."""
    return 8 if policy.checkpoint.name == "fp64" else 4


def _summed(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return one | {name: one.get(name, 0.0) + value for name, value in other.items()}


def _nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in parts.items() if value}


def _bytes(format: Format, shape: tuple[int, int, int]) -> dict[str, float]:
    """Bytes of one sequence's copy: what is read and written with it, its residual, its padding."""
    parts = {name: bits / 8 for name, bits in format.stored_bits(shape).items()}
    residual, padding = parts.pop("residual", 0.0), parts.pop("padding", 0.0)
    return {"copy": sum(parts.values()), "residual": residual, "padding": padding}
