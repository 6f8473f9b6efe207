"""Run policies over a stream beside a float64 shadow, and measure every step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab.drift.growth import Growth
from quantlab.drift.head_policies import Followed, check_fits, of_heads, parse_followed, policies_on
from quantlab.drift.predictor import Prediction, StreamStatistics, predict_curve, state_noise
from quantlab.drift.series import step_columns
from quantlab.drift.shadow import ExactState
from quantlab.drift.sources import BLOCK, StreamSource, as_source
from quantlab.drift.statistics import ShadowStatistics, channel_balances
from quantlab.drift.streams import Stream
from quantlab.drift.summary import PolicySummary
from quantlab.drift.sums import StepErrors
from quantlab.drift.tracker import Schedule, Tracker
from quantlab.errors import InputError
from quantlab.schemes import Policy, PolicyRules


@dataclass(frozen=True)
class PolicyRun(PolicySummary):
    """One policy on one stream, with every step.  Arrays are (steps, units), units = sequences x heads, NaN where not
    measured.

    output_error, state_error, read_error: squared norm of the difference to the shadow; gain: inner product of the
    output's error with the exact output; prediction: the closed form on the same stream.
    """

    output_error: NDArray
    state_error: NDArray
    read_error: NDArray
    gain: NDArray
    prediction: Prediction


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

        errors = StepErrors(run.output_error, run.state_error, run.read_error, run.gain)
        columns: dict[str, Any] = step_columns(
            1, self.heads, errors, self.output_reference, self.state_reference
        )
        names = [*columns]
        columns["policy"] = pd.Categorical([str(run.policy)] * len(columns["step"]))
        return pd.DataFrame(columns)[[*names[:3], "policy", *names[3:]]]

    def growth(self, run: PolicyRun) -> Growth:
        """Growth exponent of the run's output error; NaN where the run turned NaN."""
        return run.growth()

    def metrics(self, run: PolicyRun) -> dict[str, Any]:
        """The numbers of one run; errors are pooled over the second half of the steps and all heads."""
        return run.metrics(self.stream_hash)

    def curve(self, run: PolicyRun) -> dict[str, list[float]]:
        """``PolicySummary.curve``."""
        return run.curve()


def run_drift(
    stream: "Stream | StreamSource",
    policies: Sequence["str | Path | Policy | PolicyRules"],
    *,
    seed: int = 0,
    dense: bool = False,
    turn: int | None = None,
    chunk: int | None = None,
    on_step: Callable[[int], None] | None = None,
) -> DriftResult:
    """Run every policy over ``stream`` beside one float64 shadow, and keep every step (``run_long`` does not).

    The shadow starts from the unrounded prefill state and consumes the stream's stored values.  A policy may be rules
    (a path that ends in .toml) that give the stream's heads several; those of layer 0 hold, or of the "layer" that the
    stream's meta names.  seed: of the stochastic bits.  dense: measure state and read errors at every step instead of
    at flushes and log-spaced steps.  turn: tokens of a turn, at whose end every state is flushed; chunk: tokens that
    are taken at once, as a prefill chunk (neither has a prediction).  on_step: called with the number of finished
    steps.  A policy that overflows or turns NaN ends as ``diverged`` and the others go on.  Raises InputError for a
    policy that the family cannot use.
    """
    source = as_source(stream)
    schedule = Schedule(turn, chunk)
    parsed = parse_policies(policies)
    for policy in parsed:
        check_fits(policy, source)
    trackers = [Tracker(policy, source, seed, dense, schedule) for policy in parsed]
    kept: list[list[StepErrors]] = [[] for _ in trackers]
    statistics: list[StreamStatistics] = []
    shadow = RunningShadow(source, policies_on(parsed, source))
    for block in shadow.run(trackers, on_step, schedule.block):
        statistics.append(block.statistics)
        for errors, tracker in zip(kept, trackers, strict=True):
            errors.append(tracker.errors)
    whole = joined(statistics)
    runs = []
    for tracker, errors in zip(trackers, kept, strict=True):
        predicted = {
            group.policy: predict_curve(
                group.policy, source.family, whole, state_noise(group.policy, shadow.middle)
            )
            for group in tracker.groups
        }
        prediction = of_heads(tracker.groups, source.heads, predicted)
        if not schedule.predicted:
            nothing = np.full_like(whole.output, np.nan)
            prediction = Prediction(nothing, nothing)
        tracker.add_prediction(1, prediction, whole.output, whole.state)
        run = PolicyRun(
            **vars(tracker.summary()),
            output_error=np.concatenate([e.output for e in errors]),
            state_error=np.concatenate([e.state for e in errors]),
            read_error=np.concatenate([e.read for e in errors]),
            gain=np.concatenate([e.gain for e in errors]),
            prediction=prediction,
        )
        runs.append(run)
    return DriftResult(
        stream_hash=source.hash,
        stream_meta=dict(source.meta),
        family=source.family,
        sequences=source.batch,
        heads=source.heads,
        output_reference=whole.output,
        state_reference=whole.state,
        runs=tuple(runs),
    )


