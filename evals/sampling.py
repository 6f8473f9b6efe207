"""Sampling whose random numbers belong to a sequence: one uniform number a token, by counter.

The number of a token is a function of (seed, request, repeat, position) alone, so neither the batch, nor the order, nor
a refill, nor a resumed run changes it.  What is left is the rounding of the logits themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantlab.errors import InputError, unknown_name
from quantlab.formats.random import philox_4x32

_WORD = 0xFFFFFFFF
_DOMAIN = 0x53414D50
"""Enters the key: stochastic rounding draws from the same generator by the same seed."""
_BITS = 52
"""Of a uniform number.  With 53 the product with a sum of probabilities could round up to that sum."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.  temperature 0: the likeliest, nothing else counts.

    top_k 0, top_p 1, min_p 0: off.

    As in transformers, in this order: logits / temperature; the top_k largest (and ties with the last of them); the
    fewest most likely tokens whose probabilities reach top_p; tokens at least min_p times as likely as the likeliest.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, float("inf")), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            if (
                not plain
                or not low <= value <= high
                or value == float("inf")
                or (name == "top_p" and value == 0)
            ):
                raise InputError(
                    name, value, "a number above 0, at most 1" if name == "top_p" else _RANGES[name]
                )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError("top_k", self.top_k, "a whole number of at least 0")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Sampling":
        """From the generation arguments of an lm-eval task, without ``until`` and the limit.

        Raises InputError for an argument that is not served, so that none is ever passed over.
        """
        for name in options:
            if name not in _ARGUMENTS:
                raise unknown_name("generation argument", name, (*_ARGUMENTS, "until", "max_gen_toks"))
        given = {name: value for name, value in options.items() if value is not None}
        chosen = given.pop("do_sample", None)
        if chosen is not None and not isinstance(chosen, bool):
            raise InputError("do_sample", chosen, "true or false")
        temperature = given.pop("temperature", 1.0 if chosen else 0.0)
        if chosen and temperature == 0:
            raise InputError("temperature", temperature, "above 0 with do_sample=true")
        return cls(temperature=0.0 if chosen is False else temperature, **given)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a record."""
        return {"do_sample": not self.greedy} | ({} if self.greedy else asdict(self))

    def choose(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """Tokens int64 (n,) for logits (n, vocabulary).  uniforms: float64 (n,) in [0, 1); None for greedy choice.

        The softmax is float32, its running sum float64; the token is the first, by number, whose running sum exceeds
        the uniform number's share of the whole.
        """
        if self.greedy:
            return logits.argmax(-1)
        assert uniforms is not None
        sums = self.probabilities(logits).cumsum(-1, dtype=torch.float64)
        wanted = uniforms[:, None].to(sums) * sums[:, -1:]
        return torch.searchsorted(sums, wanted, right=True)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Float32 (n, vocabulary), 0 for what is left out."""
        logits = logits.float() / self.temperature
        vocabulary = logits.shape[-1]
        if 0 < self.top_k < vocabulary:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p < 1:
            ranked, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            before = ranked.cumsum(-1, dtype=torch.float64) - ranked
            gone = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before >= self.top_p)
            logits = logits.masked_fill(gone, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.min_p > 0:
            least = self.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return probabilities


_RANGES = {"temperature": "a finite number of at least 0", "min_p": "a number from 0 to 1"}
_ARGUMENTS = ("do_sample", "temperature", "top_k", "top_p", "min_p")


def uniforms(seed: int, streams: Sequence[int], repeats: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Float64 numbers in [0, 1), one for each (stream, repeat, position): multiples of 2^-52.

    streams: 64-bit names of requests.  repeats, positions: below 2^32.
    """
    names = np.array([stream & (1 << 64) - 1 for stream in streams], dtype=np.uint64)
    words = (np.array(positions), np.array(repeats), names & np.uint64(_WORD), names >> np.uint64(32))
    counter = np.stack([word.astype(np.int64) for word in words], -1).reshape(-1, 4)
    drawn = philox_4x32(torch.from_numpy(counter), (seed & _WORD, ((seed >> 32) ^ _DOMAIN) & _WORD))
    bits = (drawn[:, 0] << 20) | (drawn[:, 1] >> 12)
    return bits.double() / 2.0**_BITS
