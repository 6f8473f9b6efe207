"""Rounding to nearest that holds a state back: the gain against quadrature, held reads against runs."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from quantlab.drift import synthetic_stream
from quantlab.drift.fact_error import fact_errors
from quantlab.drift.stagnation import gain_and_error, held_read, holds_back
from quantlab.errors import InputError
from quantlab.recurrences import get_recurrence
from quantlab.schemes import start


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9, 0.999, 1.001, 1.3, 3.0])
def test_gain_and_error_are_the_integrals_that_they_stand_for(ratio):
    """Both sums, where they meet and beyond, against the integrals over every cell of the step function."""
    half = 0.7
    rms = ratio * half

    def density(x):
        return math.exp(-((x / rms) ** 2) / 2) / math.sqrt(2 * math.pi) / rms

    moved = wrong = 0.0
    for cell in range(-60, 61):
        move, low, high = 2 * half * cell, (2 * cell - 1) * half, (2 * cell + 1) * half
        moved += quad(lambda x, m=move: m * x * density(x), low, high)[0]
        wrong += quad(lambda x, m=move: (m - x) ** 2 * density(x), low, high)[0]
    gain, error = gain_and_error(torch.tensor([rms]).double(), torch.tensor([half]).double())
    # 121 integrals, each to quad's absolute 1.5e-8 at worst.
    assert float(gain) == pytest.approx(moved / rms**2, abs=1e-7)
    assert float(error) == pytest.approx(wrong, abs=1e-7)


def test_what_is_far_below_half_a_step_is_lost_and_what_is_far_above_is_kept():
    small, large = torch.tensor([0.05, 50.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    gain, error = gain_and_error(small, large)
    assert gain.tolist() == pytest.approx([0.0, 1.0], abs=1e-12)
    assert error.tolist() == pytest.approx([0.05**2, 1 / 3], rel=1e-9)


def held_stream(decay: float, steps: int, writes: float = 0.0):
    """A fact in column 0 of a Mamba-2 state, beside column 1 that is written so that it stays at 6."""
    empty = synthetic_stream(
        "mamba2", heads=1, steps=steps, alpha=decay, seed=5, sequences=64, value_dim=4, key_dim=16
    )
    q, k = torch.zeros_like(empty.q), torch.zeros_like(empty.k)
    q[..., 0] = k[..., 1] = 1.0
    v = torch.full_like(empty.v, 6 * (1 - decay))
    initial = torch.zeros_like(empty.initial)
    initial[..., 0], initial[..., 1] = 2.0, 6.0
    initial[32:, ..., 0] = 4.0
    noise = writes * torch.randn(k.shape, generator=torch.Generator().manual_seed(6))
    k = k + noise * (torch.arange(16) == 0)
    return dataclasses.replace(empty, q=q, k=k, v=v, initial=initial)


def run(stream, policy):
    held, found = start(policy, stream.family, stream.initial, key_heads=stream.k.shape[2]), torch.empty(0)
    for t in range(stream.steps):
        found = held.step(stream.step(t))
    return found.double()


def test_a_decay_below_half_a_step_is_swallowed():
    """A hundredth of 2 and 4 a token, where NVFP4's half steps beside 6 are .25 and .5: the fact stays as it was."""
    steps, decay = 101, 0.99
    stream = held_stream(decay, steps)
    one, other = run(stream, "nvfp4@1").chunk(2)
    measured = float(((other - one) / 2 / decay**steps).mean())
    assert measured == pytest.approx(decay ** (1 - steps), rel=1e-3)  # the last token decays what was held
    assert float(held_read(stream, "nvfp4@1").kept) == pytest.approx(measured, rel=1e-3)


def test_a_fine_grid_swallows_nothing():
    stream = held_stream(0.9, 20)
    assert float(held_read(stream, "bf16@1").kept) == pytest.approx(1.0, abs=0.02)


def test_writes_dither_the_decay():
    """Other writes of the column beyond its half step let the decay through, in a run as in the closed form."""
    stream, decay = held_stream(0.99, 101, writes=10.0), 0.99
    one, other = run(stream, "nvfp4@1").chunk(2)
    measured = float((other - one).mean() / 2 / decay**101)
    held = float(held_read(held_stream(0.99, 101), "nvfp4@1").kept)
    assert held > 2.5
    assert float(held_read(stream, "nvfp4@1").kept) == pytest.approx(1.0, abs=0.1)
    assert measured < held / 2


@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta"])
def test_where_nothing_is_held_it_is_the_error_of_independent_roundings(family):
    """A fast decay and 8 bits: both closed forms describe the same thing, by columns and by elements."""
    stream = synthetic_stream(
        family, heads=4, steps=60, alpha=0.9, seed=3, sequences=32, value_dim=8, key_dim=32
    )
    held = held_read(stream, "int8@1")
    plain = fact_errors(stream, ["int8@1"]).errors.popitem()[1]
    # Columns share the step of their mean square; rows differ in theirs by a third.
    assert held.error.norm() / plain.norm() == pytest.approx(1.0, abs=0.25)
    assert np.asarray(held.kept) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
@pytest.mark.parametrize(("alpha", "held_back"), [(0.9, False), (0.98, True)])
def test_four_bits_are_met_where_they_hold_back_and_where_not(family, alpha, held_back):
    """A 6 % sample of roundings, and rows of a block whose maxima differ by a third, keep both to 20 %; at a decay of
    .98 independent roundings miss a fifth of the error, which is decay and writes that the store swallowed.
    """
    stream = synthetic_stream(
        family, heads=4, steps=150, alpha=alpha, seed=3, sequences=32, value_dim=8, key_dim=32
    )
    recurrence, state, output = get_recurrence(family), stream.initial.double(), torch.empty(0)
    for t in range(stream.steps):
        state, output = recurrence.step(state, stream.step(t).to(torch.float64), None)
    expected = (run(stream, "nvfp4@1") - output).square().sum(-1).mean(0).sqrt().norm()
    assert held_read(stream, "nvfp4@1").error.norm() / expected == pytest.approx(1.0, abs=0.2)
    plain = fact_errors(stream, ["nvfp4@1"]).errors.popitem()[1].norm() / expected
    assert (plain < 0.87) == held_back


def test_what_it_does_not_know_is_refused():
    assert holds_back("nvfp4+keyscale@1")
    for policy in (
        "fp32@1",
        "nvfp4+sr@1",
        "int8+ef@1",
        "nvfp4+hadamard@1",
        "nvfp4+rank1@1",
        "nvfp4+4over6@1",
    ):
        assert not holds_back(policy)
    stream = synthetic_stream("mamba2", heads=1, steps=4, alpha=0.9, sequences=3, value_dim=4, key_dim=16)
    with pytest.raises(InputError) as error:
        held_read(stream, "nvfp4@1")
    assert error.value.argument == "stream"
    with pytest.raises(InputError) as error:
        held_read(stream, "nvfp4+sr@1")
    assert error.value.argument == "policy"
