"""Read a Mamba-2 state that is stored as an NVFP4 read copy and a window of recent records.

This is the readable truth; ``quantlab.kernels.dual_read`` holds the Triton kernel, same name and signature.

The logical state is never formed.  With ``a_i`` the log decay of record i, ``n`` records in the window and
the current token last, unrolling ``S <- exp(a) S + d k^T`` and reading ``S q`` gives::

    o = exp(a_1 + ... + a_n + a) decode(copy) q
        + sum_j exp(a_{j+1} + ... + a_n + a) d_j (k_j . q)
        + d (k . q)

The decay since record j is summed over the later records themselves.  A difference of two cumulative sums
would be the same number on paper, but it cancels, and it is NaN as soon as one decay is zero (a = -inf).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded, parse, unpack_nibbles

NVFP4 = parse("nvfp4")

BLOCK = NVFP4.row.block
"""Elements of the key dim that share one E4M3 scale."""

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DualReadSizes:
    """The sizes of one call, read from the arguments' shapes."""

    batch: int
    heads: int
    groups: int
    value_dim: int
    key_dim: int
    window: int


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
    """Output ``(B, H, V)`` of one decoded token; nothing is written.

    Args:
        codes: uint8 ``(B, H, V, K/2)``, two E2M1 codes a byte, the low nibble is the even element.
        scales: uint8 ``(B, H, V, K/16)``, E4M3 bytes; a zero scale decodes its block to zero.
        global_scale: float32 ``(B, H)``; an element is ``code * (scale * global_scale)``.
        k_buffer, d_buffer, log_decay_buffer: ``(B, L, G, K)``, ``(B, L, H, V)``, ``(B, L, H)``, oldest first.
            Rows ``j >= cursor[b]`` are undefined memory and are never used, whatever they hold.
        cursor: int32 ``(B,)``, records in the window, 0 to L.
        q, k: ``(B, G, K)``; head h uses group ``h // (H // G)``.
        d: ``(B, H, V)``, the current token's value (Mamba-2: dt * x), unrounded.
        log_decay: ``(B, H)``, the current token's log decay.

    Floating arguments other than ``global_scale`` are float32, bfloat16 or float16.  Arithmetic and output
    are float32, or float64 if ``q`` is float64 (then the others may be float64 too).

    Raises:
        InputError: a shape or dtype is not as above; names the argument, what it is and what was expected.
    """
    sizes = check_arguments(
        codes, scales, global_scale, k_buffer, d_buffer, log_decay_buffer, cursor, q, k, d, log_decay
    )
    dtype = torch.promote_types(q.dtype, torch.float32)
    live = torch.arange(sizes.window, device=cursor.device) < cursor[:, None]

    def records(buffer: Tensor) -> Tensor:
        return torch.where(live.reshape(live.shape + (1,) * (buffer.dim() - 2)), buffer, 0).to(dtype)

    def per_head(grouped: Tensor) -> Tensor:
        return grouped.to(dtype).repeat_interleave(sizes.heads // sizes.groups, dim=-2)

    q, k, d = per_head(q), per_head(k), d.to(dtype)
    log_decays = torch.cat([records(log_decay_buffer), log_decay.to(dtype)[:, None]], dim=1)
    from_here_on = log_decays.flip(1).cumsum(1).flip(1)
    copy = NVFP4.dequantize(Encoded(unpack_nibbles(codes), scales, global_scale)).to(dtype)

    match = torch.einsum("blhk,bhk->blh", per_head(records(k_buffer)), q)
    output = from_here_on[:, 0].exp()[..., None] * (copy @ q[..., None])[..., 0]
    output = output + torch.einsum("blh,blhv->bhv", from_here_on[:, 1:].exp() * match, records(d_buffer))
    return output + d * (k * q).sum(-1, keepdim=True)


def check_arguments(
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
) -> DualReadSizes:
    """The sizes, or InputError for the first argument that does not fit them."""
    if codes.dim() != 4 or codes.shape[-1] == 0 or codes.shape[-1] % (BLOCK // 2):
        raise InputError("codes", describe(codes), f"uint8 (B, H, V, K/2) with K a multiple of {BLOCK}")
    if q.dim() != 3 or q.shape[1] == 0 or codes.shape[1] % q.shape[1]:
        raise InputError("q", describe(q), f"(B, G, K) with G dividing {codes.shape[1]} heads")
    if k_buffer.dim() != 4:
        raise InputError("k_buffer", describe(k_buffer), "(B, L, G, K)")
    b, h, v, half = codes.shape
    g, length, key_dim = q.shape[1], k_buffer.shape[1], 2 * half
    floats = ACTIVATIONS + ((torch.float64,) if q.dtype == torch.float64 else ())
    for name, tensor, shape, dtypes in (
        ("codes", codes, (b, h, v, half), (torch.uint8,)),
        ("scales", scales, (b, h, v, key_dim // BLOCK), (torch.uint8,)),
        ("global_scale", global_scale, (b, h), (torch.float32,)),
        ("k_buffer", k_buffer, (b, length, g, key_dim), floats),
        ("d_buffer", d_buffer, (b, length, h, v), floats),
        ("log_decay_buffer", log_decay_buffer, (b, length, h), floats),
        ("cursor", cursor, (b,), (torch.int32,)),
        ("q", q, (b, g, key_dim), floats),
        ("k", k, (b, g, key_dim), floats),
        ("d", d, (b, h, v), floats),
        ("log_decay", log_decay, (b, h), floats),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise InputError(name, describe(tensor), f"{allowed} {shape}")
    return DualReadSizes(batch=b, heads=h, groups=g, value_dim=v, key_dim=key_dim, window=length)


def describe(tensor: Tensor) -> str:
    """dtype and shape of a tensor, as error messages show them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
