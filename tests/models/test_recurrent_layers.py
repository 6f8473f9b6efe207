"""The recurrent layers of a model are found by their decay parameters and the ops of their file."""

import pytest
import torch
from torch import nn

from quantlab.errors import InputError
from quantlab.models.families import FAMILIES
from quantlab.models.recurrent_layers import recurrent_layers


def test_recurrent_layers_name_mixer_family_and_heads(model, kind):
    layers = recurrent_layers(model)
    assert list(layers) == [0, 1]  # layer 2 of the gated-delta model is attention
    for number, found in layers.items():
        assert found.layer == found.module.layer_idx == number
        assert found.module.A_log.numel() == found.heads == 4
        assert found.family.recurrence == kind


def test_a_model_without_known_ops_is_refused():
    with pytest.raises(InputError, match=r"^model 'Linear'") as caught:
        recurrent_layers(nn.Linear(2, 2, dtype=torch.float32))
    assert all(family.step_op in str(caught.value) for family in FAMILIES)  # what it could have called
