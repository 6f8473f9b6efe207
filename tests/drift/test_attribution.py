"""The attribution ladder: one defect a rung, shares that add up, and the public case it was made for."""

import dataclasses

import pytest
import torch

from quantlab.drift import run_drift, synthetic_stream
from quantlab.drift.attribution import STANDARD, attribute, parts_of
from quantlab.errors import InputError
from quantlab.schemes import parse_policy


def small(family, **changes):
    options = {"steps": 96, "heads": 4, "sequences": 1, "value_dim": 16, "key_dim": 32, "seed": 2}
    return synthetic_stream(family, **(options | changes))


def test_the_parts_of_a_policy():
    assert parts_of(parse_policy("fp32@16:contents=derived")) == []
    policy = parse_policy("fp16+sr/nvfp4@16:buffer=bf16:dot=tf32:sites=beta+k.fp16")
    assert parts_of(policy) == [
        "store=fp16+sr",
        "read_copy=nvfp4",
        "buffer=bf16",
        "dot=tf32",
        "beta.bf16",
        "k.fp16",
        "float32",
    ]


def test_the_whole_is_what_run_drift_measures():
    stream = small("gated_delta", alpha=0.99)
    ladder = attribute(stream, "fp16+sr/nvfp4@16:buffer=bf16")
    result = run_drift(stream, ["fp16+sr/nvfp4@16:buffer=bf16"])
    assert ladder.whole.output_error == pytest.approx(
        result.metrics(result.runs[0])["output_error"], rel=1e-12
    )
    assert sum(rung.share for rung in ladder.rungs) == pytest.approx(1.0)
    assert ladder.rungs[0].name == "read_copy=nvfp4"


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta", "mamba2"])
def test_independent_parts_add_in_squares(family):
    """Roundings of different places are independent draws: their sum of squares is the square of the whole.

    With cross terms of n independent units times d values the relative error of that sum is about sqrt(1 / (n d)) per
    pair: 4 heads x 16 rows and errors correlated over the state's memory give 10 % at most here.
    """
    stream = small(family, alpha=0.9, steps=256)
    ladder = attribute(stream, "bf16@1:sites=v+output")
    assert ladder.quadrature == pytest.approx(ladder.whole.output_error, rel=0.1)
    assert {rung.name for rung in ladder.rungs} == {"store=bf16", "v.bf16", "output.bf16", "float32"}


def test_a_policy_without_roundings_gets_the_standard_ladder():
    ladder = attribute(small("mamba1"), "fp32@1")
    names = {rung.name for rung in ladder.rungs}
    # mamba1 has no write strength, no factor for a head, and no matrix product.
    assert names == set(STANDARD) - {"beta", "decay", "dot=bf16"}


@pytest.mark.slow
def test_a_rounded_decay_is_the_worst_place_for_bfloat16():
    """.99 becomes .98828125 or .9921875 in every step: a bias of the decay, not noise, and it accumulates."""
    stream = small("gated_delta", alpha=0.99, steps=256)
    ladder = attribute(stream, "fp32@1")
    assert ladder.rungs[0].name == "decay"
    assert ladder.rungs[0].output_error > 5 * ladder.rungs[1].output_error


def test_two_defects_reported_as_one():
    """Public case A1: a step size clamped at 0.1 against a bfloat16 state; the thread blamed both, .88 and .0010.

    A = -e^U(0, ln 16), step sizes around 0.37.  Half the decay rates and step sizes of that generator are drawn anew
    here, so the levels are compared in magnitude: the clamp loses most of the signal, the rounding 1e-3 of it.
    """
    generator = torch.Generator().manual_seed(1)
    stream = small("mamba2", preset="realistic", steps=64, heads=8, value_dim=64, key_dim=128)
    rates = -torch.exp(torch.rand(8, generator=generator) * torch.log(torch.tensor(16.0)))
    dt = torch.nn.functional.softplus(torch.randn(64, 1, 8, generator=generator) - 0.8)
    assert float(dt.median()) == pytest.approx(0.37, abs=0.05)
    v = torch.randn(64, 1, 8, 64, generator=generator) * dt[..., None]
    stream = dataclasses.replace(
        stream,
        v=v,
        log_decay=dt * rates,
        initial=torch.zeros_like(stream.initial),
        meta={"decay_rates": rates.tolist()},
    )
    ladder = attribute(stream, "fp32@1", ["dt_clamp=0.1", "store=bf16"])
    clamp, rounding = ladder.rungs
    assert clamp.name == "dt_clamp=0.1"
    assert 0.6 < clamp.output_error < 1.0
    assert 0.0005 < rounding.output_error < 0.002
    assert clamp.share > 0.999


def test_a_suspect_that_diverges_is_a_result():
    """A state at the edge of float32: the float64 rung goes on, a store of 32 bits or fewer does not."""
    loud = small("mamba2", alpha=1.0)
    loud = dataclasses.replace(loud, initial=torch.full_like(loud.initial, 3.3e38), v=loud.v.sign() * 3e38)
    ladder = attribute(loud, "fp64@1", ["float32", "store=int8", "store=bf16", "v.fp32"])
    status = {rung.name: rung.status for rung in ladder.rungs}
    assert status.pop("v.fp32") == "ok"
    assert set(status.values()) == {"diverged"}
    assert ladder.whole.status == "ok"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("betta", "a site"),
        ("store=fp33", "nearest: fp32"),
        ("dot=tf64", "one of ieee"),
        ("colour=red", "a site"),
        ("dt_clamp=0", "a number X above 0"),
        ("dt_clamp=0.1", "a Mamba stream that knows its step sizes"),
        ("buffer=", "one of fp32"),
    ],
)
def test_unknown_suspects_are_named(name, says):
    with pytest.raises(InputError, match=says) as caught:
        attribute(small("gated_delta", alpha=0.99), "fp32@1", [name])
    assert str(caught.value).startswith("suspect ")


def test_a_site_of_another_family_is_refused():
    with pytest.raises(InputError, match="delta rule only"):
        attribute(small("mamba2", alpha=0.99), "fp32@1", ["beta"])
