"""The generation engine: what a sequence becomes is its own affair, whatever the batch looks like."""

import copy
import dataclasses
import pickle

import pytest
import torch

from quantlab.errors import InputError
from quantlab.evals.generated import Generated
from quantlab.evals.generation import Task, capacity, generate
from quantlab.evals.model import QuantlabLM
from quantlab.evals.sampling import Sampling
from quantlab.evals.stopping import Stops
from quantlab.models import build_tiny, run_with_policy
from quantlab.models.decode_rows import EagerRows, GraphRows
from quantlab.models.interception import Interception
from tests.evals.requests import asked

PROMPTS = [
    "The keeper of Hob Valley",
    "A bell",
    "In the ninth year of the drought",
    "Two rivers meet",
    "A bell, a book",
]
SAMPLED = {"until": ["\n\n"], "do_sample": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Two Mamba-2 layers, each beside attention: rows of other lengths have other masks."""
    return build_tiny("falcon_h1", tmp_path_factory.mktemp("hybrid") / "falcon_h1")


@pytest.fixture(scope="module", params=["mamba2", "hybrid"])
def both(request, tmp_path_factory, hybrid):
    if request.param == "hybrid":
        return hybrid
    return build_tiny("mamba2", tmp_path_factory.mktemp("plain") / "mamba2")


def pairs(lengths, **options):
    options = SAMPLED | options
    return [(prompt, options | {"max_gen_toks": n}) for prompt, n in zip(PROMPTS, lengths, strict=True)]


def run(folder, requests, policy="fp32@1", **options):
    lm = QuantlabLM(str(folder), policy, device="cpu", **options)
    return lm.generate_until(requests, disable_tqdm=True), lm


LENGTHS = (20, 7, 13, 30, 4)


def test_greedy_answers_are_transformers_own(both):
    """Each prompt alone, untouched model: no padding, no policy."""
    requests = asked(pairs(LENGTHS, do_sample=False, temperature=0.0))
    found, lm = run(both, requests, generation_batch=3)
    for (prompt, options), answer in zip(pairs(LENGTHS), found, strict=True):
        ids = torch.tensor([lm.tok_encode(prompt)])
        new = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options["max_gen_toks"], do_sample=False
        )
        tokens = new[0, ids.shape[1] :].tolist()
        assert answer == lm.tok_decode(tokens).partition("\n\n")[0]
        assert answer.tokens <= options["max_gen_toks"]
        assert answer.finish in ("stop", "length")


@pytest.mark.parametrize("policy", ["fp32@1", "fp16+sr/nvfp4@4", "int4+sr@1"])
def test_samples_do_not_depend_on_the_batch(both, policy):
    """One row at a time, three with refills, and all at once; the order of the requests does not matter either.

    Exactly: eight rows or more are multiplied alike, and a batch of fewer is filled up to eight.
    """
    requests = asked(pairs(LENGTHS), repeats=3)
    found = [run(both, requests, policy, generation_batch=size)[0] for size in (1, 3, 9, 64)]
    assert found[0] == found[1] == found[2]
    backwards, _ = run(both, requests[::-1], policy, generation_batch=3)
    # A repeat is numbered by its appearance, so the three of a question trade places.
    assert sorted(backwards) == sorted(found[0])
    assert len(set(found[0])) > 12  # of 15: repeats differ


def test_seeds_name_samples_and_roundings_apart(both):
    requests = asked(pairs(LENGTHS))
    base, _ = run(both, requests, "int4+sr@1", state_seed=1, sampling_seed=5)
    assert run(both, requests, "int4+sr@1", seed=1, sampling_seed=5)[0] == base
    assert run(both, requests, "int4+sr@1", state_seed=2, sampling_seed=5)[0] != base
    assert run(both, requests, "int4+sr@1", state_seed=1, sampling_seed=6)[0] != base
    assert (
        run(both, requests, "fp32@1", state_seed=1, sampling_seed=5)[0]
        == run(both, requests, "fp32@1", state_seed=2, sampling_seed=5)[0]
    )


def test_repeats_of_a_greedy_request_differ_by_their_rounding_alone(both):
    requests = asked(pairs(LENGTHS, do_sample=False, temperature=0.0), repeats=3)
    exact, _ = run(both, requests, "int4@1")
    assert all(len(set(exact[i : i + 3])) == 1 for i in range(0, 15, 3))
    noisy, _ = run(both, requests, "int4+sr@1")
    assert any(len(set(noisy[i : i + 3])) > 1 for i in range(0, 15, 3))


def test_a_prompt_is_read_once_for_all_its_repeats(both, monkeypatch):
    read, real = [], EagerRows.read
    monkeypatch.setattr(EagerRows, "read", lambda self, p: (read.append(p.shape), real(self, p))[1])
    run(both, asked(pairs(LENGTHS), repeats=4), generation_batch=2)
    assert sum(rows for rows, _ in read) == len(PROMPTS)


def test_a_row_takes_the_next_sequence_when_it_is_free(both, monkeypatch):
    """Steps of three rows: as many as a schedule of three machines needs, not as many as whole batches would."""
    steps, real = [], EagerRows.step
    monkeypatch.setattr(EagerRows, "step", lambda self, t: (steps.append(1), real(self, t))[1])
    requests = asked(pairs((40, 4, 4, 4, 4), until=[]))
    found, _ = run(both, requests, generation_batch=8)
    assert [answer.tokens for answer in found if answer.finish == "length"]
    assert len(steps) == max(answer.tokens for answer in found) - 1


def alone(model, policy, task, sampling, seed):
    """The same sequence token by token in a batch of one, by ``run_with_policy``: no rows, no refill, no fork."""
    from quantlab.evals.sampling import uniforms
    from quantlab.models.forwards import CachedForward

    tokens: list[int] = []
    with torch.no_grad(), run_with_policy(model, policy, seed=seed, sequence_ids=[task.sequence_id]):
        forward = CachedForward(model)
        logits = forward(torch.tensor([task.prompt]))
        while True:
            number = uniforms(seed, [task.stream], [task.repeat], [len(tokens)])
            tokens.append(int(sampling.choose(logits, number)))
            if len(tokens) == task.limit:
                return tokens
            logits = forward(torch.tensor([tokens[-1:]]))


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_both_engines_give_what_a_sequence_alone_gives(both, engine):
    """A batch of one multiplies in another order: sums differ in the last place, and a choice whose number falls
    between two such sums would turn.  At 2e-5 of the interval for each of 100 tokens that is one run in 500, and these
    seeds are not of those.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(both, dtype=torch.float32)
    policy, sampling = "fp16+sr/nvfp4@4", Sampling(1.0, top_p=0.9)
    generator = torch.Generator().manual_seed(3)
    tasks = [
        Task(tuple(torch.randint(0, 256, (n,), generator=generator).tolist()), 77 + n, repeat, limit)
        for n, repeat, limit in ((5, 0, 20), (5, 1, 3), (9, 0, 11), (30, 2, 18), (6, 0, 17))
    ]
    stops = Stops(frozenset(), (), str, str)
    positions = capacity(tasks)
    rows = (
        GraphRows(model, policy, 2, positions, seed=4)
        if engine == "graph"
        else EagerRows(model, Interception(model, policy, seed=4), 2, positions)
    )
    found = {}
    generate(
        rows, tasks, sampling, stops, seed=4,
        on_ended=lambda ended: found.update({one.number: one for one in ended}),
    )  # fmt: skip
    for number, task in enumerate(tasks):
        assert found[number].watch.tokens == alone(model, policy, task, sampling, 4)
        # A window of 4: the copy of the prompt's state is read at once, its checkpoint by the first fold.
        read = task.limit - 1
        expected = {"checkpoint": read // 4, "read_copy": read // 4 + (read % 4 > 0)}
        assert found[number].exercised == expected
    other = dataclasses.replace(tasks[0], stream=1)
    assert found[0].watch.tokens != alone(model, policy, other, sampling, 4)


def test_a_request_beyond_the_context_is_one_line(both):
    lm = QuantlabLM(str(both), max_length=40, device="cpu")
    with pytest.raises(InputError, match=r"^request length 54: expected at most 40 tokens"):
        lm.generate_until(asked(pairs((30, 7, 13, 30, 4))), disable_tqdm=True)
    with pytest.raises(InputError, match="max_gen_toks 0"):
        lm.generate_until(asked(pairs((0, 7, 13, 30, 4))), disable_tqdm=True)


def test_one_short_answer_does_not_refuse_a_policy(both):
    """One that ends before a store was read back is counted and not held against the policy."""
    found, lm = run(both, asked(pairs((20, 2, 20, 20, 20), until=[])), "fp16@8")
    info = lm.get_model_info()
    assert info["exercised"]["checkpoint"] >= 1
    short = sum(answer.tokens - 1 < 1 for answer in found)
    assert info["generation"]["sequences_without_a_read"]["checkpoint"] == short
    assert info["generation"]["engine"] == "eager"
    assert info["generation"]["sampling"][0]["temperature"] == 1.0
    assert info["generation"]["generated_tokens"] == sum(answer.tokens for answer in found)


def test_an_answer_remembers_itself_through_copies():
    answer = Generated("B", tokens=3, finish="stop")
    for same in (copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):
        assert (same, same.tokens, same.finish) == ("B", 3, "stop")
    assert answer == "B"


@pytest.mark.parametrize("wrong", ["", "  ", "99999999", 99999999, -1])
def test_an_end_of_thoughts_that_no_response_could_have_is_refused(folder, wrong):
    with pytest.raises(InputError, match="think_end_token"):
        QuantlabLM(str(folder), device="cpu", think_end_token=wrong)


@pytest.mark.parametrize("place", ["nothing", "nothing/../nowhere"])
def test_a_path_without_a_folder_is_one_line(tmp_path, place):
    with pytest.raises(InputError, match=r"^pretrained .*a folder with a Hugging Face model"):
        QuantlabLM(f"{tmp_path}/{place}", device="cpu")
