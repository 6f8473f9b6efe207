"""A policy reaches every decode step of a Hugging Face model, and fp32 policies change nothing."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.models import run_with_policy
from quantlab.models.families import FAMILIES
from quantlab.models.interception import cache_keyword, decode_states, reset_rows, select_rows
from quantlab.schemes import DecodeState

from .decoding import EACH

PROMPT = 7
# Logits are of order 8 and pass through two recurrent layers.  Both sides compute in float32 and differ in
# the order of sums only: state sums of 32 to 44 terms and matrix products of 32 to 64 terms, each a
# relative 2^-24 * sqrt(64) = 5e-7 in the worst case, on 8: 4e-6 a layer; replay over a window re-associates
# once more.  Both layers and both effects: 2e-5.
SAME = 2e-5
# With window 4, a prompt of 7 and a fork after 19 tokens, the fork falls just behind a flush and QUIET
# steps pass before the next one.  Up to the fork both runs do the same sums on the same batch; the quiet
# steps round nothing, so they agree to SAME.  Later the order of sums inside products, which follows the
# batch size, may land a value on the other side of a rounding step: the typical logit then moves by a step
# of the format, far less than by another row's state.
FORK, QUIET, ROUNDING = 19, 3, 1e-2


def assert_rows_agree(moved, alone):
    difference = (moved - alone).abs()
    assert difference[:, :QUIET].max() < SAME
    assert difference.median() < ROUNDING
    assert (moved - alone.flip(0)).abs()[:, :QUIET].max() > 1  # what rows in the wrong place look like


@torch.no_grad()
def decode(model, ids, cache=None, prompt=PROMPT):
    """Teacher-forced logits after each token from ``prompt`` on: (B, T - prompt + 1, vocabulary)."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    keywords = {cache_keyword(model): cache, "use_cache": True}
    logits = [model(ids[:, :prompt], **keywords).logits[:, -1]] if prompt else []
    logits += [model(ids[:, t : t + 1], **keywords).logits[:, -1] for t in range(prompt, ids.shape[1])]
    return torch.stack(logits, 1)


@pytest.mark.parametrize("policy", ["fp32@1", "fp32@16", "fp32/fp32@16"])
def test_unrounded_policies_reproduce_the_stock_model(model, ids, policy):
    with run_with_policy(model, policy):
        ours = decode(model, ids)
        tokens = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert (ours - decode(model, ids)).abs().max() < SAME
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=24, do_sample=False))


def test_a_recurrence_without_its_decay_is_noticed(model, ids, monkeypatch):
    step = DecodeState.step
    no_decay = lambda self, inputs: step(self, replace(inputs, log_decay=torch.zeros_like(inputs.log_decay)))  # noqa: E731
    monkeypatch.setattr(DecodeState, "step", no_decay)
    with run_with_policy(model, "fp32@1"):
        ours = decode(model, ids)
    # 37 steps without a decay of about 0.9 each: nothing near the rounding of the test above.
    assert (ours - decode(model, ids)).abs().max() > 1e-2


def test_everything_is_restored_even_after_an_exception(model, ids):
    namespaces = {
        vars(__import__("sys").modules[type(part).__module__])["__name__"] for part in model.modules()
    }
    modules = [__import__("sys").modules[name] for name in namespaces]
    ops = [op for family in FAMILIES for op in (family.step_op, family.prefill_op)]

    def seams():
        hooks = sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())
        return [vars(m).get(op) for m in modules for op in ops], dict(vars(LinearAttentionLayer)), hooks

    before, logits = seams(), decode(model, ids)

    def fail_inside():
        with run_with_policy(model, "nvfp4@1"):
            assert seams() != before
            decode(model, ids)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert seams() == before
    assert torch.equal(decode(model, ids), logits)


