"""What a drift run reports: exactness, laws, prediction, and results that are not numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantlab.drift import BAND, run_drift, steady_output_error, synthetic_stream
from quantlab.drift.growth import growth, pooled
from quantlab.drift.point import run_point, run_points, stream_of
from quantlab.drift.streams import load_stream
from quantlab.errors import InputError
from quantlab.records import save_stream_file
from quantlab.recurrences import RECURRENCES


def small(family="gated_delta", **changes):
    options = {"heads": 4, "sequences": 2, "steps": 96, "value_dim": 32, "key_dim": 64, "seed": 2} | changes
    return synthetic_stream(family, **options)


def metrics(result):
    return {str(run.policy): result.metrics(run) for run in result.runs}


@pytest.mark.parametrize("family", sorted(RECURRENCES))
@pytest.mark.parametrize("preset", ["evidence", "realistic"])
def test_float64_has_no_drift(family, preset):
    result = run_drift(small(family, preset=preset), ["fp64@1", "fp64@16"], dense=True)
    for run in result.runs:
        # 96 steps of float64 with a forgetting state: far below 1e-12 unless something is computed twice or narrowly.
        for error, reference in (
            (run.output_error, result.output_reference),
            (run.state_error, result.state_reference),
            (run.read_error, result.state_reference),
        ):
            assert pooled(error, reference) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.9, 0.99, 0.999, 0.9999])
def test_replay_is_step_to_five_parts_in_a_million(alpha):
    stream = synthetic_stream("gated_delta", alpha=alpha, steps=1024, heads=4, sequences=1, seed=0)
    from quantlab.schemes import start

    states = [start(policy, "gated_delta", stream.initial) for policy in ("fp32@1", "fp32@16")]
    outputs = [torch.stack([state.step(stream.step(t)) for t in range(stream.steps)]) for state in states]
    assert float((outputs[1] - outputs[0]).norm() / outputs[0].norm()) <= 5e-6


def test_measurement_against_a_literal_one():
    """The pooled numbers, from the definition, with a second run of the policy and of the recurrence."""
    from quantlab.schemes import start

    stream = small(alpha=0.95)
    result = run_drift(stream, ["fp8/nvfp4@8"], dense=True)
    state = start("fp8/nvfp4@8", "gated_delta", stream.initial, seed=0)
    shadow = stream.initial.double()
    sums = np.zeros(6)
    for t in range(stream.steps):
        output = state.step(stream.step(t)).double()
        shadow, exact = RECURRENCES["gated_delta"].step(shadow, stream.step(t).to(torch.float64))
        if t >= stream.steps // 2:
            logical, seen = state.materialize().double(), state.read_state().double()
            for i, (found, reference) in enumerate(((output, exact), (logical, shadow), (seen, shadow))):
                sums[2 * i] += float((found - reference).square().sum())
                sums[2 * i + 1] += float(reference.square().sum())
    m = result.metrics(result.runs[0])
    assert m["output_error"] == pytest.approx(np.sqrt(sums[0] / sums[1]), rel=1e-12)
    assert m["state_error"] == pytest.approx(np.sqrt(sums[2] / sums[3]), rel=1e-12)
    assert m["read_error"] == pytest.approx(np.sqrt(sums[4] / sums[5]), rel=1e-12)
    assert m["output_bias"] ** 2 + m["output_spread"] ** 2 == pytest.approx(m["output_error"] ** 2, rel=1e-12)
    table = result.table
    row = table[(table.step == 96) & (table["sequence"] == 1) & (table["head"] == 3)].iloc[0]
    assert row.output_error * row.output_reference == pytest.approx(
        float((output - exact)[1, 3].norm()), rel=1e-6
    )


def test_policies_do_not_disturb_each_other():
    stream = small(alpha=0.98)
    together = metrics(run_drift(stream, ["fp16+sr@1", "nvfp4@4", "fp16+sr@1"]))
    assert list(together) == ["fp16+sr@1", "nvfp4@4"]
    for policy, found in together.items():
        assert metrics(run_drift(stream, [policy]))[policy] == found


def test_a_divergent_policy_ends_and_the_others_go_on():
    """Growth by 3 % a step overflows float16 (65504) and later nothing else."""
    stream = small("mamba2", alpha=0.99, steps=400)
    object.__setattr__(stream, "log_decay", torch.full_like(stream.log_decay, 0.03))
    alone = metrics(run_drift(stream, ["fp16@1", "fp32@1"]))
    assert alone["fp16@1"]["diverged_at"] is not None
    assert 100 < alone["fp16@1"]["diverged_at"] < 400
    assert alone["fp32@1"]["diverged_at"] is None


def test_a_run_that_never_reads_a_store_says_so():
    result = run_drift(small(alpha=0.9, steps=8), ["fp32/nvfp4@16", "fp32@16", "fp32@1"])
    assert [run.status for run in result.runs] == ["not_exercised", "ok", "ok"]
    assert "fewer than twice" in result.metrics(result.runs[1])["warning"]
    assert result.metrics(result.runs[2])["warning"] is None


@pytest.mark.parametrize("family", ["gated_delta", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_the_prediction_holds_on_steady_curves(family):
    """Within its band of 1.4 on every steady curve with alpha >= 0.99, from nearly exact formats to 4 bits."""
    policies = [
        "fp32@1",
        "fp32@16",
        "bf16@1",
        "fp16@16",
        "int8@1",
        "int8+ef@1",
        "int8+sr@4",
        "fp8@16",
        "nvfp4@16",
    ]
    policies += ["fp32/nvfp4@16", "fp8/nvfp4@16", "fp32/nvfp4@16:flush_read=copy"]
    stream = synthetic_stream(family, alpha=0.99, steps=384, heads=8, sequences=2, value_dim=32, seed=4)
    for policy, m in metrics(run_drift(stream, policies)).items():
        ratio = m["output_error"] / m["predicted_output_error"]
        assert 1 / BAND <= ratio <= BAND, (policy, ratio)
        assert m["prediction_note"] is None


@pytest.mark.parametrize("alpha", [0.9, 0.99])
def test_the_closed_form_is_the_long_run_of_the_balance(alpha):
    """eps sqrt(mean rho^j) / sqrt(1 - rho^L) is what the step-by-step balance tends to, up to eps^2."""
    rho = alpha**2
    for policy, noise, window in (("bf16@1", 0.00166, 1), ("bf16@16", 0.00166, 16)):
        powers = rho ** np.arange(1, window + 1)
        expected = noise * np.sqrt(powers.mean() / (1 - rho**window))
        assert steady_output_error(policy, "mamba2", alpha) == pytest.approx(expected, rel=0.02)


def test_a_store_that_outgrows_the_decay_is_predicted_to_diverge():
    assert steady_output_error("nvfp4@1", "mamba2", 0.9999) == float("inf")
    assert steady_output_error("nvfp4@16", "mamba2", 0.99) < 0.5


def test_growth_finds_planted_laws():
    rng = np.random.default_rng(0)
    steps, units = 2048, 32
    step = np.arange(1, steps + 1)[:, None]
    reference = np.ones((steps, units))
    for exponent in (0.0, 0.5, 1.0):
        error = (1e-3 * step**exponent * rng.lognormal(0, 0.3, (steps, units))) ** 2
        found = growth(error, reference)
        assert found.low - 0.02 <= exponent <= found.high + 0.02
        # About 150 steps x 32 units a bin with 30 % scatter: a slope error of a few thousandths.
        assert found.exponent == pytest.approx(exponent, abs=0.02)
    sawtooth = (1 + np.arange(steps) % 16)[:, None] * reference
    assert growth(sawtooth, reference, window=16).exponent == pytest.approx(0.0, abs=1e-9)
    few = growth(error[:, :15], reference[:, :15])
    assert few.low is None


def test_points_of_one_stream_are_the_single_points():
    stream = {"preset": "evidence", "family": "mamba2", "alpha": 0.97, "heads": 2, "sequences": 1}
    stream |= {"steps": 40, "seed": 1, "value_dim": 16, "key_dim": 32}
    points = [{"kind": "drift", "stream": stream, "policy": p} for p in ("fp32@1", "nvfp4@4", "fp16+sr@2")]
    together = dict((p["policy"], r) for p, r in run_points(points, threads=1, on_progress=lambda *_: None))
    assert together["nvfp4@4"]["metrics"]["stream_hash"] == stream_of(stream).hash
    for point in points:
        assert run_point(point)["metrics"] == together[point["policy"]]["metrics"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"family": "mamba3"}, "nearest: mamba2"),
        ({"alpha": 0.0}, "alpha 0.0"),
        ({"alpha": 1.5}, "alpha 1.5"),
        ({"alpha": float("nan")}, "alpha nan"),
        ({"beta": 3.0, "alpha": 0.9}, "beta 3.0"),
        ({"preset": "evidense"}, "nearest: evidence"),
        ({"preset": "realistic", "alpha": 0.9}, "no alpha"),
        ({"heads": 0}, "heads 0"),
        ({"steps": -1}, "steps -1"),
        ({"heads": 4, "key_heads": 3}, "key_heads 3"),
    ],
)
def test_wrong_stream_arguments(options, says):
    options = {"family": "gated_delta", "steps": 4, "heads": 1} | options
    with pytest.raises(InputError) as caught:
        synthetic_stream(options.pop("family"), **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta", "initial"])
def test_streams_with_nan_or_wrong_shapes_are_refused(name):
    stream = small(alpha=0.9, steps=4)
    for value in (torch.nan, torch.inf):
        bad = stream.tensors() | {name: stream.tensors()[name].clone()}
        bad[name].view(-1)[3] = value
        with pytest.raises(InputError, match=f"stream {name} 'NaN or Inf'"):
            type(stream)(family=stream.family, **bad)
    cut = stream.tensors() | {name: stream.tensors()[name][..., :-1]}
    with pytest.raises(InputError, match="expected shape"):
        type(stream)(family=stream.family, **cut)
    with pytest.raises(InputError, match="at least one policy"):
        run_drift(stream, [])


def test_stream_files_keep_every_bit(tmp_path):
    from quantlab.drift import load_stream, save_stream

    stream = small("mamba1", preset="realistic", steps=5)
    save_stream(stream, tmp_path / "s.safetensors")
    again = load_stream(tmp_path / "s.safetensors")
    assert again.hash == stream.hash
    assert again.meta["preset"] == "realistic"
    (tmp_path / "broken").write_bytes(b"not a stream")
    with pytest.raises(InputError, match="broken"):
        load_stream(tmp_path / "broken")


def test_a_stream_that_overflows_is_a_result_for_every_policy():
    """The predictor takes its noise from the shadow in float32, which may have left float32's range itself."""
    stream = small("mamba2", alpha=0.9, steps=16)
    stream.log_decay.fill_(25.0)  # e^25 a step: float32 is full after 4 steps, float64 after 29
    result = run_drift(stream, ["fp32@1", "nvfp4@4", "int8@1", "fp32/nvfp4@4"])
    for run in result.runs:
        assert run.status == "diverged"
        assert 1 <= run.diverged_at <= 6
        assert result.metrics(run)["diverged_at"] == run.diverged_at


