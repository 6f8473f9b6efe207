"""Unscaled elements against exact rational arithmetic: every code, midpoint, neighbour and word."""

import math

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, fused, parse
from quantlab.formats.table import FLOAT_ELEMENTS
from tests.formats.oracle import LAYOUTS, grid, midpoints, round_code

NAMES = list(LAYOUTS)
DTYPES = [np.float32, np.float64]


def codes_of(name: str, x: np.ndarray, **kwargs) -> np.ndarray:
    codes = parse(name).quantize(torch.from_numpy(x), specials="hardware", **kwargs).codes.numpy()
    return codes.view(f"u{codes.itemsize}").astype(np.int64)


def stored(codes: torch.Tensor, name: str) -> torch.Tensor:
    return codes.to(fused.code_dtype(FLOAT_ELEMENTS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_every_code_decodes_to_its_number(name):
    layout, fmt = LAYOUTS[name], parse(name)
    codes = torch.arange(2 * layout.sign_code)
    values = fmt.dequantize(Encoded(stored(codes, name))).tolist()
    for code, value in enumerate(values):
        if name == "tf32" and code % 29:  # half a million codes
            continue
        negative, magnitude = divmod(code, layout.sign_code)
        if magnitude < layout.finite_codes:
            assert abs(value) == grid(name)[magnitude]
            assert math.copysign(1, value) == (-1 if negative else 1)
        elif magnitude == layout.finite_codes and name in ("tf32", "bf16", "fp16", "e5m2"):
            assert value == (-math.inf if negative else math.inf)
        else:
            assert math.isnan(value)


@pytest.mark.parametrize("name", NAMES)
def test_derived_constants_match_the_grid(name):
    element, numbers = FLOAT_ELEMENTS[name], grid(name)
    assert element.max == numbers[-1]
    assert element.smallest == numbers[1]
    assert element.min_normal == numbers[2**element.mantissa_bits]
    assert element.bias == LAYOUTS[name].bias
    assert element.nan_code == LAYOUTS[name].nan_code
    assert element.eps == numbers[numbers.index(1) + 1] - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_every_midpoint_and_its_neighbours(name, dtype):
    """float32 takes the fused path, float64 the readable one and shows that nothing rounds twice."""
    x = midpoints(name, dtype)
    if LAYOUTS[name].sign_code > 2**15:
        x = x[::97]
    elif LAYOUTS[name].sign_code > 128:  # 16 bits: all positive ones as float32, a seventh of the rest
        x = x[(np.arange(len(x)) % 7 == 0) | (~np.signbit(x) & (dtype is np.float32))]
    x = np.concatenate([x, np.array([np.inf, -np.inf, 3.4e38, 1e-45, -1e-45, -0.0], dtype=dtype)])
    expected = [round_code(name, float(value)) for value in x]
    assert codes_of(name, x).tolist() == expected
    thinned = x[:: max(1, len(x) // 20000)]
    expected = [round_code(name, float(value), toward_zero=True) for value in thinned]
    assert codes_of(f"{name}+rz", thinned).tolist() == expected


@pytest.mark.parametrize("name", ["tf32", "fp16", "bf16", "e4m3", "e5m2", "e3m2"])
def test_double_rounding_is_absent(name):
    """A float64 just above a midpoint would fall onto it, and then down, by way of float32."""
    numbers = grid(name)
    low = numbers.index(1)
    x = np.array([float((numbers[low] + numbers[low + 1]) / 2) * (1 + 2.0**-40)])
    assert x.astype(np.float32).astype(np.float64) != x
    assert codes_of(name, x).tolist() == [low + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_nan_is_kept_or_refused(name, dtype):
    x = torch.tensor([1.0, math.nan, -math.nan], dtype=dtype)
    x[2] = x[2].copysign(torch.tensor(-1.0))
    layout = LAYOUTS[name]
    if layout.nan_code is None:
        for call in (parse(name).quantize, parse(name).round):
            with pytest.raises(
                InputError, match=rf"x 'nan at \(1,\)': expected numbers that {name} can store"
            ):
                call(x)
        assert codes_of(name, x.numpy())[1:].tolist() == [layout.finite_codes - 1] * 2
        return
    codes = codes_of(name, x.numpy())
    assert codes[1] == layout.nan_code
    assert codes[2] == layout.nan_code  # its sign belongs to the processor
    assert parse(name).round(x).isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.infinity])
def test_inf_without_a_code_is_refused_with_its_place(name):
    x = torch.ones(2, 5)
    x[1, 3] = -math.inf
    if name == "e5m2":  # it has a code for Inf, and saturates as every 8-bit store does
        assert parse(name).round(x)[1, 3] == -57344
        return
    for call in (parse(name).quantize, parse(name).round):
        with pytest.raises(InputError, match=r"^x '-inf at \(1, 3\)'"):
            call(x)
    assert parse(name).round(x, specials="hardware")[1, 3] == -FLOAT_ELEMENTS[name].max


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_over_all_words(name, bits):
    """Every word of n bits, once: the count of roundings up is floor(delta 2^n), no sampling.

    Points: normals and subnormals at sixteenths of a step, the last step before overflow, both signs.
    """
    numbers = grid(name)
    steps = {1, 2 ** LAYOUTS[name].mantissa_bits, len(numbers) // 2, len(numbers) - 2}
    points = [
        float(numbers[step] + (numbers[step + 1] - numbers[step]) * k / 16)
        for step in steps
        for k in range(16)
    ]
    points += [float(numbers[-1] + (numbers[-1] - numbers[-2]) / 2), 0.0, -0.0, math.inf]
    points += [-point for point in points]
    for dtype in DTYPES:
        x = np.array(points, dtype=dtype)
        exact = [float(value) for value in x]
        # Bits above the low n are noise that must not count.
        words = np.arange(2**bits, dtype=np.int64) + (0x5A5A5A5A << bits) % 2**32
        grid_x = np.repeat(x[:, None], len(words), axis=1)
        random_bits = torch.from_numpy(np.repeat(words[None], len(x), axis=0))
        codes = codes_of(f"{name}+sr{bits}", grid_x, random_bits=random_bits)
        expected = [[round_code(name, value, word, bits) for word in range(2**bits)] for value in exact]
        assert codes.tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_exact_stochastic_rounding_uses_all_32_bits(name):
    """delta = 2^-32 above a number rounds up for the last word alone."""
    numbers = grid(name)
    step = len(numbers) // 2
    x = float(numbers[step] + (numbers[step + 1] - numbers[step]) / 2**32)
    words = torch.tensor([2**32 - 1, 2**32 - 2, 0])
    codes = codes_of(f"{name}+sr", np.full(3, x), random_bits=words)
    assert (codes - step).tolist() == [1, 0, 0]
