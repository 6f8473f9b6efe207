"""Which runs may be paired: every difference of protocol is refused by name, seeds of sampling are not."""

import numpy as np
import pytest

from quantlab.errors import InputError
from quantlab.evals.answer_arrays import read_answers
from quantlab.evals.pairing import pair
from quantlab.evals.result_files import read_runs
from tests.evals.result_folders import digest, quiz, sample, write_run


def answers(path, **chosen):
    (run,) = read_runs(path).values()
    return read_answers(run, **chosen)


@pytest.fixture
def base(tmp_path):
    return answers(write_run(tmp_path / "base", quiz([1, 0, 1, 1])))


def test_documents_are_paired_by_hash_in_any_order(tmp_path, base):
    lines = quiz([0, 0, 1, 0])
    other = answers(write_run(tmp_path / "other", [lines[i] for i in (2, 0, 3, 1)], model="other"))
    found = pair(base, other)
    before, after = found.of("correct")
    assert before.ravel().tolist() == [1, 0, 1, 1]
    assert after.ravel().tolist() == [0, 0, 1, 0]
    assert (found.missing, found.remarks) == (0, [])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "task version: 1 / 2"),
        ({"shots": 5}, "n-shot: 0 / 5"),
        ({"chat_template_sha": "abc"}, 'chat_template_sha: null / "abc"'),
        ({"system_instruction_sha": "abc"}, "system_instruction_sha"),
        ({"gen_kwargs": {"max_gen_toks": 256}}, "gen_kwargs"),
        ({"generation_kwargs": {"temperature": 0.6}}, "generation_kwargs"),
        ({"repeats": 8}, "repeats: 1 / 8"),
        ({"output_type": "multiple_choice"}, "output_type"),
    ],
)
def test_another_protocol_is_refused_by_name(tmp_path, base, changes, named):
    other = answers(write_run(tmp_path / "other", quiz([1, 0, 1, 1]), model="other", **changes))
    with pytest.raises(InputError, match="the base's protocol; it differs in ") as error:
        pair(base, other)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_all_differences_are_named_at_once(tmp_path, base):
    other = answers(write_run(tmp_path / "other", quiz([1] * 4), model="other", version=2, shots=3))
    with pytest.raises(InputError, match=r"task version: 1 / 2; n-shot: 0 / 3"):
        pair(base, other)


def test_seeds_of_sampling_and_addresses_of_functions_do_not_matter(tmp_path):
    runs = [
        answers(
            write_run(
                tmp_path / str(i),
                quiz([1, 0]),
                model=f"m{i}",
                generation_kwargs={"temperature": 1.0, "seed": i, "stop": f"<function f at 0x7f{i}a>"},
                gen_kwargs=f"temperature=1.0,seed={i}",
                fewshot_seed=i,
            )
        )
        for i in range(2)
    ]
    assert pair(*runs).missing == 0


def test_the_seed_of_the_examples_matters_where_there_are_examples(tmp_path):
    runs = [
        answers(write_run(tmp_path / str(i), quiz([1]), model=f"m{i}", shots=5, fewshot_seed=i))
        for i in (1, 2)
    ]
    with pytest.raises(InputError, match="fewshot_seed: 1 / 2"):
        pair(*runs)


def test_scoring_of_the_decode_state_matters(tmp_path):
    runs = [
        answers(write_run(tmp_path / scoring, quiz([1]), policy=policy, scoring=scoring))
        for scoring, policy in (("decode", "fp32@1"), ("prefill", "nvfp4@1"))
    ]
    with pytest.raises(InputError, match='scoring: "decode" / "prefill"'):
        pair(*runs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("doc_hash", "doc_hash differs in 1 of 4"),
        ("prompt_hash", "prompt_hash differs in 1 of 4"),
        ("target_hash", "target_hash differs in 1 of 4"),
    ],
)
def test_other_documents_prompts_or_targets(tmp_path, base, name, expected):
    lines = quiz([1, 0, 1, 1])
    lines[2][name] = digest("another order of the choices")
    other = answers(write_run(tmp_path / "other", lines, model="other"))
    for allowed in (False, True):
        with pytest.raises(InputError, match=expected):
            pair(base, other, allow_missing=allowed)


def test_missing_documents_are_counted_and_may_be_allowed(tmp_path, base):
    lines = [*quiz([1, 0, 0, 1])[1:], sample(9, {"exact_match": 1})]
    other = answers(write_run(tmp_path / "other", lines, model="other"))
    with pytest.raises(InputError, match="4 documents; 1 missing, 1 more; --allow-missing compares the 3"):
        pair(base, other)
    found = pair(base, other, allow_missing=True)
    assert found.missing == 2
    assert [array.ravel().tolist() for array in found.of("correct")] == [[0, 1, 1], [0, 0, 1]]
    assert "2 documents" in found.remarks[0]
    strange = answers(write_run(tmp_path / "strange", [sample(9, {"exact_match": 1})], model="other"))
    with pytest.raises(InputError, match="at least one document in common"):
        pair(base, strange, allow_missing=True)


