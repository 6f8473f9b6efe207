"""Heads of one layer under different policies: each holds what it would hold if the whole layer had its policy."""

from itertools import combinations

import pytest
import torch

from quantlab.recurrences import expand_groups, get_recurrence
from quantlab.schemes import (
    DecodeState,
    HeadGroups,
    PolicyRules,
    Rule,
    SlotPool,
    StateShape,
    parse_policy,
    start,
    start_layer,
)
from quantlab.schemes.head_groups import key_heads_of
from quantlab.schemes.ledger import ledger
from tests.schemes.grouped import (
    MIXED,
    MIXED_HEADS,
    assert_same_stored,
    begin_groups,
    begin_mixed,
    mixed_stream,
    refusal,
    split,
)
from tests.schemes.streams import begin, run, same_bits, stream, tokens

# The second group uses an uneven number of heads of a key head, the third its heads in an order of their own.
SPLITS = (((0, 1), (2, 3)), ((0, 1, 3), (2,)), ((1, 2), (0, 3)), ((3,), (1,), (0, 2)))
FLOAT64 = torch.float64
TOLERANCE = 1e-12
"""Of outputs and states near 1 in float64, where sums of at most 32 terms may run in another order: 32 * 2^-53 = 4e-15,
and as much again for each of some twenty tokens behind them."""


@pytest.mark.parametrize("policy", ["fp32@1", "fp16+sr/nvfp4@4", "int8+ef@4"])
def test_one_group_is_a_plain_state(policy):
    s = stream("gated_delta")
    state = begin_groups(split([policy], [range(4)]), s, layer=2)
    plain = begin(policy, s, layer=2)
    assert type(state) is DecodeState
    assert torch.equal(run(state, s), run(plain, s))
    assert same_bits(state, plain)


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("mamba2", SPLITS[0]),
        ("gated_delta", SPLITS[1]),
        ("kimi_delta", SPLITS[2]),
        ("mamba1", SPLITS[3]),
        ("gated_delta", SPLITS[3]),
    ],
)
def test_heads_split_under_one_policy_hold_the_bits_of_the_whole_layer(family, heads):
    """With window 1 nothing is summed over tokens, so that every bit is the same, outputs included."""
    s = stream(family, steps=5)
    for policy in ("fp16+sr@1", "int8+ef@1", "fp8+sr13/nvfp4+sr@1:flush_read=copy"):
        plain = begin(policy, s, layer=3)
        state = begin_groups(split([policy] * len(heads), heads), s, layer=3)
        assert torch.equal(run(state, s), run(plain, s))
        assert torch.equal(state.materialize(), plain.materialize())
        assert torch.equal(state.read_state(), plain.read_state())
        assert state.exercised == plain.exercised
        assert_same_stored(state, {plain.policy: plain})


@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta", "mamba1"])
def test_every_head_is_that_of_its_own_policy(family):
    """Every operation on three groups with windows of 4, 5 and 1, beside three plain states of all heads."""
    s = mixed_stream(family, steps=26)
    options = {"arithmetic": FLOAT64, "layer": 3}
    state = begin_mixed(s, **options)
    plain = {group.policy: begin(str(group.policy), s, **options) for group in state.groups}
    rows = torch.tensor([2, 0])

    def both(operation):
        """The same on all of them: outputs, head by head, and what is stored."""
        outputs, expected = operation(state), {p: operation(one) for p, one in plain.items()}
        for group in state.groups if outputs is not None else ():
            difference = (outputs - expected[group.policy])[..., list(group.heads), :]
            assert float(difference.abs().max()) < TOLERANCE
        assert_same_stored(state, plain)
        for group in state.groups:
            for read in ("materialize", "read_state"):
                difference = getattr(state, read)() - getattr(plain[group.policy], read)()
                assert float(difference[:, list(group.heads)].abs().max()) < TOLERANCE

    for t in range(6):
        both(lambda one, t=t: one.step(s.step(t)))
    both(lambda one: one.verify(tokens(s, 6, 10), None, torch.tensor([4, 0, 2])))
    assert state.pending.tolist() == [4, 0, 2]
    both(lambda one: one.commit(torch.tensor([3, 0, 2])))
    both(lambda one: one.select(torch.tensor([2, 1, 2])))
    both(lambda one: one.rename(rows, torch.tensor([7, 8])))
    both(lambda one: one.step(s.step(10).map(lambda t: t[rows]), rows))
    both(lambda one: one.flush(rows))
    both(lambda one: one.extend(tokens(s, 11, 18), None, torch.tensor([7, 3, 0])))
    both(lambda one: one.reset(rows, s.initial[rows], torch.tensor([17, 18])))
    for t in range(18, 26):
        both(lambda one, t=t: one.step(s.step(t)))
    both(lambda one: one.flush())
    both(lambda one: one.discard(torch.tensor([1])))
    both(lambda one: one.hand_off(s.initial))
    assert state.batch == 3
    assert state.dtype == FLOAT64


def test_heads_with_words_of_a_layer_of_their_own_would_show():
    s = mixed_stream()
    plain = begin("fp16+sr@1", s)
    state = begin_groups(split(["fp16+sr@1"] * 2, [(0, 2, 4), (1, 3, 5)]), s)
    assert isinstance(state, HeadGroups)
    for own in state.states:
        own._checkpoint.heads = None
    run(state, s, 0, 2)
    run(plain, s, 0, 2)
    with pytest.raises(AssertionError):
        assert_same_stored(state, {plain.policy: plain})


