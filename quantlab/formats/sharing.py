"""How hardware conversions share one 32-bit random word between the elements that they convert together.

The elements of one conversion are neighbours in memory; element 0 has the lowest address.  The result register is
little-endian: element 0 is its lowest byte (half, nibble).  PTX writes the sources the other way round: the leftmost
source of ``cvt.rs.satfinite.e4m3x4.f32 d, {a, b, e, f}, rbits`` lands in the highest byte, so the sources are passed
as {x3, x2, x1, x0}; given in memory order they come out reversed.

    fp16x2                          13 bits: x0 takes bits 12..0, x1 bits 28..16
    bf16x2                          16 bits: x0 takes bits 15..0, x1 bits 31..16
    e4m3x4 e5m2x4 e2m3x4 e3m2x4     16 bits a pair: x0 bits 15..0, x1 the same bits in reverse order, x2 bits 31..16,
                                    x3 those in reverse order
    e2m1x4                          8 bits: xi takes byte i
    int8x4                          as e4m3x4; not an instruction but flashinfer's software conversion

The two elements of a reversed pair are not independent.  Sources: PTX ISA 9.1 (cvt), flashinfer 0.6.18
mamba/conversion.cuh (the reversal, found by comparing with the hardware, for E4M3; the other types of the same
instruction are taken to do the same), TransformerEngine ptx.cuh (the bytes of E2M1, of its software twin).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError, unknown_name


@dataclass(frozen=True)
class Sharing:
    """One conversion.

    elements: how many it converts.  random_bits: how many each of them uses, to be given to a format as ``+sr<n>``.
    code_bits: the distance of two codes in the result.  shifts: the lowest bit of the word that each element uses.
    reversed_mates: odd elements read their bits in reverse order.
    """

    name: str
    elements: int
    random_bits: int
    code_bits: int
    shifts: tuple[int, ...]
    reversed_mates: bool = False


_PAIRS_OF_FOUR = (4, 16, 8, (0, 0, 16, 16), True)
_SHARINGS = (
    Sharing("fp16x2", 2, 13, 16, (0, 16)),
    Sharing("bf16x2", 2, 16, 16, (0, 16)),
    *(Sharing(name, *_PAIRS_OF_FOUR) for name in ("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "int8x4")),
    Sharing("e2m1x4", 4, 8, 4, (0, 8, 16, 24)),
)
SHARINGS: dict[str, Sharing] = {sharing.name: sharing for sharing in _SHARINGS}


def shared_random_bits(words: Tensor, layout: str) -> Tensor:
    """The random bits of every element: int64 uint32 words (..., G), one a conversion -> int64 (..., G * elements).

    The result holds the low ``random_bits`` bits that each element uses, in memory order, and is what a format with
    ``+sr<random_bits>`` takes as random_bits.  Errors: InputError for an unknown layout or another dtype.
    """
    sharing = _sharing(layout)
    if not isinstance(words, Tensor):
        raise InputError("words", type(words).__name__, "a tensor of int64")
    if words.dtype != torch.int64 or words.dim() == 0:
        raise InputError("words", f"{words.dtype} {tuple(words.shape)}", "int64 of shape (..., G)")
    bits = words[..., None] >> torch.tensor(sharing.shifts, device=words.device)
    bits &= (1 << sharing.random_bits) - 1
    if sharing.reversed_mates:
        bits[..., 1::2] = _reversed_bits(bits[..., 1::2], sharing.random_bits)
    return bits.flatten(-2)


def pack_shared(codes: Tensor, layout: str) -> Tensor:
    """Results of the conversions: integer codes (..., G * elements) -> int64 uint32 words (..., G), element 0 lowest.

    Errors: InputError for an unknown layout, or a last dimension that is no multiple of its elements.
    """
    sharing = _sharing(layout)
    if not isinstance(codes, Tensor) or codes.is_floating_point() or codes.is_complex():
        raise InputError("codes", getattr(codes, "dtype", type(codes).__name__), "a tensor of integer codes")
    if codes.dim() == 0 or codes.shape[-1] % sharing.elements:
        raise InputError(
            "codes", tuple(codes.shape), f"a last dimension of whole groups of {sharing.elements}"
        )
    fields = codes.to(torch.int64).unflatten(-1, (-1, sharing.elements)) & ((1 << sharing.code_bits) - 1)
    return (
        fields << torch.arange(0, sharing.elements * sharing.code_bits, sharing.code_bits).to(codes.device)
    ).sum(-1)


def _sharing(layout: str) -> Sharing:
    if not isinstance(layout, str):
        raise InputError("layout", layout, f"one of {', '.join(SHARINGS)}")
    if layout not in SHARINGS:
        raise unknown_name("layout", layout, SHARINGS)
    return SHARINGS[layout]


def _reversed_bits(bits: Tensor, count: int) -> Tensor:
    """The low ``count`` bits in reverse order."""
    result = torch.zeros_like(bits)
    for position in range(count):
        result |= ((bits >> position) & 1) << (count - 1 - position)
    return result
