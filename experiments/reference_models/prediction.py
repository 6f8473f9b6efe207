"""Which number ranks the policies as the right answers do: Spearman's rank correlation with what recall loses.

python experiments/reference_models/prediction.py                # every level
python experiments/reference_models/prediction.py --level 152

closed form   the largest predicted output error over the heads of the model (``quantlab predict --model``)
state error   measured at "?" against the unrounded recurrence, in the worst layer (``predict.py``)
output error  measured at "?", over the size of the outputs, in the worst layer (``mechanism.py``)
fact error    the same over the size of what the fact changes in the outputs
per kept      spread of that error over the share of the fact that outputs still tell, in the worst layer
of fact       fact error in closed form (``quantlab.drift.fact_error``), in the worst layer (``predict.py``)
What ``mechanism.py`` measured is of the default level and stands at the others too; the rest but the closed form is of
each level.  The interval: 95 % of 2,000 resamplings of the questions, the same for all policies of a model.

Policies that no question tells apart have ranks all the same, so that a perfect order of the others does not reach 1.
The second table leaves them out: of all pairs of policies whose right answers differ (exact McNemar test, 5 %), the
percentage that a number puts in the right order; the same number for both is half right.

The third says how well the closed form of a fact error meets the measured one, head by head: predicted over measured,
the median and nine in ten of all layers, policies and heads that tell more than a hundredth of what the layer's best
does, by how the checkpoint is rounded.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from experiments.reference_models.arguments import one_line_errors
from experiments.reference_models.measure import LEVELS
from experiments.reference_models.report import DEFAULT_LEVEL, HERE, Records
from quantlab.errors import InputError
from quantlab.models.reference import reference_folder
from quantlab.schemes import parse_policy

RESAMPLINGS, SEED = 2000, 0
SIGNIFICANCE = 0.05
LEAST_POLICIES = 3
LEAST_TOLD = 0.01
KINDS = ("read copy", "stochastic", "feedback", "nearest")
LEAST_KEPT = 1e-3
"""Of a fact; below it counts as that, so that nothing is divided by zero."""

Layers = list[dict[str, Any]]


def output_error(layers: Layers) -> float:
    """Over the outputs of all heads of a layer, from the errors by head relative to what the fact says in each."""
    return max(_whole(layer) for layer in layers)


def _whole(layer: dict[str, Any]) -> float:
    # ``said`` is relative to each head's own output: heads count alike.
    errors = [
        (error * said) ** 2
        for error, said in zip(layer["error"], layer["said"], strict=True)
        if error is not None and said > 0
    ]
    return float(np.sqrt(np.mean(errors))) if errors else 0.0


def fact_error(layers: Layers) -> float:
    return max(layer["of_fact"]["error"] for layer in layers)


def per_kept(layers: Layers) -> float:
    return max(layer["of_fact"]["spread"] / max(layer["of_fact"]["kept"], LEAST_KEPT) for layer in layers)


MEASURED: dict[str, Callable[[Layers], float]] = {
    "output error": output_error,
    "fact error": fact_error,
    "per kept": per_kept,
}


def closed_form(model: str, policies: list[str]) -> list[float]:
    """The largest predicted output error over a model's heads, for each policy."""
    from quantlab.drift.model_heads import heads_of_folder
    from quantlab.drift.risks import head_risks

    heads = heads_of_folder(reference_folder(model))
    return [float(np.max(head_risks(parse_policy(policy), heads).errors.output)) for policy in policies]


def of_fact(layers: Layers) -> float:
    return max(layer["of_fact"] for layer in layers)


def state_error(layers: Layers) -> float:
    # None: beyond all measure.
    return max(float("inf") if layer["state_error"] is None else layer["state_error"] for layer in layers)


def ordered(scores: list[float], right: NDArray[np.bool_]) -> tuple[float, int]:
    """(share of pairs in the right order, pairs) of the policies whose right answers differ; nan without any."""
    points, pairs = 0.0, 0
    for one, other in combinations(range(len(scores)), 2):
        lost, gained = int((right[one] & ~right[other]).sum()), int((~right[one] & right[other]).sum())
        if not lost + gained or stats.binomtest(lost, lost + gained).pvalue >= SIGNIFICANCE:
            continue
        pairs += 1
        # The one with more right answers should have the smaller score.
        points += (1 + np.sign((scores[other] - scores[one]) * (lost - gained))) / 2
    return (points / pairs if pairs else float("nan")), pairs


def correlation(scores: list[float], right: NDArray[np.bool_]) -> tuple[float, float, float]:
    """(rho, low, high) of scores (policies,) against the loss in ``right`` (policies, questions); ties share ranks."""
    generator, count = np.random.default_rng(SEED), right.shape[1]
    weights = generator.multinomial(count, np.full(count, 1 / count), RESAMPLINGS)
    losses = -np.vstack([right.sum(1), weights @ right.T.astype(np.int64)])
    ranks, drawn = stats.rankdata(scores), stats.rankdata(losses, axis=1)
    ranks, drawn = ranks - ranks.mean(), drawn - drawn.mean(1, keepdims=True)
    with np.errstate(invalid="ignore"):  # all alike in a resampling: no rank correlation
        found, *drawn = (drawn @ ranks / np.linalg.norm(drawn, axis=1) / np.linalg.norm(ranks)).tolist()
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return found, float(low), float(high)


