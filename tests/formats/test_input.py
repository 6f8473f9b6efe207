"""What the formats do with odd layouts and wrong arguments."""

import dataclasses

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, pack_nibbles, parse
from quantlab.formats.table import FORMATS

TEXTS = [
    *FORMATS,
    *(
        "int8:block32+ef",
        "nvfp4:row",
        "nvfp4:none",
        "nvfp4+ef",
        "nvfp4:row+sr8",
        "fp8_e4m3+sr",
        "bf16+sr",
        "e2m1+sr1",
        "int8:tile32",
        "int8:head+scale.recip",
        "fp8_e4m3:tile32+scale.240+sr",
        "nvfp4:tensor",
        "nvfp4+scale.ceil+floor.0",
        "mxfp4+scale.even+sr",
        "mxfp8_e4m3+ef",
        "int8+ef.int4",
        "nvfp4+ef.nvfp4",
        "int4+hadamard",
        "tf32+rz",
        "e3m2+rz",
        "fp16+overflow.saturate",
        "e4m3+overflow.nan",
        "e5m2+overflow.infinity+sr8",
    ),
]


def words_for(fmt, x):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2**32, x.shape, generator=generator) if fmt.stochastic else None


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "shape",
    [(1,), (5,), (17,), (3, 1), (0, 16), (2, 0, 16), (0, 4, 33), (2, 3, 1, 31), (0,), (4, 0), (2, 0, 0)],
    ids=str,
)
def test_any_shape(text, shape):
    fmt = parse(text)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoded = fmt.quantize(x, words_for(fmt, x))
    assert fmt.dequantize(encoded).shape == shape
    assert torch.equal(
        fmt.round(x, words_for(fmt, x)), fmt.dequantize(encoded).to(fmt.round(x, words_for(fmt, x)))
    )


@pytest.mark.parametrize("text", TEXTS)
def test_layout_and_gradients_change_nothing(text):
    fmt = parse(text)
    base = torch.randn(33, 3, 7, generator=torch.Generator().manual_seed(0))
    for x in (base.permute(1, 2, 0), base[:, :1, :1].expand(33, 3, 7), base.repeat(1, 1, 2)[..., ::2]):
        words = words_for(fmt, x)
        expected = fmt.round(x.contiguous(), words)
        kept = x.clone()
        assert torch.equal(fmt.round(x, words), expected)
        assert torch.equal(fmt.dequantize(fmt.quantize(x, words)), expected)
        assert torch.equal(fmt.round(x.clone().requires_grad_(), words), expected)
        assert torch.equal(x, kept)


@pytest.mark.parametrize("text", [t for t in TEXTS if parse(t).granularity])
def test_zero_rows_beside_huge_and_tiny_ones_stay_finite(text):
    fmt = parse(text)
    x = torch.zeros(2, 4, 32)
    x[0, 1], x[0, 2], x[1, 0] = torch.finfo(torch.float32).max, 1e-45, 1e-40
    if fmt.hadamard is not None:
        with pytest.raises(InputError, match=r"^x '3\.4.*e\+38 at \(0, 1, 0\)'"):
            fmt.round(x)
        x /= 64
    rounded = fmt.round(x, words_for(fmt, x))
    assert torch.isfinite(rounded).all()
    assert not rounded[0, 0].any()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor(1.0),
        torch.ones(2, 16, dtype=torch.int32),
        torch.ones(2, 16, dtype=torch.complex64),
        torch.ones(2, 16, dtype=torch.bool),
        torch.ones(2, 16).numpy(),
        [1.0, 2.0],
        None,
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
@pytest.mark.parametrize("text", ["nvfp4", "int8+ef", "fp32", "bf16"])
def test_wrong_tensors_are_named(text, wrong):
    for call in (parse(text).quantize, parse(text).round):
        with pytest.raises(InputError, match=r"^x "):
            call(wrong)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_a_residual_is_a_float(dtype):
    x = torch.ones(2, 32)
    with pytest.raises(InputError, match=r"^residual "):
        parse("int8+ef").quantize(x, residual=torch.zeros(2, 32, dtype=dtype))
    with pytest.raises(InputError, match=r"^residual "):
        parse("int8+ef").quantize(x, residual=[0.0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^random_bits "):
        parse("int8+sr").quantize(x, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, 5, b"nvfp4", ["nvfp4"], "fp16+sr" + "9" * 5000, "int8+sr\u0663"])
def test_text_that_is_no_format(text):
    with pytest.raises(InputError, match=r"^format "):
        parse(text)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), 5, (2.5, 16), (True, 16)])
def test_bits_need_sizes(shape):
    with pytest.raises(InputError, match=r"^shape "):
        parse("nvfp4").bits_per_value(shape)


