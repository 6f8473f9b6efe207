"""The fused float32 path against the readable one, bit for bit, for every kind of format text."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from quantlab.formats import fused, parse, rounding
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import FLOAT_ELEMENTS, Element, Overflow, Specials
from tests.formats.oracle import midpoints

ELEMENTS = ["tf32", "bf16", "fp16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
TEXTS = [
    *ELEMENTS,
    *("int16", "int8", "int8:block32", "int8+scale.recip", "int4:tile32"),
    *("fp8_e4m3", "fp8_e5m2", "fp8_e4m3:block32", "fp8_e4m3:head+scale.240"),
    *("nvfp4", "nvfp4:row", "nvfp4:none", "nvfp4:tensor", "nvfp4+scale.ceil", "nvfp4+floor.0"),
    *("mxfp4", "mxfp6_e3m2+scale.floor", "mxfp8_e4m3+scale.even", "mxfp8_e5m2"),
]
MODIFIERS = ["", "+rz", "+sr", "+sr8", "+sr1"]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, with one pattern for NaN."""
    return x.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).view(torch.int32) + x.isnan() * (1 << 30)


def states() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(2, 3, 7, 48, generator=generator)
    exponents = torch.randint(-140, 100, (2, 3, 7, 48), generator=generator).double()
    return {
        "normal": normal,
        "wide": (normal.double() * 2**exponents).float(),
        "rows": (normal.double() * 2 ** exponents[..., :1]).float(),
        "integers": torch.randint(-300, 300, (2, 3, 7, 48), generator=generator).float(),
        "subnormal": torch.randint(-300, 300, (2, 3, 7, 48), generator=generator) * 2.0**-149,
        "zeros": torch.zeros(2, 3, 7, 48).copysign(normal),
        "strided": torch.randn(2, 3, 48, 7, generator=generator).transpose(-1, -2),
    }


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("text", TEXTS)
def test_round_is_dequantize_of_quantize_and_both_paths_agree(text, modifier):
    fmt = parse(text + modifier)
    for name, x in states().items():
        before = x.clone()
        words = None
        if fmt.stochastic:
            words = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(5))
        fast, readable = fmt.quantize(x, words), fmt.quantize(x.double(), words)
        assert torch.equal(fast.codes, readable.codes), name
        assert fast.codes.dtype == readable.codes.dtype
        for part in ("scales", "global_scale"):
            one, other = getattr(fast, part), getattr(readable, part)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
        values = fmt.dequantize(fast)
        assert torch.equal(bits(fmt.round(x, words)), bits(values)), name
        assert values.dtype == torch.float32
        assert torch.equal(x, before), "the input was written"


@pytest.mark.parametrize("name", ELEMENTS)
def test_codec_on_every_boundary_with_specials(name):
    element = FLOAT_ELEMENTS[name]
    points = midpoints(name, np.float32)
    x = torch.from_numpy(points[:: max(1, len(points) // 20000)].copy())
    x = torch.cat([x, torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38])])
    if element.nan_code is not None:
        x = torch.cat([x, torch.tensor([math.nan, -math.nan])])
    words = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(2))
    near, zero, random = Rounding.NEAREST, Rounding.TOWARD_ZERO, Rounding.STOCHASTIC
    for overflow in element.overflows:
        element = dataclasses.replace(element, overflow=overflow)
        for mode, number in ((near, 32), (zero, 32), (random, 32), (random, 13), (random, 8), (random, 1)):
            codes = rounding.encode_element(x, element, mode, words, number)
            ours = fused.encode(x, element, mode, words, number)
            assert torch.equal(codes.to(ours.dtype), ours)
            values = rounding.decode_fields(codes, element).float()
            assert torch.equal(bits(values), bits(fused.round_values(x, element, mode, words, number)))
            assert torch.equal(bits(values), bits(fused.decode(ours, element)))


def test_an_ieee_element_without_a_native_type():
    """Nothing depends on torch knowing the type: Inf, NaN and overflow by arithmetic."""
    element = Element("e3m4", 3, 4, Specials.IEEE, Overflow.INFINITY)
    x = torch.cat(
        [torch.linspace(-40, 40, 4001), torch.tensor([math.inf, -math.inf, -0.0, 1e-9, 15.74, 15.75])]
    )
    codes = rounding.encode_element(x, element)
    assert torch.equal(codes.to(torch.uint8), fused.encode(x, element))
    nan = torch.tensor([math.nan, 1.0])
    assert torch.equal(rounding.encode_element(nan, element).to(torch.uint8), fused.encode(nan, element))
    assert fused.decode(codes.to(torch.uint8), element)[-6:].tolist() == [
        math.inf,
        -math.inf,
        0,
        0,
        15.5,
        math.inf,
    ]


def test_elements_whose_exponents_do_not_fit_take_the_readable_path():
    wide = Element("e9m6", 9, 6, Specials.IEEE, Overflow.INFINITY)
    assert not fused.serves(torch.zeros(1), wide)
    assert fused.serves(torch.zeros(1), FLOAT_ELEMENTS["bf16"])
    assert not fused.serves(torch.zeros(1, dtype=torch.float64), FLOAT_ELEMENTS["bf16"])


@pytest.mark.parametrize("text", ["fp32", "fp64"])
def test_unrounded_formats_pass_through(text):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    fmt = parse(text)
    encoded = fmt.quantize(x)
    assert not fmt.rounded
    assert encoded.codes.dtype == (torch.float32 if text == "fp32" else torch.float64)
    assert torch.equal(fmt.dequantize(encoded), x.to(encoded.codes.dtype))
    kept = encoded.codes.clone()
    if text == "fp32":
        assert fmt.round(x) is x
    x.mul_(2)  # a stored state does not follow the working one
    assert torch.equal(encoded.codes, kept)


@pytest.mark.parametrize("text", ["int8+ef", "fp8_e4m3:block32+ef.bf16", "nvfp4+ef"])
def test_round_with_a_residual(text):
    fmt = parse(text)
    generator = torch.Generator().manual_seed(4)
    x, residual = torch.randn(2, 3, 64, generator=generator), torch.randn(2, 3, 64, generator=generator)
    stored = residual.to(fmt.quantize(x).residual.dtype)
    assert torch.equal(fmt.round(x, residual=stored), fmt.dequantize(fmt.quantize(x, residual=stored)))


@pytest.mark.parametrize("text", TEXTS)
def test_an_empty_batch_is_fine(text):
    x = torch.zeros(0, 2, 4, 32)
    assert parse(text).round(x).shape == x.shape
    assert parse(text).quantize(x).codes.shape == x.shape