def test_rounded_policies_change_the_logits_and_the_report_says_how_often(model, ids):
    stock = decode(model, ids)
    with run_with_policy(model, "fp16/nvfp4@4") as report:
        ours = decode(model, ids)
    assert (ours - stock).abs().max() > 1e-3
    steps = ids.shape[1] - PROMPT
    hits = report.op_hits
    (family,) = [family for family in FAMILIES if family.step_op in hits]
    assert hits == {family.step_op: {"0": steps, "1": steps}, family.prefill_op: {"0": 1, "1": 1}}
    # 37 steps with window 4: the hand-off is read, then each of the 9 flushes' stores, the last one by step
    # 37.
    assert report.exercised["checkpoint"] == 9
    assert report.exercised["read_copy"] == 10
    assert report.state_dtype == "float32"
    assert report.effective_policy.startswith("fp16/nvfp4@4:buffer=fp32")
    assert report.policy == "fp16/nvfp4@4"
    assert sum(report.conv_bytes.values()) > 0


def test_the_ledger_is_the_sum_over_layers(model, ids):
    with run_with_policy(model, "fp32@1") as report:
        cache = DynamicCache(config=model.config)
        decode(model, ids, cache)
        states = decode_states(cache)
    values = sum(state.shape.values for state in states.values())
    assert len(states) == 2
    # fp32@1 reads and writes 4 bytes for each state element and each token.
    assert report.ledger.bytes_per_token == 2 * 4 * values
    assert report.as_dict()["bits_per_value"] == 32


def test_a_prefill_state_is_rounded_once_into_every_copy(model, ids):
    with run_with_policy(model, "fp32@1") as exact:
        dense = DynamicCache(config=model.config)
        decode(model, ids[:, :PROMPT], dense)
        reference = {layer: state.materialize() for layer, state in decode_states(dense).items()}
        decode(model, ids[:, PROMPT:], dense, prompt=0)
    assert exact.exercised["checkpoint"]
    with run_with_policy(model, "bf16/nvfp4@8"):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :PROMPT], cache)
        for layer, state in decode_states(cache).items():
            checkpoint = state.policy.checkpoint.round(reference[layer])
            copy = parse("nvfp4").round(checkpoint)
            if layer == 0:  # deeper layers' inputs are equal too: a prefill never reads a store
                assert not torch.equal(checkpoint, reference[layer])
            assert torch.equal(state.materialize(), checkpoint)
            assert torch.equal(state.read_state(), copy)
        decode(model, ids[:, PROMPT:], cache, prompt=0)


def test_blocks_run_along_the_key_dim(model, ids, kind):
    shapes = {
        "mamba2": (4, 16, 32),
        "gated_delta": (4, 8, 32),
    }  # heads, value dim, key dim of the tiny models
    with run_with_policy(model, "fp32@1"):
        cache = DynamicCache(config=model.config)
        decode(model, ids, cache)
        for state in decode_states(cache).values():
            assert tuple(state.materialize().shape) == (len(ids), *shapes[kind])
            assert state.shape.key_heads == 2


def test_a_chunk_after_decoded_tokens_continues_from_the_stored_state(model, ids):
    with run_with_policy(model, "fp32@16"):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :20], cache)
        again = decode(model, ids[:, 20:], cache, prompt=9)
    assert (again - decode(model, ids)[:, -again.shape[1] :]).abs().max() < SAME


@pytest.mark.parametrize("policy", ["nvfp4@4", "fp16+sr/int8@4"])
def test_forked_rows_decode_as_if_they_had_never_shared_a_batch(model, ids, policy):
    rows = torch.tensor([2, 0, 0, 1])
    with run_with_policy(model, policy, sequence_ids=[5, 6, 7]):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :FORK], cache)
        select_rows(cache, rows)
        forked = decode(model, ids[rows, FORK:], cache, prompt=0)
    with run_with_policy(model, policy, sequence_ids=[5, 6, 7]):
        alone = decode(model, ids)[rows, -forked.shape[1] :]
    assert_rows_agree(forked, alone)


@EACH
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 1]), [2, 1]),
    ],
)
def test_cache_batch_methods_move_the_states(model, ids, method, argument, rows):
    with run_with_policy(model, "int8@4"):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :FORK], cache)
        getattr(cache, method)(argument)
        moved = decode(model, ids[rows, FORK:], cache, prompt=0)
    with run_with_policy(model, "int8@4"):
        alone = decode(model, ids)[rows, -moved.shape[1] :]
    assert_rows_agree(moved, alone)


