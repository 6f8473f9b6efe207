"""What one policy's run comes to: status, metrics, curve."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantlab.drift.growth import Growth
from quantlab.drift.head_policies import Followed
from quantlab.drift.predictor import BAND, SMALL_ERROR
from quantlab.drift.sums import RunSums
from quantlab.schemes import ByteLedger, PolicyRules

ZERO_OUTPUT = "the exact output is zero in the second half: no error can be relative to it"


@dataclass(frozen=True)
class PolicySummary:
    """One policy on one stream, without its steps.

    status: "ok", "diverged" (at step ``diverged_at``, counted from 1) or "not_exercised".
    """

    policy: Followed
    effective_policy: str
    status: str
    diverged_at: int | None
    exercised: dict[str, int | None]
    ledger: ByteLedger
    sums: RunSums

    def growth(self) -> Growth:
        """Growth exponent of the run's output error; NaN where the run turned NaN."""
        return self.sums.growth()

    def metrics(self, stream_hash: str) -> dict[str, Any]:
        """The numbers of the run; errors are pooled over the second half of the steps and all heads."""
        half = self.sums.half
        error, predicted = half["output"].pooled(), half["predicted_output"].pooled()
        power = float(half["gain"].reference.sum())
        bias = float(half["gain"].error.sum()) / power if power > 0 else float("nan")
        exponent = self.growth()
        steady = self.status == "ok" and abs(exponent.exponent) <= 0.15
        silent = None if half["signal"].reference.sum() > 0 else ZERO_OUTPUT
        return {
            "stream_hash": stream_hash,
            "effective_policy": self.effective_policy,
            "state_error": half["state"].pooled(),
            "read_error": half["read"].pooled(),
            "output_error": error,
            "output_bias": bias,
            "output_spread": float(np.sqrt(max(0.0, error**2 - bias**2))) if np.isfinite(error) else error,
            "growth_exponent": exponent.exponent,
            "growth_ci": None if exponent.low is None else [exponent.low, exponent.high],
            "steady": bool(steady),
            "predicted_state_error": half["predicted_state"].pooled(),
            "predicted_output_error": predicted,
            "prediction_note": _prediction_note(self.policy, error, predicted, bias, steady),
            "diverged_at": self.diverged_at,
            "exercised": self.exercised,
            "warning": "; ".join(filter(None, [_exercise_warning(self.exercised), silent])) or None,
            "bits_per_value": self.ledger.bits_per_value,
            "bytes_per_token": self.ledger.bytes_per_token,
            "bytes_read_per_token": self.ledger.bytes_read_per_token,
            "bytes_written_per_token": self.ledger.bytes_written_per_token,
            "bytes_held": self.ledger.bytes_held,
        }

    def curve(self) -> dict[str, list[float]]:
        """The run in at most 48 log-spaced bins: step, output_error, predicted_low, predicted_high, and the state and
        read errors with the steps at which they were measured.  NaN in the prediction where there is none."""
        step, output = self.sums.curve["output"].curve()
        _, predicted = self.sums.curve["predicted_output"].curve()
        _, state = self.sums.curve["state"].curve()
        _, read = self.sums.curve["read"].curve()
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


def _prediction_note(
    policy: Followed, error: float, predicted: float, bias: float, steady: bool
) -> str | None:
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
    policies = policy.policies if isinstance(policy, PolicyRules) else (policy,)
    if all(one.checkpoint.name == "fp64" for one in policies):
        return "no prediction: the shadow is float64 too"
    if np.isnan(predicted):
        return "no prediction: the run has turns or chunks, or the predicted error is beyond all numbers"
    if not np.isfinite(error):
        return "no prediction to compare with: the error is not finite, or not measured, in the second half"
    return "no prediction: not finite, or zero"


def _exercise_warning(exercised: dict[str, int | None]) -> str | None:
    thin = [f"{part} {n}" for part, n in exercised.items() if n is not None and n < 2]
    return f"stores read back fewer than twice: {', '.join(thin)}" if thin else None
