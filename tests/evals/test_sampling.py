"""The sampler: its law, transformers' own filters as the oracle, and whose random numbers are whose."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantlab.errors import InputError
from quantlab.evals.sampling import Sampling, uniforms
from quantlab.formats.random import philox_4x32

VOCABULARY = 50


def drawn_logits(rows=3, seed=0):
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_each_token_owns_its_probability_of_the_unit_interval(temperature):
    """A grid of N numbers falls into an interval of length p at N p places, give or take one."""
    logits, count = drawn_logits(1), 20_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = Sampling(temperature).choose(logits.expand(count, -1), grid)
    expected = (logits.double()[0] / temperature).softmax(-1)
    counts = torch.bincount(chosen, minlength=VOCABULARY)
    # Float32 probabilities are wrong by a few 2^-24 of themselves: far below one place of the grid.
    assert (counts - count * expected).abs().max() <= 1 + 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    ],
)
def test_filters_are_those_of_transformers(options):
    warpers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    chain = LogitsProcessorList([warpers[name](value) for name, value in options.items()])
    logits = drawn_logits(64)
    expected = chain(torch.zeros(64, 1, dtype=torch.long), logits).softmax(-1)
    found = Sampling(**options).probabilities(logits)
    found = found / found.sum(-1, keepdim=True)
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 1e-6  # one more division of float32 numbers below 1


def test_what_is_left_out_is_never_drawn():
    logits = drawn_logits(2)
    ends = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        sampling = Sampling(1.0, **options)
        chosen = sampling.choose(logits, ends)
        assert (sampling.probabilities(logits).gather(1, chosen[:, None]) > 0).all()


def test_greedy_is_the_likeliest():
    logits = drawn_logits(8)
    assert torch.equal(Sampling().choose(logits, None), logits.argmax(-1))
    assert torch.equal(Sampling(1.0, top_k=1).choose(logits, torch.rand(8).double()), logits.argmax(-1))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
)
def test_uniform_numbers_are_one_philox_block_each(seed, stream, repeat, position):
    (found,) = uniforms(seed, [stream], [repeat], [position]).tolist()
    counter = torch.tensor([[position, repeat, stream & 0xFFFFFFFF, stream >> 32]])
    key = (seed & 0xFFFFFFFF, (seed >> 32) ^ 0x53414D50)
    first, second, *_ = philox_4x32(counter, key)[0].tolist()
    assert found == (first * 2**20 + second // 2**12) / 2**52
    assert 0 <= found < 1


def test_uniform_numbers_do_not_depend_on_what_is_beside_them():
    names, repeats, places = [5, 5, 5, 2**63 + 1], [0, 1, 0, 0], [0, 0, 7, 0]
    together = uniforms(3, names, repeats, places)
    alone = [uniforms(3, *([x] for x in row)) for row in zip(names, repeats, places, strict=True)]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.tolist())) == 4
    assert not torch.equal(together, uniforms(4, names, repeats, places))


def test_uniform_numbers_are_uniform():
    """Mean and variance of 20,000: within 4.5 standard errors, 1 / sqrt(12 n) and 1 / sqrt(180 n)."""
    n = 20_000
    found = uniforms(0, [1] * n, [0] * n, range(n))
    assert abs(float(found.mean()) - 1 / 2) < 4.5 / math.sqrt(12 * n)
    assert abs(float(found.var()) - 1 / 12) < 4.5 / math.sqrt(180 * n)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 4}, "generation argument 'num_beams'"),
        ({"top_q": 0.9}, r"nearest: top_[kp]"),
        ({"do_sample": True, "temperature": 0.0}, "temperature 0.0"),
        ({"do_sample": True, "temperature": -1}, "temperature -1"),
        ({"do_sample": True, "top_p": 0}, "top_p 0"),
        ({"do_sample": True, "top_k": 1.5}, "top_k 1.5"),
        ({"do_sample": "yes"}, "do_sample 'yes'"),
        ({"temperature": float("nan")}, "temperature nan"),
    ],
)
def test_what_is_not_served_is_refused(options, named):
    with pytest.raises(InputError, match=named):
        Sampling.of(options)


def test_arguments_mean_what_they_mean_in_transformers():
    assert Sampling.of({}) == Sampling.of({"do_sample": False, "temperature": 0.7}) == Sampling()
    assert Sampling.of({"do_sample": True}) == Sampling(1.0)
    assert Sampling.of({"temperature": 0.6, "top_p": 0.95}) == Sampling(0.6, top_p=0.95)
