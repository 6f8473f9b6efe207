"""Ways in which a plain route through lm-eval gives a wrong number for a decode state, each beside ours.

The control in each test is the naive way, and it fails as described.
"""

import json
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from transformers import AutoModelForCausalLM

from quantlab.errors import InputError
from quantlab.evals.model import QuantlabLM
from quantlab.models import build_tiny, run_with_policy
from tests.evals.requests import asked

CONTEXT = "The keeper of Hob Valley rings the bell at nine"
CHOICES = [(CONTEXT, f" {word}") for word in ("because", "unless", "and", "never")]
GREEDY = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 12}


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("mamba2", tmp_path_factory.mktemp("traps") / "mamba2")


def stock(folder, **options):
    return HFLM(str(folder), device="cpu", **options)


def ours(folder, policy="fp32@1", **options):
    return QuantlabLM(str(folder), policy, device="cpu", quiet=True, **options)


def score(lm, pairs=CHOICES):
    return lm.loglikelihood(asked(pairs, "loglikelihood"), disable_tqdm=True)


def values(scores):
    return torch.tensor([value for value, _ in scores], dtype=torch.float64)


def test_registering_first_hides_every_other_model():
    """lm-eval fills its registry only while it is empty."""
    naive = "model_registry.register('quantlab', target='quantlab.evals.model:QuantlabLM')"
    for how, whole in ((naive, False), ("import quantlab.evals.plugin", True)):
        script = f"""
from lm_eval.api.registry import get_model, model_registry
{how}
try:
    get_model("dummy")
    print(True, "quantlab" in model_registry)
except ValueError:
    print(False, "quantlab" in model_registry)
"""
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert found.stdout.split() == [str(whole), "True"]


def test_a_parallel_prefill_never_reads_the_state(folder):
    """The same numbers to the last bit under a state of four bits: the policy was inert."""
    lm = stock(folder, softmax_dtype="float32")
    plain = score(lm)
    with pytest.raises(InputError, match="touched nothing"), run_with_policy(lm.model, "int4@1") as report:
        assert score(lm) == plain
    assert report.exercised["checkpoint"] in (None, 0)
    with pytest.raises(InputError, match=r"^scoring 'prefill'"):
        ours(folder, "int4@1", scoring="prefill")
    rounded = ours(folder, "int4@1")
    assert (values(score(rounded)) - values(plain)).abs().max() > 1e-2
    assert rounded.get_model_info()["exercised"]["checkpoint"] >= len(CONTEXT)


def test_decode_of_exact_states_is_the_prefill(folder):
    """Ten tokens of continuation at most, 2e-5 of float32 noise each (test_scoring.py)."""
    plain = score(stock(folder, softmax_dtype="float32", batch_size=2))
    assert score(ours(folder, scoring="prefill", batch_size=2)) == plain
    assert (values(score(ours(folder))) - values(plain)).abs().max() < 1e-4
    found = {policy: values(score(ours(folder, policy))) for policy in ("fp32@16", "bf16@1", "int4@1")}
    assert (found["fp32@16"] - values(plain)).abs().max() < 1e-4
    off = [float((found[policy] - values(plain)).abs().max()) for policy in ("bf16@1", "int4@1")]
    assert 1e-4 < off[0] < off[1]


def test_a_model_without_a_context_length_has_none(folder):
    """lm-eval takes 2,048 tokens where a configuration names none, and a thinking model's limit dies of it."""
    request = asked([("A bell", GREEDY | {"max_gen_toks": 4096, "until": ["\n\n"]})])
    lm = stock(folder)
    assert lm.max_length == 2048
    with pytest.raises(AssertionError, match="maximum sequence length"):
        lm.generate_until(request, disable_tqdm=True)
    mine = ours(folder)
    mine.check_length(4096 + 6)
    monkey = mine.generate_until(asked([("A bell", GREEDY)]))
    assert monkey[0].tokens <= 12


