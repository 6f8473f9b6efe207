"""Vectors made by other libraries: every array has a format, a test or a reason; formats reproduce theirs bit for bit.

One rule of comparison holds everywhere (``assert_same``): bits are equal, except that a NaN among values equals any
NaN.  What an array needs beyond that is one of the exceptions that tests/data/golden_map.toml closes.
"""

import json
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, Format, parse, philox_4x32
from quantlab.formats.rounding import encode_integer
from quantlab.formats.sharing import SHARINGS, pack_shared, shared_random_bits
from quantlab.formats.table import Integer, Scaling

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden"
MAP = tomllib.loads((DATA / "golden_map.toml").read_text())
REASONS, EXCEPTIONS = MAP.pop("reasons"), MAP.pop("exceptions")
NOT_VECTORS = {"MANIFEST.json", "README.md"}
KEYS = {"format", "except", "bits", "layout", "input"}
_NAN_SCALE = 0x7F


@cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as arrays:
        return {key: arrays[key] for key in arrays.files}


def cases(*files: str) -> list:
    return [
        pytest.param(file, key, entry, id=f"{file}:{key}")
        for file in files
        for key, entry in MAP[file].items()
        if "format" in entry
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
    for entry in (entry for entries in MAP.values() for entry in entries.values()):
        if isinstance(entry, str):
            used_reasons.add(entry)
        elif "test" in entry:
            assert set(entry) == {"test"}
            file, _, name = entry["test"].partition("::")
            assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text()
        else:
            assert set(entry) <= KEYS
            used_exceptions |= set(entry.get("except", ()))
            assert parse(entry["format"]).text == entry["format"]
    assert used_reasons == set(REASONS)
    assert used_exceptions == set(EXCEPTIONS)


def bits_of(array: np.ndarray) -> np.ndarray:
    """Comparable bit patterns: floats by their bits, codes by unsigned value."""
    return array.view(f"u{array.dtype.itemsize}")


def assert_same(ours: np.ndarray, golden: np.ndarray, compared: np.ndarray | bool = True) -> None:
    assert ours.shape == golden.shape
    equal = bits_of(ours) == bits_of(golden)
    if golden.dtype == np.float32:
        equal |= np.isnan(ours) & np.isnan(golden)
    compared = np.broadcast_to(compared, equal.shape)
    assert compared.any(), "nothing compared"
    wrong = np.argwhere(~equal & compared)
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {ours[tuple(wrong[0])]} {golden[tuple(wrong[0])]}"
    )


@pytest.mark.parametrize(("file", "key", "entry"), cases("decode_tables.npz"))
def test_decode_tables(file, key, entry):
    """Elements by their codes; E8M0 by the scales of blocks that hold the code of 1."""
    fmt, golden = parse(entry["format"]), load(file)[key]
    codes = torch.arange(len(golden)).to(torch.uint8)
    encoded = Encoded(codes)
    if fmt.row.scaling is Scaling.MX:
        one = parse(fmt.element.name).quantize(torch.ones(len(golden), 1)).codes
        encoded = Encoded(one, codes[:, None])
    assert_same(fmt.dequantize(encoded).numpy().reshape(-1), golden)


def element_mask(fmt: Format, x: np.ndarray, excluded: list[str]) -> np.ndarray:
    """Which inputs of an element cast are compared."""
    compared = np.ones(x.shape, dtype=bool)
    if "nan-payload" in excluded or "nan-refused" in excluded:
        compared &= ~np.isnan(x)
    if "not-finite" in excluded:
        compared &= np.isfinite(x)
    if "saturates" in excluded:
        compared &= ~(np.abs(x) > fmt.element.max)
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
    values = fmt.dequantize(encoded).numpy()
    if "nan-payload" in excluded:
        assert np.isnan(values[np.isnan(x)]).all()
    return encoded.codes.numpy(), values


@pytest.mark.parametrize(("file", "key", "entry"), cases("scalar_casts.npz", "e2m1_casts.npz"))
def test_element_casts(file, key, entry):
    arrays, excluded = load(file), entry.get("except", [])
    fmt, golden = parse(entry["format"]), arrays[key]
    x = arrays[key.partition("__")[0] + "__x" if "__" in key else "x"]
    if fmt.row.scaling is Scaling.NONE:
        codes, values = encode(fmt, x, None, excluded)
    else:
        codes, values = cast_under_a_scale_of_one(fmt, np.where(element_mask(fmt, x, excluded), x, 0))
    if "overflow-nan-sign" in excluded:
        assert np.array_equal(np.isnan(values), golden & 0x7F == 0x7F)
    assert_same(codes if key.endswith("code") else values, golden, element_mask(fmt, x, excluded))