def test_the_key_heads_of_a_group_are_those_of_its_heads():
    """Over every subset of six heads: head i of a group finds the key head that it has in the layer."""
    for repeat in (1, 2, 3, 6):
        for count in range(1, 7):
            for heads in combinations(range(6), count):
                used = torch.tensor(key_heads_of(heads, repeat))
                assert count % len(used) == 0
                found = expand_groups(used, count, 0)
                assert found.tolist() == [head // repeat for head in heads]
    assert key_heads_of((0, 1, 4, 5), 2) == [0, 2]
    assert key_heads_of((0, 2, 4), 2) == [0, 1, 2]
    assert key_heads_of((0, 1, 2), 2) == [0, 0, 1]


def test_the_ledger_charges_each_group_for_its_heads_and_its_key_heads():
    """Heads 0, 1, 3 use key heads 0 and 1 of three, which their window holds once each."""
    s = mixed_stream()
    state = begin_mixed(s)
    total = state.ledger
    parts = [
        ledger(parse_policy(policy), get_recurrence(s.family), StateShape(heads, 16, 32, key_heads))
        for policy, heads, key_heads in zip(MIXED, (3, 1, 2), (2, 1, 2), strict=True)
    ]
    for side in ("read", "written", "held"):
        names = {name for part in parts for name in getattr(part, side)}
        assert getattr(total, side) == {n: sum(getattr(p, side).get(n, 0.0) for p in parts) for n in names}
    assert total.values == 6 * 16 * 32
    assert state.bits_per_value == 8 * total.bytes_held / total.values
    # Without a window there is nothing to share: the parts are those of the whole layer.
    for policy in ("nvfp4@1", "fp16+sr@1"):
        halves = begin_groups(split([policy] * 2, [(0, 3, 5), (1, 2, 4)]), s)
        plain = begin(policy, s).ledger
        assert halves.ledger.held == plain.held


def test_what_is_in_force_is_said_group_by_group():
    state = begin_mixed(mixed_stream())
    assert state.effective_policy.split("; ")[1] == (
        "heads 4: fp32@5:buffer=bf16:contents=raw:current=exact:flush=full:dot=ieee"
    )
    assert state.effective_policy.startswith("heads 0-1,3: fp16+sr/nvfp4@4:")
    assert state.groups == tuple(split(MIXED, MIXED_HEADS))


def test_exercised_is_the_least_and_the_cursor_the_fullest():
    s = mixed_stream(steps=13)
    state = begin_mixed(s)
    assert state.exercised == {"checkpoint": 0, "read_copy": 0}
    run(state, s)
    counts = [own.exercised for own in state.states]
    assert counts[0]["read_copy"] == 4  # hand-off, and after tokens 4, 8, 12
    assert counts[1]["checkpoint"] == 3
    assert counts[2]["checkpoint"] == 13
    assert state.exercised == {"checkpoint": 3, "read_copy": 4}
    assert [own.cursor.tolist()[0] for own in state.states] == [1, 3, 0]
    assert state.cursor.tolist() == [3, 3, 3]
    no_copy = begin_groups(split(["fp32@4", "fp32@1"], [(0, 1, 2), (3, 4, 5)]), s)
    assert no_copy.exercised == {"checkpoint": 0, "read_copy": None}


def rules():
    one, two = frozenset([1]), frozenset([0, 2])
    return PolicyRules(
        parse_policy("fp32@4"),
        (Rule(one, None, parse_policy("bf16@1")), Rule(None, two, parse_policy("fp16+sr@4"))),
    )


def test_a_layer_starts_under_what_rules_say_of_it(tmp_path):
    (tmp_path / "r.toml").write_text(rules().toml())
    s = mixed_stream()
    for layer, policy in ((0, "fp32@4"), (1, "bf16@1")):
        expected = split([policy, "fp16+sr@4"], [(1, 3, 4, 5), (0, 2)])
        for given in (rules(), str(tmp_path / "r.toml"), tmp_path / "r.toml"):
            state = start_layer(given, s.family, s.initial, key_heads=3, layer=layer)
            assert isinstance(state, HeadGroups)
            assert set(state.groups) == set(expected)
            assert state.layer == state.states[0].layer == layer
    plain = start_layer("fp32@4", s.family, s.initial, key_heads=3, layer=1)
    assert same_bits(plain, start("fp32@4", s.family, s.initial, key_heads=3, layer=1))
    absent = PolicyRules(parse_policy("fp32@4"), (Rule(None, frozenset([6]), parse_policy("bf16@1")),))
    message = refusal(start_layer, absent, s.family, s.initial, key_heads=3, layer=1)
    assert "heads from 0 to 5, which is what layer 1 has" in message
    assert refusal(start_layer, "fp32@4", s.family, s.initial, layer="a").startswith("layer ")


def test_slots_hold_sequences_of_a_layer_with_groups():
    s = mixed_stream()
    pool = SlotPool(rules(), s.family, StateShape(6, 16, 32, 3), 4, seed=11, layer=1)
    state = start_layer(rules(), s.family, s.initial, key_heads=3, seed=11, layer=1)
    slots = [pool.allocate(initial) for initial in s.initial]
    for t in range(4):
        assert torch.equal(pool.step(s.step(t), slots), state.step(s.step(t)))
    (branch,) = pool.fork(slots[1])
    parked = pool.preempt(slots[1])
    pool.copy(slots[0], branch)
    back = pool.restore(parked)
    out = pool.step(s.step(4).map(lambda t: t[[0, 1, 2, 0]]), [slots[0], back, slots[2], branch])
    assert torch.equal(out, state.step(s.step(4))[[0, 1, 2, 0]])
    assert refusal(pool.restore, start("fp32@4", s.family, s.initial[:1], key_heads=3).save())
