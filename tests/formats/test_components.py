"""Components beside the codes: what is stored of them, what they leave, and where they refuse."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.formats import Encoded, compiled, parse
from quantlab.formats.hadamard import rotate
from quantlab.formats.storage import map_tensors
from tests.formats.families import search

F16 = float(np.finfo(np.float16).max)
NAMES = ("mean", "rank1", "rank2", "rank8")
TEXTS = [
    *(f"nvfp4+{name}" for name in NAMES),
    *("nvfp4:row+rank2", "nvfp4:tensor+mean", "nvfp4:none+rank1", "nvfp4+4over6+rank2", "nvfp4+floor.0+mean"),
    *("nvfp4+as.te+rank2", "nvfp4+as.compressed_tensors+mean", "mxfp4+as.modelopt+rank1", "mxfp4+rank3"),
    *("int8+rank1", "int4:block32+rank2", "int4:head+mean", "fp8_e4m3:tile32+rank1", "mxfp6_e2m3+rz+rank2"),
    *("nvfp4+rank2+sr8", "int8+mean+sr", "int4+rank1+sr13"),
    *("nvfp4+rank2+hadamard.3", "int8+mean+hadamard", "int8+rank1+hadamard+sr"),
    *("nvfp4+rank2+ef", "int8+mean+ef.fp32", "int4+rank1+ef.int4", "nvfp4+rank1+hadamard+ef", "int8+rank2+ef.nvfp4"),
]  # fmt: skip
SHAPES = [(8, 8), (3, 8, 33), (2, 17, 9), (2, 3, 34, 48)]


def state(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal, with a component that dominates."""
    random = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape[:-2], n, 1, generator=random) for n in shape[-2:])
    return torch.randn(shape, generator=random) + 8 * left @ right.mT


def words_for(fmt, x):
    return (
        torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(1))
        if fmt.stochastic
        else None
    )


def residual_for(fmt, x):
    """What an earlier store left."""
    return None if fmt.error_feedback is None else fmt.quantize(x.flip(-1)).residual


def quantized(fmt, x, **changes):
    return fmt.quantize(x, words_for(fmt, x), residual_for(fmt, x), **changes)


def component(encoded: Encoded, dtype=np.float64) -> np.ndarray:
    """The component from the stored factors, by numpy; products of float16 are exact in either dtype."""
    assert encoded.key_factor is not None
    key = encoded.key_factor.numpy().astype(dtype)
    if encoded.value_factor is None:
        return key
    value = encoded.value_factor.numpy().astype(dtype)
    total = value[..., :, :1] * key[..., :1, :]
    for i in range(1, key.shape[-2]):
        total = total + value[..., :, i, None] * key[..., None, i, :]
    return total


def assert_same(one, other):
    for field in dataclasses.fields(Encoded):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Encoded):
            assert_same(a, b)
            continue
        assert (a is None) == (b is None), field.name
        if a is not None:
            assert a.dtype == b.dtype, field.name
            assert torch.equal(a, b), field.name


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_round_trips_and_is_what_is_counted(text, shape):
    fmt = parse(text)
    encoded = quantized(fmt, state(*shape))
    packed = fmt.pack(encoded)
    assert_same(fmt.unpack(packed), encoded)
    counted = fmt.stored_bits(shape)
    assert 8 * packed.nbytes == sum(counted.values())
    *lead, value_dim, key_dim = shape
    rank = int(fmt.component[4:]) if fmt.component != "mean" else 0
    numbers = key_dim if fmt.component == "mean" else rank * (value_dim + key_dim)
    assert counted["component"] == 16 * numbers * math.prod(lead)
    without = dataclasses.replace(fmt, component=None)
    assert without.stored_bits(shape) == {n: b for n, b in counted.items() if n != "component"}


