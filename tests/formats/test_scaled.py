"""Scaled formats: the recipes in numpy float32, the quotient rounded exactly; and their edges."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import parse
from tests.formats.oracle import LAYOUTS, grid, round_code

F32 = np.float32
LARGEST, TINY = np.finfo(F32).max, F32(2.0**-149)
SCALED = ["int8", "int8:block32", "fp8_e4m3", "fp8_e4m3:block32", "fp8_e5m2", "fp8_e5m2:block32"]
QMAX = {"int8": 127, "fp8_e4m3": 448, "fp8_e5m2": 57344}


def states(seed: int = 0, key_dim: int = 64) -> np.ndarray:
    """Rows of very different sizes: normal, tiny, huge, subnormal, zero, one outlier, signed zeros."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal(key_dim) * 10.0**power for power in (0, -3, 4, -30, 30)]
    rows += [rng.standard_normal(key_dim) * 2.0**-130, rng.integers(-190, 190, key_dim) * 2.0**-149]
    rows += [np.zeros(key_dim), -np.zeros(key_dim), rng.integers(-3, 4, key_dim) * 2.0**-149]
    outlier = rng.standard_normal(key_dim)
    outlier[5] = -1e4
    return np.array([*rows, outlier], dtype=F32)


def fixed(name: str, value: float) -> int:
    """The expected code of one quotient."""
    if name != "int8":
        return round_code(name.removeprefix("fp8_"), value)
    code = math.floor(Fraction(value) + Fraction(1, 2))
    if Fraction(value) + Fraction(1, 2) == code and code % 2:
        code -= 1
    return max(-127, min(127, code))


def decoded(name: str, code: int) -> np.float32:
    if name == "int8":
        return F32(code)
    element = name.removeprefix("fp8_")
    negative, magnitude = divmod(code, LAYOUTS[element].sign_code)
    return F32(math.copysign(float(grid(element)[magnitude]), -1 if negative else 1))


@pytest.mark.parametrize("text", SCALED)
def test_recipe(text):
    name, _, block = text.partition(":")
    x = states()
    fmt = parse(text)
    encoded = fmt.quantize(torch.from_numpy(x))
    values = fmt.dequantize(encoded).numpy()
    group = 32 if block else x.shape[1]
    for row in range(len(x)):
        for start in range(0, x.shape[1], group):
            part = x[row, start : start + group]
            amax = np.abs(part).max()
            scale = F32(1) if amax == 0 else max(amax / F32(QMAX[name]), TINY)
            assert encoded.scales[row, start // group].item() == scale
            expected = [fixed(name, float(value)) for value in part / scale]
            assert encoded.codes[row, start : start + group].tolist() == expected
            reconstructed = np.array([decoded(name, code) for code in expected]) * scale
            assert np.array_equal(values[row, start : start + group], reconstructed)


@pytest.mark.parametrize("text", SCALED)
def test_zero_groups_decode_to_zero(text):
    fmt = parse(text)
    encoded = fmt.quantize(torch.zeros(2, 3, 64))
    assert (encoded.scales == 1).all()
    assert (fmt.dequantize(encoded) == 0).all()


@pytest.mark.parametrize("text", SCALED)
@pytest.mark.parametrize("quanta", [1, 2, 63, 64, 100, 190, 191, 400, 57344])
def test_a_scale_that_underflows(text, quanta):
    """amax of a few float32 quanta: the scale is never zero, so nothing turns into NaN or vanishes.

    A scale of s >= 1 quanta is off by at most half a quantum, hence qmax * scale >= 2/3 amax.
    """
    fmt = parse(text)
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = quanta * 2.0**-149, -(2.0**-149)
    value = fmt.round(x)
    assert torch.equal(value, fmt.dequantize(fmt.quantize(x)))
    assert fmt.quantize(x).scales[0, 0] >= 2.0**-149
    assert value[0, 0] >= 2 / 3 * x[0, 0]
    if quanta <= 63:  # integers up to 63 quanta are codes of every element here or within its relative error
        assert abs(value[0, 0] - x[0, 0]) <= x[0, 0] * 2.0**-3


@pytest.mark.parametrize("text", [*SCALED, "nvfp4", "nvfp4:row"])
def test_the_largest_float_stays_finite(text):
    """RN(max / 127) * 127 is Inf in float32; the scale is one step lower."""
    fmt = parse(text)
    x = torch.full((1, 64), float(LARGEST))
    x[0, 1::2] *= -1
    value = fmt.round(x)
    assert value.isfinite().all()
    assert torch.equal(value, fmt.dequantize(fmt.quantize(x)))
    assert torch.allclose(value, x, rtol=2.0**-22, atol=0)  # one step of the scale and two roundings


def test_the_naive_int8_scale_overflows():
    """The reason for the cap above."""
    with np.errstate(over="ignore"):
        assert np.isinf(F32(127) * (LARGEST / F32(127)))


@pytest.mark.parametrize("text", ["int8", "int8:block32", "nvfp4", "nvfp4:row", "nvfp4:none", "int8+ef"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_refused(text, bad):
    x = torch.ones(2, 2, 32)
    x[1, 0, 3] = bad
    for call in (parse(text).quantize, parse(text).round):
        with pytest.raises(
            InputError, match=rf"^x '{bad} at \(1, 0, 3\)': expected numbers that .* can store"
        ):
            call(x)


@pytest.mark.parametrize("text", ["fp8_e4m3", "fp8_e5m2:block32"])
def test_fp8_keeps_nan_and_as_hardware_saturates_inf(text):
    fmt = parse(text)
    x = torch.linspace(-1, 1, 64).repeat(3, 1)
    clean = fmt.round(x)
    x[0, 3] = math.nan
    assert fmt.round(x)[0, 3].isnan()
    assert torch.equal(fmt.round(x)[1:], clean[1:])
    x[1, 5] = -math.inf
    with pytest.raises(InputError, match=r"^x '-inf at \(1, 5\)'"):
        fmt.round(x)
    value = fmt.round(x, specials="hardware")
    stored = fmt.dequantize(fmt.quantize(x, specials="hardware"))
    assert torch.equal(value.nan_to_num(7.0), stored.nan_to_num(7.0))
    assert value[0, 3].isnan()
    assert torch.equal(value[0, 4:], clean[0, 4:])  # the neighbours of a NaN are untouched
    assert value[1, 5] == -LARGEST
    assert torch.equal(value[2], clean[2])


@pytest.mark.parametrize("residual", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "nvfp4"])
def test_error_feedback_by_hand(name, residual):
    """t = x + e comes before the row's maximum; e' = t - decoded, in the residual's own format."""
    dtype = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}[residual]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 32, generator=generator)
    error = (torch.randn(4, 32, generator=generator) * 0.5).to(dtype)
    error[:, 0] = 9.0  # makes x + e the new maximum
    fmt, plain = parse(f"{name}+ef.{residual}"), parse(name)
    encoded = fmt.quantize(x, residual=error)
    target = x + error.float()
    expected = plain.quantize(target)
    assert torch.equal(encoded.codes, expected.codes)
    assert torch.equal(encoded.scales, expected.scales)
    assert encoded.residual.dtype == dtype
    assert torch.equal(encoded.residual, (target - plain.dequantize(expected)).to(dtype))
    assert torch.equal(fmt.round(x, residual=error), plain.dequantize(expected))
    assert torch.equal(fmt.quantize(x).codes, plain.quantize(x).codes)  # no residual = zeros


