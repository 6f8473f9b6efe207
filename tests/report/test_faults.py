"""Records that scripts and editors can produce: a page, or one line that names the file and the field."""

import copy
import math

import pytest

from quantlab import records
from quantlab.errors import InputError
from quantlab.report import load_collection, write_report
from quantlab.report.check import CURVES, FINITE, NUMBERS, TABLES, TEXTS


@pytest.fixture(scope="module")
def drift_and_eval(fake_records):
    """Two records that the tests may change: they get copies."""
    drift = next(r for r in fake_records if r["kind"] == "drift" and r["point"]["policy"] == "fp32/nvfp4@16")
    return drift, next(r for r in fake_records if r["kind"] == "eval")


def stored(folder, record):
    records.save_record(folder, record)
    return folder


def changed(record, path, value):
    record = copy.deepcopy(record)
    *parents, last = path.split(".")
    table = record
    for parent in parents:
        table = table[parent]
    table[last] = value
    return record


WRONG = [
    *((f"metrics.{name}", "text") for name in (*NUMBERS, *FINITE, *TABLES, "growth_ci")),
    *((f"metrics.{name}", 1.5) for name in (*TEXTS, *TABLES, "growth_ci")),
    *((f"metrics.{name}", [1, 2, 3]) for name in (*NUMBERS, *FINITE, *TEXTS, *TABLES, "growth_ci")),
    *((f"metrics.{name}", math.inf) for name in FINITE),
    *((f"curve.{name}", value) for name in CURVES for value in ("text", [0.5], ["text"])),
    *(("curve.step", value) for value in (None, "text", [1.0])),
    *(("point.stream", value) for value in (None, "text", {}, {"file": 3}, {"file": "x"})),
    ("point.stream.alpha", "text"),
    ("point.stream.heads", None),
    ("environment.versions", ["torch"]),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_contents_of_another_type_are_one_line_that_names_file_and_field(
    tmp_path, drift_and_eval, path, value
):
    record = changed(drift_and_eval[0], path, value)
    with pytest.raises(InputError) as error:
        load_collection(stored(tmp_path, record))
    assert records.record_path("", record["point"]).name in str(error.value)
    assert ("curve" if path.startswith("curve") else path) in str(error.value)
    assert len(str(error.value)) < 500


def test_tasks_and_documents_of_another_type_are_refused(tmp_path, drift_and_eval):
    for path, value in (
        ("metrics.tasks", {"t": 5}),
        ("metrics.tasks", {"t": {"acc": "x"}}),
        ("metrics.documents", 5),
    ):
        with pytest.raises(InputError, match=path):
            load_collection(stored(tmp_path, changed(drift_and_eval[1], path, value)))


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_numbers_that_are_none_make_a_page(tmp_path, drift_and_eval, value):
    record = copy.deepcopy(drift_and_eval[0])
    record["metrics"] |= dict.fromkeys(NUMBERS, value) | {"growth_ci": [value, value]}
    for name in CURVES:
        record["curve"][name] = [value] * len(record["curve"]["step"])
    assert write_report(stored(tmp_path, record)).stat().st_size > 1000


def test_a_script_names_its_parameters_as_it_likes(tmp_path):
    point = {"kind": "scan", "policy": "fp32@1", "name": "s", "stream": "text", "seed": 10**30, "file": None}
    metrics = {"kl": 0.5, "stream_hash": "abc", "count": 2**63}
    curve = {"step": [1, 2], "output_error": [0.5, 0.25]}
    for policy in ("fp32@1", "bf16@1"):
        result = {"metrics": metrics | {"stream_hash": policy}, "curve": curve, "status": "ok"}
        stored(tmp_path, records.complete_record(point | {"policy": policy}, result, environment={}))
    assert write_report(tmp_path).stat().st_size > 1000


@pytest.mark.parametrize("text", ["[]", "null", "5", "{", "[" * 100_000])
def test_a_damaged_study_file_is_one_line(tmp_path, drift_and_eval, text):
    stored(tmp_path, drift_and_eval[0])
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(InputError, match=r"study\.json"):
        write_report(tmp_path)