def cast_under_a_scale_of_one(fmt: Format, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The element cast of a block format: its numbers x in blocks of their own, beside the largest number.

    A last block with the largest number of all, largest scale times largest code, makes the global scale of
    every NVFP4 convention one.
    """
    rows = np.zeros((len(x) + 1, fmt.row.block), dtype=np.float32)
    rows[:-1, 0], rows[:-1, 1] = x, fmt.element.max
    rows[-1, 0] = 2688.0
    encoded = fmt.quantize(torch.from_numpy(rows))
    assert encoded.scales is not None
    assert encoded.scales[:-1].unique().tolist() == [127 if fmt.row.scaling is Scaling.MX else 0x38]
    return encoded.codes[:-1, 0].numpy(), fmt.dequantize(encoded)[:-1, 0].numpy()


@pytest.mark.parametrize(("file", "key", "entry"), cases("sr_vectors.npz"))
def test_stochastic_vectors(file, key, entry):
    """Every x with every word; packed ones with the bits that a conversion gives each of its elements."""
    arrays, excluded, fmt = load(file), entry.get("except", []), parse(entry["format"])
    golden, layout = arrays[key], entry.get("layout")
    words = torch.from_numpy(arrays[entry["bits"]].astype(np.int64))
    x = arrays[key.partition("__")[0] + "_x"]
    if layout:
        assert fmt.random_bits == SHARINGS[layout].random_bits
        words = shared_random_bits(words[:, None], layout)
    else:
        words = words.expand(golden.shape).clone()
        x = np.broadcast_to(x[:, None], golden.shape).copy()
    compared = np.ones(x.shape, dtype=bool)
    if isinstance(fmt.element, Integer):  # vectors of elements: the scale is 1
        bits = fmt.random_bits or 32
        codes = encode_integer(torch.from_numpy(x), fmt.element, fmt.rounding, words, bits).to(torch.int8)
        codes = values = codes.numpy()
        if "sum-rounded" in excluded:
            u = words.numpy() / 2.0**bits
            compared = (x + u.astype(np.float32)).astype(np.float64) == x.astype(np.float64) + u
    else:
        codes, values = encode(fmt, x, words, excluded)
        compared = element_mask(fmt, x, excluded)
    if layout:
        codes = pack_shared(torch.from_numpy(codes), layout)[:, 0].numpy().astype(np.uint32)
        compared = True
    assert_same(codes if key.endswith(("code", "packed")) else values, golden, compared)


def part_of(fmt: Format, encoded: Encoded, part: str, golden: np.ndarray) -> np.ndarray:
    """What a library calls code, scale, deq and so on, shaped like the array."""
    assert encoded.scales is not None
    if part == "scale_f32":  # a byte as the number that the library multiplies by, 0xFF as 2^128
        with np.errstate(over="ignore"):
            ours = np.ldexp(np.float32(1), encoded.scales.numpy().astype(np.int32) - 127)
    elif part == "gs":
        assert encoded.global_scale is not None
        ours = encoded.global_scale.numpy()
    else:
        parts = {"code": encoded.codes, "scale": encoded.scales, "deq": None}
        ours = (fmt.dequantize(encoded) if part == "deq" else parts[part]).numpy()
    return ours.reshape(golden.shape)


def assert_part(fmt: Format, x: np.ndarray, golden: np.ndarray, part: str, entry: dict) -> None:
    """x (..., V, K) at once; ``golden`` is one part of what a library makes of it."""
    excluded, tensor = entry.get("except", []), torch.from_numpy(x)
    if entry.get("input") == "bf16":
        tensor = tensor.bfloat16()
    if part == "packed":  # INT4 as code + 8, the even element in the high nibble
        golden = np.stack([golden >> 4, golden & 15], axis=-1).reshape(x.shape).astype(np.int8) - 8
        part = "code"
    encoded = fmt.quantize(tensor, specials="hardware")
    ours = part_of(fmt, encoded, part, golden)
    if part == "deq" and entry.get("input") == "bf16":  # the library returns the dtype of its input
        ours = torch.from_numpy(ours).bfloat16().float().numpy()
    if "reciprocal" in excluded:
        ours = np.float32(1) / ours
    if "nan-payload" in excluded:
        values, theirs = (
            fmt.dequantize(Encoded(torch.from_numpy(c), encoded.scales)) for c in (ours, golden)
        )
        assert torch.equal(values.isnan(), theirs.isnan())
        golden = np.where(theirs.isnan().numpy(), ours, golden)
    if "nan-sign" in excluded:
        assert encoded.scales is not None
        nan = encoded.scales.numpy() == _NAN_SCALE
        kept = (
            np.where(nan, 0x7F, 0xFF) if part == "scale" else np.repeat(np.where(nan, 7, 0xFF), 16, axis=-1)
        )
        ours, golden = ours & kept.astype(np.uint8), golden & kept.astype(np.uint8)
    assert_same(ours, golden)


@pytest.mark.parametrize(("file", "key", "entry"), cases("fp8_int_scaled.npz"))
def test_scaled_rows(file, key, entry):
    """Rows of 64 under a scale each, or two scales; a row is left out whole."""
    arrays, excluded = load(file), entry.get("except", [])
    x, kept = arrays["x"], np.ones(len(arrays["x"]), dtype=bool)
    if "not-finite" in excluded:
        kept &= np.isfinite(x).all(-1)
    if "smallest-scale" in excluded:
        kept &= np.abs(x).max(-1) > 2.0**-126
    assert kept.sum() >= len(x) - 1
    assert_part(parse(entry["format"]), x[kept], arrays[key][kept], key.rsplit("__", 1)[1], entry)


@pytest.mark.parametrize(("file", "key", "entry"), cases("mx_blocks.npz"))
def test_mx_blocks(file, key, entry):
    arrays = load(file)
    assert_part(parse(entry["format"]), arrays["x"], arrays[key], key.rsplit("__", 1)[1], entry)


@pytest.mark.parametrize(("file", "key", "entry"), cases("nvfp4_blocks.npz"))
def test_nvfp4_blocks(file, key, entry):
    """Every tensor under a global value of its own."""
    arrays, excluded = load(file), entry.get("except", [])
    tensors = 0
    for x, golden in zip(arrays["x"], arrays[key], strict=True):
        if "zero-tensor" in excluded and not x.any():
            continue
        assert_part(parse(entry["format"]), x, golden, key.rsplit("__", 1)[1], entry)
        tensors += 1
    assert tensors >= 16


@pytest.mark.parametrize(("file", "key", "entry"), cases("nvfp4_disagreements.json"))
def test_nvfp4_disagreements(file, key, entry):
    fmt, vectors = parse(entry["format"]), json.loads((GOLDEN / file).read_text())
    for case in vectors:
        x, result = np.array(case["x"], dtype=np.float32), case["results"][key]
        for part, name in (("scale", "scale_codes"), ("code", "codes")):
            assert_part(fmt, x, np.array(result[name], np.uint8), part, entry)
    assert len(vectors) == 11


def test_philox_known_answers():
    vectors = json.loads((GOLDEN / "philox.json").read_text())["vectors"]
    for vector in vectors:
        seed = vector["seed"]
        counter = torch.tensor([[offset % 2**32, offset >> 32, 0, 0] for offset in vector["offsets"]])
        words = philox_4x32(counter, (seed % 2**32, seed >> 32), vector["rounds"])
        assert words.tolist() == [[int(word, 16) for word in words] for words in vector["words"]]
    assert len(vectors) == 25


COMPARISONS = {
    "scalar_casts.npz": test_element_casts,
    "e2m1_casts.npz": test_element_casts,
    "sr_vectors.npz": test_stochastic_vectors,
    "fp8_int_scaled.npz": test_scaled_rows,
    "mx_blocks.npz": test_mx_blocks,
    "nvfp4_blocks.npz": test_nvfp4_blocks,
    "nvfp4_disagreements.json": test_nvfp4_disagreements,
}


@pytest.mark.parametrize(
    ("file", "key", "entry"), [c for c in cases(*COMPARISONS) if "except" in c.values[2]]
)
def test_every_exception_is_needed(file, key, entry):
    """Without any one of its exceptions an array is not reproduced."""
    for exception in entry["except"]:
        fewer = [other for other in entry["except"] if other != exception]
        with pytest.raises((AssertionError, InputError, IndexError)):
            COMPARISONS[file](file, key, {**entry, "except": fewer})
