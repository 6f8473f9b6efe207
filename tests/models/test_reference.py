"""The shipped reference models: stock transformers loads them, and they do what their cards say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantlab.errors import InputError
from quantlab.evals import running_arithmetic
from quantlab.evals.state_recall import Level, questions
from quantlab.models import run_with_policy
from quantlab.models.reference import reference_folder, reference_models
from quantlab.models.reference import vocabulary as v

LARGEST = 6_000_000
GREEDY = Path(__file__).parents[1] / "data" / "reference_greedy.json"
NAMES = reference_models()


@pytest.fixture(scope="module")
def load():
    kept = {}

    def load(name):
        if name not in kept:
            kept[name] = AutoModelForCausalLM.from_pretrained(reference_folder(name)).eval()
        return kept[name]

    return load


def test_the_models_are_there():
    assert {"gated_delta", "hybrid", "kimi_delta"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_exact_in_bfloat16_and_run_in_float32(name, load):
    folder = reference_folder(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LARGEST
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert all(file.get_tensor(key).isfinite().all() for key in file.keys())  # noqa: SIM118
    assert {parameter.dtype for parameter in load(name).parameters()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == v.VOCABULARY_SIZE


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_beside_a_model_is_the_vocabulary(name):
    tokenizer = AutoTokenizer.from_pretrained(reference_folder(name))
    text = " k05 v33 Q k05 ? A v01\nplain text, too"
    assert tokenizer(text).input_ids == v.tokenizer()(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hybrid"])
def test_nothing_but_the_recurrence_carries_what_was_said(name, load):
    """Its attention, there for the cache's sake, has an output of zeros: whatever it is given, logits stay."""
    model = load(name)
    outputs = [p for n, p in model.named_parameters() if "o_proj" in n and not bool(p.any())]
    assert len(outputs) == 1
    ids = torch.from_numpy(questions(Level(4, 2, 6), 2, 0).tokens)
    with torch.no_grad():
        before = model(ids).logits
    attention = next(
        part
        for part in model.modules()
        if getattr(getattr(part, "o_proj", None), "weight", None) is outputs[0]
    )
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"hidden_states": torch.randn_like(kwargs["hidden_states"])}),
        with_kwargs=True,
    )
    try:
        with torch.no_grad():
            assert torch.equal(model(ids).logits, before)
    finally:
        hook.remove()


@pytest.mark.parametrize("name", NAMES)
def test_letters_are_learnt(name, load):
    """64 questions of the default level by a prefill; at the 95 % wanted, fewer than 54 right happen once in 10^3."""
    found = questions(Level(), 64, 1)
    with torch.no_grad():
        logits = load(name)(torch.from_numpy(found.tokens[:, :-1]), logits_to_keep=1).logits[:, -1]
    letters = logits[:, v.token("A") : v.token("D") + 1].argmax(-1)
    assert (letters.numpy() == found.choice[:, 0]).sum() >= 54


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_is_done_on_the_pad_under_the_baseline_policy(name, load):
    prompts, rest = running_arithmetic.problems(4, 8, 1)  # at one in ten by chance, 6 of 8 right: 2 in 10^5
    model = load(name)
    with run_with_policy(model, "fp32@1"):
        written = model.generate(
            torch.from_numpy(prompts), max_new_tokens=rest.shape[1], do_sample=False, eos_token_id=None
        )[:, prompts.shape[1] :]
    assert (written[:, -2].numpy() == rest[:, -2]).mean() >= 0.75


@pytest.mark.parametrize("implementation", ["torch", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_same_in_every_release_and_on_every_device(name, implementation, runnable):
    """Written down with transformers 5.24 on a CPU.  The two likeliest words are .0025 apart or more at each of the 40
    tokens, and logits of these sizes (20) err by 1e-4 in float32.
    """
    written = json.loads(GREEDY.read_text())
    device = "cuda" if runnable(implementation) == "cuda" else "cpu"
    model = AutoModelForCausalLM.from_pretrained(reference_folder(name)).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(reference_folder(name))
    for prompt, expected in zip(written["prompts"], written["texts"][name], strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=model.config.pad_token_id,
        )
        assert tokenizer.decode(found[0, ids.shape[1] :]) == expected


def test_a_name_that_is_none():
    with pytest.raises(InputError, match="reference:gated_delta"):
        reference_folder("reference:gated_detla")
