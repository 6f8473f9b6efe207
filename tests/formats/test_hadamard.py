"""The rotation along the key dim: orthonormal Sylvester blocks after random signs."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from quantlab.errors import InputError
from quantlab.formats import parse, philox_4x32
from quantlab.formats.hadamard import block_of, largest_input, rotate

BLOCKS = {1: 1, 2: 2, 3: 1, 6: 2, 80: 16, 96: 32, 100: 4, 128: 128, 256: 256}


def signs(key_dim: int, seed: int) -> np.ndarray:
    """The lowest bit of word i % 4 of the counter i // 4, written out."""
    key = (seed % 2**32, seed >> 32)
    words = [philox_4x32(torch.tensor([i // 4, 0, 0, 0]), key)[i % 4].item() for i in range(key_dim)]
    return np.array([-1.0 if word % 2 else 1.0 for word in words])


def matrix(key_dim: int, seed: int) -> np.ndarray:
    """The rotation from scipy: y = matrix @ x."""
    block = BLOCKS[key_dim]
    sylvester = scipy.linalg.hadamard(block) / math.sqrt(block)
    return np.kron(np.eye(key_dim // block), sylvester) * signs(key_dim, seed)


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 3])
@pytest.mark.parametrize("key_dim", BLOCKS)
def test_the_matrix(key_dim, seed):
    """Column by column, in float64: log2(block) additions and a product of 2^-53 each."""
    assert block_of(key_dim) == BLOCKS[key_dim]
    expected = matrix(key_dim, seed)
    found = rotate(torch.eye(key_dim, dtype=torch.float64), seed).numpy().T
    assert np.abs(found - expected).max() <= 2.0**-52
    back = rotate(torch.eye(key_dim, dtype=torch.float64), seed, inverse=True).numpy().T
    assert np.abs(back - expected.T).max() <= 2.0**-52
    assert np.abs(expected @ expected.T - np.eye(key_dim)).max() <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key_dim", BLOCKS)
def test_inverse_and_energy(key_dim, dtype):
    """Each way costs log2(block) additions and two products a value: an eps / 2 of the row's norm each at most."""
    x = torch.randn(2, 3, key_dim, dtype=dtype, generator=torch.Generator().manual_seed(key_dim))
    eps, depth = torch.finfo(dtype).eps, math.log2(block_of(key_dim)) + 2
    rotated = rotate(x, 11)
    assert rotated.dtype == dtype
    norm = x.double().norm(dim=-1)
    assert ((rotated.double().norm(dim=-1) - norm).abs() <= depth * eps / 2 * norm).all()
    back = rotate(rotated, 11, inverse=True)
    assert ((back.double() - x.double()).norm(dim=-1) <= depth * eps * norm).all()


def test_powers_of_four_are_exact():
    """Blocks of 4, 16, 64 divide by 2, 4, 8: small integers rotate without a rounding, and back."""
    x = torch.randint(-100, 101, (5, 64), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(rotate(rotate(x, 5), 5, inverse=True), x)
    assert torch.equal((rotate(x, 5).double() ** 2).sum(-1), (x.double() ** 2).sum(-1))


def test_an_outlier_is_spread_evenly():
    """Over its block of 32 only; none of the others sees it."""
    x = torch.zeros(96)
    x[40] = 32.0
    rotated = rotate(x, 3)
    assert torch.allclose(rotated[32:64].abs(), torch.full((32,), 32 / math.sqrt(32)), rtol=2.0**-22)
    assert not rotated[:32].any()
    assert not rotated[64:].any()


def test_no_seed_and_no_values():
    x = torch.ones(3, 4)
    assert rotate(x, None) is x
    assert rotate(torch.zeros(0, 4), 1).shape == (0, 4)
    assert rotate(torch.zeros(3, 0), 1).shape == (3, 0)


def test_seeds_differ():
    x = torch.randn(64, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(rotate(x, 0), rotate(x, 1))
    assert not torch.equal(rotate(x, 1), rotate(x, 1 + 2**32))


@pytest.mark.parametrize("key_dim", [1, 80, 128])
@pytest.mark.parametrize(
    "text", ["int8+hadamard", "int4+hadamard.9", "fp8_e5m2+hadamard", "mxfp4+hadamard.2"]
)
def test_the_largest_input_stays_finite(text, key_dim):
    """Signs that line all of a block up give it the largest sum; the float above the limit is refused."""
    fmt, limit = parse(text), largest_input(key_dim)
    x = torch.from_numpy(signs(key_dim, fmt.hadamard or 0)).float() * limit
    rotated = rotate(x, fmt.hadamard)
    assert rotated[0].item() == pytest.approx(limit * math.sqrt(block_of(key_dim)), rel=1e-6)
    assert fmt.round(x).isfinite().all()
    assert fmt.round(-x).isfinite().all()
    x[0] = np.nextafter(np.float32(limit), np.float32(np.inf)) * x[0].sign()
    with pytest.raises(InputError, match=r"^x '.*e\+3\d at \(0,\)': expected numbers that"):
        fmt.round(x)
    saturated = fmt.round(x, specials="hardware")
    assert saturated.isfinite().all()


@pytest.mark.parametrize("text", ["int8", "nvfp4", "mxfp4", "fp8_e4m3:block32"])
def test_a_rotated_format_is_the_format_between_two_rotations(text):
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(4))
    plain, rotated = parse(text), parse(f"{text}+hadamard.6")
    expected = plain.quantize(rotate(x, 6))
    found = rotated.quantize(x)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(rotated.dequantize(found), rotate(plain.dequantize(expected), 6, inverse=True))
    assert torch.equal(rotated.round(x), rotated.dequantize(found))
    assert rotated.stored_bits((3, 96)) == plain.stored_bits((3, 96))  # the signs are derived from the seed
