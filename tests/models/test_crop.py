"""Caches that record their past: drafts are verified at once and taken back, and what is left is as if recomputed."""

from copy import deepcopy

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import run_with_policy
from quantlab.models.interception import cache_keyword, decode_states

from .decoding import SAME, forward, new_cache, step_by_step

PROMPT = 5


def recording(model, ids, *, prompt=PROMPT):
    """A cache that holds a prompt and records from there on."""
    cache = new_cache(model)
    forward(model, ids[:, :prompt], cache)
    cache.activate_past_recording()
    return cache


def stock_logits(model, ids):
    """Of every token, read one at a time behind the prompt, as the decode state reads them."""
    cache = new_cache(model)
    return torch.cat([forward(model, ids[:, :PROMPT], cache), step_by_step(model, ids[:, PROMPT:], cache)], 1)


def cursors(cache):
    return {int(n) for state in decode_states(cache).values() for n in state.cursor}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("policy", ["fp32@4", slow("fp32@1"), slow("fp32/fp32@4:flush=early")])
def test_every_crop_at_every_cursor_is_recomputation(model, ids, policy):
    """Forwards of 1 to 4 tokens, of which the last n are wrong and taken back: the logits are the stock model's."""
    stock = stock_logits(model, ids)
    visited, at = set(), PROMPT
    with run_with_policy(model, policy):
        cache = recording(model, ids)
        plan = [(count, wrong) for count in (1, 2, 3, 4) for wrong in range(count + 1)]
        for count, wrong in plan + plan[::-1]:
            tokens = ids[:, at : at + count].clone()
            right = count - wrong
            if at + right > ids.shape[1] or tokens.shape[1] < count:
                break
            tokens[:, right:] = (tokens[:, right:] + 1) % 256
            visited.add((*cursors(cache), wrong))
            logits = forward(model, tokens, cache)
            if right:
                assert (logits[:, :right] - stock[:, at : at + right]).abs().max() < SAME
            cache.crop(-wrong)
            at += right
        assert all(not bool(state.pending.any()) for state in decode_states(cache).values())
    assert len(visited) >= {"fp32@1": 5, "fp32@4": 12, "fp32/fp32@4:flush=early": 8}[policy]


def test_single_steps_are_taken_back_as_far_as_the_window_goes(model, ids):
    """Forwards that later ones followed are in reach until a flush folds them."""
    stock = stock_logits(model, ids)
    with run_with_policy(model, "fp32@8"):
        for back in (0, 4, 7):
            cache = recording(model, ids)
            step_by_step(model, ids[:, PROMPT : PROMPT + 7], cache)
            cache.crop(-back)
            at = PROMPT + 7 - back
            again = step_by_step(model, ids[:, at : at + 9], cache)
            assert (again - stock[:, at : at + 9]).abs().max() < SAME
        cache = recording(model, ids)
        step_by_step(
            model, ids[:, PROMPT : PROMPT + 10], cache
        )  # the ninth accepted the eighth, which was a flush
        with pytest.raises(InputError, match=r"^crop '3 tokens at layer 0': expected at most 2: "):
            cache.crop(-3)


def test_a_crop_that_cannot_be_done_changes_nothing(model, ids):
    with run_with_policy(model, "fp32@2"):
        cache = recording(model, ids)
        forward(model, ids[:, PROMPT : PROMPT + 3], cache)
        untouched = deepcopy(cache)
        with pytest.raises(InputError, match=r"^crop '4 tokens at layer 0': expected at most 3"):
            cache.crop(-4)
        cache.crop(-1)
        untouched.crop(-1)
        tokens = ids[:, PROMPT + 2 : PROMPT + 4]
        assert torch.equal(forward(model, tokens, cache), forward(model, tokens, untouched))
        with pytest.raises(RuntimeError, match="negative"):  # what transformers says
            cache.crop(1)


def test_windows_of_different_length_crop_together_or_not_at_all(model, ids, tmp_path):
    """The second layer has folded what the first could take back: neither, nor the attention behind them, moves."""
    rules = tmp_path / "rules.toml"
    rules.write_text('default = "fp32@8"\n[[rule]]\nlayers = 1\npolicy = "fp32@2"\n')
    with run_with_policy(model, rules):
        cache = recording(model, ids)
        step_by_step(model, ids[:, PROMPT : PROMPT + 5], cache)
        lengths = [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "keys")]
        before = {n: s.save() if not s.pending.any() else s.reach for n, s in decode_states(cache).items()}
        with pytest.raises(InputError, match="at layer 1"):
            cache.crop(-4)
        after = {n: s.save() if not s.pending.any() else s.reach for n, s in decode_states(cache).items()}
        assert all(torch.equal(after[n], before[n]) for n in before)
        assert [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "keys")] == lengths


