"""What a format says of itself is true: the formulas that it prints are evaluated and give the bits that it stores."""

import ast
import math
import re
from functools import lru_cache

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.formats.describe import describe, number_text, scale_values
from quantlab.formats.fused import decode
from quantlab.formats.grammar import choices
from quantlab.formats.nvfp4 import SCALE_ELEMENT
from quantlab.formats.recipe import FUNCTIONS
from quantlab.formats.recipes import profiles_of
from quantlab.formats.rounding import encode_element
from quantlab.formats.table import FORMATS, Element, Scaling

F = np.float32
ALL = [
    text for row in FORMATS.values() for text in (row.name, *(f"{row.name}+as.{p}" for p in profiles_of(row)))
]
PROFILES = [text for text in ALL if "+as." in text]
SCALED = [name for name, row in FORMATS.items() if row.scaling is not Scaling.NONE]
VARIANTS = [
    *PROFILES,
    *(f"{name}+scale.{scale}" for name in SCALED for scale in FORMATS[name].scales),
    *(f"nvfp4:{granularity}" for granularity in FORMATS["nvfp4"].granularities),
    "nvfp4+floor.0",
    "nvfp4+floor.2^-6",
    "nvfp4+scale.ceil+floor.0",
    "nvfp4:none+as.torchao",
    *(f"nvfp4+4over6.{metric}.{top}" for metric in ("mse", "mae", "absmax") for top in (256, 448)),
    *(f"nvfp4+as.{library}+4over6.mae.{top}" for library in ("te", "flashinfer") for top in (256, 448)),
    "nvfp4+as.fouroversix+4over6",
]


def e4m3(z):
    code = encode_element(torch.tensor(float(z)), SCALE_ELEMENT).to(torch.uint8)
    return F(decode(code, SCALE_ELEMENT).item())


def e4m3_up(z):
    table = [F(value) for value in decode(torch.arange(127, dtype=torch.uint8), SCALE_ELEMENT).tolist()]
    return min((value for value in table if value >= z * F(1 - 2.0**-21)), default=F(448))


def power(base, exponent):
    """Exact in float64, rounded once: 2^-149 .. 2^128 and squares of small numbers."""
    return F(float(base) ** float(exponent))


def bits_of(z):
    return int(F(z).view(np.int32))


def exponent_field(z):
    return F((bits_of(z) >> 23) & 0xFF) - F(127)


def round_mantissa(z, n):
    dropped = 23 - int(n)
    return np.int32((bits_of(z) + (1 << (dropped - 1))) >> dropped << dropped).view(F)


NAMES = {
    "E4M3": e4m3,
    "E4M3_up": e4m3_up,
    "clamp": lambda z, low, high: min(max(z, low), high),
    "exponent": lambda z: F(math.frexp(z)[1] - 1) if z > 0 else F(-np.inf),
    "exponent_field": exponent_field,
    "is_power": lambda z: bits_of(z) & 0x7FFFFF == 0,
    "log2f": lambda z: F(np.log2(np.float64(z))),
    "round_mantissa": round_mantissa,
    "MAX": np.finfo(F).max,
}
BUILT_IN = {"abs": abs, "min": min, "max": max, "floor": np.floor, "ceil": np.ceil, "isfinite": np.isfinite}
GLOBALS = {"F": F, "power": power, **NAMES, **BUILT_IN}


class Float32(ast.NodeTransformer):
    """Numbers become float32, ^ a power with one rounding."""

    def visit_Constant(self, node):
        return ast.Call(ast.Name("F", ast.Load()), [node], [])

    def visit_BinOp(self, node):
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow):
            return ast.Call(ast.Name("power", ast.Load()), [node.left, node.right], [])
        return node


@lru_cache
def compiled(expression):
    tree = Float32().visit(ast.parse(expression.replace("^", "**"), mode="eval"))
    return compile(ast.fix_missing_locations(tree), expression, "eval")


def evaluate(expression, names):
    with np.errstate(all="ignore"):
        return F(eval(compiled(expression), GLOBALS, names))


