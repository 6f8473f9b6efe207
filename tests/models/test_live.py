"""Decay parameters follow the original training init of each family, in every architecture."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quantlab.errors import InputError
from quantlab.models.live import live_recurrence
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.models.tiny_kinds import TINY_KINDS
from tests.models.architectures import ARCHITECTURES

COMMON = {
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def build(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TINY_KINDS[kind].build(COMMON)


def own(module, ending):
    """The parameter of the layer whose name ends so, flat."""
    (found,) = [p for name, p in module.named_parameters() if name.endswith(ending)]
    return found.detach().flatten()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_step_sizes_and_rates_are_those_of_the_inits(kind):
    model = build(kind)
    before = {name: p.clone() for name, p in model.named_parameters()}
    touched = live_recurrence(model, seed=3)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= touched  # nothing else; a rate may have been there already
    assert len(touched) == 2 * len(ARCHITECTURES[kind].layers)
    decays = []
    for layer in recurrent_layers(model).values():
        single = layer.family.recurrence == "mamba1"
        rates = own(layer.module, "A_log").exp()
        step_sizes = F.softplus(own(layer.module, "dt_proj.bias" if single else "dt_bias"))
        # One float32 rounding in the inverse of softplus, whose slope is below 1: relative 1e-5 at 1e-3.
        assert step_sizes.min() > 0.999e-3
        assert step_sizes.max() < 1.001e-1
        if single:
            assert torch.allclose(rates.view(-1, 16), torch.arange(1.0, 17.0), rtol=1e-6)
            decays.append(torch.exp(-step_sizes[:, None] * rates.view(len(step_sizes), -1)).flatten())
        else:
            assert rates.max() < 16
            assert rates.min() > (0.0099 if layer.family.recurrence == "gated_delta" else 0.999)
            channels = len(step_sizes) // len(rates)
            decays.append(torch.exp(-step_sizes * rates.repeat_interleave(channels)))
    decay = torch.cat(decays)
    # A below 16 and steps below 0.1: never below exp(-1.6) = 0.2, and most are near 1.  The init of transformers gives
    # most of these models a median near 1e-4.
    assert decay.min() > 0.2
    assert decay.median() > 0.6


def test_the_seed_and_the_names_decide():
    first, again, other = build("mamba2"), build("mamba2"), build("mamba2")
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        live_recurrence(model, seed)
    values = [
        torch.cat([p.detach() for n, p in m.named_parameters() if "A_log" in n])
        for m in (first, again, other)
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert len(values[0].unique()) == len(values[0])  # no two layers alike


def test_a_model_without_recurrent_layers_is_refused():
    with pytest.raises(InputError, match=r"^model 'Linear'"):
        live_recurrence(nn.Linear(2, 2))
