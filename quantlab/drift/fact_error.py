"""What a policy does to the last read of a prompt, against what one fact of the prompt says in it: a closed form.

The closed form of ``predictor`` compares an error with the whole state and takes it for the same in all directions.
A read that asks for one fact is neither: the fact is a small part of the state, and its query avoids the large columns
that every token writes.  Here an error is followed to the read.  The output of the last token T is linear in the state
after any token t, o_T = S_t p_t + (what was written later), with

    p_T = q_T        p_(t-1) = decay_t * (p_t - beta_t (k_t . p_t) k_t)

(the erase of a delta rule; none for Mamba).  So an error E_t of a store behind token t reaches the output as E_t p_t.
Errors of single elements and of distinct stores are independent with zero mean:

    |error|^2 = sum over stores t, rows i, columns j of  p_tj^2 E_tij^2    (+ the same of the read copy's last encoding)

E_t is one rounding of the exact state: the state of the store before is on the grid, and what the tokens since then
have moved is added and rounded.  A block's largest element decides the step of its small ones, so that the columns of
a state count by themselves, and with them what the query takes of each.  Under error feedback the residual r_t is not
decayed: each store adds (1 - decay) r_t, and successive residuals are alike, so that these add up with their signs;
what is read lacks r_t as well unless ``ef_read=include``.

A fact is what its value changes in the output: the prompt is given twice, with another value the second time.

Source: the adjoint of the linear recurrences; measured against ``experiments/reference_models/mechanism.py``, head by
head: README there.  What it leaves out: rounding to nearest that holds a state back for many tokens.  There decay is
swallowed, small columns grow until they set the step of their block, and errors are 10 to 100 times what stands here
(``stagnation`` says where).  Of rounding sites and of buffers in less than float32 it knows nothing either.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantlab.drift.risks import cycle_length
from quantlab.drift.streams import Stream
from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.recurrences import expand_groups, get_recurrence
from quantlab.schemes import Policy, parse_policy

SEED = 24
RECENT = 32
"""Tokens before the read whose stores all count: where a state forgets fast, no others reach it."""


@dataclass(frozen=True)
class FactErrors:
    """Each (heads,), float64: root mean squares over the sequences, and over pairs of them for the fact.

    fact: size of what the other value changes in the last output.  errors: of that output, by policy.
    """

    fact: Tensor
    errors: dict[Policy, Tensor]

    def of_fact(self, policy: "str | Policy") -> float:
        """The error over the size of the fact, all heads together, so that those count that hold the fact."""
        return float((self.errors[parse_policy(policy)].square().sum() / self.fact.square().sum()).sqrt())


def read_path(stream: Stream) -> Tensor:
    """p_t for t = 0 .. steps: (steps + 1, batch, heads, 1 or value_dim, key_dim), float64.

    What the last token's read takes of an element of the state behind token t; t = 0 is the prefill state.
    """
    recurrence, heads = get_recurrence(stream.family), stream.heads
    rates = None if stream.rates is None else stream.rates.double()
    path = [expand_groups(stream.q[-1].double(), heads, 1)[..., None, :]]
    for t in range(stream.steps - 1, -1, -1):
        p = path[-1]
        if stream.beta is not None:
            k = expand_groups(stream.k[t].double(), heads, 1)[..., None, :]
            p = p - stream.beta[t].double()[..., None, None] * (k * p).sum(-1, keepdim=True) * k
        path.append(recurrence.decay(stream.log_decay[t].double(), rates) * p)
    shape = torch.broadcast_shapes(path[0].shape, path[-1].shape)
    return torch.stack([p.expand(shape) for p in reversed(path)])


def fact_errors(stream: Stream, policies: "Iterable[str | Policy]", *, every: int = 1) -> FactErrors:
    """The last read of ``stream`` under each policy.

    stream: an even batch whose second half repeats the first with another fact; its last token reads.
    every: of the stores of each token, but for the RECENT ones, one in so many is rounded and counts for all of them;
    odd where tokens come in pairs.
    Raises InputError for an odd batch, and for every < 1.
    """
    pairs_of(stream)
    if every < 1:
        raise InputError("every", every, "at least 1")
    parsed = list(dict.fromkeys(map(parse_policy, policies)))
    parts = {part: _Part(*part) for policy in parsed for part in _parts(policy, stream.steps)}
    recurrence, path = get_recurrence(stream.family), read_path(stream)
    rates = None if stream.rates is None else stream.rates.double()
    state, output = stream.initial.double(), torch.empty(0)
    before = {part.cycle: state for part in parts.values()}
    kept = {cycle: torch.ones(()).double() for cycle in before}
    with torch.inference_mode():
        for t in range(1, stream.steps + 1):
            inputs = stream.step(t - 1).to(torch.float64)
            state, output = recurrence.step(state, inputs, rates)
            factor = recurrence.decay(inputs.log_decay, rates)
            for cycle in before:
                kept[cycle] = kept[cycle] * factor
                # What the last token stores is not read any more.
                if t % cycle or t == stream.steps:
                    continue
                behind = stream.steps - t
                weight = every if cycle == 1 and behind > RECENT else 1
                for part in parts.values():
                    if part.cycle != cycle:
                        continue
                    if part.role == "read" and behind <= cycle:
                        part.read(state, path[t])
                    elif part.role != "read" and t % weight == 0:
                        part.store(before[cycle], state, kept[cycle], path[t], weight)
                before[cycle], kept[cycle] = state, torch.ones(()).double()
    one, other = output.chunk(2)
    errors = {}
    for policy in parsed:
        power = torch.zeros(1, stream.heads, dtype=torch.float64)
        for part in _parts(policy, stream.steps):
            power = power + parts[part].power()
        errors[policy] = power.mean(0).sqrt()
    return FactErrors((one - other).square().sum(-1).mean(0).sqrt(), errors)


def pairs_of(stream: Stream) -> int:
    """Half the sequences; raises InputError for an odd number."""
    if len(stream.initial) % 2:
        raise InputError("stream", f"{len(stream.initial)} sequences", "pairs that differ in a fact")
    return len(stream.initial) // 2


def _parts(policy: Policy, steps: int) -> list[tuple[Format, int, str]]:
    """Where the roundings of a policy are: (format, tokens between two of them, role)."""
    format, cycle, found = policy.checkpoint, cycle_length(policy), []
    if format.rounded:
        plain = dataclasses.replace(format, error_feedback=None)
        role = "checkpoint" if format.error_feedback is None else "feedback"
        found.append((plain, cycle, role))
        if role == "feedback" and policy.read_copy is None and policy.options.ef_read == "exclude":
            found.append((plain, cycle, "read"))
    flushes = (
        steps % cycle == 0 and policy.options.flush_read == "exact"
    )  # the last token reads the unrounded fold
    if policy.read_copy is not None and policy.read_copy.rounded and not flushes:
        found.append((policy.read_copy, cycle, "read"))
    return found


@dataclass
class _Part:
    """One kind of rounding, and what it has done to the output so far: power (batch, heads), sum (..., value_dim)."""

    format: Format
    cycle: int
    role: str
    _power: Tensor | float = 0.0
    _sum: Tensor | None = None
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(SEED))

    def read(self, state: Tensor, path: Tensor) -> None:
        """The encoding that the last read is served from."""
        self._power = _reached(self._rounding(state), path)

    def store(self, before: Tensor, after: Tensor, kept: Tensor, path: Tensor, weight: int) -> None:
        """before, after: exact states at two stores; kept: decay between them; weight: stores that this one is for."""
        if self.role == "feedback":
            found = weight * ((1 - kept) * self._rounding(after) * path).sum(-1)
            self._sum = found if self._sum is None else self._sum + found
            return
        start = self._round(before)
        self._power = self._power + weight * _reached(self._rounding(start + (after - before)), path)

    def power(self) -> Tensor:
        power = torch.as_tensor(self._power, dtype=torch.float64)
        return power if self._sum is None else power + self._sum.square().sum(-1)

    def _round(self, state: Tensor) -> Tensor:
        state, words = state.float(), None
        if self.format.stochastic:
            words = torch.randint(0, 2**32, state.shape, generator=self._generator)
        return self.format.round(state, words).double()

    def _rounding(self, state: Tensor) -> Tensor:
        return self._round(state) - state


def _reached(error: Tensor, path: Tensor) -> Tensor:
    """Power of the output's error from independent errors of the elements: (batch, heads)."""
    return (error.square() * path.square()).sum((-1, -2))
