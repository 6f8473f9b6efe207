"""Drives a SlotPool and the naive pool through the same operations, and compares everything after each.

An operation is (name, arguments); its numbers come from the seed among them, so that a schedule is plain text and any
part of it is a schedule too.  What the naive pool objects to must be refused by the real one, with nothing changed.
"""

import os
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded
from quantlab.recurrences import StepInputs
from quantlab.schemes import SlotPool, StateShape, load_decode_state, save_decode_state
from tests.schemes.property.oracle import Rounding, Sequence, map_tensors, round_states
from tests.schemes.property.pool import NaivePool
from tests.schemes.property.rules import Array, Token, rules

Operation = tuple[str, dict[str, Any]]

HEADS, KEY_HEADS, SLOTS, DRAFTS = 2, 1, 6, 5
SHAPES = {"mamba2": (4, 16), "gated_delta": (8, 16), "kimi_delta": (4, 16), "mamba1": (6, 16)}
"""value_dim, key_dim"""
TOLERANCE = 1e-11
"""Both sides compute in float64, in another order.  An output is a sum of at most 16 products from the state and 16 of
each of at most 12 tokens of the window and the forward, every one below 1e2 (unit keys, normal values, no decay above
1), after as many updates of the state: 12 * 16 * 12 * 1e2 * 2^-53 < 3e-11 if every rounding went the same way, a
hundredth of it as they come.  The finest difference to be seen is a step of fp32, 2^-24 of a value near 1."""
TIE = 1e-12
"""Relative: how far apart the two unrounded states may be for a rounding to go two ways.

They are about 1e-15 apart, and the ties of fp32, the closest together, 2^-24: one value in 3e7 is rounded to the other
neighbour, fewer under every narrower format.  Such a value may be either of the two, the oracle goes on from the one
that the pool has, and the number of times is printed.  (An orbit of exact ties would be another matter: the decays are
exponentials of random numbers, so that sums do not fall on ties but by this chance.)"""


class Mismatch(AssertionError):
    """The pool and the oracle disagree."""


