"""Every architecture through a policy: unrounded policies are the stock model, and blocks run along the key dim."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.models import build_tiny, families, run_with_policy
from quantlab.models.interception import decode_states
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.schemes import DecodeState
from tests.models.architectures import ARCHITECTURES, FAST, decode, forward

# Both sides compute in float32 and differ in the order of sums: 32 to 64 terms of a state or a product, each a relative
# 2^-24 sqrt(64) = 5e-7, on logits of up to 4: 2e-6 an op.  Norms of outputs that happen to be small, and attention over
# them, pass on a small multiple of that; five ops a layer, two or three layers: 2e-5.
SAME = 2e-5
# A padded batch differs from a single row in every product of the model, not in the recurrent ops alone.
PADDED = 5e-5
WRONG = 1e-2  # what a rounding or a mistake, as opposed to an order of sums, does to the logits at least
PROMPT, STEPS = 13, 64


@pytest.fixture(
    scope="module",
    params=[n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def architecture(name):
    return ARCHITECTURES[name]


@pytest.fixture(scope="module")
def model(name, tmp_path_factory):
    folder = build_tiny(name, tmp_path_factory.mktemp("models") / name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(3))


def greedy(model, prompt):
    """Tokens (B, STEPS) and the logits that chose them (B, STEPS, vocabulary)."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, prompt.shape[1] :], torch.stack(out.logits, 1)


def test_replayed_float32_is_the_stock_model_in_every_layer(model, architecture, ids):
    prompt = ids[:2, :PROMPT]
    with run_with_policy(model, "fp32@16") as report:
        tokens, logits = greedy(model, prompt)
    stock_tokens, stock = greedy(model, prompt)
    assert torch.equal(tokens, stock_tokens)
    assert (logits - stock).abs().max() < SAME
    assert stock.abs().max() > 1
    assert len(tokens[0].unique()) > 8  # a model that repeats one token would prove little
    (family,) = {layer.family for layer in recurrent_layers(model).values()}
    assert family.recurrence == architecture.family
    every = [str(layer) for layer in architecture.layers]
    assert report.op_hits == {
        family.step_op: dict.fromkeys(every, STEPS - 1),
        family.prefill_op: dict.fromkeys(every, 1),
    }
    # 63 steps: the hand-off, and three flushes whose stores a later step reads.
    assert report.exercised["checkpoint"] == 4


def test_a_left_padded_batch_is_its_rows_alone(model, architecture, ids):
    lengths, steps = (PROMPT, 9, 5, 2), 5
    batch = torch.zeros(4, PROMPT + steps, dtype=torch.int64)
    mask = torch.ones_like(batch)
    rows = [torch.cat([ids[i, :n], ids[i, PROMPT : PROMPT + steps]]) for i, n in enumerate(lengths)]
    for i, row in enumerate(rows):
        batch[i, -len(row) :] = row
        mask[i, : -len(row)] = 0
    with run_with_policy(model, "fp32@4"):
        padded = decode(model, batch, PROMPT, mask=mask, masked=architecture.mask)
        for i, row in enumerate(rows):
            alone = decode(model, row[None], lengths[i])[0]
            assert (padded[i] - alone).abs().max() < PADDED
    assert (padded[1:] - padded[:-1]).abs().amax((1, 2)).min() > WRONG  # rows that differ


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beams", "returned", "sampled"],
)
def test_generate_with_padding_is_the_stock_models(model, ids, options):
    prompt, mask = ids[:2, :9].clone(), torch.ones(2, 9, dtype=torch.int64)
    prompt[0, :4], mask[0, :4] = 0, 0
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "attention_mask": mask} | options
    torch.manual_seed(4)
    with run_with_policy(model, "fp32@4"):
        ours = model.generate(prompt, **options)
    torch.manual_seed(4)
    assert torch.equal(ours, model.generate(prompt, **options))


def test_a_prompt_in_chunks_is_the_prompt(model, ids):
    model = deepcopy(model)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Some models clamp the step size in a prefill and not in a decode step: a last chunk of one token, which
            # is a decode step, would then be another token.
            module.time_step_limit = (0.0, float("inf"))
    ids = ids[:2, : PROMPT + 1]
    whole = decode(model, ids, PROMPT)
    for split in range(1, PROMPT):
        with run_with_policy(model, "fp32@4"):
            chunked = decode(model, ids, PROMPT, chunks=(split,))
        assert (chunked - whole).abs().max() < SAME, split


