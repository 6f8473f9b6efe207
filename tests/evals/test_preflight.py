"""What a preflight refuses: each check on a fault planted for it, and what it lets pass."""

import dataclasses
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import scipy.stats

from quantlab.errors import InputError
from quantlab.evals import generation, gpqa
from quantlab.evals.generated import Generated
from quantlab.evals.generating import Generation
from quantlab.evals.model import QuantlabLM
from quantlab.evals.plugin import TASK_FOLDER
from quantlab.evals.point import run_points
from quantlab.evals.preflight_report import SampleSize
from quantlab.evals.preflight_requests import (
    Requested,
    dtype_check,
    exercised_check,
    gold_check,
    gold_histogram,
    length_check,
    read_requests,
)
from quantlab.evals.preflight_sample import Sampled, _requests, answers_check
from quantlab.evals.run import run_eval
from quantlab.evals.task_settings import Sampling
from quantlab.models import build_tiny
from quantlab.schemes import parse_rules
from tests.evals import made_up
from tests.evals.requests import asked

SCORED, GENERATED = "quantlab_gpqa_diamond_mc", "quantlab_gpqa_diamond_gen"
QUIET = {"quiet": True, "generation_batch": 8}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("mamba2", tmp_path_factory.mktemp("preflight") / "mamba2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made_up.write(tmp_path_factory.mktemp("data") / "invented.csv", made_up.rows(8, words=8))


def look(folder, data, tmp_path, tasks=(GENERATED,), policies=("fp32@1",), **options):
    """What a preflight finds, without its being required; nothing is written by it."""
    found = []
    options = {"generation": QUIET, "sampling": Sampling(repeats=2, max_gen_toks=12)} | options
    if list(tasks) == [SCORED]:
        options.pop("sampling")
    try:
        run_eval(
            folder,
            policies,
            list(tasks),
            data=data,
            output=tmp_path / "out",
            preflight_only=True,
            on_preflight=found.append,
            **options,
        )
        assert found[0].stops == []
    except InputError:
        assert found, "refused before the preflight"
        assert found[0].stops
    assert not (tmp_path / "out").exists()
    return found[0]


def verdicts(found):
    return {check.name: check.verdict for check in found.checks}


def check_named(found, name):
    (check,) = (check for check in found.checks if check.name == name)
    return check


def test_a_sound_run_passes_and_says_what_would_be_asked(folder, data, tmp_path):
    found = look(folder, data, tmp_path, tasks=[SCORED])
    assert set(verdicts(found).values()) == {"ok"}
    documents = gpqa.documents(data)
    gold = ["ABCD"[document["answer"]] for document in documents]
    assert check_named(found, "gold letters").values["gold"] == {
        letter: gold.count(letter) for letter in "ABCD"
    }
    assert check_named(found, "documents").values == {"documents": 8}
    assert check_named(found, "state dtype").values["state_dtype_of_the_model"] == "float32"
    assert made_up.CANARY not in json.dumps(found.as_dict())


def test_gold_letters_that_never_change_stop_a_run(folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(gpqa, "_ORDERS", ((0, 1, 2, 3),))
    found = look(folder, data, tmp_path, tasks=[SCORED])
    assert [check.name for check in found.stops] == ["gold letters", "choice order"]
    assert check_named(found, "gold letters").values["gold"] == {"A": 8, "B": 0, "C": 0, "D": 0}
    with pytest.raises(InputError, match=r"preflight gold letters .*A 8, B 0, C 0, D 0"):
        run_eval(folder, ["fp32@1"], [SCORED], data=data, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # Five alike are no proof: chance gives that once in 256 times.
    assert verdicts(look(folder, data, tmp_path, tasks=[SCORED], limit=5))["gold letters"] == "ok"


def test_an_order_that_no_seed_moves_stops_a_run(folder, data, tmp_path, monkeypatch):
    arrange = gpqa.arrange
    monkeypatch.setattr(gpqa, "arrange", lambda row, seed: arrange(row, 0))
    found = look(folder, data, tmp_path, tasks=[SCORED])
    assert [check.name for check in found.stops] == ["choice order"]


def exact_p(counts):
    """Of the multinomial with equal chances, by every way in which the documents can fall."""
    n, k = sum(counts), len(counts)

    def statistic(counts):
        return sum((count - n / k) ** 2 for count in counts)

    total = 0
    for cuts in itertools.combinations(range(n + k - 1), k - 1):
        ends = (-1, *cuts, n + k - 1)
        other = [b - a - 1 for a, b in itertools.pairwise(ends)]
        if statistic(other) >= statistic(counts):
            total += math.factorial(n) // math.prod(math.factorial(count) for count in other)
    return total / k**n


@pytest.mark.parametrize("counts", [(3, 1, 1, 1), (6, 0, 0, 0), (2, 2, 2, 2), (7, 1, 0, 4), (9, 3)])
def test_the_p_value_is_that_of_the_exact_multinomial(counts):
    places = [(place, len(counts)) for place, count in enumerate(counts) for _ in range(count)]
    found, p = gold_histogram(places)
    assert list(found.values()) == list(counts)
    exact = exact_p(counts)
    # Five standard errors of 9,999 draws, and the one that is added to both counts.
    assert abs(p - exact) <= 5 * math.sqrt(exact * (1 - exact) / 9_999) + 1e-4


def test_documents_with_other_numbers_of_choices_are_weighed_by_them():
    """Half have two choices, half ten: the first two places are six times as likely, which is no surprise."""
    places = [(place % 2, 2) for place in range(100)] + [(place % 10, 10) for place in range(100)]
    counts, p = gold_histogram(places)
    assert counts["A"] == 60
    assert p > 0.99
    assert scipy.stats.chisquare(list(counts.values())).pvalue < 1e-30


def test_a_skewed_histogram_is_a_warning():
    task = SimpleNamespace(config=SimpleNamespace(output_type="generate_until"))
    documents = tuple({"choices": list("abcd"), "answer": int(number % 8 == 0)} for number in range(80))
    check = gold_check(Requested("t", task, (), documents, (), (), 8))
    assert check is not None
    assert check.verdict == "warn"
    assert check.values["gold"] == {"A": 70, "B": 10, "C": 0, "D": 0}


def test_a_prompt_that_leaves_no_room_stops_a_run():
    task = SimpleNamespace(config=SimpleNamespace(output_type="generate_until"))
    requested = Requested("t", task, (), (), (), (20, 30, 100), 64)
    assert length_check(requested, 164).verdict == "ok"
    check = length_check(requested, 163)
    assert check.verdict == "stop"
    assert "at most 63" in check.change
    assert check.values["median"] == 30
    assert "shorter prompts" in length_check(requested, 99).change


def test_a_chat_model_that_is_asked_without_its_template_is_a_warning(folder, data, tmp_path):
    assert verdicts(look(folder, data, tmp_path))["chat template"] == "ok"
    chatty = shutil.copytree(folder, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("<user>{{ messages[0]['content'] }}<model>")
    without = check_named(look(chatty, data, tmp_path), "chat template")
    assert without.verdict == "warn"
    assert "--chat-template" in without.change
    assert verdicts(look(chatty, data, tmp_path, tasks=[SCORED]))["chat template"] == "ok"
    within = check_named(look(chatty, data, tmp_path, chat_template=True), "chat template")
    assert within.verdict == "ok"
    assert within.values["sha256"] == without.values["sha256"] != None  # noqa: E711
    assert within.values["applied"] is True


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [("nvfp4@10", "ok"), ("nvfp4@11", "stop"), ("fp32/nvfp4@11", "stop"), ("fp32@99", "ok")],
)
def test_a_policy_that_stores_behind_the_longest_response_is_refused(folder, data, tmp_path, policy, verdict):
    """Twelve tokens are eleven steps: with a window of eleven, the first store is read by nobody."""
    found = look(folder, data, tmp_path, policies=["fp32@1", policy])
    of_policy = [c for c in found.checks if c.name == "exercised" and c.values["policy"] == policy]
    assert [check.verdict for check in of_policy] == [verdict]
    if verdict == "stop":
        with pytest.raises(InputError, match=r"^policy .*max_gen_toks above 12"):
            found.require()


@pytest.mark.parametrize("policy", ["nvfp4@1", "nvfp4@4", "fp32/nvfp4@4", "nvfp4@5", "int8@4:schedule=step"])
def test_what_is_expected_to_be_exercised_is_what_a_longest_response_exercises(folder, policy):
    """One greedy response that is stopped by its limit alone: 13 tokens, 12 steps."""
    lm = QuantlabLM(str(folder), policy, device="cpu", quiet=True)
    text = lm.generate_until(asked([("A bell", {"until": [], "max_gen_toks": 13})]), disable_tqdm=True)[0]
    assert text.tokens == 13
    task = SimpleNamespace(config=SimpleNamespace(output_type="generate_until"))
    check = exercised_check(Requested("t", task, (), (), (), (6,), 13), parse_rules(policy))
    counted = [count for count in lm.interception.report.exercised.values() if count is not None]
    assert check.values["stores_read"] == max(counted)


def test_a_run_whose_answers_are_all_cut_off_is_not_started(folder, data, tmp_path):
    options = {"data": data, "output": tmp_path / "out", "generation": QUIET}
    options |= {"sampling": Sampling(repeats=2, max_gen_toks=4), "preflight": SampleSize()}
    with pytest.raises(InputError, match=r"preflight answers .*cut off at 4 tokens, 0 with.*--max-gen-toks"):
        run_eval(folder, ["fp32@1"], [GENERATED], **options)
    assert not (tmp_path / "out").exists()
    # Two responses stop nothing, and what was found is kept with the run.
    (record,) = run_eval(folder, ["fp32@1"], [GENERATED], limit=1, **options)
    checks = {check["check"]: check for check in record["metrics"]["preflight"]["checks"]}
    assert checks["answers"]["values"]["responses"] == 2
    assert checks["answers"]["verdict"] == "warn"
    assert checks["run twice"]["values"] == {"same": 2, "of": 2}
    assert made_up.CANARY not in json.dumps(record)


GENERATES = SimpleNamespace(config=SimpleNamespace(output_type="generate_until"))


@pytest.mark.parametrize(
    ("responses", "limit", "verdict", "words"),
    [
        ("s+ s+ s+ s+", 64, "ok", ""),
        ("l- l- l- l-", 64, "stop", "a larger --max-gen-toks"),
        ("l- l- l-", 64, "warn", "--max-gen-toks"),  # too few to stop anything
        ("s- s- s- s-", 64, "stop", "a prompt to which the model answers"),
        ("s- s- s- s-", 32, "stop", "a prompt to which the model answers"),
        ("s- s- s- l-", 32, "warn", "--think-end"),  # the preflight cut one off: it may have an answer
        ("l- l- l- l-", 32, "warn", "--preflight-tokens"),  # nothing is known of what would have come
        ("l+ l+ l+ l+", 64, "warn", "--max-gen-toks"),  # answered, then rambled on
        ("l- l- l- l- l- l- l- s+", 64, "warn", "--max-gen-toks"),
        ("s+ s+ s+ s+ s+ s+ s+ l-", 64, "ok", ""),
        ("s+ s+ s+ s+ s+ s+ s+ s-", 64, "ok", ""),
        ("s+ s+ s- s+ s+ s+ s+ s-", 64, "warn", "--chat-template"),
    ],
)
def test_what_a_sample_says(responses, limit, verdict, words):
    made = [
        (Generated("x", 5, "stop" if text[0] == "s" else "length"), text[1] == "+")
        for text in responses.split()
    ]
    check = answers_check(Requested("t", GENERATES, (), (), (), (), 64), Sampled(tuple(made), {}), limit)
    assert check.verdict == verdict
    assert words in check.change


@pytest.mark.parametrize("fault", ["run twice", "other batch"])
def test_runs_that_differ_stop_a_run(folder, data, tmp_path, monkeypatch, fault):
    real, calls = generation.uniforms, itertools.count()

    def uniforms(seed, streams, *names):
        other = next(calls) if fault == "run twice" else len(set(streams))
        return real(seed + other, streams, *names)

    monkeypatch.setattr(generation, "uniforms", uniforms)
    found = look(folder, data, tmp_path, preflight=SampleSize())
    stops = [check.name for check in found.stops]
    assert fault in stops
    assert ("run twice" in stops) == (fault == "run twice")


def test_a_sample_is_how_the_runs_own_responses_begin(folder, data):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_defaults=False, include_path=[str(TASK_FOLDER)], metadata={"data": str(data), "gpqa_seed": 0}
    )
    task = manager.load([GENERATED])["tasks"][GENERATED]
    lm = QuantlabLM(str(folder), device="cpu", seed=3, generation_batch=8, quiet=True)
    requested = read_requests(lm, GENERATED, task, None, chat_template=False, seed=3)
    assert requested.limit == 32768
    whole = dataclasses.replace(requested)
    runs = []
    for size, limit in ((SampleSize(), 6), (SampleSize(documents=8, repeats=3), 12)):
        told = Generation(lm)
        told.run(_requests(whole, size, limit), None, quiet=True)
        runs.append({line.key: line.ids for line in told.lines})
    sample, run = runs
    assert len(sample) == 8
    assert len(run) == 24
    assert all(run[key][: len(ids)] == ids for key, ids in sample.items())
    assert len(set(sample.values())) > 1


def protocols(found):
    return check_named(found, "protocol").values


def test_a_fingerprint_names_what_runs_must_share(folder, data, tmp_path):
    base = protocols(look(folder, data, tmp_path))
    assert protocols(look(folder, data, tmp_path, seed=5)) == base  # a control run samples anew
    assert protocols(look(folder, data, tmp_path, policies=["nvfp4@1"])) == base
    changed = {
        "choice_seed": look(folder, data, tmp_path, choice_seed=1),
        "documents": look(folder, data, tmp_path, limit=4),
        "sampling": look(folder, data, tmp_path, sampling=Sampling(repeats=2, max_gen_toks=12, top_p=0.5)),
        "think_end_token": look(folder, data, tmp_path, generation=QUIET | {"think_end_token": "</think>"}),
    }
    for name, found in changed.items():
        assert protocols(found)[name] != base[name]
        assert protocols(found)["fingerprint"] != base["fingerprint"]


def test_a_state_that_the_model_keeps_in_less_than_float32_is_a_warning(folder):
    lm = QuantlabLM(str(folder), "int8@1", device="cpu")
    assert dtype_check(lm, parse_rules("int8@1")).verdict == "ok"
    lm.interception.report.as_dict = lambda real=lm.interception.report.as_dict: (
        real() | {"state_dtype_of_the_model": "bfloat16"}
    )
    check = dtype_check(lm, parse_rules("int8@1"))
    assert check.verdict == "warn"
    assert "bfloat16" in check.found


def test_points_of_a_sweep_are_looked_at_too(data, monkeypatch):
    point = {"kind": "eval", "model": "builtin:tiny-mamba2", "tasks": [GENERATED], "data": str(data)}
    point |= {"limit": 1, "repeats": 2, "max_gen_toks": 6}
    points = [point | {"policy": policy} for policy in ("fp32@1", "nvfp4@16")]
    (_, first), (_, second) = run_points(points, threads=1, on_progress=lambda *_: None)
    assert first["status"] == "ok"
    assert "answers" not in json.dumps(first["metrics"]["preflight"]).split('"')  # no sample in a sweep
    assert second["status"] == "not_exercised"
    assert "max_gen_toks above 17" in second["message"]
    monkeypatch.setattr(gpqa, "_ORDERS", ((0, 1, 2, 3),))
    with pytest.raises(InputError, match="gold letters"):
        list(run_points([points[0] | {"limit": None}], threads=1, on_progress=lambda *_: None))


def test_the_command_line_shows_it_and_stops(folder, data, tmp_path):
    from typer.testing import CliRunner

    from quantlab.cli import app

    command = f"eval --model {folder} --tasks {GENERATED} --data {data} --repeats 2 -o {tmp_path / 'out'}"
    done = CliRunner().invoke(app, f"{command} --preflight --max-gen-toks 64 --preflight-tokens 4")
    assert done.exit_code == 0, done.output
    assert "nothing stops this run" in done.stdout
    assert "cut off at 4 tokens, 0 with an answer" in done.stdout
    done = CliRunner().invoke(app, f"{command} --preflight --max-gen-toks 4 --json")
    assert isinstance(done.exception, InputError)
    rows = {row["check"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["answers"]["verdict"] == "stop"
    assert rows["run twice"]["values"] == {"same": 8, "of": 8}
    done = CliRunner().invoke(app, f"{command} --max-gen-toks 4")
    assert isinstance(done.exception, InputError)
    assert not list(tmp_path.rglob("results_*"))
    done = CliRunner().invoke(app, f"{command} --max-gen-toks 4 --limit 4 --no-preflight")
    assert done.exit_code == 0, done.output
    assert list(tmp_path.rglob("results_*"))