def test_error_feedback_removes_the_bias_of_a_constant():
    """Stored again and again, a constant averages to itself: |mean - x| <= |last residual| / steps."""
    fmt = parse("int8+ef.fp32")
    x = torch.tensor([[1.0, 0.3001]])
    residual, total, steps = None, torch.zeros_like(x), 64
    for _ in range(steps):
        encoded = fmt.quantize(x, residual=residual)
        residual = encoded.residual
        total += fmt.dequantize(encoded)
    # The residual is at most half a step, 1/254, and twice that with the moving scale; the float32 sum of 64
    # terms below 2 loses at most 64 * 2^-24 of the mean.
    bound = (1 / 127) / steps + 64 * 2.0**-24
    assert (total / steps - x).abs().max() <= bound
    assert (parse("int8").round(x) - x).abs().max() > bound


def test_the_residual_saturates():
    """An fp16 residual beyond 65504 stays finite; otherwise the next store would be Inf."""
    fmt = parse("int8+ef")
    x = torch.tensor([[1e9, 3.9e6 * 0.5]])
    encoded = fmt.quantize(x)
    assert encoded.residual.abs().max() == 65504
    fmt.quantize(x, residual=encoded.residual)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_int8_stochastic_over_all_words(bits):
    """floor(x + u) on the signed quotient: up iff floor(delta 2^n) + r >= 2^n with delta = q - floor(q)."""
    x = np.concatenate([np.linspace(-127, 127, 77), [0.0, -0.0, 1e-9, -1e-9, 126.5, -126.5, 127, -127]])
    x = x.astype(F32)
    x[0] = 127  # one group whose scale is exactly 1
    words = np.arange(2**bits, dtype=np.int64)
    batch = torch.from_numpy(np.repeat(x[None], len(words), axis=0))
    random_bits = torch.from_numpy(np.repeat(words[:, None], len(x), axis=1))
    codes = parse(f"int8+sr{bits}").quantize(batch, random_bits).codes.numpy()
    for index, value in enumerate(x):
        floor = math.floor(Fraction(float(value)))
        field = math.floor((Fraction(float(value)) - floor) * 2**bits)
        expected = [min(127, max(-127, floor + (field + r >= 2**bits))) for r in range(2**bits)]
        assert codes[:, index].tolist() == expected
