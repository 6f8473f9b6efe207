"""The pool: slots that come and go, null rows, and errors after which it goes on."""

import re

import pytest
import torch

from quantlab.errors import InputError
from quantlab.recurrences import RECURRENCES
from quantlab.schemes import SlotPool, StateShape, load_decode_state, save_decode_state

from .streams import begin, run, same_bits, stream, tokens

FAMILIES = sorted(RECURRENCES)
POLICIES = ["fp32@1", "int8+ef@4", "fp16+sr/nvfp4+sr8@4", "fp32/nvfp4@5:flush=early", "bf16@4:schedule=turn"]
SHAPE = StateShape(heads=4, value_dim=16, key_dim=32, key_heads=2)


def pool_of(s, policy, slots=4, **options):
    return SlotPool(policy, s.family, SHAPE, slots, rates=s.rates, seed=11, **options)


def everything(pool):
    return {n: t.nan_to_num(7.0) if t.is_floating_point() else t for n, t in pool._state.save().items()}


def row(s, t, *rows):
    """Inputs of step t for rows of the stream."""
    return s.step(t).map(lambda x: x[list(rows)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_slots_decode_as_a_batch_does(family, policy):
    """Sequences in other slots, joined late, beside null rows: each has the bits it has in a batch of its own."""
    s = stream(family)
    pool = pool_of(s, policy, slots=6)
    pool.allocate()
    first = pool.allocate(s.initial[0], sequence_id=0)
    alone = begin(policy, s, torch.tensor([0]), sequence_ids=torch.tensor([0]))
    late = begin(policy, s, torch.tensor([1]), sequence_ids=torch.tensor([1]))
    second = -1
    for t in range(s.steps):
        if t == 3:
            second = pool.allocate(s.initial[1], sequence_id=1)
        outputs = pool.step(row(s, t, 1, 0, 2), [second, first, -1])
        expected = alone.step(row(s, t, 0))
        torch.testing.assert_close(outputs[1], expected[0], rtol=1e-5, atol=1e-5)
        assert not outputs[2].any()
        if second >= 0:
            torch.testing.assert_close(outputs[0], late.step(row(s, t, 1))[0], rtol=1e-5, atol=1e-5)
    assert pool.cursor(second) == int(late.cursor[0])


@pytest.mark.parametrize(("null", "numbers"), [("negative", [-1, -7]), ("zero", [0, -1])])
def test_null_rows_are_not_looked_at(null, numbers):
    s = stream("gated_delta")
    pool = pool_of(s, "fp32/nvfp4@4", null=null)
    slot = pool.allocate(s.initial[0])
    assert slot == (1 if null == "zero" else 0)
    before = everything(pool)
    nothing = s.step(0).map(lambda x: torch.full_like(x, float("nan")))
    assert not pool.step(nothing.map(lambda x: x[:2]), numbers).any()
    for name, value in everything(pool).items():
        assert torch.equal(before[name], value), name
    mixed = s.step(0).map(
        lambda x: torch.where(torch.arange(3).view(3, *[1] * (x.ndim - 1)) == 1, x, torch.nan)
    )
    outputs = pool.step(mixed, [numbers[0], slot, numbers[1]])
    assert torch.isfinite(outputs).all()
    assert outputs[1].any()
    assert pool.cursor(slot) == 1


def test_preempted_sequences_go_on_bit_for_bit_in_another_slot():
    s = stream("kimi_delta")
    pool = pool_of(s, "fp16+sr/nvfp4@4")
    slot = pool.allocate(s.initial[0], sequence_id=7)
    twin = begin("fp16+sr/nvfp4@4", s, torch.tensor([0]), sequence_ids=torch.tensor([7]))
    for t in range(6):
        pool.step(row(s, t, 0), [slot])
        twin.step(row(s, t, 0))
    saved = pool.preempt(slot)
    other = pool.allocate(s.initial[1])
    assert other == slot
    pool.step(row(s, 0, 1), [other])
    again = pool.restore(saved)
    assert again != other
    for t in range(6, s.steps):
        assert torch.equal(pool.step(row(s, t, 0), [again]), twin.step(row(s, t, 0)))


def test_copies_and_forks_are_exact_and_apart():
    s = stream("mamba2")
    pool = pool_of(s, "fp8+sr@4", slots=5)
    source, target = pool.allocate(s.initial[0]), pool.allocate(s.initial[1])
    for t in range(6):
        pool.step(row(s, t, 0, 1), [source, target])
    pool.copy(source, target)
    (fork, renamed) = pool.fork(source, 2, sequence_ids=[50, 51])
    assert torch.equal(pool.materialize(fork), pool.materialize(source))
    for t in range(6, 12):
        outputs = pool.step(row(s, t, 0, 0, 0), [source, target, fork])
        assert torch.equal(outputs[0], outputs[1])
    # Another name, other random bits, from the next store on.
    assert not torch.equal(pool.materialize(fork), pool.materialize(source))
    assert not torch.equal(pool.materialize(renamed), pool.materialize(source))
    pool.select([source, target], [target, fork])
    assert torch.equal(pool.materialize(target), pool.materialize(fork))


def test_a_renamed_row_keeps_the_bits_that_are_stored():
    s = stream("mamba2", steps=4)
    state = begin("fp16+sr@2", s)
    run(state, s)
    before = state.materialize()
    state.rename(torch.tensor([1]), torch.tensor([99]))
    assert torch.equal(state.restore(state.save()).materialize(), before)


def test_a_snapshot_is_flushed_first():
    s = stream("gated_delta")
    pool = pool_of(s, "fp32/nvfp4@8")
    slot = pool.allocate(s.initial[0])
    for t in range(5):
        pool.step(row(s, t, 0), [slot])
    saved = pool.snapshot(slot)
    assert pool.cursor(slot) == 0
    assert int(saved["buffer.cursor"]) == 0
    shared = pool.restore(saved)
    outputs = pool.step(row(s, 5, 0, 0), [slot, shared])
    assert torch.equal(outputs[0], outputs[1])


ERRORS = {
    "double free": (
        lambda p, s: (p.free(2), p.free(2)),
        "slot 2, which is free: expected a slot that a sequence",
    ),
    "freed slot": (lambda p, s: (p.free(2), p.step(row(s, 0, 0), [2])), "slot 2, which is free"),
    "no such slot": (lambda p, s: p.step(row(s, 0, 0), [9]), "slot 9: expected a slot from 0 to 3"),
    "twice": (
        lambda p, s: p.step(row(s, 0, 0, 1), [1, 1]),
        r"slots \[1, 1\]: expected each slot at most once",
    ),
    "rows": (lambda p, s: p.step(row(s, 0, 0), [1, 2]), "one row for each of 2 slots"),
    "accept": (
        lambda p, s: (p.verify(_drafts(s, 3), [1]), p.commit(torch.tensor([4]), [1])),
        "counts 4 at slot 1, cursor 2: expected 0 to 3 drafts pending",
    ),
    "negative accept": (
        lambda p, s: (p.verify(_drafts(s, 3), [1]), p.commit(torch.tensor([-1]), [1])),
        "counts -1 at slot 1, cursor 2: expected 0 to 3",
    ),
    "nothing to accept": (lambda p, s: p.commit(torch.tensor([1]), [1]), "slot 1, cursor 2: expected 0 to 0"),
    "save": (
        lambda p, s: (p.verify(_drafts(s, 2), [1]), p.preempt(1)),
        "save with 2 drafts pending in slot 1, cursor 2: expected commit first, of at most 2 drafts",
    ),
    "snapshot": (
        lambda p, s: (p.verify(_drafts(s, 2), [1]), p.snapshot(1)),
        "flush with 2 drafts pending in slot 1",
    ),
    "step": (
        lambda p, s: (p.verify(_drafts(s, 2), [1]), p.step(row(s, 0, 0), [1])),
        "step with 2 drafts pending",
    ),
    "again": (
        lambda p, s: (p.verify(_drafts(s, 2), [1]), p.verify(_drafts(s, 2), [1])),
        "verify with 2 drafts",
    ),
    "too many": (
        lambda p, s: p.verify(_drafts(s, 9), [1]),
        "9 drafted tokens at slot 1, cursor 2: expected 1 to 8",
    ),
    "full": (lambda p, s: [p.allocate() for _ in range(4)], r"slots 0 of 4 free: expected 1 free"),
    "other policy": (lambda p, s: p.restore(_foreign(s)), "policy of the state to place"),
    "garbage": (lambda p, s: p.restore({"meta": torch.zeros(3)}), "saved state"),
    "shape": (lambda p, s: p.allocate(torch.zeros(3)), r"initial \(3,\)"),
}


def _drafts(s, count):
    return tokens(s, 0, count).map(lambda t: t[:1])


def _foreign(s):
    return begin("int8@4", s, torch.tensor([0])).save()


@pytest.mark.parametrize("case", list(ERRORS))
def test_errors_name_slot_cursor_and_limit_and_the_pool_goes_on(case):
    act, message = ERRORS[case]
    s = stream("gated_delta")
    pool = pool_of(s, "fp32/nvfp4@4")
    slots = [pool.allocate(s.initial[i]) for i in range(3)]
    for t in range(2):
        pool.step(row(s, t, 0, 1, 2), slots)
    others = pool.materialize(0)
    with pytest.raises(InputError) as caught:
        act(pool, s)
    assert re.search(message, str(caught.value).replace("'", ""))
    assert "\n" not in str(caught.value)
    assert torch.equal(pool.materialize(0), others)
    assert pool.cursor(1) == 2
    pool.commit(torch.tensor([pool.pending(1)]), [1])
    assert torch.isfinite(pool.step(row(s, 5, 0, 1), [0, 1])).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_files_hold_every_bit(family, policy, tmp_path):
    s = stream(family)
    state = begin(policy, s)
    for t in range(s.steps):
        save_decode_state(state, tmp_path / "state.safetensors")
        loaded = load_decode_state(tmp_path / "state.safetensors")
        assert same_bits(loaded, state)
        assert torch.equal(loaded.step(s.step(t)), state.step(s.step(t)))
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"not safetensors")
    for path in (tmp_path / "x", tmp_path / "absent"):
        with pytest.raises(InputError, match="a file of save_decode_state"):
            load_decode_state(path)


@pytest.mark.parametrize("slots", [10**13, 10**18, 10**30])
def test_a_pool_that_no_memory_holds_is_one_line(slots):
    with pytest.raises(InputError, match=f"slots.*{slots}.*GiB") as caught:
        SlotPool("fp32@1", "mamba2", StateShape(2, 4, 8, 1), slots)
    assert "\n" not in str(caught.value)
