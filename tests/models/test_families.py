"""Op calls are read as the recurrences that they are; packed rows are refused; other people's ops are served."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from quantlab.errors import InputError
from quantlab.models import families, run_with_policy
from quantlab.models.families import FAMILIES, register_family
from quantlab.models.handles import holding_of
from quantlab.models.interception import cache_keyword
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.recurrences import chunk, get_recurrence

OF_TRANSFORMERS = [family for family in FAMILIES if family.decodes is None]
BATCH, TOKENS, HEADS, KEY_HEADS, VALUE, KEY = 2, 21, 4, 2, 8, 16
# Sums of at most 21 tokens x 16 channels in float32 on values of up to about 10, in another order on each side:
# 10 * 2^-24 * sqrt(336) = 1.1e-5, twice for output and state.
CLOSE = 2e-5


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mamba2_call():
    x, dt = numbers(0, BATCH, TOKENS, HEADS, VALUE), numbers(1, BATCH, TOKENS, HEADS)
    b, c = numbers(2, BATCH, TOKENS, KEY_HEADS, KEY), numbers(3, BATCH, TOKENS, KEY_HEADS, KEY)
    a, d, bias = -numbers(4, HEADS).abs(), numbers(5, HEADS), numbers(6, HEADS)
    options = {"D": d, "dt_bias": bias, "dt_softplus": True, "return_final_states": True}
    state = numbers(7, BATCH, HEADS, VALUE, KEY)
    return mamba2.mamba2_chunk_scan, (x, dt, a, b, c, 8), options | {"initial_states": state}, state


def delta_call(op, gate_shape, heads):
    q, k = numbers(0, BATCH, TOKENS, heads, KEY), numbers(1, BATCH, TOKENS, heads, KEY)
    v = numbers(2, BATCH, TOKENS, HEADS, VALUE)
    g, beta = -numbers(3, BATCH, TOKENS, *gate_shape).abs(), numbers(4, BATCH, TOKENS, HEADS).sigmoid()
    state = numbers(7, BATCH, HEADS, KEY, VALUE)
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return op, (q, k, v), options | {"initial_state": state}, state


def mamba1_call():
    x, dt, z = (numbers(seed, BATCH, VALUE, TOKENS) for seed in range(3))
    b, c = numbers(3, BATCH, KEY, TOKENS), numbers(4, BATCH, KEY, TOKENS)
    a, d, bias = -numbers(5, VALUE, KEY).abs(), numbers(6, VALUE), numbers(7, VALUE)
    options = {"D": d, "z": z, "delta_bias": bias, "delta_softplus": True, "return_last_state": True}
    return mamba.mamba_selective_scan, (x, dt, a, b, c), options, torch.zeros(BATCH, VALUE, KEY)


CALLS = {
    "mamba2": mamba2_call,
    "gated_delta": lambda: delta_call(qwen.torch_chunk_gated_delta_rule, (HEADS,), HEADS),
    "kimi_delta": lambda: delta_call(kimi.chunk_kimi_delta_attention, (HEADS, KEY), HEADS),
    "mamba1": mamba1_call,
}


@pytest.mark.parametrize("family", OF_TRANSFORMERS, ids=lambda family: family.recurrence)
def test_a_chunk_is_read_as_the_op_computes_it(family):
    op, args, options, start = CALLS[family.recurrence]()
    outputs, final = op(*args, **options)
    call = family.chunk_inputs(None, *args, **options)
    assert call.state is options.get(family.prefill_state)
    rates = None if family.rates is None else family.rates(None, *args, **options)
    recurrence = get_recurrence(family.recurrence)
    state, read = chunk(recurrence, family.to_state(start), call.inputs, rates)
    ours, returned = call.finish(read, start)
    assert returned is start
    assert ours.shape == outputs.shape
    assert ours.dtype == outputs.dtype
    assert (ours - outputs).abs().max() < CLOSE
    assert (family.to_model(state) - final).abs().max() < CLOSE
    assert torch.equal(family.to_model(family.to_state(final)), final)
    assert family.key_heads(None, *args, **options) == call.inputs.k.shape[2]


@pytest.mark.parametrize("repeated", [False, True])
def test_key_heads_are_counted_before_they_are_repeated(repeated):
    """Some releases repeat keys to one per value head before the op; the module knows how many there are."""
    _, args, options, _ = delta_call(qwen.torch_chunk_gated_delta_rule, (HEADS,), HEADS)
    q, k, v = args
    q, k = (t[:, :, ::2].repeat_interleave(2, 2) if repeated else t[:, :, ::2] for t in (q, k))
    mixer = torch.nn.Module()
    mixer.num_k_heads = KEY_HEADS
    family = FAMILIES[1]
    assert family.key_heads(mixer, q, k, v, **options) == KEY_HEADS
    call = family.chunk_inputs(mixer, q, k, v, **options)
    assert call.inputs.k.shape == (BATCH, TOKENS, KEY_HEADS, KEY)
    expected = F.normalize(args[1][:, :, ::2], dim=-1)
    assert (call.inputs.k - expected).abs().max() < 1e-6  # eps of 1e-6 inside the root of a norm of about 16


@pytest.mark.parametrize("family", OF_TRANSFORMERS, ids=lambda family: family.recurrence)
@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_packed_rows_are_refused_by_name(family, name):
    _, args, options, _ = CALLS[family.recurrence]()
    with pytest.raises(InputError, match=f"^{name} .*one sequence a row"):
        family.chunk_inputs(None, *args, **options, **{name: torch.tensor([0, 4])})


def test_packed_rows_are_refused_in_a_prefill(tiny_qwen, ids):
    with (
        pytest.raises(InputError, match=r"^cu_seq_lens_q 'given'"),
        run_with_policy(tiny_qwen, "fp32@1"),
    ):
        tiny_qwen(ids[:1, :9], use_cache=True, cu_seq_lens_q=torch.tensor([0, 4, 9]))


@pytest.fixture(scope="module")
def tiny_qwen(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    from quantlab.models import build_tiny

    return AutoModelForCausalLM.from_pretrained(build_tiny("qwen3_5", tmp_path_factory.mktemp("qwen")))


def test_a_handle_is_float32_whatever_the_default(model, ids):
    """Some models cast their state to float32 before they give it to the cache; a real cast would lose the handle."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with run_with_policy(model, "fp32@1"):
            cache = DynamicCache(config=model.config)
            for past in (0, 5):
                model(
                    ids[:1, past : past + 5 - 4 * bool(past)], **{cache_keyword(model): cache}, use_cache=True
                )
            handle = cache.layers[0].recurrent_states[0]
            assert holding_of(handle) is not None
            assert holding_of(handle.to(torch.float32)) is holding_of(handle)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_without_any_state_can_be_repeated(model):
    with run_with_policy(model, "fp32@1"):
        LinearAttentionLayer().batch_repeat_interleave(2)
        model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, do_sample=False, pad_token_id=0)


