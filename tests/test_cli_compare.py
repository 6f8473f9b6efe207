"""``quantlab compare``: what it prints, that it needs no model, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.errors import InputError
from quantlab.statistics.comparison import compare_rates
from quantlab.statistics.multiple import holm
from tests.evals.result_folders import quiz, sample, write_run

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS, REPEATS = 198, 4


def compare(*arguments):
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def rows(*arguments):
    return [
        json.loads(line, parse_constant=pytest.fail) for line in compare(*arguments, "--json").splitlines()
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders base, again (the base with other seeds), alike, worse; and the answers in them."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    p = rng.beta(0.51, 0.34, (QUESTIONS, 1))
    answers = {}
    for name, policy, kept, longer in (
        ("base", "fp32@1", 1.0, 1.0),
        ("again", "fp32@1", 1.0, 1.0),
        ("alike", "fp16+sr/nvfp4@16", 1.0, 1.0),
        ("worse", "nvfp4@1", 0.85, 1.2),
    ):
        shape = (QUESTIONS, REPEATS)
        right = rng.random(shape) < kept * p
        tokens = (rng.lognormal(8, 0.3, shape) * longer).astype(int)
        answered = rng.random(shape) < 0.97 / longer
        columns = {
            "tokens": tokens.tolist(),
            "answered": answered.tolist(),
            "finish": np.where(tokens > 4500, "length", "stop").tolist(),
        }
        write_run(root / name, quiz(right.tolist(), **columns), policy=policy)
        answers[name] = right, tokens, answered
    return root, answers


def test_the_rows_are_the_statistics(runs):
    root, answers = runs
    found = rows(root / "base", root / "alike", root / "worse", "--aa", root / "again")
    assert [(row["run"], row["control"]) for row in found] == [
        (str(root / "again"), True),
        ("fp16+sr/nvfp4@16", False),
        ("nvfp4@1", False),
    ]
    expected = [compare_rates(answers["base"][0], answers[name][0]) for name in ("again", "alike", "worse")]
    for row, rates in zip(found, expected, strict=True):
        assert (row["n"], row["k"], row["base_run"]) == (QUESTIONS, REPEATS, "fp32@1")
        names = ("difference", "low", "high", "p_value", "lost", "gained", "fell", "rose", "test")
        assert {name: row[name] for name in names} == {name: getattr(rates, name) for name in names}
        assert row["low"] < row["bootstrap"][0] + 0.01
    assert found[0]["p_holm"] is None
    adjusted = holm([rates.p_value for rates in expected[1:]])
    assert [row["p_holm"] for row in found[1:]] == adjusted
    worse = found[2]
    tokens = [answers[name][1].mean() for name in ("base", "worse")]
    assert worse["length_unit"] == "tokens"
    assert worse["length_ratio"] == pytest.approx(tokens[1] / tokens[0])
    assert 1.1 < worse["length_low"] < worse["length_high"] < 1.3
    assert worse["no_answer"] == pytest.approx(1 - answers["worse"][2].mean())
    assert worse["truncated"] > worse["base_truncated"]
    assert worse["margin_verdict"] == "beyond"


def test_every_run_has_its_sentence(runs):
    root, _ = runs
    arguments = (root / "base", root / "alike", root / "worse", "--aa", root / "again")
    printed = compare(*arguments)
    again, alike, worse = (row["sentence"] for row in rows(*arguments))
    for sentence in (again, alike, worse):
        assert sentence in printed
        assert "198 questions x 4 can see" in sentence
    assert again.startswith("A/A, ")
    assert "no more than chance allows" in again
    assert "nvfp4@1 (quiz): loses " in worse
    assert "(Holm over 2), beyond the 2-point margin" in worse
    assert "the base against itself moves" in worse
    assert "times the tokens [" in worse
    assert "without an answer" in worse
    assert "not shown to be within the 2-point margin" in alike
    assert "repeats would see 2" in alike


def test_interval_and_sentence_have_the_same_sign(runs):
    root, _ = runs
    (row,) = rows(root / "base", root / "worse", "--confidence", "0.9")
    low, high = -100 * row["high"], -100 * row["low"]
    assert f"loses {-100 * row['difference']:.1f} points [{low:.1f}, {high:.1f}]" in row["sentence"]
    (wider,) = rows(root / "base", root / "worse")
    assert wider["high"] - wider["low"] > row["high"] - row["low"]


def test_a_base_that_differs_from_itself_spoils_the_evidence(tmp_path):
    base = write_run(tmp_path / "base", quiz([1] * 60), policy="fp32@1")
    again = write_run(tmp_path / "again", quiz([1] * 45 + [0] * 15), policy="fp32@1")
    other = write_run(tmp_path / "other", quiz([1] * 44 + [0] * 16), policy="nvfp4@1")
    control, row = rows(base, other, "--aa", again)
    assert "differs from itself by more than chance: no difference of this size" in control["sentence"]
    assert "this is no evidence of a loss" in row["sentence"]
    # A control of single answers tells how many repeats it takes; without one nothing does.
    assert row["repeats_known"]
    assert not rows(base, other)[0]["repeats_known"]


def test_single_answers_that_never_differ(tmp_path):
    base, other = (write_run(tmp_path / name, quiz([1, 0] * 20), model=name) for name in ("one", "two"))
    (row,) = rows(base, other)
    assert row["difference"] == 0
    assert row["low"] < -0.05
    assert row["margin_verdict"] == "undecided"
    assert row["bootstrap"] is None
    assert row["run"] == str(other)
    assert "changes 0.0 points" in row["sentence"]


def test_log_likelihoods_and_several_tasks(tmp_path):
    def run(name, shift):
        pairs = [[str(-1.0 - shift), "True"], [str(-2.0), "False"]]
        lines = [sample(i, {"acc": 1}, filtered_resps=pairs, resps=[[p] for p in pairs]) for i in range(5)]
        write_run(tmp_path / name, lines, task="choose", model=name)
        return write_run(tmp_path / name, quiz([1] * 5), model=name, time="2026-11-30T11-00-00")

    base, other = run("a", 0.0), run("b", 0.5)
    found = {row["task"]: row for row in rows(base, other)}
    assert set(found) == {"choose", "quiz"}
    assert found["choose"]["loglikelihood_change"] == pytest.approx(0.25)
    assert found["quiz"]["loglikelihood_change"] is None
    assert found["quiz"]["length_unit"] == "characters"
    printed = compare(base, other)
    assert "│ choose" in printed
    assert "(Holm over 2)" in printed
    assert [row["task"] for row in rows(base, other, "--task", "choose")] == ["choose"]


def test_missing_documents_are_said(tmp_path):
    base = write_run(tmp_path / "base", quiz([1, 0, 1, 1]))
    other = write_run(tmp_path / "other", quiz([1, 0, 1]), model="other")
    with pytest.raises(InputError, match="1 missing"):
        compare(base, other)
    (row,) = rows(base, other, "--allow-missing")
    assert (row["n"], row["missing"]) == (3, 1)
    assert "1 document that only one of the two runs has is left out" in compare(
        base, other, "--allow-missing"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "CANDIDATE None: expected at least one run"),
        (["OTHER", "--margin", "0"], "--margin 0.0: expected points of accuracy"),
        (["OTHER", "--margin", "nan"], "--margin nan"),
        (["OTHER", "--confidence", "95"], "--confidence 95.0: expected a number above 0.5 and below 1"),
        (
            ["OTHER", "--metric", "exact"],
            "--metric 'exact': expected one of exact_match (nearest: exact_match)",
        ),
        (["OTHER", "--filter", "strict"], "--filter 'strict': expected one of none"),
        (["OTHER", "--task", "quizz"], "--task 'quizz': expected one of quiz (nearest: quiz)"),
        (["BASE"], "a file says nothing about itself"),
        (["OTHER", "OTHER"], "each run once"),  # Holm would count it twice
        (["OTHER", "SAMPLES"], "each run once"),
        (["--aa", "OTHER", "--aa", "OTHER"], "each run once"),
        (["MISSING"], "an existing file or folder"),
        (["TASK"], "the base's task quiz (there: another)"),
    ],
)
def test_what_is_refused(tmp_path, arguments, expected):
    base = write_run(tmp_path / "base", quiz([1, 0]))
    places = {
        "BASE": base,
        "OTHER": write_run(tmp_path / "other", quiz([1, 1]), model="other"),
        "SAMPLES": next((tmp_path / "other").glob("samples_*")),
        "MISSING": tmp_path / "nothing",
        "TASK": write_run(tmp_path / "task", quiz([1, 1]), task="another", model="other"),
    }
    with pytest.raises(InputError) as error:
        compare(base, *(places.get(argument, argument) for argument in arguments))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_it_ends_in_one_line_and_loads_no_model_library(runs, tmp_path):
    root, _ = runs
    script = (
        "import sys\nfrom quantlab import cli\n"
        "try: cli.main()\nfinally: print([m for m in ('torch', 'lm_eval', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, "compare", root / "base"]
    done = subprocess.run([*command, root / "worse"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr
    assert "points" in done.stdout
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: run ")
