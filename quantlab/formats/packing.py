"""Codes as bytes, without gaps: the first element in the lowest bits, rows padded to whole bytes.

Two 4-bit codes share a byte, low nibble = even element (the order of every library and of the PTX loads); four
6-bit codes share three bytes.
"""

import math

import torch
from torch import Tensor

from quantlab.errors import InputError


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., K) of ``bits`` bits each -> uint8 (..., ceil(K * bits / 8)).

    codes: any integer dtype, its low bits are taken (two's complement); or, with whole bytes, a tensor of that
    width of any dtype, whose memory is taken in little-endian order.
    """
    _check_bits(bits)
    if not isinstance(codes, Tensor):
        raise InputError("codes", type(codes).__name__, "a tensor")
    if codes.dim() == 0:
        raise InputError("codes", f"{codes.dtype} ()", "codes of shape (..., K)")
    if bits % 8 == 0:
        if codes.element_size() * 8 != bits:
            raise InputError("codes", str(codes.dtype), f"a dtype of {bits} bits")
        return codes.contiguous().view(torch.uint8)
    if codes.is_floating_point() or codes.is_complex():
        raise InputError("codes", str(codes.dtype), "an integer dtype")
    group = 8 // math.gcd(8, bits)  # codes that end on a byte's border
    codes = codes.to(torch.int64) & ((1 << bits) - 1)
    used = math.ceil(codes.shape[-1] * bits / 8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % group)).unflatten(-1, (-1, group))
    shifts = torch.arange(group, device=codes.device) * bits
    words = (codes << shifts).sum(-1, keepdim=True)
    shifts = torch.arange(group * bits // 8, device=codes.device) * 8
    return ((words >> shifts) & 0xFF).to(torch.uint8).flatten(-2)[..., :used]


def unpack_bits(packed: Tensor, bits: int, count: int, dtype: torch.dtype) -> Tensor:
    """uint8 (..., P) -> ``count`` codes a row, in ``dtype`` (sign-extended if that is signed and wider)."""
    _check_bits(bits)
    _check_packed(packed)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize * 8 < bits:
        raise InputError("dtype", dtype, f"a dtype of torch that holds {bits} bits")
    if bits % 8 and (dtype.is_floating_point or dtype.is_complex or (dtype == torch.bool and bits > 1)):
        raise InputError("dtype", dtype, "an integer dtype")
    if bits % 8 == 0 and dtype.itemsize * 8 != bits:
        raise InputError("dtype", dtype, f"a dtype of {bits} bits")
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InputError("count", count, "a whole number of codes")
    if packed.shape[-1] != math.ceil(count * bits / 8):
        raise InputError("count", count, f"a count of {bits}-bit codes that fills {packed.shape[-1]} bytes")
    if bits % 8 == 0:
        return packed.contiguous().view(dtype)
    group = 8 // math.gcd(8, bits)
    size = group * bits // 8
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % size)).to(torch.int64)
    shifts = torch.arange(size, device=packed.device) * 8
    words = (padded.unflatten(-1, (-1, size)) << shifts).sum(-1, keepdim=True)
    codes = (words >> (torch.arange(group, device=packed.device) * bits)) & ((1 << bits) - 1)
    if dtype.is_signed:
        codes = (codes ^ (1 << (bits - 1))) - (1 << (bits - 1))
    return codes.flatten(-2)[..., :count].to(dtype)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 (..., K) of any integer dtype -> uint8 (..., ceil(K/2)); odd K is padded with code 0."""
    if not isinstance(codes, Tensor):
        raise InputError("codes", type(codes).__name__, "a tensor")
    numbers = codes.dtype == torch.bool or codes.is_floating_point() or codes.is_complex()
    if codes.dim() == 0 or numbers:
        raise InputError("codes", f"{codes.dtype} {tuple(codes.shape)}", "integer codes of shape (..., K)")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise InputError("codes", f"{int(codes.min())} to {int(codes.max())}", "codes 0 to 15")
    return pack_bits(codes, 4)


def unpack_nibbles(packed: Tensor, key_dim: int | None = None) -> Tensor:
    """uint8 (..., P) -> uint8 codes (..., 2P), or the first ``key_dim`` of them (an odd K was padded)."""
    _check_packed(packed)
    if key_dim is not None and key_dim not in (2 * packed.shape[-1], 2 * packed.shape[-1] - 1):
        raise InputError("key_dim", key_dim, f"{2 * packed.shape[-1]} or one less")
    codes = unpack_bits(packed, 4, 2 * packed.shape[-1], torch.uint8)
    return codes if key_dim is None else codes[..., :key_dim]


def _check_bits(bits: object) -> None:
    """Codes that end on a byte's border together are put into one int64, so eight of 9 bits are too many."""
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in (*range(1, 9), 16, 32, 64):
        raise InputError("bits", bits, "1 to 8, 16, 32 or 64")


def _check_packed(packed: object) -> None:
    if not isinstance(packed, Tensor):
        raise InputError("packed", type(packed).__name__, "a tensor of uint8")
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise InputError("packed", f"{packed.dtype} {tuple(packed.shape)}", "uint8 of shape (..., P)")
