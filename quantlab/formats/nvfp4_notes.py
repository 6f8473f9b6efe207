"""What the NVFP4 profiles compute, in formulas, and how each departs from the canonical recipe."""

from dataclasses import dataclass

from quantlab.formats.four_over_six import FourOverSix
from quantlab.formats.recipe import Explanation, largest_scale

_BLOCK = "block scale, E4M3"
_TE_QUOTIENT = "q = x * min(1 / (s * (1 / {0})), MAX)"
_SIXTH = "s = E4M3(g * (a * (1 / 6)))"
_DROPS_SIGN = "nearest, ties to even; -0 becomes code 0; NaN {}"
_NO_CODE = _DROPS_SIGN.format("has no code (255) and decodes to NaN")


@dataclass(frozen=True)
class _Note:
    """Formulas of the global value, the block scale, the quotient and the value, and the rest of an Explanation."""

    shared: tuple[tuple[str, str], ...]
    block: tuple[tuple[str, str], ...]
    quotient: str
    value: str
    cast: str
    reproduces: str
    differs: tuple[str, ...]
    source: str


def _fouroversix(largest: int, full_scale: int) -> _Note:
    return _Note(
        (("global value, float32", "g = A"),),
        ((_BLOCK, f"s = E4M3((a / {largest}) * ({full_scale} / g)) if g > 0 else 0"),),
        f"q = x * (1 / ((1 / ({full_scale} / g)) * s)) if s > 0 else 0",
        f"v = ((c * s) * g) / {full_scale}",
        "nearest, ties to even, not saturating: what rounds to 8 is stored as code 8, that is -0; Inf and NaN "
        "become code 11",
        f"fouroversix 1.0.5, scale rule static_{largest}, PyTorch reference",
        (
            "A code that rounds to 8 is lost: with A = 2688 and a block of +-6*1.4*2^-9, both codes are -0.",
            "No floor: a block whose scale rounds to zero is zero.",
        ),
        "src/fouroversix/quantize/pytorch/reference.py, quantize/backend.py",
    )


