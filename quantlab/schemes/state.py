"""The decode state of a batch of sequences in one layer, under one policy."""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded
from quantlab.recurrences import (
    Records,
    StepInputs,
    expand_groups,
    fold,
    get_recurrence,
    solve_deltas,
    window_read,
)
from quantlab.recurrences.base import matvec
from quantlab.schemes import checks
from quantlab.schemes.buffer import WindowBuffer, with_current
from quantlab.schemes.ledger import ByteLedger, StateShape, ledger, uses_raw
from quantlab.schemes.policy import Options, Policy, parse_policy
from quantlab.schemes.store import CHECKPOINT_PART, READ_COPY_PART, Store

SAVE_VERSION = 1
_COUNTERS = {
    "numbers": torch.int64,
    "sequence_ids": torch.int64,
    "unread": torch.bool,
    "read_stores": torch.int64,
}
"""What a save holds of a store beside its bits, one a row."""


class DecodeState:
    """Checkpoint, read copy and window of a batch; ``start`` makes one from a prefill state.

    One formula serves every policy.  A step whose window is not full reads

        o = decay * (read copy + window) q + d (k . q)
        d = v, or for a delta rule beta (v - decay * (read copy + window) k)

    (the checkpoint in place of the read copy where there is none, or for k with ``key_read=checkpoint``) and records
    the token.  The step that fills the window is a flush: the checkpoint, the window and the current token are folded,
    the output is read from that unrounded fold (``flush_read=exact``), the fold is rounded and stored, and the read
    copy is encoded from the stored checkpoint.  With ``contents=raw`` the fold first re-derives every d from the
    checkpoint, so that read errors never enter it; with ``contents=derived`` it takes the d that the reads produced.
    With window 1 every step is a flush.

    Arithmetic is float32, float64 if the checkpoint is fp64.
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
    ):
        self.policy, self.recurrence, self.shape = policy, get_recurrence(family), shape
        self.seed, self.layer = seed, layer
        check_policy_fits(policy, family)
        self.dtype = torch.float64 if policy.checkpoint.name == "fp64" else torch.float32
        self.rates = None if rates is None else rates.detach().to(self.dtype, copy=True)
        ids = torch.arange(batch) if sequence_ids is None else checks.sequence_ids(sequence_ids, batch)
        common = {"dtype": self.dtype, "seed": seed, "layer": layer, "sequence_ids": ids}
        self._checkpoint = Store(policy.checkpoint, CHECKPOINT_PART, **common)
        self._copy = Store(policy.read_copy, READ_COPY_PART, **common) if policy.read_copy else None
        self._raw = uses_raw(policy, self.recurrence)
        self._buffer = WindowBuffer(policy.window, policy.options.buffer, self._raw)
        self._buffer.allocate(batch)
        parts = ["checkpoint"] + (["read_copy"] if self._copy else [])
        self._unread = {part: torch.ones(batch, dtype=torch.bool) for part in parts}
        self._read_stores = {part: torch.zeros(batch, dtype=torch.int64) for part in parts}

    def step(self, inputs: StepInputs) -> Tensor:
        """Decode one token of every sequence; returns the output (batch, heads, value_dim).

        Raises InputError if a shape disagrees with the state, Diverged if the state to be stored is not finite.
        """
        inputs = self._checked(inputs)
        flushing = self._buffer.cursor == self.policy.window - 1
        if bool(flushing.all()):
            return self._flush(inputs, None)
        d, output = self._read(inputs, None)
        if not bool(flushing.any()):
            self._buffer.append(inputs, d, None)
            return output
        rows = flushing.nonzero()[:, 0]
        output = output.index_copy(0, rows, self._flush(inputs, rows))
        self._buffer.append(inputs, d, (~flushing).nonzero()[:, 0])
        return output

    def materialize(self) -> Tensor:
        """The dense logical state, decoded checkpoint + window: (batch, heads, value_dim, key_dim)."""
        base = self._checkpoint.decoded
        records = self._buffer.records(raw=self._raw)
        if len(records) == 0:
            return base.clone()  # the caller's to change
        if not self._raw:
            return fold(self.recurrence, base, records, self.rates)
        records = replace(records, d=solve_deltas(self.recurrence, base, records))
        return fold(self.recurrence, base, records, self.rates)

    def read_state(self) -> Tensor:
        """The dense state that reads see, read copy (or checkpoint) + window."""
        base = self._copy.decoded if self._copy else self._checkpoint.decoded
        records = self._buffer.records()
        return fold(self.recurrence, base, records, self.rates) if len(records) else base.clone()

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or fork rows in place: row i becomes the old row ``rows[i]`` (integers, 0 to batch - 1).

        A fork keeps the sequence id, and with it the random bits, of the row it comes from.
        """
        rows = checks.rows(rows, self.batch)
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
        rows = checks.rows(rows, self.batch, distinct=True)
        initial = self._checked_initial(initial, len(rows))
        if sequence_ids is not None:
            ids = checks.sequence_ids(sequence_ids, len(rows))
            for store in self._stores().values():
                store.sequence_ids = store.sequence_ids.index_copy(0, rows, ids)
        self._checkpoint.hand_off(initial, rows)
        if self._copy:
            self._copy.hand_off(self._checkpoint.decoded[rows], rows)
        self._buffer.clear(rows)
        for part in self._unread:
            self._unread[part][rows] = True
            self._read_stores[part][rows] = 0

    def hand_off(self, initial: Tensor) -> None:
        """Hand a prefill state (batch, heads, value_dim, key_dim) to every row: rounded once into every copy."""
        initial = self._checked_initial(initial, self.batch)
        self._checkpoint.hand_off(initial)
        if self._copy:
            self._copy.hand_off(self._checkpoint.decoded)
        self._buffer.clear(None)
        for part in self._unread:
            self._unread[part].fill_(True)
            self._read_stores[part].zero_()

    @property
    def batch(self) -> int:
        return self._buffer.cursor.shape[0]

    @property
    def cursor(self) -> Tensor:
        """Records in the window of each sequence (batch,)."""
        return self._buffer.cursor.clone()

    @property
    def read_copy_bits(self) -> Encoded:
        """The stored bits of the read copy; InputError if the policy has none."""
        if self._copy is None:
            raise InputError("policy", str(self.policy), "a read copy (checkpoint/copy@window)")
        return self._copy.encoded

    @property
    def window_tensors(self) -> dict[str, Tensor]:
        """The window's memory by field (batch, window, ...), undefined behind each cursor; {} before first use."""
        return dict(self._buffer.fields)

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
        options = self.policy.options
        keys = []
        if self.policy.window > 1:
            keys.append(f"buffer={options.buffer}")
            if self.recurrence.delta_rule:
                keys.append(f"contents={'raw' if self._raw else 'derived'}")
        if self._copy:
            if self.recurrence.delta_rule:
                keys.append(f"key_read={options.key_read}")
            keys.append(f"flush_read={options.flush_read}")
        return ":".join([str(replace(self.policy, options=Options())), *keys])

    @property
    def exercised(self) -> dict[str, int | None]:
        """Distinct stores (hand-off included) that a later step read back, minimum over rows, for each copy."""
        counts = {part: int(c.min()) if len(c) else 0 for part, c in self._read_stores.items()}
        return {"checkpoint": counts["checkpoint"], "read_copy": counts.get("read_copy")}

    def save(self) -> dict[str, Tensor]:
        """All that a restart needs, as tensors: stored bits, window, cursors, counters, and a ``meta`` text."""
        meta = {
            "version": SAVE_VERSION,
            "policy": str(self.policy),
            "family": self.recurrence.name,
            "shape": vars(self.shape),
            "seed": self.seed,
            "layer": self.layer,
        }
        saved = {"meta": torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)}
        saved |= {f"{p}.{n}": t.clone() for p, s in self._stores().items() for n, t in s.tensors().items()}
        saved |= {f"buffer.{name}": value.clone() for name, value in self._buffer.fields.items()}
        saved["buffer.cursor"] = self._buffer.cursor.clone()
        for part in self._unread:
            saved[f"{part}.unread"] = self._unread[part].clone()
            saved[f"{part}.read_stores"] = self._read_stores[part].clone()
        if self.rates is not None:
            saved["rates"] = self.rates.clone()
        return saved

    @classmethod
    def restore(cls, saved: dict[str, Tensor]) -> "DecodeState":
        """The state that ``save`` described; it continues bit for bit.  Raises InputError for anything else."""
        meta = checks.saved_meta(saved, SAVE_VERSION)
        try:
            return cls._restored(saved, meta)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError("saved state", sorted(saved), f"all tensors of save(): {error!r}") from error
        except InputError as error:
            if error.argument == "saved state":
                raise
            raise InputError("saved state", f"{error.argument} {error.value}", error.expected) from error

    @classmethod
    def _restored(cls, saved: dict[str, Tensor], meta: dict[str, Any]) -> "DecodeState":
        cursor = saved["buffer.cursor"]
        state = cls(
            parse_policy(meta["policy"]),
            meta["family"],
            StateShape(**meta["shape"]),
            len(cursor),
            rates=saved.get("rates"),
            seed=meta["seed"],
            layer=meta["layer"],
        )
        shape = (len(cursor), *vars(state.shape).values())[:4]
        for part, store in state._stores().items():
            store.load(_under(saved, part))
            if store.decoded.shape != shape:
                raise InputError(f"{part}.codes", tuple(store.decoded.shape), f"shape {shape}")
            if bool(store.format.error_feedback) != (store.residual is not None):
                raise InputError(f"{part}.residual", None, f"the residual of {store.format.text}")
            for name, dtype in _COUNTERS.items():
                tensor = saved[f"{part}.{name}"]
                if tensor.dtype != dtype or tensor.shape != cursor.shape:
                    given = f"{tensor.dtype} {tuple(tensor.shape)}"
                    raise InputError(f"{part}.{name}", given, f"{dtype} of shape {tuple(cursor.shape)}")
            state._unread[part] = saved[f"{part}.unread"].clone()
            state._read_stores[part] = saved[f"{part}.read_stores"].clone()
        state._buffer.fields = {n: t.clone() for n, t in _under(saved, "buffer").items() if n != "cursor"}
        state._buffer.cursor = cursor.clone()
        return state

    def _stores(self) -> dict[str, Store]:
        return {"checkpoint": self._checkpoint} | ({"read_copy": self._copy} if self._copy else {})

    def _read(self, inputs: StepInputs, rows: Tensor | None, *, output: bool = True) -> tuple[Tensor, Tensor]:
        """What the window's reads give for the current token: its d, and (if asked for) the output."""
        records = self._buffer.records(rows)
        checkpoint = _take(self._checkpoint.decoded, rows)
        copy = _take(self._copy.decoded, rows) if self._copy else checkpoint
        key_base = checkpoint if self.policy.options.key_read == "checkpoint" else copy
        heads = self.shape.heads
        k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
        delta = self.recurrence.delta_rule

        def read(base: Tensor, *vectors: Tensor) -> Tensor:
            stacked = torch.stack(vectors, 2)
            since = inputs.log_decay[:, None]
            return window_read(self.recurrence, base, records, since, stacked, self.rates)

        d, along_q = inputs.v, None
        if delta:
            assert inputs.beta is not None
            joint = read(key_base, k, q) if output and key_base is copy else read(key_base, k)
            along_q = joint[:, :, 1] if joint.shape[2] == 2 else None
            d = inputs.beta[..., None] * (inputs.v - joint[:, :, 0])
            self._note_read("read_copy" if self._copy and key_base is copy else "checkpoint", rows)
        if not output:
            return d, d
        if along_q is None:
            along_q = read(copy, q)[:, :, 0]
        self._note_read("read_copy" if self._copy else "checkpoint", rows)
        return d, along_q + d * (k * q).sum(-1, keepdim=True)

    def _flush(self, inputs: StepInputs, rows: Tensor | None) -> Tensor:
        """Fold, read, round, store; returns the output of the flushing rows."""
        if rows is not None:
            inputs = inputs.map(lambda t: t[rows])
        reads_copy = self._copy is not None and self.policy.options.flush_read == "copy"
        d, output = inputs.v, None
        if reads_copy:
            d, output = self._read(inputs, rows)
        elif self.recurrence.delta_rule and not self._raw:
            d, _ = self._read(inputs, rows, output=False)
        records: Records = with_current(self._buffer.records(rows, raw=self._raw), inputs, d, raw=self._raw)
        base = _take(self._checkpoint.decoded, rows)
        if self._raw:
            records = replace(records, d=solve_deltas(self.recurrence, base, records))
        folded = fold(self.recurrence, base, records, self.rates)
        self._note_read("checkpoint", rows)
        if output is None:
            output = matvec(folded, expand_groups(inputs.q, self.shape.heads, 1))
        self._checkpoint.write(folded, rows)
        if self._copy:
            self._copy.write(_take(self._checkpoint.decoded, rows), rows)
        self._buffer.clear(rows)
        for flags in self._unread.values():
            flags[slice(None) if rows is None else rows] = True
        return output

    def _note_read(self, part: str, rows: Tensor | None) -> None:
        unread = self._unread[part]
        if rows is None:
            self._read_stores[part] += unread
            unread.zero_()
        else:
            self._read_stores[part][rows] += unread[rows]
            unread[rows] = False

    def _checked(self, inputs: StepInputs) -> StepInputs:
        s, batch = self.shape, self.batch
        gate = (batch, *self.recurrence.gate_shape(s.heads, s.value_dim, s.key_dim))
        expected: dict[str, tuple[int, ...]] = {
            "q": (batch, s.key_heads, s.key_dim),
            "k": (batch, s.key_heads, s.key_dim),
            "v": (batch, s.heads, s.value_dim),
            "log_decay": gate,
        }
        if self.recurrence.delta_rule:
            expected["beta"] = (batch, s.heads)
        for name, shape in expected.items():
            value = getattr(inputs, name)
            checks.tensor(name, value, shape, f"shape {shape}")
        return inputs.map(lambda t: t.detach().to(self.dtype))

    def _checked_initial(self, initial: Tensor, batch: int) -> Tensor:
        expected = (batch, self.shape.heads, self.shape.value_dim, self.shape.key_dim)
        checks.tensor("initial", initial, expected, f"shape {expected}")
        return initial.detach().to(self.dtype, copy=True)  # the caller may go on to change it


