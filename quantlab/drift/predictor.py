"""What error a policy will show, in closed form: from the decay, the write strength and one rounding of a state.

A store every L steps rounds with relative RMS eps, independently and with zero mean.  Between stores an isotropic
error shrinks by

    rho = alpha^2 (1 - (2 beta - beta^2) / key_dim)

a step in power (the second factor is the erase of a delta rule).  Then the error of the stored state is
eps / sqrt(1 - rho^L), and what a read sees is diluted by the tokens written since:
output error about state error * sqrt(mean over j = 1..L of rho^j).

``predict_curve`` runs the same balance step by step (``balance``), so that a start from zero, a decay that changes
with the token, and every other source of noise of ``noise_sources`` have their term.  Where the decay differs within
a head the balance runs beside the shadow, because the variances of the channels are too many to keep.  What it leaves
out: the correlation of successive roundings (stagnation, error of a state that barely moves), and the feedback of an
error that is no longer small against the state.  Both are stated where a curve leaves the band.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quantlab.drift.balance import ErrorBalance, Token
from quantlab.drift.rounding_noise import gaussian_noise, rounding_noise, state_noise
from quantlab.recurrences import DecayAxis, get_recurrence
from quantlab.schemes import Policy

BAND = 1.4
SMALL_ERROR = 0.5


@dataclass(frozen=True)
class Prediction:
    """Predicted error powers, each (steps, units): of the logical state and of the output."""

    state: NDArray
    output: NDArray


@dataclass(frozen=True)
class StreamStatistics:
    """What the predictor knows of a stream, each (steps, units), units = sequences x heads.

    decay: squared decay of a head; erase: factor of the isotropic erase.
    write: beta^2 |k|^4 / key_dim, the share of a read error's power that a derived d carries into the window.
    state, output: squared norms of the exact state after the step and of the exact output.
    gain: |q|^2 / key_dim, the factor from an isotropic state error's power to the output error's.
    start: (units,) squared norm of the prefill state.  key_dim: of the state.
    update, value: squared norms of the write and of its value's share, beta: None where no policy asks for them.
    curves: where the decay differs within a head, the finished predictions by policy; the fields above that describe
    one decay a head are then not used.
    """

    decay: NDArray
    erase: NDArray
    write: NDArray
    state: NDArray
    output: NDArray
    gain: NDArray
    log_decay: NDArray
    start: NDArray
    key_dim: int
    update: NDArray | None = None
    value: NDArray | None = None
    beta: NDArray | None = None
    curves: Mapping[Policy, Prediction] | None = field(default=None)

    def token(self, step: int) -> Token:
        """One step for ``ErrorBalance``."""

        def at(values: NDArray) -> NDArray:
            return values[step][:, None]

        return Token(
            decay=at(self.decay),
            erase=at(self.erase),
            write=at(self.write),
            state=at(self.state),
            gain=at(self.gain),
            output=self.output[step],
            log_decay=at(self.log_decay),
            update=0.0 if self.update is None else at(self.update),
            value=0.0 if self.value is None else at(self.value),
            beta=None if self.beta is None else at(self.beta),
        )


def predict_curve(
    policy: Policy, family: str, stats: StreamStatistics, noise: dict[str, NDArray]
) -> Prediction:
    """Error powers, step by step.  noise: relative RMS of one store, (units,), keys "checkpoint" and "read_copy".

    NaN for an fp64 checkpoint, whose errors are of the shadow's own size, and for a policy that was not known when the
    statistics of a decay that differs within a head were taken.
    """
    parts = [part for _, part in predict_blocks(policy, family, stats, noise)]
    return Prediction(np.concatenate([p.state for p in parts]), np.concatenate([p.output for p in parts]))


def predict_blocks(
    policy: Policy, family: str, stats: StreamStatistics, noise: dict[str, NDArray], length: int = 1024
) -> Iterator[tuple[int, Prediction]]:
    """``predict_curve`` in blocks of ``length`` steps: (first step, counted from 1, and its block)."""
    steps, units = stats.state.shape
    finished = None if stats.curves is None else stats.curves.get(policy)
    balance, recurrence = None, get_recurrence(family)
    if policy.checkpoint.name != "fp64" and recurrence.axis is DecayAxis.HEAD:
        balance = ErrorBalance(policy, recurrence, noise, stats.key_dim)
        with np.errstate(over="ignore", invalid="ignore"):
            balance.hand_off(stats.start[:, None])
    for first in range(0, steps, length):
        last = min(first + length, steps)
        state, output = np.full((last - first, units), np.nan), np.full((last - first, units), np.nan)
        if finished is not None:
            state, output = finished.state[first:last], finished.output[first:last]
        elif balance is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                for row in range(last - first):
                    state[row], output[row] = balance.step(stats.token(first + row))
        yield first + 1, Prediction(state, output)


__all__ = [
    "BAND",
    "SMALL_ERROR",
    "Prediction",
    "StreamStatistics",
    "gaussian_noise",
    "predict_blocks",
    "predict_curve",
    "rounding_noise",
    "state_noise",
]
