"""The compiled loops against the Format, bit for bit."""

import math
import warnings

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, compiled, loops, parse
from tests.formats.oracle import midpoints

FAST = ["mxfp8_e4m3"]
SLOW = [
    *("nvfp4", "e4m3"),
    *("nvfp4:row", "nvfp4:tensor", "nvfp4:none", "nvfp4+floor.0"),
    *(f"mxfp8_e4m3+scale.{mode}" for mode in ("floor", "even", "ceil")),
    *("mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"),
    *("e5m2", "e3m2", "e2m3", "e2m1"),
    *("fp8_e4m3", "fp8_e5m2:block32", "int8", "int8:block32", "int4:block32", "int16"),
]


def _compiler() -> str:
    """Why nothing can be compiled here; empty if it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


REASON = _compiler()
needs_compiler = pytest.mark.skipif(bool(REASON), reason=f"no C++ compiler: {REASON}")


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    monkeypatch.setattr(compiled, "MINIMUM_SIZE", 2)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, with one pattern for NaN."""
    return x.masked_fill(x.isnan(), math.nan).view(torch.int32)


def boundaries(name: str) -> torch.Tensor:
    """float32 (., 128): grid numbers, midpoints and their neighbours, within the scope of every scale."""
    points = torch.from_numpy(midpoints(name, np.float32).copy())
    points = points[points.abs() < 1e38]
    return torch.nn.functional.pad(points, (0, -len(points) % 128)).view(-1, 128)


def states(name: str) -> dict[str, torch.Tensor]:
    """Finite inputs (V, 128); ``name``: of the element whose boundaries are among them."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(24, 128, generator=generator)
    patterns = torch.randint(-(2**31), 2**31, (8192, 128), generator=generator).to(torch.int32)
    patterns = patterns.view(torch.float32)
    exponents = torch.randint(-150, 120, (24, 128), generator=generator).double()
    points = boundaries(name) if name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1") else normal
    return {
        "normal": normal,
        "patterns": patterns.masked_fill(~patterns.isfinite(), 0.0),
        "wide": (normal.double() * 2**exponents).float(),
        "rows": (normal.double() * 2 ** exponents[:, :1]).float(),
        "boundaries": points,
        # Under a power of two in every block, so that scaled quotients meet the boundaries as well.
        "scaled boundaries": points * 2.0 ** torch.randint(-9, 9, (len(points), 1), generator=generator),
        "scale boundaries": boundaries("e4m3").repeat_interleave(32, dim=1)[:, :1024] * 6,
        "integers": torch.randint(-300, 300, (24, 128), generator=generator) * 0.5,
        "subnormal": torch.randint(-300, 300, (24, 128), generator=generator) * 2.0**-149,
        "zeros": torch.zeros(24, 128).copysign(normal),
        "largest": torch.full((24, 128), torch.finfo(torch.float32).max).copysign(normal),
        "strided": torch.randn(2, 128, 48, generator=generator).transpose(-1, -2),
        "batched": torch.randn(2, 3, 5, 64, generator=generator),
    }


def _check(text: str) -> None:
    fmt = parse(text)
    for name, x in states(fmt.element.name).items():
        before = x.clone()
        encoded, expected = compiled.quantize(fmt, x), fmt.quantize(x)
        assert encoded.codes.dtype == expected.codes.dtype
        assert torch.equal(encoded.codes, expected.codes), name
        for part in ("scales", "global_scale"):
            ours, theirs = getattr(encoded, part), getattr(expected, part)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs), (name, part)
        codes = expected.codes.clone()
        assert torch.equal(bits(compiled.dequantize(fmt, expected)), bits(fmt.dequantize(expected))), name
        assert torch.equal(expected.codes, codes)
        assert torch.equal(bits(compiled.round(fmt, x)), bits(fmt.round(x))), name
        assert torch.equal(x, before), "the input was written"
    if fmt.element.bits <= 8:
        _check_every_code(text)
    for value in (math.nan, math.inf, -math.inf):
        x = states("fp32")["normal"].clone()
        x[3, 5] = value
        _check_special(text, x)


def _check_every_code(text: str) -> None:
    """Codes that no number has: bits above the element's, NaN, Inf; under every scale byte."""
    fmt = parse(text)
    encoded = fmt.quantize(torch.ones(256, 256))
    codes = torch.arange(256).to(torch.uint8).view(encoded.codes.dtype).expand(256, 256).contiguous()
    scales = encoded.scales
    if scales is not None and scales.dtype == torch.uint8:
        scales = torch.arange(256).to(torch.uint8)[:, None].expand(scales.shape).contiguous()
    stored = type(encoded)(codes, scales, encoded.global_scale)
    assert torch.equal(bits(compiled.dequantize(fmt, stored)), bits(fmt.dequantize(stored)))
    if scales is not None:
        stored = type(encoded)(codes, encoded.scales, encoded.global_scale)
        assert torch.equal(bits(compiled.dequantize(fmt, stored)), bits(fmt.dequantize(stored)))


