"""Random words: the counter scheme, and packing of nibbles."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import pack_nibbles, parse, philox_4x32, random_words, unpack_nibbles, words_at
from quantlab.formats.random import _torch_rounds

SHAPE = (3, 2, 5, 7)


def words(
    shape=SHAPE, seed=2**40 + 5, stores=(0, 1, 7), sequences=(4, 4, 2**33 + 1), layer=3, part=1, heads=None
):
    return random_words(shape, seed, torch.tensor(stores), torch.tensor(sequences), layer, part, heads=heads)


def test_every_word_is_the_one_of_its_counter():
    drawn = words()
    assert drawn.shape == SHAPE
    assert drawn.dtype == torch.int64
    for row, (store, sequence) in enumerate([(0, 4), (1, 4), (7, 1)]):  # ids count modulo 2^32
        for index, word in enumerate(drawn[row].flatten().tolist()):
            counter = torch.tensor([index // 4, store, sequence, 4 * 3 + 1])
            assert word == philox_4x32(counter, (5, 2**8))[index % 4]


def test_rows_depend_on_neither_batch_nor_slot():
    drawn = words()
    moved = words(shape=(2, 2, 5, 7), stores=(7, 0), sequences=(2**33 + 1, 4))
    assert torch.equal(moved[0], drawn[2])
    assert torch.equal(moved[1], drawn[0])


def test_large_states_are_cut_without_a_seam():
    shape = (1, 1, 513, 257)  # more counters than are worked on at once
    drawn = words(shape=shape, stores=(2,), sequences=(9,)).flatten()
    index = torch.tensor([0, 65535, 65536, 65537, 131071, 131072, len(drawn) - 1])
    counters = torch.stack([index // 4, *(torch.full_like(index, word) for word in (2, 9, 13))], dim=-1)
    expected = philox_4x32(counters, (5, 2**8)).gather(1, (index % 4)[:, None])[:, 0]
    assert torch.equal(drawn[index], expected)


@pytest.mark.parametrize(
    "shape", [SHAPE, (2, 6, 4, 16), (2, 6, 3, 3), (1, 5, 1, 1), (1, 6, 128, 128)], ids=str
)
def test_heads_taken_alone_have_their_words_of_the_whole_layer(shape):
    """Heads begin anywhere in a counter: 35, 9 and 1 elements a head are no multiples of four."""
    arguments: dict[str, Any] = {
        "shape": shape,
        "stores": range(shape[0]),
        "sequences": range(3, 3 + shape[0]),
    }
    whole = words(**arguments)
    every = range(shape[1])
    for heads in (every, every[1:], every[:1], every[::2], every[-1:], (0, *every[2:])):
        drawn = words(**arguments | {"shape": (shape[0], len(heads), *shape[2:])}, heads=heads)
        assert torch.equal(drawn, whole[:, list(heads)])


def test_heads_far_into_a_layer_are_drawn_without_the_heads_before_them():
    drawn = words(shape=(1, 1, 2, 3), stores=(2,), sequences=(9,), heads=[2**31]).flatten()
    for number, word in enumerate(drawn.tolist()):
        element = 2**31 * 6 + number
        assert word == philox_4x32(torch.tensor([element // 4, 2, 9, 13]), (5, 2**8))[element % 4]


@pytest.mark.parametrize(
    "heads",
    [[1, 0], [0, 0], [0], [0, 1, 2], [-1, 0], [0, 1.0], [False, True], 2, torch.tensor([0, 1])],
    ids=str,
)
def test_wrong_heads_are_named(heads):
    with pytest.raises(InputError, match=r"^heads "):
        words(heads=heads)


def test_layers_parts_stores_and_seeds_differ():
    base = words()
    for change in ({"layer": 4}, {"part": 0}, {"seed": 6}, {"stores": (3, 4, 5)}):
        assert (words(**change) != base).float().mean() > 0.99


def test_words_fill_32_bits():
    drawn = words(shape=(3, 8, 16, 64)).numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 2**32
    # 24 576 fair bits: a count leaves 6 standard deviations (6 * sqrt(n) / 2) with probability 2e-9.
    for bit in range(32):
        assert abs(((drawn >> bit) & 1).sum() - drawn.size / 2) < 3 * np.sqrt(drawn.size)


def test_words_feed_a_format():
    x = torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(parse("fp16+sr13").round(x, words()), parse("fp16+sr13").round(x, words() % 2**13))


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match=r"^store_numbers"):
        words(stores=(0, 1))
    with pytest.raises(InputError, match=r"^part"):
        words(part=4)
    with pytest.raises(InputError, match=r"^counter"):
        philox_4x32(torch.zeros(3, dtype=torch.int64), (0, 0))
    with pytest.raises(InputError, match=r"^rounds"):
        philox_4x32(torch.zeros(4, dtype=torch.int64), (0, 0), rounds=0)


def test_nibbles_low_is_even():
    packed = pack_nibbles(torch.tensor([[1, 2, 15, 0, 7]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F, 0x07]]
    assert packed.dtype == torch.uint8
    assert unpack_nibbles(packed).tolist() == [[1, 2, 15, 0, 7, 0]]
    assert unpack_nibbles(packed, 5).tolist() == [[1, 2, 15, 0, 7]]


def test_every_pair_of_nibbles_round_trips():
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)).long(), codes)
    with pytest.raises(InputError, match=r"^codes"):
        pack_nibbles(torch.zeros(4))
    with pytest.raises(InputError, match=r"^packed"):
        unpack_nibbles(torch.zeros(4))
    with pytest.raises(InputError, match=r"^key_dim"):
        unpack_nibbles(torch.zeros(4, dtype=torch.uint8), 6)


@pytest.mark.parametrize("rounds", [5, 7, 10])
def test_integer_products_that_wrap_give_the_same_words(rounds):
    """The path of other devices against numpy's unsigned words, high bits set included."""
    counters = torch.randint(0, 2**32, (4096, 4), generator=torch.Generator().manual_seed(3))
    counters[:8] = 2**32 - 1
    key = (0xFFFFFFFF, 0x80000001)
    assert torch.equal(_torch_rounds(counters, key, rounds), philox_4x32(counters, key, rounds))


