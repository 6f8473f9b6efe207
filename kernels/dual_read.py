"""Triton kernel of ``quantlab.schemes.dual_read``, which defines the arguments and the mathematics.

One program serves one head of one sequence and a tile of its value rows.  The read copy is loaded as 32-bit
words of eight codes of one row; each of the eight positions is one tile, so no lane shuffles data.  An
element is never decoded to its value: the block scale, the global scale and the decay multiply partial sums.
"""

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import target
from quantlab.kernels.decode import e2m1, e4m3
from quantlab.schemes.dual_read import BLOCK, DualReadSizes, check_arguments, describe

TUNING_VARIABLE = "QUANTLAB_AUTOTUNE"
"""Environment variable: 1 lets Triton time the launch configurations.  Off by default, since the tile shape
decides the order of the sums and so the last bits."""

HALF_UNIT: tl.constexpr = tl.constexpr(2.0**63)
"""Two of these undo the ``2**-126`` that ``e2m1`` leaves in: one on the query, one on the sum."""


def launch_metadata(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """What a profiler's launch hook shows of a call, from the kernel's arguments by name."""
    sizes = DualReadSizes(
        batch=args["cursor"].shape[0],
        heads=args["H"],
        groups=args["G"],
        value_dim=args["V"],
        key_dim=args["K"],
        window=args["L"],
    )
    # Asking how many records are live would wait for the device, so a profiler is told of full windows.
    records = sizes.batch * sizes.window
    buffer_bytes, token_bytes = args["k_buffer"].element_size(), args["q"].element_size()
    moved = bytes_moved(sizes, records, buffer_itemsize=buffer_bytes, token_itemsize=token_bytes)
    return {
        "name": f"dual_read_H{sizes.heads}_V{sizes.value_dim}_K{sizes.key_dim}_L{sizes.window}",
        "bytes": moved,
    }


@triton.jit(launch_metadata=launch_metadata)
def dual_read_kernel(
    words,
    scales,
    global_scale,
    k_buffer,
    d_buffer,
    log_decay_buffer,
    cursor,
    q,
    k,
    d,
    log_decay,
    output,
    L: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    head_row = tl.program_id(0).to(tl.int64)
    b = head_row // H
    h = head_row % H
    group_row = b * G + h // (H // G)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v_mask = v < V
    state_row = head_row * V + v

    # A word holds 8 codes, a scale serves 16, that is 2 words.
    w = tl.arange(0, BLOCK_W)
    w_mask = w < K // 8
    tile_mask = v_mask[:, None] & w_mask[None, :]
    word_at = state_row[:, None] * (K // 8) + w[None, :]
    tile = tl.load(words + word_at, mask=tile_mask, other=0).to(tl.uint32, bitcast=True)
    sums = tl.zeros((BLOCK_V, BLOCK_W), dtype=tl.float32)
    for position in tl.static_range(8):
        q_part = tl.load(q + group_row * K + w * 8 + position, mask=w_mask, other=0).to(tl.float32)
        sums += e2m1(tile, position) * (q_part * HALF_UNIT)[None, :]
    scale_at = state_row[:, None] * (K // 16) + (w // 2)[None, :]
    sums *= e4m3(tl.load(scales + scale_at, mask=tile_mask, other=0))
    copy_read = tl.sum(sums, axis=1) * HALF_UNIT

    key = tl.arange(0, BLOCK_K)
    key_mask = key < K
    query = tl.load(q + group_row * K + key, mask=key_mask, other=0).to(tl.float32)
    current_key = tl.load(k + group_row * K + key, mask=key_mask, other=0).to(tl.float32)
    current_d = tl.load(d + state_row, mask=v_mask, other=0).to(tl.float32)
    current_log_decay = tl.load(log_decay + head_row).to(tl.float32)

    # Rows from the cursor on are undefined memory: masked loads, never a product with zero, keep a NaN there
    # out.
    j = tl.arange(0, BLOCK_L)
    record = b * L + j
    live_count = tl.minimum(tl.load(cursor + b), L)
    live = j < live_count
    log_decays = tl.load(log_decay_buffer + record * H + h, mask=live, other=0).to(tl.float32)
    next_live = j + 1 < live_count
    later = tl.load(log_decay_buffer + (record + 1) * H + h, mask=next_live, other=0).to(tl.float32)
    later = tl.where(j + 1 == live_count, current_log_decay, later)
    weights = tl.exp(tl.cumsum(later, axis=0, reverse=True))
    total_decay = tl.exp(tl.sum(log_decays, axis=0) + current_log_decay)

    k_at = (record * G + h // (H // G))[:, None] * K + key[None, :]
    keys = tl.load(k_buffer + k_at, mask=live[:, None] & key_mask[None, :], other=0).to(tl.float32)
    match = tl.sum(keys * query[None, :], axis=1)
    d_at = (record * H + h)[:, None] * V + v[None, :]
    values = tl.load(d_buffer + d_at, mask=live[:, None] & v_mask[None, :], other=0).to(tl.float32)

    result = copy_read * (total_decay * tl.load(global_scale + head_row))
    result += tl.sum(values * (weights * match)[:, None], axis=0)
    result += current_d * tl.sum(current_key * query, axis=0)
    tl.store(output + state_row, result, mask=v_mask)


def dual_read(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    k_buffer: Tensor,
    d_buffer: Tensor,
    log_decay_buffer: Tensor,
    cursor: Tensor,
    q: Tensor,
    k: Tensor,
    d: Tensor,
    log_decay: Tensor,
) -> Tensor:
    """Output ``(B, H, V)`` float32 of one decoded token; see ``quantlab.schemes.dual_read`` for the
    arguments.

    Beyond that contract every tensor is contiguous, on one device, not float64, and ``codes`` starts at a
    multiple of four bytes.  Nothing is copied to make it so.

    Raises:
        InputError: an argument breaks the contract; names it, what it is and what was expected.
    """
    stored = {"codes": codes, "scales": scales, "global_scale": global_scale, "cursor": cursor}
    buffers = {"k_buffer": k_buffer, "d_buffer": d_buffer, "log_decay_buffer": log_decay_buffer}
    arguments = {**stored, **buffers, "q": q, "k": k, "d": d, "log_decay": log_decay}
    sizes = check_arguments(**arguments)
    _check_memory(**arguments)
    output = torch.empty(
        (sizes.batch, sizes.heads, sizes.value_dim), dtype=torch.float32, device=codes.device
    )
    if output.numel() == 0:
        return output
    pointers = {**arguments, "words": codes.view(torch.int32), "output": output}
    del pointers["codes"]
    meta = constants(sizes)

    def grid(args):
        return sizes.batch * sizes.heads, triton.cdiv(sizes.value_dim, args["BLOCK_V"])

    if os.environ.get(TUNING_VARIABLE) == "1" and not target.interpreting():
        del meta["BLOCK_V"]
        _tuned_kernel()[grid](**pointers, **meta, **target.LAUNCH_OPTIONS)
    else:
        kernel: Any = dual_read_kernel
        kernel[grid](**pointers, **meta, num_warps=warps(meta), **target.LAUNCH_OPTIONS)
    return output


def constants(sizes: DualReadSizes) -> dict[str, int]:
    """The kernel's compile-time sizes.  Rows of the value dim are tiled so that 80 wastes no lane."""
    tile = next((rows for rows in (64, 32, 16) if sizes.value_dim % rows == 0), 16)

    def padded(size: int) -> int:
        return 1 << max(size - 1, 0).bit_length()

    return {
        "L": sizes.window,
        "H": sizes.heads,
        "G": sizes.groups,
        "V": sizes.value_dim,
        "K": sizes.key_dim,
        "BLOCK_L": padded(sizes.window),
        "BLOCK_V": min(tile, padded(sizes.value_dim)),
        "BLOCK_K": padded(sizes.key_dim),
        "BLOCK_W": padded(sizes.key_dim // 8),
    }


def warps(meta: dict[str, int]) -> int:
    """One warp per program keeps the sums inside it; more only where the window's keys would not fit its
    registers.
    """
    return min(8, max(1, meta["BLOCK_L"] * meta["BLOCK_K"] // 2048))


def bytes_moved(sizes: DualReadSizes, records: int, *, buffer_itemsize: int, token_itemsize: int) -> int:
    """Bytes that one call must read and write at least.

    Args:
        records: live records of the window, summed over the batch.
        buffer_itemsize, token_itemsize: bytes of one number in the buffers (k, d, log decay alike) and in the
        token.
    """
    key_values = sizes.groups * sizes.key_dim
    head_values = sizes.heads * sizes.value_dim
    copy = head_values * sizes.key_dim // 2 + head_values * sizes.key_dim // BLOCK + 4 * sizes.heads
    record = (key_values + head_values + sizes.heads) * buffer_itemsize
    token = (2 * key_values + head_values + sizes.heads) * token_itemsize
    cursor, output = 4, 4 * head_values
    return sizes.batch * (copy + token + cursor + output) + records * record


@functools.cache
def _tuned_kernel():
    configs = [triton.Config({"BLOCK_V": rows}, num_warps=n) for rows in (16, 32, 64) for n in (1, 2)]
    return triton.autotune(configs, key=["L", "H", "G", "V", "K"])(dual_read_kernel)


def _check_memory(**tensors: Tensor) -> None:
    codes = tensors["codes"]
    for name, tensor in tensors.items():
        if tensor.device != codes.device:
            raise InputError(
                name, f"{describe(tensor)} on {tensor.device}", f"a tensor on {codes.device} like codes"
            )
        if not tensor.is_contiguous():
            raise InputError(
                name, f"{describe(tensor)} with strides {tensor.stride()}", "a contiguous tensor"
            )
        if tensor.dtype == torch.float64:
            raise InputError(
                name, describe(tensor), "float32, bfloat16 or float16 (the kernel computes in float32)"
            )
    if codes.data_ptr() % 4:
        raise InputError(
            "codes", f"{describe(codes)} at offset {codes.storage_offset()}", "4-byte aligned memory"
        )
    reason = target.obstacle(codes.device)
    if reason is not None:
        raise InputError(
            "codes", f"{describe(codes)} on {codes.device}", f"a device that runs kernels: {reason}"
        )