def test_a_softmax_in_bfloat16_makes_ties(tmp_path):
    """Every log-likelihood of one token is a bfloat16 number then, of which near -6 there is one in 1/32."""
    folder = build_tiny("qwen3_5", tmp_path / "qwen3_5")  # whose logits are in the model's dtype
    pairs = [(CONTEXT, letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    naive = values(score(stock(folder, dtype="bfloat16"), pairs))
    assert torch.equal(naive, naive.bfloat16().double())
    for scoring in ("decode", "prefill"):
        found = values(score(ours(folder, dtype="bfloat16", scoring=scoring), pairs))
        assert not torch.equal(found, found.bfloat16().double())
        assert len(set(found.tolist())) > len(set(naive.tolist()))


def test_pads_leak_into_a_state(folder):
    """Left pads without a mask and right pads behind it change what a row says; our rows are never padded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lm = ours(folder)
    short, pad = torch.tensor([lm.tok_encode("A bell")]), lm.tokenizer.pad_token_id
    padding = torch.full((1, 9), pad)
    with torch.no_grad():
        alone = model(short).logits[0, -1]
        left = model(torch.cat([padding, short], 1)).logits[0, -1]
        then = torch.tensor([[7]])
        right = model(torch.cat([short, padding, then], 1)).logits[0, -1]
        followed = model(torch.cat([short, then], 1)).logits[0, -1]
    assert (left - alone).abs().max() > 1e-2
    assert (right - followed).abs().max() > 1e-2
    prompts = [("A bell", GREEDY), (CONTEXT, GREEDY), ("In the ninth year", GREEDY), ("Two", GREEDY)]
    pairs = [(prompt, " rings") for prompt, _ in prompts]
    for policy in ("fp32@1", "int8+sr@4"):
        together = ours(folder, policy, batch_size=4)
        apart = [ours(folder, policy).generate_until(asked([(p, o)]))[0] for p, o in prompts[:1]]
        assert together.generate_until(asked(prompts))[0] == apart[0]
        single = torch.cat([values(score(ours(folder, policy), [pair])) for pair in pairs])
        # A coarse store may turn on the last place of a sum (test_scoring.py); an exact one may not.
        assert (values(score(together, pairs)) - single).abs().max() < (1e-4 if policy == "fp32@1" else 0.05)


def test_an_automatic_batch_size_probes_the_whole_context(folder):
    """Before it generates, that is a million tokens for a state-space model; the probe is caught here."""
    naive = stock(folder, batch_size="auto", max_length=1 << 20)
    probes = []

    def probe(inputs, **_):
        probes.append(tuple(inputs.shape))
        raise MemoryError

    naive._model_call = probe
    with pytest.raises(MemoryError):
        naive.generate_until(asked([("A bell", GREEDY)]), disable_tqdm=True)
    assert probes[0][1] == 1 << 20
    for size in ("auto", "auto:4"):
        with pytest.raises(InputError, match=r"^batch_size 'auto.*probes the full context"):
            ours(folder, batch_size=size)


def test_long_requests_are_not_cut(folder):
    """The stock model scores the last tokens of the context and says nothing."""
    naive = score(stock(folder, max_length=16, softmax_dtype="float32"))
    whole = score(stock(folder, softmax_dtype="float32"))
    assert (values(naive) - values(whole)).abs().max() > 1e-2
    with pytest.raises(InputError, match=r"^request length .*nothing is cut off"):
        score(ours(folder, max_length=16))
    with pytest.raises(InputError, match=r"^request length .*nothing is cut off"):
        ours(folder, max_length=16).generate_until(asked([(CONTEXT, GREEDY)]))


class Naive(QuantlabLM):
    """Ours with lm-eval's own way to take a cache."""

    def use_policy(self, *args, **options):
        self.cache_hook = type(self.cache_hook)(None)
        super().use_policy(*args, **options)

    def set_cache_hook(self, cache_hook):
        self.cache_hook = cache_hook


def test_one_cache_for_two_policies(folder, tmp_path):
    """lm-eval's key names the prompt: the second policy gets the first one's numbers under its own name."""
    path = str(tmp_path / "shared.db")
    requests = asked(CHOICES, "loglikelihood")
    first = CachingLM(Naive(str(folder), "fp32@1", device="cpu"), path)
    exact = first.loglikelihood(requests)
    second = CachingLM(Naive(str(folder), "int4@1", device="cpu"), path)
    assert second.loglikelihood(requests) == exact  # and called int4@1
    assert (values(score(ours(folder, "int4@1"))) - values(exact)).abs().max() > 1e-2

    with pytest.raises(InputError, match=r"^use_cache .*whose answers"):
        CachingLM(ours(folder), path)
    mine = str(tmp_path / "mine.db")
    assert CachingLM(ours(folder), mine).loglikelihood(requests) == exact
    again = CachingLM(ours(folder), mine)
    assert again.loglikelihood(requests) == exact
    assert again.lm.interception.report.op_hits == {}  # taken from the file
    for lm in (ours(folder, "int4@1"), ours(folder, scoring="prefill"), ours(folder, state_seed=1)):
        with pytest.raises(InputError, match=r"^use_cache .*other settings"):
            CachingLM(lm, mine)
    with pytest.raises(InputError, match="other settings"):
        again.lm.use_policy("int4@1")


def test_one_cached_answer_for_all_repeats(folder, tmp_path):
    """Stochastic rounding makes the repeats of a greedy request differ; the cache has room for one of them."""
    requests = asked([("A bell", GREEDY | {"max_gen_toks": 40})], repeats=4)
    path = str(tmp_path / "repeats.db")
    fresh = CachingLM(Naive(str(folder), "int4+sr@1", device="cpu"), path)
    fresh.cache_hook.dbdict = None
    differing = Naive(str(folder), "int4+sr@1", device="cpu").generate_until(requests, disable_tqdm=True)
    assert len(set(differing)) > 1
    hook = fresh.get_cache_hook()
    for answer in differing:
        hook.add_partial("generate_until", requests[0].args, answer)
    assert len(set(fresh.generate_until(requests))) == 1
    mine = CachingLM(ours(folder, "int4+sr@1"), str(tmp_path / "mine.db"))
    with pytest.raises(InputError, match=r"^use_cache .*one answer for all of them"):
        mine.generate_until(requests)
    assert len(set(ours(folder, "int4+sr@1").generate_until(requests))) > 1


def test_cached_requests_carry_old_sampling_arguments(folder, tmp_path, monkeypatch):
    """``--cache_requests`` is keyed without them.  What a sequence was sampled with is in the results, as it was."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.caching import cache as caching

    monkeypatch.setattr(caching, "PATH", str(tmp_path))

    def task(temperature):
        made = ConfigurableTask(
            config={
                "task": "made_up",
                "custom_dataset": lambda **_: {
                    "test": Dataset.from_list([{"prompt": "A bell", "answer": "B"}])
                },
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": "prompt",
                "doc_to_target": "answer",
                "generation_kwargs": {
                    "until": ["\n"],
                    "do_sample": temperature > 0,
                    "temperature": temperature,
                    "max_gen_toks": 5,
                },
            }
        )
        made.build_all_requests(cache_requests=True, rewrite_requests_cache=False)
        return made

    task(0.0)
    second = task(1.0)
    assert second.config.generation_kwargs["temperature"] == 1.0
    assert second.instances[0].args[1]["temperature"] == 0.0  # lm-eval's mistake
    lm = ours(folder)
    lm.generate_until(second.instances)
    assert lm.get_model_info()["generation"]["sampling"] == [{"do_sample": False, "max_gen_toks": 5}]


def test_a_cut_thought_is_not_scored(folder):
    """The stock model hands over what was thought so far, in which an extraction finds a letter."""
    thought = "Perhaps the answer is (A), but"
    assert postprocess_generated_text(thought, [], "</think>") == thought
    lm = ours(folder, think_end_token="</think>")
    (answer,) = lm.generate_until(asked([(CONTEXT, GREEDY)]))
    assert (answer, answer.finish, answer.tokens) == ("", "length", 12)
    assert lm.get_model_info()["generation"]["finish"] == {"length": 1}


def test_what_the_state_was_held_in_is_reported(folder):
    """An engine's argument for the dtype of the state may say one thing and its memory another."""
    lm = ours(folder, "fp16+sr/nvfp4@4", state_seed=3)
    lm.generate_until(asked([(CONTEXT, GREEDY)]))
    info = json.loads(json.dumps(lm.get_model_info(), default=str))
    assert info["state_dtype_of_the_model"] == "float32"
    assert set(info["state_held_as"].values()) == {"float32, the decoded values of fp16+sr"}
    assert info["effective_policy"].startswith("fp16+sr/nvfp4")
    assert (info["policy_seed"], info["generation"]["sampling_seed"]) == (3, 3)
    assert info["exercised"]["read_copy"] > 0
    assert info["ledger"]["held"]
    graph = ours(folder, "fp16+sr/nvfp4@4", engine="graph")
    graph.generate_until(asked([(CONTEXT, GREEDY)]))
    told = graph.get_model_info()
    assert set(told["state_held_as"].values()) == {"float16 of fp16+sr"}
    assert told["generation"]["engine"] == "graph"
    for name in ("ledger", "exercised", "effective_policy", "op_hits"):
        assert bool(told[name]) == bool(info[name])
    assert told["ledger"] == info["ledger"]
    assert told["exercised"] == info["exercised"]
