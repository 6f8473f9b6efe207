"""NVFP4: the canonical recipe in numpy float32, its granularities, and the ladder down to underflow."""

import math

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, parse
from tests.formats.oracle import grid, round_code

F32 = np.float32
TINY = F32(2.0**-149)


def recipe(x: np.ndarray, amax: np.float32 | None) -> tuple[list, list, np.ndarray]:
    """Scale bytes, codes and values of one block of 16 under a global amax (None: no global scale)."""
    global_scale = F32(1) if amax is None or amax == 0 else max(amax / F32(2688), TINY)
    block = np.abs(x).max()
    byte = 0
    if block > 0:
        byte = max(1, round_code("e4m3", float(min(block / (F32(6) * global_scale), F32(448)))))
    scale = F32(float(grid("e4m3")[byte])) * global_scale
    quotient = x / scale if scale > 0 else np.copysign(F32(0), x)
    codes = [round_code("e2m1", float(value)) for value in quotient]
    values = [math.copysign(float(grid("e2m1")[code % 8]), -1 if code >= 8 else 1) for code in codes]
    return byte, codes, np.array(values, dtype=F32) * scale


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((2, 6, 32)).astype(F32)
    spread = normal * (2.0 ** rng.integers(-14, 10, (2, 6, 1))).astype(F32)
    zeros = normal.copy()
    zeros[0, 2, 16:] = 0
    zeros[1] = -0.0
    ladder = normal * (4.0 ** -np.arange(12.0).reshape(2, 6, 1)).astype(F32)
    ladder[0, 0] *= 4096
    return {
        "normal": normal,
        "spread": spread,
        "zeros": zeros,
        "ladder": ladder,
        "tiny": normal * F32(1e-38),
        "subnormal": (normal * 600).round() * TINY,
        "few_quanta": normal.round() * TINY,
        "huge": normal * F32(1e37),
    }


@pytest.mark.parametrize("granularity", ["matrix", "row", "none"])
@pytest.mark.parametrize("name", tensors())
def test_recipe(name, granularity):
    x = tensors()[name]
    fmt = parse(f"nvfp4:{granularity}")
    encoded = fmt.quantize(torch.from_numpy(x))
    values = fmt.dequantize(encoded).numpy()
    assert np.array_equal(fmt.round(torch.from_numpy(x)).numpy().view(np.int32), values.view(np.int32))
    for index in np.ndindex(2, 6, 2):
        matrix, row, block = index
        amax = {"matrix": np.abs(x[matrix]).max(), "row": np.abs(x[matrix, row]).max(), "none": None}[
            granularity
        ]
        part = slice(16 * block, 16 * block + 16)
        byte, codes, expected = recipe(x[matrix, row, part], amax)
        assert encoded.scales[index].item() == byte
        assert encoded.codes[matrix, row, part].tolist() == codes
        assert np.array_equal(values[matrix, row, part].view(np.int32), expected.view(np.int32))


def test_shapes_of_the_stored_parts():
    x = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(0))  # the last block has 8 values
    shapes = {"matrix": (2, 3), "row": (2, 3, 5), "none": None}
    for granularity, shape in shapes.items():
        encoded = parse(f"nvfp4:{granularity}").quantize(x)
        assert encoded.codes.shape == x.shape
        assert encoded.codes.dtype == torch.uint8
        assert encoded.scales.shape == (2, 3, 5, 3)
        assert encoded.scales.dtype == torch.uint8
        assert (None if encoded.global_scale is None else tuple(encoded.global_scale.shape)) == shape


def test_a_short_last_block_equals_a_zero_padded_one():
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (0, 8))
    for text in ("nvfp4", "nvfp4:row", "int8:block32"):
        assert torch.equal(parse(text).round(x), parse(text).round(padded)[..., :40])
        assert torch.equal(parse(text).dequantize(parse(text).quantize(x)), parse(text).round(x))


