"""What the MX profiles compute, in formulas, and how each departs from the canonical recipe."""

from quantlab.formats.recipe import Explanation
from quantlab.formats.table import Element

_SOURCES = {
    "torchao": "torchao/prototype/mx_formats/mx_tensor.py",
    "modelopt": "modelopt/torch/quantization/qtensor: mxfp4_tensor.py, mxfp8_tensor.py",
    "compressed_tensors": "compressed_tensors/quantization/utils",
    "fouroversix": "src/fouroversix/quantize/pytorch/reference.py",
    "microxcaling": "mx/mx_ops.py, mx/elemwise_ops.py",
}
_LOGARITHM = "A rounded logarithm: an a one ulp above {} times a large power of two gets half the scale."


def explain(library: str, variant: str, element: Element) -> Explanation:
    """Of a library's profile for an element."""
    exponent, quotient, cast, reproduces, differs = _BUILDERS[library](variant, element)
    steps = (
        ("exponent", f"k = {exponent}"),
        ("scale, E8M0", "s = 2^k"),
        ("quotient", f"q = {quotient}"),
        ("value", "v = c * s"),
    )
    return Explanation(steps, cast, reproduces, differs, _SOURCES[library])


_Note = tuple[str, str, str, str, tuple[str, ...]]


def _torchao(mode: str, element: Element) -> _Note:
    emax = element.max_exponent
    exponents = {
        "floor": f"clamp(exponent_field(a) - {emax}, -127, 128)",
        "ceil": f"clamp(exponent_field(a) + (not is_power(a)) - {emax}, -127, 128)",
        "even": f"clamp(exponent_field(round_mantissa(a, {element.mantissa_bits})) - {emax}, -127, 128)",
        "rceil": f"clamp(ceil(log2f(a / {element.max:g})), -127, 127)",
    }
    differs = [
        "A block with scale byte 0 is divided by 2^-126 and decoded with 2^-127: it is halved.",
        "A block that holds NaN decodes to NaN, its numbers have code 0.",
        "The largest values of float32 decode to Inf.",
    ]
    quotient = "x / 2^max(k, -126)"
    if mode == "rceil":
        differs[0] = "A block with scale byte 0 is not divided at all: it becomes zero."
        differs.append(_LOGARITHM.format(f"{element.max:g}"))
        quotient = "x * 2^(-k) if k > -127 else x"
    reproduces = f"torchao 0.18.0 MX tensors, ScaleCalculationMode.{mode.upper()}"
    return exponents[mode], quotient, "", reproduces, tuple(differs)


def _modelopt(variant: str, element: Element) -> _Note:
    if element.name == "e2m1":
        return (
            "ceil(max(log2f(a / 6), -127))",
            "x / 2^k",
            "nearest, ties to the smaller magnitude; +0, -0 and NaN become code 8 (-0)",
            "nvidia-modelopt 0.47.0 MXFP4QTensor",
            (
                "Ties go down: 0.75 -> 0.5, 1.75 -> 1.5, 3.5 -> 3.",
                "Zeros of either sign have code 8; Inf or NaN zeroes its block.",
                _LOGARITHM.format("6"),
            ),
        )
    return (
        "clamp(ceil(log2f(a / 448)), -127, 127)",
        "x * 2^(-k)",
        "",
        "nvidia-modelopt 0.47.0 MXFP8QTensor",
        (_LOGARITHM.format("448"), "A block with NaN has scale byte 0; the NaN keeps its code."),
    )


def _compressed_tensors(variant: str, element: Element) -> _Note:
    scheme = {"e2m1": "MXFP4", "e2m3": "MXFP6A16", "e4m3": "MXFP8"}[element.name]
    bits = 3 if element.name == "e2m3" else 1
    differs = [
        "-0 becomes +0 (a zero point is added).",
        "An a that rounds to 2^128, or Inf, stores byte 0xFF, used as the number 2^128: the block becomes NaN.",
    ]
    if element.name == "e4m3":
        differs.append("The scale doubles from 1.75 * 2^n on, that is at 448 itself.")
    exponent = f"clamp(exponent_field(round_mantissa(a, {bits})) - {element.max_exponent}, -127, 128)"
    return exponent, "x / 2^k + 0", "", f"compressed-tensors 0.20.1 {scheme}", tuple(differs)


def _fouroversix(rule: str, element: Element) -> _Note:
    largest = rule.removeprefix("static_")
    return (
        f"exponent_field(a / {largest}) + (not is_power(a / {largest}))",
        "x / 2^k if k > -127 else x / 0",
        "nearest, ties to even; -0 becomes +0; Inf and NaN become code 11",
        f"fouroversix 1.0.5 mxfp4, scale rule {rule}",
        (
            "A zero block is 0 / 0: scale byte 0, all codes 11 (-1.5).",
            "A subnormal a / " + largest + " gets byte 1, 2^-126, not byte 0.",
            "Inf has scale byte 255; NaN wraps to byte 0.",
        ),
    )


_MICROXCALING_CASTS = {
    "nearest": "nearest, ties away from zero",
    "even": "floor(|q| + 0.5) with ties to even, which rounds twice: 0.24999999 -> 0.5 in E2M1",
    "floor": "toward zero",
}


def _microxcaling(rounding: str, element: Element) -> _Note:
    return (
        f"max(floor(log2f(a if a > 0 else 2^-126)) - {element.max_exponent}, -127)",
        "x / 2^k",
        f"{_MICROXCALING_CASTS[rounding]}; -0 becomes +0, a negative that rounds to zero -0",
        f'microxcaling 7bc4195, round="{rounding}"',
        (
            "An a just below a power of two counts as that power: the scale is twice as large.",
            "A scale exponent above 127 makes the block NaN.",
            "The library stores no bits: codes and bytes are those of the numbers that it returns.",
        ),
    )


_BUILDERS = {
    "torchao": _torchao,
    "modelopt": _modelopt,
    "compressed_tensors": _compressed_tensors,
    "fouroversix": _fouroversix,
    "microxcaling": _microxcaling,
}
