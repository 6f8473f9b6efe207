"""Small operations in one launch: which of a model's modules are replaced, and that nothing else happens to it."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quantlab.models import build_tiny, glue
from quantlab.models.fusion import fuse, fused_norm
from quantlab.models.recurrent_layers import op_namespaces

KINDS = ("nemotron_h", "qwen3_5", "kimi_linear")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    folder = build_tiny(request.param, tmp_path_factory.mktemp("fusion") / request.param)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_every_norm_of_a_model_is_replaced_and_put_back(model):
    norms = {name: part for name, part in model.named_modules() if "RMSNorm" in type(part).__name__}
    assert norms
    replaced = {n for n, part in model.named_modules() if fused_norm(part, glue.gated_norm, {}) is not None}
    assert replaced == set(norms)
    with contextlib.ExitStack() as stack:
        fuse(stack, model, [file for file, _ in op_namespaces(model)], {})
        assert all("forward" in vars(part) for part in norms.values())
    assert not any("forward" in vars(part) for part in norms.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replacement_is_the_norm(model, dtype):
    """To two of the dtype's last places, rows of other sizes and leading dimensions included."""
    draw = torch.Generator().manual_seed(3)
    for part in model.modules():
        if "RMSNorm" not in type(part).__name__:
            continue
        module = copy.deepcopy(part).to(dtype)
        rows = [torch.randn((2, 1, module.weight.numel()), generator=draw).mul(7).to(dtype)]
        if "Gated" in type(part).__name__:
            rows.append(torch.randn(rows[0].shape, generator=draw).to(dtype))
        fused = fused_norm(module, glue.gated_norm, {})
        assert fused is not None
        expected, found = module(*rows).float(), fused(*rows).float()
        assert ((found - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-6).all()


class OddRMSNorm(nn.Module):
    """Looks like an RMS norm and is none."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return self.weight * x / x.abs().mean(-1, keepdim=True)


class CenteredRMSNormGated(OddRMSNorm):
    def forward(self, x, gate):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * gate.sigmoid()


@pytest.mark.parametrize(
    "kind", [OddRMSNorm, CenteredRMSNormGated, lambda: nn.LayerNorm(8), lambda: nn.Linear(2, 2)]
)
def test_what_is_not_recognised_stays(kind):
    assert fused_norm(kind(), glue.gated_norm, {}) is None


def test_a_norm_adds_what_was_left_for_it(model):
    """Once: the next call is the norm alone."""
    part = next((p for p in model.modules() if type(p).__name__.endswith("RMSNormGated")), None)
    draw, width = torch.Generator().manual_seed(0), part.weight.numel()
    y, gate, x = (torch.randn((2, width), generator=draw) for _ in range(3))
    D, skips = torch.rand(2, generator=draw), {}
    fused = fused_norm(part, glue.gated_norm, skips)
    assert fused is not None
    skips[id(part)] = D, x.view(2, 2, -1)
    expected = part(y + D.repeat_interleave(width // 2) * x, gate)
    assert torch.allclose(fused(y, gate), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(fused(y, gate), part(y, gate), rtol=1e-5, atol=1e-6)
