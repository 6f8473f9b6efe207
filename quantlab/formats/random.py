"""Counter-based random words: one element of one store of one sequence always gets the same word.

Philox-4x32 (Salmon, Moraes, Dror, Shaw, SC 2011), as Triton's ``tl.randint4x`` and cuRAND have it.
"""

import torch
from torch import Tensor

from quantlab.errors import InputError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Lanes worked on at once: the round's six arrays then stay in a core's cache.
_LANES = 8192


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple[int, int], rounds: int
) -> list[Tensor]:
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2^64, which keeps all bits; the mask undoes the arithmetic shift's sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1, c2, c3]


def philox_4x32(counter: Tensor, key: tuple[int, int], rounds: int = 10) -> Tensor:
    """Four 32-bit words for every counter.

    counter: int64 (..., 4), each a word in [0, 2^32); key: two such words.  Returns int64 (..., 4).
    """
    if counter.dtype != torch.int64 or counter.dim() == 0 or counter.shape[-1] != 4:
        raise InputError("counter", f"{counter.dtype} {tuple(counter.shape)}", "int64 of shape (..., 4)")
    if rounds < 1:
        raise InputError("rounds", rounds, "at least 1")
    return torch.stack(_rounds(*counter.unbind(-1), key=key, rounds=rounds), dim=-1)


def random_words(
    shape: tuple[int, int, int, int],
    seed: int,
    store_numbers: Tensor,
    sequence_ids: Tensor,
    layer: int,
    part: int,
    rounds: int = 10,
) -> Tensor:
    """One uint32 word per element of a layer's state, as int64 of ``shape`` = (B, H, V, K).

    Philox key = 64-bit ``seed``; counter = (element index within one sequence's state // 4, store number,
    sequence id, 4 * layer + part); word = element index % 4.  So neither the batch layout nor a slot move
    changes a sequence's words.  store_numbers, sequence_ids: int64 (B,); part: 0..3 within a layer.
    """
    batch, elements = shape[0], shape[1] * shape[2] * shape[3]
    for name, value in (("store_numbers", store_numbers), ("sequence_ids", sequence_ids)):
        if value.dtype != torch.int64 or value.shape != (batch,):
            raise InputError(name, f"{value.dtype} {tuple(value.shape)}", f"int64 of shape ({batch},)")
    if not 0 <= part < 4:
        raise InputError("part", part, "0, 1, 2 or 3")
    key = (seed & _WORD, (seed >> 32) & _WORD)
    index = torch.arange((elements + 3) // 4, device=store_numbers.device)
    last = torch.full((1, 1), (4 * layer + part) & _WORD, device=index.device)
    words = torch.empty((batch, len(index), 4), dtype=torch.int64, device=index.device)
    for row in range(batch):
        second, third = store_numbers[row].view(1, 1), sequence_ids[row].view(1, 1)
        for start in range(0, len(index), _LANES):
            part_index = index[start : start + _LANES].view(1, -1)
            outputs = _rounds(part_index, second & _WORD, third & _WORD, last, key, rounds)
            for position, output in enumerate(outputs):
                words[row, start : start + _LANES, position] = output
    return words.flatten(1)[:, :elements].reshape(shape)
