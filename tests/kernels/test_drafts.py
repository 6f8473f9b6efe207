"""Verification and commit on pooled memory by kernels: the conformance suite, and what is refused before a launch."""

from dataclasses import replace

import numpy
import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels import arguments, drafts, steps, target
from quantlab.recurrences import StepInputs
from quantlab.schemes import StateShape
from quantlab.schemes import drafts as reference
from quantlab.schemes import steps as reference_steps
from quantlab.schemes.pool import allocate_pool
from quantlab.testing import IMPLEMENTATIONS, in_triton_process
from quantlab.testing.draft_cases import CASES, FAST, MODELS
from quantlab.testing.pool_cases import SMALL
from quantlab.testing.pool_drafts import check_drafts, outputs_beside_a_draft
from tests.kernels.jobs import jobs

JOBS = jobs(CASES, FAST, MODELS)


@pytest.mark.parametrize(("implementation", "name"), JOBS, indirect=["implementation"])
def test_conformance(implementation, name):
    case = CASES[name]
    # The torch twin looks at slot numbers.
    check_drafts(replace(case, foreign=False) if implementation == "reference" else case, implementation)


@pytest.mark.parametrize(
    "family",
    ["mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gated_delta", "kimi_delta"))],
)
@pytest.mark.parametrize(
    "implementation",
    [pytest.param(i, marks=pytest.mark.slow if i == "interpreter" else ()) for i in IMPLEMENTATIONS],
    indirect=True,
)
def test_a_draft_that_is_not_finite_reaches_no_earlier_one(implementation, family):
    """Behind the diagonal is a selection: a product with a coefficient of zero would spread NaN."""
    given = family, (1.0, float("inf"), float("nan")), implementation
    if implementation == "interpreter":
        fine, *broken = in_triton_process(outputs_beside_a_draft, *given, interpret=True)
    else:
        fine, *broken = outputs_beside_a_draft(*given)
    assert numpy.isfinite(fine).all()
    for outputs in broken:
        numpy.testing.assert_array_equal(outputs[:, :2], fine[:, :2])
        assert not numpy.isfinite(outputs[:, 2]).any()


@pytest.fixture
def layer(monkeypatch):
    """A pool on the CPU with drafts and plans, as if kernels ran there: whoever launched one would fail."""
    monkeypatch.setattr(target, "obstacle", lambda device: None)
    pool = allocate_pool("int8/nvfp4@4:buffer=bf16", "mamba2", StateShape(4, 16, 32, 2), 5, drafts=3)[0]
    slots = torch.tensor([3, -1, 0], dtype=torch.int32)
    keys, values = torch.zeros(3, 3, 2, 32), torch.zeros(3, 3, 4, 16)
    tokens = StepInputs(keys, keys, values, torch.zeros(3, 3, 4))
    return pool, tokens, reference_steps.begin_step(pool.counters, slots, 4)


VERIFICATIONS = {
    "no pool": (lambda p, i, s: (None, i, s), r"pool 'NoneType': expected a LayerPool"),
    "no plan": (lambda p, i, s: (p, i, None), r"plan 'NoneType': expected what begin_step returned"),
    "no tokens": (lambda p, i, s: (p, i.q, s), r"tokens 'Tensor': expected StepInputs"),
    "one token": (
        lambda p, i, s: (p, i.map(lambda t: t[:, 0]), s),
        r"tokens.q 'float32 \(3, 2, 32\)': expected .* of shape \(3, 1, 2, 32\)",
    ),
    "no values": (
        lambda p, i, s: (p, replace(i, v=None), s),
        r"tokens.v None: expected a tensor of shape \(B, T, heads, value_dim\)",
    ),
    "more than a window": (
        lambda p, i, s: (p, i.map(lambda t: t[:, [0, 1, 2, 0, 1]]), s),
        r"tokens '5 drafted tokens': expected 1 to 4, which the pool has room for",
    ),
    "no room": (
        lambda p, i, s: (without_room(p), i, s),
        r"tokens '3 drafted tokens': expected 1 to 1, which the pool has room for",
    ),
    "fewer gates than tokens": (
        lambda p, i, s: (p, replace(i, log_decay=i.log_decay[:, :2]), s),
        r"tokens.log_decay 'float32 \(3, 2, 4\)': expected .* of shape \(3, 3, 4\)",
    ),
    "an output of one token": (
        lambda p, i, s: (p, i, s, torch.zeros(3, 4, 16)),
        r"output 'float32 \(3, 4, 16\)': expected .* of shape \(3, 3, 4, 16\)",
    ),
}


