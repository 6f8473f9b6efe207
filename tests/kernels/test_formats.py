"""The formats' Triton twins against their definitions, bit for bit, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.formats.storage import Encoded
from quantlab.formats.table import ELEMENTS, FORMATS, Element, Overflow
from quantlab.kernels import formats, random
from quantlab.testing import in_triton_process
from quantlab.testing.formats import (
    ELEMENT_CASES,
    FORMAT_CASES,
    IMPLEMENTATIONS,
    check_element,
    check_format,
    check_random_words,
    philox_4x32,
)

PHILOX = Path(__file__).resolve().parents[1] / "data/golden/philox.json"


# What the interpreter has in the slow tier: each value of each choice is in another case, and in the fast tier.
SLOW_ELEMENTS = {"e5m2_overflow_infinity", "fp16_saturate", "bf16_saturate"}
SLOW_FORMATS = {
    *("nvfp4:row", "nvfp4+sr", "nvfp4+rz", "nvfp4+floor.0", "int8:row+scale.recip", "int8:block32+sr"),
    *("int4:row+sr8", "fp8:tile32+rz"),
}


def jobs(cases, slow):
    return [
        pytest.param(i, case, marks=pytest.mark.slow if i == "interpreter" and case in slow else ())
        for i in IMPLEMENTATIONS
        for case in cases
    ]


@pytest.mark.parametrize(
    ("implementation", "name"), jobs(ELEMENT_CASES, SLOW_ELEMENTS), indirect=["implementation"]
)
def test_an_element(implementation, name):
    check_element(name, implementation)


@pytest.mark.parametrize(
    ("implementation", "text"), jobs(FORMAT_CASES, SLOW_FORMATS), indirect=["implementation"]
)
def test_a_format(implementation, text):
    check_format(text, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_random_words(implementation):
    check_random_words(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_known_answers_of_philox(implementation):
    vectors = json.loads(PHILOX.read_text())["vectors"]
    assert {vector["rounds"] for vector in vectors} >= {5, 7, 10}
    for vector in vectors:
        seed, offsets = vector["seed"], torch.tensor(vector["offsets"])
        zeros = torch.zeros_like(offsets)
        counter = torch.stack([offsets & 0xFFFFFFFF, offsets >> 32, zeros, zeros], dim=-1)
        key = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        expected = torch.tensor([[int(word, 16) for word in words] for words in vector["words"]])
        assert torch.equal(philox_4x32(counter, key, vector["rounds"], implementation), expected)


@pytest.mark.parametrize("slow", [(), (*SLOW_ELEMENTS, *SLOW_FORMATS)], ids=["whole", "fast"])
def test_the_suite_covers_the_table(slow):
    assert set(slow) <= {*ELEMENT_CASES, *FORMAT_CASES}
    elements = {name: element for name, element in ELEMENT_CASES.items() if name not in slow}
    assert set(ELEMENTS) - {"fp32", "fp64"} <= set(elements)
    overflows = {element.overflow for element in elements.values() if isinstance(element, Element)}
    assert overflows == set(Overflow)
    cases = [parse(text) for text in FORMAT_CASES if text not in slow]
    scaled = {row.name for row in FORMATS.values() if row.scaling.value != "none"}
    assert scaled <= {case.name for case in cases}
    for choice in ("granularities", "scales"):
        offered = {option for row in FORMATS.values() for option in getattr(row, choice)}
        default = {getattr(case.row, choice)[0] for case in cases if getattr(case.row, choice)}
        taken = default | {case.granularity for case in cases} | {case.scale for case in cases}
        assert offered <= taken | {"240.recip"}, choice
    assert {case.rounding.value for case in cases} == {"nearest", "toward zero", "stochastic"}


NOT_SERVED = (
    *("nvfp4+as.torchao", "nvfp4+4over6", "mxfp4+as.torchao", "nvfp4+rank2", "int8+mean", "nvfp4+keyscale"),
    *("int8+hadamard", "int8+ef", "fp64"),
)


@pytest.mark.parametrize("text", NOT_SERVED)
def test_a_format_without_a_kernel_is_refused(text):
    fmt, x = parse(text), torch.ones(2, 16)
    with pytest.raises(InputError, match=r"^fmt .*expected a format that a kernel serves: "):
        formats.quantize(fmt, x)
    with pytest.raises(InputError, match=r"^fmt .*expected a format that a kernel serves: "):
        formats.dequantize(fmt, Encoded(x))
    with pytest.raises(InputError, match=r"^fmt .*expected a format that a kernel serves: "):
        formats.round(fmt, x)


WORDS = torch.zeros(2, 16, dtype=torch.int64)
BAD_INPUT = {
    "no tensor": ("nvfp4", [1.0], None),
    "integers": ("nvfp4", torch.ones(2, 16, dtype=torch.int32), None),
    "a scalar": ("e4m3", torch.tensor(1.0), None),
    "words for nearest": ("e4m3", torch.ones(2, 16), WORDS),
    "no words": ("e4m3+sr", torch.ones(2, 16), None),
    "words of another shape": ("e4m3+sr", torch.ones(2, 16), WORDS[:1]),
    "int32 words": ("e4m3+sr", torch.ones(2, 16), WORDS.int()),
    "NaN": ("int8", torch.tensor([[0.0, 1.0, torch.nan]]), None),
    "Inf": ("nvfp4", torch.tensor([[0.0, torch.inf]], dtype=torch.float16), None),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_raises_what_the_format_raises(case):
    text, x, words = BAD_INPUT[case]
    fmt = parse(text)
    with pytest.raises(InputError) as expected:
        fmt.quantize(x, words)
    for function in (formats.quantize, formats.round):
        with pytest.raises(InputError) as refused:
            function(fmt, x, words)
        assert str(refused.value) == str(expected.value)


def test_what_only_a_kernel_refuses():
    x = torch.ones(4, 16)
    with pytest.raises(InputError, match=r"^x 'float64 .*expected float32, float16 or bfloat16"):
        formats.quantize(parse("nvfp4"), x.double())
    with pytest.raises(InputError, match=r"^x .*strides \(1, 16\).*expected a contiguous tensor"):
        formats.round(parse("nvfp4"), torch.ones(16, 16).T)
    with pytest.raises(InputError, match=r"^random_bits .*strides .*expected a contiguous tensor"):
        formats.quantize(parse("e4m3+sr"), x, torch.zeros(16, 4, dtype=torch.int64).T)
    for text in ("int8", "int4:head", "e2m1"):
        with pytest.raises(InputError, match=r"^fmt .*4-bit elements with scales within a value row"):
            formats.quantize_packed(parse(text), x)


def test_stored_tensors_that_do_not_fit_are_refused():
    fmt = parse("nvfp4")
    stored = fmt.quantize(torch.ones(2, 3, 40))
    assert stored.scales is not None
    assert stored.global_scale is not None
    broken = {
        "codes": Encoded(stored.codes.int(), stored.scales, stored.global_scale),
        "scales": Encoded(stored.codes, stored.scales[..., :2], stored.global_scale),
        "global_scale": Encoded(stored.codes, stored.scales, None),
    }
    in_place = {part: f"^encoded.{part} .*expected contiguous torch" for part in broken}
    for part, encoded in broken.items():
        with pytest.raises(InputError, match=in_place[part]):
            in_triton_process(formats.dequantize, fmt, encoded, interpret=True)


def test_a_device_without_kernels_is_refused():
    x, words = torch.ones(2, 16), torch.zeros(1, dtype=torch.int64)
    calls = {
        "x": (formats.quantize, parse("nvfp4"), x),
        "encoded.codes": (formats.dequantize, parse("nvfp4"), parse("nvfp4").quantize(x)),
        "counter": (random.philox_4x32, torch.zeros(1, 4, dtype=torch.int64), (0, 0)),
        "store_numbers": (random.random_words, (1, 1, 1, 4), 0, words, words, 0, 0),
    }
    for name, (function, *arguments) in calls.items():
        with pytest.raises(InputError, match=rf"^{name} .*a device that runs kernels: .*TRITON_INTERPRET=1"):
            in_triton_process(function, *arguments, interpret=False)


def test_empty_tensors_pass():
    for shape in ((0, 16), (2, 0), (0,)):
        x = torch.ones(shape)
        for text in ("nvfp4", "int8:head", "e4m3", "mxfp4"):
            fmt = parse(text)
            expected, got = fmt.quantize(x), in_triton_process(formats.quantize, fmt, x, interpret=True)
            for part in ("codes", "scales", "global_scale"):
                ours, theirs = getattr(expected, part), getattr(got, part)
                assert (ours is None) == (theirs is None)
                assert ours is None or (ours.shape == theirs.shape and ours.dtype == theirs.dtype)


def test_text_for_a_format_and_tensors_for_what_is_stored_are_refused():
    x = torch.ones(2, 16)
    for function in (formats.quantize, formats.quantize_packed, formats.round, formats.dequantize):
        with pytest.raises(InputError, match=r"^fmt 'nvfp4': expected a Format"):
            function("nvfp4", x)
    fmt = parse("nvfp4")
    stored = fmt.quantize(x)
    for wrong in (None, x):
        with pytest.raises(InputError, match=r"^encoded .*an Encoded of nvfp4"):
            formats.dequantize(fmt, wrong)
    with pytest.raises(InputError, match=r"^encoded\.codes "):
        formats.dequantize(fmt, Encoded(stored.codes[0, 0], stored.scales, stored.global_scale))


@pytest.mark.parametrize("rounds", [0, -1, True])
def test_words_of_less_than_a_round_are_refused(rounds):
    """They would be the counters themselves."""
    words = torch.zeros(1, dtype=torch.int64)
    arguments = (1, 1, 1, 4), 0, words, words, 0, 0, rounds
    with pytest.raises(InputError, match=r"^rounds "):
        in_triton_process(random.random_words, *arguments, interpret=True)
