"""Heads of one layer under different policies: each holds what it would hold if the whole layer had its policy."""

import contextlib
import copy
import pickle
from itertools import combinations

import pytest
import torch

from quantlab.errors import InputError
from quantlab.recurrences import expand_groups, get_recurrence
from quantlab.schemes import (
    DecodeState,
    Diverged,
    HeadGroup,
    HeadGroups,
    PolicyRules,
    Rule,
    SlotPool,
    StateShape,
    load_decode_state,
    parse_policy,
    save_decode_state,
    start,
    start_groups,
    start_layer,
)
from quantlab.schemes.head_groups import key_heads_of
from quantlab.schemes.layers import restore_layer
from quantlab.schemes.ledger import ledger
from tests.schemes.streams import begin, run, same_bits, stream, tokens
from tests.schemes.test_all_or_nothing import live_bits, with_meta

# The second group uses an uneven number of heads of a key head, the third its heads in an order of their own.
SPLITS = (((0, 1), (2, 3)), ((0, 1, 3), (2,)), ((1, 2), (0, 3)), ((3,), (1,), (0, 2)))
MIXED = ("fp16+sr/nvfp4@4", "fp32@5:buffer=bf16", "int8+ef@1")
MIXED_HEADS = ((0, 1, 3), (4,), (2, 5))
FLOAT64 = torch.float64
TOLERANCE = 1e-12
"""Of outputs and states near 1 in float64, where sums of at most 32 terms may run in another order: 32 * 2^-53 = 4e-15,
and as much again for each of some twenty tokens behind them."""


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


def all_bits(state):
    return {f"{i}.{n}": t for i, own in enumerate(state.states) for n, t in live_bits(own).items()}


def changed(before, state):
    after = all_bits(state)
    return [name for name in before if not torch.equal(before[name], after[name])]


EARLY = ("fp16/nvfp4@4:flush=early", "fp32@4:flush=early", "bf16@4:flush=early")


@pytest.mark.parametrize(
    ("policies", "head"),
    [(MIXED, 0), (MIXED, 4), (EARLY, 5), (("bf16@4", "bf16@4:schedule=step", "fp16@1"), 4)],
)
def test_a_head_that_diverges_changes_no_group(policies, head):
    """Whichever group it is in: those that had gone before are as they were, and the row is named."""
    s = mixed_stream(steps=16)
    state, diverged = begin_mixed(s, policies), 0
    wrong, initial = tokens(s, 12, 15), s.initial[:1].clone()
    wrong.v[1, :, head] = initial[0, head] = torch.nan
    for t in range(4):
        state.step(s.step(t))
        drafted = copy.deepcopy(state)
        drafted.verify(wrong)
        accepted = copy.deepcopy(drafted)
        with contextlib.suppress(Diverged):  # with flush=early nothing is folded before the next forward
            accepted.commit(torch.tensor([3, 3, 3]))
        for tried, operation in (
            (copy.deepcopy(state), lambda one: one.step(wrong.token(0))),
            (copy.deepcopy(state), lambda one: one.verify(wrong)),
            (copy.deepcopy(state), lambda one: one.extend(wrong)),
            (copy.deepcopy(state), lambda one: one.reset(torch.tensor([1]), initial, torch.tensor([9]))),
            (drafted, lambda one: one.commit(torch.tensor([3, 3, 3]))),
            *([(accepted, lambda one: one.step(s.step(5)))] if not bool(accepted.pending.any()) else []),
        ):
            before = all_bits(tried)
            try:
                operation(tried)
            except Diverged as error:
                rows, diverged = error.rows, diverged + 1
            else:
                continue
            assert rows == [1]
            assert changed(before, tried) == []
    assert diverged >= 8  # every reset and every chunk stores


def test_a_hand_off_that_diverges_changes_no_group():
    s = mixed_stream()
    state = begin_mixed(s)
    run(state, s, 0, 3)
    before, initial = all_bits(state), s.initial.clone()
    initial[2, 5] = torch.inf
    with pytest.raises(Diverged, match=r"row 2$"):
        state.hand_off(initial)
    assert changed(before, state) == []


def test_wrong_input_is_refused_before_any_group_moves():
    s = mixed_stream()
    state = begin_mixed(s, ("fp32@16", "fp32@3:flush=early", "fp32@1"))
    run(state, s, 0, 2)
    good, three = s.step(2), tokens(s, 2, 6)
    before = all_bits(state)
    for name in ("q", "k", "v", "log_decay", "beta"):
        short = vars(good) | {name: getattr(good, name)[:, :-1]}
        assert refusal(state.step, type(good)(**short)).startswith(f"{name} ")
    assert "1 to 3: what the window of fp32@3:flush=early" in refusal(state.verify, three)
    assert refusal(state.step, good, torch.tensor([0, 3, 1])).startswith("rows ")
    assert refusal(state.step, None).startswith("inputs ")
    assert refusal(state.extend, good).startswith("v ")
    assert refusal(state.extend, three, None, torch.tensor([5, 0, 0])).startswith("lengths ")
    assert refusal(state.commit, torch.tensor([1, 0, 0])).startswith("counts ")
    assert refusal(state.hand_off, s.initial[:, :5]).startswith("initial ")
    assert refusal(state.reset, torch.tensor([0]), s.initial[:1], torch.tensor([1, 2])).startswith(
        "sequence_ids "
    )
    assert refusal(state.reset, torch.tensor([0, 0]), s.initial[:2]).startswith("rows ")
    assert refusal(state.rename, torch.tensor([0]), torch.tensor([1, 2])).startswith("sequence_ids ")
    assert refusal(state.select, torch.tensor([3])).startswith("rows ")
    assert changed(before, state) == []
    state.verify(tokens(s, 2, 4))
    for operation, arguments in (
        (state.step, [good]), (state.extend, [three]), (state.flush, []), (state.save, []),
    ):  # fmt: skip
        assert "commit first, of at most 2 drafts" in refusal(operation, *arguments)


