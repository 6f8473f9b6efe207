"""Whole calls of ``generate`` under a policy: beams, padding, several returns, other dtypes, threads, exceptions."""

import copy
import sys
import threading

import pytest
import torch
import transformers.cache_utils as cache_utils

from quantlab.errors import InputError
from quantlab.models import run_with_policy

from .decoding import EACH

GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


def under(model, policy, *arguments, **options):
    with run_with_policy(model, policy):
        return model.generate(*arguments, **(GREEDY | options))


def globals_of(model):
    """Everything that a block patches, by identity."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    found = {
        (n, key): id(value) for n in names for key, value in vars(sys.modules[n]).items() if callable(value)
    }
    for cls in (cache_utils.LinearAttentionLayer, cache_utils.Cache):
        found |= {(cls.__name__, key): id(value) for key, value in vars(cls).items()}
    found |= {("model", key): id(value) for key, value in vars(model).items() if not key.startswith("_fo")}
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    return found, hooks


@pytest.mark.parametrize("policy", ["fp32@1", "fp32@4"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"num_beams": 2, "max_new_tokens": 12}],
)
def test_beam_search_is_the_stock_models(model, ids, policy, options):
    prompt = ids[:2, :9]
    assert torch.equal(under(model, policy, prompt, **options), model.generate(prompt, **(GREEDY | options)))


def test_beams_carry_every_part_of_a_rounded_state(model, ids):
    """A single beam is greedy; several beams of rounded, replayed states still return whole sequences."""
    prompt = ids[:2, :9]
    for policy in ("fp16+sr/nvfp4@4", "int8+ef@3"):
        greedy = under(model, policy, prompt)
        assert torch.equal(under(model, policy, prompt, num_beams=1), greedy)
        assert under(model, policy, prompt, num_beams=3).shape == greedy.shape


def test_left_padding_is_the_stock_models(model, ids):
    prompt, mask = ids[:2, :9].clone(), torch.ones(2, 9, dtype=torch.int64)
    prompt[0, :4], mask[0, :4] = 0, 0
    stock = model.generate(prompt, attention_mask=mask, **GREEDY)
    assert torch.equal(under(model, "fp32@4", prompt, attention_mask=mask), stock)


def test_a_bf16_model_decodes_as_before(model, ids):
    narrow = copy.deepcopy(model).bfloat16()
    prompt = ids[:2, :9]
    assert torch.equal(under(narrow, "fp32@1", prompt), narrow.generate(prompt, **GREEDY))


def test_a_second_call_in_the_block_starts_afresh(model, ids):
    with run_with_policy(model, "fp32/nvfp4@4"):
        first = model.generate(ids[:2, :9], **GREEDY)
        model.generate(ids[:1, :5], **GREEDY)
        assert torch.equal(model.generate(ids[:2, :9], **GREEDY), first)


def test_exceptions_at_every_depth_restore_everything(model, ids):
    before = globals_of(model)

    def fail(*_):
        raise KeyError("inside the model")

    called: dict[torch.nn.Module, None] = {}
    hooks = [p.register_forward_hook(lambda part, *_: called.setdefault(part)) for p in model.modules()]
    model.generate(ids[:1, :5], **GREEDY)
    for hook in hooks:
        hook.remove()
    assert len(called) > 10
    for part in called:
        hook = part.register_forward_hook(fail)
        with pytest.raises(KeyError), run_with_policy(model, "fp32@1"):
            model.generate(ids[:1, :5], **GREEDY)
        hook.remove()
        assert globals_of(model) == before
    with pytest.raises(KeyError), run_with_policy(model, "fp32@1"):
        raise KeyError("between the calls")
    with (
        pytest.raises(InputError, match="leave that of fp32@1 first"),
        run_with_policy(model, "fp32@1"),
        run_with_policy(model, "nvfp4@4"),
    ):
        pytest.fail("entered inside another block")
    assert globals_of(model) == before
    assert torch.equal(under(model, "fp32@1", ids[:1, :5]), model.generate(ids[:1, :5], **GREEDY))


def test_a_block_in_another_thread_is_refused_and_leaves_no_trace(model, ids):
    before, caught = globals_of(model), []

    def enter():
        try:
            with run_with_policy(model, "nvfp4@1"):
                pass
        except InputError as error:
            caught.append(str(error))

    with run_with_policy(model, "fp32@1"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        model.generate(ids[:1, :5], **GREEDY)
    assert "one thread at a time" in caught[0]
    assert globals_of(model) == before
    thread = threading.Thread(target=under, args=(model, "fp32@1", ids[:1, :5]))
    thread.start()
    thread.join()
    assert globals_of(model) == before


@EACH
def test_threads_inside_one_block_keep_their_layers_apart(model, ids):
    stock, found = model.generate(ids[:2, :9], **GREEDY), {}

    def generate(number):
        found[number] = model.generate(ids[:2, :9], **GREEDY)

    with run_with_policy(model, "fp32@1") as report:
        threads = [threading.Thread(target=generate, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[number], stock) for number in range(3))
    # Six decode steps a call; every layer is charged for its own.
    assert len(set(report.step_hits.values())) == 1


@pytest.mark.parametrize("names", [["a", "b"], [1.5, 2.5], [[1], [2]]])
def test_sequence_ids_are_integers(model, names):
    with (
        pytest.raises(InputError, match=r"^sequence_ids "),
        run_with_policy(model, "fp32@1", sequence_ids=names),
    ):
        pass


def test_a_name_is_no_model():
    with pytest.raises(InputError, match=r"^model 'str'"), run_with_policy("model", "fp32@1"):  # type: ignore
        pass