def test_another_number_of_repeats(tmp_path, base):
    other = answers(write_run(tmp_path / "other", quiz([[1, 1]] * 4), model="other"))
    with pytest.raises(InputError, match="1 answer a document as in the base, not 2"):
        pair(base, other)


def test_another_metric_or_filter(tmp_path, base):
    other = answers(write_run(tmp_path / "other", [sample(i, {"acc": 1}) for i in range(4)], model="other"))
    with pytest.raises(InputError, match='metric: "exact_match" / "acc"'):
        pair(base, other)
    lines = quiz([1, 0, 1, 1])
    for line in lines:
        line["filter"] = "strict"
    other = answers(write_run(tmp_path / "strict", lines, model="other"))
    with pytest.raises(InputError, match='filter: "none" / "strict"'):
        pair(base, other)


def test_a_run_is_no_candidate_of_its_own(tmp_path):
    first, again, other = (
        answers(write_run(tmp_path / name, quiz(right), policy=policy))
        for name, right, policy in (
            ("first", [1, 0], "fp32@1"),
            ("again", [1, 1], "fp32@1"),
            ("other", [0, 0], "nvfp4@1"),
        )
    )
    for control in (False, True):
        with pytest.raises(InputError, match="a file says nothing about itself"):
            pair(first, first, control=control)
    with pytest.raises(InputError, match="give a second run of the base as --aa"):
        pair(first, again)
    assert pair(first, again, control=True).missing == 0
    with pytest.raises(
        InputError, match=r"--aa .* another run of the base, m under fp32@1, not one of m under nvfp4@1"
    ):
        pair(first, other, control=True)


def test_samples_without_results_are_paired_with_a_remark(tmp_path, base):
    folder = write_run(tmp_path / "other", quiz([1, 0, 1, 0]), model="other", version=7)
    next(folder.glob("results_*")).unlink()
    found = pair(base, answers(folder))
    assert "no results file beside the samples" in found.remarks[0]


def test_versions_of_libraries_are_a_remark(tmp_path):
    runs = [
        answers(write_run(tmp_path / v, quiz([1]), model=v, transformers_version=v))
        for v in ("5.17.0", "5.24.0")
    ]
    assert pair(*runs).remarks == ["transformers_version differs: 5.17.0 / 5.24.0"]


def test_another_model_under_another_policy_is_a_remark(tmp_path):
    runs = [
        answers(write_run(tmp_path / name, quiz([1]), model=name, policy=policy))
        for name, policy in (("one", "fp32@1"), ("two", "nvfp4@1"))
    ]
    assert pair(*runs).remarks == ["another model than the base: one / two"]


def test_loglikelihoods_of_paired_documents(tmp_path):
    def run(name, shift, choices=2):
        pairs = [[str(-1.0 - c - shift), "False"] for c in range(choices)]
        lines = [sample(i, {"acc": 1}, filtered_resps=pairs, resps=[[p] for p in pairs]) for i in range(3)]
        return answers(write_run(tmp_path / name, lines, model=name))

    assert pair(run("a", 0.0), run("b", 0.25)).loglikelihood_change() == pytest.approx(0.25)
    with pytest.raises(InputError, match="2 log-likelihoods as in the base"):
        pair(run("c", 0.0), run("d", 0.0, choices=3)).loglikelihood_change()


@pytest.mark.filterwarnings("error")
def test_infinite_loglikelihoods_that_did_not_change(tmp_path):
    def run(name, *values):
        pairs = [[str(value), "False"] for value in values]
        lines = [sample(i, {"acc": 1}, filtered_resps=pairs, resps=[[p] for p in pairs]) for i in range(3)]
        return answers(write_run(tmp_path / name, lines, model=name))

    infinite = float("-inf")
    base = run("a", infinite, -1.0)
    assert pair(base, run("b", infinite, -1.5)).loglikelihood_change() == 0.25
    assert pair(base, run("c", -2.0, -1.0)).loglikelihood_change() == float("inf")


def test_characters_are_not_tokens(tmp_path, base):
    other = answers(write_run(tmp_path / "other", quiz([1] * 4, tokens=[5] * 4), model="other"))
    assert pair(base, other).of("length") is None
    assert pair(base, other).of("truncated") is None
    before, after = pair(base, other).of("answered")
    assert np.array_equal(before, after)


def test_records_without_prompt_hashes_compare_the_seed_of_the_shuffle(tmp_path):
    def run(name, seed, hashed):
        lines = quiz([1])
        if not hashed:
            del lines[0]["prompt_hash"]
        folder = write_run(tmp_path / name, lines, model=name)
        (run,) = read_runs(folder).values()
        run.results["configs"]["quiz"]["metadata"] = {"gpqa_seed": seed, "version": 1.0}
        return read_answers(run)

    assert pair(run("a", 0, True), run("b", 1, True)).missing == 0
    with pytest.raises(InputError, match="gpqa_seed: 0 / 1"):
        pair(run("c", 0, False), run("d", 1, False))