def test_rows_of_the_batch_are_independent():
    """One global scale per matrix: a neighbour 1000 times larger changes nothing."""
    x = torch.randn(3, 2, 4, 32, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[1] *= 1000
    assert torch.equal(parse("nvfp4").round(x)[0], parse("nvfp4").round(loud)[0])
    assert torch.equal(parse("nvfp4").round(x)[2], parse("nvfp4").round(loud)[2])


def test_vectors_and_matrices_are_taken():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for text in ("nvfp4", "nvfp4:row", "nvfp4:none"):
        batched = parse(text).round(x[None])[0]
        assert torch.equal(parse(text).round(x), batched)
    assert torch.equal(parse("nvfp4").round(x[0]), parse("nvfp4:row").round(x)[0])


def test_zero_block_stores_scale_zero_and_keeps_signs():
    x = torch.ones(1, 32)
    x[0, 16:] = -0.0
    encoded = parse("nvfp4").quantize(x)
    assert encoded.scales.tolist() == [[126, 0]]
    assert encoded.codes[0, 16:].tolist() == [8] * 16
    value = parse("nvfp4").dequantize(encoded)[0, 16:]
    assert (value == 0).all()
    assert value.signbit().all()


def test_the_floor_keeps_small_blocks():
    """amax / (6 gs) below half of 2^-9 would be scale 0 in other recipes and drop the block."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 0.004
    encoded = parse("nvfp4").quantize(x)
    assert encoded.scales.tolist() == [[126, 1]]
    assert encoded.codes[0, 16] == round_code("e2m1", float(F32(0.004) / F32(2.0**-9)))


def test_scales_rounded_up():
    """The smallest E4M3 number that is not below a / (6 gs) but for roundings: nothing saturates by 2^-21 or more."""
    x = torch.zeros(6, 32)
    x[:, 0] = 2688.0  # gs = 1
    x[:, 16] = torch.tensor([6.0, 6.0001, 6 * 1.0625, 6 * 1.125, 6 * (1 + 2.0**-22), 6 * (1 + 2.0**-20)])
    scales = parse("nvfp4:row+scale.ceil").quantize(x).scales
    assert scales[:, 0].tolist() == [126] * 6
    assert scales[:, 1].tolist() == [56, 57, 57, 57, 56, 57]
    assert parse("nvfp4:row").quantize(x).scales[:, 1].tolist() == [56, 56, 56, 57, 56, 56]


def test_scales_rounded_up_do_not_creep():
    """Stored again, a block keeps its scale, although its global scale may move by an ulp."""
    x = torch.randn(400, 4, 64, generator=torch.Generator().manual_seed(3))
    fmt = parse("nvfp4+scale.ceil")
    first = fmt.quantize(x)
    again = fmt.quantize(fmt.dequantize(first))
    assert (again.global_scale != first.global_scale).any()
    assert torch.equal(again.scales, first.scales)
    assert torch.equal(again.codes, first.codes)
    multipliers = parse("e4m3").dequantize(Encoded(first.scales)) * first.global_scale[:, None, None]
    quotient = x.unflatten(-1, (-1, 16)) / multipliers[..., None]
    assert quotient.abs().max() < 6 * (1 + 2.0**-20)  # 2^-21 and the roundings of this line and of gs


def test_only_the_payload_is_stochastic():
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    words = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(1))
    plain, stochastic = parse("nvfp4").quantize(x), parse("nvfp4+sr8").quantize(x, words)
    assert torch.equal(plain.scales, stochastic.scales)
    assert torch.equal(plain.global_scale, stochastic.global_scale)
    assert not torch.equal(plain.codes, stochastic.codes)


def test_decoding_multiplies_in_float32():
    """code * (s8 * gs), two float32 roundings in that order."""
    gs = F32(1.1)
    encoded = Encoded(
        torch.tensor([[7] * 16], dtype=torch.uint8), torch.tensor([[3]], dtype=torch.uint8), torch.tensor(gs)
    )
    expected = F32(6) * (F32(3 * 2.0**-9) * gs)
    assert parse("nvfp4").dequantize(encoded)[0, 0].item() == expected


def test_bad_arguments_are_named():
    fmt, x = parse("nvfp4"), torch.randn(2, 32)
    words = torch.zeros(2, 32, dtype=torch.int64)
    with pytest.raises(InputError, match=r"^random_bits 'a tensor': expected None for nvfp4"):
        fmt.quantize(x, words)
    with pytest.raises(InputError, match=r"^random_bits None: expected a tensor for nvfp4\+sr"):
        parse("nvfp4+sr").round(x)
    with pytest.raises(InputError, match=r"^random_bits 'torch.int32 \(2, 32\)': expected int64"):
        parse("nvfp4+sr").round(x, words.int())
    with pytest.raises(InputError, match=r"^residual .*expected None for nvfp4"):
        fmt.quantize(x, residual=x)
    with pytest.raises(InputError, match=r"^residual .*expected shape \(2, 32\)"):
        parse("nvfp4+ef").quantize(x, residual=x[:1])
    with pytest.raises(InputError, match=r"^x 'torch.int32 \(2, 32\)'"):
        fmt.quantize(x.int())
    with pytest.raises(InputError, match=r"^x 'torch.float32 \(\)'"):
        fmt.quantize(torch.tensor(1.0))
