"""The tiny models are reproducible, alive, and speak bytes."""

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import build_tiny


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_same_seed_gives_the_same_weights(kind, tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = weights(build_tiny(kind, tmp_path / "a"))
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's own stream is left alone
    torch.manual_seed(6)
    again, other = (
        weights(build_tiny(kind, tmp_path / "b")),
        weights(build_tiny(kind, tmp_path / "c", seed=1)),
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_decays_are_those_of_the_training_init(model):
    decays = []
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            step_size = torch.nn.functional.softplus(model.get_parameter(name.replace("A_log", "dt_bias")))
            decays.append(torch.exp(-parameter.exp() * step_size))
    decay = torch.cat(decays)
    # A in (0, 16] and dt in [1e-3, 1e-1]: a decay is never below exp(-1.6) = 0.2, and most are near 1.  The
    # init of transformers (dt_bias = 1) gives a median near 1e-4.
    assert decay.min() > 0.2
    assert decay.median() > 0.6


def test_every_byte_survives_the_tokenizer(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    text = "Kä 1\n\t(A) ≈ 雪"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert max(ids) < 256
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_an_unknown_kind_lists_the_kinds(tmp_path):
    with pytest.raises(InputError, match=r"bamba, .*gated_delta, .*zamba2"):
        build_tiny("mamba3", tmp_path / "x")
    assert not (tmp_path / "x").exists()
