"""What is stored: packed bytes and their count, NaN and Inf in every family, empty tensors."""

import math

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import Encoded, pack_bits, pack_nibbles, parse, unpack_bits, unpack_nibbles
from quantlab.formats.storage import map_tensors
from quantlab.formats.table import FORMATS, Element, Scaling
from tests.formats.families import HADAMARD, SCALED

TEXTS = [
    *FORMATS,
    *(text for text in SCALED if text not in FORMATS),
    *HADAMARD,
    *("int8+ef", "int8+ef.bf16", "int4:block32+ef.fp32", "fp8_e4m3+ef.int4", "nvfp4+ef.nvfp4"),
    *(
        "mxfp4+ef.mxfp6_e2m3",
        "mxfp6_e3m2+ef.e3m2",
        "nvfp4:row+ef.tf32",
        "int8:tile32+ef.e2m1",
        "int16+ef.fp8_e5m2",
    ),
    *("nvfp4+as.te", "int8:block32+as.torchao", "int4+as.modelopt", "mxfp6_e2m3+as.torchao"),
]
SHAPES = [(3, 16), (2, 5, 33), (1, 1), (2, 33, 7), (4, 1, 17), (2, 3, 34, 96), (5,), (33,)]


def state(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_equal(one: Encoded, other: Encoded) -> None:
    for part in ("codes", "scales", "global_scale", "residual"):
        a, b = getattr(one, part), getattr(other, part)
        if isinstance(a, Encoded):
            assert_equal(a, b)
            continue
        assert (a is None) == (b is None), part
        if a is not None:
            assert a.dtype == b.dtype, part
            assert torch.equal(a, b), part


@pytest.mark.parametrize("text", TEXTS)
def test_packing_round_trips_and_is_what_is_counted(text):
    fmt = parse(text)
    for shape in SHAPES:
        encoded = fmt.quantize(state(shape))
        packed = fmt.pack(encoded)
        assert packed.codes.dtype == torch.uint8
        assert packed.key_dim == shape[-1]
        assert_equal(fmt.unpack(packed), encoded)
        counted = fmt.stored_bits(shape)
        assert packed.nbytes * 8 == sum(counted.values()), shape
        assert counted["codes"] == math.prod(shape) * fmt.element.storage_bits
        residual = packed.residual
        assert (0 if residual is None else residual.nbytes * 8) == counted.get("residual", 0)
        assert all(bits > 0 for bits in counted.values())


def test_codes_by_hand():
    """The first element in the lowest bits; two nibbles a byte, four 6-bit codes in three bytes, rows by themselves."""
    nibbles = torch.tensor([[1, 2, 15, 8, 7], [9, 0, 0, 0, 3]], dtype=torch.uint8)
    assert pack_bits(nibbles, 4).tolist() == [[0x21, 0x8F, 0x07], [0x09, 0x00, 0x03]]
    sixes = torch.tensor([0b000001, 0b100010, 0b111111, 0b010100, 0b101011], dtype=torch.uint8)
    # 010100 111111 100010 000001, cut into bytes from the right; then 101011 alone.
    assert pack_bits(sixes, 6).tolist() == [0b10000001, 0b11111000, 0b01010011, 0b00101011]
    assert pack_bits(torch.tensor([-1, -7, 7], dtype=torch.int8), 4).tolist() == [0x9F, 0x07]
    assert unpack_bits(torch.tensor([0x9F, 0x07], dtype=torch.uint8), 4, 3, torch.int8).tolist() == [
        -1,
        -7,
        7,
    ]
    assert pack_bits(torch.tensor([-2, 258], dtype=torch.int16), 16).tolist() == [0xFE, 0xFF, 0x02, 0x01]
    assert pack_bits(torch.tensor([0x3F800000], dtype=torch.int32), 32).tolist() == [0, 0, 0x80, 0x3F]


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.uint8), (4, torch.int8), (6, torch.uint8)])
def test_every_code_in_every_place(bits, dtype):
    codes = torch.arange(2**bits)
    codes = (codes - 2 ** (bits - 1) if dtype.is_signed else codes).to(dtype)
    for count in range(1, 9):
        rows = codes[:, None].repeat(1, count)
        for place in range(count):
            rows[:, place] = codes.flip(0)
        packed = pack_bits(rows, bits)
        assert packed.shape[-1] == -(-count * bits // 8)
        assert torch.equal(unpack_bits(packed, bits, count, dtype), rows)


def test_a_whole_block_is_stored():
    """A row of 20 stores two blocks of 16; what pads them is code 0, which decodes to zero."""
    fmt = parse("nvfp4")
    packed = fmt.pack(fmt.quantize(state((3, 20))))
    assert packed.codes.shape == (3, 16)
    assert not packed.codes[:, 10:].any()
    assert fmt.stored_bits((3, 20)) == {"codes": 240, "padding": 144, "scales": 48, "global scale": 32}
    assert parse("mxfp6_e2m3").stored_bits((20,)) == {"codes": 120, "padding": 72, "scales": 8}
    assert parse("int4").stored_bits((3, 5)) == {"codes": 60, "padding": 12, "scales": 96}


def test_packed_bytes_are_checked():
    packed = torch.zeros(2, 3, dtype=torch.uint8)
    for wrong in (packed.int(), torch.zeros((), dtype=torch.uint8)):
        with pytest.raises(InputError, match=r"^packed "):
            unpack_bits(wrong, 4, 6, torch.uint8)
    with pytest.raises(InputError, match=r"^count 7: expected a count of 4-bit codes that fills 3 bytes"):
        unpack_bits(packed, 4, 7, torch.uint8)
    with pytest.raises(InputError, match=r"^codes "):
        pack_bits(torch.zeros(3, dtype=torch.int32), 16)
    with pytest.raises(InputError, match=r"^codes "):
        pack_bits(torch.zeros((), dtype=torch.uint8), 4)


@pytest.mark.parametrize("text", [t for t in TEXTS if parse(t).rounded and parse(t).profile is None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_and_infinity(text, dtype):
    """Refused with their place, unless the format has a code; as hardware: Inf saturates, NaN only where it is."""
    fmt, element = parse(text), parse(text).element
    scaled = fmt.row.scaling is not Scaling.NONE
    has_nan = isinstance(element, Element) and element.nan_code is not None and fmt.hadamard is None
    has_infinity = isinstance(element, Element) and element.infinity_code is not None and not scaled
    clean = state((2, 3, 32)).to(dtype)
    for bad, kept in ((math.nan, has_nan), (math.inf, has_infinity), (-math.inf, has_infinity)):
        x = clean.clone()
        x[1, 2, 5] = bad
        if not kept:
            for call in (fmt.quantize, fmt.round):
                with pytest.raises(InputError, match=rf"^x '{bad} at \(1, 2, 5\)': expected numbers that"):
                    call(x)
        value = fmt.round(x, specials="hardware")
        stored = fmt.dequantize(fmt.quantize(x, specials="hardware"))
        assert torch.equal(value.nan_to_num(7.0), stored.nan_to_num(7.0))
        if kept and math.isnan(bad):
            assert value.isnan().nonzero().tolist() == [[1, 2, 5]]
        else:  # a rotation spreads a NaN over its row
            assert not value[[0, 0, 0, 1, 1], [0, 1, 2, 0, 1]].isnan().any()
            assert fmt.hadamard is not None or not value.isnan().any()
        assert torch.equal(value[0], fmt.round(clean)[0]) or fmt.granularity == "tensor"
        if not math.isnan(bad) and fmt.hadamard is None:
            assert math.copysign(1, value[1, 2, 5]) == math.copysign(1, bad)
            assert value[1, 2, 5].abs() == value.abs().max()


@pytest.mark.parametrize("text", [text for text in TEXTS if "+ef" in text])
def test_a_nan_leaves_no_residual(text):
    """Else every later store of that place would be NaN, or zero."""
    fmt, x = parse(text), state((2, 3, 32))
    clean = fmt.quantize(x, specials="hardware")
    x[1, 2, 5] = math.nan
    encoded = fmt.quantize(x, specials="hardware")
    residuals = [e.residual for e in (encoded, clean)]
    form = fmt.residual_format
    value, expected = residuals if form is None else (form.dequantize(r) for r in residuals)
    assert value[1, 2, 5] == 0
    assert torch.equal(value[0], expected[0])
    again = fmt.quantize(state((2, 3, 32)), residual=encoded.residual)
    assert fmt.dequantize(again).isfinite().all()


@pytest.mark.parametrize("text", ["nvfp4+4over6", "nvfp4:row+4over6.mae.448", "nvfp4:tensor+4over6+sr8"])
def test_four_over_six_ignores_nan(text):
    """The neighbours of a NaN are those of a zero in its place, and it is 6 times its scale."""
    fmt, x = parse(text), state((2, 3, 32))
    words = torch.full(x.shape, 77) if fmt.stochastic else None
    x[1, 2, 5] = 0.0
    clean = fmt.quantize(x, words)
    x[1, 2, 5] = math.nan
    found = fmt.quantize(x, words, specials="hardware")
    assert found.codes[1, 2, 5] == 7
    found.codes[1, 2, 5] = clean.codes[1, 2, 5]
    assert_equal(found, clean)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0), (2, 0, 48), (0, 4, 5)])
