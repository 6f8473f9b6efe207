"""Models, calls and rules that cannot be: one line that says what was found and what to do, and nothing done."""

import io
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from quantlab.errors import InputError
from quantlab.models import run_with_policy
from quantlab.models.families import FAMILIES

from .decoding import forward, new_cache, step_by_step
from .test_generate import GREEDY, globals_of


def refused(model, words, policy: Any = "fp32@1", run=lambda: pytest.fail("entered")):
    with pytest.raises(InputError, match=words) as caught, run_with_policy(model, policy):
        run()
    assert "\n" not in str(caught.value)


def test_a_model_without_a_known_op_is_told_which_are_known():
    refused(nn.Linear(2, 2), r"^model 'Linear': .*" + ".*".join(family.step_op for family in FAMILIES))


def test_weights_on_the_meta_device_are_refused(model):
    absent = deepcopy(model).to("meta")
    count = len(list(absent.parameters()))
    refused(absent, rf"^model .* with {count} weights on the meta device .*from_pretrained")


def test_compiled_models_are_refused(model):
    refused(torch.compile(model), r"^model 'OptimizedModule, compiled': .*pass model._orig_mod")
    inner = deepcopy(model)
    base = inner.base_model_prefix
    setattr(inner, base, torch.compile(getattr(inner, base)))
    refused(inner, rf"^model 'OptimizedModule at {base}, compiled': expected {base}._orig_mod")
    compiled = deepcopy(model)
    compiled.compile()
    refused(compiled, r"^model .* compile\(\) was not called")


def test_a_block_that_decoded_nothing_says_why(model, ids):
    def without_cache():
        model(ids, use_cache=False)
        model.generate(ids[:1, :5], **GREEDY, use_cache=False)

    refused(model, r"touched nothing: every forward ran without a cache \(use_cache=True", run=without_cache)
    refused(model, "touched nothing: .*no token after", run=lambda: forward(model, ids, new_cache(model)))
    refused(model, "touched nothing: .*did not run", run=lambda: None)
    # A scoring run beside a decode is nobody's mistake.
    with run_with_policy(model, "fp32@1"):
        model(ids, use_cache=False)
        model.generate(ids[:1, :5], **GREEDY)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("layers = 7", "layers with a recurrent state: 0-1"),
        ("layers = 2", "layers with a recurrent state: 0-1"),
        ('layers = "0-1"\nheads = "3-4"', "heads from 0 to 3"),
        ("heads = 4", "heads from 0 to 3"),
    ],
)
def test_rules_for_what_the_model_does_not_have_are_refused(model, tmp_path, rule, words):
    path = tmp_path / "rules.toml"
    path.write_text(f'default = "fp32@1"\n[[rule]]\n{rule}\npolicy = "nvfp4@1"\n')
    refused(model, rf"^policy 'rules, rule 1 .*{words}", policy=path)


def test_packed_sequences_are_refused(model, ids):
    """Attention may have its own ideas of them; the recurrence would run on from one sequence into the next."""
    before = globals_of(model)
    for name, value in (("cu_seq_lens_q", [0, 4, 9]), ("seq_idx", [[0] * 4 + [1] * 5])):
        packed = {name: torch.tensor(value, dtype=torch.int32)}
        refused(
            model,
            rf"^{name} 'given'",
            run=lambda p=packed: forward(model, ids[:1, :9], new_cache(model), **p),
        )
    assert globals_of(model) == before


def test_an_error_inside_a_block_is_not_covered_by_its_check(model, ids):
    """A forward that raised halfway has reached some layers; what ran before and after it still counts."""
    layer_1 = [m for m in model.modules() if getattr(m, "layer_idx", None) == 1][-1]

    def fail(*_):
        raise ZeroDivisionError

    with run_with_policy(model, "fp32@4") as report:
        cache = new_cache(model)
        forward(model, ids[:, :5], cache)
        step_by_step(model, ids[:, 5:7], cache)
        hook = layer_1.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            forward(model, ids[:, 7:8], cache)
        hook.remove()
    assert report.decode_hits == {0: 3, 1: 2}
    assert report.touched(1) == 2 / 3


def test_an_interrupted_forward_leaves_no_layer_running(model, ids):
    """torch calls no hooks behind a KeyboardInterrupt; another model of the file must not be taken for this one."""
    other = deepcopy(model)
    stock = other.generate(ids[:2, :9], **GREEDY)

    def interrupt(*_):
        raise KeyboardInterrupt

    layer_1 = [m for m in model.modules() if getattr(m, "layer_idx", None) == 1][-1]
    with run_with_policy(model, "nvfp4@1") as report:
        hook = layer_1.norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids[:2, :9], **GREEDY)
        hook.remove()
        hits = report.op_hits
        assert torch.equal(other.generate(ids[:2, :9], **GREEDY), stock)
        assert report.op_hits == hits
        model.generate(ids[:2, :9], **GREEDY)


def test_copies_of_a_model_are_under_no_policy(model, ids):
    prompt, packed = ids[:2, :9], {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32)}
    stock, own = model.generate(prompt, **GREEDY), model._is_stateful
    with run_with_policy(model, "nvfp4@1"):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [deepcopy(model), torch.load(file, weights_only=False)]
        assert model._is_stateful is False
        assert torch.equal(copies[0].generate(prompt, **GREEDY), stock)
        model.generate(prompt, **GREEDY)
    for copy in (model, *copies):
        assert copy._is_stateful == own
        assert not {"_is_stateful", "_valid_auto_compile_criteria"} & vars(copy).keys()
        assert torch.equal(copy.generate(prompt, **GREEDY), stock)
    if model.config.model_type == "mamba2":  # the other one refuses it anyway
        for copy in copies:  # what a block refuses, a copy takes
            copy(ids[:1, :9], **packed)


def test_what_is_under_a_policy_is_not_pickled(model, ids):
    def dump():
        cache = new_cache(model)
        forward(model, ids[:, :5], cache)
        pickle.dumps(cache)

    refused(model, r"^policy 'fp32@1': expected nothing to pickle: .*deepcopy", run=dump)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1.5}, "^seed 1.5: expected an integer"),
        ({"drafts": "a"}, "^drafts 'a': expected an integer from 0"),
        ({"drafts": -1}, "^drafts -1: expected an integer from 0"),
        ({"sequence_ids": 7}, "^sequence_ids 7: expected one integer for each"),
        ({"sequence_ids": torch.tensor(3)}, "^sequence_ids .*: expected one integer for each"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_runs(model, options, words):
    with pytest.raises(InputError, match=words), run_with_policy(model, "fp32@1", **options):
        pytest.fail("entered")
