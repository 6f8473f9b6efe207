"""Decode states of a model in pooled memory: what kernels decode on where the model runs on a GPU.

``DeviceLayers`` is the memory of one batch: a prefill's first hand-off makes it, every further layer adds its own, and
layers whose windows are equally long share the counters of their slots (``LayerGroup``).  ``DeviceLayer`` is one layer
with what interception and caches ask of a ``DecodeState``, and does what that does: on the CPU, where the torch twins
stand in for the kernels, bit for bit.  Only ``Diverged`` is not raised where a kernel stores a state: nobody looks.

In ``step`` the host never waits for the device.  It waits in ``take_back`` and its question ``reach``, in a further
chunk of a prompt, and where somebody asks what was exercised.

What kernels do not serve is a ``DecodeState`` on the same device, torch op by torch op, and ``served`` says why.
"""

import functools
import logging
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from quantlab.models.device_groups import LayerGroup
from quantlab.models.device_layer import DeviceHeadGroups, DeviceLayer, part_shapes
from quantlab.schemes import LayerState, checks
from quantlab.schemes.backend import choose
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.pool import allocate_pool, unpoolable
from quantlab.schemes.rules import HeadGroup, number_text

logger = logging.getLogger(__name__)


HeldState: TypeAlias = LayerState | DeviceLayer | DeviceHeadGroups
"""What holds one layer of a model."""


class DeviceLayers:
    """The pools of one batch on one device, filled layer by layer as a prefill hands them over.

    sequence_ids: int64 (batch,) or None for 0, 1, ...; with seed and layer numbers they name the random bits.
    ``numbers``: of the layers that are there.
    """

    def __init__(
        self,
        batch: int,
        device: torch.device,
        *,
        sequence_ids: Tensor | None = None,
        seed: int = 0,
        drafts: int = 0,
    ):
        self.batch, self.device = batch, device
        self.numbers: set[int] = set()
        ids = torch.arange(batch) if sequence_ids is None else checks.sequence_ids(sequence_ids, batch)
        self._ids, self._seed, self._drafts = ids, seed, drafts
        self._groups: dict[int, LayerGroup] = {}

    def add(
        self,
        layer: int,
        groups: Sequence[HeadGroup],
        family: str,
        initial: Tensor,
        key_heads: int | None = None,
    ) -> DeviceLayer | DeviceHeadGroups:
        """A layer whose prefill ended in ``initial`` (batch, heads, value_dim, key_dim) on the device.

        groups: its heads by policy, all of which must have a layout in a pool.
        """
        _, heads, value_dim, key_dim = initial.shape
        shape = checks.state_shape(heads, value_dim, key_dim, key_heads)
        self.numbers.add(layer)
        parts = []
        for part, (group, own) in enumerate(zip(groups, part_shapes(groups, shape), strict=True)):
            window = group.policy.window
            with torch.inference_mode(False):
                if window not in self._groups:
                    ids = self._ids.to(self.device, copy=True)
                    self._groups[window] = LayerGroup(window, ids, self._seed, self._drafts)
                shared = self._groups[window]
                (pool,) = allocate_pool(
                    group.policy,
                    family,
                    own,
                    self.batch,
                    layers=[layer],
                    drafts=shared.room,
                    counters=shared.counters,
                )
            given = initial if len(groups) == 1 else initial[:, list(group.heads)]
            shared.add((layer, part), pool, given)
            parts.append(DeviceLayer(self, shared, layer, part))
        return parts[0] if len(parts) == 1 else DeviceHeadGroups(parts, groups, shape)


def served(
    groups: Sequence[HeadGroup],
    family: str,
    shape: StateShape,
    device: torch.device,
    pools: bool | None = None,
) -> tuple[bool, str]:
    """Whether a layer is to be held in a pool, and what decodes it, or why not, as ``PolicyReport.backends`` says it.

    pools: None for where kernels serve all of it; True for wherever there is a layout, served by the torch twins if
    need be; False for nowhere.
    """
    if pools is False:
        return False, f"torch on {device}: pools are switched off"
    found = []
    for group, own in zip(groups, part_shapes(groups, shape), strict=True):
        if pools and (reason := unpoolable(group.policy, family, own)):
            return False, f"torch on {device}: a pool takes {reason}"
        backend = choose("steps.decode_token", device, group.policy, family, own)
        if backend.kind == "torch" and not pools:
            return False, f"torch on {device}: {backend.reason}"
        # Kernels number the heads of a pool from 0, and by these the random words of a whole layer.
        if group.policy.checkpoint.stochastic and group.heads != tuple(range(len(group.heads))):
            text = f"stochastic rounding of heads {number_text(group.heads)}, which do not begin the layer"
            _say(device, text)
            return False, f"torch on {device}: no kernel serves {text}"
        found.append(f"{backend.kind} on {device}: {backend.reason}")
    return True, "; ".join(dict.fromkeys(found))


@functools.cache
def _say(device: torch.device, text: str) -> None:
    logger.warning("steps.decode_token on %s: torch, because no kernel serves %s", device, text)
