"""Kernels around a recurrence: they agree with their torch twins, and refuse what does not fit before any launch."""

import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels import target
from quantlab.kernels.conv_update import conv_update
from quantlab.kernels.gated_norm import gated_norm
from quantlab.kernels.step_inputs import gated_delta_inputs, kimi_delta_inputs, mamba2_inputs
from quantlab.models import glue
from quantlab.testing import IMPLEMENTATIONS, in_triton_process
from tests.kernels.glue_cases import CASES, FAST, MODELS, run_kernel, twin_of
from tests.kernels.glue_probe import extremes
from tests.kernels.jobs import jobs

JOBS = [job for job in jobs(CASES, FAST, MODELS) if job.values[0] != IMPLEMENTATIONS[0]]
TURNED = 0.01
"""Share of results that a rounding to 16 bits may turn; errors of float32 reach a midpoint for one in a thousand."""


def results(name, implementation):
    if implementation == "interpreter":
        found = in_triton_process(run_kernel, name, "cpu", interpret=True)
    else:
        found = run_kernel(name, "cuda")
    return {key: torch.from_numpy(value) for key, value in found.items()}


@pytest.mark.parametrize(("implementation", "name"), JOBS, indirect=["implementation"])
def test_kernel_and_twin_agree(implementation, name):
    twin, bounds = twin_of(name)
    found = results(name, implementation)
    assert found.keys() == twin.keys() == bounds.keys()
    for key, expected in twin.items():
        got = found[key].view(expected.dtype).reshape(expected.shape)
        assert got.isfinite().all(), f"{name}: {key}"
        error = (got.double() - expected.double()).abs()
        assert (error <= bounds[key]).all(), (
            f"{name}: {key} is off by {(error / bounds[key]).max():.3} bounds"
        )
        if expected.dtype != torch.float32:
            assert (got != expected).sum() <= 2 + TURNED * got.numel(), f"{name}: {key}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
def test_gates_at_the_ends_of_their_range(implementation):
    """Neither overflow nor lost small steps: softplus and sigmoid from -inf to inf, NaN where they were given it."""
    interpreted = implementation == "interpreter"
    got = in_triton_process(extremes, "cpu", interpret=True) if interpreted else extremes("cuda")
    z, softplus, sigmoid = (torch.from_numpy(part) for part in got)
    wide = z.double()
    expected = torch.nn.functional.softplus(wide, threshold=700), wide.sigmoid()
    # As in the bounds of the cases; below 2^-126 exponentials may be flushed.
    relative = (16 + 2 * wide.abs().clamp(max=200)) * 2.0**-24
    for value, exact in zip((softplus, sigmoid), expected, strict=True):
        assert torch.equal(value.isnan(), z.isnan())
        error = (value.double() - exact).abs().nan_to_num(0.0)
        same = value.double() == exact
        assert (same | (error <= relative * exact.abs() + 2.0**-126) | z.isnan()).all()


def row(*sizes, dtype=torch.float32):
    return torch.zeros(sizes, dtype=dtype)


def strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


CONV = {"conv_state": row(2, 6, 4), "x": row(2, 6), "weight": row(6, 4), "bias": row(6), "activation": "silu"}
NORM = {
    "y": row(2, 12),
    "gate": row(2, 12),
    "weight": row(12),
    "eps": 1e-5,
    "group_size": 4,
    "norm_before_gate": False,
    "D": row(3),
    "x": row(2, 12),
}
MAMBA2 = {
    "x": row(2, 3, 8),
    "dt": row(2, 3),
    "B": row(2, 1, 4),
    "C": row(2, 1, 4),
    "dt_bias": row(3),
    "A": row(3),
}
GDN = {
    "query": row(2, 1, 4),
    "key": row(2, 1, 4),
    "value": row(2, 3, 8),
    "a": row(2, 3),
    "b": row(2, 3),
    "A_log": row(3),
    "dt_bias": row(3),
}
KDA = {name: value for name, value in GDN.items() if name != "a"} | {"g": row(2, 3, 4), "dt_bias": row(12)}

