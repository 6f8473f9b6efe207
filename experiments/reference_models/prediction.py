"""Which number ranks the policies as the right answers do: Spearman's rank correlation with what recall loses.

python experiments/reference_models/prediction.py [--level 512]

closed form   the largest predicted output error over the heads of the model (``quantlab predict --model``)
output error  measured at "?", over the size of the outputs, in the worst layer (``mechanism.py``)
fact error    the same over the size of what the fact changes in the outputs
per kept      spread of that error over the share of the fact that outputs still tell, in the worst layer
The interval: 95 % of 2,000 resamplings of the questions, the same for all policies of a model.
"""

import argparse
import json
import sys
from collections.abc import Callable
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
from quantlab.models.reference import reference_folder

RESAMPLINGS, SEED = 2000, 0
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
    from quantlab.schemes import parse_policy

    heads = heads_of_folder(reference_folder(model))
    return [float(np.max(head_risks(parse_policy(policy), heads).errors.output)) for policy in policies]


def correlation(scores: list[float], right: NDArray[np.bool_]) -> tuple[float, float, float]:
    """(rho, low, high) of scores (policies,) against the loss in ``right`` (policies, questions); ties share ranks."""
    generator, count = np.random.default_rng(SEED), right.shape[1]
    weights = generator.multinomial(count, np.full(count, 1 / count), RESAMPLINGS)
    losses = -(weights @ right.T.astype(np.int64))
    ranks = stats.rankdata(scores)
    found, *drawn = [
        float(np.corrcoef(ranks, stats.rankdata(loss))[0, 1]) for loss in (-right.sum(1), *losses)
    ]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return found, float(low), float(high)


def mechanisms(folder: Path) -> dict[tuple[str, str], Layers]:
    """Layers of every record of ``mechanism.py``, by model and policy."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        found[record["point"]["model"], record["point"]["policy"]] = record["metrics"]["layers"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--mechanism", type=Path, default=HERE / "mechanism")
    parser.add_argument("--level", choices=LEVELS, default=DEFAULT_LEVEL)
    options = parser.parse_args()
    with one_line_errors():
        records, measured = Records(options.records), mechanisms(options.mechanism)
        print("| model | policies | closed form | " + " | ".join(MEASURED) + " |")
        print("|---|---|---|" + "---|" * len(MEASURED))
        for model in records.models:
            rows = records.rows(model, options.level)
            policies = [policy for policy in rows if (model, policy) in measured]
            if len(policies) < 3:
                continue
            right = np.stack([records.answers(model, options.level, policy)["value"] for policy in policies])
            scores = {"closed form": closed_form(model, policies)}
            for name, score in MEASURED.items():
                scores[name] = [score(measured[model, policy]) for policy in policies]
            cells = []
            for values in scores.values():
                rho, low, high = correlation(values, right)
                cells.append(f"{rho:.2f} [{low:.2f}, {high:.2f}]")
            print(f"| {model} | {len(policies)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
