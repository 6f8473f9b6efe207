"""MX blocks: scale bytes, quotients and elements against exact rationals."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import mx
from quantlab.formats.table import Element, Overflow, Specials
from tests.formats import blocks as mx_blocks
from tests.formats.blocks import ELEMENTS, FLOATS, decoded, encoder, load, stored
from tests.formats.oracle import LAYOUTS, grid, round_code

F32, F64 = np.float32, np.float64
LARGEST = np.finfo(F32).max

# Typed from the OCP tables: largest number, its exponent, and the first magnitude that rounds to nearest even
# beyond the largest number, with whether the midpoint itself does.
LARGEST_NUMBER = {"e4m3": 448, "e5m2": 57344, "e2m3": Fraction(15, 2), "e3m2": 28, "e2m1": 6}
LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15, "e2m3": 2, "e3m2": 4, "e2m1": 2}
OVERFLOW = {
    "e4m3": (464, False),
    "e5m2": (61440, True),
    "e2m3": (Fraction(31, 4), True),
    "e3m2": (30, True),
    "e2m1": (7, True),
}


def two_to(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if two_to(exponent) <= value else exponent - 1


def expected_byte(name: str, mode: str, amax: float) -> int:
    """The scale byte of a positive amax, from the definitions of the modes."""
    exact = Fraction(amax)
    base = floor_log2(exact)
    scale = base - LARGEST_EXPONENT[name]
    if mode == "ceil":
        scale += exact > two_to(base)
    elif mode == "rceil":
        scale = next(s for s in range(scale, scale + 3) if exact <= LARGEST_NUMBER[name] * two_to(s))
    elif mode == "even":
        boundary, tie = OVERFLOW[name]
        quotient = exact / two_to(scale)
        scale += quotient > boundary or (quotient == boundary and tie)
    return min(max(scale, -127), 127) + 127


def boundaries(dtype: type, exponents: range) -> np.ndarray:
    """Every significand at which some mode of some element steps, at every exponent, with one ulp to either side."""
    significands = [1, 1.5, 1.75, 1.8125, 1.875, 1.9375, 1.25]
    values = np.array([math.ldexp(s, e) for s in significands for e in exponents]).astype(dtype)
    values = np.concatenate([values, np.nextafter(values, dtype(0)), np.nextafter(values, dtype(np.inf))])
    return np.unique(values[np.isfinite(values) & (values > 0)])


@pytest.mark.parametrize("mode", mx.MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_scale_bytes_at_every_boundary(name, mode):
    """float32, subnormals included: all 255 bytes occur, each decided exactly."""
    amax = boundaries(F32, range(-149, 128))
    codes = mx.scale_codes(torch.from_numpy(amax), ELEMENTS[name], mode)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [expected_byte(name, mode, float(value)) for value in amax]
    reached = 254 - LARGEST_EXPONENT[name] + (mode != "floor")
    assert set(codes.tolist()) == set(range(reached + 1))


@pytest.mark.parametrize("mode", mx.MODES)
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_scale_bytes_of_float64(name, mode):
    """One ulp of float64 decides, and what float32 cannot hold saturates; byte 254 is reached."""
    amax = np.concatenate([boundaries(F64, range(-160, 160, 3)), [5e-324, 1e-310, 1e300, 1.7e308]])
    codes = mx.scale_codes(torch.from_numpy(amax), ELEMENTS[name], mode)
    assert codes.tolist() == [expected_byte(name, mode, float(value)) for value in amax]
    assert {0, 254} <= set(codes.tolist())


def test_special_block_maxima():
    amax = torch.tensor([0.0, torch.nan, torch.inf, -torch.nan])
    for dtype in (torch.float32, torch.float64):
        for mode in mx.MODES:
            codes = mx.scale_codes(amax.to(dtype), ELEMENTS["e2m1"], mode)
            assert codes.tolist() == [0, 0xFF, 254, 0xFF]
    with pytest.raises(InputError, match="rceil"):
        mx.scale_codes(amax, ELEMENTS["e2m1"], "rcei")


def test_decoded_scales():
    codes = torch.arange(256).to(torch.uint8)
    values = mx.decode_scales(codes)
    assert values.dtype == torch.float32
    assert [Fraction(value) for value in values[:255].tolist()] == [two_to(code - 127) for code in range(255)]
    assert values[255].isnan()
    assert mx.decode_scales(codes.view(2, 4, 32)).shape == (2, 4, 32)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_division_is_exact(dtype):
    """By every scale, bytes 0 and 254 included, of numbers that span float32; float64 holds every quotient."""
    magnitudes = [
        2.0**-149,
        3 * 2.0**-149,
        2.0**-126,
        1.5 * 2.0**-126,
        1.9999998807907104,
        3.0,
        float(LARGEST),
    ]
    x = np.zeros(32)
    x[: len(magnitudes)] = magnitudes
    x[len(magnitudes) : 2 * len(magnitudes)] = [-value for value in magnitudes]
    scales = torch.arange(255).to(torch.uint8)[:, None]
    blocks = torch.from_numpy(np.tile(x.astype(dtype), (255, 1)))
    quotients = mx_blocks.divide(blocks, scales).numpy()
    assert quotients.dtype == dtype
    for code in range(255):
        with np.errstate(over="ignore"):
            expected = (x * 2.0 ** (127 - code)).astype(dtype)
        assert np.array_equal(quotients[code], expected), code
    if dtype is F32:
        kept = np.isfinite(quotients).all(-1)
        exact = x * 2.0 ** (127 - np.arange(255)[kept, None])
        lost = quotients[kept] != exact
        assert lost.any()
        assert (np.abs(exact[lost]) < 2.0**-126).all()


def sample_blocks(seed: int = 0) -> np.ndarray:
    """Blocks of every size float32 has, with ties, outliers, zeros, subnormals and the largest number."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal(64) * 2.0**power for power in (0, 10, -10, 60, -60, 120, -120, -127, -140)]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -5, -6, 0.0, -0.0, 448, 464.0])
    rows += [np.tile(ties, 4) * 2.0**power for power in (0, -100, -134, 100)]
    outlier = rng.standard_normal(64) * 1e-3
    outlier[40] = -3e6
    rows += [outlier, np.zeros(64), -np.zeros(64), rng.integers(-9, 10, 64) * 2.0**-149]
    rows += [np.where(np.arange(64) == 3, float(LARGEST), rng.standard_normal(64) * 1e37)]
    return np.array(rows).astype(F32)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("mode", mx.MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_blocks(name, mode, dtype):
    """Codes are the exact quotients rounded once; decoding is exact or saturates."""
    x, element = sample_blocks(), ELEMENTS[name]
    codes, scales = mx_blocks.encode(torch.from_numpy(x.astype(dtype)), element, mode, encoder(element))
    values = mx_blocks.decode(decoded(codes, element), scales)
    assert values.dtype == torch.float32
    assert scales.shape == (len(x), 2)
    numbers = grid(name)
    for row, block in np.ndindex(len(x), 2):
        part = x[row, 32 * block : 32 * block + 32]
        amax = float(np.abs(part).max())
        byte = expected_byte(name, mode, amax) if amax else 0
        assert scales[row, block] == byte
        expected = [round_code(name, float(value) * 2.0 ** (127 - byte)) for value in part]
        assert codes[row, 32 * block : 32 * block + 32].tolist() == expected
        for code, value in zip(expected, values[row, 32 * block : 32 * block + 32].tolist(), strict=True):
            negative, magnitude = divmod(code, LAYOUTS[name].sign_code)
            exact = min(numbers[magnitude] * two_to(byte - 127), Fraction(float(LARGEST)))
            # Subnormals of float32 may not hold the product; its nearest float32 is what counts.
            assert abs(value) == float(F32(float(exact)))
            assert math.copysign(1, value) == (-1 if negative else 1)


@pytest.mark.parametrize("mode", mx.MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_blocks_scale_with_powers_of_two(name, mode):
    x, element = sample_blocks()[[0, 1, 9, 13]], ELEMENTS[name]
    codes, scales = mx_blocks.encode(torch.from_numpy(x), element, mode, encoder(element))
    for power in (-60, -1, 1, 37):
        moved = mx_blocks.encode(torch.from_numpy(x * F32(2.0**power)), element, mode, encoder(element))
        assert torch.equal(moved[0], codes)
        assert torch.equal(moved[1].int(), scales.int() + power)


@pytest.mark.parametrize("mode", mx.MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_stored_blocks_are_fixed_points(name, mode):
    """Blocks that were decoded store the same numbers again, whatever scale they choose now."""
    x, element = torch.from_numpy(sample_blocks(1)), ELEMENTS[name]
    once = mx_blocks.decode(*stored(x, element, mode))
    again = mx_blocks.decode(*stored(once, element, mode))
    assert torch.equal(once.view(torch.int32), again.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key_dim", [1, 31, 33, 40, 64])
def test_a_short_last_block_is_padded_with_zeros(key_dim, dtype):
    element = ELEMENTS["e2m1"]
    x = torch.randn(2, 3, key_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 0] = 0
    padded = torch.nn.functional.pad(x, (0, 64 - key_dim))
    codes, scales = mx_blocks.encode(x, element, "rceil", encoder(element))
    expected_codes, expected_scales = mx_blocks.encode(padded, element, "rceil", encoder(element))
    blocks = -(-key_dim // 32)
    assert codes.shape == x.shape
    assert scales.shape == (2, 3, blocks)
    assert torch.equal(codes, expected_codes[..., :key_dim])
    assert torch.equal(scales, expected_scales[..., :blocks])
    assert torch.equal(
        mx_blocks.decode(decoded(codes, element), scales),
        mx_blocks.decode(decoded(expected_codes, element), expected_scales)[..., :key_dim],
    )


def test_nan_stays_in_its_place_and_infinity_in_its_block():
    element = ELEMENTS["e4m3"]
    x = torch.ones(3, 64)
    x[0, 1], x[1, 1], x[2, 1] = torch.nan, torch.inf, -torch.inf
    codes, scales = mx_blocks.encode(x, element, "rceil", encoder(element))
    values = mx_blocks.decode(decoded(codes, element), scales)
    assert scales[:, 0].tolist() == [119, 254, 254]
    assert values[0].isnan().nonzero().tolist() == [[1]]
    assert codes[0, 1] & 0x7F == 0x7F
    assert (values[0, 2:] == 1).all()
    assert (values[:, 32:] == 1).all()
    assert values[1, 1] == LARGEST
    assert values[2, 1] == -LARGEST
    assert (values[1:, 2:32] == 0).all()


def test_the_largest_float32_does_not_decode_to_infinity():
    """It rounds up to 2^128; a NaN element next to it stays NaN, and so does an Inf code of E5M2."""
    element = ELEMENTS["e5m2"]
    x = torch.full((1, 32), float(LARGEST))
    codes, scales = mx_blocks.encode(x, element, "rceil", encoder(element))
    assert scales.item() == 127 + 127 - 15 + 1
    codes[0, 1], codes[0, 2] = 0x7F, 0xFC
    values = mx_blocks.decode(decoded(codes, element), scales)
    assert values[0, 0] == LARGEST
    assert values[0, 1].isnan()
    assert values[0, 2] == -torch.inf


def test_nearest_power_of_two():
    """Even with an element of no mantissa bits is rounding to the nearest power of two, ties up: the dtype casts."""
    arrays = load("e8m0_casts.npz")
    x = arrays["x"]
    power = Element("power", 2, 0, Specials.NONE, Overflow.SATURATE)
    assert power.max == 4
    ours = mx.scale_codes(4 * torch.from_numpy(x).double().abs(), power, "even").numpy()
    # Both casts send what lies between their two smallest powers to the larger one, and overflow to NaN.
    normal = (np.abs(x) >= 2.0**-126) & (np.abs(x) < 1.5 * 2.0**127)
    positive = normal & (x > 0)
    assert positive.sum() > 100
    assert np.array_equal(ours[normal], arrays["torch_cast_code"][normal])
    assert np.array_equal(ours[positive], arrays["ml_dtypes_cast_code"][positive])
    gfloat = arrays["gfloat_tiestoeven_code"]
    ties = np.frexp(x)[0] == 0.75  # gfloat: a tie goes to the even code
    assert np.array_equal(ours[positive & ~ties], gfloat[positive & ~ties])
    assert np.array_equal((ours - ours % 2)[positive & ties], gfloat[positive & ties])
