"""Invariants of the decode state that hold for every policy and family."""

import contextlib

import pytest
import torch

from quantlab.errors import InputError
from quantlab.recurrences import RECURRENCES
from quantlab.schemes import DecodeState, Diverged, start
from quantlab.schemes.files import load_decode_state, save_decode_state

from .streams import begin, relative, run, stream

FAMILIES = sorted(RECURRENCES)
# One policy of each kind: step, replay, dual, every rounding, every way to read.
POLICIES = [
    "fp32@1",
    "bf16@1",
    "nvfp4@1",
    "int8+ef@1",
    "int8:block32+sr@1",
    "fp16+sr13@4",
    "int8+ef.fp32@4",
    "fp32@5:buffer=bf16",
    "fp32/nvfp4@4",
    "fp16+sr/nvfp4+sr8@4",
    "fp8/nvfp4@4:flush_read=copy",
    "fp32/nvfp4@1:flush_read=copy",
    "fp32/nvfp4+rank2@4",
    "nvfp4+rank1@1",
    "nvfp4+mean+ef@4",
    "nvfp4+keyscale+ef/nvfp4+keyscale@4",
]
DELTA_POLICIES = [
    "fp32@4:contents=derived",
    "fp32/nvfp4@4:contents=derived",
    "fp32/nvfp4@4:key_read=checkpoint",
    "fp8/nvfp4@4:contents=derived:flush_read=copy:key_read=checkpoint",
]
# The fast tier runs every policy with and without a delta rule; the property test beside it runs every family.
FAST_FAMILIES = ("gated_delta", "mamba2")
CASES = [
    pytest.param(family, policy, marks=[] if family in FAST_FAMILIES else pytest.mark.slow)
    for family in FAMILIES
    for policy in POLICIES + (DELTA_POLICIES if RECURRENCES[family].delta_rule else [])
]
# Flush rules, schedules, reads and roundings that change what a restart must bring back.
OPTION_POLICIES = [
    "fp32@4:flush=early",
    "fp16+sr/nvfp4+sr8@4:flush=early:flush_read=copy",
    "int8+ef@4:schedule=step",
    "nvfp4@4:schedule=chunk",
    "bf16/nvfp4@4:schedule=turn",
    "int8+ef@4:ef_read=include",
    "int8+ef@4:schedule=turn:ef_read=include",
    "fp32@4:buffer=hilo",
    "fp32@4:buffer=fp16:current=buffer",
    "fp32@4:sites=gate+q+k.fp16+v+d+state+buffer+output",
]
MATRIX_OPTION_POLICIES = ["fp32@4:dot=bf16", "fp32@4:dot=tf32x3", "fp16@4:sites=decay+dot"]
DELTA_OPTION_POLICIES = ["fp32@4:flush=early:contents=derived", "fp32@4:sites=beta"]
RESTART_CASES = CASES + [
    pytest.param(family, policy, marks=[] if family == "gated_delta" else pytest.mark.slow)
    for family in FAMILIES
    for policy in OPTION_POLICIES
    + (MATRIX_OPTION_POLICIES if family != "mamba1" else [])
    + (DELTA_OPTION_POLICIES if RECURRENCES[family].delta_rule else [])
]


