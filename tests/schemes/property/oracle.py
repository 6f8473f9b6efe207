"""A decode state that keeps every input in a list: the executable specification of every policy option.

``Sequence`` is one sequence under one policy, in float64 numpy, token by token, with nothing of ``quantlab.schemes`` or
``quantlab.recurrences`` in it.  It holds every token since the hand-off (``inputs``) and how many of them the
checkpoint contains (``folded``); the window is what lies behind.  What a policy says, in its terms:

window L            a full window is L tokens; the token that completes it is folded with it (``complete``).
checkpoint          the stored state; ``store`` rounds a dense state into it and counts the store.
read copy           encode(decode(checkpoint)), made at every store; serves S q, and S k unless key_read=checkpoint.
+ef                 a store rounds t = state + residual and keeps the new residual t - decode(code).
+sr                 random words of (element, store number, sequence id, layer, part): never of the slot.
buffer=F, hilo      a record's k, d and v are read back rounded to F, or as bf16 + bf16 of the rest ("fp32" keeps what
                    the arithmetic has: here float64); sites=buffer rounds its gates and beta too.
contents=raw        (delta rules) a fold re-derives d_j = beta_j (v_j - S_{j-1}' k_j) from the checkpoint; the d that a
                    read produced serves reads alone.  derived: the fold takes that d.
current=buffer      k, v and d of the current token are rounded like the buffer's before they are used.
flush=early         before a forward with T > 0 tokens of this sequence, whatever its batch mates have, the window is
                    folded if cursor + 2 T > L; the tokens stay in it.
flush_read=copy     the token that completes a window is read like every other token; exact: from the unrounded fold.
ef_read=include     reads see checkpoint + residual, at a flush too.
schedule=step       every token is folded and stored by itself (window 1), from what the buffer kept of it.
schedule=chunk      a decode fold is kept as it is ("live"); prefill chunks and explicit flushes round.
schedule=turn       explicit flushes alone round: not even the hand-off does.
dot=F               the fold's product is sum_j F(decayed d_j) (x) F(k_j), for a decay a channel F(d_j) (x) F(decayed
                    k_j); tf32x3 splits both operands.
sites=S.F           F is applied: q k v beta gate, when a token comes in; decay, to exp(log decay); d, when it is
                    computed; state, to a checkpoint or copy that a read or a fold takes; output, to outputs.
drafts              read one after another on top of the window, seeing each other as computed; ``commit`` makes the
                    first n of them records, as the buffer kept them.

Every method that may store is a generator: it yields a ``Rounding`` and is sent (decoded values, residual), so that
``run`` can round the states of several sequences in one call of the format.
"""

from collections.abc import Generator, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from quantlab.formats import Encoded, random_words
from tests.schemes.property.rules import Array, Rules, Token, apply

PARTS = ("checkpoint", "read_copy")


@dataclass(frozen=True)
class Rounding:
    """A request to round ``dense`` (heads, value_dim, key_dim) for one store."""

    part: str
    dense: Array
    residual: Any
    number: int
    sequence_id: int


Work = Generator[Rounding, tuple[Array, Any], Any]


