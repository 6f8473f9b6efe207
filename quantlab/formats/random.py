"""Counter-based random words: one element of one store of one sequence always gets the same word.

Philox-4x32 (Salmon, Moraes, Dror, Shaw, SC 2011), as Triton's ``tl.randint4x`` and cuRAND have it.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quantlab.errors import InputError

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Lanes worked on at once: the six arrays of a round then stay in a core's cache.
_LANES = 16384
# On a device: few launches, and at most a few GiB of temporaries.
_DEVICE_LANES = 1 << 24


def _rounds(words: list[np.ndarray], key: tuple[int, int], rounds: int) -> None:
    """Philox rounds in place, on four uint64 arrays of one shape that hold 32-bit words."""
    c0, c1, c2, c3 = words
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    mask, half = np.uint64(_WORD), np.uint64(32)
    for number in range(rounds):
        k0, k1 = (np.uint64((k + number * w) & _WORD) for k, w in zip(key, _WEYL, strict=True))
        np.multiply(c0, _MULTIPLIERS[0], out=p0)
        np.multiply(c2, _MULTIPLIERS[1], out=p1)
        np.right_shift(p1, half, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, k0, out=c0)
        np.right_shift(p0, half, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, k1, out=c2)
        np.bitwise_and(p1, mask, out=c1)
        np.bitwise_and(p0, mask, out=c3)


def philox_4x32(counter: Tensor, key: tuple[int, int], rounds: int = 10) -> Tensor:
    """Four 32-bit words for every counter.

    counter: int64 (..., 4), each a word in [0, 2^32); key: two such words.  Returns int64 (..., 4) on the device
    of ``counter``.  rounds: 10 is the published strength, 7 its fastest that passes the statistical tests, 5 what
    serving configurations use.
    """
    _check_tensor("counter", counter)
    if counter.dtype != torch.int64 or counter.dim() == 0 or counter.shape[-1] != 4:
        raise InputError("counter", f"{counter.dtype} {tuple(counter.shape)}", "int64 of shape (..., 4)")
    _check_rounds(rounds)
    if not isinstance(key, (tuple, list)) or len(key) != 2:
        raise InputError("key", key, "two integers")
    for word in key:
        _check_integer("key", word)
    if counter.device.type != "cpu":
        return _torch_rounds(counter, key, rounds)
    words = [word.numpy().astype(np.uint64) for word in counter.unbind(-1)]
    _rounds(words, key, rounds)
    return torch.from_numpy(np.stack(words, axis=-1).view(np.int64))


def _torch_rounds(counter: Tensor, key: tuple[int, int], rounds: int) -> Tensor:
    """``_rounds`` in int64, whose products wrap modulo 2^64 with all their bits in place."""
    c0, c1, c2, c3 = counter.unbind(-1)
    first, second = (int(m) for m in _MULTIPLIERS)
    for number in range(rounds):
        k0, k1 = ((k + number * w) & _WORD for k, w in zip(key, _WEYL, strict=True))
        p0, p1 = c0 * first, c2 * second
        c0, c2 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, ((p0 >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = p1 & _WORD, p0 & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


def words_at(offsets: Tensor, seed: int, rounds: int = 10, word: int = 0) -> Tensor:
    """One uint32 word for every offset, int64 like ``offsets``: Triton's ``tl.randint(seed, offset, rounds)``.

    Counter = (offset low, offset high, 0, 0), key = the 64-bit seed; ``word`` 0 to 3 of the four is taken, 0 by
    the kernels that store vLLM's state with one draw an element.  offsets: int64, e.g. addresses in the state.
    """
    _check_tensor("offsets", offsets)
    _check_integer("seed", seed)
    if offsets.dtype != torch.int64:
        raise InputError("offsets", str(offsets.dtype), "int64")
    if word not in (0, 1, 2, 3) or isinstance(word, bool):
        raise InputError("word", word, "0, 1, 2 or 3")
    zeros = torch.zeros_like(offsets)
    counter = torch.stack((offsets & _WORD, (offsets >> 32) & _WORD, zeros, zeros), -1)
    return philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD), rounds)[..., word]


def random_words(
    shape: tuple[int, int, int, int],
    seed: int,
    store_numbers: Tensor,
    sequence_ids: Tensor,
    layer: int,
    part: int,
    rounds: int = 10,
    *,
    heads: Sequence[int] | None = None,
) -> Tensor:
    """One uint32 word per element of a layer's state, as int64 of ``shape`` = (B, H, V, K).

    Philox key = 64-bit ``seed``; counter = (element index within one sequence's state // 4, store number,
    sequence id, 4 * layer + part); word = element index % 4.  So neither the batch layout nor a slot move
    changes a sequence's words.  store_numbers, sequence_ids: int64 (B,), used modulo 2^32; part: 0..3.
    heads: H ascending head numbers, where the state is that of some heads of the layer only: they get the words that
    they have in the whole layer.  Computed on the device of ``store_numbers``.
    """
    check_counters(shape, seed, store_numbers, sequence_ids, layer, part, rounds)
    size = shape[2] * shape[3]
    spans = [(first * size, last * size) for first, last in _head_runs(heads, shape[1])]
    key = (seed & _WORD, (seed >> 32) & _WORD)
    # Every counter with a word of these heads, and where each span's words then stand.
    index = np.concatenate([np.arange(a // 4, (b + 3) // 4, dtype=np.uint64) for a, b in spans])
    fixed = (store_numbers, sequence_ids, (4 * layer + part) & _WORD)
    flat = (_words_on_cpu if store_numbers.device.type == "cpu" else _words_on_device)(
        index, fixed, key, rounds
    )
    parts, offset = [], 0
    for a, b in spans:
        parts.append(flat[:, offset + a % 4 : offset + a % 4 + b - a])
        offset += 4 * ((b + 3) // 4 - a // 4)
    flat = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return flat.reshape(shape)


def _words_on_cpu(
    index: np.ndarray, fixed: tuple[Tensor, Tensor, int], key: tuple[int, int], rounds: int
) -> Tensor:
    """int64 (B, 4 len(index)): the words of counters (index, store number, sequence id, last) of every row."""
    numbers, ids, last = fixed
    output = np.empty((len(numbers), len(index), 4), dtype=np.uint64)
    for row, (number, name) in enumerate(zip(numbers.tolist(), ids.tolist(), strict=True)):
        for start in range(0, len(index), _LANES):
            counters = index[start : start + _LANES].copy()
            rest = (number & _WORD, name & _WORD, last)
            words = [counters, *(np.full_like(counters, word) for word in rest)]
            _rounds(words, key, rounds)
            for position, word in enumerate(words):
                output[row, start : start + len(counters), position] = word
    return torch.from_numpy(output.view(np.int64)).flatten(1)


def _words_on_device(
    index: np.ndarray, fixed: tuple[Tensor, Tensor, int], key: tuple[int, int], rounds: int
) -> Tensor:
    """The same, where the store numbers are."""
    numbers, ids, last = fixed
    lowest = torch.from_numpy(index.astype(np.int64)).to(numbers.device)[None]
    output = lowest.new_empty((len(numbers), 4 * len(index)))
    rows = max(1, _DEVICE_LANES // max(1, len(index)))
    for start in range(0, len(numbers), rows):
        part = slice(start, start + rows)
        size = (len(numbers[part]), len(index))
        columns = [(column[part] & _WORD)[:, None].expand(size) for column in (numbers, ids)]
        counter = torch.stack((lowest.expand(size), *columns, lowest.new_full(size, last)), -1)
        output[part] = _torch_rounds(counter, key, rounds).flatten(1)
    return output


def _head_runs(heads: Sequence[int] | None, count: int) -> list[tuple[int, int]]:
    """(first, behind the last) of each run of consecutive heads; InputError unless there are ``count``, ascending."""
    if heads is None:
        return [(0, count)]
    numbers = list(heads) if isinstance(heads, Sequence) else []
    if len(numbers) != count or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise InputError("heads", heads, f"{count} head numbers, as many as the shape has")
    if any(second <= first for first, second in itertools.pairwise(numbers)):
        raise InputError("heads", numbers, "head numbers that go up")
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1]:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs or [(0, 0)]


def check_counters(
    shape: tuple[int, int, int, int],
    seed: int,
    store_numbers: Tensor,
    sequence_ids: Tensor,
    layer: int,
    part: int,
    rounds: int,
) -> None:
    """InputError for an argument that ``random_words`` cannot take."""
    sizes = list(shape) if isinstance(shape, (tuple, list)) else []
    if len(sizes) != 4 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
        raise InputError("shape", shape, "four sizes (B, H, V, K)")
    for name, number in (("seed", seed), ("layer", layer), ("part", part)):
        _check_integer(name, number)
    _check_rounds(rounds)
    for name, value in (("store_numbers", store_numbers), ("sequence_ids", sequence_ids)):
        _check_tensor(name, value)
        if value.dtype != torch.int64 or value.shape != (shape[0],):
            raise InputError(name, f"{value.dtype} {tuple(value.shape)}", f"int64 of shape ({shape[0]},)")
    if not 0 <= part < 4:
        raise InputError("part", part, "0, 1, 2 or 3")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(name, type(value).__name__, "a tensor of int64")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputError(name, value, "an integer")


def _check_rounds(rounds: object) -> None:
    """None at all would hand out the counter itself."""
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InputError("rounds", rounds, "a whole number, at least 1")
