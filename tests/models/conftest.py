"""The two tiny models, built once a session; no test changes their weights."""

import pytest
import torch

from quantlab.models import build_tiny

KINDS = ("mamba2", "gated_delta")


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def model(kind, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = build_tiny(kind, tmp_path_factory.mktemp("models") / kind)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def ids():
    return torch.randint(0, 256, (3, 44), generator=torch.Generator().manual_seed(1))
