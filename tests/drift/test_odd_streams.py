"""Drift on streams at the edge: results are numbers with a reason, or a status, never a crash or a silent zero."""

import dataclasses
import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from quantlab.drift import growth, run_drift, steady_output_error, synthetic_stream
from quantlab.drift.growth import pooled
from quantlab.drift.sums import CURVE_BINS, BinnedSums, RunSums
from quantlab.errors import InputError

POLICIES = ["fp32@1", "fp64@1", "nvfp4@4", "fp32/nvfp4@4", "int8+ef@1", "fp16+sr@2"]


def small(family="gated_delta", **changes):
    shape = {"heads": 2, "sequences": 1, "value_dim": 4, "key_dim": 16, "seed": 1, "steps": 40, "alpha": 0.9}
    return synthetic_stream(family, **(shape | changes))


def report(stream, policies=POLICIES):
    """{policy: (run, metrics, curve)}; any warning of numpy or torch on the way is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_drift(stream, policies)
        assert len(result.table) == len(result.runs) * stream.steps * stream.batch * stream.heads
        return {str(run.policy): (run, result.metrics(run), result.curve(run)) for run in result.runs}


def same_lengths(curve):
    assert len({len(curve[n]) for n in ("step", "output_error", "predicted_low", "predicted_high")}) == 1
    assert len({len(curve[n]) for n in ("state_step", "state_error", "read_error")}) == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 40])
def test_every_run_has_a_curve(steps):
    """One step is a curve of one point; without a prediction (fp64) the measured curve stays."""
    for policy, (_, metrics, curve) in report(small(steps=steps)).items():
        same_lengths(curve)
        assert len(curve["step"]) >= min(steps, 3) - (steps > 1), policy
        assert len(curve["state_step"]) >= 1
        assert curve["step"][0] >= 1.0
        if policy == "fp64@1":
            assert np.isnan(curve["predicted_low"]).all()
            assert metrics["prediction_note"] == "no prediction: the shadow is float64 too"


@pytest.mark.parametrize("silent", ["v", "q", "everything"])
def test_a_zero_output_has_no_relative_error_and_says_so(silent):
    stream = small()
    names = stream.tensors() if silent == "everything" else [silent]
    stream = dataclasses.replace(stream, **{n: torch.zeros_like(getattr(stream, n)) for n in names})
    for run, metrics, curve in report(stream).values():
        assert run.status in ("ok", "not_exercised")
        assert math.isnan(metrics["output_error"])
        assert math.isnan(metrics["output_bias"])
        assert "the exact output is zero" in metrics["warning"]
        assert metrics["steady"] is False
        same_lengths(curve)


def test_a_silent_head_does_not_disturb_the_others():
    stream = small()
    stream.v[:, :, 1] = 0
    for _, metrics, _ in report(stream).values():
        assert 0 < metrics["output_error"] < 0.2
        assert metrics["warning"] is None or "zero" not in metrics["warning"]


@pytest.mark.parametrize("log_decay", [-120.0, -800.0, -1e30])
def test_decays_that_underflow(log_decay):
    """Nothing of the past is left, in float32 or in float64 either: the output is the current token's, to rounding."""
    stream = small()
    stream = dataclasses.replace(stream, log_decay=torch.full_like(stream.log_decay, log_decay))
    for policy, (_, metrics, curve) in report(stream).items():
        assert metrics["output_error"] < 1e-6, policy
        same_lengths(curve)
        if policy != "fp64@1":
            assert metrics["predicted_output_error"] == pytest.approx(metrics["output_error"], rel=1.0)


def test_a_prefill_state_beyond_a_format_ends_that_policy_only():
    stream = small("mamba2")
    stream = dataclasses.replace(stream, initial=torch.full_like(stream.initial, 1e6))
    found = report(stream, ["fp16/nvfp4@4", "fp16@1", "fp32@1", "fp32/nvfp4@4"])
    assert [run.status for run, _, _ in found.values()] == ["diverged", "diverged", "ok", "ok"]
    assert found["fp16/nvfp4@4"][0].diverged_at == 1
    assert found["fp16@1"][0].diverged_at == 1
    assert found["fp32@1"][1]["output_error"] < 1e-5


def test_a_stream_that_outgrows_float32_diverges_everywhere_but_in_float64():
    """exp(5 * 40) = 1e87: the exact state itself is beyond every format that a prediction could round it to."""
    stream = small("mamba2")
    stream = dataclasses.replace(stream, log_decay=torch.full_like(stream.log_decay, 5.0))
    for policy, (run, metrics, _) in report(stream).items():
        if policy == "fp64@1":
            assert run.status == "ok"
        else:
            assert run.status == "diverged"
            assert "float64" not in metrics["prediction_note"]


@pytest.mark.parametrize("family", ["mamba2", "mamba1", "gated_delta"])
def test_one_head_without_forgetting(family):
    for _, metrics, curve in report(small(family, heads=1, alpha=1.0)).values():
        assert np.isfinite(metrics["output_error"])
        same_lengths(curve)