@pytest.mark.parametrize(("family", "policy"), RESTART_CASES)
def test_save_and_restore_at_every_cursor(family, policy):
    s = stream(family)
    straight = run(begin(policy, s), s)
    state = begin(policy, s)
    for t in range(s.steps):
        state = DecodeState.restore(state.save())
        assert torch.equal(state.step(s.step(t)), straight[t])
    other = begin(policy, s)
    run(other, s)
    for name, value in other.save().items():
        assert torch.equal(state.save()[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


@pytest.mark.parametrize(("family", "policy"), CASES)
def test_rows_are_independent(family, policy):
    """A row alone gives the bits that it gives in the batch, up to the order of float32 sums in a batched product."""
    s = stream(family)
    together = run(begin(policy, s), s)
    for row in range(s.batch):
        rows = torch.tensor([row])
        alone = run(begin(policy, s, rows, sequence_ids=rows), s, rows=rows)
        assert relative(alone[:, 0], together[:, row]) <= 1e-5


@pytest.mark.parametrize(("family", "policy"), CASES)
def test_cursors_differ_between_rows(family, policy):
    """Rows that start at different times flush at different steps and match rows that run alone."""
    s = stream(family)
    state = begin(policy, s)
    late = torch.tensor([1, 2])
    begun = 3
    run(state, s, 0, begun)
    state.reset(late, s.initial[late])
    mixed = run(state, s, begun)
    expected_late = run(begin(policy, s, late, sequence_ids=late), s, begun, rows=late)
    expected_first = run(begin(policy, s), s)[begun:, 0]
    # Same arithmetic, batched differently; a format step (NVFP4: 1/8 of a value) would show at 1e-2.
    assert relative(mixed[:, late], expected_late) <= 1e-4
    assert relative(mixed[:, 0], expected_first) <= 1e-4
    if state.policy.window > 1:
        assert len(set(state.cursor.tolist())) > 1


@pytest.mark.parametrize(("family", "policy"), CASES)
def test_forks_continue_alike_and_apart(family, policy):
    s = stream(family)
    state = begin(policy, s)
    run(state, s, 0, 6)
    state.select(torch.tensor([2, 0, 2, 1]))
    rows = torch.tensor([2, 0, 2, 1])
    forked = run(state, s, 6, rows=rows)
    assert torch.equal(forked[:, 0], forked[:, 2])
    assert relative(forked[:, 1], run(begin(policy, s), s)[6:, 0]) <= 1e-4


@pytest.mark.parametrize(("family", "policy"), RESTART_CASES)
def test_unused_memory_never_leaks(family, policy):
    s = stream(family)
    state, twin = begin(policy, s), begin(policy, s)
    for t in range(s.steps):
        for name, value in state._buffer.fields.items():
            used = torch.arange(value.shape[1]) < state.cursor[:, None]
            poison = torch.where(used.view(*used.shape, *[1] * (value.ndim - 2)), value, torch.nan)
            state._buffer.fields[name] = poison
        output = state.step(s.step(t))
        assert torch.isfinite(output).all()
        assert torch.equal(output, twin.step(s.step(t)))


@pytest.mark.parametrize("family", FAMILIES)
def test_window_does_not_matter_in_float64(family):
    s = stream(family, steps=64, value_dim=32, key_dim=64)
    reference = run(begin("fp64@1", s), s)
    for window in (2, 3, 16, 64, 100):
        assert relative(run(begin(f"fp64@{window}", s), s), reference) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_copy_is_no_copy(family):
    """fp32/fp32@16 = fp32@16 bit for bit, in outputs and in the stored state."""
    s = stream(family, steps=40)
    one, two = begin("fp32@16", s), begin("fp32/fp32@16", s)
    assert torch.equal(run(one, s), run(two, s))
    assert torch.equal(one.materialize(), two.materialize())
    assert torch.equal(two.materialize(), two.read_state()) or RECURRENCES[family].delta_rule


@pytest.mark.parametrize("contents", ["raw", "derived"])
def test_who_lets_read_errors_into_the_checkpoint(contents):
    """raw: the checkpoint never sees the read copy.  derived: it does.  key_read=checkpoint: it does not."""
    s = stream("gated_delta", steps=32)

    def checkpoint(policy):
        state = begin(policy, s)
        run(state, s)
        return state.materialize()

    exact = checkpoint("fp32@8")
    through_copy = relative(checkpoint(f"fp32/nvfp4@8:contents={contents}"), exact)
    through_checkpoint = relative(checkpoint(f"fp32/nvfp4@8:contents={contents}:key_read=checkpoint"), exact)
    # float32 rounding of a few windows against NVFP4's error of nearly 10 %.
    assert through_checkpoint < 1e-5
    if contents == "raw":
        assert through_copy < 1e-5
    else:
        assert through_copy > 1e-3


@pytest.mark.parametrize(("family", "policy"), CASES)
def test_the_copy_is_a_function_of_the_checkpoint(family, policy):
    s = stream(family)
    state = begin(policy, s)
    run(state, s, 0, 9)
    if state._copy is None:
        assert torch.equal(
            state.policy.checkpoint.dequantize(state._checkpoint.encoded), state._checkpoint.decoded
        )
        return
    words = state._copy._words(s.initial.shape, state._copy.numbers, state._copy.sequence_ids)
    expected = state.policy.read_copy.quantize(state._checkpoint.decoded, words)
    assert torch.equal(expected.codes, state._copy.encoded.codes)


def test_exercised_counts_stores_that_were_read():
    s = stream("gated_delta")  # 13 steps
    expected = {
        "fp32@1": (13, None),
        "fp32@4": (4, None),  # the hand-off and the flushes after 4, 8 and 12 tokens
        "fp32/nvfp4@4": (3, 4),  # the fold after 12 was not folded again, but its copy was read
        "fp32/nvfp4@4:key_read=checkpoint": (4, 4),
        "fp32/nvfp4@20": (0, 1),
        "fp32@20": (1, None),
    }
    for policy, (checkpoint, copy) in expected.items():
        state = begin(policy, s)
        assert state.exercised == {"checkpoint": 0, "read_copy": None if copy is None else 0}
        run(state, s)
        assert state.exercised == {"checkpoint": checkpoint, "read_copy": copy}, policy


def test_exercised_is_the_minimum_over_rows():
    s = stream("mamba2")
    state = begin("fp32@4", s)
    run(state, s)
    state.reset(torch.tensor([1]), s.initial[[1]])
    assert state.exercised["checkpoint"] == 0
    run(state, s, 0, 1)
    assert state.exercised["checkpoint"] == 1


def test_stochastic_bits_belong_to_the_sequence():
    """The seed and the sequence id decide them; the slot does not."""
    s = stream("mamba2")
    same = run(begin("fp16+sr@1", s), s)
    assert not torch.equal(run(begin("fp16+sr@1", s, seed=12), s), same)
    order = torch.tensor([2, 0, 1])
    moved = run(begin("fp16+sr@1", s, order, sequence_ids=order), s, rows=order)
    assert relative(moved, same[:, order]) <= 1e-5


def test_the_stored_state_moves_with_every_store():
    s = stream("mamba2")
    state = begin("nvfp4@4", s)
    seen = [state._checkpoint.encoded.codes.clone()]
    for t in range(12):
        state.step(s.step(t))
        if (t + 1) % 4 == 0:
            assert not torch.equal(state._checkpoint.encoded.codes, seen[-1])
            seen.append(state._checkpoint.encoded.codes.clone())
        else:
            assert torch.equal(state._checkpoint.encoded.codes, seen[-1])


def test_wrong_shapes_are_named():
    s = stream("gated_delta")
    state = begin("fp32@4", s)
    inputs = s.step(0)
    for name in ("q", "k", "v", "log_decay", "beta"):
        wrong = inputs.map(lambda t: t)
        object.__setattr__(wrong, name, getattr(inputs, name)[..., :-1])
        with pytest.raises(InputError, match=f"^{name} "):
            state.step(wrong)
    with pytest.raises(InputError, match="key_heads 3"):
        start("fp32@1", "mamba2", s.initial, key_heads=3)
    with pytest.raises(InputError, match="rates"):
        start("fp32@1", "mamba1", s.initial)
    with pytest.raises(InputError, match="nearest: mamba2"):
        start("fp32@1", "mamba3x", s.initial)


def test_divergence_is_told_apart_from_failure():
    s = stream("mamba2")
    state = begin("fp32@1", s)
    inputs = s.step(0)
    broken = inputs.map(lambda t: t)
    object.__setattr__(broken, "v", torch.full_like(inputs.v, 1e38) * 10)
    with pytest.raises(Diverged):
        state.step(broken)


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")]
)
def test_a_state_that_cannot_be_written_is_one_line_and_leaves_nothing(fault, tmp_path, monkeypatch):
    s = stream("mamba2")
    state = begin("bf16/nvfp4@4", s)
    path = tmp_path / "state.safetensors"
    save_decode_state(state, path)
    before = path.read_bytes()
    state.step(s.step(0))

    def refuse(_):
        raise fault

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(InputError, match=str(fault.strerror)):
        save_decode_state(state, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="state"):
        save_decode_state(state, tmp_path / "no folder" / "state")


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_one_line(seed, tmp_path):
    """Cut short, or with one bit changed: InputError, or (a bit of the numbers) a state of the same shape."""
    s = stream("gated_delta")
    state = begin("int8+ef/nvfp4@4" if seed % 2 else "fp16+sr@4", s)
    state.step(s.step(0))
    path = tmp_path / "state"
    save_decode_state(state, path)
    data = path.read_bytes()
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, len(data), (24,), generator=generator).tolist()
    for at in [*places, *range(0, 400, 17)]:
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        for damaged in (data[:at], bytes(changed)):
            path.write_bytes(damaged)
            with contextlib.suppress(InputError):
                assert load_decode_state(path).materialize().shape == state.materialize().shape
                assert damaged != data[:at]