def test_empty_tensors(text, shape):
    fmt, x = parse(text), torch.zeros(shape)
    encoded = fmt.quantize(x)
    assert fmt.dequantize(encoded).shape == shape
    assert fmt.round(x).shape == shape
    packed = fmt.pack(encoded)
    assert_equal(fmt.unpack(packed), encoded)
    assert map_tensors(encoded, torch.clone).codes.shape == shape


@pytest.mark.parametrize("bits", [0, -3, 9, 12, 31, 65, 4.0, None, True])
def test_widths_that_are_not_packed_right_are_refused(bits):
    with pytest.raises(InputError, match=r"^bits "):
        pack_bits(torch.arange(8), bits)
    with pytest.raises(InputError, match=r"^bits "):
        unpack_bits(torch.zeros(9, dtype=torch.uint8), bits, 8, torch.int64)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_narrow_width_comes_back(bits):
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    assert torch.equal(unpack_bits(pack_bits(codes, bits), bits, len(codes), torch.uint8), codes)


def test_wrong_arguments_of_packing_are_refused():
    codes, packed = torch.arange(8), torch.zeros(4, dtype=torch.uint8)
    for wrong in ([1], None, torch.tensor(1), codes.float(), codes.to(torch.complex64)):
        with pytest.raises(InputError, match=r"^codes "):
            pack_bits(wrong, 4)
    for wrong in ([1], None, torch.zeros(4), torch.tensor(1, dtype=torch.uint8)):
        with pytest.raises(InputError, match=r"^packed "):
            unpack_bits(wrong, 4, 8, torch.uint8)
        with pytest.raises(InputError, match=r"^packed "):
            unpack_nibbles(wrong)
    for count in (7.0, -8, True, None, 9):
        with pytest.raises(InputError, match=r"^count "):
            unpack_bits(packed, 4, count, torch.uint8)
    for dtype in (None, torch.bool, torch.float32, "uint8"):
        with pytest.raises(InputError, match=r"^dtype "):
            unpack_bits(packed, 4, 8, dtype)
    with pytest.raises(InputError, match=r"^dtype "):
        unpack_bits(packed, 8, 4, torch.int16)
    with pytest.raises(InputError, match=r"^codes "):
        pack_nibbles([1])
