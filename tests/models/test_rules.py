"""Policies that differ between the layers and heads of a model, from a TOML file."""

import json

import pytest
import torch

from quantlab.models import run_with_policy
from quantlab.models.interception import Interception, decode_states
from quantlab.schemes import DecodeState, HeadGroups, parse_rules

from .decoding import forward, new_cache, step_by_step

PROMPT, END = 7, 29


def decoded(model, ids, policy):
    with run_with_policy(model, policy, seed=4) as report:
        cache = new_cache(model)
        forward(model, ids[:, :PROMPT], cache)
        return step_by_step(model, ids[:, PROMPT:END], cache), decode_states(cache), report


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("policy", ["fp16+sr/nvfp4@4", pytest.param("int8+ef@1", marks=pytest.mark.slow)])
def test_rules_that_say_the_same_everywhere_are_that_policy(model, ids, written, policy):
    logits, _, report = decoded(model, ids, policy)
    path = written(f'default = "fp32@1"\n[[rule]]\nlayers = "0-1"\npolicy = "{policy}"\n')
    found, states, ruled = decoded(model, ids, path)
    assert torch.equal(found, logits)
    assert all(isinstance(state, DecodeState) for state in states.values())
    assert ruled.effective_policy == report.effective_policy
    assert ruled.exercised == report.exercised
    assert ruled.ledger == report.ledger
    for same in (str(path), parse_rules(path)):
        assert Interception(model, same).rules == parse_rules(path)


def test_a_layer_keeps_its_policy_whatever_the_others_have(model, ids, written):
    """The first layer does not see the second one, so it decodes bit for bit as under its policy alone."""
    _, alone, _ = decoded(model, ids, "fp16+sr/nvfp4@4")
    path = written('default = "fp16+sr/nvfp4@4"\n[[rule]]\nlayers = 1\npolicy = "int8@2"\n')
    _, mixed, report = decoded(model, ids, path)
    assert torch.equal(mixed[0].materialize(), alone[0].materialize())
    assert str(mixed[1].policy) == "int8@2"
    assert report.coverage == {0: {"fp16+sr/nvfp4@4": 1.0}, 1: {"int8@2": 1.0}}
    assert report.effective_policy.startswith("layers 0: fp16+sr/nvfp4@4:buffer=fp32")
    assert "; layers 1: int8@2" in report.effective_policy
    assert report.policy == "fp16+sr/nvfp4@4; layers 1: int8@2"


def test_heads_keep_their_policies(model, ids, written):
    """A head of the first layer holds what it would hold if the whole layer had its policy, random bits included."""
    path = written('default = "fp16+sr/nvfp4@4"\n[[rule]]\nlayers = 0\nheads = "1,3"\npolicy = "int8+ef@3"\n')
    _, mixed, report = decoded(model, ids, path)
    assert isinstance(mixed[0], HeadGroups)
    assert isinstance(mixed[1], DecodeState)
    for policy, heads in (("fp16+sr/nvfp4@4", [0, 2]), ("int8+ef@3", [1, 3])):
        _, alone, other = decoded(model, ids, policy)
        # The order of sums inside a matrix product follows the number of heads: float32's last bits, which a rounding
        # step in a few of the values may turn into a step of the format.
        difference = (mixed[0].materialize() - alone[0].materialize())[:, heads].abs()
        assert difference.median() < 1e-6
        assert other.ledger.values == report.ledger.values
    assert report.coverage[0] == {"fp16+sr/nvfp4@4": 0.5, "int8+ef@3": 0.5}
    assert report.touched(0) == report.touched(1) == 1
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["coverage"]["0"] == {"fp16+sr/nvfp4@4": 0.5, "int8+ef@3": 0.5}
    assert plain["touched"] == {"0": 1.0, "1": 1.0}


def test_unrounded_rules_are_the_stock_model(model, ids, written):
    path = written(
        'default = "fp32@16"\n[[rule]]\nheads = 2\npolicy = "fp32@1"\n'
        '[[rule]]\nlayers = 1\nheads = "0-1"\npolicy = "fp32/fp32@3"\n'
    )
    cache = new_cache(model)
    forward(model, ids[:, :PROMPT], cache)
    stock = step_by_step(model, ids[:, PROMPT:END], cache)
    found, _, _ = decoded(model, ids, path)
    assert (found - stock).abs().max() < 2e-5


def test_generate_takes_rules(model, ids, written):
    path = written('default = "fp32@16"\n[[rule]]\nheads = "0-1"\npolicy = "fp32@4"\n')
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with run_with_policy(model, path):
        plain = model.generate(ids[:2, :9], **greedy)
        beams = model.generate(ids[:2, :9], num_beams=3, **greedy)
    assert torch.equal(plain, model.generate(ids[:2, :9], **greedy))
    assert torch.equal(beams, model.generate(ids[:2, :9], num_beams=3, **greedy))
