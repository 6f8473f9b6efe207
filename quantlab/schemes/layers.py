"""The decode state of one layer, whatever its heads follow: made, and read back."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.schemes import checks
from quantlab.schemes.head_groups import HeadGroups, check_groups, key_heads_of
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import Policy
from quantlab.schemes.rows import DRAFTS
from quantlab.schemes.rules import HeadGroup, PolicyRules, parse_rules
from quantlab.schemes.state import DecodeState, start

LayerState: TypeAlias = DecodeState | HeadGroups
"""What holds one layer: a plain state if its heads follow one policy."""


def start_groups(
    groups: Sequence[HeadGroup],
    family: str,
    initial: Tensor,
    *,
    key_heads: int | None = None,
    rates: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    sequence_ids: Tensor | None = None,
    drafts: int = DRAFTS,
    arithmetic: torch.dtype | None = None,
) -> LayerState:
    """``start`` for a layer whose heads follow the policies of ``groups`` (``PolicyRules.of_layer``).

    Every head must be in one group, once.  One group gives a plain ``DecodeState``.  The other arguments are those of
    ``start``, of the whole layer.
    """
    groups = tuple(groups)
    batch, heads, value_dim, key_dim = checks.initial(initial)
    check_groups(groups, heads)
    if len(groups) == 1:
        return start(
            groups[0].policy,
            family,
            initial,
            key_heads=key_heads,
            rates=rates,
            seed=seed,
            layer=layer,
            sequence_ids=sequence_ids,
            drafts=drafts,
            arithmetic=arithmetic,
        )
    shape = checks.state_shape(heads, value_dim, key_dim, key_heads)
    checks.options(family, shape, rates, seed, layer, drafts, initial.device)
    repeat = heads // shape.key_heads
    states = [
        DecodeState(
            group.policy,
            family,
            StateShape(len(group.heads), value_dim, key_dim, len(key_heads_of(group.heads, repeat))),
            batch,
            rates=None if rates is None else rates[list(group.heads)],
            seed=seed,
            layer=layer,
            sequence_ids=sequence_ids,
            drafts=drafts,
            arithmetic=arithmetic,
            heads=group.heads,
            device=initial.device,
        )
        for group in groups
    ]
    state = HeadGroups(states, shape.key_heads)
    state.hand_off(initial)
    return state


def start_layer(
    policy: "str | Path | Policy | PolicyRules",
    family: str,
    initial: Tensor,
    *,
    key_heads: int | None = None,
    rates: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    sequence_ids: Tensor | None = None,
    drafts: int = DRAFTS,
    arithmetic: torch.dtype | None = None,
) -> LayerState:
    """``start`` under a policy or under what rules (a path that ends in .toml) say of ``layer``.

    Raises InputError for rules that name heads that the layer does not have; that every rule decides something is a
    matter of the whole model (``PolicyRules.check``).
    """
    rules, heads = parse_rules(policy), checks.initial(initial)[1]
    if not checks.is_integer(layer):
        raise InputError("layer", layer, "an integer")
    rules.check_layer(layer, heads, family)
    return start_groups(
        rules.of_layer(layer, heads),
        family,
        initial,
        key_heads=key_heads,
        rates=rates,
        seed=seed,
        layer=layer,
        sequence_ids=sequence_ids,
        drafts=drafts,
        arithmetic=arithmetic,
    )


def restore_layer(saved: dict[str, Tensor]) -> LayerState:
    """The state of which ``saved`` is the ``save()``, of either kind.  Raises InputError for anything else."""
    grouped = isinstance(saved, dict) and any(name.startswith("group0.") for name in saved)
    return HeadGroups.restore(saved) if grouped else DecodeState.restore(saved)
