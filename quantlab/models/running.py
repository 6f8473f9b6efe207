"""Which layers of a model run now, thread by thread, and what their model was asked for."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from quantlab.models.families.base import refuse_packed


class Running(NamedTuple):
    """A layer whose forward runs: its number, its module, what the forward was given, and the frame that runs it."""

    layer: int
    module: nn.Module
    given: tuple[Any, ...]
    frame: FrameType | None = None

    def cache_layer(self) -> Any:
        """The layer of the cache that the forward was given; None without a cache."""
        for value in self.given:
            if hasattr(value, "update_recurrent_state"):
                return value.layers[self.layer] if self.layer < len(value.layers) else None
        return None

    def cached_state(self) -> Tensor | None:
        """What the layer's cache holds for a recurrent state, for an op that is not told."""
        return getattr(self.cache_layer(), "recurrent_states", {}).get(0)


class RunningLayers:
    """Kept by hooks on the model and on its layers.  Those that a copy of the model has do nothing.

    abandoned: forwards of the whole model that began and did not end, because something raised.
    """

    def __init__(self) -> None:
        self.abandoned = 0
        self._layers: dict[int, list[Running]] = {}
        self._kept: dict[int, Any] = {}
        self._idle = False  # what a copy of the model has

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunningLayers":
        return _idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle, ()

    def watch(self, model: nn.Module, stack: contextlib.ExitStack) -> None:
        """Hook ``model`` and its layers until ``stack`` closes."""
        stack.callback(self._layers.clear)
        stack.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(self._end).remove)
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)

    def innermost(self) -> Running | None:
        """The layer that this thread runs; None where another model shares the module file."""
        running = self._layers.get(threading.get_ident())
        # torch calls no hook of a forward that KeyboardInterrupt ended.
        while running and not _is_below(running[-1].frame):
            running.pop()
        return running[-1] if running else None

    @contextlib.contextmanager
    def nothing(self) -> Iterator[None]:
        """No layer runs in this thread, inside."""
        thread = threading.get_ident()
        running = self._layers.pop(thread, [])
        try:
            yield
        finally:
            self._layers[thread] = running

    def logits_kept(self) -> int | None:
        """How many tokens this forward of the model gives logits of, if it was told a number."""
        kept = self._kept.get(threading.get_ident())
        return kept if isinstance(kept, int) and kept > 0 else None

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._idle:
            return
        refuse_packed(None, kwargs)  # some models take such an argument and drop it
        self.abandoned += 1
        self._kept[threading.get_ident()] = kwargs.get("logits_to_keep")

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._idle:
            return
        self.abandoned -= 1
        self._kept.pop(threading.get_ident(), None)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._idle:
            return
        given, frame = (*args, *kwargs.values()), sys._getframe(1)
        running = Running(int(module.layer_idx), module, given, frame)  # pyright: ignore[reportArgumentType]
        self._layers.setdefault(threading.get_ident(), []).append(running)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # It is not there if the block was entered while this forward ran; above it stands what an exception left.
        running = self._layers.get(threading.get_ident(), [])
        if any(one.module is module for one in running):
            while running.pop().module is not module:
                pass


def _idle() -> RunningLayers:
    """For hooks that a copy of a model has."""
    found = RunningLayers()
    found._idle = True
    return found


def _is_below(frame: FrameType | None) -> bool:
    """Whether this thread is inside of ``frame``."""
    at = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None
