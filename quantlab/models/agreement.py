"""How far apart two next-token distributions are, and whether they choose the same token."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MARGIN_EDGES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, math.inf)
"""Bins of the baseline's margin, in nats: from each number up to, and without, the next."""


@dataclass(frozen=True)
class Measures:
    """One token's distributions, baseline and policy, for each of B sequences; float64, in nats.

    kl: KL(baseline || policy).  top1: whether both have the same most likely token.  margin: between the baseline's two
    most likely tokens.  nll, baseline_nll: -log p of the token that came next, NaN where there is none.
    """

    kl: NDArray[np.float64]
    top1: NDArray[np.bool_]
    margin: NDArray[np.float64]
    nll: NDArray[np.float64]
    baseline_nll: NDArray[np.float64]


class MarginBin(NamedTuple):
    """Top-1 agreement among the tokens whose margin is at least ``low`` and below ``high``; None if there are none."""

    low: float
    high: float
    tokens: int
    agreement: float | None


def compare(baseline: Tensor, policy: Tensor, target: Tensor | None = None) -> Measures:
    """Logits (B, vocabulary) of baseline and policy, of any float dtype, and tokens (B,) that came next."""
    p, q = log_probabilities(baseline), log_probabilities(policy)
    best = p.topk(2, -1).values
    nothing = torch.full((len(p),), math.nan, dtype=torch.float64)
    nll, baseline_nll = (
        (nothing, nothing)
        if target is None
        else (-x.gather(-1, target.to(x.device)[:, None])[:, 0] for x in (q, p))
    )
    same = chosen(baseline) == chosen(policy)
    values = (divergence(p, q), same, best[:, 0] - best[:, 1], nll, baseline_nll)
    return Measures(*(value.cpu().numpy() for value in values))


def log_probabilities(logits: Tensor) -> Tensor:
    """Log softmax in float64."""
    return torch.log_softmax(logits.double(), -1)


def chosen(logits: Tensor) -> Tensor:
    """The most likely token of each row, as greedy generation takes it: (B,)."""
    return logits.float().argmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of log probabilities (B, vocabulary): never negative, and 0 for equal ones.

    As sum p (e^d - 1 - d) with d = log q - log p, of which no term is negative: sum -p d, the same number since both
    sum to 1, would lose a small divergence in the rounding of its larger terms.
    """
    mass, gap = p.exp(), q - p
    # Far apart, e^d would overflow where p vanishes; q itself does not.
    terms = torch.where(gap < 1, mass * (torch.expm1(gap) - gap), q.exp() - mass - mass * gap)
    # Where p is 0 all that is left is q; a token that neither has is worth nothing.
    return torch.where(mass > 0, terms, q.exp()).sum(-1)


def agreement_by_margin(margin: NDArray[Any], top1: NDArray[Any]) -> list[MarginBin]:
    """Agreement in each bin of MARGIN_EDGES: they hold every token once."""
    found = []
    for low, high in pairwise(MARGIN_EDGES):
        inside = (margin >= low) & ((margin < high) | (high == math.inf))
        count = int(inside.sum())
        found.append(MarginBin(low, high, count, float(top1[inside].mean()) if count else None))
    return found
