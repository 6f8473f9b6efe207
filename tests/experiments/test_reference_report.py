"""Tables, cards and rank correlations made from records of the reference models."""

import json

import numpy as np
import pytest

from experiments.reference_models import cards, measure, prediction, report
from quantlab.errors import InputError
from quantlab.models.reference import reference_folder, reference_models
from quantlab.records import complete_record, save_record
from quantlab.statistics.paired import paired_accuracy_interval
from quantlab.sweep.environment import capture_environment

ITEMS = measure.LEVELS["152"][1]


@pytest.fixture
def folder(tmp_path):
    """Records of one model: everything right, one letter in four wrong, every value wrong, and one of 100 questions."""
    environment = capture_environment(1)
    right = np.ones(ITEMS, bool)
    quarter = np.arange(ITEMS) % 4 > 0
    for policy, letters, values, items, seed in (
        ("fp32@1", right, right, ITEMS, 0),
        ("int8@1", quarter, right, ITEMS, 0),
        ("int8@1", ~right, ~right, ITEMS, 1),
        ("nvfp4@1", right, ~right, ITEMS, 0),
        ("bf16@1", right[:100], right[:100], 100, 0),
    ):
        point = {"kind": "recall", "model": "toy", "level": vars(measure.LEVELS["152"][0]), "policy": policy}
        point |= {"items": items, "items_seed": 0, "seed": seed}
        metrics = {"letters": measure.bits(letters), "values": measure.bits(values)}
        metrics |= {"bits_per_value": 8.0, "bytes_per_token": 100.0 if policy == "fp32@1" else 25.0}
        record = complete_record(point, {"metrics": metrics}, environment=environment, seconds=1.0)
        save_record(tmp_path, record)
    return tmp_path


