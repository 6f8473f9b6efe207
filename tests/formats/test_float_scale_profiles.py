"""FP32 scales: conventions against their definitions.  The libraries' own vectors are in test_golden.py."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from quantlab.formats import float_scale_profiles as profiles
from quantlab.formats import parse
from quantlab.formats.rounding import decode_fields, encode_element, encode_integer
from quantlab.formats.table import FLOAT_ELEMENTS, Element, Integer
from tests.formats.blocks import profile_of_library

F32 = np.float32
LARGEST, TINY = np.finfo(F32).max, 2.0**-149
ELEMENTS: dict[str, Element | Integer] = {
    "e4m3": FLOAT_ELEMENTS["e4m3"],
    "e5m2": FLOAT_ELEMENTS["e5m2"],
    "int4": Integer("int4", 4),
    "int8": Integer("int8", 8),
    "int16": Integer("int16", 16),
}


def encoder(element: Element | Integer):
    if isinstance(element, Integer):
        dtype = torch.int8 if element.bits <= 8 else torch.int16
        return lambda quotients: encode_integer(quotients, element).to(dtype)
    return lambda quotients: encode_element(quotients, element).to(torch.uint8)


def decoded(codes: torch.Tensor, element: Element | Integer) -> torch.Tensor:
    if isinstance(element, Integer):
        return codes.to(torch.float32)
    return decode_fields(codes, element).to(torch.float32)


def run(
    x: torch.Tensor, profile: profiles.FloatScaleProfile, element: Element | Integer, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and values of groups that span ``dims`` of x."""
    minimum, maximum = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    codes, scales = profiles.encode(x, minimum, maximum, profile, encoder(element))
    return codes, scales, profile.decode(decoded(codes, element), scales)


def magnitudes() -> np.ndarray:
    """Group maxima over the whole of float32, with neighbours."""
    values = np.array([m * 2.0**e for e in range(-126, 128, 5) for m in (1, 1.3, 1.75, 1.99)], dtype=F32)
    values = np.concatenate([values, [0, TINY, 63 * TINY, 2.0**-127, LARGEST / 2, LARGEST]]).astype(F32)
    return np.unique(np.concatenate([values, np.nextafter(values, F32(1))]))


