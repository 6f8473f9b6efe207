"""The torch twins of the kernels around a recurrence do what the installed transformers does."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from quantlab.models import glue
from quantlab.recurrences import get_recurrence
from tests.models.decoding import forward, new_cache

U = 2.0**-24
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [FP32, BF16]


def modelling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def random(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *sizes, dtype=FP32: torch.randn(sizes, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_5", "kimi_linear"])
def test_a_convolution_step_is_the_models(name, dtype):
    """State bit for bit.  Either sum is W + 2 roundings u of the terms' magnitudes off; in bfloat16 both are rounded
    to half a unit in the last place, before silu, whose slope is below 1.1, and behind it; silu itself is 6 u off.
    """
    normal, channels, taps = random(1), 48, 4
    wide = normal(3, 1, 80, dtype=dtype)
    x = wide[..., 16 : 16 + channels].transpose(1, 2)
    weight, bias = normal(channels, taps, dtype=dtype), normal(channels, dtype=dtype)
    for added in (bias, None):
        for activation in ("silu", None):
            state = normal(3, channels, taps, dtype=dtype)
            mine = state.clone()
            expected = modelling(name).causal_conv1d_update(x, state, weight, added, activation)
            got = glue.conv_update(mine, x, weight, added, activation)
            assert torch.equal(state, mine)
            assert torch.equal(mine[..., -1:], x)
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            assert got.is_contiguous()
            terms = (mine.double() * weight.double()).abs().sum(-1) + (
                0 if added is None else added.double().abs()
            )
            total = (mine.double() * weight.double()).sum(-1) + (0 if added is None else added.double())
            ulp = torch.finfo(BF16).eps if dtype == BF16 else 0.0
            bound = 1.1 * (2 * (taps + 2) * U * terms + ulp * total.abs())
            bound += (ulp + 12 * U) * expected[..., 0].double().abs()
            assert ((got - expected)[..., 0].double().abs() <= bound).all()
            assert dtype == FP32 or (got != expected).float().mean() <= 0.02


NORMS = {
    # name: model, class, twin's arguments: norm_before_gate, activation, rounds_norm
    "mamba2": ("mamba2", "MambaRMSNormGated", (False, "silu", True)),
    "nemotron_h": ("zamba2", "Zamba2RMSNormGated", (False, "silu", True)),
    "bamba": ("bamba", "BambaRMSNormGated", (False, "silu", True)),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", (False, "silu", True)),
    "qwen3_5": ("qwen3_5", "Qwen3_5RMSNormGated", (True, "silu", True)),
    "qwen3_next": ("qwen3_next", "Qwen3NextRMSNormGated", (True, "silu", True)),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridRMSNormGated", (True, "silu", True)),
    "kimi_linear": ("kimi_linear", "KimiLinearRMSNormGated", (True, "sigmoid", False)),
    "falcon_h1": ("falcon_h1", "FalconH1RMSNormGated", (False, "silu", False)),
    "falcon_h1, norm first": ("falcon_h1", "FalconH1RMSNormGated", (True, "silu", False)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_a_gated_norm_is_the_models_bit_for_bit(name, dtype):
    """Groups where the installed release has them, the full width where it does not."""
    model, kind, (norm_before_gate, activation, rounds_norm) = NORMS[name]
    normal, width, rows = random(2), 96, 5
    made = getattr(modelling(model), kind)
    known = inspect.signature(made.__init__).parameters
    wanted = {"group_size": 32, "n_groups": 3, "norm_before_gate": norm_before_gate, "eps": 1e-5}
    module = made(width, **{key: value for key, value in wanted.items() if key in known})
    group_size = 32 if {"group_size", "n_groups"} & set(known) else width
    with torch.no_grad():
        module.weight.copy_(1 + 0.5 * normal(width))
    module = module.to(dtype)
    y, gate = normal(rows, width, dtype=dtype), normal(rows, width + 8, dtype=dtype)[:, 8:]
    expected = module(y, gate)
    got = glue.gated_norm(
        y,
        gate,
        module.weight,
        1e-5,
        group_size,
        norm_before_gate,
        activation=activation,
        rounds_norm=rounds_norm,
    )
    assert got.dtype == expected.dtype == dtype
    assert torch.equal(got, expected)
    swapped = glue.gated_norm(y, gate, module.weight, 1e-5, group_size, not norm_before_gate)
    assert not torch.equal(swapped, expected)


def test_the_skip_is_added_before_the_norm_and_rounded_once():
    """As ``families.mamba2`` adds it, whatever dtype the recurrence wrote."""
    normal = random(3)
    y, x, gate = normal(2, 96), normal(2, 96, dtype=BF16), normal(2, 96, dtype=BF16)
    D, weight = normal(6, dtype=BF16), normal(96, dtype=BF16)
    skipped = (y + D.float().repeat_interleave(16) * x.float()).to(BF16)
    expected = glue.gated_norm(skipped, gate, weight, 1e-5, 32, False)
    assert torch.equal(glue.gated_norm(y, gate, weight, 1e-5, 32, False, D=D, x=x.view(2, 6, 16)), expected)


@pytest.mark.parametrize("logarithm", [False, True])
def test_mamba2_inputs_make_the_models_step(logarithm):
    """In float32 against transformers' own op.  A step's terms are the decayed state and dt B x, each some 16 roundings
    off in either implementation, and an output is a sum of N of them and the skip, in any order.
    """
    normal, batch, heads, value_dim, groups, key_dim = random(4), 3, 6, 8, 3, 16
    x, b, c = normal(batch, heads, value_dim), normal(batch, groups, key_dim), normal(batch, groups, key_dim)
    dt, bias, rate = normal(batch, heads) - 3, normal(heads), normal(heads)
    decay, skip = -rate.exp(), normal(heads)
    state = normal(batch, heads, value_dim, key_dim)
    given = {"A_log": rate} if logarithm else {"A": decay}
    inputs = glue.mamba2_inputs(x, dt, b, c, bias, **given)
    k, q = (t.repeat_interleave(heads // groups, 1) for t in (inputs.k, inputs.q))
    decayed = state * inputs.log_decay.exp()[..., None, None]
    written = inputs.v[..., None] * k[:, :, None]
    mine = decayed + written
    output = (mine * q[:, :, None]).sum(-1) + skip[:, None] * x
    wide = (batch, heads, value_dim)
    expected = modelling("mamba2").mamba2_selective_state_update(
        state,
        x,
        dt[..., None].expand(wide),
        decay[:, None, None].expand(heads, value_dim, key_dim),
        b,
        c,
        skip[:, None].expand(heads, value_dim),
        dt_bias=bias[:, None].expand(heads, value_dim),
        dt_softplus=True,
    )
    terms = decayed.abs() + written.abs()
    assert ((mine - state).abs() <= 32 * U * terms).all()
    bound = (terms * q[:, :, None].abs()).sum(-1) + (skip[:, None] * x).abs()
    assert ((output - expected).abs() <= (32 + 2 * key_dim) * U * bound).all()


class Called(Exception):
    """Carries the arguments of a recurrent op."""


def op_arguments(monkeypatch, module, mixer, op, width):
    """What a layer's mixer gives to its op for one token, and the outputs of its projections by name."""

    def caught(*args, **kwargs):
        raise Called(dict(zip(("query", "key", "value"), args, strict=False)) | kwargs)

    monkeypatch.setattr(module, op, caught)
    outputs = {}
    for name, part in mixer.named_modules():
        if name:
            part.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output[:, 0]}))
    with torch.no_grad(), pytest.raises(Called) as found:
        mixer(random(5)(3, 1, width, dtype=next(mixer.parameters()).dtype))
    return {
        name: value[:, 0] for name, value in found.value.args[0].items() if isinstance(value, torch.Tensor)
    }, outputs


