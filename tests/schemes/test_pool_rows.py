"""Whole slots of a pool: copied, taken, given room for drafts, read as dense states and stored from them."""

from dataclasses import replace

import pytest
import torch

from quantlab.schemes import StateShape, start
from quantlab.schemes.drafts import begin_commit, commit_tokens, end_commit, end_verify, verify_tokens
from quantlab.schemes.pool import allocate_pool
from quantlab.schemes.pool_rows import (
    copy_slots,
    dense_of,
    exercised_of,
    put_state,
    state_of,
    store_dense,
    taken_counters,
    taken_slots,
    with_room,
)
from quantlab.schemes.steps import begin_step, decode_token, end_step
from quantlab.schemes.store import Diverged
from tests.schemes.streams import stream, tokens

SHAPE, SLOTS = StateShape(4, 16, 32, 2), 4
POLICIES = (
    ("mamba2", "fp16+sr/nvfp4@4:buffer=bf16"),
    ("gated_delta", "int8+sr/fp8@4"),
    ("gated_delta", "fp32/nvfp4@4:key_read=checkpoint"),
    ("kimi_delta", "fp8/mxfp4@3:contents=derived"),
    ("mamba2", "bf16@1"),
)


def filled(policy, family, *, drafts=0, layer=2):
    """A pool whose slots stand at cursors of their own, the state that they are, and tokens to come."""
    shape = replace(SHAPE, key_heads=SHAPE.heads) if family == "kimi_delta" else SHAPE
    s = stream(family, steps=14, sequences=SLOTS, key_heads=shape.key_heads)
    ids = torch.tensor([40, 41, 42, 43])
    options = {"key_heads": shape.key_heads, "seed": 7, "layer": layer, "sequence_ids": ids}
    state = start(policy, family, s.initial, **options)
    for t in range(6):
        rows = torch.tensor([n for n in range(SLOTS) if n + t >= 2])
        state.step(s.step(t).map(lambda x, rows=rows: x[rows]), rows)
    (pool,) = allocate_pool(policy, family, shape, SLOTS, layers=[layer], seed=7, drafts=drafts)
    put_state(pool, torch.arange(SLOTS), state)
    return pool, state, s


def step(pool, inputs):
    slots = torch.arange(pool.slots, dtype=torch.int32)
    plan = begin_step(pool.counters, slots, pool.policy.window)
    output = decode_token(pool, inputs, plan)
    end_step(plan)
    return output


@pytest.mark.parametrize(("family", "policy"), POLICIES)
def test_the_dense_states_of_slots_are_what_a_state_materializes(family, policy):
    pool, state, _ = filled(policy, family)
    assert torch.equal(dense_of(pool, torch.arange(SLOTS)), state.materialize())
    rows = torch.tensor([3, 1])
    assert torch.equal(dense_of(pool, rows), state.materialize(rows))


@pytest.mark.parametrize(("family", "policy"), POLICIES)
def test_a_stored_chunk_is_the_next_store(family, policy):
    pool, state, s = filled(policy, family)
    dense = state.materialize() * 1.25
    slots = torch.arange(SLOTS)
    state.store(dense)
    store_dense(pool, slots, dense)
    pool.counters.cursor.zero_()
    pool.counters.store_numbers.add_(1)
    for t in range(6, 12):
        assert torch.equal(step(pool, s.step(t)), state.step(s.step(t)))
    before = pool.checkpoint.clone()
    dense[2, 0, 0, 0] = torch.nan
    with pytest.raises(Diverged, match="row 2"):
        store_dense(pool, slots, dense)
    assert torch.equal(pool.checkpoint, before)


@pytest.mark.parametrize(("family", "policy"), POLICIES)
def test_slots_are_copied_with_all_they_hold(family, policy):
    """In place and into memory of their own; the ring stands where it stood."""
    pool, state, s = filled(policy, family, drafts=0 if policy.endswith("@1") else 3)
    pool.counters.origin.copy_(torch.tensor([0, 1, 2, 3]))
    put_state(pool, torch.arange(SLOTS), state, counters=False)  # records from each slot's own origin
    rows = torch.tensor([2, 2, 0, 3])
    taken = taken_slots(pool, rows, taken_counters(pool.counters, rows))
    copy_slots([pool], torch.tensor([2, 2]), torch.tensor([1, 0]), counters=False)
    assert pool.counters.sequence_ids.tolist() == [40, 41, 42, 43]
    copy_slots([pool], torch.tensor([2, 2]), torch.tensor([1, 0]))
    assert pool.counters.sequence_ids.tolist() == [42, 42, 42, 43]
    state.select(torch.tensor([2, 2, 2, 3]))
    inputs = s.step(6)
    assert torch.equal(step(pool, inputs), state.step(inputs))
    assert taken.counters.sequence_ids.tolist() == [42, 42, 40, 43]
    assert taken.counters.origin.tolist() == [2, 2, 0, 3]
    _, state, _ = filled(policy, family)
    state.select(rows)
    assert torch.equal(step(taken, inputs), state.step(inputs))


@pytest.mark.parametrize("policy", ["fp16+sr/nvfp4@4:buffer=bf16", "bf16@6", "fp32@1"])
def test_room_for_drafts_comes_and_goes(policy):
    """Drafts are read and accepted past the end of a ring, which is then cut to the window again."""
    pool, state, s = filled(policy, "mamba2")
    slots, counts = torch.arange(SLOTS, dtype=torch.int32), torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    small, window = pool.records, pool.policy.window
    for first in (6, 9):
        pool = with_room(pool, 3)
        pool.counters.origin.zero_()
        assert pool.records >= window - 1 + 3
        plan, drafts = begin_step(pool.counters, slots, window), tokens(s, first, first + 3)
        assert torch.equal(verify_tokens(pool, drafts, plan), state.verify(drafts))
        end_verify(plan, 3)
        plan = begin_commit(pool.counters, slots, counts, window)
        commit_tokens(pool, plan)
        end_commit(plan)
        state.commit(counts)
        pool = with_room(pool, 0)
        pool.counters.origin.zero_()
        assert pool.records == small
    assert torch.equal(state_of(pool, slots).cursor, state.cursor)
    for t in (12, 13):
        assert torch.equal(step(pool, s.step(t)), state.step(s.step(t)))


@pytest.mark.parametrize(("family", "policy"), POLICIES)
def test_what_was_exercised_follows_from_the_counters(family, policy):
    s = stream(family, steps=9, sequences=2, key_heads=4 if family == "kimi_delta" else 2)
    shape = replace(SHAPE, key_heads=4) if family == "kimi_delta" else SHAPE
    state = start(policy, family, s.initial, key_heads=shape.key_heads)
    (pool,) = allocate_pool(policy, family, shape, 2)
    for t in range(9):
        put_state(pool, torch.tensor([1, 0]), state)
        found = exercised_of(pool, torch.tensor([0, 1]))
        assert {part: None if n is None else int(n.min()) for part, n in found.items()} == state.exercised
        state.step(s.step(t))
