"""Forwards of a model on a cache of its own, as decoding calls them."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.interception import cache_keyword


class CachedForward:
    """A model and a new cache: tokens of every row -> logits behind the last one.  No row is padded.

    cache: the cache.  length: tokens of each row that it has read.
    """

    def __init__(self, model: nn.Module):
        from transformers import DynamicCache

        self.cache: Any = DynamicCache(config=model.config)  # pyright: ignore[reportArgumentType]
        self.length = 0
        self._model = model
        self._parameters = inspect.signature(model.forward).parameters
        self._fixed = {cache_keyword(model): self.cache, "use_cache": True}

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: (B, T), on the model's device -> logits (B, vocabulary) after the last token."""
        extra: dict[str, Any] = {}
        length = self.length + ids.shape[1]
        # Some models number the tokens of a second forward from 0 if nobody tells them.
        if "position_ids" in self._parameters:
            positions = torch.arange(self.length, length, device=ids.device)
            extra["position_ids"] = positions.expand(len(ids), -1)
        if "logits_to_keep" in self._parameters:
            extra["logits_to_keep"] = 1
        logits = self._model(input_ids=ids, **self._fixed, **extra).logits[:, -1]
        self.length = length
        return logits


def check_tokens(model: nn.Module, ids: object, count: int, needed: str, argument: str = "ids") -> Tensor:
    """``ids`` as int64 (B, T) on the model's device.

    Raises InputError unless they are whole numbers of the model's vocabulary, at least ``count`` of them in each row;
    ``needed`` says what for.
    """
    try:
        tokens = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(argument, type(ids).__name__, f"token ids, one row a sequence ({error})") from None
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise InputError(argument, str(tokens.dtype), "whole numbers")
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or len(tokens) < 1:
        raise InputError(argument, tuple(tokens.shape), "shape (sequences, tokens)")
    if tokens.is_meta:
        raise InputError(argument, "on the meta device", "numbers, which such a tensor has none of")
    if tokens.shape[1] < count:
        raise InputError(argument, f"{tokens.shape[1]} tokens", f"at least {count}: {needed}")
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embeddings, "num_embeddings", None)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        found = low if low < 0 else high
        end = "its end" if vocabulary is None else vocabulary - 1
        raise InputError(argument, found, f"tokens of the model's vocabulary, 0 to {end}")
    return tokens.to(next(model.parameters()).device, torch.int64)


def check_count(argument: str, value: object) -> int:
    """InputError unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(argument, value, "a whole number of at least 1")
    return value
