"""Handles: empty tensors that sit in a cache's place for a recurrent state and point to a decode state."""

import weakref
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.models.device_states import HeldState
from quantlab.models.families import Family
from quantlab.recurrences import StepInputs

if TYPE_CHECKING:
    from quantlab.models.interception import Interception


class Holding:
    """What a handle points to: one layer's decode state.

    While the cache records its past (``activate_past_recording``), tokens are read as drafts: a forward accepts those
    of the forward before it, and ``crop`` takes some back.  recorded: tokens that were read since the last crop.
    """

    def __init__(self, interception: "Interception", family: Family, state: HeldState):
        self.interception, self.family, self.state = interception, family, state
        self.recorded = 0
        self._cache_layer: weakref.ref[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Holding":
        # A copied cache is a fork of its sequences: the state is copied, the interception (and the model)
        # is not.
        copy = Holding(self.interception, self.family, deepcopy(self.state, memo))
        copy.recorded = self.recorded
        layer = self._cache_layer and self._cache_layer()
        if layer is not None:
            copy.sit_in(memo.get(id(layer), layer))
        self.interception.adopt(copy)
        return copy

    def handle(self, batch: int, device: torch.device) -> Tensor:
        # The batch dimension is real, so that code asking a state for its batch size gets the right answer.
        # It is float32, as a real state is, because a model may ask for that: a cast would lose the attribute.
        tensor = torch.empty((batch, 0), dtype=torch.float32, device=device)
        tensor._quantlab_holding = self  # pyright: ignore[reportAttributeAccessIssue]
        return tensor

    def sit_in(self, cache_layer: Any) -> None:
        """The handle stands in this layer of a cache."""
        self._cache_layer = weakref.ref(cache_layer)

    @property
    def recording(self) -> bool:
        """Whether the cache keeps its past, so that it can be cropped."""
        layer = self._cache_layer and self._cache_layer()
        return layer is not None and layer.record_past

    def step(self, inputs: StepInputs) -> Tensor:
        """Decode one token: (B, heads, value_dim)."""
        if self.recording:
            return self.verify(inputs.map(lambda t: t[:, None]))[:, 0]
        self.accept()
        return self.state.step(inputs)

    def verify(self, tokens: StepInputs) -> Tensor:
        """Read T tokens that ``crop`` may take back: (B, T, heads, value_dim)."""
        count = tokens.v.shape[1]
        check_drafts(count, self.state.drafts)
        recorded = self.recorded
        self.accept()
        outputs = self.state.verify(tokens).contiguous()  # models view them in other shapes
        self.recorded = recorded + count
        return outputs

    def accept(self) -> None:
        """Nothing that was read will be taken back."""
        if self.recorded:
            self.state.commit(self.state.pending)
            self.recorded = 0

    @property
    def reach(self) -> int:
        """Newest tokens that ``crop`` can take back."""
        # The convolution keeps what was recorded since the last crop, the window what no flush has folded.
        return min(self.recorded, int(self.state.reach.min())) if self.recorded else 0

    def crop(self, count: int) -> None:
        """Take back ``count`` tokens, at most ``reach``; the others stay."""
        if self.recorded:
            self.state.take_back(torch.full((self.state.batch,), count))
            self.recorded = 0


def holding_of(tensor: Any) -> Holding | None:
    """What ``tensor`` points to, if it is a handle."""
    return getattr(tensor, "_quantlab_holding", None)


def check_drafts(count: int, drafts: int) -> None:
    """InputError if one forward reads more tokens than can be taken back."""
    if count > drafts:
        expected = (
            f"at least {count}, the tokens of one forward of a cache that records its past (drafts={count})"
        )
        raise InputError("drafts", drafts, expected)


@dataclass(frozen=True)
class Prefill:
    """Rides on the final state that a prefill op returns, until the cache layer takes that state."""

    interception: "Interception"
    family: Family
    layer: int
    key_heads: int
    rates: Tensor | None
    continues: Holding | None

    def ride(self, state: Tensor) -> None:
        """Take a seat on ``state``."""
        state._quantlab_prefill = self  # pyright: ignore[reportAttributeAccessIssue]


def prefill_of(tensor: Any) -> Prefill | None:
    """What rides on ``tensor``, if a prefill op returned it."""
    return getattr(tensor, "_quantlab_prefill", None)
