"""A loaded model decodes under its policy for its life, and leaves nothing behind."""

import gc
import pickle
import shutil
from copy import deepcopy
from typing import Any

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import load, run_with_policy

from .decoding import EACH
from .test_generate import GREEDY, globals_of


def test_a_loaded_model_is_one_inside_a_block(model, ids):
    folder, prompt = model.name_or_path, ids[:2, :9]
    before, stock = globals_of(model), model.generate(prompt, **GREEDY)
    loaded = load(folder, "fp32@4", dtype=torch.float32)
    try:
        assert torch.equal(loaded.generate(prompt, **GREEDY), stock)
        assert torch.equal(
            model.generate(prompt, **GREEDY), stock
        )  # another one of the same file is left alone
        assert set(loaded.quantlab_report.step_hits.values()) == {GREEDY["max_new_tokens"] - 1}
        loaded.quantlab_interception.require_effect()
        with pytest.raises(InputError, match="leave that of fp32@4 first"), run_with_policy(model, "fp32@1"):
            pass
        with pytest.raises(InputError, match="leave that of fp32@4 first"):
            load(folder, "fp32@1")
    finally:
        loaded.quantlab_close()
    loaded.quantlab_close()  # a second time is nothing
    assert globals_of(model) == before
    hits = loaded.quantlab_report.op_hits
    assert torch.equal(loaded.generate(prompt, **GREEDY), stock)
    assert loaded.quantlab_report.op_hits == hits


@EACH
def test_a_model_that_is_gone_has_left_its_block(model, ids):
    before = globals_of(model)
    loaded = load(model.name_or_path, "nvfp4@1")
    loaded.generate(ids[:1, :5], **GREEDY)
    del loaded
    gc.collect()
    assert globals_of(model) == before
    with run_with_policy(model, "fp32@1"):
        model.generate(ids[:1, :5], **GREEDY)


def test_what_cannot_be_loaded_is_one_line(model, tmp_path):
    before = globals_of(model)
    for path, policy, words in (
        (tmp_path, "fp32@1", "^path "),
        (tmp_path / "none", "fp32@1", "^path .*none': expected a folder with a Hugging Face model"),
        ("builtin:tiny-mamba2", "fp32@1", "^path .*build_tiny"),
        (model.name_or_path, "fp33@1", "fp33"),
        (model.name_or_path, tmp_path / "none.toml", "^policy .*none.toml"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            load(path, policy)
        assert "\n" not in str(caught.value)
    assert globals_of(model) == before
    with pytest.raises(InputError, match="contents="):
        load(
            model.name_or_path,
            "fp32@4:contents=raw" if "mamba2" in model.name_or_path else "fp32@4:contents=none",
        )
    assert globals_of(model) == before


@EACH
def test_copies_of_a_loaded_model_are_plain_models(model, ids):
    prompt = ids[:2, :9]
    stock = model.generate(prompt, **GREEDY)
    loaded = load(model.name_or_path, "nvfp4@1", dtype=torch.float32)
    try:
        with pytest.raises(
            InputError, match=r"^policy 'nvfp4@1': expected nothing to pickle: save_pretrained"
        ):
            pickle.dumps(loaded)
        copy = deepcopy(loaded)
        copy.quantlab_close()  # not its own
        assert torch.equal(copy.generate(prompt, **GREEDY), stock)
        loaded.generate(prompt, **GREEDY)
        assert loaded.quantlab_report.step_hits
    finally:
        loaded.quantlab_close()


def test_whatever_the_library_raises_is_one_line(model, tmp_path):
    folder = shutil.copytree(model.name_or_path, tmp_path / "short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (folder, {}, "^path .*short': expected a causal language model: "),
        (model.name_or_path, {"dtype": "nope"}, "^dtype 'nope'"),
        (model.name_or_path, {"device": "nope"}, "^device 'nope'"),
    ]
    for path, options, words in cases:
        with pytest.raises(InputError, match=words) as caught:
            load(path, "fp32@1", **options)
        assert "\n" not in str(caught.value)


def test_a_reference_model_has_a_name():
    model = load("reference:gated_delta", "fp32/nvfp4@16")
    try:
        assert model.quantlab_report.policy == "fp32/nvfp4@16"
    finally:
        model.quantlab_close()
    with pytest.raises(InputError, match="reference:gated_delta"):
        load("reference:gated_detla", "fp32@1")
