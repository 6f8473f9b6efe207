"""Properties that hold for all inputs, searched by Hypothesis; derandomised, so that a run repeats."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantlab.formats import parse
from quantlab.formats.table import FLOAT_ELEMENTS, Integer
from tests.formats.families import (
    ELEMENTS,
    FAMILIES,
    HADAMARD,
    SHAPE,
    group_shape,
    rounded,
    search,
    search_states,
    states,
)

anything = st.floats(width=32, allow_nan=False)
ALL = {**FAMILIES, "hadamard": HADAMARD}


def rows(elements=anything):
    return hnp.arrays(np.float32, (2, 64), elements=elements)


def cast(text: str, x: np.ndarray) -> torch.Tensor:
    return parse(text).round(torch.from_numpy(x), specials="hardware")


@pytest.mark.parametrize("name", ELEMENTS)
@search
@given(x=rows())
def test_elements_are_idempotent_odd_and_monotone(name, x):
    order = torch.from_numpy(np.argsort(x, axis=None))
    for text in (name, f"{name}+rz"):
        value = cast(text, x)
        assert torch.equal(parse(text).round(value), value)
        assert torch.equal(cast(text, -x), -value)
        ordered = value.flatten()[order]
        assert (ordered[1:] >= ordered[:-1]).all()


@pytest.mark.parametrize("name", ELEMENTS)
@search
@given(x=rows(), word=st.integers(0, 2**32 - 1))
def test_elements_under_one_word_are_odd_and_monotone(name, x, word):
    """Stochastic rounding acts on the magnitude, by a threshold that the word sets."""
    fmt, t = parse(f"{name}+sr13"), torch.from_numpy(x)
    words = torch.full(x.shape, word)
    value = fmt.round(t, words, specials="hardware")
    assert torch.equal(fmt.round(-t, words, specials="hardware"), -value)
    ordered = value.flatten()[torch.from_numpy(np.argsort(x, axis=None))]
    assert (ordered[1:] >= ordered[:-1]).all()


@pytest.mark.parametrize("name", ELEMENTS)
@search
@given(x=rows(), word=st.integers(0, 2**32 - 1))
def test_elements_round_to_a_neighbour(name, x, word):
    """Half a step, a step toward zero, one of the two neighbours: in float64, exactly."""
    element = FLOAT_ELEMENTS[name]
    x = x[np.abs(x) <= element.max]
    exact = np.abs(x.astype(np.float64))
    step = np.maximum(np.ldexp(element.eps, np.frexp(exact)[1] - 1), element.smallest)
    nearest, down = (np.abs(cast(text, x).double().numpy()) for text in (name, f"{name}+rz"))
    assert (np.abs(nearest - exact) <= step / 2).all()
    assert (down <= exact).all()
    assert (exact - down < step).all()
    value = parse(f"{name}+sr").round(torch.from_numpy(x), torch.full(x.shape, word)).double().abs().numpy()
    up = np.where(down == exact, down, down + step)
    assert ((value == down) | (value == up)).all()


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_half_step_is_attained(name):
    """The midpoint above 1 and half the smallest number."""
    element = FLOAT_ELEMENTS[name]
    x = torch.tensor([1 + element.eps / 2, element.smallest / 2], dtype=torch.float64)
    assert (parse(name).round(x) - x).abs().tolist() == [element.eps / 2, element.smallest / 2]


@pytest.mark.parametrize("family", ALL)
@search_states
@given(x=states(-60, 60))
def test_scaled_formats_are_odd(family, x):
    for text in ALL[family]:
        assert np.array_equal(rounded(text, -x), -rounded(text, x)), text
        assert np.array_equal(rounded(f"{text}+rz", -x), -rounded(f"{text}+rz", x)), text


@pytest.mark.parametrize("family", FAMILIES)
@search_states
@given(x=states(-3, 3), word=st.integers(0, 2**32 - 1))
def test_values_under_one_scale_keep_their_order(family, x, word):
    """Nearest, toward zero, and stochastic under one word."""
    for text in FAMILIES[family]:
        fmt = parse(text)
        height, width = group_shape(fmt)
        row, column = np.arange(SHAPE[1]) // height, np.arange(SHAPE[2]) // width
        groups = np.arange(2)[:, None, None] * 10**6 + row[:, None] * 1000 + column
        order = np.lexsort((x.ravel(), groups.ravel()))
        same = np.diff(groups.ravel()[order]) == 0
        for suffix, given_word in (("", None), ("+rz", None), ("+sr8", word)):
            ordered = rounded(text + suffix, x, given_word).ravel()[order]
            assert (np.diff(ordered)[same] >= 0).all(), text + suffix


COMMUTING = {
    family: [text for text in texts if not text.startswith("nvfp4:none")] for family, texts in ALL.items()
}


@pytest.mark.parametrize("family", COMMUTING)
@search_states
@given(x=states(), exponent=st.integers(-16, 16))
def test_powers_of_two_commute(family, x, exponent):
    """Where the scale adapts: codes stay, values move by the power."""
    factor = np.float32(2.0**exponent)
    for text in COMMUTING[family]:
        fmt = parse(text)
        plain, scaled = (fmt.quantize(torch.from_numpy(y)) for y in (x, x * factor))
        assert torch.equal(scaled.codes, plain.codes), text
        assert torch.equal(fmt.dequantize(scaled), fmt.dequantize(plain) * float(factor)), text


def test_where_powers_of_two_do_not_commute():
    """Elements and a bare E4M3 scale have a range of their own; adapting scales end with float32's."""
    x = torch.linspace(0.01, 1, 32)[None]
    for text, factor in (
        *((name, 2.0 ** (FLOAT_ELEMENTS[name].min_exponent - 3)) for name in ELEMENTS),
        ("nvfp4:none", 2.0**-9),  # scales become subnormal in E4M3
        ("nvfp4:none", 2.0**12),  # beyond 2688
        ("mxfp4", 2.0**-126),  # the scale ends at 2^-127
        ("int16", 2.0**-133),  # a subnormal float32 scale
    ):
        fmt = parse(text)
        assert not torch.equal(fmt.round(x * factor), fmt.round(x) * factor), text


@pytest.mark.parametrize("text", ["int8", "fp8_e4m3", "mxfp4", "nvfp4", "nvfp4:none"])
@search
@given(x=states(), permutation=st.permutations(range(16)))
def test_permuting_within_a_block_permutes_the_result(text, x, permutation):
    shuffled = x.copy()
    shuffled[..., :16] = x[..., list(permutation)]
    assert np.array_equal(rounded(text, shuffled)[..., :16], rounded(text, x)[..., list(permutation)])


@pytest.mark.parametrize("family", FAMILIES)
@search_states
@given(x=states(), word=st.integers(0, 2**32 - 1))
def test_stochastic_codes_are_neighbours(family, x, word):
    """Of the quotient: its truncation or the next magnitude; word 0 truncates (integers: down, the last word up)."""
    for text in FAMILIES[family]:
        t, integer = torch.from_numpy(x), isinstance(parse(text).element, Integer)
        low, high, mid = (
            parse(f"{text}+sr").quantize(t, torch.full(x.shape, w)).codes.int() for w in (0, 2**32 - 1, word)
        )
        down = parse(f"{text}+rz").quantize(t).codes.int()
        assert ((mid == low) | (mid == high)).all(), text
        assert ((high - low) <= 1).all(), text
        assert ((high - low) >= 0).all(), text
        assert torch.equal(torch.where(t < 0, high, low) if integer else low, down), text