@pytest.mark.parametrize(
    "codes",
    [torch.tensor([16, 3]), torch.tensor([-1, 3]), torch.ones(2, dtype=torch.bool), torch.ones(2) * 1j],
)
def test_codes_beyond_four_bits_are_not_cut(codes):
    with pytest.raises(InputError, match=r"^codes "):
        pack_nibbles(codes)


BROKEN = {
    "codes as numbers": ("nvfp4", r"codes", lambda e: {"codes": e.codes.long()}),
    "one code": ("e4m3", r"codes", lambda e: {"codes": e.codes[0, 0]}),
    "codes of float": ("e2m1", r"codes", lambda e: {"codes": e.codes.float()}),
    "no codes": ("fp16", r"codes", lambda e: {"codes": None}),
    "fewer rows": ("int8", r"scales", lambda e: {"codes": e.codes[:1]}),
    "no scales": ("int8", r"scales", lambda e: {"scales": None}),
    "scales as numbers": ("mxfp4", r"scales", lambda e: {"scales": e.scales.float()}),
    "scales nobody reads": ("e4m3", r"scales", lambda e: {"scales": torch.ones(3, 1)}),
    "scales too few": ("nvfp4", r"scales", lambda e: {"scales": e.scales[:, :1]}),
    "no global scale": ("nvfp4+as.te", r"global_scale", lambda e: {"global_scale": None}),
    "a global scale a row": ("nvfp4", r"global_scale", lambda e: {"global_scale": torch.ones(3)}),
    "a global scale for none": ("nvfp4:none", r"global_scale", lambda e: {"global_scale": torch.ones(())}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_of_another_format_are_refused_not_decoded(case):
    text, part, change = BROKEN[case]
    fmt = parse(text)
    encoded = fmt.quantize(torch.ones(3, 33))
    broken = dataclasses.replace(encoded, **change(encoded))
    for use in (fmt.dequantize, fmt.pack):
        with pytest.raises(InputError, match=rf"^encoded\.{part} "):
            use(broken)


@pytest.mark.parametrize("text", ["fp32", "e2m1", "int8", "nvfp4+ef"])
def test_what_is_not_encoded_is_refused_by_type(text):
    fmt = parse(text)
    encoded = fmt.quantize(torch.ones(3, 32))
    for wrong in (None, encoded.codes, fmt.pack(encoded)):
        with pytest.raises(InputError, match=r"^encoded .*an Encoded of "):
            fmt.dequantize(wrong)
        with pytest.raises(InputError, match=r"^encoded .*an Encoded of "):
            fmt.pack(wrong)
    for wrong in (None, encoded.codes, encoded):
        with pytest.raises(InputError, match=r"^packed .*a Packed"):
            fmt.unpack(wrong)


def test_packed_bytes_that_do_not_belong_together_are_refused():
    fmt = parse("nvfp4+ef.int8")
    packed = fmt.pack(fmt.quantize(torch.ones(3, 33)))
    wrong = {
        "packed.scales": {"scales": None},
        "packed.global_scale": {"global_scale": torch.ones(3)},
        "packed.key_dim": {"key_dim": 33.0},
        "packed.residual": {"residual": packed.codes},
    }
    for name, change in wrong.items():
        with pytest.raises(InputError, match=rf"^{name}"):
            fmt.unpack(dataclasses.replace(packed, **change))
    for text, changes in (("nvfp4", {}), ("nvfp4", {"residual": packed.codes}), ("nvfp4+ef", {})):
        with pytest.raises(InputError, match=r"^packed\.residual"):
            parse(text).unpack(dataclasses.replace(packed, **changes))


def test_a_residual_of_another_format_is_refused():
    fmt, x = parse("int8+ef.nvfp4"), torch.ones(3, 32)
    whole = parse("nvfp4").quantize(x)
    wrong = [parse(text).quantize(x) for text in ("fp16", "fp32", "int8", "mxfp4", "nvfp4:row")]
    wrong += [Encoded(whole.codes), dataclasses.replace(whole, global_scale=None)]
    for residual in wrong:
        with pytest.raises(InputError, match=r"^residual\."):
            fmt.quantize(x, residual=residual)
    with pytest.raises(InputError, match=r"^encoded\.residual"):
        fmt.pack(dataclasses.replace(fmt.quantize(x), residual=wrong[0]))


@pytest.mark.parametrize("text", ["fp32", "e4m3", "nvfp4", "int8+ef"])
def test_tensors_without_numbers_in_memory_are_refused(text):
    for x in (torch.empty(2, 16, device="meta"), torch.ones(2, 16).to_sparse()):
        with pytest.raises(InputError, match=r"^x .*a dense tensor that holds numbers"):
            parse(text).quantize(x)
        with pytest.raises(InputError, match=r"^x "):
            parse(text).round(x)
