"""Decode step of the depthwise causal convolution in front of a recurrence, as one launch.

The state (B, C, W) has the last W inputs of each channel, oldest first.  A step moves it by one and takes the new
input in; what the convolution gives is the sum of the new state times the channel's W weights.  Where the W values of
a channel fill a word of 4 or 8 bytes (W = 4 in bfloat16), the move is a shift of that word, and neighbouring lanes
load neighbouring words; W = 4 in float32 is a line of 16 bytes a lane.  Other widths are loaded value by value.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import row_arguments, target
from quantlab.kernels.activations import sigmoid
from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened

WORDS = {4: torch.int32, 8: torch.int64}
"""Types of a word by bytes."""


@dataclass(frozen=True)
class Configuration:
    """channels, rows: of one program.  warps: of one program."""

    channels: int
    rows: int
    warps: int


def configuration(batch: int, channels: int, bytes_a_channel: int) -> Configuration:
    """Enough programs for every multiprocessor first, then 16 bytes a lane and weights that several rows share.

    bytes_a_channel: of the state; from 16 on a lane takes one channel, as ``line`` wants it.
    """
    if bytes_a_channel > 8 or batch * channels < 65536:
        return Configuration(64, 1, 2)
    return Configuration(256, 4 if batch >= 32 else 1, 4)


def conv_update(
    conv_state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """One token of a depthwise causal convolution; moves ``conv_state`` by one in place.

    state'_j = state_{j+1} (j < W - 1), state'_{W-1} = x;  y = activation(bias + sum_j weight_j state'_j)

    The sum is formed in float32 and rounded to the model's dtype, and so is the activation of that: what transformers'
    ``causal_conv1d_update`` does (models mamba2, nemotron_h, qwen3_5, kimi_linear and their kin, releases 5.17 and
    5.24), from which the order of the sum may differ.  The state's bits are the same.

    conv_state: (B, C, W), contiguous, float32, bfloat16 or float16, as all others.
    x: (B, C) or (B, C, 1), the channels of a row neighbours; from row to row there may be gaps.
    weight: (C, W), contiguous.  bias: (C,) or None.  activation: "silu", "swish" or None.

    Returns: like ``x``, contiguous.

    Raises:
        InputError: an argument's dtype, shape, device or layout is wrong; names it, and nothing was launched.
    """
    conv_state = row_arguments.batched("conv_state", conv_state, 3)
    batch, channels, taps = _sizes(conv_state)
    device, dtypes = conv_state.device, (conv_state.dtype,)
    row_arguments.whole("conv_state", conv_state, (batch, channels, taps), device)
    single = isinstance(x, Tensor) and x.ndim == 3
    sizes = (batch, channels, 1) if single else (batch, channels)
    stride = row_arguments.rows("x", x, sizes, device, dtypes)
    row_arguments.whole("weight", weight, (channels, taps), device, dtypes)
    if bias is not None:
        row_arguments.whole("bias", bias, (channels,), device, dtypes)
    if activation not in ("silu", "swish", None):
        raise InputError("activation", activation, "'silu', 'swish' or None")
    output = torch.empty(sizes, dtype=x.dtype, device=device)
    if output.numel():
        bytes_a_channel = taps * conv_state.element_size()
        chosen = configuration(batch, channels, bytes_a_channel)
        word = WORDS.get(bytes_a_channel) if taps > 1 and _on_words(conv_state, weight) else None
        state, weights = (t if word is None else t.view(word) for t in (conv_state, weight))
        kernel: Any = conv_update_kernel
        programs = -(-channels // chosen.channels), -(-batch // chosen.rows)
        kernel[programs](
            state,
            x,
            weights,
            bias,
            output,
            batch,
            channels,
            stride,
            W=taps,
            BITS=8 * conv_state.element_size() if word is not None else 0,
            LINE=word is None and taps == 4 and chosen.channels == 32 * chosen.warps,
            SILU=activation is not None,
            BLOCK=chosen.channels,
            ROWS=chosen.rows,
            num_warps=chosen.warps,
            **target.LAUNCH_OPTIONS,
        )
    return output


def _sizes(conv_state: Tensor) -> tuple[int, int, int]:
    if conv_state.ndim != 3 or conv_state.shape[2] < 1:
        raise InputError(
            "conv_state", tuple(conv_state.shape), "shape (batch, channels, width of the convolution)"
        )
    batch, channels, taps = conv_state.shape
    return batch, channels, taps


def _on_words(*tensors: Tensor) -> bool:
    """Whether rows of the last dimension start at words."""
    return all(t.data_ptr() % (t.shape[-1] * t.element_size()) == 0 for t in tensors)


@triton.jit
def conv_update_kernel(
    conv_state, x, weight, bias, output, batch, channels, x_stride,
    W: tl.constexpr, BITS: tl.constexpr, LINE: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of BLOCK channels a program.  BITS: of a value where state and weights are words, else 0."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    model: tl.constexpr = output.dtype.element_ty
    start = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        start = widened(tl.load(bias + channel, mask=inside, other=0))
    if BITS:
        weights = tl.load(weight + channel, mask=inside, other=0)
    elif LINE:
        weights = line(weight, channel, inside, BLOCK)
    for i in tl.static_range(ROWS):
        row = tl.program_id(1).to(tl.int64) * ROWS + i
        here = inside & (row < batch)
        token = tl.load(x + row * x_stride + channel, mask=here, other=0)
        place = row * channels + channel
        total = start
        if BITS:
            total, word = shifted(
                tl.load(conv_state + place, mask=here, other=0), token, weights, total, BITS, W
            )
            tl.store(conv_state + place, word, mask=here)
        elif LINE:
            old, at = line(conv_state, place, here, BLOCK), tl.arange(0, 4)
            total += widened(old[1]) * widened(weights[0]) + widened(old[2]) * widened(weights[1])
            total += widened(old[3]) * widened(weights[2]) + widened(token) * widened(weights[3])
            new = tl.join(tl.join(old[1], old[3]), tl.join(old[2], token))
            # Rows of new are (1, 2), (3, token).
            tl.store(
                conv_state + place[:, None] * 4 + at[None, :], tl.reshape(new, (BLOCK, 4)), mask=here[:, None]
            )
        else:
            for j in tl.static_range(W):
                value = token
                if j < W - 1:
                    value = tl.load(conv_state + place * W + (j + 1), mask=here, other=0)
                tl.store(conv_state + place * W + j, value, mask=here)
                tap = tl.load(weight + channel * W + j, mask=inside, other=0)
                total += widened(value) * widened(tap)
        result = narrowed(total, model)
        if SILU:
            given = widened(result)
            result = narrowed(given * sigmoid(given), model)
        tl.store(output + place, result, mask=here)


@triton.jit
def line(pointer, place, inside, BLOCK: tl.constexpr):
    """The four values of each place, one lane a place."""
    at = place[:, None] * 4 + tl.arange(0, 4)[None, :]
    pairs = tl.reshape(tl.load(pointer + at, mask=inside[:, None], other=0), (BLOCK, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def value_of(word, j: tl.constexpr, BITS: tl.constexpr, model: tl.constexpr):
    """Value j of words, low bits first, as float32."""
    bits = word >> (j * BITS)
    bits = bits.to(tl.uint16) if BITS == 16 else bits.to(tl.uint32)
    return widened(bits.to(model, bitcast=True))


@triton.jit
def shifted(word, token, weights, total, BITS: tl.constexpr, W: tl.constexpr):
    """``total`` plus the sum of the moved values times their weights, and the words moved by one value."""
    unsigned: tl.constexpr = tl.uint64 if BITS * W == 64 else tl.uint32
    bits = token.to(tl.uint16 if BITS == 16 else tl.uint32, bitcast=True).to(unsigned)
    word = (word.to(unsigned, bitcast=True) >> BITS) | (bits << (BITS * (W - 1)))
    weights = weights.to(unsigned, bitcast=True)
    for j in tl.static_range(W):
        total += value_of(word, j, BITS, token.dtype) * value_of(weights, j, BITS, token.dtype)
    return total, word.to(tl.int64 if BITS * W == 64 else tl.int32, bitcast=True)
