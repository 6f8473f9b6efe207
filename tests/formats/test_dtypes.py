"""Inputs of float64, float16 and bfloat16: float32 arithmetic on the exact numbers, nothing rounded twice."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from quantlab.formats import parse
from quantlab.formats.rounding import divide, multiply
from tests.formats.families import ELEMENTS, FAMILIES, HADAMARD
from tests.formats.oracle import grid, round_code

F32, F64 = np.float32, np.float64


def to_float32(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even, from the definition."""
    magnitude = abs(exact)
    if magnitude == 0:
        return F32(0)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    units = round(magnitude / step)  # Python rounds a Fraction to even
    value = math.inf if units * step >= 2**128 else float(units * step)
    return F32(math.copysign(value, exact))


def around(values: np.ndarray, steps: int = 2) -> np.ndarray:
    """float64 values with their neighbours."""
    found = [values]
    for direction in (-np.inf, np.inf):
        moved = values
        for _ in range(steps):
            moved = np.nextafter(moved, direction)
            found.append(moved)
    return np.concatenate(found)


def midpoints(rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers midway between two float32, normal and subnormal, as float64: 25 bits, the last one set."""
    normal = np.ldexp(rng.integers(2**23, 2**24, count) * 2 + 1, rng.integers(-40, 40, count))
    subnormal = np.ldexp(rng.integers(1, 2**20, count) * 2.0 + 1, -150)
    return np.concatenate([normal, subnormal, np.ldexp([1.0, 3.0, 2.0**25 - 1], [-150, -150, 103])])


def floats(rng: np.random.Generator, count: int, low: int, high: int) -> np.ndarray:
    return np.ldexp(rng.integers(2**23, 2**24, count), rng.integers(low, high, count)).astype(F32)


def operands(product: bool) -> tuple[np.ndarray, np.ndarray]:
    """float64 and float32 numbers whose exact result is a float32 midpoint, or within a float64 ulp or two of one."""
    rng = np.random.default_rng(5)
    targets = midpoints(rng, 150)
    other = floats(rng, len(targets), -45, 20)
    with np.errstate(over="ignore"):
        x = targets / other if product else targets * other.astype(F64)
    kept = np.isfinite(x) & (np.abs(x) <= np.finfo(F32).max)
    x, other = x[kept], other[kept]
    x = np.concatenate(
        [around(x), rng.standard_normal(300) * 10.0 ** rng.integers(-30, 30, 300), [0.0, -0.0]]
    )
    other = np.concatenate([np.tile(other, 5), floats(rng, 302, -60, 60)])
    other[::3] *= -1
    return x, other


@pytest.mark.parametrize("product", [False, True], ids=["divide", "multiply"])
def test_float64_results_are_rounded_once(product):
    x, other = operands(product)
    combine = multiply if product else divide
    ours = combine(torch.from_numpy(x), torch.from_numpy(other))
    assert ours.dtype == torch.float32
    exact = [
        Fraction(a) * Fraction(float(b)) if product else Fraction(a) / Fraction(float(b))
        for a, b in zip(x.tolist(), other, strict=True)
    ]
    expected = np.array([to_float32(value) for value in exact], dtype=F32)
    assert np.array_equal(ours.numpy(), expected)
    with np.errstate(over="ignore"):
        twice = (x * other if product else x / other).astype(F32)  # float64 first
        early = x.astype(F32) * other if product else x.astype(F32) / other
    # A quotient may pass through float64, a product may not: see ``divide``.
    assert (twice != expected).sum() > 20 if product else np.array_equal(twice, expected)
    assert (early != expected).sum() > 200


@pytest.mark.parametrize("combine", [divide, multiply])
def test_float32_results_are_torchs(combine):
    """Also of float32 numbers held as float64, and for zeros and Inf."""
    rng = np.random.default_rng(6)
    x, other = (torch.from_numpy(floats(rng, 2000, -140, 100)) for _ in range(2))
    x[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    expected = x / other if combine is divide else x * other
    for given in (x, x.double()):
        assert torch.equal(combine(given, other).view(torch.int32), expected.view(torch.int32))
    if combine is divide:
        assert torch.equal(divide(x.double(), 2688.0), x / 2688.0)
        assert torch.equal(divide(x[4:].double(), torch.tensor(torch.inf)), torch.zeros(1996))


def near(scale: np.float32, ties: list[float], rng: np.random.Generator) -> np.ndarray:
    """float64 numbers within a few quarter ulps of float32 around ties * scale."""
    products = [Fraction(tie) * Fraction(float(scale)) for tie in ties]
    offsets = rng.integers(-6, 7, len(ties))
    values = [float(p * (1 + Fraction(int(j), 2**26))) for p, j in zip(products, offsets, strict=True)]
    return np.array(values) * rng.choice([-1.0, 1.0], len(ties))


def test_int8_of_float64_near_ties():
    rng, differing = np.random.default_rng(7), 0
    for _ in range(60):
        amax = float(rng.uniform(1, 2)) * 2.0 ** int(rng.integers(-20, 20))
        scale = to_float32(Fraction(amax) / 127)
        x = np.concatenate([[amax], near(scale, [k + 0.5 for k in range(-120, 120, 5)], rng)])
        encoded = parse("int8").quantize(torch.from_numpy(x))
        assert encoded.scales is not None
        assert encoded.scales.item() == scale
        quotients = [Fraction(float(to_float32(Fraction(v) / Fraction(float(scale))))) for v in x.tolist()]
        expected = [min(127, max(-127, round(quotient))) for quotient in quotients]
        assert encoded.codes.tolist() == expected
        differing += parse("int8").quantize(torch.from_numpy(x).float()).codes.tolist() != expected
    assert differing > 10  # float32 inputs are other numbers


def test_nvfp4_of_float64_near_ties():
    rng, differing = np.random.default_rng(8), 0
    for _ in range(60):
        largest = float(rng.uniform(1, 2)) * 2.0 ** int(rng.integers(-20, 20))
        shared = to_float32(Fraction(largest) / 2688)
        amax = largest * float(rng.uniform(0.05, 1))
        ratio = to_float32(Fraction(amax) / Fraction(float(F32(6) * shared)))
        byte = round_code("e4m3", float(ratio))
        scale = F32(float(grid("e4m3")[byte])) * shared
        ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2
        block = np.concatenate([[amax, 0.0], near(scale, ties, rng)])
        block = np.where(np.abs(block) > amax, 0.0, block)
        x = np.concatenate([[largest], np.zeros(15), block])
        encoded = parse("nvfp4").quantize(torch.from_numpy(x)[None])
        assert encoded.scales is not None
        assert encoded.global_scale is not None
        assert encoded.global_scale.item() == shared
        assert encoded.scales[0, 1] == byte
        quotients = [float(to_float32(Fraction(v) / Fraction(float(scale)))) for v in block.tolist()]
        assert encoded.codes[0, 16:].tolist() == [
            round_code("e2m1", math.copysign(q, v)) for q, v in zip(quotients, block, strict=True)
        ]
        differing += not torch.equal(
            parse("nvfp4").quantize(torch.from_numpy(x)[None].float()).codes, encoded.codes
        )
    assert differing > 10


@pytest.mark.parametrize("text", ["mxfp4", "mxfp8_e4m3+scale.floor", "mxfp6_e2m3+scale.even"])
def test_mx_of_float64_rounds_the_exact_quotient(text):
    """A tie of the element, one float64 ulp away: as float32 it would be the tie itself."""
    fmt = parse(text)
    element = fmt.element.name
    numbers = grid(element)[: len(grid(element)) // 2]
    ties = np.array([float((a + b) / 2) for a, b in itertools.pairwise(numbers)])[:31]
    for direction in (0.0, np.inf):
        x = np.concatenate([[float(grid(element)[-1])], np.nextafter(ties, direction)])
        codes = fmt.quantize(torch.from_numpy(x)[None]).codes[0].tolist()
        assert codes == [round_code(element, value) for value in x.tolist()]
        assert codes != fmt.quantize(torch.from_numpy(x).float()[None]).codes[0].tolist()


def representable() -> torch.Tensor:
    """float32 numbers that float16 and bfloat16 hold too, ties of the codes among them; a zero row, a zero block."""
    rng = np.random.default_rng(9)
    x = np.ldexp(rng.integers(-127, 128, (2, 34, 48)), rng.integers(-8, 4, (2, 34, 1)))
    x[0, 3], x[1, 4, 16:32] = 0, 0
    return torch.from_numpy(x.astype(F32))


@pytest.mark.parametrize(
    "text", [*ELEMENTS, *(t for texts in FAMILIES.values() for t in texts), "nvfp4+as.te"]
)
@pytest.mark.parametrize("suffix", ["", "+rz", "+sr8"])
def test_equal_numbers_give_equal_bits(text, suffix):
    fmt, x = parse(text + suffix), representable()
    words = (
        torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(2))
        if suffix == "+sr8"
        else None
    )
    expected = fmt.quantize(x, words)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        given = x.to(dtype)
        assert torch.equal(given.to(torch.float32), x)
        found = fmt.quantize(given, words)
        for part in ("codes", "scales", "global_scale"):
            one, other = getattr(found, part), getattr(expected, part)
            assert (one is None) == (other is None)
            assert one is None or (one.dtype == other.dtype and torch.equal(one, other)), part
        assert torch.equal(fmt.round(given, words), fmt.dequantize(expected))


@pytest.mark.parametrize("text", HADAMARD)
def test_rotations_work_in_the_dtype_of_the_input(text):
    """float16 and bfloat16 as float32; float64 in float64, which need not give the same bits."""
    fmt, x = parse(text), representable()
    expected = fmt.quantize(x)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(fmt.quantize(x.to(dtype)).codes, expected.codes)
    exact = fmt.round(x.double())
    assert torch.isclose(exact, fmt.round(x), rtol=1e-5, atol=1e-5).double().mean() > 0.95


@pytest.mark.parametrize("text", ["nvfp4+4over6", "nvfp4+as.modelopt", "int8+as.torchao", "mxfp4+as.torchao"])
def test_profiles_and_four_over_six_start_from_float32(text):
    """They are defined in float32: a float64 x is rounded to it first."""
    x = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    fmt = parse(text)
    found, expected = fmt.quantize(x), fmt.quantize(x.float())
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(fmt.dequantize(found), fmt.dequantize(expected))
