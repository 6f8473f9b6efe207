"""The closed form of an error at one read: its path against the recurrences themselves, its size against runs."""

import dataclasses

import pytest
import torch

from quantlab.drift import Stream, synthetic_stream
from quantlab.drift.fact_error import fact_errors, read_path
from quantlab.errors import InputError
from quantlab.recurrences import get_recurrence
from quantlab.schemes import start

FAMILIES = ("gated_delta", "kimi_delta", "mamba1", "mamba2")


def small(
    family: str, *, steps: int = 48, heads: int = 4, sequences: int = 16, alpha: float = 0.99
) -> Stream:
    value_dim, key_dim = (8, 32) if family != "mamba1" else (32, 8)
    heads = heads if family != "mamba1" else 1
    return synthetic_stream(
        family,
        heads=heads,
        steps=steps,
        alpha=alpha,
        seed=3,
        sequences=sequences,
        value_dim=value_dim,
        key_dim=key_dim,
    )


def last_output(stream: Stream, state: torch.Tensor, first: int) -> torch.Tensor:
    """Output of the last token from ``state`` behind ``first`` tokens, float64."""
    recurrence, output = get_recurrence(stream.family), torch.empty(0)
    rates = None if stream.rates is None else stream.rates.double()
    for t in range(first, stream.steps):
        state, output = recurrence.step(state, stream.step(t).to(torch.float64), rates)
    return output


def measured(stream: Stream, policy: str) -> torch.Tensor:
    """Size of the last output's error by head, the policy itself being run."""
    held, found = (
        start(policy, stream.family, stream.initial, key_heads=stream.k.shape[2], rates=stream.rates),
        None,
    )
    for t in range(stream.steps):
        found = held.step(stream.step(t))
    assert found is not None
    error = found.double() - last_output(stream, stream.initial.double(), 0)
    return error.square().sum(-1).mean(0).sqrt()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [0, 1, 40, 47])
def test_the_path_is_what_the_last_output_takes_of_an_error(family, first):
    """Any change of a state changes the last output by its product with the path: outputs are linear."""
    stream = small(family)
    state = torch.randn(stream.initial.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    change = torch.randn(state.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = last_output(stream, state + change, first) - last_output(stream, state, first)
    expected = (change * read_path(stream)[first]).sum(-1)
    # Sums of at most some hundred float64 terms of size one.
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_a_policy_that_rounds_nothing_has_no_error():
    errors = fact_errors(small("gated_delta"), ["fp32@1", "fp32@16"])
    assert all(not error.any() for error in errors.errors.values())


def column_state(large: float, small_value: float) -> Stream:
    """A Mamba-2 state that holds still: column 0 large, column 1 small, and a read of column 1 alone."""
    stream = synthetic_stream("mamba2", heads=2, steps=3, alpha=0.5, sequences=2, value_dim=4, key_dim=16)
    start_state, q = torch.zeros_like(stream.initial), torch.zeros_like(stream.q)
    start_state[..., 0], start_state[..., 1] = large, small_value
    start_state[1:, ..., 1] += 1.0  # the other fact
    q[..., 1] = 1.0
    zero = torch.zeros_like(stream.v)
    return dataclasses.replace(
        stream, q=q, v=zero, initial=start_state, log_decay=torch.zeros_like(stream.log_decay)
    )


def test_a_small_column_is_lost_beside_a_large_one():
    """E2M1 spans a factor of 12 from its largest number: a fiftieth of it is stored as 0, a sixth as it is."""
    lost = fact_errors(column_state(6.0, 0.125), ["fp32/nvfp4@2"])
    # One sequence of each pair loses .125 in each of 4 rows; the other's 1.125 is stored as 1.
    assert lost.errors.popitem()[1] == pytest.approx([(4 * 0.125**2) ** 0.5] * 2, rel=1e-3)
    assert lost.fact == pytest.approx([2.0, 2.0], rel=1e-6)
    kept = fact_errors(column_state(6.0, 1.0), ["fp32/nvfp4@2"])
    assert kept.of_fact("fp32/nvfp4@2") < 1e-3
    # With a scale of its own the column keeps .125, and 1.125 is as far from its neighbours as before.
    scaled = fact_errors(column_state(6.0, 0.125), ["fp32/nvfp4+keyscale@2"])
    assert scaled.errors.popitem()[1] == pytest.approx([(2 * 0.125**2) ** 0.5] * 2, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["fp16+sr@1", "int8+sr@1", "int8@16", "fp32/nvfp4@16", "fp32/int8@16"])
def test_the_error_is_that_of_a_run(family, policy):
    """Independent roundings of a state that moves: the power of n independent Gaussian outputs is known to sqrt(2 / n),
    n = 64 x 4 x 8, of mamba1 64 x 32; 15 % of the size are six times that, and second orders of 8 bits are below.
    """
    stream = small(family, sequences=64, steps=42, alpha=0.95)
    expected, found = measured(stream, policy), fact_errors(stream, [policy]).errors.popitem()[1]
    together = (found.square().sum() / expected.square().sum()).sqrt()
    assert together == pytest.approx(1.0, abs=0.15)


def test_of_many_stores_some_stand_for_all():
    stream = small("mamba2", sequences=64, steps=120)
    one, some = (fact_errors(stream, ["int8+sr@1"], every=every).errors.popitem()[1] for every in (1, 3))
    assert not torch.equal(one, some)
    assert one == pytest.approx(some, rel=0.1)


def test_error_feedback_adds_up_with_its_signs():
    """A held state of decay 1 - 1e-3 keeps its residual: each token loses a thousandth of it, always the same way."""
    stream = small("mamba2", sequences=8, steps=200, alpha=0.999)
    policy = "int8+ef.fp32@1:ef_read=include"
    expected, found = measured(stream, policy), fact_errors(stream, [policy]).errors.popitem()[1]
    # Both are sums of slowly moving residuals: of one size, not of equal value.
    assert ((found / expected) > 0.5).all()
    assert ((found / expected) < 2).all()
    excluded = fact_errors(stream, ["int8+ef.fp32@1"]).errors.popitem()[1]
    assert (excluded > found).all()


@pytest.mark.parametrize(("change", "argument"), [({"every": 0}, "every"), ({}, "stream")])
def test_what_it_cannot_take_is_refused(change, argument):
    stream = small("mamba2", sequences=2 if change else 3)
    with pytest.raises(InputError) as error:
        fact_errors(stream, ["nvfp4@1"], **change)
    assert error.value.argument == argument
