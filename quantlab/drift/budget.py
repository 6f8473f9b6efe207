"""A policy for every head of a model so that the predicted error is least within a budget of bytes."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantlab.drift.heads import HeadStatistics
from quantlab.drift.knapsack import Assignments, least_cost, least_error
from quantlab.drift.risks import HeadRisks, head_risks
from quantlab.errors import InputError
from quantlab.recurrences import get_recurrence
from quantlab.schemes import Policy, StateShape, check_policy_fits, parse_policy
from quantlab.schemes.ledger import ledger
from quantlab.schemes.rules import PolicyRules, Rule

BASELINE = "fp32@1"
LADDER = tuple(
    f"{stores}@16:buffer=bf16"
    for stores in (
        "fp32",
        "fp16+sr",
        "fp16+sr/fp8",
        "fp32/nvfp4",
        "fp16+sr/nvfp4",
        "fp8+sr/nvfp4",
    )
)
"""Policies to choose from, wide to narrow; kernels serve all of them."""
LONGEST_LADDER = 8
_UNITS = 1024  # of a byte, in which costs are whole numbers


@dataclass(frozen=True)
class LayerShare:
    """A layer in an allocation.

    counts: heads at each policy of the ladder.  bytes_per_token: read and written.  output_error: root mean square over
    the heads with a prediction; NaN without any.
    """

    layer: int
    counts: tuple[int, ...]
    bytes_per_token: float
    output_error: float


@dataclass(frozen=True)
class OnePolicy:
    """One policy for all heads.  refused: heads that may not take it.  output_error: infinite if there are any."""

    policy: Policy
    bytes_per_token: float
    output_error: float
    refused: int


@dataclass(frozen=True)
class Allocation:
    """A policy of ``ladder`` for each head of each of ``layers`` (their numbers in the model).

    shape: of a layer.  choices: place in the ladder of each head's policy, (layers, heads).  errors: predicted output
    error of each policy, (layers, heads, policies), NaN without a prediction.  allowed: which each head may take.
    bound: output error below which no allocation within the budget can be.  refusals: of each policy, the heads that
    may not take it by reason.
    """

    family: str
    shape: StateShape
    layers: tuple[int, ...]
    ladder: tuple[Policy, ...]
    baseline: Policy
    budget: float
    choices: NDArray
    errors: NDArray
    allowed: NDArray
    bound: float
    refusals: tuple[dict[str, int], ...]

    @property
    def bytes_per_token(self) -> float:
        """Read and written by one sequence in all layers."""
        return sum(share.bytes_per_token for share in self.by_layer)

    @property
    def baseline_bytes(self) -> float:
        """The same under the baseline."""
        return len(self.layers) * _bytes(self.baseline, self.family, self.shape)

    @property
    def output_error(self) -> float:
        """Root mean square over the heads with a prediction: what is made least."""
        return _pooled(self._chosen_errors)

    @property
    def unpredicted(self) -> int:
        """Heads without a prediction: they follow the widest policy that does not diverge."""
        return int(np.isnan(self._chosen_errors).sum())

    @property
    def by_layer(self) -> tuple[LayerShare, ...]:
        """What each layer takes."""
        costs = [_head_and_key_bytes(policy, self.family, self.shape) for policy in self.ladder]
        repeat = self.shape.heads // self.shape.key_heads
        found = []
        for number, layer in enumerate(self.layers):
            counts = np.bincount(self.choices[number], minlength=len(self.ladder))
            blocks = self.choices[number].reshape(-1, repeat)
            moved = sum(
                count * head + (blocks == place).any(1).sum() * key
                for place, (count, (head, key)) in enumerate(zip(counts, costs, strict=True))
            )
            error = _pooled(self._chosen_errors[number])
            found.append(LayerShare(layer, tuple(map(int, counts)), float(moved), error))
        return tuple(found)

    @property
    def single(self) -> tuple[OnePolicy, ...]:
        """Every policy of the ladder, for all heads."""
        found = []
        for place, policy in enumerate(self.ladder):
            refused = int((~self.allowed[..., place]).sum())
            error = math.inf if refused else _pooled(self.errors[..., place])
            moved = len(self.layers) * _bytes(policy, self.family, self.shape)
            found.append(OnePolicy(policy, moved, error, refused))
        return tuple(found)

    @property
    def best_single(self) -> OnePolicy | None:
        """The one policy for all heads of the least error within the budget; None if no policy suits them all."""
        limit = self.budget * self.baseline_bytes * (1 + 1e-9)
        fitting = [one for one in self.single if not one.refused and one.bytes_per_token <= limit]
        return min(fitting, key=lambda one: (one.output_error, one.bytes_per_token), default=None)

    def rules(self, name: str = "rules") -> PolicyRules:
        """The same as rules: the most frequent policy is the default, and every other head is in one rule."""
        counts = Counter(self.choices.ravel().tolist())
        default = min(counts, key=lambda place: (-counts[place], place))
        layers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for number, layer in enumerate(self.layers):
            for place in sorted(set(self.choices[number].tolist()) - {default}):
                heads = tuple(np.flatnonzero(self.choices[number] == place).tolist())
                layers.setdefault((place, heads), []).append(layer)
        rules = [
            Rule(
                frozenset(numbers),
                None if len(heads) == self.shape.heads else frozenset(heads),
                self.ladder[place],
            )
            for (place, heads), numbers in layers.items()
        ]
        return PolicyRules(self.ladder[default], tuple(rules), name)

    @property
    def _chosen_errors(self) -> NDArray:
        return np.take_along_axis(self.errors, self.choices[..., None], -1)[..., 0]


def allocate(
    heads: HeadStatistics,
    shape: StateShape,
    layers: Sequence[int],
    budget: float,
    ladder: Sequence[str | Policy] = LADDER,
    *,
    of: str | Policy = BASELINE,
    one_window: bool = True,
) -> Allocation:
    """The policies of ``ladder`` for each head whose bytes are at most ``budget`` times those of ``of``.

    heads: of all layers, layer after layer, each of ``shape``.  layers: their numbers in the model.  Bytes are those
    of the ledger, read and written per token by one sequence in these layers; a key that heads share counts once for
    each policy that they follow.  one_window: the heads of a layer have the same window, as they must on a GPU.

    Least is the root mean square over the heads of the predicted output error, relative to each head's own output
    (``steady_errors``).  A head never takes a policy under which its state diverges, whose stores mostly lose their
    increments (as no prediction holds then), or whose largest number its state is expected to pass.  A head without a
    finite prediction takes the policy that moves most of those.

    Raises InputError: a budget that no allocation meets (naming the smallest), heads that may take no policy of the
    ladder, a policy that does not fit the family, a ladder that is empty or longer than LONGEST_LADDER.
    """
    if not (isinstance(budget, int | float) and math.isfinite(budget) and budget > 0):
        raise InputError("budget", budget, f"bytes as a part of those of {of}, above 0, such as 0.3")
    policies = tuple(dict.fromkeys(map(parse_policy, ladder)))
    if not 1 <= len(policies) <= LONGEST_LADDER:
        raise InputError("ladder", list(map(str, policies)), f"1 to {LONGEST_LADDER} different policies")
    baseline = parse_policy(of)
    for policy in (*policies, baseline):
        check_policy_fits(policy, heads.family)
    numbers = tuple(layers)
    if len(set(numbers)) < len(numbers) or heads.heads != len(numbers) * shape.heads:
        expected = f"different numbers, {shape.heads} of the {heads.heads} heads for each"
        raise InputError("layers", list(numbers), expected)
    costs = [_head_and_key_bytes(policy, heads.family, shape) for policy in policies]
    risks = [head_risks(policy, heads) for policy in policies]
    refusals, allowed = _allowed(risks)
    classes = tuple(policy.window if one_window else 0 for policy in policies)
    errors, powers, allowed = _errors(risks, allowed, [sum(cost) for cost in costs], classes)
    of_layers = (len(numbers), shape.heads, len(policies))
    problem = Assignments(
        powers.reshape(of_layers),
        np.array([round(head * _UNITS) for head, _ in costs]),
        np.array([round(key * _UNITS) for _, key in costs]),
        shape.heads // shape.key_heads,
        classes,
    )
    _check_possible(heads, allowed, problem, policies, refusals)
    cheapest = least_cost(problem)
    assert cheapest is not None
    total = _UNITS * len(numbers) * _bytes(baseline, heads.family, shape)
    # Half a unit a head is what rounding to units may add.
    limit = math.floor(budget * total * (1 + 1e-12) + heads.heads)
    least = int(problem.measure(cheapest)[1].sum())
    if least > limit:
        smallest = math.ceil(least / total * 1e4) / 1e4
        raise InputError(
            "budget", budget, f"at least {smallest:g}, the smallest possible with these policies"
        )
    choices, bound = least_error(problem, limit)
    predicted = np.isfinite(np.take_along_axis(errors.reshape(of_layers), choices[..., None].astype(int), -1))
    return Allocation(
        family=heads.family,
        shape=shape,
        layers=numbers,
        ladder=policies,
        baseline=baseline,
        budget=float(budget),
        choices=choices.astype(np.intp),
        errors=errors.reshape(of_layers),
        allowed=allowed.reshape(of_layers),
        bound=math.sqrt(bound / max(int(predicted.sum()), 1)),
        refusals=refusals,
    )


def _head_and_key_bytes(policy: Policy, family: str, shape: StateShape) -> tuple[float, float]:
    """Bytes a token of one head without its key, and of one key head's records."""
    recurrence = get_recurrence(family)
    head, both = (
        ledger(policy, recurrence, StateShape(1, shape.value_dim, shape.key_dim, keys)).bytes_per_token
        for keys in (0, 1)
    )
    return head, both - head


