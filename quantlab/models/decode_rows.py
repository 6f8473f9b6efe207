"""Rows that are refilled one by one: what decodes the sequences of a batch, each at its own position.

A prompt is read once, by the model's own ops and without a policy, and its ``Prefix`` is handed to as many rows as
want to go on from it.  The hand-off rounds the state once into every stored copy of each row, with the random bits of
that row's sequence: two continuations of one prompt never share their rounding.
"""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.forwards import CachedForward
from quantlab.models.graph import DecodeGraph
from quantlab.models.handles import holding_of
from quantlab.models.interception import Interception, cache_keyword, decode_states, select_rows
from quantlab.models.patching import enter_step
from quantlab.models.report import PolicyReport
from quantlab.models.row_attention import RowLengths, attend_by_rows, fill_attention, has_attention
from quantlab.models.static_cache import clear
from quantlab.recurrences import get_recurrence
from quantlab.schemes import PolicyRules
from quantlab.schemes.head_groups import fewest
from quantlab.schemes.ledger import ByteLedger, ledger
from quantlab.schemes.policy import effective_text
from quantlab.schemes.pool_rows import exercised_after

ROWS_TOGETHER = 8
"""An eager step should have a multiple of so many rows.  A product of few rows adds up in another order, and what is
left over of a vector register is computed by other instructions: of whole eights a row's numbers do not depend on how
many others there are (with the libraries that PyTorch has for CPUs)."""

Exercised = list[dict[str, int | None]]
"""Of each row: stores that a later step read back, by copy."""


@dataclass(frozen=True)
class Prefix:
    """Prompts (n, length) that a model has read: its own cache, unrounded, and logits (n, vocabulary) behind the last
    token.
    """

    cache: Any
    logits: Tensor
    length: int


class DecodeRows(Protocol):
    """``count`` rows on ``device``.

    fixed: whether their number stays, so that rows without a sequence run on.  block: tokens to decode between two
    looks at them.  copies: whether some layer has a read copy.
    """

    count: int
    fixed: bool
    block: int
    device: torch.device
    copies: bool

    def read(self, prompts: Tensor) -> Prefix:
        """Prompts of one length (n, T), T at least 2 below the capacity."""
        ...

    def admit(self, rows: Sequence[int], prefix: Prefix, sources: Sequence[int], ids: Sequence[int]) -> None:
        """Hand rows ``sources`` of a prefix to ``rows``, as new sequences of these ids."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """One token of each row (count,) -> logits (count, vocabulary), overwritten by the next step."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Row i becomes the old row ``rows[i]``, where the number of rows is not fixed."""
        ...

    def exercised(self, rows: Sequence[int], tokens: Sequence[int]) -> Exercised:
        """Of ``rows``, whose sequences have read so many tokens behind their prompts."""
        ...

    def close(self) -> None:
        """The sequences are over."""
        ...