_NOTES = {
    "torchao": _Note(
        (("global scale, float32", "g = A / 2688"),),
        ((_BLOCK, "s = E4M3(clamp((a / 6) / g, 2^-6, 448))"),),
        "q = x * ((1 / g) / s)",
        "v = c * (s * g)",
        "nearest, ties to even; NaN becomes code 12",
        "torchao 0.18.0 NVFP4Tensor, with a per-tensor scale or (nvfp4:none) without",
        (
            "The scale floor is 2^-6: blocks below A / 28672 lose precision, what is below A / 688128 is zero.",
            "x is multiplied by a reciprocal: exact ties may round the other way.",
            "A zero tensor decodes to NaN (0 / 0).",
        ),
        "torchao/prototype/mx_formats/nvfp4_tensor.py: nvfp4_quantize, NVFP4Tensor.dequantize",
    ),
    "modelopt": _Note(
        (("global scale, float32 (weight_scale_2)", "g = A / 2688"),),
        (
            ("scale before its cast", "t = a / (6 * g)"),
            (_BLOCK, "s = E4M3(clamp(t if t != 0 else 1, 2^-9, 448))"),
        ),
        "q = x / (s * g)",
        "v = (c + 0) * (s * g)",
        _DROPS_SIGN.format("becomes code 7"),
        "nvidia-modelopt 0.47.0 NVFP4QTensor: hf_quant_config NVFP4 checkpoints",
        (
            "A zero block stores scale 1.0 instead of 0.",
            "A zero tensor decodes to NaN (0 / 0).",
            "Code 8 decodes to +0.",
        ),
        "modelopt/torch/quantization/qtensor/nvfp4_tensor.py: NVFP4QTensor",
    ),
    "compressed_tensors": _Note(
        (
            ("global divisor", "h = 2688 * (1 / max(A, 2^-126))"),
            ("global divisor, float32 (weight_global_scale)", "g = h if isfinite(h) else 1"),
        ),
        (
            ("scale after its cast", "t = E4M3(g * (a / 6))"),
            (_BLOCK, "s = t if t > 0 else 0.125"),
        ),
        "q = x / (s / g)",
        "v = c * (s / g)",
        _DROPS_SIGN.format("becomes code 0"),
        "compressed-tensors 0.20.1: nvfp4-pack-quantized checkpoints, as llm-compressor writes them",
        (
            "The global value is a divisor, rounded twice: 2688 * (1 / A) is not 2688 / A for 25 % of A.",
            "A scale that rounds to zero becomes 0.125, which flattens its block to zero.",
            "From bfloat16 input, 1 / A, its product with 2688 and a / 6 are each rounded to bfloat16, and the "
            "library rounds what it decodes to bfloat16 too.",
        ),
        "compressed_tensors/quantization/utils/helpers.py, quantization/lifecycle/forward_helpers.py",
    ),
    "vllm": _Note(
        (("global factor, float32", "g = 2688 * (1 / A)"),),
        ((_BLOCK, _SIXTH), ("reciprocal", "h = 1 / g if g != 0 else 1e-8")),
        "q = x * (1 / (s * h) if s * h != 0 else 1e-8)",
        "v = c * (s / g)",
        _NO_CODE,
        "vLLM 055e47c ref_nvfp4_quant_dequant (emulation on CPU; the Triton path has other bits)",
        (
            "Reciprocals instead of divisions: ties, and scales near a tie, may go the other way.",
            "No floor: a block whose scale rounds to zero is zero.",
            "A zero tensor decodes to NaN (g = Inf).",
        ),
        "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py",
    ),
    "flashinfer": _Note(
        (("global factor, float32", "g = 2688 * (1 / A) if A > 0 else MAX"),),
        ((_BLOCK, _SIXTH), ("reciprocal", "h = 1 / g if g != 0 else 0")),
        "q = x * (1 / (s * h) if s * h != 0 else 0)",
        "v = c * (s * (1 / g))",
        _NO_CODE,
        "flashinfer fb28d72 ref_fp4_quant with make_nvfp4_global_scale; not the default CUDA kernel (rcp.approx)",
        (
            "Reciprocals instead of divisions: ties, and scales near a tie, may go the other way.",
            "No floor: a block whose scale rounds to zero is zero.",
        ),
        "tests/test_helpers/utils_fp4.py, flashinfer/quantization/nvfp4_quantization_utils.py",
    ),
    "flashinfer.te": _Note(
        (
            ("global factor", "h = min(2688 / A, MAX)"),
            ("global factor, float32", "g = h if h > 0 else 1"),
        ),
        ((_BLOCK, "s = E4M3(a * (g * (1 / 6)))"),),
        _TE_QUOTIENT.format("g"),
        "v = c * (s * (1 / g))",
        _NO_CODE,
        "flashinfer fb28d72 with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1 (ref_fp4_quant_te)",
        (
            "A block whose scale rounds to zero has codes up to +-6 that decode to zero.",
            "1 / (s * (1 / g)) instead of a division: ties may go the other way.",
        ),
        "tests/test_helpers/utils_fp4.py",
    ),
    "te": _Note(
        (
            ("global value, float32", "g = A"),
            ("its encode scale", "h = min(2688 / g, MAX)"),
            ("its encode scale", "S = h if h > 0 else 1"),
        ),
        ((_BLOCK, "s = E4M3(a * (S * (1 / 6)))"),),
        _TE_QUOTIENT.format("S"),
        "v = c * ((s * g) * (1 / 2688))",
        _DROPS_SIGN.format("becomes code 0"),
        "TransformerEngine d0067d0 NVFP4QuantizerRef; recipe NVFP4BlockScaling",
        (
            "A block whose scale rounds to zero has codes up to +-6 that decode to zero (pytorch/ao #4598).",
            "1 / (s * (1 / S)) instead of a division: ties may go the other way.",
        ),
        "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py, common/cast/nvfp4/dequantize_nvfp4.cuh",
    ),
    "fouroversix": _fouroversix(6, 2688),
    "fouroversix.static_4": _fouroversix(4, 1792),
}


