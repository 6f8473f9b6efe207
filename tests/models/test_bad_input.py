"""Models, calls and rules that cannot be: one line that says what was found and what to do, and nothing done."""

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