def test_only_a_recording_cache_can_be_cropped(model, ids):
    with run_with_policy(model, "fp32@4"):
        cache = new_cache(model)
        forward(model, ids[:, :PROMPT], cache)
        assert not cache.is_croppable
        step_by_step(model, ids[:, PROMPT : PROMPT + 2], cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.layers[0].crop(-1)
        cache.activate_past_recording()
        assert cache.is_croppable
        # The convolution has not kept what was read before.
        with pytest.raises(InputError, match="expected at most 0"):
            cache.crop(-1)
        step_by_step(model, ids[:, PROMPT + 2 : PROMPT + 3], cache)
        cache.crop(0)
        with pytest.raises(InputError, match="expected at most 0"):
            cache.crop(-1)


def test_recording_that_is_switched_off_keeps_what_was_read(model, ids):
    stock = stock_logits(model, ids)
    with run_with_policy(model, "fp32@4"):
        cache = recording(model, ids)
        forward(model, ids[:, PROMPT : PROMPT + 3], cache)
        cache.crop(0)
        for layer in cache.layers:
            layer.record_past = False
        rest = step_by_step(model, ids[:, PROMPT + 3 : PROMPT + 9], cache)
        assert (rest - stock[:, PROMPT + 3 : PROMPT + 9]).abs().max() < SAME


@pytest.mark.parametrize(("asked", "reach"), [slow(0, 4), (3, 2), slow(1, 0)])
def test_the_end_of_a_recorded_prompt_can_be_taken_back(model, ids, asked, reach):
    """generate reads its first candidates together with the prompt, and asks for the logits of one token more."""
    stock = stock_logits(model, ids)
    with run_with_policy(model, "fp32@4", drafts=4):
        for back in range(reach + 1):
            cache = new_cache(model)
            cache.activate_past_recording()
            assert not cache.is_croppable
            logits = forward(model, ids[:, :9], cache, logits_to_keep=asked)
            assert (logits - stock[:, 9 - logits.shape[1] : 9]).abs().max() < SAME
            assert cache.is_croppable
            assert {int(s.reach.min()) for s in decode_states(cache).values()} == {reach}
            cache.crop(-back)
            again = forward(model, ids[:, 9 - back : 12 - back], cache)
            assert (again - stock[:, 9 - back : 12 - back]).abs().max() < SAME
        step_by_step(model, ids[:, 12 - back : 13 - back], cache)


def test_a_copied_cache_is_cropped_on_its_own(model, ids):
    stock = stock_logits(model, ids)
    with run_with_policy(model, "fp32@4"):
        cache = recording(model, ids)
        forward(model, ids[:, PROMPT : PROMPT + 3], cache)
        other = deepcopy(cache)
        cache.crop(-3)
        other.crop(-1)
        for layer in cache.layers:
            layer.record_past = False  # of the one, not of the other
        step_by_step(model, ids[:, PROMPT : PROMPT + 1], cache)
        for one, at in ((cache, PROMPT + 1), (other, PROMPT + 2)):
            again = forward(model, ids[:, at : at + 4], one)
            assert (again - stock[:, at : at + 4]).abs().max() < SAME
        assert {int(s.pending.max()) for s in decode_states(other).values()} == {4}
        other.crop(-4)
        again = forward(model, ids[:, PROMPT + 2 : PROMPT + 3], other)
        assert (again - stock[:, PROMPT + 2 : PROMPT + 3]).abs().max() < SAME


def test_more_drafts_than_there_is_room_for_are_refused(model, ids):
    with run_with_policy(model, "fp32@4", drafts=2):
        cache = recording(model, ids)
        with pytest.raises(InputError, match=r"^drafts 2: expected at least 3, .*drafts=3"):
            forward(model, ids[:, PROMPT : PROMPT + 3], cache)
        step_by_step(model, ids[:, PROMPT : PROMPT + 2], recording(model, ids))
        first = new_cache(model)
        first.activate_past_recording()
        with pytest.raises(InputError, match=r"^drafts 2: expected at least 5"):
            forward(model, ids[:, :9], first, logits_to_keep=6)


@pytest.mark.parametrize("policy", ["fp32@16", slow("fp32@1")])
def test_assisted_generation_says_what_greedy_decoding_says(model, ids, policy, monkeypatch):
    """Candidates of 0 to 4 tokens, of which some are right."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    greedy = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    prompt, drawn = ids[:1, :9], torch.Generator().manual_seed(3)
    expected = model.generate(prompt, **greedy)

    def candidates(self, input_ids, *_, **__):
        at, count, right = (int(torch.randint(0, 5, (), generator=drawn)) for _ in range(3))
        proposed = expected[:, input_ids.shape[1] :][:, : count + at % 2].clone()
        proposed[:, right:] = (proposed[:, right:] + 1) % 256
        return torch.cat([input_ids, proposed], 1), None

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", candidates)
    if cache_keyword(model) == "cache_params":
        # Releases that call it so do not find the cache of a model without attention, and say so.
        with pytest.raises(RuntimeError, match="requires a cache"), run_with_policy(model, policy):
            model.generate(prompt, prompt_lookup_num_tokens=4, **greedy)
        return
    with run_with_policy(model, policy) as report:
        found = model.generate(prompt, prompt_lookup_num_tokens=4, **greedy)
    assert torch.equal(found, expected)
    assert report.verify_hits
    assert max(report.decode_hits.values()) < 20  # some candidates were accepted
    with pytest.raises(ValueError, match="stateful"):
        model.generate(prompt, prompt_lookup_num_tokens=4, **greedy)