def test_states_are_rounded_along_the_key_dim(model, architecture, ids):
    """A prefill's state is stored as NVFP4 of the stock model's own state, blocks of 16 along its key dim."""
    stock = DynamicCache(config=model.config)
    forward(model, ids[:, :PROMPT], stock)
    with run_with_policy(model, "nvfp4@1"):
        cache = DynamicCache(config=model.config)
        forward(model, ids[:, :PROMPT], cache)
        states = decode_states(cache)
        assert tuple(states) == architecture.layers
        for layer, state in states.items():
            dense = stock.layers[layer].recurrent_states[0]
            dense = dense.unsqueeze(1) if dense.ndim == 3 else dense
            key_dim = architecture.key_dim + (dense.ndim - stock.layers[layer].recurrent_states[0].ndim)
            by_keys = dense.movedim(key_dim, -1)
            assert tuple(by_keys.shape) == (4, *architecture.shape)
            assert state.shape.key_heads == architecture.key_heads
            assert torch.equal(state.materialize(), parse("nvfp4").round(by_keys.contiguous()))
            assert state.materialize().is_contiguous()
            swapped = parse("nvfp4").round(by_keys.transpose(-1, -2).contiguous()).transpose(-1, -2)
            assert (swapped - state.materialize()).abs().max() > WRONG * dense.abs().max()
        decode(model, ids[:, :PROMPT], PROMPT - 1)


def test_mistakes_are_noticed(model, architecture, ids, monkeypatch):
    """Without its decay, or with value and key dims mixed up, a model is far from itself or stops."""
    ids = ids[:2, : PROMPT + 8]
    stock = decode(model, ids, PROMPT)
    with monkeypatch.context() as patch:
        step = DecodeState.step
        frozen = lambda self, inputs: step(self, replace(inputs, log_decay=0 * inputs.log_decay))  # noqa: E731
        patch.setattr(DecodeState, "step", frozen)
        with run_with_policy(model, "fp32@1"):
            assert (decode(model, ids, PROMPT) - stock).abs().max() > WRONG

    def swapped(family):
        return replace(family, to_state=lambda dense: family.to_state(dense).transpose(-1, -2).contiguous())

    monkeypatch.setattr(families, "FAMILIES", [swapped(family) for family in families.FAMILIES])
    _, value_dim, key_dim = architecture.shape
    if value_dim != key_dim:
        with pytest.raises(InputError), run_with_policy(model, "fp32@1"):
            decode(model, ids, PROMPT)
    else:
        with run_with_policy(model, "fp32@1"):
            assert (decode(model, ids, PROMPT) - stock).abs().max() > WRONG


def test_tokens_that_are_taken_back_are_as_if_never_read(model, architecture, ids):
    """A prompt and forwards of several tokens on a cache that records: the logits are those of single stock steps."""
    stock = decode(model, ids, PROMPT)
    with run_with_policy(model, "fp32@4", drafts=4) as report:
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        # Two candidates behind the prompt, as generate reads them: some models clamp step sizes in prompts alone.
        logits = forward(model, ids[:, : PROMPT + 2], cache, logits_to_keep=3)
        assert (logits - stock[:, :3]).abs().max() < SAME
        assert cache.is_croppable
        cache.crop(-2)
        past = PROMPT
        for count, wrong in ((3, 2), (4, 0), (2, 1), (1, 1), (4, 3), (1, 0), (4, 1)):
            tokens, right = ids[:, past : past + count].clone(), count - wrong
            tokens[:, right:] = (tokens[:, right:] + 1) % 256
            logits = forward(model, tokens, cache, past=past)
            if right:
                first = past + 1 - PROMPT
                assert (logits[:, :right] - stock[:, first : first + right]).abs().max() < SAME
            cache.crop(-wrong)
            past += right
        for state in decode_states(cache).values():
            assert not bool(state.pending.any())
    assert set(report.decode_hits) == set(architecture.layers)
    assert len(set(report.decode_hits.values())) == 1
