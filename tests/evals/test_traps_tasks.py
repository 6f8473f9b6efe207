"""Ways in which evaluation goes wrong without a word: lm-eval's own way shows each one, quantlab's tasks pass.

Every test is in two halves, the control first.  Where a control stops failing, lm-eval has mended the trap.
"""

import csv
import json
import random
import subprocess
import sys
from collections import Counter

import lm_eval
import pytest
from lm_eval.filters import build_filter_ensemble
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from quantlab.errors import InputError
from quantlab.evals.__main__ import task_folders
from quantlab.evals.answers import extract_letter
from quantlab.evals.generated import Generated
from quantlab.evals.generation_metrics import letter_results
from quantlab.evals.gpqa import arrange, documents, read_rows
from quantlab.evals.plugin import TASK_FOLDER
from quantlab.evals.preflight import check_tasks
from quantlab.evals.task_settings import Sampling, with_sampling
from tests.evals import made_up
from tests.evals.test_generation_metrics import Scripted

MC, GEN = "quantlab_gpqa_diamond_mc", "quantlab_gpqa_diamond_gen"
BUILT_IN = TASK_FOLDER.__class__(lm_eval.__file__).parent / "tasks" / "gpqa"


@pytest.fixture
def path(tmp_path):
    return made_up.write(tmp_path / "a.csv", made_up.rows(40, words=12))


def built_in_docs(dataset):
    process = load_yaml(BUILT_IN / "zeroshot" / "gpqa_diamond_zeroshot.yaml")["process_docs"]
    return [row["answer"] for row in process(dataset)]


def test_choices_are_drawn_again_on_every_look_at_data_in_memory(path):
    from datasets import Dataset

    dataset = Dataset.from_list(made_up.rows(40, words=12))
    random.seed(0)
    prompted, scored = built_in_docs(dataset), built_in_docs(dataset)  # lm-eval looks once for each
    assert prompted != scored

    task = check_tasks([MC], path, choice_seed=0).load([MC])["tasks"][MC]
    random.seed(1)
    first = list(task.test_docs())
    random.seed(2)
    assert list(task.test_docs()) == first == documents(path)