def without_room(pool):
    return replace(allocate_pool(pool.policy, "mamba2", pool.shape, 5)[0], counters=pool.counters)


@pytest.mark.parametrize(("change", "message"), VERIFICATIONS.values(), ids=VERIFICATIONS)
def test_a_verification_is_refused_before_any_launch(layer, change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        drafts.verify_tokens(*change(*layer))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.zeros(3), r"counts 'float32 \(3,\)': expected int32 of shape \(3,\)"),
        (torch.zeros(2, dtype=torch.int32), r"counts 'int32 \(2,\)': expected int32 of shape \(3,\)"),
        (None, r"counts None: expected int32 of shape \(3,\)"),
    ],
)
def test_counts_are_refused_before_any_launch(layer, counts, message):
    pool, _, plan = layer
    with pytest.raises(InputError, match=f"^{message}"):
        drafts.begin_commit(pool.counters, plan.slots, counts, 4)


def test_plans_are_not_mixed_up(layer):
    pool, tokens, plan = layer
    counts = torch.zeros(3, dtype=torch.int32)
    commit = reference.begin_commit(pool.counters, plan.slots, counts, 4)
    with pytest.raises(InputError, match=r"^plan 'CommitPlan': expected what begin_step returned"):
        drafts.verify_tokens(pool, tokens, commit)
    for function in (lambda: drafts.commit_tokens(pool, plan), lambda: drafts.end_commit(plan)):
        with pytest.raises(InputError, match=r"^plan 'StepPlan': expected what begin_commit returned"):
            function()
    for wrong in (0, -1, 2**31, True):
        with pytest.raises(InputError, match=rf"^drafted {wrong}: expected as many tokens as were verified"):
            drafts.end_verify(plan, wrong)


def test_what_waits_is_committed_before_tokens_are_read(layer):
    """As the torch twin has it, where numbers can be looked at; drafts of other slots are no matter."""
    pool, tokens, plan = layer
    pool.counters.pending[1] = 2
    arguments.none_wait(plan, "verify")
    pool.counters.pending[3] = 2
    message = r"^operation 'verify with 2 drafts pending in slot 3': expected a commit first"
    with pytest.raises(InputError, match=message):
        drafts.verify_tokens(pool, tokens, plan)
    pool = allocate_pool("fp32@4", "mamba2", pool.shape, 5)[0]
    pool.counters.pending[0] = 1
    plan = reference_steps.begin_step(pool.counters, plan.slots, 4)
    message = r"^operation 'step with 1 drafts pending in slot 0': expected a commit first"
    with pytest.raises(InputError, match=message):
        steps.decode_token(pool, tokens.map(lambda t: t[:, 0].contiguous()), plan)


UNSERVED = {
    "nvfp4@4": ("mamba2", SMALL, "what a pool has no layout for"),
    "fp32@1": ("mamba2", SMALL, "drafts behind a window of 1"),
    "bf16@1": ("gated_delta", SMALL, "drafts behind a window of 1"),
    "fp32/mxfp4@4": ("kimi_delta", SMALL, "a read copy of mxfp4"),
}


@pytest.mark.parametrize("policy", UNSERVED)
def test_a_policy_under_which_no_kernel_verifies_says_why(policy):
    family, shape, reason = UNSERVED[policy]
    assert reason in drafts.served(policy, family, shape)
    for family in drafts.FAMILIES:
        assert drafts.served("fp32@4", family, SMALL) is None


def test_single_steps_are_not_served_where_there_is_room_for_drafts(layer):
    pool, tokens, plan = layer
    with pytest.raises(InputError, match=r"^pool .* not room for drafts behind the window"):
        steps.decode_token(pool, tokens.map(lambda t: t[:, 0].contiguous()), plan)
