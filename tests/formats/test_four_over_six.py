"""The choice between block scales for 6 and for 4; what libraries do is in test_nvfp4_profiles.py."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import fused, parse, rounding
from quantlab.formats.four_over_six import block_error, decode, encode, four_over_six
from quantlab.formats.nvfp4_arithmetic import element_values, global_amax
from quantlab.formats.table import FLOAT_ELEMENTS

F32 = np.float32
E2M1 = FLOAT_ELEMENTS["e2m1"]
METRICS = ("mse", "mae", "absmax")


def sequential(terms: np.ndarray) -> np.ndarray:
    total = terms[..., 0]
    for index in range(1, 16):
        total = total + terms[..., index]
    return total


ERRORS = {
    "mse": lambda difference: sequential(difference * difference),
    "mae": lambda difference: sequential(np.abs(difference)),
    "absmax": lambda difference: np.abs(difference).max(-1),
}


def e4m3(ratio: np.ndarray) -> np.ndarray:
    assert ratio.dtype == F32
    return np.minimum(ratio, F32(448)).astype(ml_dtypes.float8_e4m3fn)


def floored(ratio: np.ndarray) -> np.ndarray:
    return e4m3(np.where(ratio > 0, np.maximum(ratio, F32(2.0**-9)), ratio))


SIX, ONE, LARGEST = F32(6), F32(1), np.finfo(np.float32).max
# Of numpy float32 A, a, x, the value v of a code, the scale s, and full = 6 * scale_max: the scale of a block with
# its maximum at ``largest``, the quotient, and what is compared with x.
STEPS = {
    None: (
        lambda a, A, full, largest: floored(a / (F32(largest) * (A / full))),
        lambda x, s, A, full: x / np.where(s == 0, ONE, s * (A / full)),
        lambda v, s, A, full: v * (s * (A / full)),
    ),
    "te": (
        lambda a, A, full, largest: e4m3((a / SIX) * (full / A) * (SIX / F32(largest))),
        lambda x, s, A, full: x * np.minimum(ONE / (s * (ONE / (full / A))), LARGEST),
        lambda v, s, A, full: v * s * A / full,
    ),
    "flashinfer": (
        lambda a, A, full, largest: e4m3((a / SIX) * (full / A) * (SIX / F32(largest))),
        lambda x, s, A, full: x * np.minimum(ONE / (s * (ONE / (full / A))), LARGEST),
        lambda v, s, A, full: v * s * (ONE / (full / A)),
    ),
    "fouroversix": (
        lambda a, A, full, largest: e4m3((a / SIX) * (full / A) * (SIX / F32(largest))),
        lambda x, s, A, full: np.where(s == 0, F32(0), x * (ONE / ((ONE / (full / A)) * s))),
        lambda v, s, A, full: v * s * A / full,
    ),
}


def candidate(blocks: np.ndarray, A: np.ndarray, full: np.float32, largest: int, library: str | None):
    """Scale bytes (..., 1), codes and compared values (..., 16) of blocks (..., 16) under A (..., 1)."""
    to_scale, to_quotient, to_value = STEPS[library]
    scales = to_scale(np.abs(blocks).max(-1, keepdims=True), A, full, largest)
    scale = scales.astype(F32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        quotient = to_quotient(blocks, scale, A, full)
    assert quotient.dtype == F32
    rounded = quotient.astype(ml_dtypes.float4_e2m1fn)  # saturates
    codes, numbers = rounded.view(np.uint8), rounded.astype(F32)
    if library is not None:  # no library here keeps the sign of a zero
        codes = np.where(quotient == 0, 0, codes)
    if library == "fouroversix":  # it does not saturate, and stores 8 as -0
        codes = np.where(np.abs(quotient) >= 7, 8, codes)
        numbers = np.where(np.abs(quotient) >= 7, F32(2) * np.round(quotient / F32(2)), numbers)
    return scales.view(np.uint8), codes, to_value(numbers, scale, A, full)


def by_hand(x: np.ndarray, library: str | None, metric: str, scale_max: int):
    """Scale bytes, codes, compared values and choices of matrices (n, V, K) that are not zero."""
    A, full = np.abs(x).max((1, 2))[:, None, None, None], F32(6 * scale_max)
    blocks = x.reshape(*x.shape[:2], -1, 16)
    six, four = (candidate(blocks, A, full, largest, library) for largest in (6, 4))
    take_four = (ERRORS[metric](four[2] - blocks) < ERRORS[metric](six[2] - blocks))[..., None]
    return *(np.where(take_four, b, a) for a, b in zip(six, four, strict=True)), take_four


def matrices() -> np.ndarray:
    rng = np.random.default_rng(11)
    x = rng.standard_normal((6, 512, 64)).astype(F32)
    x[1] *= (2.0 ** rng.integers(-12, 8, (512, 1))).astype(F32)
    x[2:5] = rng.integers(-64, 65, (3, 512, 64)) * F32(2.0**-4)  # errors that tie up to their roundings
    x[3, :, ::16] = rng.integers(-90, 91, (512, 4)) * F32(2.0**-4)
    x[4] *= F32(3)
    x[5, 2, 16:] = 0
    x[5, 3] = -0.0
    x[5, 4] *= F32(2.0**-20)
    return x


RULES = [
    *product((None,), METRICS, (256, 448)),
    *product(("te", "flashinfer"), ("mse", "mae"), (256, 448)),
    *product(("fouroversix",), METRICS, (256,)),
]


@pytest.mark.parametrize(("library", "metric", "scale_max"), RULES)
def test_the_choice_in_numpy_float32(library, metric, scale_max):
    x = matrices()
    rule = four_over_six(library, metric, scale_max)
    tensor = torch.from_numpy(x)
    amax = global_amax(tensor, "matrix")
    assert amax is not None
    codes, scales, global_value = encode(rule, tensor, amax)
    numbers = decode(rule, element_values(codes), scales, global_value).numpy()
    expected_scales, expected_codes, values, take_four = by_hand(x, library, metric, scale_max)
    assert np.array_equal(scales.numpy(), expected_scales[..., 0])
    assert np.array_equal(codes.numpy(), expected_codes.reshape(x.shape))
    if library is None:  # it decodes as it compares
        assert np.array_equal(numbers.view(np.uint32), values.reshape(x.shape).view(np.uint32))
    assert 0.1 < take_four.mean() < 0.9


def test_the_default_is_mse_with_256():
    assert four_over_six() == four_over_six(None, "mse", 256)
    assert four_over_six("fouroversix") == four_over_six("fouroversix", "mse", 256)
    assert four_over_six("te") == four_over_six("te", "mae", 256)
    assert four_over_six("flashinfer") == four_over_six("flashinfer", "mae", 448)


def one_matrix(x: torch.Tensor, *text: str | int | None):
    rule = four_over_six(*text)
    codes, scales, global_scale = encode(rule, x, x.abs().max())
    return codes, scales, global_scale, decode(rule, element_values(codes), scales, global_scale)


@pytest.mark.parametrize(
    ("library", "metric"),
    [*product((None, "fouroversix"), METRICS), *product(("te", "flashinfer"), ("mse", "mae"))],
)
def test_a_tie_keeps_six(library, metric):
    """6 is code 7 times 1 and code 6 times 1.5: both are exact."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 6 * 256, 6
    codes, scales, _, numbers = one_matrix(x, library, metric, 256)
    assert scales.tolist() == [[0x78, 0x38]]
    assert codes[0, 16] == 7
    assert torch.equal(numbers, x)


