"""What a cache does with its layers, done to the decode states behind the handles: chunks, resets, moves."""

import gc

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import LinearAttentionLayer

from quantlab.models import run_with_policy
from quantlab.models.handles import holding_of
from quantlab.models.interception import Interception, decode_states

from .decoding import EACH, SAME, forward, new_cache, step_by_step


def test_a_chunk_of_a_prompt_is_one_store_more(model, ids):
    """What was exercised before it still counts, and it draws random bits of its own."""
    with run_with_policy(model, "fp16+sr/nvfp4@1:flush_read=copy") as report:
        cache = new_cache(model)
        forward(model, ids[:, :5], cache)
        step_by_step(model, ids[:, 5:9], cache)  # reads stores 0 to 3, leaves store 4
        forward(model, ids[:, 9:15], cache)  # reads the checkpoint of store 4, leaves store 5 in both copies
        states = decode_states(cache).values()
        assert [state.save()["checkpoint.numbers"].tolist() for state in states] == [[5, 5, 5]] * len(states)
        assert [state.cursor.tolist() for state in states] == [[0, 0, 0]] * len(states)
        step_by_step(model, ids[:, 15:17], cache)  # reads stores 5 and 6
    # A chunk continues from the checkpoint and reads no copy: of store 4 nobody reads that.
    assert report.exercised == {"checkpoint": 4 + 1 + 2, "read_copy": 4 + 2}


def test_rounding_at_a_chunk_boundary_is_the_checkpoints_own(model, ids):
    """A prompt in two chunks stores twice: the second chunk continues from what the first one's store decodes to."""
    with run_with_policy(model, "bf16@4"):
        whole, halves = new_cache(model), new_cache(model)
        forward(model, ids[:, :14], whole)
        forward(model, ids[:, :7], halves)
        forward(model, ids[:, 7:14], halves)
        difference = [
            (a.materialize() - b.materialize()).abs().max() / b.materialize().abs().max()
            for a, b in zip(decode_states(halves).values(), decode_states(whole).values(), strict=True)
        ]
        step_by_step(model, ids[:, 14:15], halves)
    # One rounding more, of at most 2^-9, decays on the way; a second rounding to bfloat16 adds its own.
    assert 0 < difference[0] < 2 * 2**-8


@EACH
def test_a_reset_cache_starts_over_and_lets_its_states_go(model, ids):
    interception = Interception(model, "int8@4")

    def read(cache):
        forward(model, ids[:, :9], cache)
        step_by_step(model, ids[:, 9:14], cache)
        return [state.materialize() for state in decode_states(cache).values()]

    with interception:
        cache = new_cache(model)
        first = read(cache)
        assert len(interception.living()) == 2
        cache.reset()
        gc.collect()
        assert decode_states(cache) == {}
        assert interception.living() == []
        # Logits would tell how a release resets its attention layer, which comes behind both.
        assert all(torch.equal(a, b) for a, b in zip(first, read(cache), strict=True))
    interception.require_effect()


def test_moved_handles_stay_handles(model, ids, monkeypatch):
    """Offloading makes other tensors, as between two devices; the decode state itself stays where it is."""
    with run_with_policy(model, "int8@4"):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        expected = step_by_step(model, ids[:, 9:14], cache)

    def moved(self):
        for states in (self.conv_states, self.recurrent_states):
            states.update({number: state.clone() for number, state in states.items()})

    monkeypatch.setattr(LinearAttentionLayer, "offload", moved)
    monkeypatch.setattr(LinearAttentionLayer, "prefetch", moved)
    with run_with_policy(model, "int8@4"):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        for layer in cache.layers[:2]:
            before = layer.recurrent_states[0]
            layer.offload()
            layer.prefetch()
            assert layer.recurrent_states[0] is not before
            assert holding_of(layer.recurrent_states[0]) is holding_of(before)
        assert torch.equal(step_by_step(model, ids[:, 9:14], cache), expected)


def test_a_static_cache_holds_handles_too(model, ids):
    stock, cache = (StaticCache(config=model.config, max_cache_len=32) for _ in range(2))
    expected = forward(model, ids[:, :9], stock)[:, -1:], step_by_step(model, ids[:, 9:14], stock)
    with run_with_policy(model, "fp32@4"):
        found = forward(model, ids[:, :9], cache)[:, -1:], step_by_step(model, ids[:, 9:14], cache)
        assert len(decode_states(cache)) == 2
        assert cache.is_compileable == stock.is_compileable  # masks depend on it
        # generate compiles what runs on a static cache, and a handle would not survive that.
        options = model.generation_config
        assert not model._valid_auto_compile_criteria({"cache": cache, "past_key_values": cache}, options)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < SAME


@pytest.mark.parametrize("policy", ["fp32@1", "fp32@4"])
def test_beams_that_are_reordered_are_recomputed_ones(model, ids, policy):
    """Rows that swap, repeat and die in the middle of a window: the stock model on the sequences that they then are."""
    rows = torch.tensor([1, 1, 2])
    with run_with_policy(model, policy):
        cache = new_cache(model)
        forward(model, ids[:, :7], cache)
        step_by_step(model, ids[:, 7:13], cache)
        cache.reorder_cache(rows)
        found = step_by_step(model, ids[:, 13:19], cache)
    sequences = torch.cat([ids[rows, :13], ids[:, 13:19]], 1)
    stock = new_cache(model)
    forward(model, sequences[:, :7], stock)
    expected = step_by_step(model, sequences[:, 7:19], stock)[:, 6:]
    assert (found - expected).abs().max() < SAME
