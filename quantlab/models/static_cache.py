"""A transformers cache whose tensors never move: what a captured step reads and writes in place.

Attention under such a cache sees all ``length`` positions through a mask.  transformers then repeats keys and values
for every query head, which at a large batch costs more than the attention; ``grouped_attention`` gives the query heads
of a key head as its queries instead.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPED = "quantlab_grouped_sdpa"
"""Name of ``grouped_attention`` among transformers' attention functions."""


def static_cache(config: Any, filled: Any, batch: int, length: int) -> Any:
    """A ``StaticCache`` of ``length`` positions for ``batch`` sequences, with tensors of the kinds that ``filled``, a
    dynamic cache of the same model behind a prompt, holds.

    Recurrent states are empty (batch, 0): whoever runs the steps keeps them elsewhere.
    """
    from transformers import StaticCache

    cache: Any = StaticCache(config=config, max_cache_len=length)
    for static, dynamic in zip(cache.layers, filled.layers, strict=False):
        for index, conv in getattr(dynamic, "conv_states", {}).items():
            if conv is None:
                continue
            static.conv_states[index] = conv.new_zeros((batch, *conv.shape[1:]))
            static.recurrent_states[index] = conv.new_zeros((batch, 0), dtype=torch.float32)
            static.is_conv_states_initialized[index] = static.is_recurrent_states_initialized[index] = True
            static.has_previous_state[index] = True
            static.conv_kernel_size[index] = dynamic.conv_kernel_size[index]
            static.dtype, static.device = conv.dtype, conv.device
        if getattr(dynamic, "keys", None) is not None and dynamic.keys.numel():
            static.lazy_initialization(
                *(t.new_zeros((batch, t.shape[1], 1, t.shape[3])) for t in (dynamic.keys, dynamic.values))
            )
    return cache


def fill_rows(cache: Any, filled: Any, rows: Tensor) -> None:
    """Copy what the dynamic cache ``filled`` holds of its sequences to ``rows`` of a static one; recurrent states are
    left out.
    """
    for static, dynamic in zip(cache.layers, filled.layers, strict=False):
        for index, conv in getattr(dynamic, "conv_states", {}).items():
            if conv is not None:
                static.conv_states[index][rows] = conv
        if getattr(dynamic, "keys", None) is not None and dynamic.keys.numel():
            count = dynamic.keys.shape[2]
            static.keys[rows, :, :count] = dynamic.keys
            static.values[rows, :, :count] = dynamic.values


def clear(cache: Any) -> None:
    """Zeros for keys, values and the inputs that convolutions hold.  A position that a mask leaves out is still
    multiplied, by 0: it must be finite.
    """
    for layer in cache.layers:
        for conv in getattr(layer, "conv_states", {}).values():
            if conv is not None:
                conv.zero_()
        if getattr(layer, "keys", None) is not None:
            layer.keys.zero_()
            layer.values.zero_()


def set_length(cache: Any, length: int) -> None:
    """Every attention layer of a static cache holds ``length`` tokens of each sequence."""
    for layer in cache.layers:
        if isinstance(filled := getattr(layer, "cumulative_length", None), Tensor):
            filled.fill_(length)


def capturable_experts(stack: contextlib.ExitStack, model: nn.Module) -> None:
    """Until ``stack`` closes, experts of ``model`` run without waiting for the device, which a graph cannot.

    A product of groups; PyTorch has one on the device in bfloat16 alone, so others gather the weights of each token.
    """
    dtype = next(model.parameters()).dtype
    wanted = "grouped_mm" if dtype == torch.bfloat16 else "batched_mm"
    for config in configs_of(model):
        before = getattr(config, "_experts_implementation", None)
        if before is not None and before != wanted:
            config._experts_implementation = wanted
            stack.callback(setattr, config, "_experts_implementation", before)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of ``model`` and of its parts, each once."""
    found = {id(c): c for part in model.modules() if (c := getattr(part, "config", None)) is not None}
    return list(found.values())


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention of one token a sequence, keys and values not repeated.

    query: (B, query heads, 1, D); key, value: (B, key heads, L, D); attention_mask: (1 or B, 1, 1, L), boolean or to be
    added.  Returns (B, 1, query heads, D).  Several tokens go to transformers' own function.
    """
    batch, heads, count, _ = query.shape
    if count != 1 or heads % key.shape[1]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    queries = query.reshape(batch, key.shape[1], heads // key.shape[1], -1)
    found = F.scaled_dot_product_attention(queries, key, value, attention_mask, dropout, scale=scaling)
    return found.reshape(batch, 1, heads, -1), None


def group_attention(stack: contextlib.ExitStack, model: nn.Module) -> None:
    """Until ``stack`` closes, layers of ``model`` that use transformers' ``sdpa`` use ``grouped_attention``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    FUNCTIONS.register(GROUPED, grouped_attention)
    MASKS.register(GROUPED, MASKS["sdpa"])
    for config in configs_of(model):
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = GROUPED
            stack.callback(setattr, config, "_attn_implementation", "sdpa")