def check_vectors(inputs, given, l2norm, scale):
    """v is a copy, q and k are within the rounding of a norm of K squares."""
    assert torch.equal(inputs.v, given["value"])
    for got, name, factor in ((inputs.q, "query", scale), (inputs.k, "key", 1.0)):
        expected = l2norm(given[name].float()) * factor
        bound = (expected.shape[-1] + 8) * U * expected.abs() + torch.finfo(
            got.dtype
        ).eps / 2 * expected.abs()
        assert ((got.float() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gated_delta", "kimi_linear"])
def test_delta_inputs_are_what_the_models_layers_give_to_their_op(kind, dtype, monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM

    from quantlab.models import build_tiny
    from quantlab.models.recurrent_layers import recurrent_layers

    model = AutoModelForCausalLM.from_pretrained(build_tiny(kind, tmp_path), dtype=dtype)
    layer = next(iter(recurrent_layers(model).values()))
    mixer, module = layer.module, inspect.getmodule(type(layer.module))
    assert module is not None
    op, width = layer.family.prefill_op, model.config.get_text_config().hidden_size
    given, outputs = op_arguments(monkeypatch, module, mixer, op, width)
    vectors = given["query"], given["key"], given["value"]
    if kind == "gated_delta":
        key_heads = mixer.num_k_heads
        vectors = tuple(t[:, :: t.shape[1] // key_heads] for t in vectors[:2]) + vectors[2:]
        gate, strength = outputs["in_proj_a"], outputs["in_proj_b"]
        inputs = glue.gated_delta_inputs(*vectors, gate, strength, mixer.A_log, mixer.dt_bias)
        assert torch.equal(inputs.log_decay, given["g"])
    else:
        gate, strength = outputs["forget_gate.f_b_proj"], outputs["b_proj"]
        forget = mixer.forget_gate
        raw = gate.view(given["g"].shape)
        inputs = glue.kimi_delta_inputs(*vectors, raw, strength, forget.A_log, forget.dt_bias)
        # The layer forms log(1 + e^x): the sum is u of itself off, and its logarithm twice that at most.
        rate = forget.A_log.float().exp().reshape(-1, 1)
        step = (inputs.log_decay / -rate).double()
        bound = rate.double() * U * (4 + 4 * step.exp().log1p() + 4 * step)
        assert ((inputs.log_decay - given["g"]).abs() <= bound).all()
    assert torch.equal(inputs.beta, given["beta"])
    check_vectors(
        inputs,
        dict(zip(("query", "key", "value"), vectors, strict=True)),
        module.l2norm,
        vectors[0].shape[-1] ** -0.5,
    )


def test_the_families_get_what_the_twins_give():
    """A step of the recurrence from raw inputs is the step from the family's own, bit for bit in float32."""
    normal = random(6)
    query, key, value = normal(2, 3, 16), normal(2, 3, 16), normal(2, 6, 8)
    a, b, rate, bias = normal(2, 6), normal(2, 6), normal(6), normal(6)
    inputs = glue.gated_delta_inputs(query, key, value, a, b, rate, bias, negative_eigenvalues=True)
    assert torch.equal(inputs.beta, 2 * b.sigmoid())
    assert torch.equal(inputs.log_decay, -rate.exp() * F.softplus(a + bias))
    assert get_recurrence("gated_delta").gate_shape(6, 8, 16) == inputs.log_decay.shape[1:]
    rounded = glue.gated_delta_inputs(query, key, value, a, b, rate, bias, dtype=BF16)
    assert torch.equal(rounded.q, inputs.q.bfloat16())
    assert torch.equal(rounded.log_decay, inputs.log_decay)


def seen_by(mixer, model, token, cache):
    """What a layer's mixer got and gave for one token."""
    caught = {}
    hooks = [
        mixer.register_forward_pre_hook(
            lambda _, args, kwargs: caught.update(given=args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        ),
        mixer.register_forward_hook(lambda _, __, output: caught.update(got=output)),
    ]
    forward(model, token, cache)
    for hook in hooks:
        hook.remove()
    return caught["given"], caught["got"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta"])
def test_a_layer_made_of_twins_is_the_models_layer(kind, tmp_path):
    """Convolution, inputs, recurrence, norm: one decode step of a mixer in float32.  Either side's sums have fewer than
    256 terms, each rounded once, and three of them follow each other: 2^-15 of the largest number at most.
    """
    from transformers import AutoModelForCausalLM

    from quantlab.models import build_tiny
    from quantlab.models.recurrent_layers import recurrent_layers

    model = AutoModelForCausalLM.from_pretrained(build_tiny(kind, tmp_path), dtype=FP32)
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(7))
    cache = new_cache(model)
    forward(model, ids[:, :8], cache)
    index, layer = next(iter(recurrent_layers(model).items()))
    mixer, kept = layer.module, cache.layers[index]
    conv_state, state = kept.conv_states[0].clone(), kept.recurrent_states[0].clone()
    given, expected = seen_by(mixer, model, ids[:, 8:], cache)
    conv = mixer.conv1d
    step = {"weight": conv.weight[:, 0], "bias": conv.bias, "activation": "silu"}
    recurrence = get_recurrence(layer.family.recurrence)
    if kind == "mamba2":
        heads, value_dim, groups, key_dim = (
            mixer.num_heads,
            mixer.head_dim,
            mixer.n_groups,
            mixer.ssm_state_size,
        )
        width, keys = heads * value_dim, groups * key_dim
        gate, columns, dt = mixer.in_proj(given)[:, 0].split([width, width + 2 * keys, heads], 1)
        x, b, c = glue.conv_update(conv_state, columns, **step).split([width, keys, keys], 1)
        x, b, c = x.view(3, heads, value_dim), b.view(3, groups, key_dim), c.view(3, groups, key_dim)
        inputs = glue.mamba2_inputs(x, dt, b, c, mixer.dt_bias, A_log=mixer.A_log)
        y = recurrence.step(state, inputs)[1].flatten(1)
        group_size = getattr(mixer.norm, "group_size", width)
        norm, eps = mixer.norm.weight, mixer.norm.variance_epsilon
        y = glue.gated_norm(y, gate, norm, eps, group_size, False, D=mixer.D, x=x)
    else:
        sizes = (mixer.num_k_heads, mixer.head_k_dim), (mixer.num_v_heads, mixer.head_v_dim)
        widths = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
        q, k, v = glue.conv_update(conv_state, mixer.in_proj_qkv(given)[:, 0], **step).split(widths, 1)
        vectors = q.view(3, *sizes[0]), k.view(3, *sizes[0]), v.view(3, *sizes[1])
        gates = mixer.in_proj_a(given)[:, 0], mixer.in_proj_b(given)[:, 0]
        inputs = glue.gated_delta_inputs(*vectors, *gates, mixer.A_log, mixer.dt_bias)
        y = recurrence.step(layer.family.to_state(state), inputs)[1]
        z = mixer.in_proj_z(given)[:, 0].view(y.shape)
        y = glue.gated_norm(
            y, z, mixer.norm.weight, mixer.norm.variance_epsilon, mixer.head_v_dim, True
        ).flatten(1)
    got = mixer.out_proj(y)
    assert torch.equal(conv_state, kept.conv_states[0])
    assert ((got - expected[:, 0]).abs() <= 2.0**-15 * expected.abs().max()).all()