@pytest.mark.parametrize("text", TEXTS)
def test_codes_are_those_of_what_the_stored_component_leaves(text):
    """x minus the component of the float16 factors, in float32, then the format as it is without a component."""
    fmt, x = parse(text), state(2, 3, 34, 48)
    encoded = quantized(fmt, x)
    common = torch.from_numpy(component(encoded, np.float32))
    plain = dataclasses.replace(fmt, component=None, hadamard=None, error_feedback=None)
    aim, residual = rotate(x, fmt.hadamard), residual_for(fmt, x)
    if residual is not None:
        form = fmt.residual_format
        aim = aim + (residual.float() if form is None else form.dequantize(residual))
    rest = plain.quantize(aim - rotate(common, fmt.hadamard), words_for(fmt, x))
    for part in ("codes", "scales", "global_scale"):
        a, b = getattr(rest, part), getattr(encoded, part)
        assert (a is None and b is None) or torch.equal(a, b), part
    decoded = rotate(plain.dequantize(rest), fmt.hadamard, inverse=True) + common
    assert torch.equal(fmt.dequantize(encoded), decoded)
    assert torch.equal(fmt.round(x, words_for(fmt, x), residual), decoded)
    if not fmt.stochastic and fmt.error_feedback is None:
        assert torch.equal(compiled.round(fmt, x), decoded)
        assert torch.equal(compiled.dequantize(fmt, encoded), decoded)


@pytest.mark.parametrize("text", ["nvfp4+rank2+ef.fp32", "int4+mean+ef.fp32"])
def test_the_residual_is_what_the_decoded_sum_leaves(text):
    """Bit for bit, store after store: (x + r) - v, so that v and r together are what was to be stored."""
    fmt, residual = parse(text), None
    for seed in range(4):
        x = state(2, 20, 32, seed=seed)
        encoded = fmt.quantize(x, residual=residual)
        aim = x if residual is None else x + residual
        residual = encoded.residual
        assert torch.equal(residual, aim - fmt.dequantize(encoded))
        assert residual.any()


def factor_error(length: int, strength: np.ndarray) -> np.ndarray:
    """Bound of the norm of a float16 factor's error, its exact norm being ``strength``: see components.py."""
    return (2.0**-11 + 2.0**-24) * strength + 2.0**-25 * math.sqrt(length)


def component_error(shape: tuple[int, ...], singular: np.ndarray) -> np.ndarray:
    """Bound of the Frobenius norm of stored minus exact component, one an entry of ``singular`` (..., r), summed."""
    root = np.sqrt(singular)
    value, key = (factor_error(n, root) for n in shape[-2:])
    return (value * root + root * key + value * key).sum(-1)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3], ids=str)
