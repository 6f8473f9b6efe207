"""Decode steps on pooled memory by kernels: the conformance suite, and what they refuse before any launch."""

from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels import drafts, steps, target
from quantlab.recurrences import StepInputs
from quantlab.schemes import StateShape, parse_policy
from quantlab.schemes import steps as reference
from quantlab.schemes.pool import allocate_pool
from quantlab.testing import IMPLEMENTATIONS
from quantlab.testing.pool_cases import CASES, DELTA, FAST, GROUPED, MODELS, SMALL
from quantlab.testing.pools import PoolCase, check_graph, check_load, check_pool
from tests.kernels.jobs import jobs

JOBS = jobs(CASES, (*FAST, *DELTA), MODELS)


def served(case):
    return steps.served(parse_policy(case.policy), case.family, case.shape)


@pytest.mark.parametrize(("implementation", "name"), JOBS, indirect=["implementation"])
def test_conformance(implementation, name):
    case = CASES[name]
    if implementation == "reference":
        check_pool(replace(case, foreign=False), implementation)  # it looks at the numbers
    elif reason := served(case):
        with pytest.raises(
            InputError, match=r"^pool .*expected a policy that kernels serve, not "
        ) as refused:
            check_pool(case, implementation)
        assert reason in str(refused.value)
    else:
        check_pool(case, implementation)


LOADED = {
    "fp16+sr/nvfp4@4": (SMALL, torch.float32),
    "fp8+sr/nvfp4@4": (SMALL, torch.bfloat16),
    "int8@1": (SMALL, torch.float16),
    "fp16/mxfp4@4": (SMALL, torch.float32),
    "int8+sr/fp8@4": (SMALL, torch.float32),
    "fp32/nvfp4@4": (StateShape(1, 80, 32, 1), torch.float32),
}


@pytest.mark.parametrize("policy", LOADED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
def test_prefill_states_are_stored_as_torch_stores_them(implementation, policy):
    """Every byte of memory: codes, scales, read copy, counters; a slot that is not there is skipped."""
    shape, dtype = LOADED[policy]
    cursors = (0, 0) if policy.endswith("@1") else (0, 3)
    check_load(PoolCase(policy, "mamba2", shape, cursors, foreign=True), implementation, dtype)


@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    "policy", ["fp16+sr@1", "fp16+sr/nvfp4@16:buffer=bf16", "fp8+sr/nvfp4@16:buffer=bf16"]
)
def test_a_captured_step_is_replayed_with_new_random_numbers(implementation, policy):
    check_graph(PoolCase(policy, "mamba2", GROUPED, (0, 0, 0)), tokens=20)


@pytest.fixture
def layer(monkeypatch):
    """A pool on the CPU with the arguments of a step, as if kernels ran there: whoever launched one would fail."""
    monkeypatch.setattr(target, "obstacle", lambda device: None)
    shape = StateShape(4, 16, 32, 2)
    pool = allocate_pool("int8/nvfp4@4:buffer=bf16", "mamba2", shape, 5)[0]
    slots = torch.tensor([3, -1, 0], dtype=torch.int32)
    inputs = StepInputs(
        torch.zeros(3, 2, 32), torch.zeros(3, 2, 32), torch.zeros(3, 4, 16), torch.zeros(3, 4)
    )
    return pool, inputs, reference.begin_step(pool.counters, slots, 4)


def strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def with_counters(pool, **changes):
    return replace(pool, counters=replace(pool.counters, **changes))


