"""Taking tokens back is a move of the cursor, and a chunk that ran elsewhere is stored as one that ran here."""

import functools

import pytest
import torch

from quantlab.errors import InputError
from quantlab.recurrences import RECURRENCES, chunk
from quantlab.schemes import DecodeState, HeadGroup, HeadGroups, parse_policy, start_groups

from .streams import begin, bits, relative, run, same_bits, stream, tokens

FAMILIES = sorted(RECURRENCES)
POLICIES = ["fp32@1", "fp32@4", "fp16+sr/nvfp4@4", "int8+ef@4:buffer=bf16"]
FAST = [("gated_delta", "fp16+sr/nvfp4@4"), ("mamba2", "fp32@4")]
CASES = [
    pytest.param(family, policy, marks=[] if (family, policy) in FAST else [pytest.mark.slow])
    for family in FAMILIES
    for policy in POLICIES
]
READ_MARKS = ("unread", "read_stores")
"""What a save holds of who read a store: a token that is taken back has read it all the same."""


@functools.cache
def small(family):
    return stream(family, heads=2, value_dim=4)


def advance(state, s, first, last):
    return [state.step(s.step(t)) for t in range(first, last)]


def same_but_for_marks(one, other):
    one, other = bits(one), bits(other)
    # Memory behind a cursor is nobody's: records are compared through what they give (materialize, outputs).
    names = {n for n in one if not n.startswith("buffer.") and not n.endswith(READ_MARKS)}
    return all(torch.equal(one[n], other[n]) for n in names | {"buffer.cursor"})


@pytest.mark.parametrize(("family", "policy"), CASES)
def test_tokens_that_were_taken_back_never_were(family, policy):
    """Every cursor, with and without drafts behind it, and every count: bit for bit a state that never saw them."""
    s, window = small(family), parse_policy(policy).window
    for steps in range(window + 1):
        state = begin(policy, s, drafts=2)
        advance(state, s, 0, steps)
        # A window of L single steps is folded, and nothing of it can be taken back.
        assert state.reach.tolist() == [steps % window] * 3
        saved = state.save()
        for drafts in (0, 2):
            for count in range(steps % window + drafts + 1):
                taken, fresh = DecodeState.restore(saved), begin(policy, s, drafts=2)
                if drafts:
                    taken.verify(tokens(s, steps, steps + drafts))
                taken.take_back(torch.full((3,), count))
                left = steps + drafts - count
                advance(fresh, s, 0, min(steps, left))
                if left > steps:  # the order of sums in a verify follows its length
                    fresh.verify(tokens(s, steps, steps + drafts))
                    fresh.commit(torch.full((3,), left - steps))
                assert same_but_for_marks(taken, fresh), (steps, drafts, count)
                assert torch.equal(taken.materialize(), fresh.materialize())
                assert torch.equal(run(taken, s, left, left + 2), run(fresh, s, left, left + 2))


def test_what_an_early_flush_left_in_the_window_can_be_taken_back():
    """The fold that a forward made first stays made: without rounding the state is the same to float64's last bits."""
    s = small("gated_delta")
    for steps in (2, 7, 8, 12):
        state = begin("fp64@8:flush=early", s)
        advance(state, s, 0, steps)
        for count in range(int(state.reach[0]) + 1):
            taken, fresh = DecodeState.restore(state.save()), begin("fp64@1", s)
            taken.take_back(torch.full((3,), count))
            advance(fresh, s, 0, steps - count)
            assert relative(taken.materialize(), fresh.materialize()) < 1e-12


def test_each_row_takes_back_its_own_number():
    s = small("gated_delta")
    state, alone = (begin("fp32/nvfp4@8", s, drafts=4) for _ in range(2))
    for one in (state, alone):
        run(one, s, last=3)
        one.verify(tokens(s, 3, 7))
    state.take_back(torch.tensor([6, 1]), torch.tensor([2, 0]))
    assert state.cursor.tolist() == [6, 3, 1]
    assert state.pending.tolist() == [0, 4, 0]
    for row, count in ((2, 6), (0, 1)):
        alone.take_back(torch.tensor([count]), torch.tensor([row]))
    assert torch.equal(state.materialize(), alone.materialize())


