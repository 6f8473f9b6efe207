"""Pooled memory is a ``DecodeState`` laid out otherwise: a chain of steps on it is that state's, bit for bit."""

from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.schemes import StateShape, start
from quantlab.schemes.pool import allocate_pool, bytes_of_slot, unpoolable
from quantlab.schemes.pool_rows import put_state, state_of
from quantlab.schemes.steps import begin_step, decode_token, end_step, load_states
from tests.schemes.streams import stream, tokens

SHAPE = StateShape(4, 16, 32, 2)
SLOTS = 5
USED = torch.tensor([4, 2])

# Every checkpoint, copy, buffer format and option that the pool has a layout for, at least once.
CHAINS = {
    "mamba2": (
        "fp32@1",
        "bf16+sr@1",
        "int8@1",
        "fp16+sr/nvfp4@4:buffer=bf16",
        "fp8+sr/mxfp4@3",
        "fp32/fp8@4",
        "fp16+sr/nvfp4+keyscale@3",
    ),
    "gated_delta": (
        "fp16@1",
        "fp8@4:buffer=fp16",
        "bf16/nvfp4@4",
        "int8+sr/fp8@2:contents=derived",
        "fp32/nvfp4@4:key_read=checkpoint",
        "fp32/mxfp4@4:flush_read=copy",
    ),
    "kimi_delta": ("fp32@4", "fp8+sr/nvfp4@4:contents=derived", "int8@1"),
}


def shape_of(family):
    return replace(SHAPE, key_heads=SHAPE.heads) if family == "kimi_delta" else SHAPE


def inputs_of(family, steps, batch):
    shape = shape_of(family)
    return stream(family, steps=steps, sequences=batch, key_heads=shape.key_heads)


def chain(pool, s, slots, steps):
    """Outputs of ``steps`` tokens, NaN where nothing was written."""
    outputs = []
    for t in steps:
        plan = begin_step(pool.counters, slots, pool.policy.window)
        inputs = s.step(t)
        outputs.append(decode_token(pool, inputs, plan, torch.full_like(inputs.v, torch.nan)))
        end_step(plan)
    return torch.stack(outputs)


def memory(pool, counters=True):
    """Every tensor of a pool, copied."""
    found = {**vars(pool), **(vars(pool.counters) if counters else {})}
    return {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}


def saved(state):
    """What two states of one history have in common: their stored bits, whatever became of the rows around them."""
    skipped = ("meta", "unread", "read_stores", "buffer.")
    return {n: t for n, t in state.save().items() if not any(word in n for word in skipped)}


def records(state):
    held = state.window_tensors
    used = torch.arange(state.window_tensors["k"].shape[1]) < state.cursor[:, None] if held else None
    return {name: value[used] for name, value in held.items()}


@pytest.mark.parametrize(
    ("family", "policy"), [(family, policy) for family, policies in CHAINS.items() for policy in policies]
)
def test_a_chain_is_that_of_a_decode_state(family, policy):
    """Two sequences in slots 4 and 2 and a padded row between them, past two flushes."""
    s = inputs_of(family, 9, 3)
    shape = shape_of(family)
    pool = allocate_pool(policy, family, shape, SLOTS, seed=3)[0]
    pool.counters.sequence_ids.copy_(torch.tensor([40, 41, 42, 43, 44]))
    rows = torch.tensor([0, 2])
    load_states(pool, USED.int(), s.initial[rows])
    ids = pool.counters.sequence_ids[USED]
    state = start(policy, family, s.initial[rows], key_heads=shape.key_heads, seed=3, sequence_ids=ids)
    outputs = chain(pool, s, torch.tensor([4, -1, 2], dtype=torch.int32), range(9))
    expected = torch.stack([state.step(s.step(t).map(lambda x: x[rows])) for t in range(9)])
    assert torch.equal(outputs[:, rows], expected)
    assert outputs[:, 1].isnan().all()
    got = state_of(pool, USED)
    one, other = saved(got), saved(state)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert torch.equal(got.cursor, state.cursor)
    mine, theirs = records(got), records(state)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    stores = 9 // pool.policy.window
    assert pool.counters.store_numbers[USED].tolist() == [stores, stores]


def test_layers_share_counters_and_draw_random_numbers_of_their_own():
    s = inputs_of("mamba2", 3, 2)
    pools = allocate_pool("fp16+sr@2", "mamba2", SHAPE, SLOTS, layers=2, seed=3)
    slots = torch.tensor([1, 3], dtype=torch.int32)
    for pool in pools:
        load_states(pool, slots, s.initial)
    assert not torch.equal(pools[0].checkpoint[[1, 3]], pools[1].checkpoint[[1, 3]])
    states = [
        start("fp16+sr@2", "mamba2", s.initial, key_heads=2, seed=3, layer=n, sequence_ids=slots)
        for n in (0, 1)
    ]
    for t in range(3):
        plan = begin_step(pools[0].counters, slots, 2)
        for pool, state in zip(pools, states, strict=True):
            assert torch.equal(decode_token(pool, s.step(t), plan), state.step(s.step(t)))
        end_step(plan)
    assert pools[0].counters is pools[1].counters
    assert pools[0].counters.cursor[[1, 3]].tolist() == [1, 1]


