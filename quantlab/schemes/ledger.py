"""What a policy costs in bytes: read and written per decoded token, and held per sequence, part by part."""

import math
from dataclasses import dataclass, field

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


def ledger(policy: Policy, recurrence: Recurrence, shape: StateShape) -> ByteLedger:
    """The byte ledger of ``policy`` for one sequence of one layer of ``shape``.

    Counted as a kernel would move them: a step reads the copy that serves it and the records before it; a flush reads
    the checkpoint and what the fold needs, and writes every copy.  ``contents=raw`` keeps, besides (k, v, beta, g), the
    d of the window as the read view produced it, because re-solving it at each step would cost a triangular solve.
    """
    window, options = policy.window, policy.options
    raw = uses_raw(policy, recurrence)
    full = (shape.heads, shape.value_dim, shape.key_dim)
    stored = _bytes(policy.checkpoint, full)
    served = _bytes(policy.read_copy, full) if policy.read_copy else dict.fromkeys(stored, 0.0)
    # A short last block is padded: those bytes move with the others, and are named.
    checkpoint, residual, copy = stored["copy"], stored["residual"], served["copy"]

    scalar = 8 if policy.checkpoint.name == "fp64" else 4  # gates stay in the dtype of the arithmetic
    width = scalar if options.buffer == "fp32" else _BUFFER_BYTES[options.buffer]
    k = shape.key_heads * shape.key_dim * width
    d = shape.heads * shape.value_dim * width
    gate = math.prod(recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim)) * scalar
    beta = shape.heads * scalar
    read_record = k + d + gate
    fold_record = k + d + beta + gate if raw else read_record
    kept_record = k + 2 * d + beta + gate if raw else read_record

    steps = window - 1  # of a cycle of ``window`` steps, all but the flush
    flush_reads_copy = policy.read_copy is not None and (
        options.flush_read == "copy" or (recurrence.delta_rule and not raw and options.key_read == "copy")
    )
    window_read = flush_reads_copy and raw  # then the flush step reads d too, for its output
    always_checkpoint = policy.read_copy is None or (
        recurrence.delta_rule and options.key_read == "checkpoint"
    )
    checkpoint_reads = ((steps if always_checkpoint else 0) + 1) / window
    copy_reads = (steps + flush_reads_copy) / window
    padding = stored["padding"] + served["padding"]
    read = {
        "checkpoint": checkpoint * checkpoint_reads,
        "read copy": copy * copy_reads,
        "padding": stored["padding"] * checkpoint_reads + served["padding"] * copy_reads,
        "residual": residual / window,
        "buffer": (read_record * steps * (steps - 1) / 2 + (fold_record + d * window_read) * steps) / window,
    }
    written = {
        "checkpoint": checkpoint / window,
        "read copy": copy / window,
        "padding": padding / window,
        "residual": residual / window,
        "buffer": kept_record * steps / window,
    }
    held = {
        "checkpoint": checkpoint,
        "read copy": copy,
        "padding": padding,
        "residual": residual,
        "buffer": float(kept_record * steps),
    }
    nonzero = [{name: value for name, value in part.items() if value} for part in (read, written, held)]
    return ByteLedger(nonzero[0], nonzero[1], nonzero[2], shape.values)


def uses_raw(policy: Policy, recurrence: Recurrence) -> bool:
    """Whether records hold raw inputs and a flush re-derives d from the checkpoint.

    With window 1 that is the case where no read copy serves S k: the checkpoint is what a token reads anyhow.
    """
    if not recurrence.delta_rule or policy.options.contents == "derived":
        return False
    return policy.window > 1 or policy.read_copy is None


def _bytes(format: Format, shape: tuple[int, int, int]) -> dict[str, float]:
    """Bytes of one sequence's copy: what is read and written with it, its residual, its padding."""
    parts = {name: bits / 8 for name, bits in format.stored_bits(shape).items()}
    residual, padding = parts.pop("residual", 0.0), parts.pop("padding", 0.0)
    return {"copy": sum(parts.values()), "residual": residual, "padding": padding}
