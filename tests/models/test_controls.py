"""Negative controls: interceptions that are wrong in one place, each noticed at once."""

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import run_with_policy
from quantlab.models.interception import Interception
from quantlab.models.running import RunningLayers
from quantlab.schemes import Diverged
from quantlab.schemes.buffer import WindowBuffer

from .decoding import SAME, forward, new_cache, step_by_step

STEPS = slice(5, 25)


def difference(model, ids, policy):
    """The largest difference of decoded logits from the stock model's; infinite where they are not finite."""

    def decoded():
        cache = new_cache(model)
        forward(model, ids[:, : STEPS.start], cache)
        return step_by_step(model, ids[:, STEPS], cache)

    stock = decoded()
    with run_with_policy(model, policy):
        ours = decoded()
    return float((ours - stock).abs().nan_to_num(torch.inf).max())


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_not_intercepted_is_named(model, ids, monkeypatch, layer):
    innermost = RunningLayers.innermost

    def passed_over(self):
        running = innermost(self)
        return None if running is not None and running.layer == layer else running

    monkeypatch.setattr(RunningLayers, "innermost", passed_over)
    with pytest.raises(InputError, match=rf"missed at layers {layer}, which took 0 of 20 decode steps"):
        difference(model, ids, "nvfp4@1")


def test_a_single_step_past_the_policy_is_noticed(model, ids, monkeypatch):
    interception = Interception(model, "fp32@1")
    with interception:
        cache = new_cache(model)
        forward(model, ids[:, :5], cache)
        step_by_step(model, ids[:, 5:9], cache)
    interception.require_effect()
    ((op, _), _), *_ = interception.report.step_hits.items()
    interception.report.step_hits[op, 1] -= 1
    with pytest.raises(InputError, match="missed at layers 1, which took 3 of 4 decode steps"):
        interception.require_effect()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_cursor_that_is_off_by_one_is_noticed(model, ids, monkeypatch, shift):
    """One record too few, or one of memory that nobody wrote, which is NaN."""
    assert difference(model, ids, "fp32@4") < SAME
    records = WindowBuffer.records

    def shifted(self, rows=None, *, raw=False, first=None):
        cursor = self.cursor
        if int(cursor.max()) == 0:
            return records(self, rows, raw=raw, first=first)
        self.cursor = cursor + shift
        try:
            return records(self, rows, raw=raw, first=first)
        finally:
            self.cursor = cursor

    monkeypatch.setattr(WindowBuffer, "records", shifted)
    try:
        # A record is one of some twenty tokens that decay by about 0.9 each: nothing near rounding.
        assert difference(model, ids, "fp32@4") > 1e-2
    except Diverged:
        assert shift == 1