def explain(name: str, granularity: str) -> Explanation:
    """Of a profile."""
    note = _NOTES[name]
    shared = (("no global scale", "g = 1"),) if granularity == "none" else note.shared
    steps = (*shared, *note.block, ("quotient", note.quotient), ("value", note.value))
    return Explanation(steps, note.cast, note.reproduces, note.differs, note.source)


_METRICS = {"mse": "the sum of d^2", "mae": "the sum of |d|", "absmax": "the largest |d|"}
_CHOICE_SOURCES = {
    "nvfp4": "arXiv 2512.02010",
    "te": "TransformerEngine d0067d0 NVFP4QuantizerRef with four over six",
    "flashinfer": "flashinfer fb28d72 ref_fp4_quant_4over6_te, per-tensor scale",
    "fouroversix": "fouroversix 1.0.5, scale rules mse, mae and abs_max, PyTorch reference",
}


def explain_four_over_six(rule: FourOverSix) -> Explanation:
    """Of a rule: both candidates, the error that decides, and what follows from the scale chosen."""
    name, full_scale = rule.arithmetic.name, 6 * rule.scale_max
    scale = "(a / 6) * {}"
    if name == "nvfp4":
        limited = f"g = clamp(A / {full_scale}, 2^-149, {largest_scale(448.0, 6.0):.9g}) if A > 0 else 1"
        shared = (("global scale, float32", limited),)
        six, four = (f"max(E4M3(a / ({n} * g)), 2^-9) if a > 0 else 0" for n in (6, 4))
        quotient, value = "q = x / (s * g if s * g > 0 else 1)", "v = c * (s * g)"
        error = "d = c * (s * g) - x"
    elif name == "fouroversix":
        shared = (("global value, float32", "g = A"),)
        factor = scale.format(f"({full_scale} / g)")
        six, four = f"E4M3({factor}) if g > 0 else 0", f"E4M3({factor} * 1.5) if g > 0 else 0"
        quotient = f"q = x * (1 / ((1 / ({full_scale} / g)) * s)) if s > 0 else 0"
        value, error = f"v = ((c * s) * g) / {full_scale}", f"d = ((c * s) * g) / {full_scale} - x"
    else:
        te = name == "te"
        symbol = "S" if te else "g"
        shared = (
            *((("global value, float32", "g = A"),) if te else ()),
            ("encode scale", f"h = min({full_scale} / A, MAX)"),
            ("encode scale" if te else "global factor, float32", f"{symbol} = h if h > 0 else 1"),
        )
        factor = scale.format(symbol)
        six, four = f"E4M3({factor})", f"E4M3({factor} * 1.5)"
        quotient = _TE_QUOTIENT.format(symbol)
        value = f"v = c * ((s * g) * (1 / {full_scale}))" if te else "v = c * (s * (1 / g))"
        error = f"d = ((c * s) * g) / {full_scale} - x" if te else "d = (c * s) * (1 / g) - x"
    order = "i + 8 to i first, then in order" if rule.halves_first else "in order"
    steps = (
        *shared,
        ("scale for 6, E4M3", f"s6 = {six}"),
        ("scale for 4, E4M3", f"s4 = {four}"),
        (
            "(error of a candidate)",
            f"{error}, with nearest codes, over the 16 values: {_METRICS[rule.metric]}, {order}",
        ),
        ("(choice)", "s = s4 if its error is smaller, else s6"),
        ("quotient", quotient),
        ("value", value),
    )
    note = _NOTES.get(name)
    source = _CHOICE_SOURCES[name]
    if note is None:
        return Explanation(steps, source=source)
    differs = [
        "Errors are measured in the library's own order of operations: near ties go the library's way."
    ]
    if name == "fouroversix":
        differs.append("The error counts an 8 that cannot be stored: s6 may win although its codes are lost.")
    else:
        differs.append("The scale is (a / 6) * S here and a * (S / 6) without four over six.")
    return Explanation(steps, note.cast, source, tuple(differs), note.source)