STEPS = {
    "no pool": (lambda p, i, s: (None, i, s), r"pool 'NoneType': expected a LayerPool"),
    "a checkpoint of another dtype": (
        lambda p, i, s: (replace(p, checkpoint=p.checkpoint.float()), i, s),
        r"pool.checkpoint 'float32 \(5, 4, 16, 32\)': expected int8 of shape \(5, 4, 16, 32\)",
    ),
    "a checkpoint of another shape": (
        lambda p, i, s: (replace(p, checkpoint=p.checkpoint[:, :2].contiguous()), i, s),
        r"pool.checkpoint 'int8 \(5, 2, 16, 32\)': expected int8 of shape",
    ),
    "a checkpoint with gaps": (
        lambda p, i, s: (replace(p, checkpoint=strided(p.checkpoint)), i, s),
        r"pool.checkpoint .*strides .*: expected a contiguous tensor",
    ),
    "a part that is missing": (
        lambda p, i, s: (replace(p, copy_scales=None), i, s),
        r"pool.copy_scales None: expected uint8 of shape",
    ),
    "a part that the policy has no use for": (
        lambda p, i, s: (replace(p, v_buffer=torch.zeros(5, 4, 4, 16)), i, s),
        r"pool.v_buffer .*: expected None under int8/nvfp4@4:buffer=bf16",
    ),
    "a window of another dtype": (
        lambda p, i, s: (replace(p, d_buffer=p.d_buffer.float()), i, s),
        r"pool.d_buffer 'float32 .*: expected bfloat16 of shape \(5, 4, 4, 16\)",
    ),
    "a window that is too short": (
        lambda p, i, s: (replace(p, k_buffer=p.k_buffer[:, :, :2].contiguous()), i, s),
        r"pool.k_buffer '2 ring positions': expected at least 3",
    ),
    "codes off a word": (
        lambda p, i, s: (
            replace(
                p, copy_codes=torch.zeros(p.copy_codes.numel() + 1, dtype=torch.uint8)[1:].view(5, 4, 16, 16)
            ),
            i,
            s,
        ),
        r"pool.copy_codes .*: expected memory that starts at a multiple of 4 bytes",
    ),
    "a cursor of another dtype": (
        lambda p, i, s: (with_counters(p, cursor=p.counters.cursor.long()), i, s),
        r"counters.cursor 'int64 \(5,\)': expected int32 of shape \(5,\)",
    ),
    "counters of fewer slots": (
        lambda p, i, s: (with_counters(p, store_numbers=p.counters.store_numbers[:4]), i, s),
        r"counters.store_numbers 'int64 \(4,\)': expected int64 of shape \(5,\)",
    ),
    "a plan of other counters": (
        lambda p, i, s: (p, i, replace(s, counters=replace(s.counters))),
        r"plan 'of other counters': expected a plan of the pool's own counters",
    ),
    "a plan of another window": (
        lambda p, i, s: (p, i, replace(s, window=8)),
        r"plan 'for a window of 8': expected a plan for the window of .*, 4",
    ),
    "no plan": (lambda p, i, s: (p, i, None), r"plan 'NoneType': expected what begin_step returned"),
    "a plan of other slots": (
        lambda p, i, s: (p, i, replace(s, slots=s.slots[:2])),
        r"plan.positions 'int32 \(3,\)': expected int32 of shape \(2,\)",
    ),
    "a plan without rows that flush": (
        lambda p, i, s: (p, i, replace(s, flush_rows=None)),
        r"plan.flush_rows None: expected int32 of shape \(3,\)",
    ),
    "a plan for a matrix of slots": (
        lambda p, i, s: (p, i, replace(s, slots=s.slots[None])),
        r"plan.slots 'int32 \(1, 3\)': expected int32 of shape \(1,\)",
    ),
    "a list of keys": (
        lambda p, i, s: (replace(p, k_buffer=[p.k_buffer]), i, s),
        r"pool.k_buffer 'list': expected a tensor of 4 dimensions",
    ),
    "no cursor": (
        lambda p, i, s: (with_counters(p, cursor=None), i, s),
        r"counters.cursor None: expected int32 of shape \(slots,\)",
    ),
    "no inputs": (lambda p, i, s: (p, i.q, s), r"inputs 'Tensor': expected StepInputs"),
    "float64 inputs": (
        lambda p, i, s: (p, i.to(torch.float64), s),
        r"inputs.q 'float64 \(3, 2, 32\)': expected float32 or bfloat16 or float16 of shape \(3, 2, 32\)",
    ),
    "a batch of another size": (
        lambda p, i, s: (p, replace(i, v=i.v[:2]), s),
        r"inputs.v 'float32 \(2, 4, 16\)': expected .* of shape \(3, 4, 16\)",
    ),
    "keys of every head": (
        lambda p, i, s: (p, replace(i, k=torch.zeros(3, 4, 32)), s),
        r"inputs.k 'float32 \(3, 4, 32\)': expected .* of shape \(3, 2, 32\)",
    ),
    "a decay of every channel": (
        lambda p, i, s: (p, replace(i, log_decay=torch.zeros(3, 4, 32)), s),
        r"inputs.log_decay .*: expected .* of shape \(3, 4\)",
    ),
    "inputs with gaps": (
        lambda p, i, s: (p, replace(i, q=strided(i.q)), s),
        r"inputs.q .*strides .*: expected a contiguous tensor",
    ),
    "inputs elsewhere": (
        lambda p, i, s: (p, replace(i, q=i.q.to("meta")), s),
        r"inputs.q .* on meta': expected a tensor on cpu like the slots",
    ),
    "an output of another shape": (
        lambda p, i, s: (p, i, s, torch.zeros(3, 4, 32)),
        r"output 'float32 \(3, 4, 32\)': expected .* of shape \(3, 4, 16\)",
    ),
    "an output of integers": (
        lambda p, i, s: (p, i, s, torch.zeros(3, 4, 16, dtype=torch.int32)),
        r"output 'int32 \(3, 4, 16\)': expected float32 or bfloat16 or float16",
    ),
}