def test_choices_are_frozen_by_the_cache_of_data_in_files(path, tmp_path):
    from datasets import load_dataset

    dataset = load_dataset("csv", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    golds = []
    for seed in (0, 1, 2):
        random.seed(seed)
        golds.append(built_in_docs(dataset))
    assert golds[0] == golds[1] == golds[2]  # the first order ever drawn on this machine

    orders = [[d["answer"] for d in documents(path, seed=seed)] for seed in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 3
    assert [d["answer"] for d in documents(path, seed=0)] == orders[0]


def test_gold_by_text_is_the_first_of_two_equal_choices():
    row = made_up.rows(1, words=8)[0]
    twins = row | {"Incorrect Answer 1": row["Correct Answer"]}
    built_in, ours = set(), set()
    for seed in range(64):
        random.seed(seed)
        (answer,) = built_in_docs(_one(twins))
        built_in.add(answer)
        ours.add(arrange(twins, seed)["answer"])
    assert "(D)" not in built_in  # of two equal texts one always stands before

    assert ours == {0, 1, 2, 3}


def _one(row):
    from datasets import Dataset

    return Dataset.from_list([row])


def test_gold_letters_as_written_are_constant_and_arranged_are_spread(tmp_path):
    rows = made_up.rows(198, words=12)
    columns = [list(row).index("Correct Answer") - list(row).index("Question") - 1 for row in rows]
    assert Counter("ABCD"[column] for column in columns) == {"A": 198}

    golds = Counter(d["answer"] for d in documents(made_up.write(tmp_path / "b.csv", rows)))
    # Binomial, 198 draws of 1/4: mean 49.5, standard deviation 6.1; five of them.
    assert all(abs(golds[place] - 49.5) < 5 * 6.1 for place in range(4))


LISTED = [
    ("The answer is B.", "B"),
    (r"\boxed{B}", "B"),
    ("So the option is (B), the (Z)-isomer.", "B"),
    ("(B): the (R) enantiomer", "B"),
    ("We get 4. Answer: B", "B"),
    ("option (A) looks right but", None),
    ("The answer is B", "B"),
]


def built_in_answers(texts, choices):
    config = load_yaml(BUILT_IN / "cot_zeroshot" / "gpqa_diamond_cot_zeroshot.yaml")
    found = {}
    for part in config["filter_list"]:
        components = [
            [f["function"], {k: v for k, v in f.items() if k != "function"}] for f in part["filter"]
        ]
        pipeline = build_filter_ensemble(part["name"], components)
        responses = [[text] for text in texts]
        for function in pipeline.filters:
            responses = function().apply(responses, [{"choices": choices}] * len(texts))
        found[part["name"]] = [str(response) for response in responses]
    return found


def test_built_in_filters_misread_chemistry_boxes_and_cut_off_texts():
    choices = ["2", "3", "5", "4"]
    found = built_in_answers([text for text, _ in LISTED], choices)

    def wrong(name):
        return [
            extracted.strip("().") != (gold or "[invalid]")
            for extracted, (_, gold) in zip(found[name], LISTED, strict=True)
        ]

    assert sum(wrong("strict-match")) >= 4
    assert sum(wrong("flexible-extract")) >= 5
    assert found["flexible-extract"][5] == "(A)"  # a text that was cut off is an answer to it

    for text, gold in LISTED:
        assert extract_letter(text) == gold


def test_a_thought_that_was_cut_off_is_scored_as_an_answer():
    cut = "Perhaps it is (A), let me see"
    kept = postprocess_generated_text(cut, [], "</think>")
    assert kept == cut
    assert built_in_answers([kept], ["w", "x", "y", "z"])["flexible-extract"] == ["(A)"]

    document = {"choices": ["w", "x", "y", "z"], "answer": 0}
    for text in (f"{cut}\nAnswer: A", f"<think>{cut}\nAnswer: A"):
        assert letter_results(document, [[Generated(text, 9, "length")]])["no_answer"] == 1
    assert letter_results(document, [[f"<think>{cut}\nAnswer: A"]])["no_answer"] == 1


def test_generation_ends_after_256_tokens_where_no_length_is_named():
    for kind in ("cot_zeroshot/gpqa_diamond_cot_zeroshot", "generative/gpqa_diamond_generative_n_shot"):
        options = load_yaml(BUILT_IN / f"{kind}.yaml")["generation_kwargs"]
        assert normalize_gen_kwargs(dict(options))["max_gen_toks"] == 256

    for file in TASK_FOLDER.glob("quantlab_*_gen.yaml"):
        options = normalize_gen_kwargs(dict(load_yaml(file)["generation_kwargs"]))
        assert (options["max_gen_toks"], options["do_sample"], options["temperature"]) == (32768, True, 1.0)


def test_a_stop_string_cuts_reasoning_that_repeats_it():
    response = "Let me restate the Question: which one?\n\nIt is the second.\n\nAnswer: B"
    options = load_yaml(BUILT_IN / "generative" / "gpqa_diamond_generative_n_shot.yaml")["generation_kwargs"]
    assert "Answer" not in postprocess_generated_text(response, options["until"], None)

    for file in TASK_FOLDER.glob("quantlab_*_gen.yaml"):
        until = load_yaml(file)["generation_kwargs"]["until"]
        assert postprocess_generated_text(response, until, None) == response


def test_a_limit_takes_the_first_rows_of_sorted_data(tmp_path):
    rows = made_up.rows(60, words=12)
    for number, row in enumerate(rows):
        row["Question"] = f"Field {number // 20}: {row['Question']}"
    path = made_up.write(tmp_path / "sorted.csv", rows)

    def fields(docs):
        return {doc["question"].split(":")[0] for doc in docs}

    assert fields([arrange(row) for row in read_rows(path)][:20]) == {"Field 0"}

    task = check_tasks([MC], path, choice_seed=0).load([MC])["tasks"][MC]
    limited = [doc for _, doc in task.doc_iterator(rank=0, limit=20, world_size=1)]
    assert fields(limited) == {"Field 0", "Field 1", "Field 2"}
    assert limited == [doc for _, doc in task.doc_iterator(rank=0, limit=30, world_size=1)][:20]


def run(specs, manager, lm=None):
    return lm_eval.simple_evaluate(lm or Scripted(), tasks=specs, task_manager=manager, log_samples=True)  # pyright: ignore


def test_repeats_are_thrown_away_but_for_the_first(path):
    manager = check_tasks([GEN], path, choice_seed=0)
    (ours,) = with_sampling(manager, [GEN], Sampling(repeats=4))
    naive = {k: v for k, v in ours.items() if k != "filter_list"}
    (samples,) = run([naive], manager)["samples"].values()
    assert {len(sample["correct"]) for sample in samples} == {1}  # of four

    (samples,) = run([ours], manager)["samples"].values()
    assert {len(sample["correct"]) for sample in samples} == {4}


def test_a_dictionary_beside_a_name_does_not_inherit_the_task_file(path):
    manager = check_tasks([GEN], path, choice_seed=0)
    with pytest.raises(TypeError, match="NoneType"):  # no data set is named in it
        manager.load([{"task": GEN, "repeats": 2}])

    task = manager.load(with_sampling(manager, [GEN], Sampling(repeats=2)))["tasks"][GEN]
    assert (task.config.repeats, task.config.generation_kwargs["max_gen_toks"]) == (2, 32768)


def test_two_folders_of_tasks_in_one_text_are_none(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        (TASK_FOLDER / "running_arithmetic.yaml").read_text().replace("running", "my")
    )
    both = f"{TASK_FOLDER}:{tmp_path}"
    assert TaskManager(include_path=both, include_defaults=False).all_tasks == []

    found = TaskManager(include_path=task_folders(str(tmp_path)), include_defaults=False).all_tasks
    assert {MC, GEN, "my_arithmetic"} <= set(found)
    with pytest.raises(InputError, match=r"^include_path '.*nowhere'"):
        task_folders(f"{tmp_path}:{tmp_path / 'nowhere'}")


def test_shared_parts_of_task_files_are_no_tasks(path):
    names = check_tasks([MC], path, choice_seed=0).all_tasks
    assert not any(name.startswith("_") for name in names)
    assert {f"quantlab_gpqa_{s}_{k}" for s in ("diamond", "main", "extended") for k in ("mc", "gen")} <= set(
        names
    )
    assert {
        "quantlab_mmlu_pro_mc",
        "quantlab_mmlu_pro_gen",
        "quantlab_gsm8k_gen",
        "quantlab_aime_gen",
    } <= set(names)


REGISTERED = """
import sys
import lm_eval.models
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
if sys.argv[1] == "folder":
    TaskManager(include_path=[sys.argv[2]], include_defaults=False)
else:
    load_yaml(sys.argv[3], resolve_func=True)
sys.exit("quantlab" not in model_registry)
"""


def test_a_folder_of_tasks_does_not_register_the_model_and_a_task_by_path_does():
    def known(how):
        file = str(TASK_FOLDER / f"{GEN}.yaml")
        command = [sys.executable, "-c", REGISTERED, how, str(TASK_FOLDER), file]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    assert not known("folder")  # lm-eval resolves functions only after it has looked the model up

    assert known("path")


def test_requests_that_are_kept_belong_to_no_data(path, tmp_path, monkeypatch):
    """lm-eval keeps requests by the name of the task; quantlab's evaluations keep none (test_run.py)."""
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "kept"))
    other = made_up.write(tmp_path / "other.csv", made_up.rows(40, words=12, seed=1))

    def prompts(data, cache):
        lm = Scripted()
        manager = check_tasks([GEN], data, choice_seed=0)
        lm_eval.simple_evaluate(lm, tasks=[GEN], task_manager=manager, cache_requests=cache)  # pyright: ignore
        return {prompt for prompt, _ in lm.seen}

    assert prompts(path, True) == prompts(other, True)

    assert prompts(path, False).isdisjoint(prompts(other, False))