@pytest.fixture
def third_party(monkeypatch):
    path = Path(__file__).with_name("third_party_model.py")
    spec = importlib.util.spec_from_file_location("somebody_elses_model", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def third_party_outputs(module, model, tokens):
    cache = module.new_cache()
    outputs = [model(tokens[:, :6], cache), *(model(tokens[:, t : t + 1], cache) for t in range(6, 20))]
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("registered", [False, True])
def test_a_model_declares_its_ops_in_its_own_file(third_party, registered, monkeypatch):
    if registered:
        monkeypatch.setattr(families, "FAMILIES", list(FAMILIES))
        register_family(third_party.QUANTLAB_FAMILIES[0])
        register_family(third_party.QUANTLAB_FAMILIES[0])  # a file that is imported twice
        monkeypatch.delattr(third_party, "QUANTLAB_FAMILIES")
    model = third_party.Model()
    tokens = numbers(0, 2, 20, 8)
    with torch.no_grad():
        stock = third_party_outputs(third_party, model, tokens)
        with run_with_policy(model, "fp32@4") as report:
            ours = third_party_outputs(third_party, model, tokens)
        with run_with_policy(model, "nvfp4@1"):
            rounded = third_party_outputs(third_party, model, tokens)
    assert (ours - stock).abs().max() < CLOSE
    assert (rounded - stock).abs().max() > 100 * CLOSE
    assert report.op_hits["their_step"] == {"0": 14, "1": 14}


def test_what_a_file_declares_wrongly_is_one_line(third_party):
    (family,) = third_party.QUANTLAB_FAMILIES
    third_party.QUANTLAB_FAMILIES = family
    with pytest.raises(InputError, match=r"^QUANTLAB_FAMILIES 'Family': expected a tuple of families in"):
        recurrent_layers(third_party.Model())
    third_party.QUANTLAB_FAMILIES = (replace(family, prefill_op="no_scan"),)
    with pytest.raises(InputError, match=r"^family 'no_scan': expected a prefill op that is a global of"):
        recurrent_layers(third_party.Model())


def test_a_model_whose_mixers_cannot_be_told_says_by_what(third_party):
    model = third_party.Model()
    for mixer in model.layers:
        mixer.decays = mixer.A_log
        del mixer.A_log
    with pytest.raises(
        InputError, match=r"^model 'Model': expected modules with an integer layer_idx and .* A_log"
    ):
        recurrent_layers(model)


@pytest.mark.parametrize("policy", ["fp32@1", "rules"])
def test_a_decay_that_heads_share_is_not_taken_for_one_head(third_party, policy, tmp_path):
    """Whose coverage and rules by head would be of heads that the state does not have."""
    if policy == "rules":
        policy = tmp_path / "rules.toml"
        policy.write_text('default = "fp32@1"\n[[rule]]\nheads = 0\npolicy = "nvfp4@1"\n')
    model = third_party.Model()
    model.layers[1].A_log = torch.nn.Parameter(torch.full((1,), -3.0))
    tokens = numbers(0, 2, 20, 8)
    said = (
        r"^A_log 'of 1 numbers at layer 1': expected one number for each of the 2 heads of the layer's state$"
    )
    with pytest.raises(InputError, match=said), torch.no_grad(), run_with_policy(model, policy):
        third_party_outputs(third_party, model, tokens)


def test_a_family_that_takes_known_ops_or_lacks_rates_is_refused(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", list(FAMILIES))
    known = FAMILIES[0]
    with pytest.raises(InputError, match=r"^family 'mamba2_chunk_scan'.*mamba2 has not taken"):
        register_family(replace(known, step_op="another_step"))
    with pytest.raises(InputError, match="rates exactly where"):
        register_family(replace(known, step_op="a", prefill_op="b", recurrence="mamba1"))
    with pytest.raises(InputError, match=r"^family 'mamba9'"):
        register_family(replace(known, step_op="a", prefill_op="b", recurrence="mamba9"))
    with pytest.raises(InputError, match=r"^family 'str'"):
        register_family("mamba2")
    assert families.FAMILIES == FAMILIES
