"""What the kernels around a recurrence launch for layers of published models, recorded without memory, and compiled."""

import unittest.mock
from dataclasses import replace
from typing import Any

import torch

from quantlab.kernels import row_arguments
from quantlab.kernels.conv_update import conv_update
from quantlab.kernels.gated_norm import gated_norm
from quantlab.kernels.specialisations import compiled, launched
from quantlab.kernels.step_inputs import gated_delta_inputs, kimi_delta_inputs, mamba2_inputs
from quantlab.kernels.step_specialisations import recorded

BF16, FP32 = torch.bfloat16, torch.float32


def tensor(*sizes, dtype=BF16):
    return torch.empty(sizes, dtype=dtype, device="meta")


def columns(batch, width, *parts):
    """Neighbouring columns of one wide matrix."""
    return tensor(batch, width).split(parts, dim=1)


def mamba2_layer(batch):
    """Nemotron 3 Nano 4B: 96 heads of 80, 8 groups of 128."""
    gate, conv, dt = columns(batch, 17504, 7680, 9728, 96)
    x, b, c = columns(batch, 9728, 7680, 1024, 1024)
    return gate, conv, dt, x.view(batch, 96, 80), b.view(batch, 8, 128), c.view(batch, 8, 128)


def conv(batch, dtype=BF16, taps=4):
    x = mamba2_layer(batch)[1].to(dtype)
    weight, bias = tensor(9728, taps, dtype=dtype), tensor(9728, dtype=dtype)
    conv_update(tensor(batch, 9728, taps, dtype=dtype), x, weight, bias, "silu")


def mamba2_norm(batch, group_size=960, y=BF16):
    gate, _, _, x, _, _ = mamba2_layer(batch)
    gated_norm(tensor(batch, 7680, dtype=y), gate, tensor(7680), 1e-5, group_size, False, D=tensor(96), x=x)


def mamba2(batch):
    _, _, dt, x, b, c = mamba2_layer(batch)
    mamba2_inputs(x, dt, b, c, tensor(96), A_log=tensor(96))


def delta_norm(batch, **options):
    y = tensor(batch, 32, 128)
    gated_norm(y, y, tensor(128), 1e-6, 128, True, **options)


def delta(batch, function=gated_delta_inputs, key_heads=16, by_channel=False):
    width = 128 * (2 * key_heads + 32)
    query, key, value = columns(batch, width, 128 * key_heads, 128 * key_heads, 128 * 32)
    query, key, value = (t.view(batch, -1, 128) for t in (query, key, value))
    gate, bias = (tensor(batch, 32, 128), 4096) if by_channel else (tensor(batch, 32), 32)
    function(query, key, value, gate, tensor(batch, 32), tensor(32, dtype=FP32), tensor(bias, dtype=FP32))


CASES: dict[str, Any] = {
    "conv": lambda: conv(256),
    "conv_one_row": lambda: conv(1),
    "conv_float32": lambda: conv(256, FP32),
    "conv_width_3": lambda: conv(8, BF16, 3),
    "conv_width_2": lambda: conv(256, BF16, 2),
    "mamba2_norm": lambda: mamba2_norm(256),
    "mamba2_norm_float32_output": lambda: mamba2_norm(256, y=FP32),
    "mamba2_norm_full_width": lambda: mamba2_norm(1, 7680),
    "mamba2_inputs": lambda: mamba2(256),
    "mamba2_inputs_one_row": lambda: mamba2(1),
    "gated_delta_norm": lambda: delta_norm(256),
    "kimi_delta_norm": lambda: delta_norm(1, activation="sigmoid", rounds_norm=False),
    "gated_delta_inputs": lambda: delta(256),
    "kimi_delta_inputs": lambda: delta(256, kimi_delta_inputs, 32, True),
}


def launch_of(name):
    """The one launch of a case."""
    with unittest.mock.patch.object(row_arguments, "runs_here"):
        (found,) = recorded(CASES[name])
    return found


def compile_case(name: str, capability: int) -> dict[str, Any]:
    """``ptx`` and ``cubin`` of a case, with strides that are multiples of 16 as a launch would have them."""
    launch = launch_of(name)
    found = launched(name, launch)
    multiples = frozenset(
        argument
        for argument, kind in found.types.items()
        if kind == "i32" and launch.arguments[argument] % 16 == 0
    )
    return compiled(replace(found, multiples=multiples), capability)
