"""The kernel specialisations that must compile for every target, without a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantlab.formats import Format, parse
from quantlab.formats.fused import code_dtype
from quantlab.formats.rounding import EXACT_BITS
from quantlab.kernels import elements, scaled, target
from quantlab.kernels.dual_read import constants as dual_read_constants
from quantlab.kernels.dual_read import dual_read_kernel
from quantlab.kernels.dual_read import warps as dual_read_warps
from quantlab.kernels.elements import CODES, PACKED, VALUES
from quantlab.kernels.random import COUNTERS, random_words_kernel
from quantlab.schemes.dual_read import DualReadSizes

LIMIT = 40
"""More than this is a sign that a size should be a run-time argument."""


@dataclass(frozen=True)
class Specialisation:
    """One kernel with its compile-time constants and argument types."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Triton's type of each run-time argument, ``*fp32`` for a pointer to float32."""
    constants: dict[str, Any]
    warps: int = 4


def specialisations() -> tuple[Specialisation, ...]:
    """All of them: the shapes of deployed Mamba-2 layers, the corners of window and key dim; then formats of every
    element width, scaling and rounding.
    """
    dual_read = (
        # name, heads, groups, value dim, key dim, window, buffer type, token type
        ("mamba2_1_group", 64, 1, 64, 128, 16, "bf16", "bf16"),
        ("mamba2_8_groups", 64, 8, 64, 128, 16, "bf16", "bf16"),
        ("mamba2_8_groups_fp32", 64, 8, 64, 128, 16, "fp32", "fp32"),
        ("mamba2_128_heads", 128, 8, 64, 128, 16, "bf16", "bf16"),
        ("mamba2_value_dim_80", 96, 8, 80, 128, 16, "bf16", "bf16"),
        ("key_dim_256", 24, 1, 64, 256, 16, "bf16", "fp16"),
        ("key_dim_64", 32, 1, 64, 64, 16, "fp16", "fp32"),
        ("no_window", 64, 8, 64, 128, 0, "fp32", "fp32"),
        ("odd_sizes", 6, 3, 37, 80, 33, "fp32", "fp32"),
    )
    state = torch.Size((1, 24, 64, 128))
    encodings = (
        # name, format, shape, what is written, dtype of x
        ("bf16", "bf16", state, CODES, torch.float32),
        ("fp16_sr13", "fp16+sr13", state, VALUES, torch.float32),
        ("tf32_rz", "tf32+rz", state, CODES, torch.float32),
        ("e4m3_sr", "e4m3+sr", state, CODES, torch.bfloat16),
        ("e3m2", "e3m2", state, VALUES, torch.float16),
        ("int8", "int8", state, CODES, torch.float32),
        ("int16_head_sr", "int16:head+sr", state, VALUES, torch.float32),
        ("int4_packed", "int4:block32", state, PACKED, torch.float32),
        ("fp8_reciprocal", "fp8+scale.recip", state, CODES, torch.bfloat16),
        ("fp8_tile32", "fp8_e5m2:tile32", torch.Size((2, 37, 80)), CODES, torch.float32),
        ("nvfp4", "nvfp4", state, CODES, torch.float32),
        ("nvfp4_packed", "nvfp4", state, PACKED, torch.bfloat16),
        ("nvfp4_sr8", "nvfp4:row+sr8", state, VALUES, torch.float32),
        ("nvfp4_odd_sizes", "nvfp4:none+scale.ceil", torch.Size((3, 37, 75)), PACKED, torch.float32),
        ("mxfp4_packed", "mxfp4", state, PACKED, torch.float32),
        ("mxfp8_sr", "mxfp8_e4m3+scale.floor+sr", state, VALUES, torch.float32),
    )
    decodings = (
        ("e5m2", "e5m2", state),
        ("int16_head", "int16:head", state),
        ("nvfp4", "nvfp4", state),
        ("mxfp8", "mxfp8_e5m2", state),
    )
    return (
        *(_dual_read(*row) for row in dual_read),
        *(_encode(*row) for row in encodings),
        *(_decode(*row) for row in decodings),
        _global_scale("nvfp4", state),
        _random_words(rounds=7),
    )