class World:
    """A SlotPool, its oracle, and what was saved of both."""

    def __init__(self, policy: str, family: str, null: str, seed: int):
        value_dim, key_dim = SHAPES[family]
        generator = np.random.default_rng(seed)
        rates = -generator.uniform(0.2, 4.0, (HEADS, value_dim, key_dim)) if family == "mamba1" else None
        self.shape, self.family = (HEADS, value_dim, key_dim), family
        self.pool = SlotPool(
            policy,
            family,
            StateShape(HEADS, value_dim, key_dim, KEY_HEADS),
            SLOTS,
            rates=None if rates is None else torch.from_numpy(rates),
            seed=seed,
            layer=3,
            null=null,
            drafts=DRAFTS,
            arithmetic=torch.float64,
        )
        found = rules(
            policy,
            family,
            heads=HEADS,
            value_dim=value_dim,
            drafts=DRAFTS,
            rates=rates,
            seed=seed,
            layer=3,
        )
        self.naive = NaivePool(found, SLOTS, 1 if null == "zero" else 0)
        self.saved: list[tuple[dict[str, Tensor], Sequence]] = []
        self.ties = 0
        self.poison(freed=list(range(self.naive.first, SLOTS)))

    @property
    def state(self) -> Any:
        return self.pool._state

    def apply(self, operation: Operation) -> bool:
        """Do it on both sides and compare; whether it was legal.  Raises Mismatch."""
        name, arguments = operation
        if name == "restore" and arguments["index"] >= len(self.saved):
            return False
        objections = self.naive.objections(name, arguments)
        if objections:
            self.refused(operation, objections)
            return False
        try:
            getattr(self, name)(**arguments)
        except (InputError, ArithmeticError, RuntimeError, IndexError) as error:
            raise Mismatch(f"{name}: {type(error).__name__}: {error}") from error
        self.compare()
        self.poison()
        return True

    def refused(self, operation: Operation, objections: list[tuple[str, ...]]) -> None:
        before = self.bits()
        try:
            getattr(self, operation[0])(**operation[1])
        except InputError as error:
            message = str(error)
        else:
            raise Mismatch(f"{operation} was not refused: {objections}")
        if "\n" in message or not any(all(word in message for word in words) for words in objections):
            raise Mismatch(f"{message!r} has the words of none of {objections}")
        after = self.bits()
        for name, value in before.items():
            if not torch.equal(value, after[name]):
                raise Mismatch(f"a refused {operation[0]} changed {name}")

    # -- operations, on the pool first: what it refuses has then not touched the oracle
    def allocate(self, seed: int, state: bool, sequence_id: int | None) -> None:
        initial = self.initial(seed, state)
        slot = self.pool.allocate(torch.from_numpy(initial) if state else None, sequence_id)
        require(slot == self.naive.allocate(initial, sequence_id), "allocate: another slot")

    def reset(self, slot: int, seed: int, state: bool, sequence_id: int | None) -> None:
        initial = self.initial(seed, state)
        self.pool.reset(slot, torch.from_numpy(initial) if state else None, sequence_id)
        self.naive.reset(slot, initial, sequence_id)

    def free(self, slot: int) -> None:
        self.pool.free(slot)
        del self.naive.held[slot]
        self.poison(freed=[slot])

    def copy(self, source: int, target: int) -> None:
        self.pool.copy(source, target)
        self.naive.select([target], [source])

    def fork(self, slot: int, count: int, sequence_ids: list[int] | None) -> None:
        targets = self.pool.fork(slot, count, sequence_ids)
        require(targets == self.naive.fork(slot, count, sequence_ids), "fork: other slots")

    def select(self, slots: list[int], sources: list[int]) -> None:
        self.pool.select(slots, torch.tensor(sources, dtype=torch.int32))
        self.naive.select(slots, sources)

    def preempt(self, slot: int) -> None:
        saved = self.pool.preempt(slot)
        self.saved.append((saved, self.naive.held.pop(slot)))
        self.poison(freed=[slot])

    def snapshot(self, slot: int) -> None:
        saved = self.pool.snapshot(slot)
        self.naive.flush([slot])
        self.saved.append((saved, self.naive.held[slot].clone()))

    def restore(self, index: int) -> None:
        saved, sequence = self.saved[index]
        slot = self.pool.restore(saved)
        del self.saved[index]
        require(slot == self.naive.restore(sequence), "restore: another slot")

    def step(self, slots: list[int], seed: int, spoil: str | None = None) -> None:
        inputs, tokens = self.tokens(slots, 1, None, seed)
        outputs = self.pool.step(spoiled(inputs.token(0), spoil), slots)
        self.same(outputs, self.naive.step(tokens, slots), "output of step")

    def verify(
        self,
        slots: list[int],
        count: int,
        lengths: list[int] | None,
        seed: int,
        spoil: str | None = None,
    ) -> None:
        inputs, tokens = self.tokens(slots, count, lengths, seed)
        used = None if lengths is None else torch.tensor(lengths)
        outputs = self.pool.verify(spoiled(inputs, spoil), slots, used)
        self.same(outputs, self.naive.verify(tokens, slots, count), "output of verify")

    def extend(
        self,
        slots: list[int],
        count: int,
        lengths: list[int] | None,
        seed: int,
        spoil: str | None = None,
    ) -> None:
        inputs, tokens = self.tokens(slots, count, lengths, seed)
        used = None if lengths is None else torch.tensor(lengths)
        outputs = self.pool.extend(spoiled(inputs, spoil), torch.tensor(slots), used)
        self.same(outputs, self.naive.extend(tokens, slots, count), "output of extend")

    def commit(self, slots: list[int], counts: list[int]) -> None:
        self.pool.commit(torch.tensor(counts), slots)
        self.naive.commit(counts, slots)

    def flush(self, slots: list[int]) -> None:
        self.pool.flush(slots)
        self.naive.flush(slots)

    def read(self, slot: int) -> None:
        state = self.pool.materialize(slot)
        sequence = self.naive.held[slot]
        self.same(state, sequence.materialize(), "materialize")
        if sequence.rules.options["dot"] == "ieee" and "dot" not in sequence.rules.sites:
            seen = self.state.read_state(torch.tensor([slot]))[0]
            self.same(seen, sequence.read_state(), "read_state")
        require(self.pool.cursor(slot) == len(sequence.window), "cursor")
        require(self.pool.pending(slot) == len(sequence.drafts), "pending")
        self.compare_records(slot)

    def file(self) -> None:
        """The process ends and another goes on from the file."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "state.safetensors")
            save_decode_state(self.state, path)
            self.pool._state = load_decode_state(path)
        self.state.row_name = "slot"

    # -- inputs
    def initial(self, seed: int, state: bool) -> Array:
        return np.random.default_rng(seed).standard_normal(self.shape) if state else np.zeros(self.shape)

    def tokens(
        self, slots: list[int], count: int, lengths: list[int] | None, seed: int
    ) -> tuple[StepInputs, list[list[Token]]]:
        """The same tokens for both sides; null rows and what lies behind a length is NaN."""
        draw = np.random.default_rng(seed)
        (heads, value_dim, key_dim), lead = self.shape, (len(slots), count)
        k = draw.standard_normal((*lead, KEY_HEADS, key_dim))
        gates = {"kimi_delta": (heads, key_dim), "mamba1": (heads, value_dim)}.get(self.family, (heads,))
        gate = -draw.exponential(0.3, (*lead, *gates))
        # Now and then nothing decays, and everything.
        gate[draw.random(lead) < 0.05] = 0.0
        gate[draw.random(lead) < 0.03] = -np.inf
        arrays = {
            "q": draw.standard_normal((*lead, KEY_HEADS, key_dim)) / 4,
            "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
            "v": draw.standard_normal((*lead, heads, value_dim)),
            "log_decay": -gate if self.family == "mamba1" else gate,
        }
        if self.naive.rules.delta:
            arrays["beta"] = draw.uniform(0.0, 2.0, (*lead, heads))
        lengths = [count] * len(slots) if lengths is None else lengths
        tokens = []
        for row, slot in enumerate(slots):
            used = lengths[row] if slot >= self.naive.first else 0
            for value in arrays.values():
                value[row, used:] = np.nan
            tokens.append([self.token({n: a[row, t] for n, a in arrays.items()}) for t in range(used)])
        return StepInputs(**{n: torch.from_numpy(a) for n, a in arrays.items()}), tokens

    def token(self, entry: dict[str, Array]) -> Token:
        q, k = (np.repeat(entry[name], HEADS // KEY_HEADS, 0) for name in ("q", "k"))
        return Token(q, k, entry["v"], entry["log_decay"], entry.get("beta"))

    # -- comparisons
    def same(self, found: Tensor, expected: Array, what: str) -> None:
        error = np.abs(found.numpy() - expected).max(initial=0.0)
        require(error <= TOLERANCE, f"{what} differs by {error:.3g}")

    def compare(self) -> None:
        """Everything that is stored, of every held slot: what an operation had no business with must be as it was."""
        state, held = self.state, self.naive.held
        cursor, pending = state.cursor.tolist(), state.pending.tolist()
        for slot, sequence in held.items():
            require(cursor[slot] == len(sequence.window), f"slot {slot}: cursor {cursor[slot]}")
            require(pending[slot] == len(sequence.drafts), f"slot {slot}: {pending[slot]} drafts")
        for part, store in state._stores().items():
            numbers, ids, live = (t.tolist() for t in (store.numbers, store.sequence_ids, store.live))
            unread, exercised = state._unread[part].tolist(), state._read_stores[part].tolist()
            decoded = store.decoded.numpy()
            for slot, s in held.items():
                found = (numbers[slot], ids[slot], live[slot], unread[slot], exercised[slot])
                rounded = part == "read_copy" or not s.live
                expected = (s.numbers[part], s.sequence_id, not rounded, s.unread[part], s.exercised[part])
                require(
                    found == expected,
                    f"slot {slot}, {part}: number, sequence, live, unread, exercised {found}, not {expected}",
                )
                if rounded:
                    self.compare_stored(slot, part, decoded[slot], store.residual)
                else:
                    self.same(store.decoded[slot], s.checkpoint, f"slot {slot}: unrounded checkpoint")

    def compare_stored(self, slot: int, part: str, decoded: Array, residual: Any) -> None:
        s = self.naive.held[slot]
        expected = s.checkpoint if part == "checkpoint" else s.read_copy
        assert expected is not None
        if residual is not None:
            residual = map_tensors(residual, lambda t: t[slot : slot + 1])
        kept = s.residual if part == "checkpoint" else None  # a read copy has none
        if np.array_equal(decoded, expected) and same_residual(residual, kept):
            return
        # Within rounding errors of a tie, or of the threshold of a scale, both neighbours are right.
        request = s.last[part]
        near = [round_states(s.rules, [request], scale)[0] for scale in (1 - TIE, 1.0, 1 + TIE)]
        between(decoded, [d for d, _ in near], f"slot {slot}: decoded {part}")
        if residual is not None:
            form = s.rules.checkpoint
            values = [form.residual_values(r).numpy() for _, r in near]
            between(form.residual_values(residual).numpy(), values, f"slot {slot}: residual")
        self.ties += 1
        if part == "read_copy":
            s.read_copy = decoded.copy()
            return
        s.checkpoint = decoded.copy()
        s.residual = None if residual is None else map_tensors(residual, torch.clone)
        if s.read_copy is not None:
            again = s.last["read_copy"]
            s.last["read_copy"] = Rounding(again.part, s.checkpoint, None, again.number, again.sequence_id)
            s.read_copy = round_states(s.rules, [s.last["read_copy"]])[0][0]

    def compare_records(self, slot: int) -> None:
        """The records of a window, and that the codes give the decoded values."""
        window, state = self.naive.held[slot].window, self.state
        records = state._buffer.records(torch.tensor([slot]), raw=False)
        require(len(records) == len(window), "records")
        for j, record in enumerate(window):
            self.same(records.k[0, j].repeat_interleave(HEADS // KEY_HEADS, 0), record.k, "k of a record")
            self.same(records.d[0, j], record.d, "d of a record")  # type: ignore
            gates = [np.exp(-np.abs(gate)) for gate in (records.log_decay[0, j].numpy(), record.gate)]
            self.same(torch.from_numpy(gates[0]), gates[1], "decay of a record")
        for part, store in state._stores().items():
            if not store.live[slot]:
                decoded = store.format.dequantize(store.encoded)[slot].double()
                require(torch.equal(decoded, store.decoded[slot]), f"codes of the {part}")

    def poison(self, freed: list[int] | None = None) -> None:
        """NaN wherever nothing may be read: outside the used ring, and in freed slots."""
        buffer = self.state._buffer
        if buffer.fields:
            unused = ~buffer.used()
            for value in buffer.fields.values():
                value[unused] = torch.nan
        if freed:
            stored = {store: tensors_of(store.encoded) for store in self.state._stores().values()}
            for store, tensors in stored.items():
                for tensor in tensors:
                    poison(tensor, freed)
                poison(store.decoded, freed)
                store.numbers[freed], store.sequence_ids[freed] = 1 << 40, -7

    def bits(self) -> dict[str, Tensor]:
        state, buffer = self.state, self.state._buffer
        found = {f"buffer.{n}": v for n, v in buffer.fields.items()}
        found |= {"cursor": buffer.cursor, "origin": buffer.origin, "pending": buffer.pending}
        found |= {"held": self.pool._held, "next id": torch.tensor(self.pool._next_id)}
        for part, store in state._stores().items():
            found |= {f"{part}.{n}": t for n, t in enumerate(tensors_of(store.encoded))}
            found |= {f"{part}.decoded": store.decoded, f"{part}.numbers": store.numbers}
            found |= {f"{part}.ids": store.sequence_ids, f"{part}.live": store.live}
            found |= {f"{part}.unread": state._unread[part], f"{part}.read": state._read_stores[part]}
        return {n: t.nan_to_num(123.0) if t.is_floating_point() else t.clone() for n, t in found.items()}


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Mismatch(what)


def between(found: Array, near: list[Array], what: str) -> None:
    inside = (found >= np.min(near, 0)) & (found <= np.max(near, 0))
    require(bool(inside.all()), f"{what}: {int((~inside).sum())} values differ")


def same_residual(found: Any, expected: Any) -> bool:
    """A sequence whose residual is None has the zeros of a hand-off."""
    if found is None:
        return expected is None
    if expected is None:
        return all(not bool(t.any()) for t in tensors_of(found)[:1])
    return all(torch.equal(a, b) for a, b in zip(tensors_of(found), tensors_of(expected), strict=True))


def tensors_of(encoded: Any) -> list[Tensor]:
    if not isinstance(encoded, Encoded):
        return [encoded]
    parts = (encoded.codes, encoded.scales, encoded.global_scale)
    parts += (encoded.key_factor, encoded.value_factor, encoded.key_scales)
    left = [] if encoded.residual is None else tensors_of(encoded.residual)
    return [t for t in parts if t is not None] + left


def poison(tensor: Tensor, rows: list[int]) -> None:
    """NaN, or a code that is neither zero nor the largest."""
    tensor[rows] = torch.nan if tensor.is_floating_point() else 5  # type: ignore


def spoiled(inputs: StepInputs, name: str | None) -> StepInputs:
    """With one entry too few in the last dimension of the tensor ``name``."""
    if name is None:
        return inputs
    return StepInputs(**(vars(inputs) | {name: getattr(inputs, name)[..., :-1]}))
