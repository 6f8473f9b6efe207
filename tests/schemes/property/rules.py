"""A policy in a family, read from its text alone, and the arithmetic that it prescribes, in float64 numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantlab.formats import Format, parse

Array = np.ndarray
MANTISSA = {"bf16": (8, -133), "fp16": (11, -24), "tf32": (11, -136)}
"""Significant bits and the exponent of the smallest subnormal."""


def narrow(x: Array, name: str) -> Array:
    """Round to nearest, ties to even, into an element without overflow."""
    bits, lowest = MANTISSA[name]
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent - bits, lowest))
    return np.where(np.isfinite(x), np.rint(x / quantum) * quantum, x)


def halves(x: Array, name: str) -> tuple[Array, Array]:
    high = narrow(x, name)
    return high, narrow(x - high, name)


@dataclass(frozen=True)
class Token:
    """q, k (heads, key_dim), v, d (heads, value_dim), beta (heads,), gate: log decay in the family's shape."""

    q: Array
    k: Array
    v: Array
    gate: Array
    beta: Array | None
    d: Array | None = None


def apply(state: Array, vector: Array) -> Array:
    """S w of every head: (heads, value_dim, key_dim), (heads, key_dim) -> (heads, value_dim)."""
    return (state * vector[:, None, :]).sum(-1)


@dataclass(frozen=True)
class Rules:
    """A policy in a family, read from its text by splitting it."""

    family: str
    checkpoint: Format
    read_copy: Format | None
    window: int
    options: dict[str, str]
    sites: dict[str, str]
    heads: int
    value_dim: int
    drafts: int
    rates: Array | None = None
    seed: int = 0
    layer: int = 0

    @property
    def delta(self) -> bool:
        return self.family in ("gated_delta", "kimi_delta")

    @property
    def raw(self) -> bool:
        """With window 1 and a copy the current token's d is what the copy gave."""
        one_copy = self.policy_window == 1 and self.read_copy is not None
        return self.delta and self.options["contents"] == "raw" and not one_copy

    @property
    def policy_window(self) -> int:
        return int(self.options["window"])

    @property
    def early(self) -> bool:
        return self.options["flush"] == "early"

    @property
    def stored_view(self) -> bool:
        """Whether even a token that completes a window is read through what is stored."""
        if self.read_copy is not None:
            return self.options["flush_read"] == "copy"
        return self.options["ef_read"] == "include"

    @property
    def most_drafts(self) -> int:
        return min(self.drafts, self.window) if self.early else self.drafts

    def at(self, site: str, x: Array) -> Array:
        return narrow(x, self.sites[site]) if site in self.sites else x

    def buffered(self, x: Array) -> Array:
        """A vector as the buffer gives it back."""
        name = self.options["buffer"]
        if name == "hilo":
            high, rest = halves(x, "bf16")
            x = high + rest
        elif name != "fp32":
            x = narrow(x, name)
        return self.at("buffer", x)

    def written(self, d: Array) -> Array:
        d = self.at("d", d)
        return self.buffered(d) if self.options["current"] == "buffer" else d

    def decay(self, log_decay: Array) -> Array:
        """Factor that broadcasts against (heads, value_dim, key_dim)."""
        if self.family == "mamba1":
            assert self.rates is not None
            return np.exp(log_decay[:, :, None] * self.rates)
        return (
            np.exp(log_decay)[:, None, :] if self.family == "kimi_delta" else np.exp(log_decay)[:, None, None]
        )

    def entering(self, token: Token, *, current: bool = True) -> Token:
        q, k, v, gate = (self.at(s, getattr(token, s)) for s in ("q", "k", "v", "gate"))
        if "decay" in self.sites:
            with np.errstate(divide="ignore"):
                gate = np.log(self.at("decay", np.exp(gate)))
        if current and self.options["current"] == "buffer":
            k, v = self.buffered(k), self.buffered(v)
        return Token(q, k, v, gate, None if token.beta is None else self.at("beta", token.beta))

    def kept(self, token: Token, d: Array) -> Token:
        beta = None if token.beta is None else self.at("buffer", token.beta)
        return Token(
            token.q, self.buffered(token.k), self.buffered(token.v), self.at("buffer", token.gate), beta,
            self.buffered(d),
        )  # fmt: skip

    def advance(self, state: Array, token: Token, d: Array | None = None, *, site: bool = True) -> Array:
        """One token of the recurrence; without d a delta rule derives it here."""
        state = self.decay(token.gate) * state
        if d is None:
            d = self.delta_of(state, token)
            d = self.at("d", d) if site else d
        return state + d[:, :, None] * token.k[:, None, :]

    def delta_of(self, decayed: Array, token: Token) -> Array:
        if not self.delta:
            return token.v
        assert token.beta is not None
        return token.beta[:, None] * (token.v - apply(decayed, token.k))

    def fold(self, base: Array, records: list[Token]) -> Array:
        """base after records, with the d of a fold."""
        deltas, state = [], base
        for record in records:
            d = record.d
            if self.raw:
                d = self.at("d", self.delta_of(self.decay(record.gate) * state, record))
            assert d is not None
            deltas.append(d)
            state = self.advance(state, record, d)
        dot = self.sites.get("dot") or self.options["dot"]
        return self.product(base, records, deltas, dot) if records and dot != "ieee" else state

    def product(self, base: Array, records: list[Token], deltas: list[Array], dot: str) -> Array:
        total = self.decay(np.sum([r.gate for r in records], 0)) * base
        for j, (record, d) in enumerate(zip(records, deltas, strict=True)):
            later = np.exp(np.sum([r.gate for r in records[j + 1 :]], 0) + np.zeros_like(record.gate))
            k = record.k
            if self.family == "kimi_delta":
                k = k * later
            else:
                d = d * later[:, None]
            if dot == "tf32x3":
                (left, left_rest), (right, right_rest) = halves(d, "tf32"), halves(k, "tf32")
                pairs = [(left_rest, right), (left, right_rest), (left, right)]
            else:
                pairs = [(narrow(d, dot), narrow(k, dot))]
            for left, right in pairs:
                total = total + left[:, :, None] * right[:, None, :]
        return total


def rules(policy: str, family: str, heads: int, value_dim: int, drafts: int, **more: Any) -> Rules:
    stores, _, rest = policy.partition("@")
    window, *given = rest.split(":")
    checkpoint, _, read_copy = stores.partition("/")
    options = {
        "window": window, "buffer": "fp32", "contents": "raw", "key_read": "copy", "flush_read": "exact",
        "current": "exact", "flush": "full", "schedule": "flush", "dot": "ieee", "ef_read": "exclude", "sites": "",
    } | dict(option.split("=") for option in given)  # fmt: skip
    sites = {s: f or "bf16" for s, _, f in (p.partition(".") for p in options["sites"].split("+") if p)}
    length = 1 if options["schedule"] == "step" else int(window)
    copied = parse(read_copy) if read_copy else None
    return Rules(family, parse(checkpoint), copied, length, options, sites, heads, value_dim, drafts, **more)
