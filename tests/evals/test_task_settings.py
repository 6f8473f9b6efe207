"""What a run changes in generative task files, and what it refuses."""

import pytest
from lm_eval.tasks import TaskManager

from quantlab.errors import InputError
from quantlab.evals.plugin import TASK_FOLDER
from quantlab.evals.task_settings import Sampling, with_sampling
from tests.evals import made_up

GEN, MC = "quantlab_gpqa_diamond_gen", "quantlab_gpqa_diamond_mc"


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    path = made_up.write(tmp_path_factory.mktemp("data") / "a.csv", made_up.rows(3, words=10))
    return TaskManager(include_path=[str(TASK_FOLDER)], include_defaults=False, metadata={"data": str(path)})


def loaded(manager, name, **changes):
    return manager.load(with_sampling(manager, [name], Sampling(**changes)))["tasks"][name]


def test_nothing_changed_is_the_task_file(manager):
    assert with_sampling(manager, [GEN, MC], Sampling()) == [GEN, MC]
    task = manager.load([GEN])["tasks"][GEN]
    assert task.config.repeats == 8
    assert task.config.generation_kwargs["max_gen_toks"] == 32768


def test_what_is_changed_is_changed_and_the_rest_stays(manager):
    before = manager.load([GEN])["tasks"][GEN]
    task = loaded(manager, GEN, repeats=3, max_gen_toks=64, temperature=0.6, top_p=0.9)
    assert task.config.repeats == 3
    assert task.config.generation_kwargs == {
        "until": [],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "max_gen_toks": 64,
    }
    document = task.eval_docs[0]
    assert document == before.eval_docs[0]
    assert task.doc_to_text(document) == before.doc_to_text(document)
    (pipeline,) = task._filters
    (take,) = pipeline.filters
    assert take().k == 3
    # The task file is not what was changed.
    assert manager.load([GEN])["tasks"][GEN].config.repeats == 8


def test_scored_tasks_beside_it_stay_names(manager):
    scored, generated = with_sampling(manager, [MC, GEN], Sampling(repeats=2))
    assert scored == MC
    assert generated["task"] == GEN


def test_greedy_is_one_response(manager):
    task = loaded(manager, GEN, repeats=1, temperature=0)
    assert task.config.generation_kwargs == {
        "until": [],
        "do_sample": False,
        "temperature": 0.0,
        "max_gen_toks": 32768,
    }
    with pytest.raises(InputError, match=r"repeats 8: .*all the same"):
        with_sampling(manager, [GEN], Sampling(temperature=0))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (MC, {"repeats": 2}, r"^repeats 2: .*generates"),
        ("running_arithmetic", {"repeats": 2}, "greedy responses are all the same"),
        ("running_arithmetic", {"repeats": 2, "temperature": 1}, "keeps the first response only"),
        ("running_arithmetic", {"top_p": 0.9}, "a temperature above 0"),
        (GEN, {"top_p": 0.9, "temperature": 0, "repeats": 1}, "a temperature above 0"),
    ],
)
def test_a_change_that_would_do_nothing_is_refused(manager, name, changes, words):
    with pytest.raises(InputError, match=words):
        with_sampling(manager, [name], Sampling(**changes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeats": 0},
        {"repeats": 2.0},
        {"max_gen_toks": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)
