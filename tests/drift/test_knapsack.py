"""The best assignment within a limit of cost, against every assignment there is."""

import itertools

import numpy as np
import pytest

from quantlab.drift import knapsack
from quantlab.drift.knapsack import Assignments, least_cost, least_error

# Each list of assignments drops what is better by less than 1e-13 of the error; at most ten lists come together here.
RELATIVE = 1e-12


def every_assignment(heads):
    """(error, cost) of each assignment whose layers are of one class, by plain loops."""
    layers, count, options = heads.errors.shape
    for picked in itertools.product(range(options), repeat=layers * count):
        error, cost, mixed = 0.0, 0, False
        for layer in range(layers):
            row = picked[layer * count : (layer + 1) * count]
            mixed |= len({heads.classes[o] for o in row}) > 1
            for head, option in enumerate(row):
                error += float(heads.errors[layer, head, option])
                cost += int(heads.costs[option])
            for start in range(0, count, heads.block):
                cost += sum(int(heads.shared[o]) for o in set(row[start : start + heads.block]))
        if not mixed and np.isfinite(error):
            yield error, cost


SHAPES = [  # layers, heads, options, heads of a block, classes
    (1, 6, 3, 1, (0, 0, 0)),
    (2, 3, 3, 3, (0, 0, 0)),
    (1, 6, 3, 2, (0, 1, 1)),
    (3, 2, 3, 2, (1, 0, 1)),
    (2, 2, 4, 1, (0, 1, 0, 1)),
]


def drawn(shape, seed):
    layers, heads, options, block, classes = shape
    generator = np.random.default_rng(seed)
    errors = generator.exponential(size=(layers, heads, options)) * np.linspace(1, 0.1, options) ** 4
    if seed % 2:
        errors[:] = errors[:, :1]  # equal heads: many assignments tie
    if seed % 3 == 0:
        errors[generator.random(errors.shape) < 0.15] = np.inf
    costs, shared = np.sort(generator.integers(5, 60, options)), generator.integers(0, 20, options)
    return Assignments(errors, costs, shared, block, classes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_no_assignment_within_the_limit_has_less_error(shape, seed):
    heads = drawn(shape, seed)
    all_of_them = list(every_assignment(heads))
    cheapest = least_cost(heads)
    if not all_of_them:
        assert cheapest is None
        return
    costs = sorted({cost for _, cost in all_of_them})
    assert cheapest is not None
    assert heads.measure(cheapest)[1].sum() == costs[0]
    for limit in np.unique([*costs[:: max(1, len(costs) // 12)], costs[-1] + 1, costs[0] + 1]):
        choices, bound = least_error(heads, int(limit))
        error, cost = heads.measure(choices)
        best = min(error for error, cost in all_of_them if cost <= limit)
        assert cost.sum() <= limit
        assert error.sum() == pytest.approx(best, rel=RELATIVE) == bound


def test_an_enumeration_that_is_cut_short_says_how_far_off_it_can_be(monkeypatch):
    heads = drawn((1, 6, 3, 2, (0, 1, 1)), 1)
    all_of_them = list(every_assignment(heads))
    monkeypatch.setattr(knapsack, "WORK", 0)
    off = 0
    for limit in sorted({cost for _, cost in all_of_them}):
        choices, bound = least_error(heads, limit)
        error, cost = (float(x.sum()) for x in heads.measure(choices))
        best = min(error for error, cost in all_of_them if cost <= limit)
        assert cost <= limit
        assert bound <= best * (1 + RELATIVE)
        assert best <= error * (1 + RELATIVE)
        off += bound < error * (1 - 1e-6)
    assert off  # the bound is not just the error again


def test_two_thousand_heads_are_within_a_hundredth_of_the_bound(monkeypatch):
    """Heads of 21 equal layers, the ties that make an enumeration long: without any."""
    monkeypatch.setattr(knapsack, "WORK", 0)
    generator = np.random.default_rng(3)
    slow = np.exp(generator.uniform(np.log(1e-5), np.log(0.5), 96))
    error = np.stack([1e-6 + 1e-9 / slow, 2e-4 + 1e-8 / slow, 6e-3 * (1 - slow), 6e-3 + 1e-5 / slow], -1)
    heads = Assignments(
        np.broadcast_to(error, (21, 96, 4)),
        np.array([55, 18, 12, 10]) * 1000,
        np.full(4, 300),
        12,
        (0, 0, 0, 0),
    )
    for part in (0.2, 0.4, 0.7):
        choices, bound = least_error(heads, int(part * 21 * 96 * 55_000))
        error, cost = (float(x.sum()) for x in heads.measure(choices))
        assert cost <= part * 21 * 96 * 55_000
        assert bound <= error * (1 + 1e-12)
        assert error <= bound * 1.01
