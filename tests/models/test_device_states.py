"""A model whose decode states are in pools is that model with decode states on the CPU: the same bits from the twins.

``cuda`` needs a GPU and compares what kernels decode there with torch on the CPU, behind the same model on the GPU:
``pytest tests/models/test_device_states.py -k cuda``.
"""

from copy import deepcopy

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import load
from quantlab.models.device_states import DeviceHeadGroups, DeviceLayer, DeviceLayers, HostLayer, served
from quantlab.models.interception import Interception, decode_states
from quantlab.recurrences import StepInputs
from quantlab.schemes import DecodeState, StateShape, parse_policy, parse_rules
from quantlab.schemes.pool_rows import copy_slots
from quantlab.schemes.rules import HeadGroup
from quantlab.testing import in_triton_process, unavailable

from .decoding import SAME, forward, step_by_step
from .pooled import PROMPT, build, decoded, loaded, outcome, running

DUAL = "fp16+sr/nvfp4@4:buffer=bf16"
# Behind a rounding step that fell to the other side, the typical logit moves by a step of the format.
ROUNDING, QUIET = 1e-2, 3


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    found = {}

    def folder(kind):
        if kind not in found:
            found[kind] = build(kind, tmp_path_factory.mktemp("pooled") / kind)
        return found[kind]

    return folder


@pytest.fixture(scope="session")
def model_on(folders):
    found = {}

    def model(kind, device):
        if (kind, device) not in found:
            found[kind, device] = loaded(folders(kind)).to(device)
        return found[kind, device]

    return model


@pytest.fixture
def device(request, monkeypatch):
    """For ``parametrize("device", ..., indirect=True)``."""
    if reason := unavailable(request.param):
        pytest.skip(reason)
    # A convolution in TF32 would differ between batches of other sizes.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


def jobs(kind, policy, *scenarios, slow=()):
    return [
        pytest.param(device, kind, policy, scenario, marks=pytest.mark.slow if scenario in slow and device == "cpu" else ())
        for device in ("cpu", "cuda")
        for scenario in scenarios
    ]


JOBS = [
    *jobs("mamba2", DUAL, "steps", "rows", "chunks", "crop", "recorded", "reset", "fork"),
    *jobs("mamba2", "fp32@4", "generate", "beams", "crop", slow=("crop",)),
    *jobs("mamba2", "fp32@1", "crop", "reset", slow=("reset",)),
    *jobs("qwen3_5", DUAL, "steps", "crop", "chunks", slow=("chunks",)),
    *jobs("qwen3_5", "fp32@4", "generate", "recorded", slow=("generate", "recorded")),
    *jobs("kimi_linear", DUAL, "steps", "crop", slow=("crop",)),
    *jobs("nemotron_h", "fp32@4", "steps", "generate", slow=("generate",)),
]
# What the twins serve beyond that: every checkpoint, copy, buffer format and option that a pool has a layout for.
MORE = {
    "mamba2": ("bf16+sr@1", "int8@4", "fp8+sr/mxfp4@3", "fp32/fp8@4", "fp16/nvfp4@1:flush_read=copy"),
    "qwen3_5": ("fp8@4:buffer=fp16", "int8+sr/fp8@2:contents=derived", "fp32/nvfp4@4:key_read=checkpoint"),
    "kimi_linear": ("fp32@4", "fp8+sr/nvfp4@4:contents=derived", "int8@1"),
}


def check_near(ours, theirs, policy):
    """Kernels and torch, behind the same products on the same GPU."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        difference = (one - other).abs().float()
        if not parse_policy(policy).checkpoint.stochastic:
            assert difference.max() < SAME
        elif one.is_floating_point():
            assert difference.median() < ROUNDING
            if one.ndim == 3:  # logits (B, T, vocabulary), which start from the same stored bits
                assert ours[0] is not one or difference[:, :QUIET].max() < 10 * SAME


@pytest.mark.parametrize(("device", "kind", "policy", "scenario"), JOBS, indirect=["device"])
def test_pools_decode_as_decode_states_do(device, kind, policy, scenario, model_on, ids):
    model, given = model_on(kind, device), ids.to(device)
    ours, report = outcome(model, given, policy, scenario, True if device == "cpu" else None)
    theirs, expected = outcome(model, given, policy, scenario, False)
    if device == "cuda":
        assert all(text.startswith("triton on cuda:0: ") for text in report.backends.values())
        check_near(ours, theirs, policy)
    else:
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert report.exercised == expected.exercised
    assert report.op_hits == expected.op_hits
    assert report.ledger == expected.ledger
    assert report.effective_policy == expected.effective_policy


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy"), [(kind, policy) for kind, found in MORE.items() for policy in found])
def test_every_policy_with_a_layout_decodes_as_a_decode_state_does(kind, policy, model_on, ids):
    for scenario in ("steps", "rows", "chunks", "crop"):
        ours, report = outcome(model_on(kind, "cpu"), ids, policy, scenario, True)
        theirs, expected = outcome(model_on(kind, "cpu"), ids, policy, scenario, False)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), scenario
        assert report.exercised == expected.exercised