def test_a_table_library_takes_answers_for_missing_cells_and_numbers(tmp_path):
    import pandas

    rows = made_up.rows(4, words=8)
    for row, answer in zip(rows, ("None", "nan", "NA", "4.0"), strict=True):
        row["Correct Answer"] = answer
    path = made_up.write(tmp_path / "odd.csv", rows)
    column = pandas.read_csv(path)["Correct Answer"]
    assert column.isna().sum() == 3

    assert [row["Correct Answer"] for row in read_rows(path)] == ["None", "nan", "NA", "4.0"]
    assert [row["Correct Answer"] for row in csv.DictReader(path.open())] == ["None", "nan", "NA", "4.0"]


def test_lm_evals_samples_hold_the_questions(path):
    results = run([GEN], check_tasks([GEN], path, choice_seed=0))
    assert made_up.CANARY in json.dumps(results["samples"], default=str)

    results.pop("samples")
    assert made_up.CANARY not in json.dumps(results, default=str)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)  # what is run is the way in, not the model
def test_plain_lm_eval_runs_a_task_given_by_path(folder, path, tmp_path):
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "quantlab",
        "--device",
        "cpu",
        "--limit",
        "2",
    ]
    command += ["--model_args", f"pretrained={folder},policy=nvfp4@1", "--output_path", str(tmp_path / "out")]
    command += ["--metadata", json.dumps({"gpqa_path": str(path)})]
    by_name = subprocess.run(
        [*command, "--tasks", MC, "--include_path", str(TASK_FOLDER)], check=False, capture_output=True
    )
    assert by_name.returncode != 0  # the model is looked up before the task

    subprocess.run([*command, "--tasks", str(TASK_FOLDER / f"{MC}.yaml")], check=True, capture_output=True)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert MC in json.loads(results.read_text())["results"]
    for task in (MC, str(TASK_FOLDER / f"{MC}.yaml")):  # quantlab's own way in takes both
        subprocess.run(
            [sys.executable, "-m", "quantlab.evals", *command[3:], "--tasks", task],
            check=True,
            capture_output=True,
        )