def start(
    policy: str | Policy,
    family: str,
    initial: Tensor,
    *,
    key_heads: int | None = None,
    rates: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    sequence_ids: Tensor | None = None,
) -> DecodeState:
    """A decode state that begins at a prefill state, rounded once into every copy.

    policy: text or Policy.  family: a name of ``RECURRENCES``.  initial: (batch, heads, value_dim, key_dim).
    key_heads: number of heads of q and k (default: heads).  rates: A (heads, value_dim, key_dim) for mamba1.
    seed, layer, sequence_ids (batch,): name the random bits of stochastic rounding.
    Raises InputError for a policy that the family cannot use and for shapes that disagree.
    """
    checks.tensor("initial", initial, None, "shape (batch, heads, value_dim, key_dim)")
    if initial.ndim != 4 or 0 in initial.shape[1:]:
        raise InputError(
            "initial", tuple(initial.shape), "shape (batch, heads, value_dim, key_dim) above zero"
        )
    batch, heads, value_dim, key_dim = initial.shape
    groups = heads if key_heads is None else key_heads
    if not checks.is_integer(groups) or groups < 1 or heads % groups:
        raise InputError("key_heads", groups, f"a divisor of heads = {heads}")
    for name, value in (("seed", seed), ("layer", layer)):
        if not checks.is_integer(value):
            raise InputError(name, value, "an integer")
    if get_recurrence(family).needs_rates:
        checks.tensor("rates", rates, tuple(initial.shape[1:]), f"shape {tuple(initial.shape[1:])}")
    elif rates is not None:
        raise InputError("rates", tuple(rates.shape), f"None: {family} has no rates")
    shape = StateShape(heads, value_dim, key_dim, groups)
    state = DecodeState(
        parse_policy(policy),
        family,
        shape,
        batch,
        rates=rates,
        seed=seed,
        layer=layer,
        sequence_ids=sequence_ids,
    )
    state.hand_off(initial)
    return state


def check_policy_fits(policy: Policy, family: str) -> None:
    """Raise InputError if ``policy`` sets an option that ``family`` has no use for."""
    if get_recurrence(family).delta_rule:
        return
    for key, default in (("contents", None), ("key_read", "copy")):
        if getattr(policy.options, key) != default:
            raise InputError(
                "policy", str(policy), f"{key}= with a delta rule only (gated_delta): {family} has none"
            )


def _take(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _under(saved: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = part + "."
    return {name[len(prefix) :]: value for name, value in saved.items() if name.startswith(prefix)}
