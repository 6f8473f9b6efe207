"""Attention over rows that hold different numbers of tokens: a cache whose rows are refilled one by one.

Every row has its own length.  A token's keys and values are written at its own position, and a mask leaves out what
stands behind it, so nothing is padded and no row knows of another.  The rotation of queries and keys comes from the
position ids that the caller gives.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.static_cache import configs_of, grouped_attention

ROWS = "quantlab_rows"
"""Name among transformers' attention and mask functions."""
_SERVED = ("sdpa", "eager")


class RowLengths:
    """Tokens that each row of a cache holds, and the attention layers that go by them.

    tokens: int64 (B,).  capacity: positions that there is memory for; a row that is full writes its last one again.
    reach: how many positions attention looks at, at least every row's tokens and the one being read; None for all, for
    a step whose shapes may not change.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device):
        self.capacity = capacity
        self.reach: int | None = None
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch, device=device)
        self._places = torch.arange(capacity, device=device)

    @property
    def positions(self) -> Tensor:
        """Of the token that each row reads next (B, 1), in the memory of ``tokens``."""
        return self.tokens[:, None]

    def advance(self) -> None:
        """Every row has read a token."""
        self.tokens.add_(1).clamp_(max=self.capacity - 1)

    def take(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``; what the cache holds, others move."""
        self.tokens = self.tokens[rows]
        self._rows = torch.arange(len(rows), device=rows.device)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of one query a row: (B, 1, 1, reach), 0 or -inf."""
        seen = self._places[: self.reach] <= self.tokens[:, None]
        blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return blank.masked_fill_(~seen, float("-inf"))[:, None, None]

    def serve(self, layer: Any, batch: int) -> None:
        """Let the attention half of ``layer``, which has read a prompt or is static, write row by row."""
        if getattr(layer, "is_sliding", False):
            raise InputError(
                "model", type(layer).__name__, "attention over all positions, not a sliding window"
            )
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, held.new_zeros((batch, held.shape[1], self.capacity, held.shape[3])))
        layer.update = lambda keys, values, *_, **__: self._write(layer, keys, values)
        layer.get_mask_sizes = lambda *_: (self.capacity if self.reach is None else self.reach, 0)
        layer.get_seq_length = lambda *_: 1  # of nobody in particular; positions and masks come from here

    def _write(self, layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for held, new in ((layer.keys, keys), (layer.values, values)):
            held[self._rows, :, self.tokens] = new[:, :, 0]
        return layer.keys[:, :, : self.reach], layer.values[:, :, : self.reach]


def has_attention(layer: Any) -> bool:
    """Whether a layer of a cache that has read a prompt holds keys."""
    return getattr(layer, "keys", None) is not None and layer.keys.numel() > 0


def fill_attention(layer: Any, filled: Any, rows: Tensor, sources: Tensor) -> None:
    """Copy what the rows ``sources`` of a prompt's cache layer hold to ``rows`` of ``layer``.

    Nothing of the sequence before stays: a position that a mask leaves out is still multiplied, by 0.
    """
    count = filled.keys.shape[2]
    for held, new in ((layer.keys, filled.keys), (layer.values, filled.values)):
        held[rows] = 0
        held[rows, :, :count] = new[sources]


def attend_by_rows(stack: contextlib.ExitStack, model: nn.Module, lengths: RowLengths) -> None:
    """Until ``stack`` closes, attention layers of ``model`` read one token a row by ``lengths``.

    Raises InputError for an attention that takes no such mask.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    dtype = next(model.parameters()).dtype
    FUNCTIONS.register(ROWS, grouped_attention)
    MASKS.register(ROWS, lambda *_, **__: lengths.mask(dtype))
    for config in configs_of(model):
        found = getattr(config, "_attn_implementation", None)
        if found is None or found == ROWS:
            continue
        if found not in _SERVED:
            raise InputError("attn_implementation", found, f"one of {', '.join(_SERVED)}")
        config._attn_implementation = ROWS
        stack.callback(setattr, config, "_attn_implementation", found)
