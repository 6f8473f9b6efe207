"""Teach the linear-attention layers of a transformers cache about handles."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantlab.models.handles import holding_of, prefill_of
from quantlab.models.patching import replace


def patch_cache_layers(stack: contextlib.ExitStack) -> None:
    """Patch every linear-attention cache layer until ``stack`` closes.  Layers without a handle behave as before."""
    from transformers.cache_utils import LinearAttentionLayer as Layer

    replace(stack, Layer, "update_recurrent_state", _update)
    replace(stack, Layer, "reorder_cache", _reorder)
    select = _batch_method(Layer, "batch_select_indices", lambda _, rows: rows)
    replace(stack, Layer, "batch_select_indices", select)
    replace(
        stack, Layer, "batch_repeat_interleave", _batch_method(Layer, "batch_repeat_interleave", _repeated)
    )
    # A handle's attribute does not survive compilation, and generate compiles whatever says that it may be.
    replace(stack, Layer, "is_compileable", lambda _: False)


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_recurrent_state(
        self: Any, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if holding_of(recurrent_states) is not None:  # the step already moved it
            return recurrent_states
        prefill = prefill_of(recurrent_states)
        if prefill is None:
            return original(self, recurrent_states, state_idx, **kwargs)
        handle = prefill.interception.hand_off(prefill, recurrent_states)
        self.recurrent_states[state_idx] = handle
        self.is_recurrent_states_initialized[state_idx] = True
        conv = self.conv_states[state_idx]
        if conv is not None:
            prefill.interception.report.conv_bytes[prefill.layer] = conv[0].numel() * conv.element_size()
        return handle

    return update_recurrent_state


def _reorder(original: Callable[..., Any]) -> Callable[..., Any]:
    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        held = {index: holding_of(tensor) for index, tensor in self.recurrent_states.items()}
        original(self, beam_idx)
        for index, holding in held.items():
            if holding is not None:
                rows = beam_idx.cpu()
                holding.state.select(rows)
                self.recurrent_states[index] = holding.handle(len(rows), self.recurrent_states[index].device)

    return reorder_cache


def _batch_method(
    layer: Any, name: str, rows_of: Callable[[Any, Any], Tensor | None]
) -> Callable[[Any], Callable[..., None]]:
    """A method of ``layer`` that no release has: it reorders by the rows that its argument stands for."""

    def method(self: Any, argument: Any) -> None:
        rows = rows_of(self, argument)
        if rows is not None:
            layer.reorder_cache(self, rows)
        attention = getattr(super(layer, self), name, None)  # the other half of a hybrid layer
        if attention is not None:
            attention(argument)

    return lambda _: method


def _repeated(layer: Any, repeats: int) -> Tensor | None:
    # Some releases give layers without any state, such as an MLP, an empty layer of this class.
    batch = next((len(t) for t in layer.conv_states.values() if t is not None), None)
    return None if batch is None else torch.arange(batch, device=layer.device).repeat_interleave(repeats)
