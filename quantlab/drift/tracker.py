"""One policy as it runs beside the shadow."""

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab.drift.growth import log_bins
from quantlab.drift.sources import StreamSource
from quantlab.drift.summary import PolicySummary
from quantlab.drift.sums import CURVE_BINS, RunSums, StepErrors
from quantlab.recurrences import StepInputs
from quantlab.schemes import DecodeState, Diverged, Policy, start

STATE_STRIDE = 16  # state errors at flushes at least this far apart, and at log-spaced steps


class Tracker:
    """Steps a policy, measures it, and sums its errors; ``errors`` holds those of the block under way."""

    def __init__(self, policy: Policy, source: StreamSource, seed: int, dense: bool):
        self.policy = policy
        self.diverged_at: int | None = None
        options = {"key_heads": source.key_heads, "rates": source.rates, "seed": seed}
        try:
            self.state: DecodeState = start(policy, source.family, source.initial, **options)
        except Diverged:  # the prefill state is beyond the policy's range: lost before the first step
            self.diverged_at = 1
            self.state = start(policy, source.family, torch.zeros_like(source.initial), **options)
        self.units = source.batch * source.heads
        self.sums = RunSums(source.steps, self.units, policy.window)
        self._stride = 1 if dense else -(-STATE_STRIDE // policy.window) * policy.window
        self._spaced = {source.steps, *log_bins(1, source.steps, CURVE_BINS).tolist()}
        self.errors = self._nothing(0)

    def begin(self, steps: int) -> None:
        """Make room for a block."""
        self.errors = self._nothing(steps)

    def step(
        self, number: int, row: int, inputs: StepInputs, output: torch.Tensor, shadow: torch.Tensor
    ) -> None:
        """Step ``number`` (counted from 1), row ``row`` of the block; output, shadow: the exact ones after it."""
        if self.diverged_at is not None:
            return
        try:
            found = self.state.step(inputs)
        except Diverged:
            self.diverged_at = number
            return
        error = found.double() - output
        squared = error.square().sum(-1)
        if not torch.isfinite(squared).all():
            self.diverged_at = number
            return
        self.errors.output[row] = squared.flatten().numpy()
        self.errors.gain[row] = (error * output).sum(-1).flatten().numpy()
        if number % self._stride == 0 or number in self._spaced:
            self.errors.state[row] = _squared_distance(self.state.materialize(), shadow)
            self.errors.read[row] = _squared_distance(self.state.read_state(), shadow)

    def end(self, first: int, output: NDArray, state: NDArray) -> None:
        """Sum the block that began at step ``first``; output, state: squared norms of the exact ones."""
        self.sums.add(first, self.errors, output, state)

    def summary(self) -> PolicySummary:
        """What the run came to, once the last block has ended."""
        exercised = self.state.exercised
        diverged_at = self.diverged_at or self.sums.lost.step
        status = "ok" if diverged_at is None else "diverged"
        if status == "ok" and 0 in exercised.values():
            status = "not_exercised"
        return PolicySummary(
            policy=self.policy,
            effective_policy=self.state.effective_policy,
            status=status,
            diverged_at=diverged_at,
            exercised=exercised,
            ledger=self.state.ledger,
            sums=self.sums,
        )

    def _nothing(self, steps: int) -> StepErrors:
        return StepErrors(*(np.full((steps, self.units), np.nan) for _ in range(4)))


def _squared_distance(state: torch.Tensor, shadow: torch.Tensor) -> NDArray:
    difference = shadow - state
    return torch.mul(difference, difference, out=difference).sum((-1, -2)).flatten().numpy()
