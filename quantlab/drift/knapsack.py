"""Which option each head takes so that the sum of their errors is least within a limit of cost.

Heads of a layer come in blocks, and a block pays once more for each option that any of its heads takes: the keys that
those heads share are kept once a policy.  Options come in classes (windows), and the heads of a layer are of one class.

With a price for cost, every block is by itself: the least of error + price * cost over the sets of options that it may
pay for.  The best price bounds the error from below; mending what it says until it fits the limit, from above.  An
assignment that loses more against the price than lies between the two bounds cannot be the best one, and of those that
are left, one with more cost and more error than another cannot be part of it.  What remains is few enough to enumerate,
block by block and layer by layer, and the best of it is the best of all.  For thousands of heads it may still be too
much; the two bounds are then about one part in a hundred apart or less, and the upper one is taken.
"""

from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

WORK = 2_000_000
"""Assignments that an enumeration may look at, and 100 for each list of them: a second or two."""
# Of the error: what a sum of some thousand terms in float64 may be off by, so that equal sums count as equal.
_NOISE = 1e-13


@dataclass(frozen=True)
class Assignments:
    """What the heads of a layer may take.

    errors: (layers, heads, options), infinite where a head may not take an option.  costs: whole units of a head,
    (options,).  shared: further units of a block for each option that one of its heads takes, (options,).
    block: heads of a block.  classes: of each option; the heads of one layer take options of one class.
    """

    errors: NDArray
    costs: NDArray
    shared: NDArray
    block: int
    classes: tuple[int, ...]

    @cached_property
    def sets(self) -> dict[int, list[tuple[int, ...]]]:
        """Of each class: all sets of its options."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for one in dict.fromkeys(self.classes):
            options = [option for option, of in enumerate(self.classes) if of == one]
            found[one] = [s for size in range(1, len(options) + 1) for s in combinations(options, size)]
        return found

    @cached_property
    def blocks(self) -> NDArray:
        """The errors by block: (layers, blocks, block, options)."""
        layers, heads, options = self.errors.shape
        return self.errors.reshape(layers, heads // self.block, self.block, options)

    def measure(self, choices: NDArray) -> tuple[NDArray, NDArray]:
        """(error, cost) of each block (layers, blocks) for an option of each head (layers, heads)."""
        chosen = choices.reshape(self.blocks.shape[:-1])
        taken = (chosen[..., None] == np.arange(len(self.costs))).any(-2)
        error = np.take_along_axis(self.blocks, chosen[..., None].astype(np.intp), -1)[..., 0].sum(-1)
        return error, self.costs[chosen].sum(-1) + taken @ self.shared


def least_cost(heads: Assignments) -> NDArray | None:
    """The assignment (layers, heads) of the least cost; None if some layer has none."""
    weighed = np.where(np.isfinite(heads.errors), 0.0, np.inf) + heads.costs
    value, choices = _least(heads, weighed, 1.0)
    return choices if np.isfinite(value) else None


def least_error(heads: Assignments, limit: int) -> tuple[NDArray, float]:
    """(the assignment (layers, heads) of the least error whose cost is at most ``limit``, a bound of all such errors).

    ``limit`` must suffice for one.  The bound is the error itself where the enumeration came to its end; where that
    would take more than WORK, the assignment is the mended one, and the bound says how far from the best it can be.
    """
    _, freely = _least(heads, heads.errors, 0.0)
    error, cost = heads.measure(freely)
    if cost.sum() <= limit:
        return freely, float(error.sum())
    within = least_cost(heads)
    assert within is not None
    price, bound, starts = _best_price(heads, limit, within, freely)
    mended = [m for m in (_mended(heads, start, price, limit) for start in starts) if m is not None]
    within = min(mended, key=lambda m: heads.measure(m)[0].sum())
    least = float(heads.measure(within)[0].sum())
    noise = _NOISE * least
    gap = max(least - bound, 0.0) + within.size * noise
    try:
        found = _Enumeration(heads, price, gap, noise).of_all()
    except _TooMuch:
        return within, min(bound, least)
    fits = np.flatnonzero(found.cost <= limit)
    if not len(fits) or found.error[fits].min() >= least:
        return within, least
    best = fits[np.lexsort((found.cost[fits], found.error[fits]))[0]]
    return found.choices[best].reshape(within.shape), float(found.error[best])


def _values(heads: Assignments, weighed: NDArray, price: float) -> dict[int, NDArray]:
    """Of each class: what each block weighs if it pays for exactly these options, (sets, layers, blocks).

    weighed: of each head, (layers, heads, options).
    """
    columns = np.moveaxis(weighed.reshape(heads.blocks.shape), -1, 0)
    values = {}
    for one, sets in heads.sets.items():
        least: dict[tuple[int, ...], NDArray] = {}
        for options in sets:
            last = columns[options[-1]]
            least[options] = np.minimum(least[options[:-1]], last) if options[:-1] else last
        paid = [price * heads.shared[list(options)].sum() for options in sets]
        values[one] = np.stack([least[s].sum(-1) + paid[n] for n, s in enumerate(sets)])
    return values


def _least(heads: Assignments, weighed: NDArray, price: float) -> tuple[float, NDArray]:
    """(the least total weight, the assignment that has it)."""
    values = _values(heads, weighed, price)
    best = {one: value.min(0).sum(-1) for one, value in values.items()}
    chosen = np.stack(list(best.values())).argmin(0)
    allowed = np.zeros((*heads.blocks.shape[:2], len(heads.costs)), bool)
    for number, one in enumerate(values):
        paid = np.array([[option in s for option in range(len(heads.costs))] for s in heads.sets[one]])
        allowed |= paid[values[one].argmin(0)] & (chosen == number)[:, None, None]
    choices = np.where(allowed[:, :, None], weighed.reshape(heads.blocks.shape), np.inf).argmin(-1)
    return float(np.stack(list(best.values())).min(0).sum()), choices.reshape(weighed.shape[:2])


def _best_price(
    heads: Assignments, limit: int, within: NDArray, above: NDArray
) -> tuple[float, float, tuple[NDArray, NDArray]]:
    """(the price whose bound from below is highest, that bound, the assignments on both sides of the limit there).

    within, above: one within the limit and one above it, each the best at some price.  The next price to try is that
    at which both weigh the same; it is the best one as soon as nothing weighs less.
    """
    while True:
        (error, cost), (less, more) = (
            (float(e.sum()), int(c.sum())) for e, c in map(heads.measure, (within, above))
        )
        price = max(error - less, 0.0) / (more - cost)
        weight = error + price * cost
        value, choices = _least(heads, heads.errors + price * heads.costs, price)
        found = int(heads.measure(choices)[1].sum())
        if value >= weight - _NOISE * abs(weight):
            return price, min(value, weight) - price * limit, (within, above)
        within, above = (choices, above) if found <= limit else (within, choices)


def _mended(heads: Assignments, choices: NDArray, price: float, limit: int) -> NDArray | None:
    """An assignment near ``choices`` whose cost is within the limit and uses what it can of it; None if none is found.

    One block at a time takes another set of options of its layer's class: while the cost is above the limit, the one
    whose error rises least for what it saves (or least of all, if it saves enough); then the one whose error falls
    most within the limit.
    """
    found = choices.reshape(heads.blocks.shape[:-1]).copy()
    error, cost = heads.measure(choices)
    weighed = (heads.errors + price * heads.costs).reshape(heads.blocks.shape)
    others, errors, costs = [], [], []
    for one, sets in heads.sets.items():
        foreign = np.array(heads.classes)[found[:, 0, 0]] != one
        for options in sets:
            other = np.array(options)[weighed[..., list(options)].argmin(-1)]
            their_error, their_cost = heads.measure(other.reshape(choices.shape))
            others.append(other)
            errors.append(np.where(foreign[:, None], np.inf, their_error))
            costs.append(their_cost)
    errors, costs = np.stack(errors), np.stack(costs)
    left = limit - int(cost.sum())
    for _ in range(found[..., 0].size):
        rise, extra = errors - error, costs - cost
        if left >= 0:
            rise[(extra > left) | ~(rise < 0)] = 0.0
            worth = rise
        else:
            saving = np.minimum(-extra, -left)
            worth = np.where(saving > 0, rise / np.maximum(saving, 1), np.inf)
        at = np.unravel_index(worth.argmin(), worth.shape)
        if not np.isfinite(worth[at]) or (left >= 0 and worth[at] == 0):
            break
        number, layer, block = at
        left -= int(extra[at])
        found[layer, block] = others[number][layer, block]
        error[layer, block], cost[layer, block] = errors[at], costs[at]
    return found.reshape(choices.shape) if left >= 0 else None


@dataclass(frozen=True)
class _Found:
    """Assignments of some heads: cost, error and excess (what error + price * cost is above its least), each (n,), and
    the options (n, heads)."""

    cost: NDArray
    error: NDArray
    excess: NDArray
    choices: NDArray

    def take(self, rows: NDArray) -> "_Found":
        return _Found(self.cost[rows], self.error[rows], self.excess[rows], self.choices[rows])

    def above(self, excess: float) -> "_Found":
        return _Found(self.cost, self.error, self.excess + excess, self.choices)


class _TooMuch(Exception):
    """An enumeration that would take more than WORK."""


class _Enumeration:
    """All assignments whose excess is at most ``gap``, without those that another beats in cost and error both."""

    def __init__(self, heads: Assignments, price: float, gap: float, noise: float):
        self.heads, self.price, self.gap, self.noise = heads, price, gap, noise
        self.values = _values(heads, heads.errors + price * heads.costs, price)
        self.work = 0

    def of_all(self) -> _Found:
        layers = (self._of_layer(layer) for layer in range(len(self.heads.errors)))
        return reduce(self._combined, layers)

    def _of_layer(self, layer: int) -> _Found:
        weights = {one: value[:, layer].min(0).sum() for one, value in self.values.items()}
        least = min(weights.values())
        found = []
        for one, weight in weights.items():
            if weight - least <= self.gap:
                blocks = range(self.heads.blocks.shape[1])
                whole = reduce(self._combined, (self._of_block(layer, block, one) for block in blocks))
                found.append(whole.above(weight - least))
        return self._united(found)

    def _of_block(self, layer: int, block: int, one: int) -> _Found:
        errors, values = self.heads.blocks[layer, block], self.values[one][:, layer, block]
        found = []
        for number in np.flatnonzero(values - values.min() <= self.gap):
            options = np.array(self.heads.sets[one][number])
            weighed = errors[:, options] + self.price * self.heads.costs[options]
            excess = weighed - weighed.min(1, keepdims=True)
            # Most heads have one option within the gap; they need no combining.
            sure = (excess <= self.gap).sum(1) == 1
            taken = options[weighed.argmin(1)]
            start = _Found(
                np.array([self.heads.shared[options].sum() + self.heads.costs[taken[sure]].sum()]),
                np.array([errors[sure, taken[sure]].sum()]),
                np.array([values[number] - values.min()]),
                taken[None],
            )
            for head in np.flatnonzero(~sure).tolist():
                own = _Found(
                    self.heads.costs[options],
                    errors[head, options],
                    excess[head],
                    np.zeros((len(options), 0), int),
                )
                start = self._combined(start, own, head, options)
            found.append(start)
        return self._united(found)

    def _combined(
        self, one: _Found, other: _Found, head: int | None = None, options: NDArray | None = None
    ) -> _Found:
        """Each of ``one`` with each of ``other``: other heads, or the options of this head of the same ones."""
        self.work += len(one.cost) * len(other.cost) + 100
        if self.work > WORK:
            raise _TooMuch
        excess = one.excess[:, None] + other.excess
        i, j = np.nonzero(excess <= self.gap)
        cost, error = one.cost[i] + other.cost[j], one.error[i] + other.error[j]
        kept = _frontier(cost, error, self.noise)
        i, j = i[kept], j[kept]
        choices = np.concatenate([one.choices[i], other.choices[j]], 1)
        if head is not None and options is not None:
            choices[:, head] = options[j]
        return _Found(cost[kept], error[kept], excess[i, j], choices)

    def _united(self, parts: list[_Found]) -> _Found:
        """All of several lists of assignments of the same heads."""
        whole = _Found(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))
        return whole.take(_frontier(whole.cost, whole.error, self.noise))


def _frontier(cost: NDArray, error: NDArray, noise: float) -> NDArray:
    """Those that no other beats in both, by rising cost."""
    order = np.lexsort((error, cost))
    ordered = error[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    return order[ordered < before - noise]
