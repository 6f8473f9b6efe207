"""What a decode state does with input that is odd, hostile or simply wrong."""

import copy

import pytest
import torch

from quantlab.errors import InputError
from quantlab.recurrences import RECURRENCES, StepInputs
from quantlab.schemes import DecodeState, Diverged, parse_policy, start
from tests.schemes.streams import begin, relative, run, stream

FAMILIES = sorted(RECURRENCES)
WRONG_ROWS = [
    torch.tensor([3]),
    torch.tensor([-1]),
    torch.tensor([True, False, True]),
    torch.tensor([0.0]),
    torch.tensor(0),
    torch.tensor([[0]]),
    torch.tensor([1], dtype=torch.uint8),
    [1, 0],
    None,
]


@pytest.mark.parametrize("rows", WRONG_ROWS, ids=str)
def test_wrong_rows_are_refused_and_change_nothing(rows):
    s = stream("gated_delta")
    state = begin("fp16+sr/nvfp4@4", s)
    run(state, s, 0, 2)
    before = state.save()
    count = rows.numel() if isinstance(rows, torch.Tensor) else 2
    with pytest.raises(InputError, match=r"^rows "):
        state.select(rows)
    with pytest.raises(InputError, match=r"^rows "):
        state.reset(rows, s.initial[:1].expand(count, -1, -1, -1))
    with pytest.raises(InputError, match="at most once"):
        state.reset(torch.tensor([1, 1]), s.initial[:2])
    for name, value in state.save().items():
        assert torch.equal(value.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("policy", ["fp16+sr/nvfp4+sr8@4", "int8+ef@4", "int8+ef.fp32@1", "nvfp4+sr@3"])
def test_restored_states_continue_bit_for_bit_after_select_and_reset(policy):
    s = stream("gated_delta")
    state = begin(policy, s)
    run(state, s, 0, 6)
    state.select(torch.tensor([2, 0, 2]))
    state.reset(torch.tensor([1]), s.initial[[1]])
    again = DecodeState.restore(state.save())
    for t in range(6, s.steps):
        assert torch.equal(state.step(s.step(t)), again.step(s.step(t)))
        if t == 9:
            again = DecodeState.restore(again.save())
    assert again.exercised == state.exercised


@pytest.mark.parametrize("policy", ["fp16+sr@4", "nvfp4+sr@3", "fp16+sr/nvfp4+sr@4"])
def test_random_bits_follow_the_sequence_through_mixed_flushes(policy):
    """Rows that flush at different steps still draw by (seed, store number, sequence id).

    A wrong word moves a value by a unit in the last place: 1e-3 for fp16, 1e-1 for nvfp4.
    """
    s = stream("mamba2")
    names = torch.tensor([7, 3, 40])
    state = begin(policy, s, sequence_ids=names)
    run(state, s, 0, 2)
    late = torch.tensor([2])
    state.reset(late, s.initial[late], sequence_ids=torch.tensor([99]))
    mixed = run(state, s, 2)
    first = run(begin(policy, s, torch.tensor([1]), sequence_ids=[3]), s, rows=torch.tensor([1]))[2:]
    second = run(begin(policy, s, late, sequence_ids=[99]), s, 2, rows=late)
    assert relative(mixed[:, [1]], first) <= 1e-5
    assert relative(mixed[:, late], second) <= 1e-5
    reused = begin(policy, s, late, sequence_ids=[40])
    assert relative(run(reused, s, 2, rows=late), second) > 1e-5


@pytest.mark.parametrize(
    "policy",
    [
        *("int8+ef@4", "fp16+sr/nvfp4@4", "fp32/nvfp4@4:flush_read=copy", "fp32@4:contents=derived"),
        "fp32/nvfp4@4:key_read=checkpoint:flush_read=copy",
    ],
)
def test_rows_of_a_mixed_batch_count_and_feed_back_like_rows_alone(policy):
    """Also where a flush reads a store twice, or only some rows of a residual are written."""
    s = stream("gated_delta", steps=17)
    late = torch.tensor([1])
    state = begin(policy, s)
    run(state, s, 0, 6)
    state.reset(late, s.initial[late])
    mixed = run(state, s, 6)
    alone = begin(policy, s, late, sequence_ids=late)
    # The order of float32 sums in a batched product differs; a lost or stale residual shows at 1e-3.
    assert relative(mixed[:, late], run(alone, s, 6, rows=late)) <= 1e-4
    assert relative(state.materialize()[late], alone.materialize()) <= 1e-4
    whole = begin(policy, s)
    run(whole, s)
    state.select(late)
    assert state.exercised == alone.exercised
    state = begin(policy, s)
    run(state, s, 0, 6)
    state.reset(late, s.initial[late])
    run(state, s, 6)
    state.select(torch.tensor([0]))
    assert state.exercised == whole.exercised


def test_int32_rows_are_taken():
    s = stream("gated_delta")
    states = [begin("fp16+sr/nvfp4@4", s) for _ in range(2)]
    for state, dtype in zip(states, (torch.int32, torch.int64), strict=True):
        run(state, s, 0, 6)
        state.select(torch.tensor([2, 0, 2], dtype=dtype))
        state.reset(torch.tensor([1], dtype=dtype), s.initial[[1]])
    assert torch.equal(*(run(state, s, 6) for state in states))


def test_layers_and_copies_draw_their_own_bits():
    s = stream("mamba2")
    codes = [begin("fp16+sr@1", s, layer=layer)._checkpoint.encoded.codes for layer in (0, 1)]
    assert not torch.equal(*codes)
    # fp32 stores unrounded, so the copy rounds what an fp16+sr checkpoint would: only the part differs.
    assert not torch.equal(begin("fp32/fp16+sr@4", s)._copy.encoded.codes, codes[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("log_decay", [-1e6, -float("inf")])
def test_a_gate_that_closes_does_not_blur_what_follows(family, log_decay):
    """Float32 windows against float64 steps: without a closed gate they agree to 1e-6."""
    s = stream(family, steps=9)
    gate = s.log_decay.clone()
    gate[2] = -log_decay if family == "mamba1" else log_decay

    def outputs(policy):
        state = begin(policy, s)
        inputs = [
            StepInputs(s.q[t], s.k[t], s.v[t], gate[t], None if s.beta is None else s.beta[t])
            for t in range(9)
        ]
        return torch.stack([state.step(token) for token in inputs])

    exact = outputs("fp64@1")
    assert torch.isfinite(exact).all()
    for policy in ("fp32@1", "fp32@4", "fp32@16", "fp32/fp32@5"):
        assert relative(outputs(policy), exact) <= 2e-6, policy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["fp64/nvfp4@4", "fp64/fp32@3:flush_read=copy"])
def test_a_float64_checkpoint_takes_a_narrow_copy(family, policy):
    s = stream(family)
    state = begin(policy, s)
    assert run(state, s).dtype == torch.float64
    assert state.read_state().dtype == torch.float64
    # The checkpoint of raw contents never sees the copy.
    other = begin(f"fp64@{state.policy.window}", s)
    run(other, s)
    assert relative(state.materialize(), other.materialize()) <= 1e-12


@pytest.mark.parametrize("policy", ["fp32@4", "fp64@4", "fp16+sr@4", "fp32/fp32@4"])
def test_a_state_owns_its_memory(policy):
    s = stream("gated_delta")
    initial = s.initial.double() if "64" in policy else s.initial.clone()
    state = start(policy, "gated_delta", initial, key_heads=2)
    before, codes = state.materialize().clone(), state.save()["checkpoint.codes"]
    initial.zero_()
    state.materialize().zero_()
    state.read_state().zero_()
    assert torch.equal(state.materialize(), before)
    assert torch.equal(state.save()["checkpoint.codes"], codes)


def test_gradients_are_not_kept():
    s = stream("gated_delta")
    state = start("fp32@3", "gated_delta", s.initial.clone().requires_grad_(), key_heads=2)
    for t in range(5):
        assert not state.step(s.step(t).map(lambda x: x.clone().requires_grad_())).requires_grad
    copy.deepcopy(state)  # torch refuses to copy a tensor that has a history


def test_handing_off_starts_the_counts_again():
    s = stream("mamba2")
    state = begin("fp16+sr/nvfp4@4", s)
    once = run(state, s)
    state.hand_off(s.initial)
    assert state.exercised == {"checkpoint": 0, "read_copy": 0}
    assert torch.equal(run(state, s), once)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("initial", torch.zeros(3, 4, 16, 32, dtype=torch.complex64)),
        ("initial", torch.zeros(3, 4, 16, 32, dtype=torch.bool)),
        ("initial", [[1.0]]),
        ("initial", torch.zeros(3, 4, 0, 32)),
        ("initial", torch.zeros(3, 4, 16, 0)),
        ("initial", torch.zeros(3, 4, 16)),
        ("sequence_ids", torch.tensor([1])),
        ("sequence_ids", torch.tensor([1.0, 2.0, 3.0])),
        ("sequence_ids", ["a", "b", "c"]),
        ("seed", 1.5),
        ("layer", "0"),
        ("key_heads", 2.0),
        ("key_heads", 0),
        ("rates", torch.zeros(4, 16, 32)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("policy", ["fp32@2", "fp16+sr@2"])
def test_wrong_arguments_are_named(policy, argument, value):
    s = stream("mamba2")
    arguments = {"initial": s.initial, "key_heads": 2} | {argument: value}
    with pytest.raises(InputError, match=f"^{argument} ") as caught:
        start(policy, "mamba2", **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta"])
def test_step_inputs_must_be_real_tensors(name):
    s = stream("gated_delta")
    state = begin("fp32@4", s)
    good = s.step(0)
    values = {n: getattr(good, n) for n in ("q", "k", "v", "log_decay", "beta")}
    for wrong in (None, values[name].numpy(), values[name].to(torch.complex64), values[name] > 0):
        with pytest.raises(InputError, match=f"^{name} "):
            state.step(StepInputs(**(values | {name: wrong})))


def test_what_save_did_not_write_is_refused():
    saved = begin("fp16/nvfp4@4", stream("mamba2")).save()
    for wrong in ({}, 5, {"meta": saved["meta"]}, saved | {"meta": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(InputError, match=r"^saved state "):
            DecodeState.restore(wrong)
    for name in saved:
        if name != "buffer.cursor":
            with pytest.raises(InputError, match=r"^saved state "):
                DecodeState.restore({n: t for n, t in saved.items() if n != name})


@pytest.mark.parametrize("policy", ["int8+ef.nvfp4@1", "int8+ef@2", "fp16+sr/nvfp4@4", "fp32@1"])
def test_saved_tensors_of_other_shapes_or_dtypes_are_refused(policy):
    saved = begin(policy, stream("gated_delta")).save()
    for name, tensor in saved.items():
        if name.startswith(("checkpoint.", "read_copy.")):
            for wrong in (tensor[:1], tensor[..., :0], tensor.to(torch.complex64), None):
                with pytest.raises(InputError, match=r"^saved state "):
                    DecodeState.restore(saved | {name: wrong})


def test_a_save_without_the_residual_is_refused():
    for policy in ("int8+ef.nvfp4@1", "int8+ef@2"):
        saved = begin(policy, stream("gated_delta")).save()
        with pytest.raises(InputError, match=r"^saved state .*residual"):
            DecodeState.restore({n: t for n, t in saved.items() if "residual" not in n})


def test_windows_beyond_reason_are_refused():
    assert parse_policy("fp32@65536").window == 65536
    for window in ("65537", "1000000000", "9" * 5000):
        with pytest.raises(InputError, match="at most 65536"):
            parse_policy(f"fp32@{window}")


def test_an_overflow_beside_a_residual_is_a_divergence():
    s = stream("mamba2")
    state = begin("int8+ef.fp32@1", s)
    state.step(s.step(0))
    huge = s.step(1).map(lambda t: t)
    object.__setattr__(huge, "v", torch.full_like(huge.v, 3e38))
    object.__setattr__(huge, "k", torch.ones_like(huge.k))
    with pytest.raises(Diverged):
        state.step(huge)
