"""Two 4-bit codes in a byte, low nibble = even element (the order of every library and of the PTX loads)."""

import torch
from torch import Tensor

from quantlab.errors import InputError


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 (..., K) of any integer dtype -> uint8 (..., ceil(K/2)); odd K is padded with code 0."""
    numbers = codes.dtype == torch.bool or codes.is_floating_point() or codes.is_complex()
    if codes.dim() == 0 or numbers:
        raise InputError("codes", f"{codes.dtype} {tuple(codes.shape)}", "integer codes of shape (..., K)")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise InputError("codes", f"{int(codes.min())} to {int(codes.max())}", "codes 0 to 15")
    codes = codes.to(torch.uint8)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, key_dim: int | None = None) -> Tensor:
    """uint8 (..., P) -> uint8 codes (..., 2P), or the first ``key_dim`` of them (an odd K was padded)."""
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise InputError("packed", f"{packed.dtype} {tuple(packed.shape)}", "uint8 of shape (..., P)")
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    if key_dim is None:
        return codes
    if key_dim not in (2 * packed.shape[-1], 2 * packed.shape[-1] - 1):
        raise InputError("key_dim", key_dim, f"{2 * packed.shape[-1]} or one less")
    return codes[..., :key_dim]