CANONICAL = {"int4": "int4", "int8": "int8", "int16": "int16", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


def stored(text: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and values of the canonical recipe."""
    encoded = parse(text).quantize(x)
    return encoded.scales, parse(text).dequantize(encoded)


@pytest.mark.parametrize("name", ["int4", "int8", "int16", "e4m3", "e5m2"])
def test_canonical_scales(name):
    """amax / largest, correctly rounded; 1 for zero; never zero; nothing finite decodes to Inf."""
    element, amax = ELEMENTS[name], magnitudes()
    x = torch.from_numpy(np.stack([amax, -amax, amax / F32(3)], axis=-1))
    scales, values = stored(CANONICAL[name], x)
    for largest, scale in zip(amax, scales[:, 0].numpy(), strict=True):
        exact = Fraction(float(largest)) / Fraction(element.max)
        expected = F32(1) if largest == 0 else max(F32(float(exact)), F32(TINY))
        # A scale that would decode the largest code to Inf is the next one down; floats of fractions round twice
        # only below the normal numbers, where the quotient is a multiple of nothing finer than 2^-1074.
        assert scale == expected or (largest == LARGEST and scale == np.nextafter(expected, F32(0)))
    assert values.isfinite().all()


def test_denominator_of_240():
    """FP8 with headroom: E4M3 codes stay at or below 240, as if amax / 240 had been passed to Model-Optimizer."""
    element = FLOAT_ELEMENTS["e4m3"]
    x = torch.from_numpy(rows())[:7]
    encoded = parse("fp8_e4m3+scale.240").quantize(x)
    codes, scales = encoded.codes, encoded.scales
    assert (decoded(codes, element).abs().amax(-1) == 240).all()
    assert np.array_equal(scales.numpy(), (np.abs(x.numpy()).max(-1, keepdims=True) / F32(240)))


def kernel_reference(x: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Quotients and stored scales, row by row in float32."""
    amax = np.abs(x).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(amax == 0, F32(1), F32(largest) / amax).astype(F32)
        return x * factor, F32(1) / factor


def rows(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((400, 24)) * 10.0 ** rng.uniform(-20, 20, (400, 1))
    x[7] = 0
    x[8] = np.arange(24) - 11.5  # amax 12.5
    x[9, :] = np.where(np.arange(24) < 12, 0.5, -1.5)
    x[9, 0] = 127
    return x.astype(F32)


@pytest.mark.parametrize("name", ["int8", "int16", "e4m3"])
def test_kernels_of_state_space_decode(name):
    """Factor largest / amax, its reciprocal stored; Triton rounds integers half away from zero, CUDA to even."""
    element, x = ELEMENTS[name], rows()
    quotients, stored = kernel_reference(x, element.max)
    for library in ("flashinfer", "vllm"):
        profile = profile_of_library(profiles.FLOAT_SCALE_PROFILES, library, name)
        codes, scales, values = run(torch.from_numpy(x), profile, element, (-1,))
        assert np.array_equal(scales.numpy(), stored)
        numbers = decoded(codes, element).numpy()
        assert np.array_equal(values.numpy(), numbers * stored)
        if name == "e4m3":
            expected = decoded(encoder(element)(torch.from_numpy(quotients)), element).numpy()
        elif library == "flashinfer":
            expected = np.round(quotients)
        else:
            expected = np.sign(quotients) * np.floor(np.abs(quotients.astype(np.float64)) + 0.5)
        assert np.array_equal(numbers, np.clip(expected, -element.max, element.max))


def test_half_away_rounds_once():
    """The number below one half is rounded down, although its float32 sum with one half is 1."""
    below = np.nextafter(F32(0.5), F32(0))
    quotients = torch.tensor([below, -below, 0.5, -0.5, 2.5, -126.5, 300.0, 0.0])
    cast = profile_of_library(profiles.FLOAT_SCALE_PROFILES, "vllm", "int8").cast
    assert cast is not None
    assert cast(quotients).tolist() == [0, 0, 1, -1, 3, -127, 127, 0]


@pytest.mark.parametrize("name", ["int4", "int8", "int16", "e4m3", "e5m2"])
def test_stored_reciprocals(name):
    """+scale.recip is the kernels' arithmetic where that is finite, and finite everywhere else."""
    element, text = ELEMENTS[name], f"{CANONICAL[name]}+scale.recip"
    x = rows(1)
    quotients, expected_scales = kernel_reference(x, element.max)
    encoded = parse(text).quantize(torch.from_numpy(x))
    assert np.array_equal(encoded.scales.numpy(), expected_scales)
    assert torch.equal(encoded.codes, encoder(element)(torch.from_numpy(quotients)))
    amax = magnitudes()
    extreme = torch.from_numpy(np.stack([amax, -amax, np.zeros_like(amax)], axis=-1))
    scales, values = stored(text, extreme)
    assert (scales > 0).all()
    assert scales.isfinite().all()
    assert values.isfinite().all()
    assert (values[:, 2] == 0).all()
    # Two roundings make the stored scale another number than amax / largest for many rows, never by more than 2 ulp.
    ordinary = np.abs(x).max(-1) > 0
    direct = np.abs(x).max(-1)[ordinary] / F32(element.max)
    steps = expected_scales[ordinary, 0].view(np.int32) - direct.view(np.int32)
    assert (steps != 0).any()
    assert np.abs(steps).max() <= 2


ROW, TILE, HEAD = (-1,), (-1, -3), (-1, -2, -3)


@pytest.mark.parametrize("dims", [ROW, TILE, HEAD])
@pytest.mark.parametrize(
    "row", profiles.FLOAT_SCALE_PROFILES, ids=lambda row: f"{row.library}-{row.variant}-{row.elements[0]}"
)
def test_any_layout_of_groups(row, dims):
    """Groups computed at once give the bits of groups computed one by one: (batch, 2, 3 value rows, 8)."""
    element = ELEMENTS[row.elements[0]]
    x = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(3))
    codes, scales, values = run(x, row, element, dims)
    kept = [dim for dim in range(4) if dim - 4 not in dims]
    for index in np.ndindex(*(x.shape[dim] for dim in kept)):
        place = tuple(index[kept.index(dim)] if dim in kept else slice(None) for dim in range(4))
        group = x[place].reshape(1, -1)
        one = run(group, row, element, (-1,))
        assert torch.equal(codes[place].reshape(1, -1), one[0])
        assert scales[place].unique().tolist() == one[1].flatten().tolist()
        assert torch.equal(values[place].reshape(1, -1), one[2])


def test_the_ends_of_an_asymmetric_range():
    """[-8, 7] over 7.5: either maximum is half a step off, +7.5 clipped to 7, -7.5 rounded to -8.

    no_clipping_err puts the maximum on a code; a range without -8 makes the two rules one.
    """
    for sign, code in ((1, 7), (-1, -8)):
        x = torch.tensor([[sign * 7.5, -sign * 1.0, 0.25, 3.0]])
        symmetric = profile_of_library(profiles.FLOAT_SCALE_PROFILES, "torchao", "int4", "symmetric")
        codes, scales, values = run(x, symmetric, ELEMENTS["int4"], (-1,))
        assert codes[0, 0] == code
        assert scales.item() == 1
        assert (values - x)[0, 0] == -0.5
        unclipped = profile_of_library(
            profiles.FLOAT_SCALE_PROFILES, "torchao", "int4", "symmetric_no_clipping_err"
        )
        codes, scales, values = run(x, unclipped, ELEMENTS["int4"], (-1,))
        assert codes[0, 0] == code
        assert scales.item() == F32(7.5) / F32(7 if sign > 0 else 8)
        assert values[0, 0].item() == pytest.approx(x[0, 0].item(), abs=2**-21)  # 8 half ulps of the scale
        narrow = [
            run(
                x,
                profile_of_library(profiles.FLOAT_SCALE_PROFILES, "torchao", "int4", f"{variant}_narrow"),
                ELEMENTS["int4"],
                (-1,),
            )
            for variant in ("symmetric", "symmetric_no_clipping_err")
        ]
        assert all(torch.equal(one, other) for one, other in zip(*narrow, strict=True))


ZERO_GROUP_SCALES = {"compressed_tensors": 2.0**-23, "flashinfer": 1.0, "vllm": 1.0}


def test_zero_groups():
    """What a group of zeros turns into: zeros, except for the FP8 of torchao and Model-Optimizer (NaN)."""
    for row in profiles.FLOAT_SCALE_PROFILES:
        for name in row.elements:
            _, scales, values = run(torch.zeros(1, 4), row, ELEMENTS[name], (-1,))
            if row.library in ZERO_GROUP_SCALES:
                assert scales.item() == ZERO_GROUP_SCALES[row.library]
            unguarded = (
                row.library in ("torchao", "modelopt") and name in ("e4m3", "e5m2") and row.variant == ""
            )
            assert values.isnan().all() if unguarded else (values == 0).all(), (
                row.library,
                row.variant,
                name,
            )


def test_the_smallest_group_that_modelopt_scales():
    """Fake FP8 quantisation leaves amax up to 2^-24 unscaled: there E4M3's own smallest number is far above."""
    profile = profile_of_library(profiles.FLOAT_SCALE_PROFILES, "modelopt", "e4m3", "eager")
    limit = F32(2.0**-24)
    for largest, kept in ((limit, False), (np.nextafter(limit, F32(1)), True)):
        _, scales, values = run(torch.full((1, 4), float(largest)), profile, ELEMENTS["e4m3"], (-1,))
        assert (values > 0).all() == kept
        assert (scales.item() == 1 / F32(448)) != kept


def test_no_profile_hides_another():
    names = [(p.library, p.variant, name) for p in profiles.FLOAT_SCALE_PROFILES for name in p.elements]
    assert len(names) == len(set(names))
