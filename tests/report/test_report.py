"""The page refuses what may not be compared, drops nothing, decides by the stated rules and stands alone."""

import copy
import itertools
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

import quantlab
from quantlab import records
from quantlab.errors import InputError
from quantlab.report import (
    Collection,
    drift_overview,
    figures,
    load_collection,
    render,
    tidy_table,
    write_report,
)
from quantlab.report.load import check_records
from quantlab.report.page import order_policies
from quantlab.report.style import VARIABLES, policy_styles, to_svg
from quantlab.report.tables import drift_rows, eval_rows, stream_groups
from quantlab.report.verdict import answer, join, scientific, verdicts

ROOT = Path(quantlab.__file__).parents[1]


def rows_of(found):
    policies = order_policies(found)
    return drift_rows(stream_groups([r for r in found if r["kind"] == "drift"]), policies)


def decide(found):
    policies = order_policies(found)
    drift = rows_of(found)
    scored = eval_rows([r for r in found if r["kind"] == "eval"], policies)
    return {v.policy: v for v in verdicts(policies, found, drift, scored)}


class Page(HTMLParser):
    """Collects what a browser would load, the balance of tags, and identifiers."""

    void = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.ids = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in self.void:
            self.open.append(tag)
        self.loads += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        self.ids += [values["id"]] if "id" in values else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_stands_alone_and_is_well_formed(written):
    text = (written / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert all(link.startswith(("#", "data:")) for link in page.loads)
    assert {link[1:] for link in page.loads if link.startswith("#")} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text
    assert sorted(p.name for p in written.iterdir()) == [
        "records",
        "report.html",
        "study.json",
        "table.csv",
        "table.parquet",
    ]


def test_same_records_give_the_same_page(fake_records):
    about = {"title": "t", "description": "", "command": None, "spec": None, "quick": False}
    few = [record for record in fake_records if record["point"]["policy"] in ("fp32@1", "int8@1")]
    assert render(Collection(few, about, [])) == render(Collection(few, about, []))


def test_every_record_is_in_the_tables(written, fake_records):
    csv, parquet = pd.read_csv(written / "table.csv"), pd.read_parquet(written / "table.parquet")
    assert len(csv) == len(parquet) == len(fake_records)
    counts = pd.Series([record["status"] for record in fake_records]).value_counts().to_dict()
    assert parquet["status"].value_counts().to_dict() == counts == csv["status"].value_counts().to_dict()
    row = parquet[(parquet["policy"] == "nvfp4@1") & (parquet["status"] == "diverged")].iloc[0]
    assert math.isinf(row["output_error"])
    assert row["stream.alpha"] == 0.999


def test_columns_of_mixed_types_can_be_written(tmp_path, fake_records):
    target = records.check_output_folder(tmp_path / "records")
    scan = next(record for record in fake_records if record["kind"] == "scan")
    for value in (1, "one", [1, 2], None):
        records.save_record(target, scan | {"point": scan["point"] | {"extra": value}})
    write_report(tmp_path)
    assert set(pd.read_parquet(tmp_path / "table.parquet")["extra"].dropna()) == {"1", "one", "1, 2"}


def test_troubles_are_listed_with_reasons(written):
    text = (written / "report.html").read_text()
    troubles = text[text.index('id="troubles"') : text.index('id="again"')]
    for reason in ("killed by SIGKILL", "first store comes after 128", "not finite at step 700"):
        assert reason in troubles
    assert "1 failed, 1 not exercised, 4 diverged of 137 points" in text


def test_two_protocols_are_refused(folder):
    path = next((folder / "records").glob("*.json"))
    record = records.load_record(path)
    records.save_record(folder / "records", record | {"protocol": "0" * 16})
    with pytest.raises(InputError, match="one protocol fingerprint"):
        write_report(folder)
    records.write_atomic(path, path.read_bytes().replace(b'"schema_version": 1', b'"schema_version": 2'))
    with pytest.raises(InputError, match="schema_version 2: expected 1"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="at least one record"):
        load_collection(tmp_path)


def test_streams_that_differ_are_warned_about(fake_records):
    assert check_records(fake_records) == []
    first = fake_records[0]
    changed = first | {"metrics": first["metrics"] | {"stream_hash": "other"}}
    (warning,) = check_records([changed, *fake_records[1:]])
    assert "gated_delta, alpha 0.9: policies ran on 2 different streams" in warning


def test_environments_that_differ_are_warned_about(fake_records):
    first = fake_records[0]
    versions = first["environment"]["versions"] | {"torch": "2.11.0"}
    environment = first["environment"] | {"cpu": "Another CPU", "versions": versions}
    warnings = check_records([first | {"environment": environment}, *fake_records[1:]])
    assert any("2 values of cpu" in warning for warning in warnings)
    assert any("several versions of torch: 2.11.0, 2.13.0" in warning for warning in warnings)


def test_verdicts_follow_the_stated_rules(fake_records):
    found = decide(fake_records)
    assert {policy: v.verdict for policy, v in found.items()} == {
        "fp32@1": "baseline",
        "fp32@16": "invisible",
        "fp16@16": "unproven",  # one of its points failed
        "int8@128": "unproven",  # never exercised
        "fp32/nvfp4@16": "bounded",
        "int8@16": "bounded",
        "int8+ef@1": "bounded",
        "int8@1": "grows",
        "bf16@1": "grows",
        "nvfp4@1": "diverged",
        "nvfp4@16": "loses",
    }
    assert next(iter(found)) == "fp32@1"
    assert found["fp32/nvfp4@16"].traffic < found["int8@16"].traffic < 1


def test_headline_takes_the_cheapest_that_is_invisible(fake_records):
    good = [record for record in fake_records if record["status"] in ("ok", "diverged")]
    policies = order_policies(good)
    drift = rows_of(good)

    def headline(left_out=()):
        kept = [record for record in good if record["point"]["policy"] not in left_out]
        found = list(decide(kept).values())
        return answer(found, 6, [row for row in drift if row.policy not in left_out])

    assert headline().headline.startswith("Take fp16@16")
    assert "Cheaper still: fp32/nvfp4@16" in " ".join(headline().details)
    assert headline(["fp16@16", "fp32@16"]).headline.startswith(
        "Nothing cheaper than fp32@1 is invisible. fp32/nvfp4@16"
    )
    only = [policy for policy in policies if policy not in ("fp32@1", "int8@1")]
    assert headline(only).headline.startswith("Keep fp32@1")


def test_ratio_outside_the_band_gets_a_sentence(fake_records):
    rows = {(row.stream, row.policy): row for row in rows_of(fake_records)}
    fast = rows["gated_delta, alpha 0.9", "nvfp4@16"]
    assert fast.ratio == pytest.approx(1.7, abs=0.2)
    assert "4-bit" in fast.comment
    assert "Diverged at token 700" in rows["mamba2, alpha 0.999", "nvfp4@1"].comment
    assert rows["gated_delta, alpha 0.99", "int8@1"].comment is None
    for row in rows.values():
        inside = row.ratio is not None and 1 / 1.4 <= row.ratio <= 1.4
        assert (row.comment is None) == inside


def test_the_runners_own_reason_is_quoted(fake_records):
    def noted(note):
        changed = [
            r | {"metrics": r["metrics"] | {"prediction_note": note}}
            for r in fake_records
            if r["kind"] == "drift"
        ]
        found = {(row.stream, row.policy): row.comment for row in rows_of(changed)}
        return found["gated_delta, alpha 0.9", "nvfp4@16"]

    assert noted("the error is large: small ones are predicted").endswith(
        "the error is large: small ones are predicted."
    )
    assert "4-bit" in noted("measured / predicted = 1.7")


def test_seeds_are_pooled_as_root_mean_square(fake_records):
    row = next(
        row for row in rows_of(fake_records) if (row.stream, row.policy) == ("mamba2, alpha 0.99", "int8@1")
    )
    errors = [
        record["metrics"]["output_error"]
        for record in fake_records
        if record["kind"] == "drift"
        and record["point"]["policy"] == "int8@1"
        and (record["point"]["stream"]["family"], record["point"]["stream"]["alpha"]) == ("mamba2", 0.99)
    ]
    assert row.seeds == len(errors) == 2
    assert row.output_error == pytest.approx(math.sqrt((errors[0] ** 2 + errors[1] ** 2) / 2), rel=1e-12)


def test_eval_is_paired_against_the_baseline(fake_records):
    rows = {
        row.policy: row
        for row in eval_rows([r for r in fake_records if r["kind"] == "eval"], order_policies(fake_records))
    }
    assert rows["fp32@1"].paired is None
    paired = rows["nvfp4@16"].paired
    assert (paired.n, paired.lost, paired.gained) == (198, 24, 8)
    assert paired.high < 0
    assert rows["nvfp4@16"].op_hits == "mamba2_step: 2 layers × 43,560"


def test_sampled_answers_show_their_mean_and_are_not_paired_as_right_or_wrong(fake_records):
    sampled = copy.deepcopy([record for record in fake_records if record["kind"] == "eval"])
    for record in sampled:
        metrics = record["metrics"]
        task = metrics["tasks"]["gpqa_diamond_zeroshot"]
        task["avg_at_k"] = task.pop("acc")
        for document in metrics["documents"]:
            document["correct"] = [document["correct"], False]
    for before, after in zip(
        eval_rows([r for r in fake_records if r["kind"] == "eval"], order_policies(fake_records)),
        eval_rows(sampled, order_policies(fake_records)),
        strict=True,
    ):
        assert (after.policy, after.accuracy) == (before.policy, before.accuracy)
        assert after.paired is None
    about = {"title": "t", "description": "", "command": None, "spec": None, "quick": True}
    assert Page(render(Collection(sampled, about, []))).open == []


@pytest.mark.parametrize("kind", ["drift", "eval", "scan"])
def test_a_folder_of_one_kind_makes_a_page(fake_records, kind):
    about = {"title": "t", "description": "", "command": None, "spec": None, "quick": True}
    mine = [record for record in fake_records if record["kind"] == kind]
    assert Page(render(Collection(mine, about, []))).open == []


def test_records_without_numbers_make_a_page(fake_records):
    about = {"title": "<b>&", "description": "", "command": None, "spec": None, "quick": False}
    mine = [record for record in fake_records if record["status"] in ("failed", "not_exercised")]
    text = render(Collection(mine, about, ["<i>"]))
    assert Page(text).open == []
    assert "&lt;b&gt;&amp;" in text
    assert "<i>Warning" not in text


def test_missing_growth_interval_is_unclear(fake_records):
    changed = [
        record | {"metrics": record["metrics"] | {"growth_ci": [None, None]}}
        if record["kind"] == "drift"
        else record
        for record in fake_records
    ]
    assert decide(changed)["int8@16"].verdict == "untimed"


def test_every_policy_has_its_own_look():
    policies = [f"p{i}" for i in range(25)] + ["fp32@1"]
    styles = policy_styles(policies)
    assert len(set(styles.values())) == len(policies)
    assert {style.color for style in styles.values()} <= set(VARIABLES)


def test_svg_follows_the_page(fake_records):
    groups = stream_groups([record for record in fake_records if record["kind"] == "drift"])
    panels = figures.drift_panels(groups, policy_styles(order_policies(fake_records)))
    assert len(panels) == 6
    for _, svg in panels:
        assert "#" not in re.sub(r"(url\(#|href=\"#)[^)\"]*", "", svg).replace("#000000", "").replace(
            "#ffffff", ""
        )
        assert "font-family" not in svg
        assert "width=" not in svg[: svg.index(">")]
    assert callable(to_svg)


def test_labels_are_pushed_apart_but_stay_inside():
    places = figures.spread([0.5, 0.5, 0.51, 0.99, 1.2], 0.06)
    assert places == sorted(places)
    assert min(b - a for a, b in itertools.pairwise(places)) >= 0.06 - 1e-12
    assert places[-1] <= 1.0
    assert figures.spread([0.1, 0.9], 0.06) == [0.1, 0.9]


def test_pareto_front():
    points = {"a": (1, 5), "b": (2, 3), "c": (3, 4), "d": (4, 1), "e": (4, 2)}
    assert figures.pareto(points) == ["a", "b", "d"]


def test_overview_figure(tmp_path, fake_records):
    names = ["fp32@1", "int8@1", "nvfp4@1", "fp32/nvfp4@16", "int8+ef@1"]
    svg = drift_overview(fake_records, tmp_path / "o.svg", policies=names)
    assert svg.read_text() == drift_overview(fake_records, tmp_path / "p.svg", policies=names).read_text()
    assert drift_overview(fake_records, tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match="ends in"):
        drift_overview(fake_records, tmp_path / "o.jpg")
    with pytest.raises(InputError, match="nearest: nvfp4@1"):
        drift_overview(fake_records, tmp_path / "o.svg", policies=["nvfp4@2"])
    with pytest.raises(InputError, match="with a curve"):
        drift_overview([], tmp_path / "o.svg")


@pytest.mark.slow  # tests/test_layering.py imports every module of the report in the fast tier
def test_report_imports_no_torch():
    script = "import sys, quantlab.report, quantlab.statistics.paired; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=ROOT, env=os.environ | {"MPLBACKEND": "svg"}
    )


def test_tidy_table_splits_tasks(fake_records):
    record = next(record for record in fake_records if record["kind"] == "eval")
    tasks = {"a": {"acc": 0.5}, "b": {"acc": 0.25}}
    table = tidy_table([record | {"metrics": record["metrics"] | {"tasks": tasks}}])
    assert table[["task", "acc"]].values.tolist() == [["a", 0.5], ["b", 0.25]]
    assert not any("documents" in column for column in table.columns)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (0.0, "0"),
        (0.0874, "0.087"),
        (3.12e-7, "3.1×10⁻⁷"),
        (0.00166, "0.0017"),
    ],
)
def test_numbers_as_people_write_them(value, text):
    assert scientific(value) == text


def test_join():
    assert [join(["a"]), join(["a", "b"]), join(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