@EACH
def test_a_copied_cache_is_a_fork(model, ids):
    with run_with_policy(model, "int8@4"):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :18], cache)
        copy = deepcopy(cache)
        first = decode(model, ids[:, 18:], cache, prompt=0)
        assert torch.equal(decode(model, ids[:, 18:], copy, prompt=0), first)


def test_a_reset_row_starts_a_new_sequence(model, ids, kind):
    with run_with_policy(model, "int8@4"):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :18], cache)
        if kind == "gated_delta":  # its attention rows share one length
            with pytest.raises(InputError, match="recurrent layers only"):
                reset_rows(cache, torch.tensor([1]))
            decode(model, ids[:, 18:20], cache, prompt=0)
            return
        reset_rows(cache, torch.tensor([1]))
        states = decode_states(cache)
        assert all(not state.materialize()[1].any() for state in states.values())
        assert all(state.materialize()[0].any() for state in states.values())
        after = decode(model, ids[:, 18:], cache, prompt=0)[1]
    with run_with_policy(model, "int8@4"):
        fresh = decode(model, ids[1:2, 18:], prompt=1)[0]
    # The fresh run's first token goes through the prefill op and is rounded there; the reset row's first
    # token waits in the window.  Under int8 that is a difference of one rounding, so compare the first
    # token only, which saw neither.
    assert (after[0] - fresh[0]).abs().max() < SAME


def test_stochastic_rounding_follows_the_sequence_not_the_slot(model, ids):
    def run(rows, names):
        with run_with_policy(model, "fp16+sr@1", seed=3, sequence_ids=names):
            return decode(model, ids[rows])

    plain, swapped = run([0, 1], [11, 12]), run([1, 0], [12, 11])
    assert (plain[[1, 0]] - swapped).abs().max() < SAME
    assert (plain - run([0, 1], [12, 11])).abs().max() > 10 * SAME


def test_a_policy_that_touched_nothing_is_an_error(model, ids):
    with pytest.raises(InputError, match="touched nothing"), run_with_policy(model, "nvfp4@1"):
        model(ids, use_cache=False)


def test_a_cache_from_outside_is_refused(model, ids):
    cache = DynamicCache(config=model.config)
    decode(model, ids[:, :9], cache)
    with pytest.raises(InputError, match="from outside the block"), run_with_policy(model, "nvfp4@1"):
        decode(model, ids[:, 9:], cache, prompt=0)


@pytest.mark.parametrize("kind", ["mamba2"], indirect=True)
def test_a_printed_report_says_what_happened(model, ids):
    with run_with_policy(model, "fp16/nvfp4@4") as report:
        assert str(report).splitlines() == [
            "policy: fp16/nvfp4@4",
            "no decode step in layers 0-1",
            "exercised: nothing",
        ]
        decode(model, ids)
    assert str(report).splitlines() == [
        "policy: fp16/nvfp4@4",
        "mamba2_chunk_scan: 1 call(s) in layers 0-1",
        "mamba2_selective_state_update: 37 call(s) in layers 0-1",
        "exercised: checkpoint 9, read copy 10",
        f"bytes per token: {report.ledger.bytes_per_token:,.0f}",
    ]


@EACH
def test_another_model_of_the_same_file_is_left_alone(model, ids):
    other = deepcopy(model)
    stock = decode(other, ids)
    with run_with_policy(model, "nvfp4@1") as report:
        assert torch.equal(decode(other, ids), stock)
        assert not report.op_hits
        decode(model, ids)


def test_models_that_no_adapter_serves_are_refused():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.zamba.modeling_zamba import ZambaRMSNorm

    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    llama = LlamaForCausalLM(
        LlamaConfig(**small, num_attention_heads=1, num_key_value_heads=1, intermediate_size=16)
    )
    for net, words in (
        (llama, "recurrent layers"),
        (ZambaRMSNorm(8), "head by head"),
    ):
        with pytest.raises(InputError, match=words), run_with_policy(net, "fp32@1"):
            pass
