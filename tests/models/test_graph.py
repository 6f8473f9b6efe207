"""``DecodeGraph``: on a CPU its step run eagerly by the kernels' twins, and what it refuses; on a GPU the graph."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantlab.errors import InputError
from quantlab.models import DecodeGraph, build_tiny, run_with_policy
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.models.static_cache import grouped_attention
from quantlab.schemes.store import Diverged
from tests.models.architectures import ARCHITECTURES, decode

POOLED = [name for name, architecture in ARCHITECTURES.items() if architecture.family != "mamba1"]
FAST = ("falcon_h1",)
POLICIES = ("fp32@1", "fp16+sr/nvfp4@4")
PROMPT, STEPS = 5, 13
# As for the interception: logits of the tiny models are of order 10, and float32 sums run in another order.
SAME = 2e-5
TURNED = 0.2


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    models = {}

    def get(name):
        if name not in models:
            if name == "gated_delta of 16 values":
                models[name] = wider()
                return models[name]
            folder = build_tiny(name, tmp_path_factory.mktemp("graph") / name)
            models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return models[name]

    return get


def wider():
    """The tiny models of gated delta layers have 8 values a head, which no kernel serves."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from quantlab.models import live_recurrence

    torch.manual_seed(0)
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    heads: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_attention_heads": 4}
    dims: dict[str, Any] = {
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "head_dim": 16,
        "num_key_value_heads": 2,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 128,
    }
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(layer_types=kinds, **sizes, **heads, **dims)).eval()
    live_recurrence(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(5)
    return model


def tokens(batch=3, count=PROMPT + STEPS, seed=0):
    return torch.randint(3, 100, (batch, count), generator=torch.Generator().manual_seed(seed))


def forced(graph, ids):
    """Logits after the prompt and after each token behind it."""
    found = [graph.prefill(ids[:, :PROMPT]).clone()]
    return torch.stack(found + [graph.step(ids[:, t]).clone() for t in range(PROMPT, ids.shape[1])], 1)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in POOLED]
)
def test_steps_are_those_of_the_interception(built, name):
    """Three windows and a bit, then other sequences in the same memory.

    Float32 sums in another order let a few of the roundings fall to the other side, stochastic ones above all: what
    that does is a small part of what the policy does.
    """
    model, plain = built(name), {}
    for policy in POLICIES:
        graph = DecodeGraph(model, policy, 3, PROMPT + STEPS, seed=7)
        for seed in (0, 1):
            ids = tokens(seed=seed)
            with run_with_policy(model, policy, seed=7) as report:
                expected = decode(model, ids, PROMPT)
            effect = (expected - plain.setdefault(seed, expected)).abs().max()
            difference = (forced(graph, ids) - expected).abs().max()
            assert difference <= max(SAME, TURNED * effect)
            assert policy == "fp32@1" or effect > 10 * SAME
        assert graph.report.steps == STEPS
        assert graph.report.ledger == report.ledger
        assert set(graph.report.backends) == set(ARCHITECTURES[name].layers)


def test_a_policy_for_each_layer(built, tmp_path):
    model, ids, path = built("falcon_h1"), tokens(), tmp_path / "mixed.toml"
    path.write_text('default = "fp32@4"\n[[rule]]\nlayers = 1\npolicy = "fp8@1"\n')
    found = forced(DecodeGraph(model, path, 3, 20), ids)
    with run_with_policy(model, path):
        expected = decode(model, ids, PROMPT)
    assert ((found - expected).abs().amax((1, 2)) <= SAME).sum() >= 2
    assert (found - forced(DecodeGraph(model, "fp32@4", 3, 20), ids)).abs().max() > 10 * SAME


def test_generate_is_greedy(built):
    model, ids = built("falcon_h1"), tokens(count=PROMPT)
    graph = DecodeGraph(model, "fp32@4", 3, 20)
    found = graph.generate(ids, 9)
    logits = forced(graph, torch.cat([ids, found[:, :-1]], 1))
    assert torch.equal(found, logits.argmax(-1))