def inputs():
    """Two blocks of 32 of every magnitude that matters, with ties, and a block of zeros beside them."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 32, generator=generator)
    grid = torch.randint(-64, 65, (2, 32), generator=generator) / 16
    zeros = torch.zeros(2, 32)
    return [
        *(normal * 2.0**power for power in (-120, 0, 60)),
        grid.bfloat16().float() * 1.3125,
        torch.cat((normal[:1] * 2.0**-14, normal[1:]), 0),
        torch.cat((zeros[:1], grid[1:]), 0),
    ]


def test_every_function_of_the_formulas_is_explained():
    assert set(FUNCTIONS) == set(NAMES)


@pytest.mark.parametrize("text", VARIANTS)
def test_the_formulas_give_the_stored_bits(text):
    fmt = parse(text)
    assert fmt.recipe is not None
    explanation = fmt.recipe.explain()
    block = {Scaling.MX: 32, Scaling.NVFP4: 16, Scaling.FLOAT32: 32}[fmt.row.scaling]
    seen = 0
    for x in inputs():
        encoded = fmt.quantize(x)
        scales, values = scale_values(fmt, encoded), fmt.dequantize(encoded)
        assert scales is not None
        elements = decode(encoded.codes, fmt.element)
        shared = x.abs().amax().expand(2)
        if fmt.granularity == "row":
            shared = x.abs().amax(1)
        stored = encoded.global_scale
        stored = None if stored is None else stored.flatten().expand(2)
        for row in range(2):
            for start in (0, 32 - block):
                part = x[row, start : start + block]
                names = {"a": F(part.abs().amax()), "A": F(shared[row])}
                names |= {"low": F(part.amin().clamp(max=0)), "high": F(part.amax().clamp(min=0))}
                scale = F(scales[row, start // block])
                for place in (5, int(part.abs().argmax())):
                    column = start + place
                    found = dict(names, x=F(part[place]), c=F(elements[row, column]))
                    for label, formula in explanation.steps:
                        name, expression = formula.split(" = ", 1)
                        if label.startswith("("):
                            found["s"] = scale  # one of two, by an error over the whole block
                            assert any(np.array_equal(found[s], scale, equal_nan=True) for s in ("s4", "s6"))
                        else:
                            found[name] = evaluate(expression, found)
                    where = f"{text}: x {found['x']!r} a {found['a']!r} A {found['A']!r}"
                    assert np.array_equal(found["s"], scale, equal_nan=True), where
                    if stored is not None:
                        assert np.array_equal(found["g"], F(stored[row]), equal_nan=True), where
                    expected = F(values[row, column])
                    assert np.array_equal(found["v"], expected, equal_nan=True), where
                    seen += check_code(fmt, found["q"], found["c"], where)
    assert seen > 30


@lru_cache
def numbers_of(element):
    if not isinstance(element, Element):
        return np.arange(-element.max - 1, element.max + 1)
    width = torch.uint8 if element.bits <= 8 else torch.int16
    table = decode(torch.arange(2**element.bits).to(width), element).double().numpy()
    return table[np.isfinite(table)]


def check_code(fmt, quotient, number, where):
    """The code is one of the nearest to the quotient; which of two is said in words, and tested with the profiles."""
    if not np.isfinite(quotient):
        return 0
    if fmt.profile == "microxcaling.floor":
        assert abs(number) <= abs(quotient), where
        return 1
    error = abs(float(quotient) - float(number))
    # Ties go differently, but their distances are equal.
    assert error <= abs(numbers_of(fmt.element) - float(quotient)).min() or abs(quotient) > fmt.element.max, (
        where
    )
    return 1


@pytest.mark.parametrize("text", ALL)
def test_every_format_and_profile_describes_itself(text):
    sections = {section.title: section.lines for section in describe(text)}
    assert {"Format", "Element", "Arithmetic", "Bits per value at 128 x 128"} <= set(sections)
    assert ("Special inputs" in sections) == parse(text).rounded
    assert ("Library" in sections) == ("+as." in text)
    bits = dict(sections["Bits per value at 128 x 128"])
    total = float(bits["total"].split()[0])
    assert total == pytest.approx(parse(text).bits_per_value((128, 128)), rel=1e-5)  # printed with six digits
    for lines in sections.values():
        assert all(label and text and text.isascii() for label, text in lines)
    # Options that are offered can be taken.
    for _, texts in sections.get("Options", ()):
        for option in texts.split():
            if "<" not in option and not option.startswith((":", "+as.")):
                parse(text + option)


def test_special_inputs_are_what_the_format_does():
    lines = {
        label: words for s in describe("e4m3") if s.title == "Special inputs" for label, words in s.lines
    }
    assert lines["overflow"] == "896 decodes to 448 (code 0x7e)"
    assert lines["Inf"].startswith("refused; with specials hardware: decodes to 448")
    lines = {
        label: words
        for s in describe("nvfp4+as.modelopt")
        if s.title == "Special inputs"
        for label, words in s.lines
    }
    assert lines["zeros only"] == "decodes to NaN (code 0x7, scale NaN)"
    assert lines["block of zeros"] == "decodes to 0 (code 0x0, scale 1), beside 1"


def test_the_rounding_of_the_text_is_in_the_formula():
    def code_of(text):
        return dict(next(s.lines for s in describe(text) if s.title == "Arithmetic"))["code"]

    assert "n = 13" in code_of("fp16+sr13")
    assert "toward zero" in code_of("nvfp4+rz")
    assert code_of("mxfp4+as.modelopt").startswith("c = E2M1(q), nearest, ties to the smaller magnitude")
    assert "floor(q + r / 2^n)" in code_of("int8+sr8")
    assert "stochastic" in code_of("mxfp4+as.modelopt+sr8")


def test_a_component_is_told_apart_from_the_codes():
    sections = {section.title: dict(section.lines) for section in describe("nvfp4+rank2", (64, 128))}
    assert "2 largest singular components" in sections["Arithmetic"]["component"]
    assert sections["Special inputs of the codes"] == next(
        dict(section.lines) for section in describe("nvfp4") if section.title == "Special inputs"
    )
    assert sections["Bits per value at 64 x 128"]["component"] == "0.75"  # 2 x 16 (64 + 128) / (64 x 128)
    assert "component" not in sections["Options"]
    sections = {section.title: dict(section.lines) for section in describe("int8+mean")}
    assert "mean of the value rows" in sections["Arithmetic"]["component"]
    sections = {section.title: dict(section.lines) for section in describe("int8+keyscale")}
    assert "key column" in sections["Arithmetic"]["key scales"]


def test_a_shape_without_sizes_is_refused():
    for shape in ((), (0, 128), (128, -1)):
        with pytest.raises(InputError, match="shape"):
            describe("nvfp4", shape)


def test_choices_name_all_that_the_grammar_takes():
    """A format's own choices parse alone; a word that a format does not offer is refused."""
    words = {
        re.split(r"[.<\[]", text)[0]
        for row in FORMATS.values()
        for kind in choices(row).values()
        for text in kind
    }
    for name, row in FORMATS.items():
        offered = choices(row)
        texts = [text for kind in offered.values() for text in kind if "<" not in text]
        for text in texts:
            parse(name + text)
        taken = {re.split(r"[.<\[]", text)[0] for kind in offered.values() for text in kind}
        for word in words - taken - {"+as", "+scale", "+floor", "+overflow"}:
            if (name, word) == ("nvfp4", ":head"):
                continue  # another word for :matrix
            with pytest.raises(InputError):
                parse(name + word)


@pytest.mark.parametrize("value", [0.1, 65504.0, -0.0, 1e-45, 3.4028235e38, 1 / 3, 2.0**-126])
def test_numbers_read_back(value):
    assert F(number_text(float(F(value)))).tobytes() == F(value).tobytes()
