"""Probabilities of stochastic rounding: every word of n bits once, or the two words around the threshold.

With delta the distance to the number toward zero (integers: below) in steps, a word r rounds up iff
floor(delta 2^n) + r >= 2^n.  So P(up) = floor(delta 2^n) / 2^n: delta for multiples of 2^-n, else less than 2^-n below
it, which biases toward zero.  Nothing here is sampled.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from quantlab.formats import parse
from quantlab.formats.sharing import SHARINGS, shared_random_bits
from tests.formats.oracle import LAYOUTS

# A format without its rounding -> its element, and a value that makes the scale of its block one.
CASES = {
    **{name: (name, None) for name in LAYOUTS},
    "int4": ("int4", 7),
    "int8:block32": ("int8", 127),
    "int16:head": ("int16", 32767),
    "fp8_e4m3": ("e4m3", 448),
    "fp8_e5m2:tile32": ("e5m2", 57344),
    "mxfp8_e4m3": ("e4m3", 448),
    "mxfp8_e5m2+scale.floor": ("e5m2", 57344),
    "mxfp6_e3m2+scale.even": ("e3m2", 28),
    "mxfp6_e2m3+scale.ceil": ("e2m3", 4),
    "mxfp4": ("e2m1", 6),
    "nvfp4:none": ("e2m1", 6),
}
DELTAS = (Fraction(1, 512), Fraction(1, 100), Fraction(1, 3), Fraction(5, 8), 1 - Fraction(1, 2**12))


def step_at(name: str, x: float) -> tuple[Fraction, Fraction]:
    """The number of the element that truncates |x| (integers: the one below x), and the step above it."""
    if name.startswith("int"):
        return Fraction(math.floor(x)), Fraction(1)
    layout, magnitude = LAYOUTS[name], abs(Fraction(x))
    exponent = max(math.frexp(abs(x))[1] - 1, 1 - layout.bias)
    step = Fraction(2) ** (exponent - layout.mantissa_bits)
    return magnitude // step * step, step


def points(name: str) -> np.ndarray:
    """float32 numbers at DELTAS between zero and the first number and above one, both signs; integers up to 4."""
    if name.startswith("int"):
        return np.array([float(low + delta) for low in (0, 3, -4) for delta in DELTAS], dtype=np.float32)
    step = Fraction(1, 2 ** LAYOUTS[name].mantissa_bits)
    steps = [(Fraction(0), step * Fraction(2) ** (1 - LAYOUTS[name].bias)), (Fraction(1), step)]
    values = [float(low + step * delta) for low, step in steps for delta in DELTAS]
    x = np.array([*values, *(-value for value in values[5:])]).astype(np.float32)
    return (
        x[np.abs(x) >= 2.0**-126] if LAYOUTS[name].exponent_bits == 8 else x
    )  # else float32 has no room below


def rounded(case: str, suffix: str, x: np.ndarray, words: torch.Tensor) -> np.ndarray:
    """Values (W, P) of x (P,) under random bits (W, P)."""
    head = CASES[case][1]
    tensor, fmt = torch.from_numpy(x).expand(words.shape), parse(case + suffix)
    if head is not None:
        tensor = torch.nn.functional.pad(tensor, (1, 0), value=head)
        words = torch.nn.functional.pad(words, (1, 0))
    value = fmt.dequantize(fmt.quantize(tensor[:, None], words[:, None]))[:, 0]
    if head is None:
        return value.numpy()
    assert (value[:, 0] == head).all()  # so the scale is one
    return value[:, 1:].numpy()


def thresholds(name: str, x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every x the magnitudes (integers: values) below and above, and floor(delta 2^bits)."""
    found = [(*step_at(name, float(value)), Fraction(float(value))) for value in x]
    low = np.array([float(number) for number, _, _ in found])
    high = np.array([float(number + step) for number, step, _ in found])
    integer = name.startswith("int")
    fields = [math.floor(((v if integer else abs(v)) - a) / step * 2**bits) for a, step, v in found]
    return low, high, np.array(fields)


