"""What the traces under one policy amount to: means with intervals over traces, growth along the trace, answers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from quantlab.evals.replay import Replayed
from quantlab.evals.traces import Trace
from quantlab.models.agreement import agreement_by_margin
from quantlab.statistics.clustered import Interval
from quantlab.statistics.paired import mcnemar_exact, paired_mean_interval
from quantlab.statistics.token_means import token_mean_interval


def metrics(traces: Sequence[Trace], replayed: Sequence[Replayed]) -> dict[str, Any]:
    """Plain values for a record, none of which is text or a token id.

    kl: mean over all response tokens, kl_interval: its 95 % interval over traces.  first_divergence: median over traces
    of the first response token, counted from 1, at which the most likely tokens differ; None if in half of them none
    does.  by_position: mean KL of the response tokens 1, 2-3, 4-7, ...  answers: as of ``answers``.  per_trace: a line
    a trace.
    """
    parts = {name: [one.measures[name] for one in replayed] for name in replayed[0].measures}
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    first = [first_divergence(top1) for top1 in parts["top1"]]
    kl = token_mean_interval(
        [values.sum() for values in parts["kl"]], [len(values) for values in parts["kl"]]
    )
    median = float(np.median([math.inf if step is None else step for step in first]))
    exercised = {part: _least([one.exercised[part] for one in replayed]) for part in replayed[0].exercised}
    thin = [f"{part} {count}" for part, count in exercised.items() if count is not None and count < 2]
    return {
        "traces": len(replayed),
        "tokens": len(joined["kl"]),
        "kl": kl.mean,
        "kl_interval": _interval(kl),
        "kl_largest": float(joined["kl"].max()),
        "top1_agreement": float(joined["top1"].mean()),
        "agreement_by_margin": [
            found._asdict() for found in agreement_by_margin(joined["margin"], joined["top1"])
        ],
        "nll": float(joined["nll"].mean()),
        "baseline_nll": float(joined["baseline_nll"].mean()),
        "first_divergence": None if math.isinf(median) else median,
        "traces_diverging": sum(step is not None for step in first),
        "by_position": by_position(parts["kl"]),
        "answers": answers(traces, replayed),
        "exercised": exercised,
        "warning": f"read back fewer than 2 stores ({', '.join(thin)}): longer traces" if thin else None,
        "per_trace": [_line(*each) for each in zip(traces, replayed, first, strict=True)],
    }


def first_divergence(top1: NDArray[np.bool_]) -> int | None:
    """The first token, counted from 1, without agreement."""
    return None if top1.all() else int((~top1).argmax()) + 1


def by_position(kl: Sequence[NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Mean KL in bins that double: tokens ``first`` to ``last`` of each response that is so long.

    Long responses alone reach the last bins: ``traces`` says how many do.
    """
    longest = max(len(values) for values in kl)
    bins = []
    for power in range(longest.bit_length()):
        first, last = 2**power, 2 ** (power + 1) - 1
        reach = [values[first - 1 : last] for values in kl if len(values) >= first]
        found = token_mean_interval([values.sum() for values in reach], [len(values) for values in reach])
        bins.append(
            {
                "first": first,
                "last": min(last, longest),
                "traces": len(reach),
                "tokens": sum(map(len, reach)),
                "kl": found.mean,
                "kl_interval": _interval(found),
            }
        )
    return bins


def log_odds(letters: NDArray[np.float64], wanted: int) -> float:
    """log p(wanted) - log sum of p(others), of log probabilities (letters,)."""
    return float(letters[wanted] - logsumexp(np.delete(letters, wanted)))


def answers(traces: Sequence[Trace], replayed: Sequence[Replayed]) -> dict[str, Any] | None:
    """The answer's letter among all letters, at the token that says it; None if no trace says one.

    log_odds, baseline_log_odds: means of the wanted letter against the others (the gold one; what the trace says where
    nobody told it).  change: of the log-odds, paired, with change_interval, Student's t over traces.  right,
    baseline_right: traces whose likeliest letter is the wanted one; lost, gained: by the policy; p_value: exact
    McNemar test.  flipped: traces whose likeliest letter is another.
    """
    odds, right, flipped = [], [], 0
    for trace, one in zip(traces, replayed, strict=True):
        if trace.answer is not None and one.letters is not None:
            wanted = trace.answer.wanted
            odds.append([log_odds(letters, wanted) for letters in one.letters])
            best = one.letters.argmax(-1)
            right.append(best == wanted)
            flipped += int(best[0] != best[1])
    if not odds:
        return None
    base, policy = np.array(odds).T
    before, after = np.array(right).T
    lost, gained = int((before & ~after).sum()), int((~before & after).sum())
    change, low, high = paired_mean_interval(list(policy - base))
    return {
        "traces": len(odds),
        "log_odds": float(policy.mean()),
        "baseline_log_odds": float(base.mean()),
        "change": change,
        "change_interval": [low, high],
        "right": int(after.sum()),
        "baseline_right": int(before.sum()),
        "flipped": flipped,
        "lost": lost,
        "gained": gained,
        "p_value": mcnemar_exact(lost, gained),
    }


def _line(trace: Trace, one: Replayed, first: int | None) -> dict[str, Any]:
    line: dict[str, Any] = {
        "trace": trace.number,
        "name": trace.name,
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.response),
        "kl": float(one.measures["kl"].mean()),
        "top1_agreement": float(one.measures["top1"].mean()),
        "first_divergence": first,
        "exercised": one.exercised,
    }
    if trace.answer is not None and one.letters is not None:
        base, policy = (log_odds(letters, trace.answer.wanted) for letters in one.letters)
        right = [bool(letters.argmax() == trace.answer.wanted) for letters in one.letters]
        line |= {"baseline_log_odds": base, "log_odds": policy}
        line |= {"baseline_right": right[0], "right": right[1]}
    return line


def _interval(kl: Interval) -> list[float]:
    """No divergence is negative."""
    return [max(0.0, kl.low) if kl.low == kl.low else kl.low, kl.high]


def _least(counts: Sequence[int | None]) -> int | None:
    return min((count for count in counts if count is not None), default=None)
