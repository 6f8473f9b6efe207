"""Handles: empty tensors that sit in a cache's place for a recurrent state and point to a decode state."""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantlab.models.families import Family
from quantlab.schemes import DecodeState

if TYPE_CHECKING:
    from quantlab.models.interception import Interception


class Holding:
    """What a handle points to: one layer's decode state."""

    def __init__(self, interception: "Interception", family: Family, state: DecodeState):
        self.interception, self.family, self.state = interception, family, state

    def __deepcopy__(self, memo: dict[int, Any]) -> "Holding":
        # A copied cache is a fork of its sequences: the state is copied, the interception (and the model)
        # is not.
        copy = Holding(self.interception, self.family, deepcopy(self.state, memo))
        self.interception.adopt(copy)
        return copy

    def handle(self, batch: int, device: torch.device) -> Tensor:
        # The batch dimension is real, so that code asking a state for its batch size gets the right answer.
        # It is float32, as a real state is, because a model may ask for that: a cast would lose the attribute.
        tensor = torch.empty((batch, 0), dtype=torch.float32, device=device)
        tensor._quantlab_holding = self  # pyright: ignore[reportAttributeAccessIssue]
        return tensor


def holding_of(tensor: Any) -> Holding | None:
    """What ``tensor`` points to, if it is a handle."""
    return getattr(tensor, "_quantlab_holding", None)


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
