"""The kernel specialisations that must compile for every target, without a GPU."""

from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantlab.kernels import target
from quantlab.kernels.dual_read import constants as dual_read_constants
from quantlab.kernels.dual_read import dual_read_kernel
from quantlab.kernels.dual_read import warps as dual_read_warps
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
    constants: dict[str, int]
    warps: int


def specialisations() -> tuple[Specialisation, ...]:
    """All of them: the shapes of deployed Mamba-2 layers, then the corners of window and key dim."""
    rows = (
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
    return tuple(_dual_read(*row) for row in rows)


def compile_for(name: str, capability: int) -> dict[str, Any]:
    """The ``ptx`` text and ``cubin`` bytes of one specialisation for a compute capability such as 90."""
    specialisation = next(row for row in specialisations() if row.name == name)
    arguments = specialisation.kernel.arg_names
    source = ASTSource(
        fn=specialisation.kernel,
        signature={argument: specialisation.types.get(argument, "constexpr") for argument in arguments},
        constexprs=specialisation.constants,
        # Tensors of torch's allocator start at multiples of 16 bytes; a launch specialises on it.
        attrs={(arguments.index(argument),): [["tt.divisibility", 16]] for argument in specialisation.types},
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
