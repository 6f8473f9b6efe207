"""What can go wrong with a policy on a head: stagnation, overflow, divergence, tests that are too short.

Stagnation.  Between two stores an element moves by a share of itself and by what the tokens wrote.  With the
correlation phi of the state over one cycle (persistence^L) and a stationary element of unit variance the increment is
-(1 - phi) x + sqrt(1 - phi^2) n, n ~ N(0, 1).  Rounding to nearest leaves the stored value where it is when the
increment is below half the distance to its neighbour, h(x); so the fraction of lost increments is the mean over x of
P(|increment| < h(x)).  Lost increments do not average out: the decay itself is lost, every time, and the errors of
successive stores point the same way (x = 1 plus 1e-3 in bf16 never moves).  Stochastic rounding keeps the mean of each
increment, error feedback the increments themselves.

Divergence of two implementations.  Two runs whose arithmetic differs by a relative 1e-7 differ by little until they
round: a store then either gives both the same value or, with probability |difference| / spacing, two neighbouring
ones.  On average |difference| stays what it was, but it now sits in few elements, each off by a whole spacing.  So a
value row of K elements sees its first flip at a rate r = K a a store, a being the arithmetic's mean |difference| in
spacings.  From then on its f flipped elements fade with the correlation phi of a cycle, and a delta rule spreads them:
the erase moves the row's difference e along one key, beta (e . k) k, in sum of magnitudes (2 / pi) beta sqrt(f)
spacings a step, sqrt(L) times that in L steps.  What is spread flips as many elements on average at the next store:

    f <- phi f + c sqrt(f),  c = (2 / pi) beta sqrt(L):   sqrt(f) = c / (1 - phi) (1 - exp(-(1 - phi) m / 2))

after m stores, at most sqrt(K).  Rows do not reach each other; the mean over rows is r times the sum of f over the
ages of the flips, and at most f of the oldest.  The two runs then differ by a root mean square of sqrt(f / K) spacings
(sqrt(12) eps for a uniform grid).  Without a delta rule nothing spreads, and they never differ by much.  Left out: a
scale that follows a flipped largest element, which moves the values that share it, and stagnation, which keeps flips.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quantlab.drift.heads import HeadStatistics, SteadyErrors, steady_errors
from quantlab.drift.rounding_noise import spread_block
from quantlab.formats import Format
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import Element, Integer, Scaling
from quantlab.schemes import Policy, parse_policy

ARITHMETIC_DIFFERENCE = 1e-7  # relative, between two float32 implementations that sum in another order
STAGNATION = 0.5  # from here on most stores lose their increment
HEADROOM_TOKENS = 4096  # tokens over which the largest element is expected
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class HeadRisks:
    """A policy on each head; arrays (heads,).

    errors: the stationary ones.  stagnation: fraction of stores that leave an element of the slowest channel where it
    is, 0 without rounding.  needs_stochastic: stagnation above one half, under rounding to nearest without feedback.
    headroom: powers of two between the largest element expected and the format's largest number.  largest: that
    element.  divergence: tokens until two implementations differ by half of their rounding error; infinite if never.
    test_length: tokens below which a comparison with another implementation passes whatever is wrong with the rounding.
    """

    policy: Policy
    errors: SteadyErrors
    stagnation: NDArray
    needs_stochastic: NDArray
    headroom: NDArray
    largest: NDArray
    divergence: NDArray
    test_length: NDArray


def head_risks(policy: "str | Policy", heads: HeadStatistics) -> HeadRisks:
    """Everything the closed form says about ``policy`` on each of ``heads``."""
    policy = parse_policy(policy)
    errors = steady_errors(policy, heads)
    cycle = cycle_length(policy)
    correlation = np.clip(heads.persistence, 0.0, 1.0) ** cycle
    slowest = correlation.max(heads.channel_axes)
    format = policy.checkpoint
    rounds = format.rounded and policy.options.schedule in ("flush", "step")
    stagnation = lost_increments(format, slowest, heads.key_dim) if rounds else np.zeros(heads.heads)
    nearest = format.rounding is not Rounding.STOCHASTIC and not format.error_feedback
    largest = expected_largest(heads)
    limit = largest_number(format)
    divergence = np.full(heads.heads, np.inf)
    if rounds:
        error = np.where(np.isfinite(errors.state), errors.state, 1.0)
        noise = np.where(np.isfinite(errors.noise), errors.noise, 1.0)
        divergence = divergence_tokens(heads, slowest, noise, error, cycle)
    half = half_stationary_tokens(heads)
    finite = np.where(np.isfinite(divergence), divergence, 0.0)
    # One store is read back from token cycle + 1 on, a second one from token 2 cycle + 1 on.
    test_length = np.maximum(np.maximum(finite, half), 2 * cycle + 1)
    return HeadRisks(
        policy=policy,
        errors=errors,
        stagnation=stagnation,
        needs_stochastic=(stagnation > STAGNATION) & nearest & rounds,
        headroom=np.log2(limit / np.maximum(largest, 1e-300)),
        largest=largest,
        divergence=divergence,
        test_length=np.ceil(test_length),
    )


def cycle_length(policy: Policy) -> int:
    """Tokens between two stores of the checkpoint in plain decoding."""
    window = 1 if policy.options.schedule == "step" else policy.window
    return max(1, window - 1) if policy.options.flush == "early" else window


def lost_increments(format: Format, correlation: NDArray, key_dim: int) -> NDArray:
    """Fraction of stores whose increment is below half the spacing, for states with this correlation over a cycle."""
    forgets = np.maximum(1 - correlation, 1e-12)
    grid = np.logspace(-12, 0, 97)
    found = [_lost(format, key_dim, float(g)) for g in grid]
    return np.interp(np.log(forgets), np.log(grid), found)


@lru_cache(maxsize=4096)
def _lost(format: Format, key_dim: int, forgets: float) -> float:
    from scipy.special import ndtr

    values, half = _half_spacings(format, key_dim)
    spread = math.sqrt(max(1 - (1 - forgets) ** 2, 1e-300))
    drift = forgets * values
    return float(np.mean(ndtr((half + drift) / spread) - ndtr((drift - half) / spread)))


@lru_cache(maxsize=64)
def _half_spacings(format: Format, key_dim: int) -> tuple[NDArray, NDArray]:
    """Gaussian elements of unit variance and half the distance between neighbours of the format at each of them."""
    block = spread_block(format)
    columns = key_dim if not block else min(block, key_dim)
    values = np.random.default_rng(22).standard_normal((8192 // columns + 1, columns))
    element = format.element
    scale = np.ones((len(values), 1))
    if block is not None:
        scale = np.abs(values).max(1, keepdims=True) / element.max
    return values, np.broadcast_to(_half_spacing(element, np.abs(values) / scale) * scale, values.shape)


def _half_spacing(element: Element | Integer, magnitude: NDArray) -> NDArray:
    if isinstance(element, Integer):
        return np.full_like(magnitude, 0.5)
    exponent = np.floor(np.log2(np.clip(magnitude, element.min_normal, element.max)))
    return np.exp2(exponent - element.mantissa_bits - 1)


def expected_largest(heads: HeadStatistics, tokens: int = HEADROOM_TOKENS) -> NDArray:
    """Largest magnitude of an element: (heads,).  The one that was seen, or that of as many Gaussians.

    A Gaussian of rms s reaches s sqrt(2 ln n) in n independent values; the state of a head is new once it has
    forgotten, so n = elements x (1 + tokens (1 - rho)).  One write, the product of two Gaussians with the share
    1 - rho of the power, has the heavier tail exp(-t) and reaches ln n; the squares of the two are added.
    """
    if heads.largest is not None:
        return heads.largest
    channels = int(np.prod(heads.decay.shape[1:]))
    elements = heads.value_dim * heads.key_dim / channels
    power = heads.state / elements
    independent = heads.value_dim * heads.key_dim * (1 + tokens * heads.forgetting)
    logs = np.log(independent)
    return np.sqrt((power * (2 * logs + heads.forgetting * logs**2)).max(heads.channel_axes))


def largest_number(format: Format) -> float:
    """Largest magnitude that a store holds, its scale included."""
    element, scaling = format.element, format.row.scaling
    if scaling is Scaling.NONE:
        return min(float(element.max), _FLOAT32_MAX)
    if scaling is Scaling.NVFP4 and format.granularity == "none":
        return 448.0 * element.max
    if scaling is Scaling.MX:
        return min(2.0**127 * element.max, _FLOAT32_MAX)
    return _FLOAT32_MAX


def difference_curve(
    heads: HeadStatistics, correlation: NDArray, noise: NDArray, cycle: int, stores: NDArray
) -> NDArray:
    """RMS difference of two implementations after so many stores, relative to the state: (heads, len(stores)).

    correlation: of the state over one cycle, (heads,).  noise: eps of the checkpoint, (heads,).  stores: increasing.
    """
    spacing = math.sqrt(12) * np.maximum(noise, 1e-300)[:, None]
    # Mean magnitude of a Gaussian difference, sqrt(2 / pi) of its RMS.
    entering = math.sqrt(2 / math.pi) * ARITHMETIC_DIFFERENCE / spacing
    fades = np.maximum(1 - correlation, 1e-12)[:, None]
    spreads = 2 / math.pi * heads.beta * math.sqrt(cycle)
    age = np.concatenate([[0.0], stores])
    flipped = (spreads / fades * -np.expm1(-fades * age / 2)) ** 2
    flipped = np.minimum(flipped + np.exp(-fades * age), heads.key_dim)
    summed = np.cumsum((flipped[:, 1:] + flipped[:, :-1]) / 2 * np.diff(age), 1)
    share = np.minimum(entering * summed, flipped[:, 1:] / heads.key_dim)
    return np.sqrt(share) * spacing


def divergence_tokens(
    heads: HeadStatistics, correlation: NDArray, noise: NDArray, error: NDArray, cycle: int
) -> NDArray:
    """Tokens until two implementations differ by half of ``error``: (heads,), infinite where they never do.

    Or by half a spacing in every element, if that is less: from there on the two round independently of each other.
    """
    enough = np.minimum(error, math.sqrt(12) * noise) / 2
    stores = np.unique(np.rint(np.logspace(0, 6, 241)))
    reached = difference_curve(heads, correlation, noise, cycle, stores) >= enough[:, None]
    first = stores[reached.argmax(1)] * cycle
    return np.where(reached.any(1), first, np.inf)


def half_stationary_tokens(heads: HeadStatistics) -> NDArray:
    """Tokens until the error of the slowest channel is half of its stationary one: rho^t = 3/4, (heads,)."""
    slowest = heads.forgetting.min(heads.channel_axes)
    return math.log(0.75) / np.log1p(-np.minimum(slowest, 1 - 1e-12))