def parse_policies(policies: Sequence["str | Path | Policy | PolicyRules"]) -> list[Followed]:
    """Each policy once, in order; raises InputError for a text instead of a list and for an empty list."""
    if isinstance(policies, (str, Path, Policy, PolicyRules)):
        raise InputError("policies", str(policies), "a list of policies")
    parsed = [parse_followed(policy) for policy in policies]
    if not parsed:
        raise InputError("policies", [], "at least one policy")
    return list(dict.fromkeys(parsed))


@dataclass(frozen=True)
class MeasuredBlock:
    """What the shadow knows of the block that the trackers have just measured; it begins at step ``first``."""

    first: int
    statistics: StreamStatistics


class RunningShadow:
    """The exact run of a source: ``middle`` is its state in the middle of the run, once that is reached.

    policies: whose errors will be predicted.
    """

    def __init__(self, source: StreamSource, policies: Sequence[Policy] = ()):
        self.source, self.policies = source, policies
        self.exact = ExactState(source.family, source.initial, source.rates)
        self.balances = channel_balances(source, policies)
        self.middle = self.exact.state.clone()

    def run(
        self,
        trackers: Iterable[Tracker],
        on_step: Callable[[int], None] | None = None,
        length: int = BLOCK,
    ) -> Iterator[MeasuredBlock]:
        """Step the shadow and every tracker through the source, and say so after each block."""
        number = 0
        for stream in self.source.blocks(length):
            with torch.inference_mode():
                first, statistics = number + 1, ShadowStatistics(stream, self.policies, self.balances)
                for tracker in trackers:
                    tracker.begin(stream.steps)
                for row in range(stream.steps):
                    number += 1
                    inputs = stream.step(row)
                    wide, before = inputs.to(torch.float64), self.exact.state.clone()
                    output = self.exact.step(wide)
                    statistics.add(row, before, self.exact.state, output, wide, self.exact.rates)
                    for tracker in trackers:
                        tracker.step(number, row, inputs, output, self.exact.state)
                    if number == self.source.steps // 2 + 1:
                        self.middle = self.exact.state.clone()
                    if on_step is not None:
                        on_step(number)
                arrays = statistics.arrays()
                for tracker in trackers:
                    tracker.end(first, arrays.output, arrays.state)
            yield MeasuredBlock(first, arrays)


def joined(blocks: Sequence[StreamStatistics]) -> StreamStatistics:
    """The statistics of consecutive blocks as those of one stream."""
    first = vars(blocks[0])

    def whole(name: str) -> Any:
        values = [getattr(block, name) for block in blocks]
        per_step = isinstance(values[0], np.ndarray) and values[0].ndim == 2
        return np.concatenate(values) if per_step else values[0]

    fields: dict[str, Any] = {name: whole(name) for name in first}
    if fields["curves"] is not None:
        fields["curves"] = {
            policy: Prediction(
                np.concatenate([block.curves[policy].state for block in blocks if block.curves]),
                np.concatenate([block.curves[policy].output for block in blocks if block.curves]),
            )
            for policy in fields["curves"]
        }
    return StreamStatistics(**fields)
