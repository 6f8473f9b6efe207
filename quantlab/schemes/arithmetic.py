"""The arithmetic of one recurrence as a policy performs it: where it rounds on the way, and in which products.

Everything here works on dense tensors and records; what is stored, and when, is the business of ``state.py``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantlab.formats import Format, parse
from quantlab.recurrences import (
    Records,
    Recurrence,
    StepInputs,
    chunk,
    expand_groups,
    fold,
    read_tokens,
    solve_deltas,
)
from quantlab.recurrences.base import matvec
from quantlab.recurrences.window import Product, Write
from quantlab.schemes.policy import Policy
from quantlab.schemes.sites import narrow, parse_sites


@dataclass(frozen=True)
class Arithmetic:
    """One family's maths under the options and rounding sites of one policy.

    rates: A (heads, value_dim, key_dim) of mamba1, else None.  sites: formats by site.  product: of a fold.
    current: what the policy makes of the current token's vectors before they are used, or None.
    """

    recurrence: Recurrence
    rates: Tensor | None
    sites: dict[str, Format]
    product: Product
    current: Write | None

    def entering(self, inputs: StepInputs, *, current: bool = True) -> StepInputs:
        """The inputs of one or several tokens after the rounding sites that they meet first.

        current: they are decoded tokens, which ``current=buffer`` narrows, not a prefill chunk.
        """
        if self.sites:
            rounded = {
                name: self._at(site, getattr(inputs, name))
                for site, name in (
                    ("q", "q"),
                    ("k", "k"),
                    ("v", "v"),
                    ("beta", "beta"),
                    ("gate", "log_decay"),
                )
                if site in self.sites and getattr(inputs, name) is not None
            }
            inputs = replace(inputs, **rounded)
        if "decay" in self.sites:
            # The logarithm in float64: it must give the rounded factor back.
            factor = self._at("decay", torch.exp(inputs.log_decay)).double()
            inputs = replace(inputs, log_decay=torch.log(factor).to(inputs.log_decay.dtype))
        if current and self.current is not None:
            inputs = replace(inputs, k=self.current(inputs.k), v=self.current(inputs.v))
        return inputs

    def base(self, decoded: Tensor) -> Tensor:
        """The decoded state as reads and folds take it."""
        return self._at("state", decoded)

    def read(
        self, base: Tensor, records: Records, tokens: StepInputs, key_base: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """d and outputs (batch, T, heads, value_dim) of T tokens on top of base and records (``read_tokens``)."""
        d, outputs = read_tokens(
            self.recurrence, base, records, tokens, self.rates, key_base, self._write(self.current)
        )
        return d, self._at("output", outputs)

    def deltas(self, base: Tensor, records: Records) -> Records:
        """Raw records with d derived from the state ``base`` that they start from."""
        return replace(records, d=solve_deltas(self.recurrence, base, records, self._write(None)))

    def fold(self, base: Tensor, records: Records) -> Tensor:
        """The dense state after ``records``, whose d is given."""
        return fold(self.recurrence, base, records, self.rates, self.product)

    def chunk(self, base: Tensor, tokens: StepInputs, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """A prefill chunk: (state, outputs)."""
        state, outputs = chunk(self.recurrence, base, tokens, self.rates, lengths)
        return state, self._at("output", outputs)

    def output(self, state: Tensor, q: Tensor) -> Tensor:
        """S q of a dense state: q (batch, key_heads, key_dim) -> (batch, heads, value_dim)."""
        return self._at("output", matvec(state, expand_groups(q, state.shape[1], 1)))

    def written(self, v: Tensor) -> Tensor:
        """d of tokens without a delta rule."""
        write = self._write(self.current)
        return v if write is None else write(v)

    def _write(self, current: Write | None) -> Write | None:
        if "d" not in self.sites:
            return current
        return lambda d: self._at("d", d) if current is None else current(self._at("d", d))

    def _at(self, site: str, x: Tensor) -> Tensor:
        format = self.sites.get(site)
        return x if format is None else narrow(x, format)


def arithmetic_of(
    policy: Policy, recurrence: Recurrence, rates: Tensor | None, buffer_round: Write
) -> Arithmetic:
    """The arithmetic that ``policy`` asks for; ``buffer_round`` is what its window makes of a vector."""
    sites = parse_sites(policy.options.sites)
    current = buffer_round if policy.options.current == "buffer" else None
    return Arithmetic(recurrence, rates, sites, _product(policy.options.dot, sites.get("dot")), current)


def _product(dot: str, site: Format | None) -> Product:
    if dot == "ieee" and site is None:
        return torch.baddbmm
    if dot == "tf32x3":
        return _three_products
    return _RoundedOperands(site or parse(dot))


@dataclass(frozen=True)
class _RoundedOperands:
    """A product of operands in a format.  A class, so that states can be pickled."""

    operand: Format

    def __call__(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return torch.baddbmm(total, narrow(left, self.operand), narrow(right, self.operand))


def _three_products(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Each operand as a TF32 number and the TF32 of the rest; the product of the rests is left out."""
    tf32 = parse("tf32")

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        high = narrow(x, tf32)
        return high, narrow(x - high, tf32)

    (left_high, left_low), (right_high, right_low) = halves(left), halves(right)
    total = torch.baddbmm(total, left_low, right_high)
    total = torch.baddbmm(total, left_high, right_low)
    return torch.baddbmm(total, left_high, right_high)