@pytest.mark.parametrize("library", [None, "te", "flashinfer", "fouroversix"])
def test_a_block_that_four_holds_exactly_takes_four(library):
    """6, 4.5, 3 and 1.5 are 1.5 times 4, 3, 2 and 1; with the scale 1 for 6, 4.5 would be off by 0.5."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:20] = 6 * 256, torch.tensor([6.0, -4.5, 3.0, 1.5])
    codes, scales, _, numbers = one_matrix(x, library, None, 256)
    assert scales.tolist() == [[0x78, 0x3C]]
    assert codes[0, 16:20].tolist() == [6, 13, 4, 2]
    assert torch.equal(numbers, x)


@pytest.mark.parametrize("metric", METRICS)
def test_fouroversix_compares_the_8_that_it_fails_to_store(metric):
    """8.4 in units of the scale 2^-9 rounds to 8, 4.2 in units of 2^-8 to 4: a tie, 6 wins, and 8 is stored as -0."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0], x[1, 1] = 6 * 256, 6 * 1.4 * 2.0**-9, -6 * 1.4 * 2.0**-9
    codes, scales, _, _ = one_matrix(x, "fouroversix", metric, 256)
    assert scales[1].tolist() == [1]
    assert codes[1, :3].tolist() == [8, 8, 0]
    codes, scales, _, _ = one_matrix(x, None, metric, 256)
    assert scales[1].tolist() == [2]
    assert codes[1, :3].tolist() == [6, 14, 0]


def test_metrics_differ():
    """One large error against several small ones: absmax, mae and mse weigh them apart."""
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(5))
    chosen = {metric: one_matrix(x, None, metric, 256)[1] for metric in METRICS}
    for a, b in (("mse", "mae"), ("mse", "absmax"), ("mae", "absmax")):
        assert 10 < int((chosen[a] != chosen[b]).sum()) < 100


