"""What a policy does to a model's next-token distributions while the model decodes: the closed loop.

In a stream replayed offline all policies get the same inputs.  Here the error of a state reaches the layers above, the
inputs of the next tokens and, free-running, the choice of the tokens themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantlab.errors import InputError, unknown_name
from quantlab.models.agreement import MarginBin, Measures, agreement_by_margin, compare
from quantlab.models.forwards import check_count, check_tokens
from quantlab.models.policy_decoder import PolicyDecoder
from quantlab.schemes import Policy, PolicyRules, parse_rules

if TYPE_CHECKING:
    import pandas

MODES = ("forced", "free")
_MEASURES = ("kl", "margin", "nll", "baseline_nll")


@dataclass(frozen=True)
class ClosedLoopRun:
    """One policy beside the baseline.

    policy: canonical text.  status: "ok"; "not_exercised", if a stored copy was never read back; or "diverged": at step
    ``diverged_at`` (0: the prefill) the policy could not hold a state or gave logits that are NaN, as ``message`` says.
    step, sequence: of each compared token, step by step; top1, and in measures kl, margin, nll, baseline_nll: as of
    ``Measures``.  first_divergence: for each sequence the first step at which the most likely tokens differ, or None.
    report: what the policy did, ``PolicyReport.as_dict()``.
    """

    policy: str
    status: str
    diverged_at: int | None
    message: str | None
    step: NDArray[np.int64]
    sequence: NDArray[np.int64]
    top1: NDArray[np.bool_]
    measures: Mapping[str, NDArray[np.float64]]
    first_divergence: tuple[int | None, ...]
    report: Mapping[str, Any]

    @property
    def by_margin(self) -> list[MarginBin]:
        """Top-1 agreement in fixed bins of the baseline's margin (``agreement.MARGIN_EDGES``)."""
        return agreement_by_margin(self.measures["margin"], self.top1)

    @property
    def metrics(self) -> dict[str, Any]:
        """Plain values for a record: means over the compared tokens, and what the policy did."""
        means = {name: _mean(self.measures[name]) for name in ("kl", "nll", "baseline_nll")}
        earliest = [step for step in self.first_divergence if step is not None]
        exercised = self.report["exercised"]
        thin = [f"{part} {count}" for part, count in exercised.items() if count is not None and count < 2]
        # Only the text has a nll; a free run ends where the last of its sequences leaves the baseline's.
        parted = None not in self.first_divergence and bool(np.isnan(self.measures["nll"]).all())
        advice = "the choices parted before; mode forced reads on" if parted else "more steps"
        kept = ("effective_policy", "exercised", "op_hits", "bits_per_value", "bytes_per_token")
        return {
            **means,
            "kl_largest": float(self.measures["kl"].max()) if len(self.step) else None,
            "top1_agreement": _mean(self.top1),
            "tokens": len(self.step),
            "first_divergence": list(self.first_divergence),
            "earliest_divergence": min(earliest, default=None),
            "agreement_by_margin": [found._asdict() for found in self.by_margin],
            "diverged_at": self.diverged_at,
            "warning": f"read back fewer than 2 stores ({', '.join(thin)}): {advice}" if thin else None,
            **{name: self.report[name] for name in kept},
        }

    @property
    def table(self) -> "pandas.DataFrame":
        """Tidy rows: policy, step, sequence, status, top1, kl, margin, nll, baseline_nll.

        A run that diverged ends in a row without numbers for each sequence.
        """
        import pandas

        columns = {
            "step": self.step,
            "sequence": self.sequence,
            "status": "ok",
            "top1": self.top1,
            **self.measures,
        }
        table = pandas.DataFrame(columns).astype({"top1": "boolean"})
        if self.diverged_at is not None:
            rows = range(len(self.first_divergence))
            last = [{"step": self.diverged_at, "sequence": row, "status": "diverged"} for row in rows]
            table = pandas.concat([table, pandas.DataFrame(last)], ignore_index=True)
        table.insert(0, "policy", self.policy)
        return table


@dataclass(frozen=True)
class ClosedLoop:
    """What ``closed_loop`` found: settings, and a run for each policy."""

    mode: str
    baseline: str
    prompt: int
    steps: int
    runs: tuple[ClosedLoopRun, ...]

    @property
    def table(self) -> "pandas.DataFrame":
        """The rows of all runs."""
        import pandas

        return pandas.concat([run.table for run in self.runs], ignore_index=True)


