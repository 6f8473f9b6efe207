"""What the profiles of FP32 scales compute, in formulas, and how each departs from the canonical recipe."""

from quantlab.formats.recipe import Explanation
from quantlab.formats.table import Element, Integer

_SCALE = "scale, float32"
_DIVIDE = (("quotient", "q = x / s"), ("value", "v = c * s"))
_ZERO_GROUP = "A zero group has scale 0 and decodes to NaN (pytorch/ao #4713)."


def explain(library: str, variant: str, element: Element | Integer) -> Explanation:
    """Of a library's profile for an element."""
    return _BUILDERS[library](variant, element)


def _integers(low: int, high: int, ties: str = "to even") -> str:
    return f"nearest, ties {ties}, clamped to {low} .. {high}; NaN becomes 0"


def _torchao(variant: str, element: Element | Integer) -> Explanation:
    source = "torchao/quantization/quant_primitives.py"
    if isinstance(element, Element):
        steps = ((_SCALE, f"s = a / {element.max:g}"), *_DIVIDE)
        name = f"torchao 0.18.0 float8 with row scales, {element.name}"
        return Explanation(steps, "", name, (_ZERO_GROUP,), source)
    high = int(element.max)
    narrow = variant.endswith("_narrow")
    low = -high if narrow else -high - 1
    both = "clipping" in variant
    rule = f"max(low / {low}, high / {high})" if both else f"a / {(high - low) / 2:g}"
    steps = (
        (_SCALE, f"s = max({rule}, 2^-126)"),
        ("quotient", "q = x * (1 / s)"),
        ("value", "v = c * s"),
    )
    mapping = "SYMMETRIC_NO_CLIPPING_ERR" if both else "SYMMETRIC"
    name = f"torchao 0.18.0 {mapping} int{element.bits}, quant_min {low}, quant_max {high}, eps 2^-126"
    differs = ["x is multiplied by the reciprocal of s: ties may go the other way."]
    if not narrow:
        differs.append(f"The code {low} is used.")
    if not narrow and not both:
        differs.append(
            "Both ends lie half a step off: an extreme that is stored again and again shrinks or grows."
        )
    differs.append("A zero group has scale 2^-126 instead of 1.")
    return Explanation(steps, _integers(low, high), name, tuple(differs), source)


def _modelopt(variant: str, element: Element | Integer) -> Explanation:
    source = "modelopt/torch/quantization: qtensor, tensor_quant.py"
    if variant == "eager":
        steps = (
            ("factor", "f = (1 / a if a > 2^-24 else 1) * 448"),
            (_SCALE, "s = 1 / f"),
            ("quotient", "q = x * f"),
            ("value", "v = c * s"),
        )
        differs = ("Rounded twice in 448 / a.", "An a up to 2^-24 counts as 1: such groups become zero.")
        return Explanation(steps, "", "nvidia-modelopt 0.47.0 FP8 fake quantization", differs, source)
    if element.name == "int4":
        steps = (
            ("stored inverse, float32", "s = (1 / a) * 7"),
            ("quotient", "q = x * s"),
            ("value", "v = c / s"),
        )
        differs = (
            "What is stored is the inverse scale, rounded twice.",
            "The library packs code + 8, the even element in the high nibble; quantlab packs as for int4.",
            "A zero group is 0 * Inf: code -8 throughout, which decodes to -0.",
        )
        cast = _integers(-8, 7).replace("NaN becomes 0", "NaN becomes -8")
        return Explanation(steps, cast, "nvidia-modelopt 0.47.0 INT4QTensor", differs, source)
    steps = ((_SCALE, f"s = a / {element.max:g}"), *_DIVIDE)
    if isinstance(element, Integer):
        differs = ("A zero group has scale 0 and decodes to 0.",)
        return Explanation(steps, _integers(-128, 127), "nvidia-modelopt 0.47.0 INT8QTensor", differs, source)
    return Explanation(steps, "", "nvidia-modelopt 0.47.0 FP8QTensor", (_ZERO_GROUP,), source)


def _compressed_tensors(variant: str, element: Element | Integer) -> Explanation:
    integer = isinstance(element, Integer)
    largest = element.max + (0.5 if integer else 0)
    steps = (
        ("amax over half the range", f"t = a / {largest:g}"),
        (_SCALE, "s = t if t != 0 else 2^-23"),
        ("quotient", "q = x / s + 0"),
        ("value", "v = c * s"),
    )
    differs = ["-0 becomes +0 (a zero point is added).", "A scale of zero becomes 2^-23."]
    cast = ""
    if integer:
        low, high = int(-element.max - 1), int(element.max)
        cast = _integers(low, high)
        differs.append(
            f"The code {low} is used; both ends lie half a step off: an extreme that is stored again "
            "and again shrinks or grows."
        )
    name = f"compressed-tensors 0.20.1, {'symmetric int' if integer else 'float'} {element.bits} bits"
    return Explanation(steps, cast, name, tuple(differs), "compressed_tensors/quantization/utils, lifecycle")


def _kernel(library: str, element: Element | Integer) -> Explanation:
    steps = (
        ("encode scale", f"e = {element.max:g} / a if a > 0 else 1"),
        (_SCALE, "s = 1 / e"),
        ("quotient", "q = x * e"),
        ("value", "v = c * s"),
    )
    differs = [
        f"The stored reciprocal is not a / {element.max:g} for more than a quarter of all a, by up to 2 ulp; an "
        "unchanged row that is stored again may change its scale."
    ]
    away = library == "vllm" and isinstance(element, Integer)
    high = int(element.max)
    cast = _integers(-high, high, "away from zero") if away else ""
    if away:
        differs.append(
            "Ties go away from zero (Triton's libdevice.round); the CUDA kernels round them to even."
        )
    names = {
        "flashinfer": "flashinfer 0.6.18 recurrent-state kernels (#2645, #3324)",
        "vllm": "the Triton port of those kernels for vLLM (#40012)",
    }
    return Explanation(
        steps, cast, names[library], tuple(differs), "flashinfer include/flashinfer/mamba; vllm #40012"
    )


_BUILDERS = {
    "torchao": _torchao,
    "modelopt": _modelopt,
    "compressed_tensors": _compressed_tensors,
    "flashinfer": lambda variant, element: _kernel("flashinfer", element),
    "vllm": lambda variant, element: _kernel("vllm", element),
}