REFUSED = {
    "a matrix as state": (conv_update, CONV, {"conv_state": row(6, 4)}, "conv_state .*at least 3 dimensions"),
    "no tensor as state": (conv_update, CONV, {"conv_state": None}, "conv_state None"),
    "a float64 state": (conv_update, CONV, {"conv_state": row(2, 6, 4).double()}, "conv_state 'float64"),
    "a state with gaps": (conv_update, CONV, {"conv_state": strided(row(2, 6, 4))}, "conv_state .*no gaps"),
    "a state whose rows lie apart": (
        conv_update,
        CONV,
        {"conv_state": row(4, 6, 4)[::2]},
        "conv_state .*strides.*contiguous",
    ),
    "x of another batch": (conv_update, CONV, {"x": row(3, 6)}, r"x .*of shape \(2, 6\)"),
    "two tokens": (conv_update, CONV, {"x": row(2, 6, 2)}, r"x .*of shape \(2, 6, 1\)"),
    "x of another dtype": (
        conv_update,
        CONV,
        {"x": row(2, 6).bfloat16()},
        "x 'bfloat16 .*: expected float32",
    ),
    "x with gaps": (conv_update, CONV, {"x": row(6, 2).T}, "x .*strides.*no gaps"),
    "x elsewhere": (conv_update, CONV, {"x": row(2, 6).to("meta")}, "x .*on meta': expected a tensor on cpu"),
    "a weight of a Conv1d": (conv_update, CONV, {"weight": row(6, 1, 4)}, r"weight .*of shape \(6, 4\)"),
    "a bias for fewer": (conv_update, CONV, {"bias": row(5)}, r"bias .*of shape \(6,\)"),
    "another activation": (conv_update, CONV, {"activation": "gelu"}, "activation 'gelu'"),
    "a vector as y": (gated_norm, NORM, {"y": row(12)}, "y .*at least 2 dimensions"),
    "y with gaps": (gated_norm, NORM, {"y": strided(row(2, 12))}, "y .*no gaps"),
    "a gate of another width": (gated_norm, NORM, {"gate": row(2, 8)}, "gate .*2 rows of 12 numbers"),
    "integers as gate": (gated_norm, NORM, {"gate": row(2, 12).int()}, "gate 'int32"),
    "a weight of another width": (gated_norm, NORM, {"weight": row(8)}, "weight .*divisor of 12"),
    "a matrix of weights": (gated_norm, NORM, {"weight": row(3, 4)}, r"weight .*of shape \(12,\)"),
    "a group that does not divide": (
        gated_norm,
        NORM,
        {"group_size": 5},
        "group_size 5: expected a divisor of 12",
    ),
    "a group of more than the weights": (
        gated_norm,
        NORM,
        {"weight": row(2)},
        "group_size 4: expected a divisor of 2",
    ),
    "no number as group": (gated_norm, NORM, {"group_size": 4.0}, "group_size 4.0"),
    "a gate of another kind": (gated_norm, NORM, {"activation": "relu"}, "activation 'relu'"),
    "D alone": (gated_norm, NORM, {"x": None}, "x None: expected given with D"),
    "x alone": (gated_norm, NORM, {"D": None}, "x .*given with D, and only then"),
    "five heads": (gated_norm, NORM, {"D": row(5)}, "D .*a divisor of 12"),
    "x of another width beside D": (gated_norm, NORM, {"x": row(2, 4)}, "x .*2 rows of 12"),
    "x without heads": (mamba2_inputs, MAMBA2, {"x": row(2, 24)}, "x .*at least 3 dimensions"),
    "dt for each value": (mamba2_inputs, MAMBA2, {"dt": row(2, 3, 8)}, r"dt .*of shape \(2, 3\)"),
    "B and C that differ": (mamba2_inputs, MAMBA2, {"C": row(2, 2, 4)}, r"C .*of shape \(2, 1, 4\)"),
    "both A": (mamba2_inputs, MAMBA2, {"A_log": row(3)}, "A 'given twice'"),
    "no A": (mamba2_inputs, MAMBA2, {"A": None}, "A None: expected exactly one"),
    "an A for each value": (mamba2_inputs, MAMBA2, {"A": row(3, 8)}, r"A .*of shape \(3,\)"),
    "a bias for fewer heads": (mamba2_inputs, MAMBA2, {"dt_bias": row(2)}, "dt_bias "),
    "another dtype": (mamba2_inputs, MAMBA2, {"dtype": torch.float64}, "dtype torch.float64"),
    "a key of another dim": (gated_delta_inputs, GDN, {"key": row(2, 1, 8)}, r"key .*of shape \(2, 1, 4\)"),
    "values of another batch": (
        gated_delta_inputs,
        GDN,
        {"value": row(3, 3, 8)},
        r"value .*of shape \(2, 3, 8\)",
    ),
    "a gate a channel": (gated_delta_inputs, GDN, {"a": row(2, 3, 4)}, r"a .*of shape \(2, 3\)"),
    "strengths of other heads": (gated_delta_inputs, GDN, {"b": row(2, 2)}, r"b .*of shape \(2, 3\)"),
    "rates of other heads": (gated_delta_inputs, GDN, {"A_log": row(4)}, r"A_log .*of shape \(3,\)"),
    "a gate a head": (kimi_delta_inputs, KDA, {"g": row(2, 3)}, r"g .*of shape \(2, 3, 4\)"),
    "a bias a head": (kimi_delta_inputs, KDA, {"dt_bias": row(3)}, r"dt_bias .*of shape \(12,\)"),
    "heads that no key head serves": (
        gated_delta_inputs,
        GDN,
        {"query": row(2, 2, 4), "key": row(2, 2, 4)},
        "query '2 key heads': expected a number that divides 3 heads",
    ),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """As if kernels ran here: whoever launched one would fail."""
    monkeypatch.setattr(target, "obstacle", lambda device: None)


@pytest.mark.parametrize(("function", "arguments", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_are_refused_before_any_launch(as_on_a_gpu, function, arguments, change, message):
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(InputError, match=f"^{message}"):
        function(**(arguments | change))
    assert all(torch.equal(arguments[name], value) for name, value in before.items())


def test_where_no_kernel_runs_is_refused():
    with pytest.raises(InputError, match=r"^conv_state 'tensors on cpu': expected a device that runs "):
        conv_update(**CONV)


@pytest.mark.parametrize(
    "function", [conv_update, gated_norm, mamba2_inputs, gated_delta_inputs, kimi_delta_inputs]
)
def test_an_empty_batch_launches_nothing(as_on_a_gpu, function):
    given = {
        conv_update: CONV,
        gated_norm: NORM,
        mamba2_inputs: MAMBA2,
        gated_delta_inputs: GDN,
        kimi_delta_inputs: KDA,
    }[function]
    batched = {"conv_state", "x", "y", "gate", "dt", "B", "C", "query", "key", "value", "a", "b", "g"}
    empty = {name: value[:0] if name in batched else value for name, value in given.items()}
    found, expected = function(**empty), getattr(glue, function.__name__)(**empty)
    if isinstance(found, torch.Tensor):
        found, expected = [found], [expected]
    else:
        found, expected = ([part.q, part.v, part.log_decay] for part in (found, expected))
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
