"""Format text, the table for people, and the storage count."""

import pickle

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import format_rows, parse
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import FORMATS

CANONICAL = {
    "fp8": "fp8_e4m3",
    "int8:row": "int8",
    "int8:block32": "int8:block32",
    "nvfp4:matrix": "nvfp4",
    "nvfp4:none": "nvfp4:none",
    "fp8:block32+sr8": "fp8_e4m3:block32+sr8",
    "fp16+sr13": "fp16+sr13",
    "bf16+sr32": "bf16+sr",
    "bf16+sr": "bf16+sr",
    "int8+ef.fp16": "int8+ef",
    "int8+ef.bf16": "int8+ef.bf16",
    "nvfp4:row+ef.fp32": "nvfp4:row+ef.fp32",
    "nvfp4:head": "nvfp4",
    "nvfp4:tensor": "nvfp4:tensor",
    "int8+ef.int4": "int8+ef.int4",
    "int8+ef.fp8": "int8+ef.fp8_e4m3",
    "int16:tile32+scale.recip": "int16:tile32+scale.recip",
    "fp8+scale.240": "fp8_e4m3+scale.240",
    "fp8:head+scale.240.recip": "fp8_e4m3:head+scale.240.recip",
    "int4+scale.max": "int4",
    "mxfp4+scale.rceil": "mxfp4",
    "mxfp6_e2m3+scale.even+sr16": "mxfp6_e2m3+scale.even+sr16",
    "mxfp8_e5m2+rz": "mxfp8_e5m2+rz",
    "nvfp4+floor.2^-9+scale.rne": "nvfp4",
    "nvfp4+floor.0+scale.ceil": "nvfp4+scale.ceil+floor.0",
    "nvfp4+4over6": "nvfp4+4over6",
    "nvfp4+4over6.mse.256": "nvfp4+4over6",
    "nvfp4+4over6.448": "nvfp4+4over6.448",
    "nvfp4+4over6.absmax.256": "nvfp4+4over6.absmax",
    "nvfp4+4over6.mae.448": "nvfp4+4over6.mae.448",
    "e4m3+overflow.saturate": "e4m3",
    "e4m3+overflow.nan": "e4m3+overflow.nan",
    "fp16+overflow.saturate+sr13": "fp16+overflow.saturate+sr13",
    "int8+sr+hadamard": "int8+hadamard+sr",
    "nvfp4+ef+hadamard+rank2": "nvfp4+rank2+hadamard+ef",
    "nvfp4+mean+4over6.mae": "nvfp4+4over6.mae+mean",
    "fp8+sr8+rank8": "fp8_e4m3+rank8+sr8",
    "mxfp4+rank1+as.modelopt": "mxfp4+as.modelopt+rank1",
    "nvfp4+hadamard+rank1+keyscale+4over6": "nvfp4+4over6+keyscale+rank1+hadamard",
    "nvfp4+hadamard.0": "nvfp4+hadamard",
    "nvfp4+hadamard.7": "nvfp4+hadamard.7",
    "tf32+rz": "tf32+rz",
    "nvfp4+as.te": "nvfp4+as.te",
    "nvfp4:none+as.torchao": "nvfp4:none+as.torchao",
    "nvfp4+as.te+4over6.mae.256": "nvfp4+as.te+4over6",
    "nvfp4+as.flashinfer+4over6.mse.448": "nvfp4+as.flashinfer+4over6.mse",
    "mxfp8_e4m3+as.torchao.floor": "mxfp8_e4m3+as.torchao",
    "mxfp8_e4m3+as.torchao.even": "mxfp8_e4m3+as.torchao.even",
    "int8:block32+as.torchao.symmetric": "int8:block32+as.torchao",
    "int8+as.flashinfer+sr24": "int8+as.flashinfer+sr24",
}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_canonical_text(text, canonical):
    fmt = parse(text)
    assert fmt.text == str(fmt) == canonical
    assert parse(fmt.text) == fmt
    assert hash(parse(fmt.text)) == hash(fmt)
    assert pickle.loads(pickle.dumps(fmt)) == fmt