def test_no_error_is_larger_than_without_the_choice():
    """Under the same global scale the chosen block's squared error is at most that of the scale for 6."""
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(6))
    plain, chosen = parse("nvfp4").round(x), one_matrix(x, None, "mse", 448)[3]
    before, after = ((plain - x) ** 2).sum(-1), ((chosen - x) ** 2).sum(-1)
    assert (
        after <= before * (1 + 2.0**-20)
    ).all()  # torch adds 16 terms in another order: 15 roundings of 2^-24
    assert (after < before).sum() > 50


def test_with_448_blocks_that_take_six_are_those_of_nvfp4():
    x = torch.from_numpy(matrices())
    rule = four_over_six(None, "mse", 448)
    amax = global_amax(x, "matrix")
    assert amax is not None
    codes, scales, global_scale = encode(rule, x, amax)
    plain = parse("nvfp4").quantize(x)
    assert plain.scales is not None
    assert plain.global_scale is not None
    assert torch.equal(global_scale, plain.global_scale)
    same = scales == plain.scales
    elements = same.repeat_interleave(16, dim=-1)
    assert torch.equal(codes[elements], plain.codes[elements])
    assert 10 < same.sum() < same.numel() - 10
    top = x.unflatten(-1, (-1, 16)).abs().amax(-1) == x.abs().amax((-2, -1))[:, None, None]
    assert same[top].all()  # 1.5 * 448 does not fit, so the scale for 4 is that for 6


def test_sums_are_sequential():
    """1 + 2^-24 is a tie to 1 every time; in any other order the small terms add up first."""
    for metric, small in (("mae", 2.0**-24), ("mse", 2.0**-12)):
        difference = torch.full((2, 16), -small)
        difference[0, 0] = difference[1, -1] = 1.0
        assert block_error(difference, metric).tolist() == [[1.0], [1.0 + 2.0**-20]]
    assert block_error(difference, "absmax").tolist() == [[1.0], [1.0]]


def test_stochastic_rounding_does_not_move_the_choice():
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(8))
    amax = global_amax(x, "matrix")
    assert amax is not None
    words = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(9))
    for library in (None, "te", "flashinfer", "fouroversix"):
        rule, quotients = four_over_six(library), []

        def stochastic(quotient, quotients=quotients):
            quotients.append(quotient)
            return fused.encode(quotient, E2M1, words, 8)

        codes, scales, _ = encode(rule, x, amax, stochastic)
        nearest, nearest_scales, _ = encode(rule, x, amax)
        assert torch.equal(scales, nearest_scales)
        assert not torch.equal(codes, nearest)
        (quotient,) = quotients
        assert torch.equal(codes.long(), rounding.encode_element(quotient, E2M1, words, 8))
        assert torch.equal(nearest.long(), rounding.encode_element(quotient, E2M1))


@pytest.mark.parametrize("scale_max", [256, 448])
@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 1.0])
def test_the_largest_floats_stay_finite(scale_max, share):
    largest = share * torch.finfo(torch.float32).max
    x = torch.full((3, 16), largest)
    x[1] = -largest / 2
    x[2] = largest * torch.tensor([1.0, -0.75, 0.5, 0.25] * 4)  # takes 4 if that fits
    rule = four_over_six(None, "mse", scale_max)
    codes, scales, global_scale = encode(rule, x, x.abs().max())
    numbers = decode(rule, element_values(codes), scales, global_scale)
    assert ((numbers - x).abs() <= x.abs().max() / 6).all()  # half the widest step, between 4 and 6
    # Stochastic rounding may take any element of a block up to 6.
    assert decode(rule, torch.full_like(x, 6.0), scales, global_scale).isfinite().all()


def test_zero_and_tiny_matrices():
    tiny = 2.0**-149
    x = torch.tensor([[[-0.0] * 16, [0.0] * 16], [[tiny] * 16, [-3 * tiny] * 16]])
    rule = four_over_six()
    amax = global_amax(x, "matrix")
    assert amax is not None
    codes, scales, global_scale = encode(rule, x, amax)
    assert global_scale.tolist() == [1.0, tiny]
    assert scales[0].tolist() == [[0], [0]]
    assert codes[0].tolist() == [[8] * 16, [0] * 16]
    assert decode(rule, element_values(codes), scales, global_scale).isfinite().all()


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match=r"^library 'vllm': expected one of flashinfer, fouroversix, te"):
        four_over_six("vllm")
    with pytest.raises(InputError, match=r"^metric 'absmax': expected mae or mse for te"):
        four_over_six("te", "absmax")
    with pytest.raises(InputError, match=r"^metric 'l2': expected mse or mae or absmax for nvfp4"):
        four_over_six(None, "l2")
    with pytest.raises(InputError, match=r"^scale_max 448: expected 256 for fouroversix"):
        four_over_six("fouroversix", None, 448)
    with pytest.raises(InputError, match=r"^scale_max 240: expected 256 or 448 for nvfp4"):
        four_over_six(None, None, 240)
