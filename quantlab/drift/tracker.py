"""One policy as it runs beside the shadow."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab.drift.growth import log_bins
from quantlab.drift.head_policies import Followed, groups_on, whole_window
from quantlab.drift.predictor import Prediction
from quantlab.drift.sources import BLOCK, StreamSource
from quantlab.drift.summary import PolicySummary
from quantlab.drift.sums import CURVE_BINS, RunSums, StepErrors
from quantlab.errors import InputError
from quantlab.recurrences import StepInputs
from quantlab.schemes import Diverged, LayerState, start_groups

STATE_STRIDE = 16  # state errors at flushes at least this far apart, and at log-spaced steps


@dataclass(frozen=True)
class Schedule:
    """What happens to the tokens beside single decode steps.

    turn: a turn ends every so many tokens, and the state is flushed.  chunk: tokens are taken so many at once, as
    chunks of a prefill.  Raises InputError for both, and for less than one token.
    """

    turn: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise InputError(name, count, "at least 1 token")
        if self.turn is not None and self.chunk is not None:
            raise InputError("turn", self.turn, "turns or chunks, not both")

    @property
    def block(self) -> int:
        """Steps of a block that holds whole chunks."""
        return BLOCK if self.chunk is None else self.chunk * max(1, BLOCK // self.chunk)

    @property
    def predicted(self) -> bool:
        """Whether the closed form knows this schedule."""
        return self.turn is None and self.chunk is None


STEP_BY_STEP = Schedule()


class Tracker:
    """Steps a policy, measures it, and sums its errors; ``errors`` holds those of the block under way."""

    def __init__(
        self,
        policy: Followed,
        source: StreamSource,
        seed: int,
        dense: bool,
        schedule: Schedule = STEP_BY_STEP,
    ):
        self.policy, self.schedule = policy, schedule
        self.groups = groups_on(policy, source)
        self._waiting: list[StepInputs] = []
        self._exact: list[torch.Tensor] = []
        self._measure = False
        self.diverged_at: int | None = None
        options = {"key_heads": source.key_heads, "rates": source.rates, "seed": seed}
        try:
            self.state: LayerState = start_groups(self.groups, source.family, source.initial, **options)
        except Diverged:  # the prefill state is beyond the policy's range: lost before the first step
            self.diverged_at = 1
            zeros = torch.zeros_like(source.initial)
            self.state = start_groups(self.groups, source.family, zeros, **options)
        self.units = source.batch * source.heads
        window = whole_window(self.groups)
        self.sums = RunSums(source.steps, self.units, window)
        self._stride = 1 if dense else -(-STATE_STRIDE // window) * window
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
        self._measure |= self._measures(number)
        self._waiting.append(inputs)
        self._exact.append(output)
        whole = len(self._waiting) == (self.schedule.chunk or 1) or row == len(self.errors.output) - 1
        if not whole:
            return
        try:
            found = self._decode()
            if self.schedule.turn is not None and number % self.schedule.turn == 0:
                self.state.flush()
        except Diverged:
            self.diverged_at = number
            return
        first = row + 1 - len(found)
        for i, (one, exact) in enumerate(zip(found, self._exact, strict=True)):
            error = one.double() - exact
            squared = error.square().sum(-1)
            if not torch.isfinite(squared).all():
                self.diverged_at = number + 1 + i - len(found)
                return
            self.errors.output[first + i] = squared.flatten().numpy()
            self.errors.gain[first + i] = (error * exact).sum(-1).flatten().numpy()
        if self._measure:
            self.errors.state[row] = _squared_distance(self.state.materialize(), shadow)
            self.errors.read[row] = _squared_distance(self.state.read_state(), shadow)
        self._waiting, self._exact, self._measure = [], [], False

    def _decode(self) -> list[torch.Tensor]:
        """Outputs of the waiting tokens, each (batch, heads, value_dim)."""
        if self.schedule.chunk is None:
            return [self.state.step(self._waiting[0])]
        names = [name for name, value in vars(self._waiting[0]).items() if value is not None]
        tokens = {name: torch.stack([getattr(one, name) for one in self._waiting], 1) for name in names}
        return list(self.state.extend(StepInputs(**tokens)).unbind(1))

    def end(self, first: int, output: NDArray, state: NDArray) -> None:
        """Sum the block that began at step ``first``; output, state: squared norms of the exact ones."""
        self.sums.add(first, self.errors, output, state)

    def add_prediction(self, first: int, predicted: Prediction, output: NDArray, state: NDArray) -> None:
        """Sum the closed form on the steps from ``first`` on, that of the state where the state is measured too."""
        numbers = range(first, first + len(output))
        measured = np.asarray([self._measures(number) for number in numbers], dtype=bool)
        of_state = np.where(measured[:, None], predicted.state, np.nan)
        self.sums.add_prediction(first, predicted.output, of_state, output, state)

    def _measures(self, number: int) -> bool:
        """Whether the state's own error is measured at this step."""
        return number % self._stride == 0 or number in self._spaced

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
