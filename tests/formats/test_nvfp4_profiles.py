"""NVFP4 as seven libraries compute it, against numpy float32.  Their own vectors are in test_golden.py."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import four_over_six, fused, nvfp4_arithmetic
from quantlab.formats.four_over_six import FourOverSix
from quantlab.formats.four_over_six import four_over_six as rule
from quantlab.formats.nvfp4_arithmetic import NO_CODE, Nvfp4Arithmetic, element_values, global_amax
from quantlab.formats.nvfp4_profiles import PROFILES
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import FLOAT_ELEMENTS

F32 = np.float32
E2M1 = FLOAT_ELEMENTS["e2m1"]

HOW: dict[str, Nvfp4Arithmetic | FourOverSix] = {
    **PROFILES,
    **{f"{library}, 4over6": rule(library) for library in ("te", "flashinfer", "fouroversix")},
}


def encode(how: Nvfp4Arithmetic | FourOverSix, x: Tensor, granularity: str = "tensor"):
    amax = global_amax(x, granularity)
    if isinstance(how, FourOverSix):
        assert amax is not None
        return four_over_six.encode(how, x, amax)
    return nvfp4_arithmetic.encode(how, x, amax)


def assert_bits(ours: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, except that any NaN equals any NaN."""
    assert ours.dtype == expected.dtype
    assert ours.shape == expected.shape
    if ours.dtype == np.float32:
        ours, expected = (np.where(np.isnan(a), F32(np.nan), a).view(np.uint32) for a in (ours, expected))
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_a_batch_is_its_matrices_and_its_rows(how):
    """Every profile takes matrices and rows at once, under a global value each, with the bits of one alone."""
    x = (
        torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(4))
        * 10.0 ** torch.arange(-6, 6)[:, None, None]
    )
    x[3], x[4, 1], x[5, 2, 16:] = 0, 0, 0
    for granularity, leading in (("matrix", 1), ("row", 2)):
        codes, scales, global_value = encode(how, x, granularity)
        assert global_value.shape == x.shape[:leading]
        alone = [encode(how, part) for part in x.flatten(0, leading - 1)]
        for together, parts in zip((codes, scales, global_value), zip(*alone, strict=True), strict=True):
            assert torch.equal(together.flatten(0, leading - 1), torch.stack(parts))


def test_amax_of_each_granularity():
    x = torch.tensor([[[1.0, -5.0], [2.0, 3.0]], [[0.0, 0.5], [-0.25, 0.0]]])
    expected = {"matrix": [5.0, 0.5], "row": [[5.0, 3.0], [0.5, 0.25]], "tensor": 5.0}
    for granularity, values in expected.items():
        assert torch.equal(global_amax(x, granularity), torch.tensor(values))
    assert global_amax(x, "none") is None
    for granularity in ("matrix", "row", "tensor"):
        assert torch.equal(global_amax(x[0, 0], granularity), torch.tensor(5.0))
    assert global_amax(torch.zeros(3, 0, 32), "matrix").tolist() == [0.0] * 3
    assert global_amax(torch.tensor([[1.0, torch.nan]]), "row").isnan().all()
    with pytest.raises(InputError, match=r"^granularity 'column': expected one of matrix, row, tensor, none"):
        global_amax(x, "column")


def test_a_python_number_over_a_tensor_is_two_roundings():
    """2688 / 2.5 is 1075.2; libraries that divide a Python number by a torch tensor get 2688 * (1 / 2.5)."""
    amax = torch.tensor(2.5)
    assert F32(2688) / F32(2.5) == F32(1075.2)
    for name in ("compressed_tensors", "vllm", "flashinfer"):
        assert PROFILES[name].global_value(amax).item() == F32(2688) * F32(0.4) != F32(1075.2)
    assert PROFILES["flashinfer.te"].global_value(amax).item() == F32(1075.2)


def test_zero_tensors():
    """torchao, modelopt and vLLM turn a zero tensor into NaN; the others keep it."""
    x = torch.zeros(2, 32)
    for name, profile in PROFILES.items():
        codes, scales, global_value = encode(profile, x)
        numbers = nvfp4_arithmetic.decode(profile, element_values(codes), scales, global_value)
        assert numbers.isnan().all() if name in ("torchao", "modelopt", "vllm") else (numbers == 0).all(), (
            name
        )
    assert encode(PROFILES["flashinfer"], x)[2] == torch.finfo(torch.float32).max