def test_fields():
    fmt = parse("int8:block32+ef")
    assert (fmt.name, fmt.granularity, fmt.error_feedback) == ("int8", "block32", "fp16")
    assert (fmt.stochastic, fmt.random_bits, fmt.rounded) == (False, None, True)
    fmt = parse("fp16+sr13")
    assert (fmt.granularity, fmt.stochastic, fmt.random_bits, fmt.error_feedback) == (None, True, 13, None)
    assert (parse("fp16+sr").rounding, parse("fp16").rounding) == (Rounding.STOCHASTIC, Rounding.NEAREST)
    assert parse("fp16+sr").random_bits is None
    assert parse("int8").granularity == "row"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvfp5", r"^format 'nvfp5': expected one of bf16, .*\(nearest: nvfp4\)$"),
        ("", r"^format '': expected one of bf16"),
        ("NVFP4", r"^format 'NVFP4': expected one of"),
        ("int8:foo", "expected int8 with granularity row or block32 or tile32 or head"),
        ("mxfp4:row", "expected mxfp4 without a granularity"),
        ("int8:", "expected int8 with granularity"),
        ("nvfp4:block32", "expected nvfp4 with granularity matrix or row or tensor or none"),
        ("bf16:row", "expected bf16 without a granularity"),
        ("fp32+sr", "expected no modifier: fp32 rounds nothing"),
        ("fp64+ef", "expected no modifier"),
        ("int8+sr+ef", "not both"),
        ("int8+ef+ef", "once"),
        ("int8+sr8+sr8", "once"),
        ("bf16+ef", "expected .ef on a scaled format"),
        ("int8+ef.int5", r"\+ef.<format> with fp16, fp32, bf16, tf32"),
        ("int8+ef.fp64", r"\+ef.<format> with"),
        ("int8+ef+rz", r"\+rz or \+ef, not both"),
        ("int8+rz+sr", r"one of \+rz and \+sr, once"),
        ("int8+scale.floor", r"expected int8\+scale.max or int8\+scale.recip"),
        ("int8+scale", r"expected int8\+scale.max or"),
        ("bf16+scale.max", r"expected bf16 without \+scale"),
        ("mxfp4+floor.0", r"expected mxfp4 without \+floor"),
        ("nvfp4+floor.2", r"expected nvfp4\+floor.0 or nvfp4\+floor.2\^-9 or"),
        ("nvfp4+4over6.rms", r"expected a four over six of \[.mse"),
        ("nvfp4+4over6.256.mse", r"expected a four over six of \[.mse"),
        ("mxfp4+4over6", r"expected \+4over6 on nvfp4 only"),
        ("nvfp4:none+4over6", "with a global scale"),
        ("nvfp4+as.te+4over6.absmax", "a metric of mae or mse for te"),
        ("nvfp4+as.fouroversix+4over6.448", "a scale_max of 256 for fouroversix"),
        ("nvfp4+4over6+scale.ceil", r"\+scale on the plain canonical recipe only"),
        ("nvfp4+as.vllm+floor.0", r"\+floor on the plain canonical recipe only"),
        ("nvfp4:none+as.te", "te with a global scale"),
        ("mxfp4+as.vllm", r"expected mxfp4\+as.torchao or mxfp4\+as.torchao.ceil"),
        ("e2m1+overflow.nan", r"expected e2m1\+overflow.saturate$"),
        ("e4m3+overflow.infinity", r"expected e4m3\+overflow.saturate or e4m3\+overflow.nan"),
        ("int8+overflow.saturate", r"expected int8 without \+overflow"),
        ("e4m3+rank2", r"expected \+rank<r> on a scaled format, r from 1 to 8"),
        ("nvfp4+rank", r"\+rank<r> on a scaled format"),
        ("nvfp4+rank0", "r from 1 to 8"),
        ("nvfp4+rank9", "r from 1 to 8"),
        ("nvfp4+rank02", "r from 1 to 8"),
        ("nvfp4+rank.2", r"not \+rank.2$"),
        ("bf16+mean", r"expected \+mean on a scaled format, without an argument"),
        ("nvfp4+mean.2", "without an argument"),
        ("nvfp4+mean+rank1", r"one of \+mean and \+rank<r>, once"),
        ("nvfp4+rank1+rank1", r"one of \+mean and \+rank<r>, once"),
        ("fp32+rank1", "expected no modifier"),
        ("bf16+keyscale", r"expected \+keyscale on a scaled format, without an argument"),
        ("nvfp4+keyscale.2", "without an argument"),
        ("nvfp4+keyscale+keyscale", r"\+keyscale once"),
        ("e4m3+hadamard", "hadamard.* on a scaled format"),
        ("nvfp4+hadamard.-1", "seed a whole number"),
        ("tf32+rz.1", r"\+rz without an argument"),
        ("fp16+sr.13", r"not \+sr.13$"),
        ("nvfp4+as.nobody", "expected nvfp4"),
        ("fp16+sr0", "1 to 32"),
        ("fp16+sr33", "1 to 32"),
        ("int8+rn", r"modifiers \+as.<library>, \+scale"),
        ("int8+", r"modifiers \+as.<library>, \+scale"),
        ("int8 +sr", "expected one of"),
    ],
)
def test_bad_text_is_one_clear_line(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert caught.value.argument == "format"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shape", "bits"),
    [
        ("fp64", (128, 128), 64),
        ("fp32", (128, 128), 32),
        ("fp16+sr", (128, 128), 16),
        ("e4m3", (128, 128), 8),
        ("e2m1", (4, 7), 8 * 4 / 7),  # 7 nibbles take 4 bytes
        ("int8", (128, 128), 8 + 32 / 128),
        ("int8:block32", (3, 40), 8 + 2 * 32 / 40),  # the short block has its scale too
        ("int8+ef", (128, 128), 8 + 32 / 128 + 16),
        ("int8+ef.fp32", (128, 64), 8 + 32 / 64 + 32),
        ("nvfp4", (128, 128), 4 + 8 / 16 + 32 / (128 * 128)),
        ("nvfp4", (2, 8, 64, 128), 4 + 8 / 16 + 32 / (64 * 128)),
        ("nvfp4:row", (2, 8, 64, 128), 4 + 8 / 16 + 32 / 128),
        ("nvfp4:none", (128, 128), 4.5),
        ("nvfp4:none", (5, 17), (32 * 4 + 2 * 8) / 17),  # two whole blocks, 2 scales
        ("tf32", (3, 5), 32),
        ("e3m2", (3, 5), 8 * 4 / 5),  # 30 bits take 4 bytes
        ("int4", (128, 128), 4 + 32 / 128),
        ("int16:head", (4, 128, 64), 16 + 32 / (128 * 64)),
        ("fp8:tile32", (2, 80, 64), 8 + 3 * 32 / (80 * 64)),  # 80 rows: two tiles and a short one
        ("mxfp4", (128, 128), 4.25),
        ("mxfp6_e3m2", (128, 128), 6.25),
        ("mxfp8_e4m3", (128, 128), 8.25),
        ("mxfp6_e2m3", (4, 40), (64 * 6 + 2 * 8) / 40),
        ("int8+ef.int4", (128, 128), 8 + 32 / 128 + 4 + 32 / 128),
        ("nvfp4:tensor", (2, 4, 64), 4.5 + 32 / 512),
        ("nvfp4:none+rank2", (128, 128), 4.5 + 2 * 16 * (128 + 128) / (128 * 128)),
        ("nvfp4:none+rank4", (8, 16, 64), 4.5 + 4 * 16 * (16 + 64) / (16 * 64)),
        ("nvfp4:none+mean", (8, 16, 64), 4.5 + 16 / 16),
        ("nvfp4:none+keyscale", (8, 64, 128), 4.5 + 8 / 64),
        ("int8+rank1+ef", (64, 128), 8 + 32 / 128 + 16 + 16 * (64 + 128) / (64 * 128)),
    ],
)
def test_bits_per_value(text, shape, bits):
    assert parse(text).bits_per_value(shape) == pytest.approx(bits, rel=1e-15)


