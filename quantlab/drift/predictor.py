"""What error a policy will show, in closed form: from the decay, the write strength and one rounding of a state.

A store every L steps rounds with relative RMS eps, independently and with zero mean.  Between stores an isotropic
error shrinks by

    rho = alpha^2 (1 - (2 beta - beta^2) / key_dim)

a step in power (the second factor is the erase of a delta rule).  Then the error of the stored state is
eps / sqrt(1 - rho^L), and what a read sees is diluted by the tokens written since:
output error about state error * sqrt(mean over j = 1..L of rho^j).

``predict_curve`` runs the same balance step by step, so that a start from zero, a decay that changes with the token,
a read copy, error feedback and the flush read each have their term.  What it leaves out: the correlation of successive
roundings (stagnation, error of a state that barely moves), and the feedback of an error that is no longer small
against the state.  Both are stated where a curve leaves the band.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab.drift.streams import check_memory
from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.formats.random import random_words
from quantlab.recurrences import get_recurrence
from quantlab.schemes import Policy, parse_policy
from quantlab.schemes.ledger import uses_raw

BAND = 1.4
SMALL_ERROR = 0.5
NOISE_ROWS = 512  # rows of the Gaussian state that the noise of a store is taken from
# One float32 operation: relative RMS of rounding a value whose mantissa is log-uniform, 2^-24 / sqrt(3) * 0.74.
FLOAT32_NOISE = 2.0**-24 / np.sqrt(3) * 0.74
# In powers of that: a fold multiplies and adds once; a read sums key_dim products.  A partial sum of i of them has
# power i / key_dim of the result, so two accumulators of key_dim / 2 additions each make key_dim / 4, and the
# products 1 more.
FOLD_OPERATIONS = 2.0


def _read_operations(key_dim: int) -> float:
    return key_dim / 4 + 1


@dataclass(frozen=True)
class StreamStatistics:
    """What the predictor knows of a stream, each (steps, units), units = sequences x heads.

    rho: power factor of an isotropic error over the step, erase included; decay: the same without the erase.
    write: beta^2 / key_dim times the decay, the share of a read error's power that a derived d carries into the window.
    state, output: squared norms of the exact state after the step and of the exact output.
    gain: |q|^2 / key_dim, the factor from an isotropic state error's power to the output error's.
    log_decay: the log decay itself, or None where it differs within a head.
    start: (units,) squared norm of the prefill state.  key_dim: of the state.
    """

    rho: NDArray
    decay: NDArray
    write: NDArray
    state: NDArray
    output: NDArray
    gain: NDArray
    log_decay: NDArray | None
    start: NDArray
    key_dim: int


@dataclass(frozen=True)
class Prediction:
    """Predicted error powers, each (steps, units): of the logical state and of the output."""

    state: NDArray
    output: NDArray


def steady_output_error(policy: "str | Policy", family: str, alpha: float, key_dim: int = 128) -> float:
    """Relative output error of a long run at constant decay ``alpha`` (mean write strength of the evidence preset).

    Infinite where rounding noise outgrows the decay: rho^L (1 + eps^2) >= 1, which is eps^2 >= 1 - rho^L for small eps.
    Raises InputError for an alpha outside (0, 1].
    """
    policy = parse_policy(policy)
    check_memory("key_dim", {"key_dim": key_dim}, NOISE_ROWS * key_dim)
    if not 0.0 < alpha <= 1.0:
        raise InputError("alpha", alpha, "a decay per step in (0, 1]")
    # beta = sigmoid(N(0, 1)): E[2 beta - beta^2] = 1 - E[(1 - beta)^2] = 1 - E[beta^2].
    second_moment = 0.2934
    rule = get_recurrence(family).delta_rule
    rho = alpha**2 * (1 - (1 - second_moment) / key_dim if rule else 1.0)
    long_run = int(np.ceil(max(64 * policy.window, 12 / max(1e-6, 1 - rho))))
    steps = min(long_run, 200_000) // policy.window * policy.window
    ones = np.ones((steps, 1))
    # A stationary state of power 1 / (1 - rho) per unit write; q of unit norm reads 1 / key_dim of it.
    power = 1.0 / max(1e-9, 1 - rho)
    stats = StreamStatistics(
        rho=rho * ones,
        decay=alpha**2 * ones,
        write=(second_moment if rule else 0.0) * alpha**2 / key_dim * ones,
        state=power * ones,
        output=power / key_dim * ones,
        gain=ones / key_dim,
        log_decay=np.log(alpha) * ones,
        start=np.array([power]),
        key_dim=key_dim,
    )
    noise = {part: np.array([value]) for part, value in gaussian_noise(policy, key_dim).items()}
    # Each store adds noise in proportion to what is stored, error included; feedback takes the rounding back again.
    if not policy.checkpoint.error_feedback and rho**policy.window * (1 + noise["checkpoint"] ** 2) >= 1:
        return float("inf")
    cycle = predict_curve(policy, family, stats, noise).output[-policy.window :]
    return float(np.sqrt(cycle.mean() / (power / key_dim)))


def predict_curve(
    policy: Policy, family: str, stats: StreamStatistics, noise: dict[str, NDArray]
) -> Prediction:
    """Error powers, step by step.  noise: relative RMS of one store, (units,), keys "checkpoint" and "read_copy".

    NaN for an fp64 checkpoint, whose errors are of the shadow's own size, and for a recurrence whose decay differs
    within a head (mamba1): there the slow elements keep their errors and the fast ones make the norm, and one rho for
    both was found 3 to 50 times off on a trained layer.
    """
    steps, units = stats.rho.shape
    options, window = policy.options, policy.window
    recurrence = get_recurrence(family)
    raw = uses_raw(policy, recurrence)
    has_copy = policy.read_copy is not None
    reads_keys_from_copy = has_copy and recurrence.delta_rule and options.key_read == "copy"
    carries_read_error = reads_keys_from_copy and not raw
    copy_decay = stats.rho if reads_keys_from_copy or not recurrence.delta_rule else stats.decay
    if policy.checkpoint.name == "fp64" or stats.log_decay is None:
        return Prediction(np.full((steps, units), np.nan), np.full((steps, units), np.nan))
    arithmetic = FLOAT32_NOISE**2
    checkpoint_noise = noise["checkpoint"] ** 2
    copy_noise = noise["read_copy"] ** 2 if has_copy else np.zeros(units)
    feedback = bool(policy.checkpoint.error_feedback)
    read_noise = arithmetic * _read_operations(stats.key_dim)
    bias = _decay_bias(stats, window)

    exact = np.zeros(units)  # error power of the checkpoint; with feedback, of checkpoint plus residual
    held = np.zeros(units)  # power of the residual that error feedback held back at the last store
    fade, shrink = (
        np.ones(units),
        np.ones(units),
    )  # decay since that store: of an error's power, of an amplitude
    carried = np.zeros(units)  # power that derived d have carried from the read copy into the window
    scale = np.zeros(units)  # amplitude of the error that a decay rounded to float32 leaves along the state
    stored = stats.start

    def store(power: NDArray) -> NDArray:
        """Round and store a state of this power; returns the error power of the read view."""
        nonlocal exact, held
        rounding = checkpoint_noise * (power + exact)
        if feedback:
            # The residual re-enters undecayed, so only the part that the state has forgotten is an error.
            exact, held = exact + (1 - shrink) ** 2 * held, rounding
        else:
            exact = exact + rounding
        return exact + held + copy_noise * (power + exact)

    with np.errstate(over="ignore", invalid="ignore"):
        view = store(stats.start)
        state_out, output_out = np.empty((steps, units)), np.empty((steps, units))
        for t in range(steps):
            carried = carried * stats.rho[t] + stats.write[t] * view
            exact, view = exact * stats.rho[t], view * copy_decay[t]
            scale = scale * np.sqrt(stats.rho[t])
            fade, shrink = fade * stats.rho[t], shrink * np.sqrt(stats.decay[t])
            flush = (t + 1) % window == 0
            if flush:
                scale = scale + bias[t] * shrink * np.sqrt(stored)
                stored = stats.state[t]
            logical = exact + held * fade + (carried if carries_read_error else 0.0)
            seen = logical if flush and (options.flush_read == "exact" or not has_copy) else view
            output_out[t] = (seen + scale**2) * stats.gain[t] + read_noise * stats.output[t]
            if flush:
                exact = exact + arithmetic * FOLD_OPERATIONS * stats.state[t]
                exact = exact + (carried if carries_read_error else 0.0)
                view = store(stats.state[t])
                fade, shrink, carried = np.ones(units), np.ones(units), np.zeros(units)
                logical = exact + held
            state_out[t] = logical + scale**2
    return Prediction(state_out, output_out)


def _decay_bias(stats: StreamStatistics, window: int) -> NDArray:
    """Relative error of the float32 decay factor of a whole window, at its last step: (steps, units).

    exp() of a float32 log decay is off by up to half an ulp, always the same way for the same decay, so that it adds
    up along the state instead of averaging out: with alpha = 0.999 it is most of the error of an FP32 state.
    """
    bias = np.zeros_like(stats.rho)
    if stats.log_decay is None:
        return bias
    count = len(bias) // window * window
    logs = stats.log_decay[:count].reshape(-1, window, bias.shape[1])
    narrow = torch.exp(torch.from_numpy(logs.astype(np.float32)).sum(1)).double().numpy()
    exact = np.exp(logs.sum(1))
    # A decay that underflows even in float64 leaves nothing of the state for its error to lie on.
    bias[window - 1 : count : window] = np.divide(narrow, exact, out=np.ones_like(exact), where=exact > 0) - 1
    return bias


def gaussian_noise(policy: Policy, key_dim: int = 128) -> dict[str, float]:
    """Relative RMS of one store of a Gaussian state (rows of ``key_dim``), for each copy of the policy."""
    noise = {"checkpoint": _gaussian_noise(policy.checkpoint, key_dim)}
    if policy.read_copy is not None:
        noise["read_copy"] = _gaussian_noise(policy.read_copy, key_dim)
    return noise


@lru_cache(maxsize=256)
def _gaussian_noise(format: Format, key_dim: int) -> float:
    state = torch.randn(
        1, 8, NOISE_ROWS // 8, key_dim, generator=torch.Generator().manual_seed(20), dtype=torch.float32
    )
    return float(rounding_noise(format, state).pow(2).mean().sqrt())


def rounding_noise(format: Format, state: torch.Tensor) -> torch.Tensor:
    """Relative RMS error of storing ``state`` (batch, heads, value_dim, key_dim) once: (batch, heads).

    A zero state has no relative error: its entry is 0.  Infinite for a state that holds Inf or NaN, or overflows.
    """
    if not format.rounded:
        return torch.zeros(state.shape[:2], dtype=torch.float64)
    words = None
    if format.stochastic:
        batch, heads, value_dim, key_dim = state.shape
        numbers = torch.zeros(batch, dtype=torch.int64)
        words = random_words((batch, heads, value_dim, key_dim), 1, numbers, torch.arange(batch), 0, 0)
    lost = ~torch.isfinite(state).flatten(2).all(-1)
    state = state.masked_fill(lost[..., None, None], 0.0)
    encoded = format.quantize(state, words)
    error = (format.dequantize(encoded).double() - state.double()).flatten(2).norm(dim=-1)
    norm = state.double().flatten(2).norm(dim=-1)
    return torch.where(norm > 0, error / norm, torch.zeros_like(error)).masked_fill(lost, torch.inf)


def state_noise(policy: Policy, state: torch.Tensor) -> dict[str, NDArray]:
    """``rounding_noise`` of each copy on a float32 state of the stream itself: (batch * heads,) arrays.

    The checkpoint is rounded from the state, the read copy from the stored checkpoint; taking both from the state
    itself differs by a relative noise squared.
    """
    parts: dict[Literal["checkpoint", "read_copy"], Format | None]
    parts = {"checkpoint": policy.checkpoint, "read_copy": policy.read_copy}
    return {
        part: rounding_noise(format, state.float()).numpy().reshape(-1)
        for part, format in parts.items()
        if format is not None
    }