def test_streams_without_heads_or_numbers_are_refused(tmp_path):
    stream = small("mamba2", alpha=0.9, steps=4)
    with pytest.raises(InputError, match="at least one entry along each axis"):
        replace(
            stream,
            v=stream.v[:, :, :0],
            log_decay=stream.log_decay[:, :, :0],
            initial=stream.initial[:, :0],
        )
    arrays = {name: value.numpy() for name, value in stream.tensors().items()}
    for kind in (np.complex64, np.bool_):
        wrong = arrays | {"v": arrays["v"].astype(kind)}
        with pytest.raises(InputError, match="real numbers, but v is"):
            save_stream_file(tmp_path / "s", wrong, {"family": "mamba2"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_values_that_float32_cannot_hold_are_refused_in_one_line(tmp_path):
    arrays = {
        name: value.double().numpy() for name, value in small("mamba2", alpha=0.9, steps=4).tensors().items()
    }
    arrays["v"][0] = 1e300
    save_stream_file(tmp_path / "s", arrays, {"family": "mamba2"})
    with pytest.raises(InputError, match="stream v 'NaN or Inf'"):
        load_stream(tmp_path / "s")


@pytest.mark.filterwarnings("error")
def test_a_stream_that_writes_nothing_is_measured_without_a_word():
    result = run_drift(small(alpha=0.9, beta=0.0, steps=8), ["fp32@1"])
    assert np.isnan(metrics(result)["fp32@1"]["output_bias"])