@pytest.mark.parametrize("text", ["int8+ef", "int8:block32", "nvfp4", "nvfp4:row", "fp8", "bf16", "e4m3"])
def test_bits_per_value_counts_the_stored_tensors(text):
    x = torch.randn(2, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    encoded = parse(text).quantize(x)
    stored = x.numel() * parse(text).row.element.bits
    for part in (encoded.scales, encoded.global_scale, encoded.residual):
        stored += 0 if part is None else part.numel() * part.element_size() * 8
    assert parse(text).bits_per_value(x.shape) == stored / x.numel()


def test_bits_per_value_refuses_empty_shapes():
    with pytest.raises(InputError, match=r"^shape"):
        parse("int8").bits_per_value((4, 0))


def test_rows_for_people():
    rows = {row["name"]: row for row in format_rows()}
    assert list(rows) == list(FORMATS)
    assert rows["e4m3"]["max"] == 448.0
    assert rows["e5m2"]["smallest"] == 2.0**-16
    assert rows["fp16"]["min_normal"] == 2.0**-14
    assert rows["nvfp4"]["bits_per_value"] == 4.501953125
    assert rows["fp32"]["rounding"] == ["none"]
    assert rows["int8"]["rounding"] == ["nearest", "toward zero", "stochastic", "error feedback"]
    assert rows["int8"]["granularity"] == ["row", "block32", "tile32", "head"]


def test_an_empty_residual_format_is_refused():
    with pytest.raises(InputError, match=r"int8\+ef\.'"):
        parse("int8+ef.")
