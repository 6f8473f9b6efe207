"""Shared random bits, layout by layout and bit by bit.  The conversions of flashinfer are in test_golden.py."""

from collections import Counter

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats.sharing import SHARINGS, pack_shared, shared_random_bits

PAIRED = ["e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "int8x4"]


def positions(layout: str) -> list[list[int]]:
    """For every element, the bits of the word that it uses, lowest first; typed from the figures of PTX."""
    if layout == "fp16x2":
        return [list(range(13)), list(range(16, 29))]
    if layout == "bf16x2":
        return [list(range(16)), list(range(16, 32))]
    if layout == "e2m1x4":
        return [list(range(8 * i, 8 * i + 8)) for i in range(4)]
    low, high = list(range(16)), list(range(16, 32))
    return [low, low[::-1], high, high[::-1]]


@pytest.mark.parametrize("layout", SHARINGS)
def test_every_bit_of_the_word(layout):
    words = torch.tensor([1 << bit for bit in range(32)])[:, None]
    bits = shared_random_bits(words, layout)
    assert bits.shape == (32, SHARINGS[layout].elements)
    for element, used in enumerate(positions(layout)):
        expected = [1 << used.index(bit) if bit in used else 0 for bit in range(32)]
        assert bits[:, element].tolist() == expected


def test_words_and_elements_in_memory_order():
    words = torch.tensor([[0x04030201, 0x08070605], [0xFFFFFFFF, 0]])
    assert shared_random_bits(words, "e2m1x4").tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [0xFF] * 4 + [0] * 4]
    assert shared_random_bits(words, "bf16x2").tolist() == [
        [0x0201, 0x0403, 0x0605, 0x0807],
        [0xFFFF] * 2 + [0] * 2,
    ]


def test_packing_order():
    """Element 0 is the lowest byte: PTX's rightmost source.  Signed codes are taken modulo their width."""
    codes = torch.tensor([[1, 2, 3, 4, -1, 5, 6, 7]])
    assert pack_shared(codes, "e4m3x4").tolist() == [[0x04030201, 0x070605FF]]
    assert pack_shared(codes, "e2m1x4").tolist() == [[0x4321, 0x765F]]
    assert pack_shared(codes[:, :2], "fp16x2").tolist() == [[0x00020001]]
    assert pack_shared(torch.tensor([-1, 1], dtype=torch.int16), "bf16x2").tolist() == [0x0001FFFF]


@pytest.mark.parametrize("layout", PAIRED)
def test_mates_are_uniform_but_not_independent(layout):
    """Over all 2^16 chunks each mate takes every value once, yet both round up at 0.01 nine times, not 6.6."""
    chunks = torch.arange(1 << 16)
    bits = shared_random_bits(((chunks << 16) | chunks)[:, None], layout)
    for element in range(4):
        assert torch.equal(bits[:, element].sort().values, chunks)
    threshold = (1 << 16) - int(0.01 * 2**16)  # up iff floor(delta * 2^16) + r >= 2^16
    up = bits >= threshold
    assert Counter((up[:, 0] & up[:, 1]).tolist())[True] == 9
    assert (1 << 16) * (655 / 65536) ** 2 < 6.6


def test_refusals():
    with pytest.raises(InputError, match="e4m3x4"):
        shared_random_bits(torch.zeros(1, dtype=torch.int64), "e4m3x2")
    with pytest.raises(InputError, match="int64"):
        shared_random_bits(torch.zeros(1, dtype=torch.int32), "e4m3x4")
    with pytest.raises(InputError, match="groups of 4"):
        pack_shared(torch.zeros(6, dtype=torch.int64), "e4m3x4")
    with pytest.raises(InputError, match="fp16x2"):
        pack_shared(torch.zeros(2, dtype=torch.int64), "f16x2")


def test_what_is_no_layout_or_no_tensor_is_refused():
    words = torch.zeros(4, dtype=torch.int64)
    for layout in (None, 5, ["fp16x2"]):
        with pytest.raises(InputError, match=r"^layout "):
            shared_random_bits(words, layout)
        with pytest.raises(InputError, match=r"^layout "):
            pack_shared(words, layout)
    with pytest.raises(InputError, match=r"^words "):
        shared_random_bits([0], "fp16x2")
    for codes in ([0, 1], words.float(), words.to(torch.complex64)):
        with pytest.raises(InputError, match=r"^codes "):
            pack_shared(codes, "fp16x2")
