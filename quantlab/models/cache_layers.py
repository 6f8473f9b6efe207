"""Teach the linear-attention layers of a transformers cache about handles."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.models.handles import Holding, holding_of, prefill_of
from quantlab.models.patching import replace


def patch_cache_layers(stack: contextlib.ExitStack) -> None:
    """Patch caches and their linear-attention layers until ``stack`` closes; those without a handle go on as before."""
    from transformers.cache_utils import Cache
    from transformers.cache_utils import LinearAttentionLayer as Layer

    replace(stack, Layer, "update_recurrent_state", _update)
    replace(stack, Layer, "reorder_cache", _reorder)
    select = _batch_method(Layer, "batch_select_indices", lambda _, rows: rows)
    replace(stack, Layer, "batch_select_indices", select)
    replace(
        stack, Layer, "batch_repeat_interleave", _batch_method(Layer, "batch_repeat_interleave", _repeated)
    )
    replace(stack, Layer, "reset", _reset)
    replace(stack, Layer, "offload", _keeping)
    replace(stack, Layer, "prefetch", _keeping)
    replace(stack, Layer, "crop", _crop)
    replace(stack, Layer, "is_croppable", _is_croppable)
    replace(stack, Cache, "crop", _crop_all)
    replace(stack, Cache, "is_croppable", _all_croppable)


def _held(layer: Any) -> Iterator[tuple[int, Holding]]:
    """The handles of a layer, by state number."""
    for index, tensor in layer.recurrent_states.items():
        if (holding := holding_of(tensor)) is not None:
            yield index, holding


def _empty(layer: Any) -> bool:
    """Whether this is what some releases give layers without any state, such as an MLP, in place of a cache layer."""
    states = getattr(layer, "conv_states", None)
    return states is not None and not any(
        t is not None for t in (*states.values(), *layer.recurrent_states.values())
    )


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_recurrent_state(
        self: Any, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if recurrent_states is self.recurrent_states[state_idx]:  # a handle whose state the step moved
            return recurrent_states
        prefill, handle = prefill_of(recurrent_states), recurrent_states
        if prefill is not None:
            handle = prefill.interception.hand_off(prefill, recurrent_states)
        holding = holding_of(handle)
        if holding is None:
            return original(self, recurrent_states, state_idx, **kwargs)
        holding.sit_in(self)
        self.recurrent_states[state_idx] = handle
        self.is_recurrent_states_initialized[state_idx] = True
        conv = self.conv_states[state_idx]
        if conv is not None:
            values = conv[0, ..., : self.conv_kernel_size[state_idx]].numel()
            report = holding.interception.report
            report.conv_bytes[holding.state.layer] = values * conv.element_size()
        return handle

    return update_recurrent_state


def _reorder(original: Callable[..., Any]) -> Callable[..., Any]:
    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        held = list(_held(self))
        for _, holding in held:  # first: what raises leaves the handles where they are
            holding.state.select(beam_idx)
        original(self, beam_idx)
        for index, holding in held:
            self.recurrent_states[index] = holding.handle(len(beam_idx), self.recurrent_states[index].device)

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
    if _empty(layer):
        return None
    batch = next(len(t) for t in layer.conv_states.values() if t is not None)
    return torch.arange(batch, device=layer.device).repeat_interleave(repeats)


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset(self: Any) -> None:
        held = list(_held(self))
        original(self)
        for index, _ in held:  # the sequences are over; zeros in a handle would leave their state alive
            self.recurrent_states[index] = None
            self.is_recurrent_states_initialized[index] = False

    return reset


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A move between devices: the decode state stays where it is, and its handle must stay one."""

    def move(self: Any) -> None:
        held = list(_held(self))
        original(self)
        for index, holding in held:
            moved = self.recurrent_states[index]
            self.recurrent_states[index] = holding.handle(len(moved), moved.device)

    return move


def _crop(original: Callable[..., Any]) -> Callable[..., Any]:
    def crop(self: Any, tokens_to_remove: int) -> None:
        if self.record_past and _empty(self):
            return
        held = list(_held(self))
        if self.record_past:  # otherwise transformers has something to say
            _check_crop(held, tokens_to_remove)
        original(self, tokens_to_remove)
        for _, holding in held:
            holding.crop(-tokens_to_remove)

    return crop


def _crop_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def crop(self: Any, tokens_to_remove: int) -> None:
        # Before any layer has lost a token: attention comes first in some models, and windows may differ.
        for layer in self.layers:
            if hasattr(layer, "recurrent_states") and layer.record_past:
                _check_crop(list(_held(layer)), tokens_to_remove)
        original(self, tokens_to_remove)

    return crop


def _check_crop(held: list[tuple[int, Holding]], tokens_to_remove: int) -> None:
    for _, holding in held:
        if -tokens_to_remove > holding.reach:
            raise InputError(
                "crop",
                f"{-tokens_to_remove} tokens at layer {holding.state.layer}",
                f"at most {holding.reach}: those read since the last crop and not folded by a flush yet",
            )


def _is_croppable(original: property) -> property:
    def is_croppable(self: Any) -> bool:
        if any(True for _ in _held(self)):
            return self.record_past
        return original.__get__(self)

    return property(is_croppable)


def _all_croppable(original: property) -> property:
    def is_croppable(self: Any) -> bool:
        if not any(True for layer in self.layers if hasattr(layer, "recurrent_states") for _ in _held(layer)):
            return original.__get__(self)
        return all(layer.is_croppable for layer in self.layers if not _empty(layer))

    return property(is_croppable)
