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
from quantlab.kernels.step_specialisations import Launch, launches
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
    registers: int | None = None
    """The most that a thread may have, where the launch limits it."""
    stages: int | None = None
    """Of pipelined loops, where the launch says it."""
    multiples: frozenset[str] = frozenset()
    """Run-time numbers that are multiples of 16; a launch specialises on them as on pointers."""


def specialisations() -> tuple[Specialisation, ...]:
    """All of them: what decode steps launch under a table of policies; the single read of a dual checkpoint, at the
    corners of its sizes; formats of every element width, scaling and rounding.
    """
    dual_read = (
        # name, heads, groups, value dim, key dim, window, buffer type, token type
        ("mamba2_value_dim_80", 96, 8, 80, 128, 16, "bf16", "bf16"),
        ("odd_sizes", 6, 3, 37, 80, 33, "fp32", "fp32"),
    )
    state = torch.Size((1, 24, 64, 128))
    encodings = (
        # name, format, shape, what is written, dtype of x
        ("fp16_sr13", "fp16+sr13", state, VALUES, torch.float32),
        ("int16_head_sr", "int16:head+sr", state, VALUES, torch.float32),
        ("int4_packed", "int4:block32", state, PACKED, torch.float32),
        ("fp8_reciprocal", "fp8+scale.recip", state, CODES, torch.bfloat16),
        ("nvfp4_packed", "nvfp4", state, PACKED, torch.bfloat16),
        ("mxfp4_packed", "mxfp4", state, PACKED, torch.float32),
    )
    return (
        *(launched(f"step_{launch.name}", launch) for launch in launches()),
        *(_dual_read(*row) for row in dual_read),
        *(_encode(*row) for row in encodings),
        _decode("nvfp4", "nvfp4", state),
        _global_scale("nvfp4", state),
        _random_words(rounds=7),
    )


def compile_for(name: str, capability: int) -> dict[str, Any]:
    """``compiled`` of one of ``specialisations``."""
    return compiled(next(row for row in specialisations() if row.name == name), capability)


def compiled(specialisation: Specialisation, capability: int) -> dict[str, Any]:
    """The ``ptx`` text and ``cubin`` bytes for a compute capability such as 90."""
    arguments = specialisation.kernel.arg_names
    source = ASTSource(
        fn=specialisation.kernel,
        signature={argument: specialisation.types.get(argument, "constexpr") for argument in arguments},
        constexprs=specialisation.constants,
        # Tensors of torch's allocator start at multiples of 16 bytes; a launch specialises on it.
        attrs={
            (arguments.index(argument),): [["tt.divisibility", 16]]
            for argument, kind in specialisation.types.items()
            if kind.startswith("*") or argument in specialisation.multiples
        },
    )
    options = {"num_warps": specialisation.warps, **target.LAUNCH_OPTIONS}
    if specialisation.registers is not None:
        options["maxnreg"] = specialisation.registers
    if specialisation.stages is not None:
        options["num_stages"] = specialisation.stages
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {form: built.asm[form] for form in ("ptx", "cubin")}


def launched(name: str, launch: Launch) -> Specialisation:
    """A recorded launch: tensors and run-time numbers by type, the rest as it is."""
    fixed = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    types: dict[str, str] = {}
    for argument, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            types[argument] = _POINTERS[value.dtype]
        elif argument not in fixed and value is not None:
            types[argument] = "i32"
    constants = {argument: value for argument, value in launch.arguments.items() if argument not in types}
    options = dict(launch.options)
    assert {option: options.pop(option) for option in target.LAUNCH_OPTIONS} == target.LAUNCH_OPTIONS
    warps, registers, stages = (
        options.pop(option, default)
        for option, default in (("num_warps", 4), ("maxnreg", None), ("num_stages", None))
    )
    assert not options, (
        f"{launch.name} is launched with {', '.join(options)}, which the compile does not know"
    )
    return Specialisation(name, launch.kernel, types, constants, warps, registers, stages)


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