def compile_for(name: str, capability: int) -> dict[str, Any]:
    """The ``ptx`` text and ``cubin`` bytes of one specialisation for a compute capability such as 90."""
    specialisation = next(row for row in specialisations() if row.name == name)
    arguments = specialisation.kernel.arg_names
    source = ASTSource(
        fn=specialisation.kernel,
        signature={argument: specialisation.types.get(argument, "constexpr") for argument in arguments},
        constexprs=specialisation.constants,
        # Tensors of torch's allocator start at multiples of 16 bytes; a launch specialises on it.
        attrs={
            (arguments.index(argument),): [["tt.divisibility", 16]]
            for argument, kind in specialisation.types.items()
            if kind.startswith("*")
        },
    )
    options = {"num_warps": specialisation.warps, **target.LAUNCH_OPTIONS}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {form: compiled.asm[form] for form in ("ptx", "cubin")}


def _dual_read(
    name: str, heads: int, groups: int, value_dim: int, key_dim: int, window: int, buffer: str, token: str
) -> Specialisation:
    sizes = DualReadSizes(
        batch=1, heads=heads, groups=groups, value_dim=value_dim, key_dim=key_dim, window=window
    )
    types = {"words": "*i32", "scales": "*u8", "global_scale": "*fp32", "cursor": "*i32", "output": "*fp32"}
    types |= dict.fromkeys(("k_buffer", "d_buffer", "log_decay_buffer"), f"*{buffer}")
    types |= dict.fromkeys(("q", "k", "d", "log_decay"), f"*{token}")
    meta = dual_read_constants(sizes)
    return Specialisation(f"dual_read_{name}", dual_read_kernel, types, meta, dual_read_warps(meta))


_POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}


def _specialisation(
    name: str,
    kernel: Any,
    tensors: dict[str, torch.dtype | None],
    numbers: dict[str, str],
    meta: dict[str, Any],
) -> Specialisation:
    """Of pointers to ``tensors``, None for one that is left out, and run-time ``numbers`` of a Triton type."""
    types = {argument: _POINTERS[dtype] for argument, dtype in tensors.items() if dtype is not None}
    absent = {argument: None for argument, dtype in tensors.items() if dtype is None}
    return Specialisation(name, kernel, types | numbers, meta | absent)


def _encode(name: str, text: str, shape: torch.Size, form: Any, dtype: torch.dtype) -> Specialisation:
    fmt = parse(text)
    output = torch.float32 if form is VALUES else torch.uint8 if form is PACKED else code_dtype(fmt.element)
    tensors: dict[str, torch.dtype | None] = {"x": dtype, "output": output}
    tensors["words"] = torch.int64 if fmt.stochastic else None
    kernel = elements.encode_kernel
    if fmt.recipe is None:
        bits = fmt.random_bits or EXACT_BITS
        meta = elements.encode_constants(fmt.element, fmt.rounding, bits, form)
    else:
        tensors |= _scale_tensors(fmt, shape)
        tensors["scales"] = None if form is VALUES else tensors["scales"]
        meta, kernel = scaled.encode_constants(fmt, shape, form), scaled.scaled_encode_kernel
    return _specialisation(f"encode_{name}", kernel, tensors, {"count": "i32"}, meta)


def _decode(name: str, text: str, shape: torch.Size) -> Specialisation:
    fmt = parse(text)
    tensors: dict[str, torch.dtype | None] = {"codes": code_dtype(fmt.element), "output": torch.float32}
    kernel, meta = elements.decode_kernel, elements.decode_constants(fmt.element)
    if fmt.recipe is not None:
        tensors |= _scale_tensors(fmt, shape)
        meta, kernel = scaled.decode_constants(fmt, shape), scaled.scaled_decode_kernel
    return _specialisation(f"decode_{name}", kernel, tensors, {"count": "i32"}, meta)


def _scale_tensors(fmt: Format, shape: torch.Size) -> dict[str, torch.dtype | None]:
    layout = scaled.scale_layout(fmt, shape)
    return {
        "scales": layout.dtype,
        "global_scale": None if layout.global_shape is None else torch.float32,
    }


def _global_scale(name: str, shape: torch.Size) -> Specialisation:
    length = shape[-2] * shape[-1]
    meta = scaled.global_scale_constants(scaled.Spans(length, length, shape.numel() // length))
    tensors: dict[str, torch.dtype | None] = {"x": torch.float32, "output": torch.float32}
    return _specialisation(
        f"global_scale_{name}", scaled.global_scale_kernel, tensors, {"count": "i32"}, meta
    )


def _random_words(rounds: int) -> Specialisation:
    tensors: dict[str, torch.dtype | None] = dict.fromkeys(
        ("store_numbers", "sequence_ids", "output"), torch.int64
    )
    numbers = {"seed": "i64", "stream": "i32", "elements": "i32"}
    meta = {"ROUNDS": rounds, "COUNTERS": COUNTERS}
    return _specialisation("random_words", random_words_kernel, tensors, numbers, meta)
