"""flash-linear-attention's calls, with plain torch in place of its kernels: raw gates, packed rows, assigned states.

Its kernels need a GPU, so that what is proven here is how its calls are read and where their states go.
"""

from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import run_with_policy
from quantlab.models.families import fla
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.schemes import DecodeState
from tests.models.fla_stub_model import Model

# Two layers of float32 sums over 16 keys on values of order 1: 2^-24 sqrt(16) times a few ops each, and the stub's
# normalisation, exact where the op adds 1e-6 to a square of about 4: relative 1.3e-7.
SAME = 5e-6
OPTIONS = {
    "gated": {"kimi": False},
    "negative": {"kimi": False, "allow_neg_eigval": True},
    "kimi": {"kimi": True},
    "bounded": {"kimi": True, "lower_bound": -5.0},
}


FAST = ("negative", "bounded")  # each op once


@pytest.fixture(params=[n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS])
def model(request):
    return Model(**OPTIONS[request.param])


@pytest.fixture
def x():
    # Norms of about 4: queries and keys of about that size too.
    return 1.2 * torch.randn(3, 90, 12, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def decode(model, x, prompt, mask=None, chunks=()):
    cache, outputs, past = {}, [], 0
    for end in (*chunks, *range(prompt, x.shape[1] + 1)):
        outputs.append(model(x[:, past:end], None if mask is None else mask[:, :end], cache)[:, -1])
        past = end
    return torch.stack(outputs[len(chunks) :], 1)


@pytest.mark.parametrize("prompt", [9, 70])  # below 65 tokens the recurrent op reads the prompt
def test_unrounded_policies_are_the_stock_layers(model, x, prompt):
    x = x[:, : prompt + 20]
    stock = decode(model, x, prompt)
    with run_with_policy(model, "fp32@4") as report:
        ours = decode(model, x, prompt)
    assert (ours - stock).abs().max() < SAME
    assert stock[:, -1].abs().max() > 0.1
    kimi = model.layers[0].kimi
    family = fla.KIMI_DELTA if kimi else fla.GATED_DELTA
    step, chunk = family.step_op, family.step_op if prompt <= 64 else family.prefill_op
    assert report.step_hits == {(step, 0): 20, (step, 1): 20}
    assert report.prefill_hits == {(chunk, 0): 1, (chunk, 1): 1}
    assert {layer.heads for layer in recurrent_layers(model).values()} == {4}


def test_a_padded_batch_is_its_rows_alone(model, x):
    lengths, prompt = (9, 5, 2), 9
    mask = torch.ones(3, 20, dtype=torch.int64)
    rows = [x[i : i + 1, prompt - n : 20] for i, n in enumerate(lengths)]
    for i, n in enumerate(lengths):
        mask[i, : prompt - n] = 0
    with run_with_policy(model, "fp32@4"):
        padded = decode(model, x[:, :20], prompt, mask)
        for i, row in enumerate(rows):
            assert (padded[i] - decode(model, row, lengths[i])[0]).abs().max() < SAME


def test_a_prompt_in_chunks_is_the_prompt(model, x):
    x = x[:, :14]
    whole = decode(model, x, 10)
    for split in range(1, 10):
        with run_with_policy(model, "fp32@4"):
            assert (decode(model, x, 10, chunks=(split,)) - whole).abs().max() < SAME


def test_rounding_and_a_dropped_decay_show(model, x, monkeypatch):
    x = x[:, :30]
    stock = decode(model, x, 9)
    with run_with_policy(model, "nvfp4@1"):
        assert (decode(model, x, 9) - stock).abs().max() > 1e-2
    step = DecodeState.step
    frozen = lambda self, inputs: step(self, replace(inputs, log_decay=0 * inputs.log_decay))  # noqa: E731
    monkeypatch.setattr(DecodeState, "step", frozen)
    with run_with_policy(model, "fp32@1"):
        assert (decode(model, x, 9) - stock).abs().max() > 1e-2


def test_calls_that_cannot_be_served_are_refused():
    q = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    call = {"q": q, "k": q, "v": q, "g": q[..., 0], "beta": q[..., 0]}
    with pytest.raises(InputError, match=r"^state_v_first "):
        fla.chunk_inputs(None, **call)
    uneven = torch.tensor([0, 2, 3, 3])
    with pytest.raises(InputError, match=r"^cu_seqlens .*one token of each sequence"):
        fla.token_inputs(None, **call, state_v_first=True, cu_seqlens=uneven)