def test_generate_looks_at_the_length_before_it_reads(built, monkeypatch):
    """The last token is chosen and not read: 20 positions hold a prompt of 5 and 15 tokens, and give 16."""
    model, ids = built("falcon_h1"), tokens(count=PROMPT)
    graph = DecodeGraph(model, "fp32@4", 3, 20)
    assert graph.generate(ids, 16).shape == (3, 16)
    monkeypatch.setattr(graph, "prefill", None)
    with pytest.raises(InputError, match=r"^count 17: expected at most 16: .* 5 tokens in a length of 20$"):
        graph.generate(ids, 17)
    with pytest.raises(InputError, match=r"^ids \(2, 5\)"):
        graph.generate(ids[:2], 3)


@pytest.mark.parametrize(
    ("batch", "length"), [(10**12, 8), (2**62, 8), (10**30, 8), (2, 10**15), (2, 10**30)]
)
def test_sequences_that_no_memory_holds(built, batch, length):
    with pytest.raises(
        InputError, match=rf"^batch {batch}: expected .* of {length} tokens .* memory of cpu$"
    ):
        DecodeGraph(built("falcon_h1"), "fp32@4", batch, length)


def test_a_decay_that_heads_share_is_not_taken_for_one_head(built):
    model = copy.deepcopy(built("kimi_linear"))
    mixer = recurrent_layers(model)[1].module
    (part,) = (part for part in mixer.modules() if hasattr(part, "A_log"))
    part.A_log = torch.nn.Parameter(part.A_log.detach().flatten()[:1])
    with pytest.raises(
        InputError, match=r"^A_log 'of 1 numbers at layer 1': expected one number for each of "
    ):
        DecodeGraph(model, "fp32@1", 2, 8)