@pytest.mark.parametrize(("change", "message"), STEPS.values(), ids=STEPS)
def test_a_step_is_refused_before_any_launch(layer, change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        steps.decode_token(*change(*layer))


BEGINNINGS = {
    "no counters": (lambda c, s: (None, s, 4), r"counters 'NoneType': expected SlotCounters"),
    "slots of another dtype": (
        lambda c, s: (c, s.long(), 4),
        r"slots 'int64 \(3,\)': expected int32 of shape",
    ),
    "a matrix of slots": (
        lambda c, s: (c, s[None], 4),
        r"slots 'int32 \(1, 3\)': expected int32 of shape \(B,\)",
    ),
    "no tensor of slots": (lambda c, s: (c, [3, 0], 4), r"slots 'list': expected int32 of shape \(B,\)"),
    "a slot twice": (lambda c, s: (c, s[[0, 0]], 4), r"slots \[3, 3\]: expected slot numbers below 5"),
    "a slot that is not there": (
        lambda c, s: (c, s + 2, 4),
        r"slots \[5, 1, 2\]: expected slot numbers below 5",
    ),
    "no window": (lambda c, s: (c, s, 0), r"window 0: expected an integer from 1 to 65536"),
    "a window that no policy has": (
        lambda c, s: (c, s, 2**40),
        r"window 1099511627776: expected an integer from 1 to 65536",
    ),
}


@pytest.mark.parametrize(("change", "message"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_plan_is_refused_before_any_launch(layer, change, message):
    pool, _, plan = layer
    with pytest.raises(InputError, match=f"^{message}"):
        steps.begin_step(*change(pool.counters, plan.slots))


LOADS = {
    "states of another shape": (
        lambda p, s: (p, s, torch.zeros(2, 4, 32, 16)),
        r"initial 'float32 \(2, 4, 32, 16\)': expected .* of shape \(2, 4, 16, 32\)",
    ),
    "fewer states than slots": (
        lambda p, s: (p, s, torch.zeros(1, 4, 16, 32)),
        r"initial .*: expected .* of shape \(2, 4, 16, 32\)",
    ),
    "float64 states": (
        lambda p, s: (p, s, torch.zeros(2, 4, 16, 32, dtype=torch.float64)),
        r"initial 'float64 .*: expected float32 or bfloat16 or float16",
    ),
    "slots of another dtype": (
        lambda p, s: (p, s.float(), torch.zeros(2, 4, 16, 32)),
        r"slots 'float32 \(2,\)': expected int32 or int64 of shape \(2,\)",
    ),
    "a slot that is not there": (
        lambda p, s: (p, s + 4, torch.zeros(2, 4, 16, 32)),
        r"slots \[5, 7\]: expected slot numbers below 5",
    ),
    "a slot whose low half there is": (
        lambda p, s: (p, s + 2**32, torch.zeros(2, 4, 16, 32)),
        r"slots \[4294967297, 4294967299\]: expected slot numbers below 5",
    ),
}


@pytest.mark.parametrize(("change", "message"), LOADS.values(), ids=LOADS)
def test_a_hand_off_is_refused_before_any_launch(layer, change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        steps.load_states(*change(layer[0], torch.tensor([1, 3])))


def test_where_no_kernel_runs_is_refused():
    pool = allocate_pool("fp32@1", "mamba2", SMALL, 2)[0]
    slots = torch.zeros(1, dtype=torch.int32)
    if target.obstacle(pool.device) is None:
        pytest.fail(
            "tests run without TRITON_INTERPRET: kernels on the CPU are run in a process of their own"
        )
    with pytest.raises(
        InputError, match=r"^counters 'tensors on cpu': expected a device that runs kernels: "
    ):
        steps.begin_step(pool.counters, slots, 1)


UNSERVED = {
    "nvfp4@4": ("mamba2", SMALL, "what a pool has no layout for, which takes a checkpoint of fp32"),
    "fp32@4": ("mamba2", StateShape(2, 24, 32, 1), "a value dim that is no multiple of 16"),
    "fp16@4": ("mamba2", StateShape(2, 16, 96, 1), "a key dim that is no power of two"),
    "fp32@4:flush=early": ("mamba2", SMALL, "which takes flush=full"),
    "fp32/nvfp4@1:flush_read=copy": ("mamba2", SMALL, "flush_read=copy with a window of 1"),
    "fp32/nvfp4+keyscale@4": (
        "gated_delta",
        StateShape(2, 16, 96, 1),
        "a key dim that is no power of two with key",
    ),
    "fp32/mxfp4+keyscale@4": (
        "mamba2",
        SMALL,
        "what a pool has no layout for, which takes a read copy of nvfp4",
    ),
}


@pytest.mark.parametrize("policy", UNSERVED)
def test_a_policy_without_a_kernel_says_why(policy):
    family, shape, reason = UNSERVED[policy]
    assert reason in steps.served(policy, family, shape)


@pytest.mark.parametrize(
    "shape", [None, (2, 16, 32, 1), StateShape(6, 16, 32, 4), StateShape(0, 16, 32, 1)], ids=str
)
def test_what_is_no_shape_is_refused_and_not_served(shape):
    for module in (steps, drafts):
        with pytest.raises(InputError, match=r"^(shape|key_heads) .*: expected "):
            module.served("fp32@4", "mamba2", shape)


def test_room_for_drafts_is_not_served():
    assert steps.served("fp32@16", "mamba2", SMALL) is None
    assert steps.served("fp32@16", "mamba2", SMALL, records=16) is None
    assert steps.served("fp32@16", "mamba2", SMALL, records=32) == "room for drafts behind the window"