def mechanisms(folder: Path) -> dict[tuple[str, str], Layers]:
    """Layers of every record of ``mechanism.py``, by model and policy."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        found[record["point"]["model"], record["point"]["policy"]] = record["metrics"]["layers"]
    return found


def predicted(folder: Path) -> dict[tuple[str, str, str], Layers]:
    """Layers of every record of ``predict.py``, by model, level and policy."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        point = record["point"]
        level = next(name for name, (level, _) in LEVELS.items() if vars(level) == point["level"])
        found[point["model"], level, point["policy"]] = record["metrics"]["layers"]
    return found


@dataclass(frozen=True)
class Scores:
    """Of one model at one level: by name, a score a policy; right: (policies, questions) of recall."""

    model: str
    level: str
    scores: dict[str, list[float]]
    right: NDArray[np.bool_]


def scores(
    records: Records,
    measured: dict[tuple[str, str], Layers],
    foreseen: dict[tuple[str, str, str], Layers],
    level: str,
) -> Iterator[Scores]:
    """Every model with three policies or more of which there is everything."""
    for model in records.models:
        policies = [
            policy
            for policy in records.policies(model, level)
            if (model, policy) in measured and (model, level, policy) in foreseen
        ]
        if len(policies) < LEAST_POLICIES:
            continue
        found = {"closed form": closed_form(model, policies)}
        layers = [foreseen[model, level, policy] for policy in policies]
        found["state error"] = list(map(state_error, layers))
        for name, score in MEASURED.items():
            found[name] = [score(measured[model, policy]) for policy in policies]
        found["of fact"] = list(map(of_fact, layers))
        right = np.stack([records.answers(model, level, policy)["value"] for policy in policies])
        yield Scores(model, level, found, right)


def tables(rows: list[Scores]) -> Iterator[str]:
    """Markdown lines: the rank correlations, then the pairs."""
    names = list(rows[0].scores)
    head = ["| " + " | ".join(["model, level", *names]) + " |", "|---" * (len(names) + 1) + "|"]
    yield from ["Rank correlation [95 %]", "", *head]
    for row in rows:
        found = (correlation(values, row.right) for values in row.scores.values())
        cells = [f"{rho:.2f} [{low:.2f}, {high:.2f}]" for rho, low, high in found]
        yield "| " + " | ".join([f"{row.model} {row.level} ({len(row.right)} policies)", *cells]) + " |"
    yield from ["", "Pairs in the right order, %", "", *head]
    for row in rows:
        shares = [ordered(values, row.right) for values in row.scores.values()]
        cells = [f"{100 * share:.0f}" for share, _ in shares]
        yield "| " + " | ".join([f"{row.model} {row.level} ({shares[0][1]} pairs)", *cells]) + " |"


def rounding_kind(policy: str) -> str:
    """How a policy rounds where errors of its state come from."""
    parsed = parse_policy(policy)
    if not parsed.checkpoint.rounded:
        return "read copy"
    if parsed.checkpoint.error_feedback:
        return "feedback"
    return "stochastic" if parsed.checkpoint.stochastic else "nearest"


def head_ratios(
    measured: dict[tuple[str, str], Layers], foreseen: dict[tuple[str, str, str], Layers]
) -> dict[tuple[str, str], list[float]]:
    """Predicted over measured fact error of heads at the default level, by model and kind of rounding."""
    found: dict[tuple[str, str], list[float]] = {}
    for (model, level, policy), layers in foreseen.items():
        if level != DEFAULT_LEVEL or (model, policy) not in measured:
            continue
        for predicted_layer, layer in zip(layers, measured[model, policy], strict=True):
            told = predicted_layer["fact"]
            heads = zip(told, predicted_layer["error"], layer["error"], strict=True)
            found.setdefault((model, rounding_kind(policy)), []).extend(
                error / fact / expected
                for fact, error, expected in heads
                if fact > LEAST_TOLD * max(told) and error and expected
            )
    return found


def ratio_table(ratios: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    yield "| predicted over measured, by head | " + " | ".join(KINDS) + " |"
    yield "|---" * (len(KINDS) + 1) + "|"
    for model in sorted({model for model, _ in ratios}):
        cells = []
        for kind in KINDS:
            low, middle, high = np.quantile(ratios[model, kind], (0.05, 0.5, 0.95))
            cells.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        yield f"| {model} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--mechanism", type=Path, default=HERE / "mechanism")
    parser.add_argument("--predicted", type=Path, default=HERE / "predicted")
    parser.add_argument("--level", action="append", choices=LEVELS, help="repeat for several (default: all)")
    options = parser.parse_args()
    with one_line_errors():
        records, measured = Records(options.records), mechanisms(options.mechanism)
        foreseen = predicted(options.predicted)
        rows = [
            row for level in options.level or LEVELS for row in scores(records, measured, foreseen, level)
        ]
        if not rows:
            raise InputError("predicted", str(options.predicted), "records of predict.py for these levels")
        print("\n".join([*tables(rows), "", *ratio_table(head_ratios(measured, foreseen))]))


if __name__ == "__main__":
    main()