def test_a_fault_that_is_no_matter_of_memory_is_not_called_one(built, monkeypatch):
    def fails(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("quantlab.models.graph.static_cache", fails)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        DecodeGraph(built("falcon_h1"), "fp32@4", 2, 8)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused(built, copies):
    graph = DecodeGraph(built("falcon_h1"), "fp32@4", 2, 8)
    with pytest.raises(InputError, match=r"^DecodeGraph 'fp32@4': .*make another DecodeGraph$"):
        copies(graph)


def test_nothing_of_the_model_is_left_changed(built):
    model, ids = built("falcon_h1"), tokens()
    before = decode(model, ids, PROMPT)
    graph = DecodeGraph(model, "fp8@1", 3, 20)
    forced(graph, ids)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(decode(model, ids, PROMPT), before)


def test_what_was_never_written_is_never_seen(built):
    """A prompt of one token, in memory that holds NaN wherever a prefill need not write."""
    model, ids = built("falcon_h1"), tokens(count=4)
    graph = DecodeGraph(model, "fp32@4", 3, 20)
    for layer in graph.cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
        layer.conv_states[0].fill_(torch.nan)
    for pool in graph.pools.values():
        for memory in (pool.checkpoint, pool.k_buffer, pool.d_buffer, pool.log_decay_buffer):
            memory.fill_(torch.nan)
    found = [graph.prefill(ids[:, :1]).clone()] + [graph.step(ids[:, t]).clone() for t in range(1, 4)]
    with run_with_policy(model, "fp32@4"):
        expected = decode(model, ids, 1)
    assert (torch.stack(found, 1) - expected).abs().max() < SAME


def test_states_that_are_not_finite_are_noticed(built):
    model = built("kimi_linear")
    graph = DecodeGraph(model, "fp32@1", 2, 12)
    with torch.no_grad():
        kept = model.lm_head.weight[0, 0].clone()
        model.lm_head.weight[0, 0] = torch.inf
        try:
            with pytest.raises(Diverged, match=r"rows \[0, 1\]"):
                graph.generate(tokens(2, PROMPT), 3)
        finally:
            model.lm_head.weight[0, 0] = kept


@pytest.mark.parametrize("boolean", [True, False])
def test_grouped_attention_is_attention(boolean):
    """Against the definition in float64; sums of 12 and of 8 products in float32 around 1: 20 * 2^-24."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, n, 8, generator=draw) for h, n in ((6, 1), (3, 12), (3, 12)))
    seen = torch.arange(12) < torch.tensor([5, 12])[:, None]
    mask = seen[:, None, None] if boolean else torch.where(seen, 0.0, -torch.inf)[:, None, None]
    found, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    scores = torch.einsum("bgrd,bgld->bgrl", query.reshape(2, 3, 2, 8).double(), key.double()) * 0.3
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    expected = torch.einsum("bgrl,bgld->bgrd", weights, value.double()).reshape(2, 1, 6, 8)
    assert (found - expected).abs().max() < 40 * 2**-24


def test_what_is_refused(built, tmp_path):
    model = built("falcon_h1")
    for batch, length in ((0, 8), (2, 0), (True, 8), (2, -1)):
        with pytest.raises(InputError, match=r"^(batch|length) .*integer of at least 1"):
            DecodeGraph(model, "fp32@1", batch, length)
    with pytest.raises(InputError, match=r"^model 'mamba1 at layer 0'"):
        DecodeGraph(built("mamba"), "fp32@1", 1, 8)
    path = tmp_path / "heads.toml"
    path.write_text('default = "fp32@1"\n[[rule]]\nheads = 1\npolicy = "nvfp4@1"\n')
    with pytest.raises(InputError, match=r"^policy .*one policy for all heads"):
        DecodeGraph(model, path, 1, 8)
    graph = DecodeGraph(model, "fp32@1", 2, 4)
    with pytest.raises(InputError, match=r"block of the same model: leave nvfp4@1 first$"):  # noqa: SIM117
        with run_with_policy(model, "nvfp4@1"):
            DecodeGraph(model, "fp32@1", 2, 4)
    with pytest.raises(InputError, match=r"block of the same model: leave nvfp4@1 first$"):  # noqa: SIM117
        with run_with_policy(model, "nvfp4@1"):
            graph.prefill(tokens(2, 3))
    with pytest.raises(InputError, match=r"^step 'before any prompt'"):
        graph.step(torch.zeros(2, dtype=torch.long))
    for shape in ((3, 2), (2,), (2, 0), (2, 4)):
        with pytest.raises(InputError, match=r"^ids .*\(2, n\) with n from 1 to 3"):
            graph.prefill(torch.zeros(shape, dtype=torch.long))
    graph.prefill(tokens(2, 3))
    with pytest.raises(InputError, match=r"^tokens \(3,\)"):
        graph.step(torch.zeros(3, dtype=torch.long))
    graph.step(torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match=r"^length 4: expected at least 5"):
        graph.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "kimi_linear", "gated_delta of 16 values"])
def test_on_cuda_a_graph_is_the_step_of_the_cpu(built, runnable, name):
    """Two windows and a bit; another prompt in the same memory gives what it gave the first time."""
    import copy

    runnable("cuda")
    model, ids, plain = built(name), tokens(count=PROMPT + 11), None
    for policy in ("fp32@1", "fp32/nvfp4@4"):
        expected = forced(DecodeGraph(model, policy, 3, 20), ids)
        plain = expected if plain is None else plain
        with torch.backends.cudnn.flags(allow_tf32=False):  # of convolutions, which are float32 on the CPU
            graph = DecodeGraph(copy.deepcopy(model).cuda(), policy, 3, 20)
            found = forced(graph, ids.cuda()).cpu()
        effect = (expected - plain).abs().max()
        assert (found - expected).abs().max() <= max(10 * SAME, TURNED * effect)
        assert all("triton" in text for text in graph.report.backends.values())
        forced(graph, tokens(count=PROMPT + 4, seed=5).cuda())
        with torch.backends.cudnn.flags(allow_tf32=False):
            assert torch.equal(forced(graph, ids.cuda()).cpu(), found)


def test_a_graph_and_a_block_of_one_model_do_not_read_prompts_in_each_other(built):
    model, ids = built("mamba2"), tokens()
    graph = DecodeGraph(model, "fp32@4", batch=3, length=40)
    expected = forced(graph, ids)
    words = "^policy 'fp32@4': expected to be used outside of a block of the same model: leave nvfp4@1 first"
    graph.prefill(ids[:, :PROMPT])
    with run_with_policy(model, "nvfp4@1") as report:
        model.generate(ids[:, :PROMPT], max_new_tokens=3, do_sample=False, pad_token_id=0)
        hits = report.op_hits
        with pytest.raises(InputError, match=words):
            DecodeGraph(model, "fp32@4", batch=3, length=40)
        assert torch.equal(
            graph.step(ids[:, PROMPT]), expected[:, 1]
        )  # replaces what a block did, for a moment
        with pytest.raises(InputError, match=words):
            graph.prefill(ids[:, :PROMPT])
        assert report.op_hits == hits
    other: Any = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    with run_with_policy(other, "nvfp4@1"):
        assert torch.equal(forced(graph, ids), expected)
        other.generate(ids[:, :PROMPT], max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_two_threads_do_not_step_at_once(built):
    """Each would undo what the other has put into the model's file."""
    model, ids = built("mamba2"), tokens()
    graph = DecodeGraph(model, "fp32@4", batch=3, length=40)
    graph.prefill(ids[:, :PROMPT])
    found = []

    def elsewhere():
        try:
            graph.prefill(ids[:, :PROMPT])
        except InputError as error:
            found.append(str(error))

    def meanwhile(*_):
        hook.remove()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    hook = model.register_forward_pre_hook(meanwhile)
    graph.step(ids[:, PROMPT])
    assert found
    assert "one thread at a time: another is inside" in found[0]
    assert not [name for name, part in model.named_modules() if "forward" in vars(part)]


def test_an_interrupted_step_or_prefill_loses_the_sequences(built):
    model, ids = built("mamba2"), tokens()
    graph = DecodeGraph(model, "fp32@4", batch=3, length=40)

    def interrupt(*_):
        raise KeyboardInterrupt

    last = [m for m in model.modules() if getattr(m, "layer_idx", None) == 1][-1]
    for run in (lambda: graph.step(ids[:, PROMPT]), lambda: graph.prefill(ids[:, :3], at_once=1)):
        graph.prefill(ids[:, :PROMPT])
        hook = last.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run()
        hook.remove()
        with pytest.raises(InputError, match=r"^step 'before any prompt'"):
            graph.step(ids[:, PROMPT])


def test_tokens_and_models_that_a_graph_cannot_decode(built):
    model, ids = built("mamba2"), tokens()[:, :PROMPT]
    graph: Any = DecodeGraph(model, "fp32@4", batch=3, length=40)
    for given, words in (
        ([[1, 2]] * 3, "^ids 'list'"),
        (ids.float(), "^ids 'torch.float32': expected whole numbers"),
        (-ids, "^ids -.* vocabulary"),
        (ids + 5000, "^ids 5.* vocabulary"),
        (ids.to("meta"), "^ids 'on the meta device'"),
    ):
        with pytest.raises(InputError, match=words):
            graph.prefill(given)
    with pytest.raises(InputError, match=r"^at_once 0"):
        graph.prefill(ids, at_once=0)
    with pytest.raises(InputError, match=r"^count 0"):
        graph.generate(ids, 0)
    graph.prefill(ids)
    for given, words in (
        ([1, 2, 3], "^tokens 'list'"),
        (ids[:, 0].float(), "^tokens 'torch.float32': expected whole numbers"),
        (ids[:, 0] + 5000, "^tokens 5.* vocabulary"),
    ):
        with pytest.raises(InputError, match=words):
            graph.step(given)
    changed = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    graph = DecodeGraph(changed, "fp32@4", batch=3, length=40)
    graph.prefill(ids)
    changed.bfloat16()
    for run in (lambda: graph.prefill(ids), lambda: graph.step(ids[:, 0])):
        with pytest.raises(InputError, match=r"^model 'Mamba2ForCausalLM': .*make another DecodeGraph"):
            run()