def test_what_a_flush_folded_is_out_of_reach():
    s = small("mamba2")
    state = begin("fp32@4", s)
    run(state, s, last=5)
    before = state.save()
    with pytest.raises(
        InputError, match=r"^counts '2 at row 0, cursor 1': expected 0 to 1 tokens since the last"
    ):
        state.take_back(torch.tensor([2, 0, 0]))
    with pytest.raises(InputError, match="shape"):
        state.take_back(torch.tensor([1]))
    assert all(
        torch.equal(value, before[name]) for name, value in state.save().items() if "buffer" not in name
    )


@pytest.mark.parametrize("policy", ["fp32@1", "fp16+sr/nvfp4@4", "bf16/nvfp4@4:schedule=turn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_that_ran_elsewhere_is_stored_as_one_that_ran_here(family, policy):
    """The store number goes on and both copies are written; what an earlier step exercised is kept."""
    s = small(family)
    here, there = begin(policy, s), begin(policy, s)
    for one in (here, there):
        run(one, s, last=6)
    here.extend(tokens(s, 6, 11))
    state, _ = chunk(there.recurrence, there.materialize(), tokens(s, 6, 11), s.rates)
    there.store(state)
    assert same_bits(here, there)
    assert torch.equal(run(here, s, 11), run(there, s, 11))
    assert here.exercised == there.exercised
    assert (here.exercised["checkpoint"] or 0) >= (0 if "turn" in policy else 2)


def test_a_chunk_is_not_stored_over_drafts_or_in_another_shape():
    s = small("mamba2")
    state = begin("fp32@4", s)
    with pytest.raises(InputError, match=r"^initial "):
        state.store(s.initial[:2])
    state.verify(tokens(s, 0, 2))
    with pytest.raises(InputError, match="store with 2 drafts pending"):
        state.store(s.initial)


def test_groups_of_heads_take_back_and_store_as_their_heads_would():
    """The least reach counts; every head holds what it would hold if the layer had its policy."""
    s, policies = stream("gated_delta"), ("fp16+sr/nvfp4@4", "int8@8")
    groups = [HeadGroup(parse_policy(p), heads) for p, heads in zip(policies, ((0, 1), (2, 3)), strict=True)]
    options = {"key_heads": s.key_heads, "rates": s.rates, "seed": 11}
    mixed = start_groups(groups, s.family, s.initial, **options)
    assert isinstance(mixed, HeadGroups)
    whole = [begin(policy, s) for policy in policies]
    states = [mixed, *whole]
    for state in states:
        run(state, s, last=6)
    assert mixed.reach.tolist() == [2, 2, 2]
    before = bits(mixed)
    with pytest.raises(
        InputError, match=r"^counts '3 at row 1': expected 0 to 2 tokens since the last flush"
    ):
        mixed.take_back(torch.tensor([2, 3, 0]))
    assert all(torch.equal(value, before[name]) for name, value in bits(mixed).items())
    chunk_state = 0.5 * s.initial
    for state in states:
        state.take_back(torch.tensor([2, 1, 0]))
        assert state.cursor.tolist()[-1] in (2, 6)
        state.take_back(torch.tensor([0, 1]), torch.tensor([0, 1]))
        run(state, s, 6, 7)
        state.store(chunk_state)
        run(state, s, 7, 9)
    for state, heads in zip(whole, ([0, 1], [2, 3]), strict=True):
        assert torch.equal(mixed.materialize()[:, heads], state.materialize()[:, heads])
    assert mixed.exercised["checkpoint"] == min(state.exercised["checkpoint"] or 0 for state in whole)