@dataclass
class Sequence:
    rules: Rules
    sequence_id: int
    inputs: list[Token] = field(default_factory=list)
    folded: int = 0
    drafts: list[Token] = field(default_factory=list)
    checkpoint: Array = field(default_factory=lambda: np.zeros(0))
    read_copy: Array | None = None
    residual: Any = None
    live: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    unread: dict[str, bool] = field(default_factory=dict)
    exercised: dict[str, int] = field(default_factory=dict)
    last: dict[str, Rounding] = field(default_factory=dict)
    """What the stored values were rounded from."""

    @property
    def window(self) -> list[Token]:
        return self.inputs[self.folded :]

    def clone(self) -> "Sequence":
        twin = copy(self)
        twin.inputs, twin.drafts = list(self.inputs), list(self.drafts)
        twin.numbers, twin.unread, twin.exercised = (
            dict(self.numbers),
            dict(self.unread),
            dict(self.exercised),
        )
        return twin

    # -- stores
    def hand_off(self, initial: Array) -> Work:
        self.numbers, self.residual = dict.fromkeys(PARTS, -1), None
        self.inputs, self.drafts, self.folded = [], [], 0
        self.exercised = dict.fromkeys(PARTS, 0)
        yield from self.store(initial, rounded=self.rules.options["schedule"] != "turn")

    def store(self, dense: Array, *, rounded: bool) -> Work:
        self.checkpoint, self.live = dense, not rounded
        if rounded:
            self.numbers["checkpoint"] += 1
            request = Rounding(
                "checkpoint", dense, self.residual, self.numbers["checkpoint"], self.sequence_id
            )
            self.last["checkpoint"] = request
            self.checkpoint, self.residual = yield request
        if self.rules.read_copy:
            self.numbers["read_copy"] += 1
            request = Rounding(
                "read_copy", self.checkpoint, None, self.numbers["read_copy"], self.sequence_id
            )
            self.last["read_copy"] = request
            self.read_copy, _ = yield request
        self.folded = len(self.inputs)
        self.unread = {"checkpoint": rounded, "read_copy": True}

    def fold_and_store(self, count: int | None = None) -> Work:
        """Fold the first ``count`` records of the window (all by default) in a decode step."""
        records = self.window if count is None else self.window[:count]
        until = self.folded + len(records)
        dense = self.dense(records)
        yield from self.store(dense, rounded=self.rounds_decode)
        self.folded = until
        return dense

    @property
    def rounds_decode(self) -> bool:
        return self.rules.options["schedule"] in ("flush", "step")

    def dense(self, records: list[Token]) -> Array:
        self.note("checkpoint")
        return self.rules.fold(self.rules.at("state", self.checkpoint), records)

    def note(self, part: str) -> None:
        """A store counts as exercised once, when it is first read back."""
        self.exercised[part] += self.unread[part]
        self.unread[part] = False

    # -- reads
    def with_residual(self, decoded: Array, residual: Any) -> Array:
        if residual is None or self.rules.options["ef_read"] != "include":
            return decoded
        return decoded + self.rules.checkpoint.residual_values(residual)[0].double().numpy()

    def views(self) -> dict[str, Array]:
        """By the part that serves them: what reads see of the state, window included."""
        r = self.rules
        views = {"checkpoint": self.checkpoint} | (
            {} if self.read_copy is None else {"read_copy": self.read_copy}
        )
        if not self.live and not r.read_copy:
            views["checkpoint"] = self.with_residual(self.checkpoint, self.residual)
        for part in views:
            views[part] = r.at("state", views[part])
            for record in self.window:
                views[part] = r.advance(views[part], record, record.d)
        return views

    def read_state(self) -> Array:
        return self.views()["read_copy" if self.rules.read_copy else "checkpoint"]

    def read(self, tokens: list[Token], *, output: bool = True) -> tuple[list[Array], list[Array]]:
        """d and output of each token, on top of the stored views and the window."""
        r = self.rules
        read_from = "read_copy" if r.read_copy else "checkpoint"
        keys_from = "checkpoint" if r.options["key_read"] == "checkpoint" else read_from
        if r.delta:
            self.note(keys_from)
        if output:
            self.note(read_from)
        return self.read_on(self.views(), keys_from, read_from, tokens)

    def read_on(
        self, views: dict[str, Array], keys_from: str, read_from: str, tokens: Iterable[Token]
    ) -> tuple[list[Array], list[Array]]:
        r, deltas, outputs = self.rules, [], []
        for token in tokens:
            d = r.written(r.delta_of(r.decay(token.gate) * views[keys_from], token))
            views = {part: r.advance(view, token, d) for part, view in views.items()}
            deltas.append(d)
            outputs.append(r.at("output", apply(views[read_from], token.q)))
        return deltas, outputs

    # -- operations
    def forward(self, tokens: list[Token]) -> Work:
        """d and outputs of tokens, at least one, that stay in the window."""
        if self.rules.early and self.window and len(self.window) + 2 * len(tokens) > self.rules.window:
            if self.rules.stored_view:
                found = self.read(tokens)
                yield from self.fold_and_store()
            else:
                dense = yield from self.fold_and_store()
                found = self.read_on({"fold": dense}, "fold", "fold", tokens)
        else:
            found = self.read(tokens)
        return found

    def step(self, token: Token) -> Work:
        token = self.rules.entering(token)
        if self.rules.early or len(self.window) < self.rules.window - 1:
            (d,), (output,) = yield from self.forward([token])
            self.inputs.append(self.rules.kept(token, d))
            return output
        return (yield from self.complete(token))

    def complete(self, token: Token) -> Work:
        """The token that fills the window."""
        r, output = self.rules, None
        d = r.written(token.v)  # what a delta rule writes follows, or is derived by the fold
        if r.stored_view:
            (d,), (output,) = self.read([token])
        elif r.delta and not r.raw:
            (d,), _ = self.read([token], output=False)
        dense = self.dense([*self.window, replace(token, d=d)])
        if output is None:
            output = r.at("output", apply(dense, token.q))
        self.inputs.append(r.kept(token, d))
        if r.options["schedule"] == "step":
            dense = self.dense(self.window)
        yield from self.store(dense, rounded=self.rounds_decode)
        return output

    def verify(self, tokens: list[Token]) -> Work:
        if not tokens:
            return []
        tokens = [self.rules.entering(t) for t in tokens]
        if self.rules.options["schedule"] == "step":
            deltas, outputs = yield from self.verify_rounded(tokens)
        else:
            deltas, outputs = yield from self.forward(tokens)
        self.drafts = [self.rules.kept(t, d) for t, d in zip(tokens, deltas, strict=True)]
        return outputs

    def verify_rounded(self, tokens: list[Token]) -> Work:
        """Each draft sees the rounded state that single steps would have stored; nothing is stored."""
        r, deltas, outputs = self.rules, [], []
        self.note("checkpoint")
        decoded, residual, number = self.checkpoint, self.residual, self.numbers["checkpoint"]
        for token in tokens:
            base = r.at("state", decoded)
            view = r.at("state", self.with_residual(decoded, residual))
            (d,), (output,) = self.read_on({"view": view}, "view", "view", [token])
            if not r.stored_view:
                output = r.at("output", apply(r.fold(base, [replace(token, d=d)]), token.q))
            number += 1
            request = Rounding(
                "checkpoint", r.fold(base, [r.kept(token, d)]), residual, number, self.sequence_id
            )
            decoded, residual = yield request
            deltas.append(d)
            outputs.append(output)
        return deltas, outputs

    def commit(self, count: int) -> Work:
        self.inputs += self.drafts[:count]
        self.drafts = []
        while not self.rules.early and len(self.window) >= self.rules.window:
            yield from self.fold_and_store(self.rules.window)

    def extend(self, tokens: list[Token]) -> Work:
        """A prefill chunk: on the unrounded fold of what is stored, d at no site, one store behind it."""
        if not tokens:
            return []
        r, outputs, state = self.rules, [], self.dense(self.window)
        for token in tokens:
            token = r.entering(token, current=False)
            state = r.advance(state, token, site=False)
            outputs.append(r.at("output", apply(state, token.q)))
            self.inputs.append(token)
        yield from self.store(state, rounded=r.options["schedule"] != "turn")
        return outputs

    def flush(self) -> Work:
        if self.window or self.live:
            yield from self.store(self.dense(self.window), rounded=True)

    def materialize(self) -> Array:
        """The logical state, drafts left out."""
        return self.rules.fold(self.checkpoint, self.window)


