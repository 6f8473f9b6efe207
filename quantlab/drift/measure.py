"""Run policies over a stream beside a float64 shadow, and measure every step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab.drift.growth import Growth, growth, log_bins, pooled, pooled_curve
from quantlab.drift.predictor import (
    BAND,
    SMALL_ERROR,
    Prediction,
    predict_curve,
    state_noise,
)
from quantlab.drift.statistics import ShadowStatistics
from quantlab.drift.streams import Stream
from quantlab.errors import InputError
from quantlab.recurrences import get_recurrence
from quantlab.schemes import ByteLedger, DecodeState, Diverged, Policy, parse_policy, start

DIVERGED_ERROR = 10.0  # more error than ten times the signal: nothing of the state is left
STATE_STRIDE = 16  # state errors at flushes at least this far apart, and at log-spaced steps
CURVE_BINS = 48
ZERO_OUTPUT = "the exact output is zero in the second half: no error can be relative to it"


@dataclass(frozen=True)
class PolicyRun:
    """One policy on one stream.  Arrays are (steps, units), units = sequences x heads, NaN where not measured.

    output_error, state_error, read_error: squared norm of the difference to the shadow; gain: inner product of the
    output's error with the exact output; prediction: the closed form on the same stream.
    status: "ok", "diverged" (at step ``diverged_at``, counted from 1) or "not_exercised".
    """

    policy: Policy
    effective_policy: str
    status: str
    diverged_at: int | None
    output_error: NDArray
    state_error: NDArray
    read_error: NDArray
    gain: NDArray
    prediction: Prediction
    exercised: dict[str, int | None]
    ledger: ByteLedger


@dataclass(frozen=True)
class DriftResult:
    """All policies of one stream.  output_reference, state_reference: squared norms of the shadow, (steps, units)."""

    stream_hash: str
    stream_meta: dict[str, Any]
    family: str
    sequences: int
    heads: int
    output_reference: NDArray
    state_reference: NDArray
    runs: tuple[PolicyRun, ...] = field(default=())

    @property
    def steps(self) -> int:
        return self.output_reference.shape[0]

    @property
    def table(self):
        """Tidy pandas table: step, sequence, head, policy, the errors (state_error, read_error, output_error, relative
        to the norm of the exact value in the same head and step), and those norms (output_reference, state_reference).
        """
        import pandas as pd

        return pd.concat([self.policy_table(run) for run in self.runs], ignore_index=True)

    def policy_table(self, run: PolicyRun):
        """The rows of ``table`` for one policy."""
        import pandas as pd

        steps, units = self.output_reference.shape
        unit = np.tile(np.arange(units), steps)

        def relative(error: NDArray, reference: NDArray | float) -> NDArray:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                return np.sqrt(error / reference).reshape(-1).astype(np.float32)

        return pd.DataFrame(
            {
                "step": np.repeat(np.arange(1, steps + 1), units),
                "sequence": unit // self.heads,
                "head": unit % self.heads,
                "policy": pd.Categorical([str(run.policy)] * (steps * units)),
                "state_error": relative(run.state_error, self.state_reference),
                "read_error": relative(run.read_error, self.state_reference),
                "output_error": relative(run.output_error, self.output_reference),
                "output_reference": relative(self.output_reference, 1.0),
                "state_reference": relative(self.state_reference, 1.0),
            }
        )

    def growth(self, run: PolicyRun) -> Growth:
        """Growth exponent of the run's output error; NaN where the run turned NaN."""
        if not np.isfinite(run.output_error).all():
            return Growth(float("nan"), None, None)
        return growth(run.output_error, self.output_reference, window=run.policy.window)

    def metrics(self, run: PolicyRun) -> dict[str, Any]:
        """The numbers of one run; errors are pooled over the second half of the steps and all heads."""
        half = slice(self.steps // 2, None)
        output, state = self.output_reference[half], self.state_reference[half]
        error = pooled(run.output_error[half], output)
        measured = np.isfinite(run.gain[half])
        power = output[measured].sum()
        bias = float(run.gain[half][measured].sum() / power) if power > 0 else float("nan")
        exponent = self.growth(run)
        predicted = pooled(run.prediction.output[half], output)
        steady = run.status == "ok" and abs(exponent.exponent) <= 0.15
        return {
            "stream_hash": self.stream_hash,
            "effective_policy": run.effective_policy,
            "state_error": pooled(run.state_error[half], state),
            "read_error": pooled(run.read_error[half], state),
            "output_error": error,
            "output_bias": bias,
            "output_spread": float(np.sqrt(max(0.0, error**2 - bias**2))) if np.isfinite(error) else error,
            "growth_exponent": exponent.exponent,
            "growth_ci": None if exponent.low is None else [exponent.low, exponent.high],
            "steady": bool(steady),
            "predicted_state_error": pooled(run.prediction.state[half], state),
            "predicted_output_error": predicted,
            "prediction_note": _prediction_note(run.policy, error, predicted, bias, steady),
            "diverged_at": run.diverged_at,
            "exercised": run.exercised,
            "warning": "; ".join(
                filter(None, [_exercise_warning(run.exercised), None if output.sum() > 0 else ZERO_OUTPUT])
            )
            or None,
            "bits_per_value": run.ledger.bits_per_value,
            "bytes_per_token": run.ledger.bytes_per_token,
            "bytes_read_per_token": run.ledger.bytes_read_per_token,
            "bytes_written_per_token": run.ledger.bytes_written_per_token,
            "bytes_held": run.ledger.bytes_held,
        }

    def curve(self, run: PolicyRun) -> dict[str, list[float]]:
        """The run in at most 48 log-spaced bins: step, output_error, predicted_low, predicted_high, and the state and
        read errors with the steps at which they were measured.  NaN in the prediction where there is none."""
        edges = log_bins(1, self.steps, CURVE_BINS)
        step, output = pooled_curve(run.output_error, self.output_reference, edges)
        _, predicted = pooled_curve(run.prediction.output, self.output_reference, edges)
        _, state = pooled_curve(run.state_error, self.state_reference, edges)
        _, read = pooled_curve(run.read_error, self.state_reference, edges)
        kept, measured = np.isfinite(output), np.isfinite(state) & np.isfinite(read)
        return {
            "step": step[kept].tolist(),
            "output_error": output[kept].tolist(),
            "predicted_low": (predicted[kept] / BAND).tolist(),
            "predicted_high": (predicted[kept] * BAND).tolist(),
            "state_step": step[measured].tolist(),
            "state_error": state[measured].tolist(),
            "read_error": read[measured].tolist(),
        }


def run_drift(
    stream: Stream,
    policies: Sequence["str | Policy"],
    *,
    seed: int = 0,
    dense: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> DriftResult:
    """Run every policy over ``stream`` beside one float64 shadow.

    The shadow starts from the unrounded prefill state and consumes the stream's stored values.  seed: of the stochastic
    bits.  dense: measure state and read errors at every step instead of at flushes and log-spaced steps.  on_step:
    called with the number of finished steps.  A policy that overflows or turns NaN ends as ``diverged`` and the others
    go on.  Raises InputError for a policy that the family cannot use.
    """
    if isinstance(policies, (str, Policy)):
        raise InputError("policies", str(policies), "a list of policies")
    parsed = [parse_policy(policy) for policy in policies]
    if not parsed:
        raise InputError("policies", [], "at least one policy")
    trackers = [_Tracker(policy, stream, seed, dense) for policy in dict.fromkeys(parsed)]
    recurrence = get_recurrence(stream.family)
    rates = None if stream.rates is None else stream.rates.double()
    shadow = stream.initial.double()
    units = stream.batch * stream.heads
    statistics = ShadowStatistics(stream, [tracker.policy for tracker in trackers])
    middle = shadow
    with torch.inference_mode():
        for t in range(stream.steps):
            inputs = stream.step(t)
            wide = inputs.to(torch.float64)
            before = shadow
            shadow, output = recurrence.step(shadow, wide, rates)
            statistics.add(t, before, shadow, output, wide, rates)
            for tracker in trackers:
                tracker.step(t, inputs, output, shadow)
            if t == stream.steps // 2:
                middle = shadow
            if on_step is not None:
                on_step(t + 1)
    stats = statistics.arrays()
    runs = []
    for tracker in trackers:
        noise = state_noise(tracker.policy, middle)
        prediction = predict_curve(tracker.policy, stream.family, stats, noise)
        runs.append(tracker.finish(stats.output, prediction))
    return DriftResult(
        stream_hash=stream.hash,
        stream_meta=dict(stream.meta),
        family=stream.family,
        sequences=stream.batch,
        heads=stream.heads,
        output_reference=stats.output.reshape(stream.steps, units),
        state_reference=stats.state.reshape(stream.steps, units),
        runs=tuple(runs),
    )


class _Tracker:
    """One policy as it runs."""

    def __init__(self, policy: Policy, stream: Stream, seed: int, dense: bool):
        self.policy = policy
        self.diverged_at: int | None = None
        options = {"key_heads": stream.key_heads, "rates": stream.rates, "seed": seed}
        try:
            self.state: DecodeState = start(policy, stream.family, stream.initial, **options)
        except Diverged:  # the prefill state is beyond the policy's range: lost before the first step
            self.diverged_at = 1
            self.state = start(policy, stream.family, torch.zeros_like(stream.initial), **options)
        shape = (stream.steps, stream.batch * stream.heads)
        self.output_error, self.gain = np.full(shape, np.nan), np.full(shape, np.nan)
        self.state_error, self.read_error = np.full(shape, np.nan), np.full(shape, np.nan)
        stride = -(-STATE_STRIDE // policy.window) * policy.window
        spaced = set(log_bins(1, stream.steps, CURVE_BINS).tolist())
        self.measured = {
            n
            for n in range(1, stream.steps + 1)
            if dense or n % stride == 0 or n in spaced or n == stream.steps
        }

    def step(self, t: int, inputs, output, shadow) -> None:
        if self.diverged_at is not None:
            return
        try:
            found = self.state.step(inputs)
        except Diverged:
            self.diverged_at = t + 1
            return
        error = found.double() - output
        squared = error.square().sum(-1)
        if not torch.isfinite(squared).all():
            self.diverged_at = t + 1
            return
        self.output_error[t] = squared.flatten().numpy()
        self.gain[t] = (error * output).sum(-1).flatten().numpy()
        if t + 1 in self.measured:
            self.state_error[t] = _squared_distance(self.state.materialize(), shadow)
            self.read_error[t] = _squared_distance(self.state.read_state(), shadow)

    def finish(self, reference: NDArray, prediction: Prediction) -> PolicyRun:
        exercised = self.state.exercised
        diverged_at = self.diverged_at or _lost_at(self.output_error, reference)
        status = "ok" if diverged_at is None else "diverged"
        if status == "ok" and 0 in exercised.values():
            status = "not_exercised"
        return PolicyRun(
            policy=self.policy,
            effective_policy=self.state.effective_policy,
            status=status,
            diverged_at=diverged_at,
            output_error=self.output_error,
            state_error=self.state_error,
            read_error=self.read_error,
            gain=self.gain,
            prediction=prediction,
            exercised=exercised,
            ledger=self.state.ledger,
        )


def _squared_distance(state: torch.Tensor, shadow: torch.Tensor) -> NDArray:
    return (state.double() - shadow).square().sum((-1, -2)).flatten().numpy()


def _lost_at(error: NDArray, reference: NDArray, span: int = 16) -> int | None:
    """The first step at which the error, pooled over heads and ``span`` steps, is above DIVERGED_ERROR; or None."""
    steps = error.shape[0] // span * span
    if steps == 0:
        return None
    blocks = error[:steps].sum(1).reshape(-1, span).sum(1)
    exact = reference[:steps].sum(1).reshape(-1, span).sum(1)
    lost = np.flatnonzero(blocks > DIVERGED_ERROR**2 * exact)
    return int(lost[0]) * span + 1 if len(lost) else None


def _prediction_note(policy: Policy, error: float, predicted: float, bias: float, steady: bool) -> str | None:
    """Why the closed form is not to be trusted for this curve, or None if it is within its band."""
    if np.isfinite(error) and error > SMALL_ERROR:
        return f"the error is {error:.2g} of the signal: the closed form holds for small errors"
    if np.isfinite(error) and np.isfinite(predicted) and error > 0 and predicted > 0:
        ratio = error / predicted
        if 1 / BAND <= ratio <= BAND:
            return None
        if ratio > 1 and abs(bias) > 0.3 * error:
            # Independent errors are orthogonal to the signal; a state that rounding holds still is not.
            return (
                f"rounding errors are correlated, not independent: {abs(bias) / error:.0%} of the error lies along the"
                " signal, as in a state that moves by less than half a unit in the last place and stays where it is,"
                " or in a short run or a decay that is rounded the same way at every step"
            )
        return f"measured / predicted = {ratio:.2g}, outside the band of {BAND}" + (
            "" if steady else "; the error was not steady"
        )
    if policy.checkpoint.name == "fp64":
        return "no prediction: the shadow is float64 too"
    if np.isnan(predicted):
        return "no prediction: the decay differs within a head"
    if not np.isfinite(error):
        return "no prediction to compare with: the error is not finite, or not measured, in the second half"
    return "no prediction: not finite, or zero"


def _exercise_warning(exercised: dict[str, int | None]) -> str | None:
    thin = [f"{part} {n}" for part, n in exercised.items() if n is not None and n < 2]
    return f"stores read back fewer than twice: {', '.join(thin)}" if thin else None
