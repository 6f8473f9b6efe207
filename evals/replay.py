"""Trace replay: the baseline and the policies read the same tokens side by side, and what they expect next is compared.

Every token of prompt and response goes through the decode state.  As in ``scoring`` all sequences of a batch start at
position 0, none is padded, and a row leaves when its trace ends.  At every response token the logits of all decoders
are compared and dropped: what stays of a token is a few numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantlab.errors import InputError
from quantlab.evals.trace_answers import Answer
from quantlab.evals.traces import Trace
from quantlab.models.agreement import compare, log_probabilities
from quantlab.models.decode_rows import ROWS_TOGETHER
from quantlab.models.policy_decoder import PolicyDecoder

MEASURES = ("kl", "top1", "margin", "nll", "baseline_nll")
_COMPARED = 2**22
"""Logits that are compared at once: a few float64 copies of them are 200 MB."""


@dataclass(frozen=True)
class Replayed:
    """One trace under one policy.

    measures: MEASURES, as of ``agreement.Measures``, one number a response token.  letters: (2, letters) log
    probabilities of the answer's letters, baseline and policy, at the token that says it, or None.  exercised: stores
    that a later step read back, by copy.
    """

    measures: dict[str, NDArray[Any]]
    letters: NDArray[np.float64] | None
    exercised: dict[str, int | None]


@torch.no_grad()
def replay_batch(
    baseline: PolicyDecoder,
    decoders: Sequence[PolicyDecoder],
    traces: Sequence[Trace],
    *,
    device: Any = "cpu",
    on_token: Callable[[int], Any] | None = None,
) -> list[list[Replayed] | None]:
    """For each decoder what ``traces`` gave, in their order; None if it diverged (its ``message`` says at which token).

    on_token: called with the number of traces that have read one token more.  Raises InputError if the baseline
    diverges.
    """
    found = [[_Kept(trace) for trace in traces] for _ in decoders]
    alive = list(range(len(traces)))
    padded = _padded(alive)
    for decoder in (baseline, *decoders):
        decoder.begin([traces[number].sequence_id for number in padded])
    position = 0
    while True:
        tokens = torch.tensor([[traces[number].tokens[position]] for number in padded], device=device)
        if not baseline.read(tokens, position + 1):
            expected = (
                f"traces on which the baseline {baseline.rules.text} does not diverge: {baseline.message}"
            )
            raise InputError("replay", baseline.rules.text, expected)
        going = [decoder.message is None and decoder.read(tokens, position + 1) for decoder in decoders]
        if on_token is not None:
            on_token(len(alive))
        position += 1
        rows = [row for row, number in enumerate(alive) if position >= len(traces[number].prompt)]
        for decoder, kept, goes in zip(decoders, found, going, strict=True):
            if goes and rows:
                _compare(baseline.logits, decoder.logits, rows, [kept[alive[row]] for row in rows], position)
        # The last token of a trace is predicted and not read.
        ended = [row for row, number in enumerate(alive) if len(traces[number].tokens) == position + 1]
        if not ended:
            continue
        for decoder, kept, goes in zip(decoders, found, going, strict=True):
            if goes:
                for row, counts in zip(ended, decoder.exercised(torch.tensor(ended)), strict=True):
                    kept[alive[row]].exercised = counts
        staying = [row for row in range(len(alive)) if row not in set(ended)]
        alive = [alive[row] for row in staying]
        if not alive:
            break
        padded = _padded(alive)
        origin = torch.tensor(_padded(staying), device=device)
        for decoder in (baseline, *decoders):
            if decoder.message is None:
                decoder.keep(origin)
    results: list[list[Replayed] | None] = []
    for decoder, kept in zip(decoders, found, strict=True):
        if decoder.message is None:
            decoder.interception.require_effect()
        results.append(None if decoder.message is not None else [one.result() for one in kept])
        decoder.end()
    baseline.end()
    return results


def _padded(rows: list[int]) -> list[int]:
    """A multiple of ROWS_TOGETHER, by repeating the first: on a CPU a row's numbers then do not depend on the others.

    Fewer rows are multiplied in another order, and what is left over behind whole vectors is computed by other code.
    """
    return rows + rows[:1] * (-len(rows) % ROWS_TOGETHER)


def _compare(p: Tensor, q: Tensor, rows: list[int], kept: "list[_Kept]", position: int) -> None:
    at_once = max(1, _COMPARED // p.shape[-1])
    for first in range(0, len(rows), at_once):
        part = kept[first : first + at_once]
        at = torch.tensor(rows[first : first + at_once], device=p.device)
        target = torch.tensor([one.trace.tokens[position] for one in part], device=p.device)
        base, policy = p[at], q[at]
        measured = compare(base, policy, target)
        for row, one in enumerate(part):
            one.add(position, {name: getattr(measured, name)[row] for name in MEASURES})
            answer = one.trace.answer
            if answer is not None and position - len(one.trace.prompt) == answer.index:
                one.letters = np.stack([_letters(logits[row], answer) for logits in (base, policy)])


def _letters(logits: Tensor, answer: Answer) -> NDArray[np.float64]:
    """Log probability of each letter, summed over its tokens."""
    line = log_probabilities(logits)
    found = [line[torch.tensor(tokens, device=line.device)].logsumexp(0) for tokens in answer.tokens]
    return torch.stack(found).cpu().numpy()


class _Kept:
    """What is kept of one trace while it runs."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.letters: NDArray[np.float64] | None = None
        self.exercised: dict[str, int | None] = {}
        self._measures = {
            name: np.zeros(len(trace.response), bool if name == "top1" else np.float64) for name in MEASURES
        }

    def add(self, position: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._measures[name][position - len(self.trace.prompt)] = value

    def result(self) -> Replayed:
        return Replayed(self._measures, self.letters, self.exercised)