def run(rules: Rules, works: list[Work]) -> list[Any]:
    """Bring several generators to their ends, their roundings batched; what each returned."""
    results: list[Any] = [None] * len(works)
    waiting: dict[int, Rounding] = {}

    def go(index: int, answer: tuple[Array, Any] | None) -> None:
        try:
            waiting[index] = works[index].send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(works)):
        go(index, None)
    while waiting:
        for part in PARTS:
            asked = {i: request for i, request in waiting.items() if request.part == part}
            for i in asked:
                del waiting[i]
            for i, answer in zip(asked, round_states(rules, list(asked.values())), strict=True):
                go(i, answer)
    return results


def round_states(rules: Rules, requests: list[Rounding], scale: float = 1.0) -> list[tuple[Array, Any]]:
    """(decoded values, residual) of each request; all belong to one part.  scale: of the states, to look for ties."""
    if not requests:
        return []
    part = requests[0].part
    form = rules.checkpoint if part == "checkpoint" else rules.read_copy
    assert form is not None
    dense = torch.from_numpy(np.stack([r.dense for r in requests])) * scale
    words = None
    if form.stochastic:
        numbers, ids = (torch.tensor([getattr(r, n) for r in requests]) for n in ("number", "sequence_id"))
        words = random_words(tuple(dense.shape), rules.seed, numbers, ids, rules.layer, PARTS.index(part))  # type: ignore
    residual = None
    if form.error_feedback and any(r.residual is not None for r in requests):
        zero = next(map_tensors(r.residual, torch.zeros_like) for r in requests if r.residual is not None)
        residual = stack([zero if r.residual is None else r.residual for r in requests])
    encoded = form.quantize(dense, words, residual)
    decoded = form.dequantize(encoded).double().numpy()
    kept = encoded.residual
    return [
        (decoded[i], None if kept is None else map_tensors(kept, lambda t, i=i: t[i : i + 1]))
        for i in range(len(requests))
    ]


def map_tensors(residual: Any, function: Any) -> Any:
    """A residual is a tensor or itself encoded."""
    if not isinstance(residual, Encoded):
        return function(residual)
    scales, shared = residual.scales, residual.global_scale
    return Encoded(
        function(residual.codes),
        None if scales is None else function(scales),
        None if shared is None else function(shared),
    )


def stack(residuals: list[Any]) -> Any:
    first = residuals[0]
    if not isinstance(first, Encoded):
        return torch.cat(residuals)
    parts = {}
    for name in ("codes", "scales", "global_scale"):
        values = [getattr(r, name) for r in residuals]
        parts[name] = None if values[0] is None else torch.cat(values)
    return Encoded(**parts)