def test_words_at_offsets_are_the_published_ones():
    """Known answers of Triton's randint4x for a seed and 64-bit offsets, every one of the four words."""
    vectors = json.loads((Path(__file__).parents[1] / "data/golden/philox.json").read_text())["vectors"]
    for vector in vectors:
        offsets = torch.tensor([offset if offset < 2**63 else offset - 2**64 for offset in vector["offsets"]])
        for word in range(4):
            drawn = words_at(offsets, vector["seed"], vector["rounds"], word)
            assert drawn.tolist() == [int(words[word], 16) for words in vector["words"]]
    with pytest.raises(InputError, match=r"^offsets 'torch.int32'"):
        words_at(torch.zeros(2, dtype=torch.int32), 0)
    with pytest.raises(InputError, match=r"^word 4"):
        words_at(torch.zeros(2, dtype=torch.int64), 0, word=4)


@pytest.mark.parametrize("rounds", [0, -1, 2.5, "ten", None, True])
def test_fewer_than_one_round_is_refused(rounds):
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InputError, match=r"^rounds "):
        random_words((1, 1, 1, 4), 0, zero, zero, layer=0, part=0, rounds=rounds)
    with pytest.raises(InputError, match=r"^rounds "):
        words_at(zero, 0, rounds)


WRONG_WORDS = [
    ("shape", (1, 1, 4)),
    ("shape", (1, 1, 1, 4, 1)),
    ("shape", (1, -1, 1, 4)),
    ("shape", (1, 1, 1, 1.5)),
    ("shape", None),
    ("seed", 1.5),
    ("seed", "1"),
    ("seed", None),
    ("layer", 0.5),
    ("part", "a"),
    ("part", 0.5),
    ("part", 4),
    ("store_numbers", [0]),
    ("sequence_ids", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG_WORDS, ids=str)
def test_wrong_arguments_of_random_words_are_named(name, value):
    zero = torch.zeros(1, dtype=torch.int64)
    good = {"store_numbers": zero, "sequence_ids": zero, "layer": 0, "part": 0}
    arguments = {"shape": (1, 1, 1, 4), "seed": 0} | good | {name: value}
    with pytest.raises(InputError, match=f"^{name} "):
        random_words(**arguments)


def test_wrong_arguments_of_words_at_and_philox_are_named():
    zero = torch.zeros(4, dtype=torch.int64)
    for name, arguments in {
        "offsets": ([0], 0),
        "seed": (zero, "a"),
        "word": (zero, 0, 10, True),
    }.items():
        with pytest.raises(InputError, match=f"^{name} "):
            words_at(*arguments)
    for name, arguments in {"counter": (None, (0, 0)), "key": (zero, (0,))}.items():
        with pytest.raises(InputError, match=f"^{name} "):
            philox_4x32(*arguments)