def test_what_a_step_does_not_name_stays():
    s = inputs_of("mamba2", 5, 3)
    pool = allocate_pool("fp16/nvfp4@4:buffer=bf16", "mamba2", SHAPE, SLOTS)[0]
    load_states(pool, torch.tensor([4, 2, 0], dtype=torch.int32), s.initial)
    before = memory(pool)
    chain(pool, s, torch.tensor([4, -1, 2], dtype=torch.int32), range(5))
    after = memory(pool)
    others = torch.tensor([0, 1, 3])
    for name, value in before.items():
        if name != "seed":
            one, other = (t[others].contiguous().view(torch.uint8) for t in (value, after[name]))
            assert torch.equal(one, other), name


@pytest.mark.parametrize(
    "policy",
    ["fp8+sr/nvfp4@4:buffer=bf16", "fp32/nvfp4+keyscale@4", "int8@4", "bf16/fp8@4:buffer=fp16", "fp16@1"],
)
def test_a_state_survives_the_pool(policy):
    """Put and read back: stored bits, records, counters, drafts behind the cursor."""
    s = inputs_of("mamba2", 12, 3)
    state = start(
        policy, "mamba2", s.initial, key_heads=2, seed=7, sequence_ids=torch.tensor([9, 8, 7]), drafts=4
    )
    for t in range(6):
        state.step(s.step(t))
    drafts = 0 if policy.endswith("@1") else 4
    if drafts:
        state.verify(tokens(s, 6, 8))
    pool = allocate_pool(policy, "mamba2", SHAPE, SLOTS, seed=7, drafts=drafts)[0]
    slots = torch.tensor([3, 0, 4])
    put_state(pool, slots, state)
    assert pool.counters.sequence_ids[slots].tolist() == [9, 8, 7]
    again = state_of(pool, slots)
    for counter in ("cursor", "pending"):
        assert torch.equal(getattr(again, counter), getattr(state, counter)), counter
    for kept in (state, again):
        kept.commit(torch.tensor([2, 0, 1]) if drafts else torch.zeros(3, dtype=torch.int64))
    one, other = saved(again), saved(state)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert all(torch.equal(state.step(s.step(t)), again.step(s.step(t))) for t in range(8, 12))


def test_some_rows_of_a_state_can_be_put():
    s = inputs_of("mamba2", 1, 3)
    state = start("bf16@4", "mamba2", s.initial, key_heads=2)
    pool = allocate_pool("bf16@4", "mamba2", SHAPE, SLOTS)[0]
    pool.checkpoint.zero_()
    put_state(pool, torch.tensor([1]), state, which=torch.tensor([2]))
    assert torch.equal(pool.checkpoint[1].float(), s.initial[2].bfloat16().float())
    assert not pool.checkpoint[[0, 2, 3, 4]].any()


def test_bytes_of_a_slot():
    pool = allocate_pool("fp16/nvfp4@4:buffer=bf16", "mamba2", SHAPE, SLOTS)[0]
    values = SHAPE.heads * SHAPE.value_dim * SHAPE.key_dim
    copy = values // 2 + values // 16 + 4 * SHAPE.heads
    window = 4 * (2 * SHAPE.key_heads * SHAPE.key_dim + 2 * SHAPE.heads * SHAPE.value_dim + 4 * SHAPE.heads)
    assert bytes_of_slot(pool) == 2 * values + copy + window
    keyed = allocate_pool("fp16/nvfp4+keyscale@4:buffer=bf16", "mamba2", SHAPE, SLOTS)[0]
    assert bytes_of_slot(keyed) - bytes_of_slot(pool) == SHAPE.heads * SHAPE.key_dim


REFUSED = {
    "another family": ("fp32@4", "mamba1", "family mamba2"),
    "a checkpoint of four bits": ("nvfp4@4", "mamba2", "a checkpoint of fp32"),
    "scales of blocks": ("int8:block32@1", "mamba2", "one scale a value row"),
    "error feedback": ("int8+ef@1", "mamba2", "a checkpoint of fp32"),
    "a rotated copy": ("fp32/nvfp4+hadamard@4", "mamba2", "a read copy of nvfp4"),
    "a component beside the copy": ("fp32/nvfp4+rank2@4", "mamba2", "a read copy of nvfp4"),
    "scales of key columns over blocks of powers": ("fp32/mxfp4+keyscale@4", "mamba2", "nvfp4\\+keyscale"),
    "key scales and a component": ("fp32/nvfp4+keyscale+rank1@4", "mamba2", "nvfp4\\+keyscale"),
    "scales of the checkpoint's key columns": ("int8+keyscale@4", "mamba2", "a checkpoint of fp32"),
    "a mean beside the checkpoint": ("int8+mean@4", "mamba2", "a checkpoint of fp32"),
    "a stochastic copy": ("fp32/nvfp4+sr@4", "mamba2", "a read copy of nvfp4"),
    "a global scale a row": ("fp32/nvfp4:row@4", "mamba2", "nvfp4:matrix"),
    "two bfloat16 a number": ("fp32@4:buffer=hilo", "mamba2", "buffer=fp32"),
    "a fold before the window is full": ("fp32@4:flush=early", "mamba2", "flush=full"),
    "rounding at every step": ("fp16@4:schedule=step", "mamba2", "the default schedule"),
    "a rounded current token": ("fp32@4:buffer=bf16:current=buffer", "mamba2", "current=exact"),
}


