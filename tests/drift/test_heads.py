"""Heads from parameters, streams and model folders, and the risks that the closed form sees in them."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantlab.drift import heads_of_decay, heads_of_gates, heads_of_stream, run_drift, synthetic_stream
from quantlab.drift.heads import steady_errors
from quantlab.drift.model_heads import MODEL_TYPES, heads_of_folder, read_heads
from quantlab.drift.risks import (
    difference_curve,
    expected_largest,
    half_stationary_tokens,
    head_risks,
    largest_number,
    lost_increments,
)
from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.models.config_geometry import READERS, read_config
from quantlab.recurrences import get_recurrence


def head(family="gated_delta", alpha=0.99, **options):
    return heads_of_decay(family, np.full((1, 1), math.log(alpha)), **options)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("forgets", [1e-5, 1e-3, 1e-1])
def test_lost_increments_against_stores_of_a_random_walk(name, forgets):
    """A stationary state that forgets a little and is written a little: how often a store leaves the value where it is.

    262,144 elements: a standard error below 1e-3.  For scaled formats the scale moves too, and two stores of equal
    codes differ by it, so an element counts as unmoved within half a spacing: 0.02 for what that blurs.
    """
    format = parse(name)
    generator = torch.Generator().manual_seed(3)
    stored = format.round(torch.randn(2048, 128, generator=generator))
    correlation = 1 - forgets
    moved = correlation * stored + math.sqrt(1 - correlation**2) * torch.randn(2048, 128, generator=generator)
    if format.recipe is None:
        unmoved = float((format.round(moved) == stored).float().mean())
    else:
        largest = stored.abs().amax(1, keepdim=True)
        element = format.element
        scale = largest / element.max
        code = (stored / scale).abs()
        half = torch.full_like(code, 0.5)
        if hasattr(element, "mantissa_bits"):
            half = torch.exp2(
                torch.floor(torch.log2(code.clamp_min(element.min_normal))) - element.mantissa_bits - 1
            )
        unmoved = float(((moved - stored).abs() < half * scale).float().mean())
    found = float(lost_increments(format, np.array([correlation]), 128)[0])
    assert found == pytest.approx(unmoved, abs=0.02)


def test_an_increment_below_half_a_unit_is_lost_without_stochastic_rounding():
    """Evidence B5: x = 1 plus 1e-3 in bf16, a thousand times, never moves; stochastic rounding arrives at 2."""
    one = torch.ones(4096)
    nearest, stochastic = one, one
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        nearest = parse("bf16").round(nearest + 1e-3)
        words = torch.randint(0, 2**32, (4096,), generator=generator)
        stochastic = parse("bf16+sr").round(stochastic + 1e-3, words)
    assert bool((nearest == 1).all())
    assert float(stochastic.mean()) == pytest.approx(2.0, abs=0.01)
    # A state that writes almost nothing is in the same place: most stores lose their increment.
    slow = head("mamba2", 1 - 1e-6)
    assert bool(head_risks("bf16@1", slow).needs_stochastic[0])
    assert not bool(head_risks("bf16+sr@1", slow).needs_stochastic[0])
    assert not bool(head_risks("int8+ef@1", slow).needs_stochastic[0])
    assert not bool(head_risks("bf16@1", head("mamba2", 0.99)).needs_stochastic[0])


@pytest.mark.parametrize("alpha", [0.9, 0.99])
def test_the_largest_element_of_a_run(alpha):
    """s sqrt(2 ln n) over 512 tokens from a warm start; correlated Gaussians stay below it by some percent."""
    stream = synthetic_stream(
        "mamba2", alpha=alpha, steps=1024, heads=4, sequences=1, value_dim=32, key_dim=64
    )
    state, largest = stream.initial.double(), 0.0
    recurrence = get_recurrence("mamba2")
    for t in range(1024):
        state, _ = recurrence.step(state, stream.step(t).to(torch.float64))
        if t >= 512:
            largest = max(largest, float(state.abs().max()))
    # The preset's keys have unit norm; a Mamba head of the closed form has unit entries, sqrt(64) as large.
    heads = head("mamba2", alpha, value_dim=32, key_dim=64, write_power=1 / 64)
    assert largest == pytest.approx(float(expected_largest(heads, 4 * 512)[0]), rel=0.15)


def test_headroom_counts_powers_of_two():
    heads = head(alpha=0.99)
    found = {name: float(head_risks(f"{name}@1", heads).headroom[0]) for name in ("fp16", "bf16", "e4m3")}
    largest = float(expected_largest(heads)[0])
    assert found["fp16"] == pytest.approx(math.log2(65504 / largest))
    assert found["fp16"] - found["e4m3"] == pytest.approx(math.log2(65504 / 448))
    assert largest_number(parse("int8")) == largest_number(parse("nvfp4")) > 3e38
    assert largest_number(parse("nvfp4:none")) == 448 * 6
    # A stream that overflows fp16 is seen coming: its own largest element is beyond the format.
    stream = synthetic_stream("mamba2", alpha=0.9, steps=32, heads=1, sequences=1, value_dim=8, key_dim=16)
    stream.v.mul_(1e6)
    assert float(head_risks("fp16@1", heads_of_stream(stream)).headroom[0]) < 0
    assert run_drift(stream, ["fp16@1"]).runs[0].status == "diverged"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "alpha"), [("int8", 0.99), ("bf16", 0.99), ("int8+ef", 0.999)])
def test_arithmetic_noise_grows_as_flips_spread(name, alpha):
    """Two runs that differ by 1e-7 at every step and round alike (evidence B6: amplified to a percent in 256 tokens).

    The curve is a mean over rows that meet their first flip at random times; 128 rows and one history each: a factor
    of 2.5 at 64, 128 and 256 tokens, while the curve itself spans more than a factor of 20 from 16 on.
    """
    stream = synthetic_stream(
        "gated_delta", alpha=alpha, steps=256, heads=2, sequences=1, value_dim=64, seed=5
    )
    format, recurrence = parse(name), get_recurrence("gated_delta")
    generator = torch.Generator().manual_seed(9)
    one = other = stream.initial.double()
    residuals, found = [None, None], {}
    for t in range(256):
        inputs = stream.step(t).to(torch.float64)
        one, other = recurrence.step(one, inputs)[0], recurrence.step(other, inputs)[0]
        other = other * (1 + 1e-7 * torch.randn(other.shape, generator=generator, dtype=torch.float64))
        stored = []
        for i, state in enumerate((one, other)):
            encoded = format.quantize(state.float(), residual=residuals[i])
            residuals[i] = encoded.residual
            stored.append(format.dequantize(encoded).double())
        one, other = stored
        found[t + 1] = float((one - other).norm() / one.norm())
    heads = head(alpha=alpha, value_dim=64)
    eps = steady_errors(f"{name}@1", heads).noise
    stores = np.arange(1, 257)
    curve = difference_curve(heads, heads.persistence.max(1), eps, 1, stores)[0]
    for t in (64, 128, 256):
        assert 1 / 2.5 < found[t] / curve[t - 1] < 2.5, (t, found[t], curve[t - 1])
    assert found[256] / 1e-7 > 1e4


def test_without_a_quantiser_or_an_erase_two_implementations_stay_together():
    assert np.isinf(head_risks("fp32@1", head()).divergence[0])
    assert np.isinf(head_risks("int8@1", head("mamba2")).divergence[0])
    assert np.isfinite(head_risks("int8@1", head()).divergence[0])
    assert np.isinf(head_risks("fp32/nvfp4@16", head()).divergence[0])


def test_the_shortest_test_reads_two_stores_and_half_of_the_error():
    heads = head("mamba2", 0.99)
    # rho^t = 3/4 leaves sqrt(1 - 3/4) = half of the stationary error.
    assert float(half_stationary_tokens(heads)[0]) == pytest.approx(math.log(0.75) / (2 * math.log(0.99)))
    assert float(head_risks("fp32@16", heads).test_length[0]) == 33
    slow = head("mamba2", 0.9999)
    assert float(head_risks("fp32@16", slow).test_length[0]) == math.ceil(
        float(half_stationary_tokens(slow)[0])
    )


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta", "mamba2", "mamba1"])
def test_statistics_of_a_stream_predict_its_errors(family):
    """From the means of the second half alone: a stationary stream at alpha .95, and the measured run of the policy."""
    stream = synthetic_stream(family, alpha=0.95, steps=256, heads=4, sequences=2, value_dim=16, seed=2)
    heads = heads_of_stream(stream)
    policies = ["bf16@1", "int8+ef@1", "nvfp4@4"]
    result = run_drift(stream, policies)
    for run in result.runs:
        found = np.sqrt(np.mean(steady_errors(run.policy, heads).output ** 2))
        assert result.metrics(run)["output_error"] / found == pytest.approx(1.0, abs=0.2)


def test_heads_that_forget_little_have_a_prediction_too():
    """Small in every entry is not singular.  One rounding a token: eps^2 / (1 - rho (1 + eps^2)).

    The float32 rounding of exp(log decay), at most 6e-8 in every token, adds 6e-8 / (1 - alpha) to the error at most:
    6e-3 beside more than .06 at the slowest head, one hundredth of the power.
    """
    forgets = np.logspace(-3, -5, 9)
    heads = heads_of_decay("mamba2", np.log1p(-forgets)[:, None])
    found = steady_errors("fp16+sr@1", heads)
    power = found.noise**2
    plain = np.sqrt(power / (1 - heads.decay[:, 0] * (1 + power)))
    assert np.allclose(found.state, plain, rtol=0.01)
    for policy in ("fp32@1", "fp32@16", "fp32/nvfp4@16:buffer=bf16"):
        assert (steady_errors(policy, heads).output < 0.2).all()


def test_parameters_give_the_decay_and_its_fluctuation():
    a_log, bias = torch.tensor([0.0, 1.0]), torch.tensor([0.5, -2.0])
    heads = heads_of_gates("gated_delta", a_log, bias)
    step = torch.nn.functional.softplus(bias.double())
    expected = torch.exp(-torch.exp(a_log.double()) * step)
    assert np.allclose(heads.decay[:, 0], expected.square().numpy(), rtol=1e-12)
    spread = heads_of_gates("gated_delta", a_log, bias, gate_spread=1.0)
    drawn = bias.double() + torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0)).double()
    squares = torch.exp(-2 * torch.exp(a_log.double()) * torch.nn.functional.softplus(drawn)).mean(0)
    # A standard error of 1e-3 of the sampled mean.
    assert np.allclose(spread.decay[:, 0], squares.numpy(), atol=3e-3)


CONFIGS = {
    "mamba2": {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 16},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "linear_key_head_dim": 16,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "linear_attn_config": {"num_heads": 2, "head_dim": 16, "kda_layers": [1, 2]},
    },
    "mamba": {"num_hidden_layers": 2, "intermediate_size": 8, "state_size": 16},
    "bamba": {
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": "auto",
        "mamba_expand": 2,
        "hidden_size": 16,
        "mamba_d_state": 16,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_without_weights_is_read_by_its_initial_distribution(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name} | CONFIGS[name]))
    heads = heads_of_folder(tmp_path)
    assert "no weights" in heads.source
    assert heads.family == MODEL_TYPES[name].family
    layers = {"mamba2": 2, "qwen3_next": 3, "kimi_linear": 2, "mamba": 2, "bamba": 2}[name]
    assert len({n.split(",")[0] for n in heads.names}) == layers
    assert np.isfinite(head_risks("int8@1", heads).errors.output).all()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-ME"}),
        ("zamba2", {}),
        ("bamba", {"attn_layer_indices": [1, 30]}),
        ("falcon_h1", {}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 16}),
        ("qwen3_next", {}),
        ("qwen3_5_moe_text", {"full_attention_interval": 3}),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [2, 3, 5], "full_attn_layers": [1, 4]}}),
        ("jamba", {}),
        ("zamba", {}),
        ("falcon_mamba", {}),
    ],
)
def test_layers_have_the_numbers_that_transformers_gives_them(tmp_path, name, more):
    """Against the layer types that transformers makes of the published config, and of what it saves itself."""
    from transformers import AutoConfig

    if name == "kimi_linear":
        more = more | {"num_hidden_layers": 5}
    config = AutoConfig.for_model(name, **more)
    kinds = getattr(config, "layer_types", None) or ["linear_attention"] * config.num_hidden_layers
    expected = [n for n, kind in enumerate(kinds) if kind in ("linear_attention", "mamba", "hybrid")]
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert list(MODEL_TYPES[name].shape(saved).numbers) == expected
    published = {
        key: value for key, value in saved.items() if key not in ("layer_types", "layers_block_type")
    }
    if name == "granitemoehybrid" or name.startswith("zamba"):
        published = saved  # the list is all there is
    elif name == "kimi_linear":
        published["linear_attn_config"] = more["linear_attn_config"] | {"num_heads": 2, "head_dim": 16}
    elif name.startswith("qwen"):
        published["full_attention_interval"] = more.get("full_attention_interval", 4)
    elif name == "nemotron_h":
        published |= more
    assert list(MODEL_TYPES[name].shape(published).numbers) == expected


def test_every_so_many_layers_are_full_attention_where_a_config_lists_none(tmp_path):
    config = {"model_type": "qwen3_next"} | CONFIGS["qwen3_next"] | {"num_hidden_layers": 9}
    del config["layer_types"]
    more = {"full_attention_interval": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    assert heads_of_folder(tmp_path).heads == 7 * 4  # all but the fourth and the eighth layer
    assert read_config(tmp_path).layers == 7  # what ``quantlab size`` counts


def test_every_layer_of_zamba_counts_and_its_heads_are_channels(tmp_path):
    """A hybrid layer has a recurrence behind its attention; weights lie in (heads, width, state size)."""
    config = {"model_type": "zamba", "num_hidden_layers": 3, "hidden_size": 4, "mamba_expand": 2}
    config |= {"mamba_d_state": 16, "mamba_d_conv": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    for listed in ({}, {"layers_block_type": ["mamba", "hybrid", "mamba"]}):
        (tmp_path / "config.json").write_text(json.dumps(config | listed))
        found = heads_of_folder(tmp_path)
        assert (found.family, found.heads, found.value_dim, found.key_dim) == ("mamba1", 3, 8, 16)
        assert read_config(tmp_path).layers == 3  # what ``quantlab size`` counts
    weights = {
        "model.layers.0.mamba.A_log": torch.full((2, 4, 16), 0.5),
        "model.layers.0.mamba.dt_proj_bias": torch.full((2, 4), -2.0),
    }
    save_file(weights, tmp_path / "model.safetensors")
    found = heads_of_folder(tmp_path)
    assert (found.heads, found.names) == (1, ("layer 0, head 0",))
    assert not read_heads(tmp_path).complete
    step = math.log1p(math.exp(-2.0))
    assert np.allclose(found.decay, math.exp(-2 * math.exp(0.5) * step), rtol=1e-6)


def test_every_model_type_whose_size_is_counted_is_predicted():
    assert set(READERS) == set(MODEL_TYPES)


def test_weights_are_read_where_they_are(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear"} | CONFIGS["kimi_linear"]))
    weights = {}
    for layer in (10, 2):
        prefix = f"model.layers.{layer}.self_attn."
        weights[prefix + "A_log"] = torch.full((1, 1, 2, 1), float(layer) / 10)
        weights[prefix + "dt_bias"] = torch.linspace(-4, 0, 32)
    save_file(weights, tmp_path / "model.safetensors")
    heads = heads_of_folder(tmp_path)
    assert heads.source.startswith("A_log and dt_bias of 2 layers")
    assert heads.names[:3] == ("layer 2, head 0", "layer 2, head 1", "layer 10, head 0")
    assert read_heads(tmp_path).layers == (2, 10)
    assert read_heads(tmp_path).complete
    expected = -math.exp(0.2) * math.log1p(math.exp(-4.0))
    assert heads.log_decay[0, 0] == pytest.approx(expected, rel=1e-6)
    save_file({k: torch.zeros(3) for k in weights}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="shape"):
        heads_of_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "model_type"),
        ("[]", "JSON object"),
        ("{", "expected JSON: Expecting property name"),
        ('{"model_type": "mamba2"}', "num_"),
        ('{"model_type": "olmo_hybrid", "num_hidden_layers": 4}', "full_attention_interval"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=says):
        heads_of_folder(tmp_path)