def _bytes(policy: Policy, family: str, shape: StateShape) -> float:
    return ledger(policy, get_recurrence(family), shape).bytes_per_token


def _allowed(risks: list[HeadRisks]) -> tuple[tuple[dict[str, int], ...], NDArray]:
    """(refused heads of each policy by reason, which policies each head may take (heads, policies))."""
    refusals, allowed = [], []
    for risk in risks:
        # In FP32 only a state that never forgets grows its error for ever, whatever the policy: that has no prediction.
        rounds = risk.policy.checkpoint.rounded
        reasons = {
            "diverges": risk.errors.diverges & rounds,
            "loses its moves": risk.needs_stochastic,
            "overflows": risk.headroom < 0,
        }
        left = np.ones(len(risk.headroom), bool)
        found = {}
        for reason, refused in reasons.items():
            found[reason] = int((refused & left).sum())
            left &= ~refused
        refusals.append({reason: count for reason, count in found.items() if count})
        allowed.append(left)
    return tuple(refusals), np.stack(allowed, -1)


def _errors(
    risks: list[HeadRisks], allowed: NDArray, costs: list[float], classes: tuple[int, ...]
) -> tuple[NDArray, NDArray, NDArray]:
    """(predicted output errors, NaN without one; what is summed up, infinite where not to be taken; what each head may
    take, which is what has a prediction where anything has), each (heads, policies)."""
    errors = np.stack([np.where(np.isfinite(r.errors.output), r.errors.output, np.nan) for r in risks], -1)
    predicted = allowed & np.isfinite(errors)
    powers = np.where(predicted, np.square(errors), np.inf)
    without = np.logical_not(predicted.any(-1))
    # Nothing to compare them by: of each window, the allowed policy that moves most.
    for one in dict.fromkeys(classes):
        places = sorted((place for place, of in enumerate(classes) if of == one), key=lambda p: -costs[p])
        left = without.copy()
        for place in places:
            chosen = left & allowed[:, place]
            powers[chosen, place] = 0.0
            left &= ~chosen
    return errors, powers, allowed & (predicted | without[:, None])


def _check_possible(
    heads: HeadStatistics,
    allowed: NDArray,
    problem: Assignments,
    policies: tuple[Policy, ...],
    refusals: tuple[dict[str, int], ...],
) -> None:
    """InputError unless every head may take a policy, and every layer one window."""
    stuck = np.flatnonzero(~allowed.any(-1))
    if len(stuck):
        reasons = ", ".join(dict.fromkeys(reason for found in refusals for reason in found))
        name = f"{len(stuck)} heads, {heads.names[stuck[0]]} among them"
        expected = f"a ladder with a policy for it: every one of {', '.join(map(str, policies))} {reasons}"
        raise InputError("ladder", name, f"{expected}; add {BASELINE} or fp32@16")
    if least_cost(problem) is None:
        raise InputError(
            "ladder",
            list(map(str, policies)),
            "a window that suits all heads of each layer, or mixed windows",
        )


def _pooled(errors: NDArray) -> float:
    known = errors[~np.isnan(errors)]
    return float(np.sqrt(np.mean(np.square(known)))) if known.size else math.nan