def test_pooling_of_zeros_and_gaps():
    one, zero, nothing = np.ones((4, 2)), np.zeros((4, 2)), np.full((4, 2), np.nan)
    assert pooled(one, one) == 1.0
    assert pooled(zero, one) == 0.0
    assert pooled(one, zero) == math.inf
    assert math.isnan(pooled(zero, zero))
    assert math.isnan(pooled(nothing, one))
    sums = BinnedSums(np.array([1, 2, 3, 5]), 2)
    sums.add(1, np.where(np.arange(4)[:, None] == 1, np.nan, one), one)
    centres, values = sums.curve()
    np.testing.assert_allclose(centres, [1.0, 2.0, np.sqrt(12)])
    np.testing.assert_array_equal(values, [1.0, np.nan, 1.0])


def test_curve_bins_hold_the_steps_that_they_name():
    """A spike at step n shows in the bin whose steps include n, alone, and every step is in one bin."""
    steps = 100
    bounds = RunSums(steps, 1, 1).curve["output"].bounds
    assert bounds[0] == 1
    assert bounds[-1] == steps + 1
    assert 10 < len(bounds) <= CURVE_BINS + 1
    for n in range(1, steps + 1):
        sums, error = BinnedSums(bounds, 1), np.zeros((steps, 1))
        error[n - 1] = 1.0
        sums.add(1, error, np.ones((steps, 1)))
        held = [low <= n < high for low, high in itertools.pairwise(bounds)]
        assert held == (sums.curve()[1] > 0).tolist()
        assert held.count(True) == 1


def test_growth_of_constants_zeros_and_gaps_is_a_number_or_nan():
    one = np.ones((256, 20))
    late, alone = one.copy(), one * [1] + 0.0
    late[:100] = 0
    alone[:, 1:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert growth(one, one).exponent == pytest.approx(0.0, abs=1e-12)
        for error, reference in (
            (0 * one, one),
            (one, 0 * one),
            (0 * one, 0 * one),
            (late, one),
            (one * np.nan, one),
        ):
            found = growth(error, reference)
            assert math.isnan(found.exponent)
            assert found.low is None
        found = growth(alone, alone)
        assert found.exponent == pytest.approx(0.0, abs=1e-12)
        assert found.low is None or np.isfinite(found.low)


def test_growth_is_fitted_from_an_eighth_of_the_run_on():
    """A law that changes before T / 8 leaves no trace; one that changes after it does."""
    steps = np.arange(1, 4097)[:, None] * np.ones((1, 16))
    early = np.where(steps <= 512, 100.0, 1.0)
    assert growth(early, np.ones_like(steps)).exponent == pytest.approx(0.0, abs=1e-9)
    later = np.where(steps <= 1024, 100.0, 1.0)
    assert growth(later, np.ones_like(steps)).exponent < -0.5


def test_the_interval_covers_nineteen_in_twenty():
    """Its width against the spread of the exponent itself over many planted runs: 2 x 1.96 standard deviations."""
    rng = np.random.default_rng(3)
    reference = np.ones((256, 16))
    fits = [
        growth(rng.lognormal(0, 1.0, 16) ** np.linspace(0, 1, 256)[:, None], reference) for _ in range(60)
    ]
    spread = np.std([fit.exponent for fit in fits])
    width = np.median([fit.high - fit.low for fit in fits])
    # The spread of 60 runs is known to 9 %; a bootstrap of 16 units is some 10 % narrow.
    assert 2.5 * spread < width < 5.0 * spread


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": "0.9"}, "alpha '0.9'"),
        ({"heads": 2.0}, "heads 2.0"),
        ({"steps": True}, "steps True"),
        ({"value_dim": 0}, "value_dim 0"),
        ({"key_dim": 0}, "key_dim 0"),
        ({"seed": "x"}, "seed 'x'"),
        ({"seed": 2**80}, "seed"),
        ({"alpha": None, "beta": 0.5}, "beta 0.5"),
        ({"beta": "1"}, "beta '1'"),
    ],
)
def test_wrong_arguments_of_streams_are_named(options, says):
    with pytest.raises(InputError) as caught:
        small(**options)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "change", [torch.Tensor.double, torch.Tensor.half, torch.Tensor.int, torch.Tensor.numpy, lambda t: None]
)
@pytest.mark.parametrize("name", ["q", "v", "initial", "log_decay"])
def test_streams_hold_float32_tensors(name, change):
    stream = small(steps=3)
    with pytest.raises(InputError, match=rf"^stream {name} "):
        dataclasses.replace(stream, **{name: change(getattr(stream, name))})
    with pytest.raises(InputError, match="without gradients"):
        dataclasses.replace(stream, **{name: getattr(stream, name).clone().requires_grad_()})


def test_policies_are_a_list():
    with pytest.raises(InputError, match="a list of policies"):
        run_drift(small(), "fp32@1")


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5, float("nan")])
def test_a_level_needs_a_decay(alpha):
    with pytest.raises(InputError, match=r"^alpha "):
        steady_output_error("fp32@1", "mamba2", alpha)