@pytest.mark.parametrize(("policy", "family", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_policy_without_a_layout_is_refused(policy, family, reason):
    with pytest.raises(InputError, match=rf"^policy .*expected .*{reason}"):
        allocate_pool(policy, family, SHAPE, SLOTS)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, True, "3"])
def test_a_seed_is_an_integer_of_64_bits(seed):
    with pytest.raises(InputError, match=r"^seed .*: expected an integer of 64 bits"):
        allocate_pool("fp16+sr@4", "mamba2", SHAPE, SLOTS, seed=seed)


def test_a_key_dim_that_blocks_do_not_fill_is_refused_with_a_copy():
    odd = replace(SHAPE, key_dim=80)
    assert unpoolable(allocate_pool("fp32@4", "mamba2", odd, 1)[0].policy, "mamba2", odd) is None
    with pytest.raises(InputError, match="blocks of 32"):
        allocate_pool("fp32/nvfp4@4", "mamba2", odd, 1)


@pytest.mark.parametrize(
    "slots",
    [
        torch.tensor([1, 1], dtype=torch.int32),
        torch.tensor([5, -1], dtype=torch.int32),
        torch.tensor([1, 2]),
        torch.tensor([[1]], dtype=torch.int32),
    ],
)
def test_bad_slots_are_refused(slots):
    pool = allocate_pool("fp32@4", "mamba2", SHAPE, SLOTS)[0]
    with pytest.raises(InputError, match=r"^slots "):
        begin_step(pool.counters, slots, 4)


def test_a_state_of_another_kind_cannot_be_put():
    s = inputs_of("mamba2", 1, 3)
    pool = allocate_pool("fp16@4", "mamba2", SHAPE, SLOTS, layers=2)[1]
    for change, name in (({"policy": "bf16@4"}, "policy"), ({"layer": 0}, "layer")):
        options = {"policy": "fp16@4", "layer": 1} | change
        state = start(options.pop("policy"), "mamba2", s.initial, key_heads=2, **options)
        with pytest.raises(InputError, match=rf"^{name} of the state to put "):
            put_state(pool, torch.tensor([0, 1, 2]), state)
    state = start("fp16@4", "mamba2", s.initial, key_heads=2, layer=1)
    with pytest.raises(InputError, match=r"^slots 2: expected 3, one a row"):
        put_state(pool, torch.tensor([0, 1]), state)


def test_layers_may_have_numbers_of_their_own_and_share_counters_with_others():
    """The numbers name random bits; pools of one window step together whatever their policies and shapes."""
    s = inputs_of("mamba2", 5, 2)
    wide = replace(SHAPE, key_heads=4)
    pools = allocate_pool("fp16+sr@2", "mamba2", SHAPE, 2, layers=[4, 9], seed=3)
    pools += allocate_pool("bf16@2", "mamba2", wide, 2, layers=(5,), counters=pools[0].counters)
    assert [pool.layer for pool in pools] == [4, 9, 5]
    slots, expected = torch.tensor([0, 1], dtype=torch.int32), []
    for pool in pools:
        load_states(pool, slots, s.initial)
        options = {"key_heads": pool.shape.key_heads, "seed": 3, "layer": pool.layer}
        expected.append(start(str(pool.policy), "mamba2", s.initial, **options))
    for t in range(5):
        plan = begin_step(pools[0].counters, slots, 2)
        for pool, state in zip(pools, expected, strict=True):
            inputs = s.step(t)
            if pool.shape == wide:
                inputs = replace(inputs, q=inputs.q.repeat(1, 2, 1), k=inputs.k.repeat(1, 2, 1))
            assert torch.equal(decode_token(pool, inputs, plan), state.step(inputs))
        end_step(plan)
    (other,) = allocate_pool("fp16+sr@2", "mamba2", SHAPE, 2, layers=[5], seed=3)
    load_states(other, slots, s.initial)
    load_states(pools[0], slots, s.initial)
    assert not torch.equal(other.checkpoint, pools[0].checkpoint)


@pytest.mark.parametrize("layers", [0, -1, True, 1.5, [], [3, 1], [2, 2], [-1], ["a"], None])
def test_layer_numbers_go_up(layers):
    with pytest.raises(InputError, match=r"^layers "):
        allocate_pool("fp32@4", "mamba2", SHAPE, 2, layers=layers)


def test_counters_of_other_slots_are_refused():
    counters = allocate_pool("fp32@4", "mamba2", SHAPE, 3)[0].counters
    with pytest.raises(InputError, match=r"^counters 'of 3 slots': expected those of 2 slots"):
        allocate_pool("fp32@4", "mamba2", SHAPE, 2, counters=counters)
