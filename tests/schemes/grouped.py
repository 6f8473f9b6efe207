"""Layers whose heads follow different policies, as the tests of head groups make and compare them."""

import pytest
import torch

from quantlab.errors import InputError
from quantlab.schemes import (
    HeadGroup,
    HeadGroups,
    parse_policy,
    start_groups,
)
from tests.schemes.streams import stream
from tests.schemes.test_all_or_nothing import live_bits

MIXED = ("fp16+sr/nvfp4@4", "fp32@5:buffer=bf16", "int8+ef@1")
MIXED_HEADS = ((0, 1, 3), (4,), (2, 5))


def split(policies, heads):
    return [HeadGroup(parse_policy(p), tuple(h)) for p, h in zip(policies, heads, strict=True)]


def begin_groups(groups, s, **changes):
    options = {"key_heads": s.key_heads, "rates": s.rates, "seed": 11} | changes
    return start_groups(groups, s.family, s.initial, **options)


def begin_mixed(s, policies=MIXED, heads=MIXED_HEADS, **changes):
    state = begin_groups(split(policies, heads), s, **changes)
    assert isinstance(state, HeadGroups)
    return state


def mixed_stream(family="gated_delta", **changes):
    return stream(family, **({"heads": 6, "key_heads": 3} | changes))


def stored(state, heads):
    """What is stored of these heads of a plain state: decoded values are as good as the codes."""
    found = {}
    for part, store in state._stores().items():
        found[f"{part}.decoded"] = store.decoded[:, list(heads)]
        if store.residual is not None:
            found[f"{part}.residual"] = store.format.residual_values(store.residual)[:, list(heads)]
        found |= {f"{part}.{n}": getattr(store, n) for n in ("numbers", "sequence_ids", "live")}
        found |= {f"{part}.unread": state._unread[part], f"{part}.stores": state._read_stores[part]}
    return found | {"cursor": state.cursor, "pending": state.pending}


def assert_same_stored(state, plain):
    """Each group of ``state`` holds, bit for bit, what ``plain`` of its policy holds of its heads."""
    for group, own in zip(state.groups, state.states, strict=True):
        expected = stored(plain[group.policy], group.heads)
        found = stored(own, range(len(group.heads)))
        assert [n for n in expected if not torch.equal(expected[n], found[n])] == []


def refusal(action, *arguments, **options):
    with pytest.raises(InputError) as refused:
        action(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def all_bits(state):
    return {f"{i}.{n}": t for i, own in enumerate(state.states) for n, t in live_bits(own).items()}


def changed(before, state):
    after = all_bits(state)
    return [name for name in before if not torch.equal(before[name], after[name])]
