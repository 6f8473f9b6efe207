"""Vectors made by other libraries: every array has a format or a reason; the former are reproduced."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, Format, parse, philox_4x32
from quantlab.formats.rounding import encode_integer
from quantlab.formats.table import Integer

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden"
MAP = tomllib.loads((DATA / "golden_map.toml").read_text())
REASONS, EXCEPTIONS = MAP.pop("reasons"), MAP.pop("exceptions")
NOT_VECTORS = {"MANIFEST.json", "README.md"}


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as arrays:
        return {key: arrays[key] for key in arrays.files}


def cases(*files: str) -> list:
    return [
        pytest.param(file, key, entry, id=f"{file}:{key}")
        for file in files
        for key, entry in MAP[file].items()
        if isinstance(entry, dict)
    ]


def array_names(path: Path) -> set[str]:
    if path.suffix == ".npz":
        return set(load(path.name))
    content = json.loads(path.read_text())
    if isinstance(content, dict):
        return {key for key, value in content.items() if isinstance(value, list)}
    return {key for case in content for key in (*case, *case["results"])} - {"results"}


def test_no_array_is_left_out():
    files = {path.name: path for path in GOLDEN.iterdir() if path.name not in NOT_VECTORS}
    assert set(MAP) == set(files)
    for name, path in files.items():
        assert set(MAP[name]) == array_names(path), name


def test_map_uses_its_closed_lists_and_all_of_them():
    used_reasons, used_exceptions = set(), set()
    for entries in MAP.values():
        for entry in entries.values():
            if isinstance(entry, str):
                used_reasons.add(entry)
            else:
                used_exceptions |= set(entry.get("except", ()))
                assert parse(entry["format"]).text == entry["format"]
    assert used_reasons == set(REASONS)
    assert used_exceptions == set(EXCEPTIONS)


def bits_of(values: np.ndarray) -> np.ndarray:
    """Comparable bit patterns: floats by their bits, codes by unsigned value."""
    return values.view(f"u{values.dtype.itemsize}")


def assert_same(ours: np.ndarray, golden: np.ndarray, compared: np.ndarray | bool, zero_sign: bool) -> None:
    if zero_sign:
        ours, golden = ours + 0.0, golden + 0.0
    assert ours.dtype.itemsize == golden.dtype.itemsize
    equal = bits_of(ours) == bits_of(golden)
    compared = np.broadcast_to(compared, equal.shape)
    assert compared.any(), "nothing compared"
    wrong = np.argwhere(~equal & compared)
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {ours[tuple(wrong[0])]} {golden[tuple(wrong[0])]}"
    )


def element_mask(fmt: Format, x: np.ndarray, excluded: list[str]) -> np.ndarray:
    """Which inputs of an element cast are compared."""
    compared = np.ones(x.shape, dtype=bool)
    if "nan-payload" in excluded or "nan-refused" in excluded:
        compared &= ~np.isnan(x)
    if "minus-zero" in excluded:
        compared &= ~((x == 0) & np.signbit(x))
    if "overflow" in excluded:
        compared &= np.abs(x) <= fmt.row.element.max
    if "overflow-nan-sign" in excluded:
        compared &= ~np.isnan(fmt.round(torch.from_numpy(x), specials="hardware").numpy())
    if "fp16-subnormal" in excluded:
        compared &= (np.abs(x) >= 2.0**-14) & np.isfinite(x)
    return compared


def encode(fmt: Format, x: np.ndarray, words: torch.Tensor | None, excluded: list[str]):
    if "nan-refused" in excluded:
        with pytest.raises(InputError, match=r"^x 'nan at"):
            fmt.quantize(torch.from_numpy(np.where(np.isinf(x), 0, x)), words)
    encoded = fmt.quantize(torch.from_numpy(x), words, specials="hardware")
    return encoded.codes.numpy(), fmt.dequantize(encoded).numpy()


@pytest.mark.parametrize(("file", "key", "entry"), cases("decode_tables.npz"))
def test_decode_tables(file, key, entry):
    fmt, golden = parse(entry["format"]), load(file)[key]
    codes = torch.arange(len(golden)).to(torch.uint8)
    ours = fmt.dequantize(Encoded(codes)).numpy()
    nan = np.isnan(golden)
    assert np.array_equal(np.isnan(ours), nan)
    assert_same(ours, golden, ~nan, zero_sign=False)


@pytest.mark.parametrize(("file", "key", "entry"), cases("scalar_casts.npz", "e2m1_casts.npz"))
def test_element_casts(file, key, entry):
    arrays, excluded = load(file), entry.get("except", [])
    fmt, golden = parse(entry["format"]), arrays[key]
    x = arrays[key.partition("__")[0] + "__x" if "__" in key else "x"]
    codes, values = encode(fmt, x, None, excluded)
    compared = element_mask(fmt, x, excluded)
    if "nan-payload" in excluded:
        assert np.isnan(values[np.isnan(x)]).all()
    if "overflow-nan-sign" in excluded:
        code_of_nan = golden & 0x7F == 0x7F
        assert np.array_equal(np.isnan(values), code_of_nan)
    if "overflow" in excluded:
        assert (np.abs(values[np.abs(x) > fmt.row.element.max]) == fmt.row.element.max).all()
    assert_same(codes if key.endswith("code") else values, golden, compared, "zero-sign" in excluded)


@pytest.mark.parametrize(("file", "key", "entry"), cases("sr_vectors.npz"))
def test_stochastic_vectors(file, key, entry):
    arrays, excluded = load(file), entry.get("except", [])
    fmt, golden = parse(entry["format"]), arrays[key]
    x = np.broadcast_to(arrays[key.partition("__")[0] + "_x"][:, None], golden.shape).copy()
    words = torch.from_numpy(np.broadcast_to(arrays[entry["bits"]].astype(np.int64), golden.shape).copy())
    if isinstance(fmt.row.element, Integer):  # element vectors: the scale is 1
        assert fmt.random_bits == 24
        codes = encode_integer(torch.from_numpy(x), fmt.row.element, fmt.rounding, words, 24)
        codes = codes.numpy().astype(np.int8)
        u = words.numpy() % 2**24 / 2.0**24
        assert_same(
            codes, golden, (x + u.astype(np.float32)).astype(np.float64) == x.astype(np.float64) + u, False
        )
        return
    codes, values = encode(fmt, x, words, excluded)
    compared = element_mask(fmt, x, excluded)
    assert_same(codes if key.endswith("code") else values, golden, compared, "zero-sign" in excluded)


def per_group(mask: np.ndarray, groups: int) -> np.ndarray:
    """Whether all values of a group are in the mask: (..., K) -> (..., groups)."""
    return mask.reshape(*mask.shape[:-1], groups, -1).all(-1)


@pytest.mark.parametrize(("file", "key", "entry"), cases("fp8_int_scaled.npz"))
def test_scaled_rows(file, key, entry):
    arrays, excluded = load(file), entry["except"]
    fmt, golden, part = parse(entry["format"]), arrays[key], key.rsplit("__", 1)[1]
    rows = np.isfinite(arrays["x"]).all(-1)
    x, golden = arrays["x"][rows], golden[rows]
    encoded = fmt.quantize(torch.from_numpy(x))
    assert encoded.scales is not None
    groups = encoded.scales.shape[-1]
    normal = np.abs(x).reshape(len(x), groups, -1).max(-1) >= 2.0**-126
    compared = normal if "subnormal" in excluded else np.ones_like(normal)
    if part == "scale":
        assert_same(encoded.scales.numpy(), golden, compared, False)
        return
    compared = np.repeat(compared, x.shape[-1] // groups, axis=-1)
    ours = encoded.codes if part == "code" else fmt.dequantize(encoded)
    assert_same(ours.numpy(), golden, compared, "int8" in fmt.text)


def block_masks(x: np.ndarray, excluded: list[str], part: str, fmt: Format) -> np.ndarray:
    """Which blocks (..., K / 16) are compared."""
    amax = np.abs(x).reshape(*x.shape[:-1], -1, 16).max(-1)
    whole = np.abs(x).max()
    compared = np.ones(amax.shape, dtype=bool)
    if "zero-tensor" in excluded:
        compared &= whole > 0
    if "subnormal" in excluded:
        compared &= (whole == 0) | (whole >= 2.0**-126)
    if "zero-block" in excluded and part == "scale":
        compared &= amax > 0
    if "scale-floor" in excluded:
        divisor = 6.0 if fmt.granularity == "none" else 6.0 * max(float(whole), 2.0**-149) / 2688
        # A block at the floor itself is the same under both recipes; codes of zeros always are.
        compared &= (amax >= 2.0**-6 * divisor) | ((amax == 0) & (part != "scale"))
    return compared


def near_tie(x: np.ndarray, encoded: Encoded) -> np.ndarray:
    """Elements whose quotient by the decoded scale is a tie up to four float32 roundings (2^-24 each)."""
    assert encoded.scales is not None
    assert encoded.global_scale is not None
    scales = parse("e4m3").dequantize(Encoded(encoded.scales)).double() * encoded.global_scale.double()
    quotient = np.abs(x) / np.maximum(np.repeat(scales.numpy(), 16, axis=-1), 1e-300)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return (np.abs(quotient[..., None] / ties - 1) <= 4 * 2.0**-24).any(-1)


@pytest.mark.parametrize(("file", "key", "entry"), cases("nvfp4_blocks.npz"))
def test_nvfp4_blocks(file, key, entry):
    arrays, excluded = load(file), entry["except"]
    fmt, part = parse(entry["format"]), key.rsplit("__", 1)[1]
    tensors = 0
    for x, golden in zip(arrays["x"], arrays[key], strict=True):
        if not np.isfinite(x).all():
            with pytest.raises(InputError, match=r"^x '(nan|-?inf) at"):
                fmt.quantize(torch.from_numpy(x))
            continue
        encoded = fmt.quantize(torch.from_numpy(x))
        compared = block_masks(x, excluded, part, fmt)
        if not compared.any():
            continue
        tensors += 1
        if part == "gs":
            assert encoded.global_scale is not None
            assert encoded.global_scale.item() == golden
        elif part == "scale":
            assert encoded.scales is not None
            assert_same(encoded.scales.numpy(), golden, compared, False)
        else:
            ours = encoded.codes if part == "code" else fmt.dequantize(encoded)
            elements = np.repeat(compared, 16, axis=-1)
            if "near-tie" in excluded:
                elements &= ~near_tie(x, encoded)
            assert_same(ours.numpy(), golden, elements, "zero-sign" in excluded)
    assert tensors >= 8


@pytest.mark.parametrize(("file", "key", "entry"), cases("nvfp4_disagreements.json"))
def test_nvfp4_disagreements(file, key, entry):
    fmt, excluded = parse(entry["format"]), entry["except"]
    compared_cases = 0
    for case in json.loads((GOLDEN / file).read_text()):
        x, result = np.array(case["x"], dtype=np.float32), case["results"][key]
        encoded = fmt.quantize(torch.from_numpy(x))
        assert encoded.scales is not None
        scales, codes = block_masks(x, excluded, "scale", fmt), block_masks(x, excluded, "code", fmt)
        if not codes.any():
            continue
        compared_cases += 1
        assert_same(encoded.scales.numpy(), np.array(result["scale_codes"], np.uint8), scales, False)
        compared = np.repeat(codes, 16) & ~((x == 0) & np.signbit(x))
        assert_same(encoded.codes.numpy(), np.array(result["codes"], np.uint8), compared, False)
    assert compared_cases == 10


def test_philox_known_answers():
    vectors = json.loads((GOLDEN / "philox.json").read_text())["vectors"]
    for vector in vectors:
        seed = vector["seed"]
        counter = torch.tensor([[offset % 2**32, offset >> 32, 0, 0] for offset in vector["offsets"]])
        words = philox_4x32(counter, (seed % 2**32, seed >> 32), vector["rounds"])
        assert words.tolist() == [[int(word, 16) for word in words] for words in vector["words"]]
    assert len(vectors) == 25
