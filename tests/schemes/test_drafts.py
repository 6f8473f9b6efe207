"""Verify and commit on pooled memory are those of a ``DecodeState``, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.schemes import StateShape, start
from quantlab.schemes.drafts import begin_commit, commit_tokens, end_commit, end_verify, verify_tokens
from quantlab.schemes.pool import allocate_pool
from quantlab.schemes.pool_rows import state_of
from quantlab.schemes.steps import begin_step, decode_token, end_step, load_states
from tests.schemes.streams import stream, tokens

SHAPE = StateShape(4, 16, 32, 2)
SLOTS = 5
BATCH = torch.tensor([4, -1, 2], dtype=torch.int32)
"""A padded row between two sequences, whose slots stand in another order."""
ROWS = torch.tensor([0, 2])
USED = torch.tensor([4, 2])

CHAINS = {
    "mamba2": (
        ("fp32@1", 3),
        ("bf16+sr@4:buffer=bf16", 2),
        ("fp16+sr/nvfp4@4:buffer=bf16", 3),
        ("fp8+sr/mxfp4@3", 5),
        ("int8/fp8@2", 8),
    ),
    "gated_delta": (("fp16/nvfp4@4", 3), ("int8+sr@4:contents=derived", 2)),
    "kimi_delta": (("fp8+sr/nvfp4@4", 2),),
}


def layers_of(policy, family, drafts, steps, layers=1):
    """Pools whose slots 4 and 2 hold prefill states, decode states of the same, and the stream they came from."""
    shape = replace(SHAPE, key_heads=SHAPE.heads) if family == "kimi_delta" else SHAPE
    s = stream(family, steps=steps, key_heads=shape.key_heads)
    pools = allocate_pool(policy, family, shape, SLOTS, layers=layers, seed=3, drafts=drafts)
    options = {"key_heads": shape.key_heads, "seed": 3, "sequence_ids": USED}
    states = []
    for n, pool in enumerate(pools):
        load_states(pool, USED.int(), s.initial[ROWS])
        states.append(start(policy, family, s.initial[ROWS], layer=n, **options))
    return pools, states, s


def verify(pools, drafted):
    """Outputs of every layer, NaN where nothing was written."""
    plan = begin_step(pools[0].counters, BATCH, pools[0].policy.window)
    outputs = [verify_tokens(pool, drafted, plan, torch.full_like(drafted.v, torch.nan)) for pool in pools]
    end_verify(plan, drafted.v.shape[1])
    return outputs


def commit(pools, counts):
    counts = torch.tensor([counts[0], 99, counts[1]], dtype=torch.int32)  # padding has none
    plan = begin_commit(pools[0].counters, BATCH, counts, pools[0].policy.window)
    for pool in pools:
        commit_tokens(pool, plan)
    end_commit(plan)
    return plan


def assert_same(pool, state):
    """Stored bits, counters and records of two histories that are one."""
    skipped = ("meta", "unread", "read_stores", "buffer.")
    got = state_of(pool, USED)
    one, other = (
        {n: t for n, t in s.save().items() if not any(word in n for word in skipped)} for s in (got, state)
    )
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert torch.equal(got.cursor, state.cursor)
    mine, theirs = got.window_tensors, state.window_tensors
    for name, held in theirs.items():
        used = torch.arange(held.shape[1]) < state.cursor[:, None]
        assert torch.equal(mine[name][used], held[used]), name


@pytest.mark.parametrize(
    ("family", "policy", "drafts"),
    [(family, *chain) for family, chains in CHAINS.items() for chain in chains],
)
def test_a_chain_is_that_of_a_decode_state(family, policy, drafts):
    """Every pair of accept counts (0, 2, ... of long drafts), so that rings wrap and rows fold at different times."""
    accepted = range(0, drafts + 1, 1 if drafts < 4 else 3)
    patterns = list(itertools.product(accepted, accepted))
    (pool,), (state,), s = layers_of(policy, family, drafts, len(patterns) * drafts + 1)
    ring = set()
    for c, counts in enumerate(patterns):
        drafted = tokens(s, c * drafts, (c + 1) * drafts)
        (outputs,) = verify([pool], drafted)
        assert torch.equal(outputs[ROWS], state.verify(drafted.map(lambda t: t[ROWS])))
        assert outputs[1].isnan().all()
        plan = commit([pool], counts)
        folded = state.cursor + torch.tensor(counts) >= pool.policy.window
        assert plan.flush_rows[: int(plan.flush_count)].tolist() == ROWS[folded].tolist()
        state.commit(torch.tensor(counts))
        assert_same(pool, state)
        ring.add(int(pool.counters.origin[4]) % pool.records)
    assert len(ring) > 1 or pool.records == pool.policy.window
    last = s.step(s.steps - 1)
    plan = begin_step(pool.counters, BATCH, pool.policy.window)
    assert torch.equal(decode_token(pool, last, plan)[ROWS], state.step(last.map(lambda t: t[ROWS])))
    end_step(plan)
    assert_same(pool, state)


def test_layers_share_the_counters_of_drafts():
    pools, states, s = layers_of("fp16+sr@2", "mamba2", 3, 12, layers=2)
    for c in range(4):
        drafted = tokens(s, 3 * c, 3 * c + 3)
        for outputs, state in zip(verify(pools, drafted), states, strict=True):
            assert torch.equal(outputs[ROWS], state.verify(drafted.map(lambda t: t[ROWS])))
        commit(pools, (3, c % 2))
        for pool, state in zip(pools, states, strict=True):
            state.commit(torch.tensor([3, c % 2]))
            assert_same(pool, state)
    assert pools[0].counters.store_numbers[USED].tolist() == [6, 1]


def test_a_verification_leaves_everything_but_its_records():
    (pool,), _, s = layers_of("fp16/nvfp4@4:buffer=bf16", "mamba2", 3, 6)
    verify([pool], tokens(s, 0, 3))
    commit([pool], (2, 3))
    names = [name for name, value in vars(pool).items() if isinstance(value, torch.Tensor)]
    before = {name: getattr(pool, name).clone() for name in names}
    counters = {name: value.clone() for name, value in vars(pool.counters).items()}
    verify([pool], tokens(s, 3, 6))
    for name, value in before.items():
        now = getattr(pool, name)
        if name.endswith("_buffer"):
            for slot, cursor in ((4, 2), (2, 3)):
                at = (torch.arange(3) + cursor) % pool.records
                assert not torch.equal(value[slot, :, at], now[slot, :, at]), name
                value[slot, :, at] = now[slot, :, at]
        assert torch.equal(value.view(torch.uint8), now.view(torch.uint8)), name
    assert pool.counters.pending.tolist() == [0, 0, 3, 0, 3]
    for name, value in counters.items():
        assert name == "pending" or torch.equal(value, getattr(pool.counters, name)), name


def test_drafts_that_do_not_fit_are_refused():
    (pool,), _, s = layers_of("fp32@4", "mamba2", 2, 6)
    plan = begin_step(pool.counters, BATCH, 4)
    with pytest.raises(
        InputError, match=r"^tokens '6 drafted tokens': expected 1 to 5, which the pool has room"
    ):
        verify_tokens(pool, tokens(s, 0, 6), plan)
    (none,) = allocate_pool("fp32@1", "mamba2", SHAPE, SLOTS)
    with pytest.raises(InputError, match=r"^tokens '1 drafted tokens': expected 1 to 0"):
        verify_tokens(none, tokens(s, 0, 1), begin_step(none.counters, BATCH, 1))


def test_a_second_verification_is_refused():
    (pool,), _, s = layers_of("fp32@4", "mamba2", 2, 4)
    verify([pool], tokens(s, 0, 2))
    with pytest.raises(InputError, match=r"verify with 2 drafts pending"):
        verify([pool], tokens(s, 2, 4))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.tensor([1, 0, 3], dtype=torch.int32), r"counts '3 of row 2': expected 0 to 2"),
        (torch.tensor([-1, 0, 1], dtype=torch.int32), r"counts '-1 of row 0': expected 0 to 2"),
        (torch.tensor([1, 0, 1]), r"counts .*: expected int32 of shape \(3,\)"),
        (torch.tensor([1, 1], dtype=torch.int32), r"counts .*: expected int32 of shape \(3,\)"),
    ],
)
def test_bad_counts_are_refused(counts, message):
    (pool,), _, s = layers_of("fp32@4", "mamba2", 2, 4)
    verify([pool], tokens(s, 0, 2))
    with pytest.raises(InputError, match=f"^{message}"):
        begin_commit(pool.counters, BATCH, counts, 4)