def went_up(case: str, suffix: str, x: np.ndarray, words: torch.Tensor, bits: int) -> np.ndarray:
    """Whether each word (W, P) rounds x up; a result that is neither neighbour fails."""
    name = CASES[case][0]
    low, high, _ = thresholds(name, x, bits)
    value = rounded(case, suffix, x, words).astype(np.float64)
    if not name.startswith("int"):
        assert (np.signbit(value) == np.signbit(x)).all()
        value = np.abs(value)
    assert ((value == low) | (value == high)).all()
    return value == high


@pytest.mark.parametrize("bits", [8, 13, 16])
@pytest.mark.parametrize("case", CASES)
def test_every_word_once(case, bits):
    """The count is floor(delta 2^n), and the mean over all words falls short of x by less than 2^-n steps."""
    x = points(CASES[case][0])
    words = torch.arange(2**bits)[:, None].expand(-1, len(x))
    counts = went_up(case, f"+sr{bits}", x, words, bits).sum(0)
    _, _, fields = thresholds(CASES[case][0], x, bits)
    assert counts.tolist() == fields.tolist()
    for value, count in zip(x, counts, strict=True):
        low, step = step_at(CASES[case][0], float(value))
        mean = low + step * Fraction(int(count), 2**bits)
        exact = Fraction(float(value)) if CASES[case][0].startswith("int") else abs(Fraction(float(value)))
        assert 0 <= exact - mean < step / 2**bits
    if bits == 8 and not CASES[case][0].startswith("int"):
        assert counts[0] == 0  # delta = 1/512 never rounds up


@pytest.mark.parametrize("bits", [20, 24, 32])
@pytest.mark.parametrize("case", CASES)
def test_the_words_around_the_threshold(case, bits):
    """r rounds up from 2^n - floor(delta 2^n) on: the rule is monotone in r, so that two words on each side decide."""
    x = points(CASES[case][0])
    _, _, fields = thresholds(CASES[case][0], x, bits)
    first = 2**bits - fields
    words = np.stack([first - 2, first - 1, first, first + 1]).clip(0, 2**bits - 1)
    words = np.concatenate([words, np.zeros((1, len(x)), dtype=np.int64), np.full((1, len(x)), 2**bits - 1)])
    up = went_up(case, f"+sr{bits}" if bits < 32 else "+sr", x, torch.from_numpy(words), bits)
    assert np.array_equal(up, words >= first)
    assert up.any(0)[fields > 0].all()


# Layout -> the case and the bits of one element.
LAYOUT_CASES = {
    "fp16x2": "fp16",
    "bf16x2": "bf16",
    "e4m3x4": "mxfp8_e4m3",
    "e5m2x4": "fp8_e5m2:tile32",
    "e2m3x4": "e2m3",
    "e3m2x4": "e3m2",
    "e2m1x4": "nvfp4:none",
    "int8x4": "int8:block32",
}


@pytest.mark.parametrize("layout", SHARINGS)
def test_every_element_of_a_shared_word_has_the_same_law(layout):
    """Over words in which each element's field takes every value once, whatever the other bits are."""
    sharing, case = SHARINGS[layout], LAYOUT_CASES[layout]
    bits = sharing.random_bits
    counter = np.arange(2**bits, dtype=np.int64)
    words = np.zeros_like(counter)
    for number, shift in enumerate(sorted(set(sharing.shifts))):  # odd multiples permute the fields apart
        words |= (counter * (2 * number + 5) % 2**bits) << shift
    unused = ~sum((2**bits - 1) << shift for shift in set(sharing.shifts)) & 0xFFFFFFFF
    words |= (counter * 0x9E3779B1 & 0xFFFFFFFF) & unused
    shared = shared_random_bits(torch.from_numpy(words)[:, None], layout)
    for point in points(CASES[case][0])[[1, 2, 3, 6]]:
        x = np.full(sharing.elements, point)
        _, _, fields = thresholds(CASES[case][0], x, bits)
        assert went_up(case, f"+sr{bits}", x, shared, bits).sum(0).tolist() == fields.tolist()