@pytest.mark.parametrize("shape", [(5, 16, 64), (3, 33, 7), (2, 2, 64, 128)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_no_matrix_of_the_rank_leaves_less(rank, shape, scale):
    """Eckart and Young: the tail of the singular values is the least, and is met up to the factors' rounding.

    Oracle: LAPACK's gesvd, another algorithm than gesdd behind the factors; both are good to 1e-13 here.
    """
    x = state(*shape, seed=rank) * scale
    encoded = parse(f"nvfp4+rank{rank}").quantize(x)
    left = np.linalg.norm(x.double().numpy() - component(encoded), axis=(-2, -1))
    flat = x.double().numpy().reshape(-1, *shape[-2:])
    singular = [scipy.linalg.svd(m, compute_uv=False, lapack_driver="gesvd") for m in flat]
    singular = np.stack(singular).reshape(*shape[:-2], -1)
    tail = np.linalg.norm(singular[..., rank:], axis=-1)
    assert (left >= tail * (1 - 1e-12)).all()
    assert (left <= tail * (1 + 1e-12) + component_error(shape, singular[..., :rank])).all()


@pytest.mark.parametrize(
    "text", ["nvfp4", "int4", "mxfp4", "int4:head", "mxfp6_e2m3", "nvfp4+as.te", "nvfp4+4over6"]
)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_the_rank_comes_back_however_coarse_the_codes(text, rank):
    """Within the factors' rounding: codes of the rest err by no more than its largest magnitude, as 0 is a code.

    A half more for scales that round: the largest number of a block may come back 1 + 1/16 times as large.
    """
    random = torch.Generator().manual_seed(rank)
    factors = (torch.randn(4, n, rank, generator=random, dtype=torch.float64) for n in (24, 64))
    x = torch.einsum("bvr,bkr->bvk", *factors)  # float64: of the rank up to 1e-16
    fmt = parse(f"{text}+rank{rank}")
    error = (fmt.round(x).double() - x).abs().flatten(1).amax(1).numpy()
    singular = np.linalg.svd(x.numpy(), compute_uv=False)[:, :rank]
    # Float32: the rest, its decoding and the sum, each rounded once at most relative to x.
    slack = 4 * 2.0**-24 * x.abs().flatten(1).amax(1).numpy()
    bound = 1.5 * component_error((24, 64), singular) + slack
    assert (error <= bound).all()
    plain = (parse(text).round(x).double() - x).abs().flatten(1).amax(1).numpy()
    assert (bound < plain).all()  # the bound says something


@pytest.mark.parametrize("value_dim", [1, 7, 128])
def test_the_mean_is_that_of_the_value_rows(value_dim):
    """One rounding to float32 and one to float16 of a float64 mean: half a unit each."""
    x = state(3, value_dim, 40)
    encoded = parse("nvfp4+mean").quantize(x)
    assert encoded.value_factor is None
    assert encoded.key_factor.shape == (3, 1, 40)
    exact = np.array([[[math.fsum(column) / value_dim for column in m.T.tolist()]] for m in x.numpy()])
    error = np.abs(encoded.key_factor.double().numpy() - exact)
    assert (error <= (2.0**-11 + 2.0**-24) * np.abs(exact) + 2.0**-25).all()


def test_rows_that_are_all_the_same_are_their_mean():
    x = (torch.arange(48) - 20.0)[None, None].expand(2, 9, 48)  # whole numbers, exact in float16
    for text in ("nvfp4+mean", "int4+mean+hadamard", "mxfp4+mean+ef"):
        assert torch.equal(parse(text).round(x), x)


@pytest.mark.parametrize("text", [t for t in TEXTS if parse(t).granularity != "tensor"])
def test_a_matrix_of_the_batch_is_stored_as_it_is_alone(text):
    """Odd sizes put every matrix at another alignment."""
    fmt = parse(text)
    for shape in ((7, 9, 11), (5, 64, 33)):
        x = state(*shape)
        words, residual = words_for(fmt, x), residual_for(fmt, x)
        whole = fmt.quantize(x, words, residual)

        def row(part, i):
            return map_tensors(part, lambda t: t[i : i + 1]) if isinstance(part, Encoded) else part[i : i + 1]

        for i in range(shape[0]):
            given = (None if part is None else row(part, i) for part in (words, residual))
            assert_same(fmt.quantize(x[i : i + 1].clone(), *given), row(whole, i))


@pytest.mark.parametrize("text", TEXTS)
def test_layout_gradients_and_dtype_change_nothing(text):
    fmt, base = parse(text), state(33, 9, 16).bfloat16().float()
    x = base.permute(1, 2, 0)
    expected = quantized(fmt, x.contiguous())
    for other in (x, x.clone().requires_grad_()):
        assert_same(quantized(fmt, other), expected)
    if fmt.profile != "compressed_tensors":
        assert_same(fmt.quantize(x.bfloat16(), words_for(fmt, x), residual_for(fmt, x)), expected)


def test_the_sign_of_a_component_is_fixed():
    x = state(6, 16, 40)
    encoded, negated = (parse("nvfp4+rank4").quantize(y) for y in (x, -x))
    largest = encoded.key_factor.abs().argmax(-1, keepdim=True)
    assert (encoded.key_factor.gather(-1, largest) > 0).all()
    # Rounding noise of LAPACK, 1e-15, would have to meet a tie of float16 for another bit.
    assert torch.equal(negated.key_factor, encoded.key_factor)
    assert torch.equal(negated.value_factor, -encoded.value_factor)
    assert torch.equal(negated.codes ^ 8, encoded.codes)


def test_powers_of_four_scale_both_factors_by_their_root():
    """sqrt(s) takes half the exponent in each factor; a singular value split otherwise would not."""
    x = state(4, 16, 32)
    fmt = parse("mxfp4+rank2")
    one, other = fmt.quantize(x), fmt.quantize(x * 2.0**12)
    for small, large in ((one.key_factor, other.key_factor), (one.value_factor, other.value_factor)):
        # Equal, but for subnormal float16, which are whole multiples of 2^-24.
        difference = (large.double() / 2**6 - small.double()).abs()
        assert (difference <= torch.where(small.abs() < 2.0**-14, 2.0**-25, 0.0)).all()


def test_directions_that_are_rounding_noise_are_not_stored():
    x = torch.zeros(2, 12, 20)
    x[1] = torch.outer(torch.arange(12.0) - 5, torch.arange(20.0) - 8)  # exact, of rank one
    encoded = parse("nvfp4+rank4").quantize(x)
    assert not encoded.key_factor[0].any()
    assert not encoded.value_factor[0].any()
    assert encoded.key_factor[1, 0].any()
    assert not encoded.key_factor[1, 1:].any()
    assert not encoded.value_factor[1, :, 1:].any()


@pytest.mark.parametrize("text", [t for t in TEXTS if "+as." not in t])
def test_zero_matrices_stay_zero(text):
    fmt, x = parse(text), state(3, 9, 16)
    x[1] = 0.0
    encoded = fmt.quantize(x, words_for(fmt, x))
    assert not fmt.dequantize(encoded)[1].any()
    assert not encoded.key_factor[1].any()


@pytest.mark.parametrize("scale", [1e5, 1e30, 1e38], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_large_states_overflow_no_factor(name, scale):
    """1e5 everywhere in 128 x 128, the largest component that a state of 1e5 can have, and far beyond."""
    x = torch.full((2, 128, 128), scale)
    x[1] *= torch.sign(state(128, 128, seed=3))
    fmt = parse(f"nvfp4+{name}")
    encoded = fmt.quantize(x)
    assert encoded.key_factor.isfinite().all()
    assert encoded.value_factor is None or encoded.value_factor.isfinite().all()
    value = fmt.dequantize(encoded)
    assert value.isfinite().all()
    # An error of the codes is at most half the widest step under a scale of the largest magnitude left, with float32
    # and E4M3 roundings of scales: at most 1/6 + 1/16.  What is left is at most x plus the component.
    left = (x.double() - torch.from_numpy(component(encoded))).abs().amax()
    assert (value.double() - x.double()).abs().max() <= (1 / 6 + 1 / 16) * left + 2.0**-22 * scale
    if name != "mean" and scale == 1e5:
        exact = component_error((128, 128), np.array([128 * 1e5]))
        assert (x[0].double() - torch.from_numpy(component(encoded))[0]).norm() <= exact
    if name == "mean":
        assert encoded.key_factor[0].eq(F16).all()  # saturated, the rest is with the codes
    else:  # what is too strong is weakened as a whole, not bent: no vector is longer than the root of 65504^2
        assert (encoded.key_factor.double().norm(dim=-1) <= F16 * (1 + 2.0**-10)).all()


@pytest.mark.parametrize("name", NAMES)
def test_states_below_float16_are_left_to_the_codes(name):
    """Roots of singular values of 1e-18 are below the smallest float16: the factors are zero, the values plain."""
    x = state(3, 16, 32) * 1e-18
    fmt = parse(f"nvfp4+{name}")
    assert not fmt.quantize(x).key_factor.any()
    assert torch.equal(fmt.round(x), parse("nvfp4").round(x))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "text", [*(f"nvfp4+{n}" for n in NAMES), "int8+rank1", "mxfp8_e4m3+mean", "fp8+rank2+ef"]
)
def test_nan_and_infinity(text, bad):
    fmt, x = parse(text), state(2, 8, 32)
    clean = fmt.quantize(x)
    x[1, 2, 5] = bad
    keeps = math.isnan(bad) and fmt.name in ("mxfp8_e4m3", "fp8_e4m3")
    if not keeps:
        for call in (fmt.quantize, fmt.round):
            with pytest.raises(InputError, match=rf"^x '{bad} at \(1, 2, 5\)': expected numbers that"):
                call(x)
    encoded = fmt.quantize(x, specials="hardware")
    value = fmt.dequantize(encoded)
    assert torch.equal(value.nan_to_num(7.0), fmt.round(x, specials="hardware").nan_to_num(7.0))
    assert value.isnan().nonzero().tolist() == ([[1, 2, 5]] if keeps else [])
    assert encoded.key_factor.isfinite().all()
    assert_same(map_tensors(encoded, lambda t: t[:1]), map_tensors(clean, lambda t: t[:1]))
    if not math.isnan(bad):
        assert math.copysign(1, value[1, 2, 5]) == math.copysign(1, bad)
    else:  # the component is that of a zero in its place
        x[1, 2, 5] = 0.0
        assert torch.equal(encoded.key_factor, fmt.quantize(x).key_factor)


@search
@given(word=st.integers(0, 15), seed=st.integers(0, 2**16))
def test_stochastic_rounding_is_unbiased_about_the_sum(word, seed):
    """Mean over all 16 words of 4 bits; of a step, cutting to 4 bits loses less than 1/16 (``+sr<n>``)."""
    fmt, x = parse("int8+rank1+sr4"), state(2, 6, 16, seed=seed)
    total = sum(fmt.round(x, torch.full(x.shape, (word + i) % 16)).double() for i in range(16)) / 16
    encoded = fmt.quantize(x, torch.zeros(x.shape, dtype=torch.int64))
    step = encoded.scales.double()
    # The rest and the sum are float32, rounded once each.
    assert ((total - x).abs() <= step / 16 + 2.0**-22 * x.abs().amax()).all()


@pytest.mark.parametrize("text", ["nvfp4+rank2", "int8+mean", "nvfp4+rank8+sr"])
def test_shapes_without_matrices_are_refused(text):
    fmt = parse(text)
    vector = torch.ones(32)
    for call in (fmt.quantize, fmt.round):
        with pytest.raises(InputError, match=r"^x \(32,\): expected \(\.\.\., V, K\), a matrix a head"):
            call(vector, words_for(fmt, vector))
    with pytest.raises(InputError, match=r"^shape \(32,\): expected"):
        fmt.stored_bits((32,))
    if "mean" in text:
        return
    rank = int(fmt.component[4:])
    for shape in ((2, rank - 1, 32), (2, 32, rank - 1), (rank, 0)):
        x = torch.ones(shape)
        with pytest.raises(
            InputError, match=rf"^x \(.*: expected at least {rank} value rows and {rank} key columns"
        ):
            fmt.quantize(x, words_for(fmt, x))
    with pytest.raises(InputError, match=rf"^shape .*expected at least {rank} value rows"):
        fmt.bits_per_value((rank - 1, 32))


@pytest.mark.parametrize("text", ["nvfp4+mean", "nvfp4+rank1", "int8+mean+ef"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (16, 1), (2, 1, 33)], ids=str)
def test_one_row_or_one_column(text, shape):
    fmt, x = parse(text), state(*shape)
    encoded = fmt.quantize(x)
    assert fmt.dequantize(encoded).shape == shape
    if shape[-2] == 1:  # a row is its own mean, and of rank one
        left = np.linalg.norm(x.double().numpy() - component(encoded), axis=(-2, -1))
        norm = np.linalg.norm(x.double().numpy(), axis=(-2, -1), keepdims=True)[..., 0]
        assert (left <= component_error(shape, norm)).all()


@pytest.mark.parametrize("text", ["nvfp4+mean", "nvfp4+rank2", "int8+rank1+ef"])
@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 4, 33)], ids=str)
def test_no_matrices_at_all(text, shape):
    fmt, x = parse(text), torch.zeros(shape)
    encoded = fmt.quantize(x)
    assert fmt.round(x).shape == fmt.dequantize(encoded).shape == shape
    assert_same(fmt.unpack(fmt.pack(encoded)), encoded)


