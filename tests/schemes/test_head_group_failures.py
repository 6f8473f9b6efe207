"""A group that diverges or is given something wrong: every group of the layer stays as it was."""

import contextlib
import copy

import pytest
import torch

from quantlab.schemes import (
    Diverged,
    HeadGroup,
    parse_policy,
    start_groups,
)
from tests.schemes.grouped import (
    MIXED,
    MIXED_HEADS,
    all_bits,
    begin_groups,
    begin_mixed,
    changed,
    mixed_stream,
    refusal,
    split,
)
from tests.schemes.streams import run, tokens

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