@torch.no_grad()
def closed_loop(
    model: nn.Module,
    ids: Any,
    policies: Sequence[str | Path | Policy | PolicyRules],
    *,
    prompt: int,
    steps: int,
    mode: str = "forced",
    baseline: str | Path | Policy | PolicyRules = "fp32@1",
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> ClosedLoop:
    """Decode the same tokens under the baseline and under each policy, and compare what comes next.

    ids: token ids (sequences, tokens) or (tokens,), no padding.  The first ``prompt`` are a prefill, after which all
    policies say the same: its state is rounded only behind it.  Step n reads one token more and compares the
    distributions behind it.

    mode "forced": step n reads token prompt + n - 1 of ``ids``, whoever would have chosen another; the nll is that of
    the next one, so prompt + steps + 1 tokens are needed.  mode "free": each policy reads what it chose itself,
    greedily and past any end-of-text token; a sequence is compared up to the first step at which the choices differ,
    itself included, since the distributions behind it belong to different texts.

    Each policy runs with a state of its own, all sequences in one batch.  seed: of stochastic rounding.  on_step:
    called with the number of steps done.  Raises InputError for too few tokens, for a baseline that diverges, and as
    ``run_with_policy`` does; a policy that diverges is a run with that status.
    """
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    prompt, steps = check_count("prompt", prompt), check_count("steps", steps)
    followed = list(dict.fromkeys(parse_rules(policy) for policy in policies))
    if not followed:
        raise InputError("policies", list(policies), "at least one policy")
    forced = mode == "forced"
    needed = (
        f"a prompt of {prompt}, {steps} steps and a token to predict" if forced else f"a prompt of {prompt}"
    )
    tokens = check_tokens(model, ids, prompt + (steps + 1) * forced, needed)
    reference = PolicyDecoder(model, parse_rules(baseline), seed)
    decoders = [PolicyDecoder(model, rules, seed) for rules in followed]
    runs = [_Running(decoder, len(tokens)) for decoder in decoders]
    for step in range(steps + 1):
        first, last = (prompt + step - 1, prompt + step) if step else (0, prompt)
        given = tokens[:, first:last] if forced or not step else None
        target = tokens[:, last] if forced else None
        reference.read(given, step)
        if reference.message is not None:
            raise InputError(
                "baseline", reference.rules.text, f"one that does not diverge: {reference.message}"
            )
        for run in runs:
            if run.going and run.decoder.read(given, step) and step:
                run.add(step, compare(reference.logits, run.decoder.logits, target), free=not forced)
        if step and on_step is not None:
            on_step(step)
        if not any(run.going for run in runs):
            break
    found = tuple(run.result() for run in runs)
    return ClosedLoop(mode, reference.rules.text, prompt, steps, found)


class _Running:
    """Collects what is compared of one policy."""

    def __init__(self, decoder: PolicyDecoder, sequences: int):
        self.decoder = decoder
        self._rows: list[tuple[int, NDArray[np.intp], Measures]] = []
        self._first: list[int | None] = [None] * sequences
        self._compared = np.ones(sequences, bool)

    @property
    def going(self) -> bool:
        return self.decoder.message is None and bool(self._compared.any())

    def add(self, step: int, found: Measures, *, free: bool) -> None:
        rows = np.flatnonzero(self._compared)
        self._rows.append((step, rows, found))
        for row in rows[~found.top1[rows]]:
            self._first[row] = self._first[row] or step
        if free:
            self._compared &= found.top1
        if not self._compared.any():
            self.decoder.end()

    def result(self) -> ClosedLoopRun:
        decoder, status, message = self.decoder, "ok", self.decoder.message
        report = decoder.interception.report.as_dict()
        if message is not None:
            status = "diverged"
        else:
            decoder.interception.require_effect()
            # A sequence that left the baseline's text has shown an effect, however early it ended.
            if 0 in report["exercised"].values() and self._compared.any():
                status, message = (
                    "not_exercised",
                    f"no stored state was read back: exercised {report['exercised']}",
                )
        none = np.empty(0)
        return ClosedLoopRun(
            policy=decoder.rules.text,
            status=status,
            diverged_at=decoder.diverged_at,
            message=message,
            step=np.concatenate([none, *(np.full(len(rows), step) for step, rows, _ in self._rows)]).astype(
                int
            ),
            sequence=np.concatenate([none, *(rows for _, rows, _ in self._rows)]).astype(int),
            top1=np.concatenate([none, *(found.top1[rows] for _, rows, found in self._rows)]).astype(bool),
            measures={
                name: np.concatenate([none, *(getattr(found, name)[rows] for _, rows, found in self._rows)])
                for name in _MEASURES
            },
            first_divergence=tuple(self._first),
            report=report,
        )


def _mean(values: NDArray[Any]) -> float | None:
    """None where there is nothing, or nothing that is a number, to average."""
    return float(values.mean()) if len(values) and not np.isnan(values).any() else None