class EagerRows:
    """Rows of an ``Interception``: every policy, every architecture that it serves, any device."""

    fixed, block = False, 1

    def __init__(self, model: nn.Module, interception: Interception, count: int, capacity: int):
        self._model, self._interception, self.count = model, interception, max(ROWS_TOGETHER, count)
        self.device = next(model.parameters()).device
        self.copies = _has_copies(interception.rules)
        self._stack: contextlib.ExitStack | None = None
        # A prompt that is thrown away, for the handles that it leaves in a cache of every kind of layer.
        forward = CachedForward(model)
        interception.sequence_ids = None
        with torch.no_grad(), interception:
            forward(torch.zeros((1, 2), dtype=torch.int64, device=self.device))
        self._cache = forward.cache
        self._lengths = RowLengths(self.count, capacity, self.device)
        with torch.no_grad(), interception:
            select_rows(self._cache, torch.zeros(self.count, dtype=torch.int64, device=self.device))
        for layer in self._cache.layers:
            if has_attention(layer):
                self._lengths.serve(layer, self.count)
        self._longest = 0
        self._takes = inspect.signature(model.forward).parameters

    @torch.no_grad()
    def read(self, prompts: Tensor) -> Prefix:
        self._leave()
        forward = CachedForward(self._model)
        logits = forward(prompts.to(self.device))
        return Prefix(forward.cache, logits, prompts.shape[1])

    @torch.no_grad()
    def admit(self, rows: Sequence[int], prefix: Prefix, sources: Sequence[int], ids: Sequence[int]) -> None:
        at, source = (torch.tensor(list(n), device=self.device) for n in (rows, sources))
        names = torch.tensor(list(ids), dtype=torch.int64)
        for layer, filled in zip(self._cache.layers, prefix.cache.layers, strict=True):
            for index, conv in getattr(filled, "conv_states", {}).items():
                if conv is not None:
                    layer.conv_states[index][at] = conv[source]
            for index, dense in getattr(filled, "recurrent_states", {}).items():
                if dense is None:
                    continue
                holding = holding_of(layer.recurrent_states[index])
                assert holding is not None
                self._interception.report.state_dtype = str(dense.dtype).removeprefix("torch.")
                holding.state.reset(at.cpu(), holding.family.to_state(dense[source]), names)
            if has_attention(filled):
                fill_attention(layer, filled, at, source)
        self._lengths.tokens[at] = prefix.length
        self._longest = max(self._longest, prefix.length)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        self._enter()
        self._longest = min(self._longest + 1, self._lengths.capacity)
        self._lengths.reach = self._longest
        options = {"position_ids": self._lengths.positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._takes}
        options |= {cache_keyword(self._model): self._cache, "use_cache": True}
        logits = self._model(input_ids=tokens[:, None], **options).logits[:, -1]
        self._lengths.advance()
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        self._enter()
        rows = list(rows) + [rows[0]] * (-len(rows) % ROWS_TOGETHER)
        at = torch.tensor(rows, device=self.device)
        select_rows(self._cache, at)
        self._lengths.take(at)
        self.count, self._longest = len(rows), int(self._lengths.tokens.max())

    def exercised(self, rows: Sequence[int], tokens: Sequence[int]) -> Exercised:
        at = torch.tensor(list(rows))
        return by_row([state.exercised_rows(at) for state in decode_states(self._cache).values()], len(at))

    def close(self) -> None:
        self._leave()
        self._interception.forget(decode_states(self._cache).values())

    def _enter(self) -> None:
        if self._stack is None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._interception)
                attend_by_rows(stack, self._model, self._lengths)
                self._stack = stack.pop_all()

    def _leave(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()


class GraphRows(DecodeGraph):
    """Rows of a ``DecodeGraph``: one CUDA graph a step, refilled in place.  On a CPU its step runs eagerly.

    Raises InputError where ``DecodeGraph`` does, and for an attention that cannot go by rows.
    """

    fixed, block = True, 16

    def __init__(self, model: nn.Module, policy: Any, count: int, capacity: int, *, seed: int = 0):
        self._lengths = RowLengths(count, capacity, next(model.parameters()).device)
        self.count = count
        super().__init__(model, policy, count, capacity, seed=seed)
        self.copies = _has_copies(self.rules)
        # Rows that no sequence has taken yet run beside the others, on zeros: a capture leaves in caches what it made
        # of memory that happened to be there, and what a mask leaves out must be finite.
        clear(self.cache)
        self._begin(torch.arange(count, device=self.device))
        for pool in self.pools.values():
            shape = pool.shape
            for slots in self.slots.split(64):
                zeros = torch.zeros(
                    len(slots), shape.heads, shape.value_dim, shape.key_dim, device=self.device
                )
                self.load_states(pool, slots, zeros)

    def _begin(self, rows: Tensor) -> None:
        """Counters of ``rows`` as before a prompt."""
        self._lengths.tokens[rows] = 0
        for counters in self._shared.values():
            for counter in (counters.cursor, counters.origin, counters.pending, counters.store_numbers):
                counter[rows] = 0

    def _number_positions(self) -> Tensor:
        for layer in self.cache.layers:
            if has_attention(layer):
                self._lengths.serve(layer, self.batch)
        return self._lengths.positions

    def _attend(self, stack: contextlib.ExitStack) -> None:
        attend_by_rows(stack, self._model, self._lengths)

    def _advance(self) -> None:
        self._lengths.advance()

    @torch.no_grad()
    def read(self, prompts: Tensor) -> Prefix:
        self._check_places()
        with contextlib.ExitStack() as stack:
            enter_step(stack, self._model, self.rules.text, reads=True)
            filled, logits = self._read(prompts.to(self.device))
        return Prefix(filled, logits, prompts.shape[1])

    @torch.no_grad()
    def admit(self, rows: Sequence[int], prefix: Prefix, sources: Sequence[int], ids: Sequence[int]) -> None:
        at, source, names = (
            torch.tensor(list(numbers), device=self.device) for numbers in (rows, sources, ids)
        )
        self._begin(at)
        for counters in self._shared.values():
            counters.sequence_ids[at] = names
        for number, (layer, filled) in enumerate(zip(self.cache.layers, prefix.cache.layers, strict=True)):
            for index, conv in getattr(filled, "conv_states", {}).items():
                if conv is not None:
                    layer.conv_states[index][at] = conv[source]
            if number in self.pools:
                dense = self._families[number].to_state(filled.recurrent_states[0][source].float())
                self.load_states(self.pools[number], self.slots[at], dense.contiguous())
            if has_attention(filled):
                fill_attention(layer, filled, at, source)
        self._lengths.tokens[at] = prefix.length
        self._steps = 0 if not self._held else self._steps
        self._held = 1

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens[:, None])
        self.replay()
        self._steps += 1
        return self.logits

    def keep(self, rows: Sequence[int]) -> None:
        raise InputError("rows", len(rows), f"all {self.count}: a captured step has as many rows each time")

    def exercised(self, rows: Sequence[int], tokens: Sequence[int]) -> Exercised:
        # The block's steps behind a sequence's end have moved the counters on.
        read = torch.tensor(list(tokens))
        return by_row([exercised_after(pool, read) for pool in self.pools.values()], len(read))

    def close(self) -> None:
        pass

    def tell(self, report: PolicyReport) -> None:
        """Add to ``report`` what an interception would have."""
        for layer, pool in self.pools.items():
            family = self._families[layer]
            recurrence = get_recurrence(pool.family)
            text = effective_text(pool.policy, delta_rule=recurrence.delta_rule)
            facts = _Facts(text, ledger(pool.policy, recurrence, pool.shape), pool.held_as)
            report.describe(layer, facts, f"graph on {self.device}: {self._serving[layer]['decode_token']}")
            report.step_hits[family.step_op, layer] += self._steps
            report.state_dtype = "float32"
        self._steps = 0


@dataclass(frozen=True)
class _Facts:
    effective_policy: str
    ledger: ByteLedger
    held_as: str


def _has_copies(rules: PolicyRules) -> bool:
    return any(policy.read_copy is not None for policy in rules.policies)


def by_row(layers: Sequence[dict[str, Tensor | None]], count: int) -> Exercised:
    """The least over the layers, row by row."""
    least = fewest(layers)
    plain = {part: None if counts is None else counts.tolist() for part, counts in least.items()}
    return [
        {part: None if counts is None else int(counts[row]) for part, counts in plain.items()}
        for row in range(count)
    ]