def test_fouroversix_stores_what_rounds_to_8_as_minus_zero():
    """a = 1.4 * 2^-9 in units of 6 * gs takes the scale 2^-9, and 8.4 rounds to 8: the largest value is lost."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0], x[1, 1] = 2688.0, 6 * 1.4 * 2.0**-9, -6 * 1.4 * 2.0**-9
    codes, scales, _ = encode(PROFILES["fouroversix"], x)
    assert scales.tolist() == [[126], [1]]
    assert codes[1, :3].tolist() == [8, 8, 0]
    for name in ("torchao", "modelopt", "te", "vllm", "flashinfer"):
        assert 8 not in encode(PROFILES[name], x)[0][1, :1].tolist()


def test_blocks_whose_scale_underflows():
    """a = 3e7 under A = 1e14 has the scale 0: what is cast then, and which numbers come out, is each library's own."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 1e14, 3e7
    stored = {
        name: [part[1, 0].item() for part in encode(profile, x)[:2]] for name, profile in PROFILES.items()
    }
    assert stored == {
        "torchao": [0, 0x08],  # 2^-6
        "modelopt": [1, 0x01],  # 2^-9: a / (2^-9 * A / 2688) = 0.41
        "compressed_tensors": [0, 0x20],  # 0.125
        "vllm": [1, 0],  # x * 1e-8 = 0.3
        "te": [7, 0],  # x * 3e38
        "flashinfer": [0, 0],
        "flashinfer.te": [7, 0],
        "fouroversix": [0, 0],
        "fouroversix.static_4": [0, 0],
    }


@pytest.mark.parametrize("name", PROFILES)
def test_decoding_in_the_order_of_the_library(name):
    """Against numpy float32, on numbers for which another order gives other bits."""
    rng = np.random.default_rng(7)
    amax = torch.from_numpy((10.0 ** rng.uniform(-3, 3, 40)).astype(F32))[:, None, None]
    x = amax * torch.from_numpy(rng.uniform(-1, 1, (40, 8, 64)).astype(F32))
    profile = PROFILES[name]
    codes, scales, global_value = encode(profile, x, "matrix")
    ours = nvfp4_arithmetic.decode(profile, element_values(codes), scales, global_value).numpy()
    value = element_values(codes).numpy()
    scale = np.repeat(fused.decode(scales, FLOAT_ELEMENTS["e4m3"]).numpy(), 16, axis=-1)
    g = global_value.numpy()[:, None, None]
    full_scale = F32(1792 if name == "fouroversix.static_4" else 2688)
    by_product, one_by_one = value * (scale * g), value * scale * g / full_scale
    expected = {
        "torchao": by_product,
        "modelopt": by_product + F32(0),
        "compressed_tensors": value * (scale / g),
        "vllm": value * (scale / g),
        "te": value * (scale * g * (F32(1) / F32(2688))),
        "flashinfer": value * (scale * (F32(1) / g)),
        "flashinfer.te": value * (scale * (F32(1) / g)),
        "fouroversix": one_by_one,
        "fouroversix.static_4": one_by_one,
    }
    assert_bits(ours, expected[name])
    others = [numbers for key, numbers in expected.items() if not np.array_equal(numbers, expected[name])]
    assert len(others) >= 4


def e4m3(x: np.ndarray, smallest: float = 0.0) -> np.ndarray:
    clipped = np.clip(x, F32(smallest), F32(448))
    assert clipped.dtype == F32
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(F32)


ONE, SIX, FULL = F32(1), F32(6), F32(2688)
SIXTH = ONE / SIX
# Global value of A; scale of a block maximum a; quotient of x.  g is the global value, all of it numpy float32.
STEPS = {
    "torchao": (
        lambda A: A / FULL,
        lambda a, g: e4m3((a / SIX) / g, 2.0**-6),
        lambda x, s, g: x * ((ONE / g) / s),
    ),
    "modelopt": (
        lambda A: A / FULL,
        lambda a, g: e4m3(a / (SIX * g), 2.0**-9),
        lambda x, s, g: x / (s * g),
    ),
    "compressed_tensors": (
        lambda A: FULL * (ONE / A),
        lambda a, g: e4m3(g * (a / SIX)),
        lambda x, s, g: x / (s / g),
    ),
    "vllm": (
        lambda A: FULL * (ONE / A),
        lambda a, g: e4m3(g * (a * SIXTH)),
        lambda x, s, g: x * (ONE / (s * (ONE / g))),
    ),
    "te": (
        lambda A: A,
        lambda a, g: e4m3(a * ((FULL / g) * SIXTH)),
        lambda x, s, g: x * (ONE / (s * (ONE / (FULL / g)))),
    ),
    "flashinfer.te": (
        lambda A: FULL / A,
        lambda a, g: e4m3(a * (g * SIXTH)),
        lambda x, s, g: x * (ONE / (s * (ONE / g))),
    ),
    "fouroversix": (
        lambda A: A,
        lambda a, g: e4m3((a / SIX) * (FULL / g)),
        lambda x, s, g: x * (ONE / ((ONE / (FULL / g)) * s)),
    ),
    "fouroversix.static_4": (
        lambda A: A,
        lambda a, g: e4m3((a / F32(4)) * (F32(1792) / g)),
        lambda x, s, g: x * (ONE / ((ONE / (F32(1792) / g)) * s)),
    ),
}
STEPS["flashinfer"] = STEPS["vllm"]


