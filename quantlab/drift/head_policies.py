"""What a run follows on a stream: one policy, or rules that give its heads several."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from quantlab.drift.predictor import Prediction
from quantlab.drift.sources import StreamSource
from quantlab.errors import InputError
from quantlab.schemes import HeadGroup, Policy, PolicyRules, parse_rules

Followed: TypeAlias = Policy | PolicyRules
"""A policy for every head, or rules with at least one [[rule]]."""


def parse_followed(value: "str | Path | Policy | PolicyRules") -> Followed:
    """``parse_rules``; a plain policy where there is no rule beside the default."""
    rules = parse_rules(value)
    return rules if rules.rules else rules.default


def layer_of(source: StreamSource) -> int:
    """The layer whose rules hold: the one that the stream was taken from ("layer" of its meta), else 0."""
    layer = source.meta.get("layer", 0)
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise InputError("stream layer", layer, "a layer number")
    return layer


def groups_on(followed: Followed, source: StreamSource) -> tuple[HeadGroup, ...]:
    """The heads of the stream by policy."""
    if isinstance(followed, Policy):
        return (HeadGroup(followed, tuple(range(source.heads))),)
    return followed.of_layer(layer_of(source), source.heads)


def check_fits(followed: Followed, source: StreamSource) -> None:
    """InputError for heads that the stream does not have and for policies that its family cannot use."""
    rules = parse_rules(followed)
    rules.check_layer(layer_of(source) if rules.rules else 0, source.heads, source.family)


def policies_on(followed: Iterable[Followed], source: StreamSource) -> list[Policy]:
    """Every policy that some head follows, once."""
    return list(dict.fromkeys(group.policy for one in followed for group in groups_on(one, source)))


def whole_window(groups: Sequence[HeadGroup]) -> int:
    """Tokens after which the windows of all groups have ended together."""
    return math.lcm(*(group.policy.window for group in groups))


def of_heads(groups: Sequence[HeadGroup], heads: int, found: Mapping[Policy, Prediction]) -> Prediction:
    """The prediction for each head by its own policy; units are sequences x heads."""
    first = found[groups[0].policy]
    if len(groups) == 1:
        return first
    state, output = first.state.copy(), first.output.copy()
    head = np.arange(state.shape[1]) % heads
    for group in groups[1:]:
        columns = np.isin(head, group.heads)
        state[:, columns] = found[group.policy].state[:, columns]
        output[:, columns] = found[group.policy].output[:, columns]
    return Prediction(state, output)
