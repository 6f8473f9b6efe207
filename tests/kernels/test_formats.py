"""The formats' Triton twins against their definitions, bit for bit, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.kernels import formats, target
from quantlab.testing import in_triton_process, unavailable
from quantlab.testing.formats import (
    ELEMENT_CASES,
    FORMAT_CASES,
    IMPLEMENTATIONS,
    check_element,
    check_format,
    check_random_words,
    philox_4x32,
)

PHILOX = Path(__file__).resolve().parents[1] / "data/golden/philox.json"


@pytest.mark.parametrize("name", ELEMENT_CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_element(implementation, name):
    if reason := unavailable(implementation):
        pytest.skip(reason)
    check_element(name, implementation)


@pytest.mark.parametrize("text", FORMAT_CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_format(implementation, text):
    if reason := unavailable(implementation):
        pytest.skip(reason)
    check_format(text, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_words(implementation):
    if reason := unavailable(implementation):
        pytest.skip(reason)
    check_random_words(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_known_answers_of_philox(implementation):
    if reason := unavailable(implementation):
        pytest.skip(reason)
    vectors = json.loads(PHILOX.read_text())["vectors"]
    assert {vector["rounds"] for vector in vectors} >= {5, 7, 10}
    for vector in vectors:
        seed, offsets = vector["seed"], torch.tensor(vector["offsets"])
        zeros = torch.zeros_like(offsets)
        counter = torch.stack([offsets & 0xFFFFFFFF, offsets >> 32, zeros, zeros], dim=-1)
        key = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        expected = torch.tensor([[int(word, 16) for word in words] for words in vector["words"]])
        assert torch.equal(philox_4x32(counter, key, vector["rounds"], implementation), expected)