def tie_prone() -> tuple[np.ndarray, np.ndarray]:
    """Global maxima (30,) and blocks (30, V, 16) whose scales and whose elements are within an ulp of ties."""
    rng = np.random.default_rng(12)
    amax = (10.0 ** rng.uniform(-3, 3, 30)).astype(F32)
    scales = np.arange(8, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middles = (scales[1:] + scales[:-1]) / 2
    a = (middles * amax[:, None].astype(np.float64) / 448).astype(F32)
    a = np.concatenate([a, np.nextafter(a, F32(0)), np.nextafter(a, amax[:, None])], axis=1)
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], (*a.shape, 16)) * rng.choice([-1.0, 1.0], 16)
    exact = a.astype(np.float64) * 448 / amax[:, None]
    scale = np.minimum(exact, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    x = (ties * (scale * amax[:, None] / 2688)[..., None]).astype(F32)
    x[..., 0] = a
    return amax, np.where(np.abs(x) > a[..., None], 0, x).astype(F32)


@pytest.mark.parametrize("name", PROFILES)
def test_encoding_in_the_order_of_the_library(name):
    """Against numpy float32: the global value, the scale and the quotient, where every rounding shows."""
    amax, x = tie_prone()
    to_global, to_scale, to_quotient = STEPS[name]
    quotients = []

    def keep(quotient: Tensor) -> Tensor:
        quotients.append(quotient)
        return fused.encode(quotient, E2M1)

    _, scales, global_value = nvfp4_arithmetic.encode(
        PROFILES[name], torch.from_numpy(x), torch.from_numpy(amax), keep
    )
    g = to_global(amax)
    assert_bits(global_value.numpy(), g)
    expected = to_scale(np.abs(x).max(-1), g[:, None])
    assert_bits(fused.decode(scales, FLOAT_ELEMENTS["e4m3"]).numpy()[..., 0], expected)
    assert_bits(quotients[0].numpy(), to_quotient(x, expected[..., None], g[:, None, None]))
    others = [scale(np.abs(x).max(-1), to_g(amax)[:, None]) for to_g, scale, _ in STEPS.values()]
    assert sum(not np.array_equal(other, expected) for other in others) >= 6


@pytest.mark.parametrize("name", PROFILES)
def test_elements_may_be_rounded_by_another_function(name):
    """Stochastic rounding: the quotients of the library, the same scales, and codes of the function's own."""
    profile = PROFILES[name]
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0))
    amax, quotients = global_amax(x, "matrix"), []

    def toward_zero(quotient: Tensor) -> Tensor:
        quotients.append(quotient)
        return fused.encode(
            quotient, E2M1, Rounding.STOCHASTIC, torch.zeros(quotient.shape, dtype=torch.int64), 8
        )

    codes, scales, global_value = nvfp4_arithmetic.encode(profile, x, amax, toward_zero)
    nearest, nearest_scales, nearest_global = nvfp4_arithmetic.encode(profile, x, amax)
    assert torch.equal(scales, nearest_scales)
    assert torch.equal(global_value, nearest_global)
    (quotient,) = quotients
    assert quotient.shape == x.shape
    assert (element_values(codes).abs() <= quotient.abs()).all()
    assert not torch.equal(codes, nearest)
    assert torch.equal(nearest, nvfp4_arithmetic.cast_element(quotient, profile.cast))


def test_key_dims_that_are_no_multiple_of_16():
    x = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (0, 12))
    for profile in (*PROFILES.values(), rule(), rule("te")):
        codes, scales, global_value = encode(profile, x, "matrix")
        whole, whole_scales, _ = encode(profile, padded, "matrix")
        assert torch.equal(codes, whole[..., :20])
        assert codes.is_contiguous()
        assert torch.equal(scales, whole_scales)
        decode = nvfp4_arithmetic.decode if isinstance(profile, Nvfp4Arithmetic) else four_over_six.decode
        numbers = decode(profile, element_values(codes), scales, global_value)
        assert torch.equal(numbers, decode(profile, element_values(whole), scales, global_value)[..., :20])


def test_only_torchao_works_without_a_global_value():
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))
    for name, profile in PROFILES.items():
        if name == "torchao":
            assert encode(profile, x, "none")[2] is None
            continue
        with pytest.raises(InputError, match=rf"^amax None: expected a tensor: {name} has no NVFP4 without"):
            encode(profile, x, "none")


def test_nan_without_a_code_decodes_to_nan():
    codes = torch.tensor([NO_CODE, 15, 0], dtype=torch.uint8)
    values = element_values(codes)
    assert values[0].isnan()
    assert values[1:].tolist() == [-6.0, 0.0]