def test_wrong_groups_are_refused():
    s, one = mixed_stream(), parse_policy("fp32@1")
    for wrong in (
        [],
        [one],
        [HeadGroup(one, (0, 1))],
        [HeadGroup(one, tuple(range(7)))],
        [HeadGroup(one, (0, 1, 2)), HeadGroup(one, (2, 3, 4, 5))],
        [HeadGroup(one, tuple(range(6))), HeadGroup(one, ())],
    ):
        assert refusal(begin_groups, wrong, s).startswith("groups ")
    assert refusal(begin_groups, split(["fp32@1"] * 2, [(1, 0, 2), (3, 4, 5)]), s).startswith("heads ")
    derived = split(["fp32@1", "fp32@4:contents=derived"], [(0, 1, 2), (3, 4, 5)])
    assert "delta rule" in refusal(begin_groups, derived, mixed_stream("mamba2"))
    good = split(MIXED, MIXED_HEADS)
    for name, value in {"key_heads": 4, "seed": "a", "drafts": -1, "sequence_ids": [1], "rates": s.q}.items():
        assert refusal(begin_groups, good, s, **{name: value}).startswith(f"{name} ")
    assert refusal(start_groups, good, "mamba9", s.initial).startswith("family ")
    assert refusal(start_groups, good, s.family, s.initial[0]).startswith("initial ")


@pytest.mark.parametrize("family", ["gated_delta", "mamba1"])
def test_saves_files_forks_and_pickles_continue_bit_for_bit(family, tmp_path):
    s = mixed_stream(family)
    state = begin_mixed(s, layer=4)
    run(state, s, 0, 6)
    path = tmp_path / "state.safetensors"
    save_decode_state(state, path)
    others = [
        HeadGroups.restore(state.save()),
        load_decode_state(path),
        restore_layer(state.save()),
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
    ]
    others.append(begin_mixed(s, layer=4))
    others[-1].place(torch.tensor([2, 0, 1]), HeadGroups.restore(state.save(torch.tensor([2, 0, 1]))))
    expected = run(state, s, 6)
    for other in others:
        assert torch.equal(run(other, s, 6), expected)
        assert same_bits(other, state)
    assert type(restore_layer(begin("fp32@4", s).save())) is DecodeState


def test_rows_of_another_grouping_are_not_placed():
    s = mixed_stream()
    state, rows = begin_mixed(s), torch.tensor([0, 1, 2])
    run(state, s, 0, 2)
    before = all_bits(state)
    for other, word in (
        (begin_mixed(s, heads=((0, 1, 2), (4,), (3, 5))), "groups of the state to place"),
        (begin_mixed(s, policies=("fp16+sr/nvfp4@4", "fp32@4", "int8+ef@1")), "groups of the state to place"),
        (begin("fp32@1", s), "groups of the state to place"),
        (begin_mixed(s, seed=12), "seed of the state to place"),
        (begin_mixed(s, arithmetic=FLOAT64), "arithmetic of the state to place"),
    ):
        assert refusal(state.place, rows, other).startswith(word)
    assert refusal(begin("fp32@1", s).place, rows, state.states[2]).startswith("policy of the state to place")
    # Both of these have a float64 checkpoint first: the groups behind it differ.
    wide = {"policies": ("fp64@4", "fp32@4", "int8+ef@1")}
    mine, theirs = begin_mixed(s, **wide), begin_mixed(s, arithmetic=FLOAT64, **wide)
    run(theirs, s, 0, 2)
    held = all_bits(mine)
    assert refusal(mine.place, rows, theirs).startswith("arithmetic of the state to place")
    assert changed(held, mine) == []
    drafted = begin_mixed(s)
    drafted.verify(tokens(s, 0, 2))
    assert "drafts pending" in refusal(state.place, rows, drafted)
    assert changed(before, state) == []


def test_tampered_saves_are_refused():
    s = mixed_stream()
    state = begin_mixed(s)
    run(state, s, 0, 3)
    saved = state.save()
    inner = {n.removeprefix("group1."): t for n, t in saved.items() if n.startswith("group1.")}

    def with_group_1(**changes):
        other = with_meta(inner, **changes)
        return saved | {f"group1.{n}": t for n, t in other.items()}

    for wrong in (
        with_meta(saved, groups=2),
        with_meta(saved, groups=4),
        with_meta(saved, groups="3"),
        with_meta(saved, groups=0),
        with_meta(saved, key_heads=4),
        with_meta(saved, key_heads=1),
        with_meta(saved, key_heads=None),
        with_meta(saved, version=2),
        {n: t for n, t in saved.items() if n != "meta"},
        {n: t for n, t in saved.items() if n != "group1.buffer.cursor"},
        saved | {"more": saved["meta"]},
        with_group_1(heads=[3]),
        with_group_1(heads=[6]),
        with_group_1(heads=None),
        with_group_1(heads=[4, 4]),
        with_group_1(heads="4"),
        with_group_1(seed=5),
        with_group_1(layer=5),
        with_group_1(drafts=5),
        {},
        None,
    ):
        assert "saved state" in refusal(HeadGroups.restore, wrong)
    assert "saved state version" in refusal(DecodeState.restore, saved)
    assert refusal(HeadGroups.restore, begin("fp32@1", s).save()).startswith("saved state version")


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