def test_rows_hold_what_was_right_and_its_change(folder):
    rows = report.Records(folder).rows("toy", "152")
    assert list(rows) == [
        "fp32@1",
        "int8@1",
        "nvfp4@1",
    ]  # the study's order; of two seeds the first; no hundred
    assert rows["int8@1"].right == {"letter": 75.0, "value": 100.0}
    low, high = paired_accuracy_interval(ITEMS // 4, 0, ITEMS)
    assert rows["int8@1"].change["letter"] == pytest.approx((-25.0, 100 * low, 100 * high))
    assert rows["nvfp4@1"].change["value"][0] == -100.0
    assert rows["fp32@1"].change["letter"][0] == 0.0


def test_a_level_without_a_baseline_has_no_rows(folder):
    assert report.Records(folder).rows("toy", "512") == {}


def test_the_table_is_one_row_a_policy(folder):
    lines = [line for line in report.table(report.Records(folder), "152") if line.startswith("|")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| fp32@1", "| int8@1", "| nvfp4@1"]
    assert "| 75.0 | 100.0 | -25.0 [" in lines[3]
    assert lines[3].endswith("| 25 % |")


def test_the_figure_is_written(folder, tmp_path):
    path = tmp_path / "figure.png"
    report.figure(report.Records(folder), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(InputError, match="measure"):
        report.Records(tmp_path)


def test_correlation_of_scores_with_losses():
    """Ranks that agree give 1, ranks that are turned round -1; policies that answer alike leave what the ranks do."""
    right = np.stack([np.arange(400) < n for n in (400, 300, 200, 100)])
    rho, low, high = prediction.correlation([0.0, 1.0, 2.0, 3.0], right)
    assert (rho, low, high) == (1.0, 1.0, 1.0)
    assert prediction.correlation([3.0, 2.0, 1.0, 0.0], right)[0] == -1.0


def test_pairs_that_no_question_tells_apart_do_not_count():
    """Of four policies two answer alike: five pairs are left, and a score that is the same for both is half right."""
    right = np.stack([np.arange(400) < n for n in (400, 300, 300, 100)])
    assert prediction.ordered([0.0, 2.0, 1.0, 3.0], right) == (1.0, 5)
    assert prediction.ordered([3.0, 1.0, 2.0, 0.0], right) == (0.0, 5)
    assert prediction.ordered([0.0, 0.0, 1.0, 2.0], right) == (0.9, 5)
    share, pairs = prediction.ordered([0.0, 1.0], right[1:3])
    assert pairs == 0
    assert np.isnan(share)


def test_correlation_shares_ranks_among_equal_losses():
    """Ranks 1, 2.5, 2.5, 4 of the losses against 1, 2, 3, 4 of the scores: 4.5 / sqrt(5 x 4.5)."""
    right = np.stack([np.arange(400) < n for n in (400, 300, 300, 100)])
    assert prediction.correlation([0.0, 1.0, 2.0, 3.0], right)[0] == pytest.approx(4.5 / (5 * 4.5) ** 0.5)


def test_ratios_are_of_the_heads_that_tell_the_fact():
    """Predicted .5 over measured .25 in the head that tells it; the other tells a thousandth of that."""
    foreseen = {("toy", "152", "nvfp4@1"): [{"fact": [1.0, 0.001], "error": [0.5, 9.0]}]}
    foreseen["toy", "32", "nvfp4@1"] = [{"fact": [1.0, 1.0], "error": [7.0, 7.0]}]
    measured = {("toy", "nvfp4@1"): [{"error": [0.25, 1.0]}]}
    assert prediction.head_ratios(measured, foreseen) == {("toy", "nearest"): [2.0]}
    kinds = {
        "fp32/nvfp4@16": "read copy",
        "fp16+sr/nvfp4@16": "stochastic",
        "int8+ef@1": "feedback",
        "nvfp4@16": "nearest",
    }
    assert {policy: prediction.rounding_kind(policy) for policy in kinds} == kinds


def test_errors_are_those_of_the_worst_layer():
    layers = [
        {"error": [1.0, None], "said": [0.5, 0.0], "of_fact": {"error": 2.0, "spread": 1.0, "kept": 0.5}},
        {"error": [3.0, 4.0], "said": [1.0, 1.0], "of_fact": {"error": 1.0, "spread": 1.5, "kept": 3.0}},
    ]
    assert prediction.output_error(layers) == pytest.approx(12.5**0.5)
    assert prediction.fact_error(layers) == 2.0
    assert prediction.per_kept(layers) == 2.0


def test_cards_say_what_the_records_give():
    """``cards.py`` was run after the last record; its measurements are of the models that are there."""
    records = report.Records(report.HERE / "records")
    found = prediction.mechanisms(report.HERE / "mechanism")
    for name in reference_models():
        text = "\n".join(cards.card(name, records, found[name, measure.BASELINE])) + "\n"
        assert (reference_folder(name) / "README.md").read_text() == text, name


def test_predictions_stand_beside_every_right_answer_of_the_default_level():
    """What ``predict.py`` recorded has the layers of the models, and the tables have a row for each."""
    records, measured = (
        report.Records(report.HERE / "records"),
        prediction.mechanisms(report.HERE / "mechanism"),
    )
    foreseen = prediction.predicted(report.HERE / "predicted")
    for (model, _, policy), layers in foreseen.items():
        assert [x["layer"] for x in layers] == [x["layer"] for x in measured[model, policy]], (model, policy)
    rows = list(prediction.scores(records, measured, foreseen, "152"))
    assert {row.model for row in rows} >= {"gated_delta", "kimi_delta", "hybrid"}
    lines = list(prediction.tables(rows[:1]))
    assert sum(line.startswith(f"| {rows[0].model} 152 (") for line in lines) == 2


def test_every_mechanism_record_names_its_policy_and_all_layers():
    for (model, policy), layers in prediction.mechanisms(report.HERE / "mechanism").items():
        config = json.loads((reference_folder(model) / "config.json").read_text())
        names = config.get("layer_types") or config["layers_block_type"]
        assert [layer["layer"] for layer in layers] == [
            n for n, kind in enumerate(names) if "linear_attention" in kind
        ], (model, policy)