def _check_special(text: str, x: torch.Tensor) -> None:
    """The same error, or the same bits."""
    fmt = parse(text)
    expected, message = None, ""
    try:
        expected = fmt.quantize(x)
    except InputError as error:
        message = str(error)
    if expected is None:
        for function in (compiled.quantize, compiled.round):
            with pytest.raises(InputError) as caught:
                function(fmt, x)
            assert str(caught.value) == message
        return
    assert torch.equal(compiled.quantize(fmt, x).codes, expected.codes)
    assert torch.equal(bits(compiled.round(fmt, x)), bits(fmt.round(x)))


@needs_compiler
@pytest.mark.parametrize("text", FAST)
def test_equal_bits(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        _check(text)
    assert not compiled._failed


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("text", SLOW)
def test_equal_bits_of_every_served_format(text):
    _check(text)
    assert not compiled._failed


@pytest.mark.parametrize(
    "text",
    ["bf16", "fp16", "tf32", "fp32", "int8+ef", "nvfp4+hadamard", "nvfp4+scale.ceil", "fp8_e4m3+scale.recip"],
)
def test_the_format_does_what_is_not_served(text, monkeypatch):
    monkeypatch.setattr(compiled, "_attempt", lambda *_: pytest.fail("compiled"))
    x, fmt = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), parse(text)
    assert torch.equal(compiled.quantize(fmt, x).codes, fmt.quantize(x).codes)
    assert torch.equal(compiled.round(fmt, x), fmt.round(x))


def test_stochastic_rounding_is_the_formats(monkeypatch):
    monkeypatch.setattr(compiled, "_attempt", lambda *_: pytest.fail("compiled"))
    generator = torch.Generator().manual_seed(0)
    x, words = torch.randn(4, 64, generator=generator), torch.randint(0, 2**32, (4, 64), generator=generator)
    fmt = parse("nvfp4+sr")
    assert torch.equal(compiled.quantize(fmt, x, words).codes, fmt.quantize(x, words).codes)
    assert torch.equal(compiled.round(fmt, x, words), fmt.round(x, words))
    with pytest.raises(InputError, match="random_bits"):
        compiled.quantize(parse("nvfp4"), x, words)


@pytest.mark.parametrize(
    "x", [torch.zeros(4, 0), torch.zeros(0, 32), torch.zeros(2, 40), torch.zeros(8).double()]
)
def test_odd_shapes_and_dtypes_are_the_formats(x):
    fmt = parse("nvfp4")
    assert torch.equal(compiled.quantize(fmt, x).codes, fmt.quantize(x).codes)


def test_small_tensors_are_not_compiled(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "_attempt", lambda *_: pytest.fail("compiled"))
    x, fmt = torch.ones(128, 128), parse("nvfp4")
    compiled.round(fmt, x)
    compiled.dequantize(fmt, compiled.quantize(fmt, x))


def test_without_a_compiler_one_message_and_equal_results(monkeypatch, tmp_path):
    import torch._inductor.config as config

    monkeypatch.setattr(compiled, "_failed", False)
    for loop in ("amax_loop", "encode_groups", "round_groups", "decode_groups"):
        monkeypatch.setattr(loops, loop, getattr(loops, loop).__wrapped__)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, fmt = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)), parse("mxfp8_e4m3")
    broken = config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    with broken, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        encoded = compiled.quantize(fmt, x)
        values, rounded = compiled.dequantize(fmt, encoded), compiled.round(fmt, x)
    assert sum("formats are not compiled" in str(warning.message) for warning in caught) == 1
    assert torch.equal(encoded.codes, fmt.quantize(x).codes)
    assert torch.equal(values, fmt.round(x))
    assert torch.equal(rounded, fmt.round(x))


def test_text_for_a_format_and_tensors_for_what_is_stored_are_refused():
    for function in (compiled.quantize, compiled.round, compiled.dequantize):
        with pytest.raises(InputError, match=r"^fmt 'nvfp4': expected a Format"):
            function("nvfp4", torch.ones(2, 16))
    fmt = parse("int8")
    stored = fmt.quantize(torch.ones(1024, 512))
    for wrong in (None, stored.codes):
        with pytest.raises(InputError, match=r"^encoded .*an Encoded of int8"):
            compiled.dequantize(fmt, wrong)
    with pytest.raises(InputError, match=r"^encoded\.scales "):
        compiled.dequantize(fmt, Encoded(stored.codes, stored.scales[:5]))
