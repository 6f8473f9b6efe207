"""Key scales: what is stored, what it does to codes and errors, and what it leaves alone."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.formats import Encoded, compiled, parse
from quantlab.formats.hadamard import rotate
from quantlab.formats.storage import map_tensors
from tests.formats.families import search

TEXTS = [
    *(
        "nvfp4+keyscale",
        "nvfp4:row+keyscale",
        "nvfp4:none+keyscale",
        "nvfp4+4over6+keyscale",
        "mxfp4+keyscale",
    ),
    *(
        "int4+keyscale",
        "int4:head+keyscale",
        "int8:block32+keyscale",
        "fp8_e4m3+keyscale",
        "mxfp6_e2m3+keyscale+rz",
    ),
    *(
        "nvfp4+as.te+keyscale",
        "nvfp4+as.compressed_tensors+keyscale",
        "int8+keyscale+sr8",
        "nvfp4+keyscale+sr",
    ),
    *(
        "nvfp4+keyscale+rank2",
        "int4+keyscale+mean",
        "int8+keyscale+hadamard.3",
        "nvfp4+keyscale+rank1+hadamard+sr",
    ),
    *(
        "nvfp4+keyscale+ef",
        "int4+keyscale+ef.int4",
        "int8+keyscale+rank1+ef.fp32",
        "int8+keyscale+hadamard+ef",
    ),
]
SHAPES = [(8, 8), (3, 8, 33), (2, 17, 9), (1, 1), (2, 1, 40), (2, 3, 34, 48)]


def state(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal, in columns whose sizes differ by up to 2^16."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(16 * torch.rand(*shape[:-2], 1, shape[-1], generator=random) - 8)
    return torch.randn(shape, generator=random) * sizes


def words_for(fmt, x):
    return (
        torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(1))
        if fmt.stochastic
        else None
    )


def columns(encoded: Encoded) -> torch.Tensor:
    """The scales as float64, by numpy from the E8M0 bytes."""
    assert encoded.key_scales is not None
    return torch.from_numpy(np.ldexp(1.0, encoded.key_scales.numpy().astype(np.int32) - 127))


def assert_same(one, other):
    for field in dataclasses.fields(Encoded):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Encoded):
            assert_same(a, b)
            continue
        assert (a is None) == (b is None), field.name
        assert a is None or torch.equal(a, b), field.name


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_round_trips_and_is_what_is_counted(text, shape):
    fmt = parse(text)
    if "rank2" in text and min(shape[-2:]) < 2:
        shape = (2, 2, 40)
    x = state(*shape)
    encoded = fmt.quantize(x, words_for(fmt, x))
    packed = fmt.pack(encoded)
    assert_same(fmt.unpack(packed), encoded)
    counted = fmt.stored_bits(shape)
    assert 8 * packed.nbytes == sum(counted.values())
    assert counted["key scales"] == 8 * shape[-1] * math.prod(shape[:-2])
    assert fmt.text == text or parse(text).text == fmt.text


@pytest.mark.parametrize("text", [t for t in TEXTS if "+ef" not in t])
def test_codes_are_those_of_the_divided_columns(text):
    """Both ways exact: a power of two in float32."""
    fmt, x = parse(text), state(2, 3, 34, 48)
    words = words_for(fmt, x)
    encoded = fmt.quantize(x, words)
    common = torch.zeros(1)
    if fmt.component is not None:
        only = dataclasses.replace(fmt, key_scale=False)
        whole = only.quantize(x, words)
        assert torch.equal(whole.key_factor, encoded.key_factor)
        codes = dataclasses.replace(only, component=None)
        part = dataclasses.replace(whole, key_factor=None, value_factor=None)
        common = only.dequantize(whole) - codes.dequantize(part)  # up to a rounding
    scales = columns(encoded)
    plain = dataclasses.replace(fmt, component=None, hadamard=None, key_scale=False)
    found = dataclasses.replace(encoded, key_factor=None, value_factor=None, key_scales=None)
    if fmt.component is None:
        aim = rotate(x, fmt.hadamard)
        largest = aim.abs().amax(-2, keepdim=True).double()
        assert (scales <= largest).all()
        assert (largest < 2 * scales).all()
        assert_same(plain.quantize((aim.double() / scales).float(), words), found)
    decoded = rotate((plain.dequantize(found).double() * scales).float(), fmt.hadamard, inverse=True)
    value = fmt.dequantize(encoded)
    slack = 2.0**-22 * x.abs().amax() if fmt.component else 0.0
    assert ((decoded + common - value).abs() <= slack).all()
    assert torch.equal(fmt.round(x, words), value)
    if not fmt.stochastic:
        assert torch.equal(compiled.round(fmt, x), value)


@pytest.mark.parametrize(
    "text", ["nvfp4", "nvfp4:none", "int4:head", "int8", "mxfp4", "fp8_e4m3:tile32", "nvfp4+4over6"]
)
@search
@given(seed=st.integers(0, 2**16))
def test_the_size_of_a_column_is_no_matter(text, seed):
    """Powers of two in the columns pass through to the scales: codes stay, values are multiplied, exactly."""
    fmt, x = parse(f"{text}+keyscale"), state(2, 18, 40, seed=seed)
    exponents = torch.randint(-40, 41, (2, 1, 40), generator=torch.Generator().manual_seed(seed))
    factors = torch.exp2(exponents.float())
    one, other = fmt.quantize(x), fmt.quantize(x * factors)
    assert torch.equal(other.key_scales.int(), one.key_scales.int() + exponents)
    assert_same(dataclasses.replace(other, key_scales=one.key_scales), one)
    assert torch.equal(fmt.dequantize(other), fmt.dequantize(one) * factors)


@pytest.mark.parametrize(
    ("text", "share"), [("nvfp4", 1 / 6 + 1 / 16), ("int4", 1 / 14), ("int8:head", 1 / 254)]
)
def test_an_error_is_relative_to_its_own_column(text, share):
    """share: of a block's largest magnitude, half the widest step (and of NVFP4 an E4M3 scale's rounding).

    Every divided column lies in [1, 2), so a block's largest magnitude is below twice the column's own.
    """
    x = state(4, 32, 64)
    largest = x.abs().amax(-2, keepdim=True)
    relative = {key: ((parse(text + key).round(x) - x).abs() / largest).max() for key in ("", "+keyscale")}
    assert relative["+keyscale"] <= 2 * share * (1 + 2.0**-20)
    assert relative[""] >= 0.99  # small columns beside large ones are lost without it


@pytest.mark.parametrize("text", ["int8+keyscale+ef.fp32", "nvfp4+keyscale+rank1+ef.fp32"])
def test_a_residual_is_not_scaled(text):
    """It is what the decoded value leaves, whatever the scales of the store before and after."""
    fmt, residual = parse(text), None
    for seed in range(4):
        x = state(2, 20, 32, seed=seed)
        encoded = fmt.quantize(x, residual=residual)
        aim = x if residual is None else x + residual
        residual = encoded.residual
        assert torch.equal(residual, aim - fmt.dequantize(encoded))


@pytest.mark.parametrize("text", TEXTS)
def test_a_matrix_of_the_batch_is_stored_as_it_is_alone(text):
    fmt, x = parse(text), state(5, 9, 33)
    words = words_for(fmt, x)
    whole = fmt.quantize(x, words)
    for i in range(5):
        alone = fmt.quantize(x[i : i + 1].clone(), None if words is None else words[i : i + 1])
        assert_same(alone, map_tensors(whole, lambda t, i=i: t[i : i + 1]))


@pytest.mark.parametrize("text", ["nvfp4+keyscale", "int8+keyscale", "mxfp4+keyscale"])
def test_the_ends_of_float32(text):
    """Columns of zeros, of the smallest and of the largest number, beside each other."""
    fmt, largest = parse(text), torch.finfo(torch.float32).max
    x = torch.ones(1, 4, 16)
    for column, value in enumerate((0.0, -0.0, 2.0**-149, 2.0**-127, 2.0**-126, largest, -largest, 2.0**127)):
        x[..., column] = value
    encoded = fmt.quantize(x)
    exponents = (encoded.key_scales.int() - 127)[0, 0, :8].tolist()
    assert exponents == [0, 0, -127, -127, -126, 127, 127, 127]
    value = fmt.dequantize(encoded)
    assert value.isfinite().all()
    assert torch.equal(value, fmt.round(x))
    assert not value[..., :2].any()
    for column in (4, 5, 6, 7, 8):  # in [1, 2): off by at most a quarter of it, see above
        assert ((value - x)[..., column].abs() <= 0.25 * x[..., column].abs().clamp(min=2.0**-126)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "text", ["nvfp4+keyscale", "int8+keyscale", "mxfp8_e4m3+keyscale", "fp8+keyscale+ef"]
)
def test_nan_and_infinity(text, bad):
    fmt, x = parse(text), state(2, 8, 32)
    x[..., 5] *= 2.0**-20  # a small column
    clean = fmt.quantize(x)
    x[1, 2, 5] = bad
    keeps = math.isnan(bad) and fmt.name in ("mxfp8_e4m3", "fp8_e4m3")
    if not keeps:
        with pytest.raises(InputError, match=rf"^x '{bad} at \(1, 2, 5\)': expected numbers that"):
            fmt.quantize(x)
    encoded = fmt.quantize(x, specials="hardware")
    value = fmt.dequantize(encoded)
    assert value.isnan().nonzero().tolist() == ([[1, 2, 5]] if keeps else [])
    assert torch.equal(value.nan_to_num(7.0), fmt.round(x, specials="hardware").nan_to_num(7.0))
    assert torch.equal(encoded.key_scales[0], clean.key_scales[0])
    if math.isnan(bad):
        x[1, 2, 5] = 0.0
        assert torch.equal(encoded.key_scales, fmt.quantize(x).key_scales)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 16), (2, 4, 0)], ids=str)
def test_no_numbers_at_all(shape):
    fmt, x = parse("nvfp4+keyscale"), torch.zeros(shape)
    encoded = fmt.quantize(x)
    assert fmt.round(x).shape == fmt.dequantize(encoded).shape == shape
    assert_same(fmt.unpack(fmt.pack(encoded)), encoded)


def test_what_does_not_fit_is_refused():
    fmt = parse("nvfp4+keyscale")
    with pytest.raises(InputError, match=r"^x \(32,\): expected \(\.\.\., V, K\), a matrix a head"):
        fmt.quantize(torch.ones(32))
    with pytest.raises(InputError, match=r"^shape \(32,\): expected \(\.\.\., V, K\)"):
        fmt.stored_bits((32,))
    encoded = fmt.quantize(torch.ones(3, 4, 32))
    for wrong in (None, encoded.key_scales.float(), encoded.key_scales[..., :5]):
        with pytest.raises(InputError, match=r"^encoded\.key_scales "):
            fmt.dequantize(dataclasses.replace(encoded, key_scales=wrong))
    with pytest.raises(InputError, match=r"^encoded\.key_scales "):
        parse("nvfp4").dequantize(encoded)