BROKEN = {
    "no key factor": ("nvfp4+rank2", "key_factor", lambda e: {"key_factor": None}),
    "no value factor": ("nvfp4+rank2", "value_factor", lambda e: {"value_factor": None}),
    "another rank": ("nvfp4+rank2", "key_factor", lambda e: {"key_factor": e.key_factor[..., :1, :]}),
    "factors of float32": ("nvfp4+rank2", "value_factor", lambda e: {"value_factor": e.value_factor.float()}),
    "a rank for a mean": (
        "nvfp4+mean",
        "value_factor",
        lambda e: {"value_factor": torch.ones(3, 4, 1).half()},
    ),
    "a mean for nothing": ("nvfp4", "key_factor", lambda e: {"key_factor": torch.ones(3, 1, 32).half()}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_of_another_format_are_refused_not_decoded(case):
    text, part, change = BROKEN[case]
    fmt = parse(text)
    encoded = fmt.quantize(state(3, 4, 32))
    broken = dataclasses.replace(encoded, **change(encoded))
    for use in (fmt.dequantize, fmt.pack):
        with pytest.raises(InputError, match=rf"^encoded\.{part} "):
            use(broken)
    packed = dataclasses.replace(fmt.pack(encoded), **change(encoded))
    with pytest.raises(InputError, match=rf"^packed\.{part} "):
        fmt.unpack(packed)
