"""How many kernels a layer launches: one that rewrites its state, at most three otherwise, whatever is served."""

from itertools import product

import pytest
from triton.runtime.jit import JITFunction

from quantlab.kernels import drafts, steps
from quantlab.kernels.bench_timing import recorded_launches
from quantlab.kernels.choice import rewrites
from quantlab.kernels.mamba2_steps import FEWEST_STEPS, configuration
from quantlab.kernels.step_specialisations import DRAFTS, decode, verify_and_commit
from quantlab.recurrences import get_recurrence
from quantlab.schemes import StateShape, parse_policy
from quantlab.schemes.pool import allocate_pool

CHECKPOINTS = ("fp32", "bf16", "fp16+sr", "fp8", "int8+sr")
COPIES = ("", "/nvfp4", "/nvfp4+keyscale", "/mxfp4", "/fp8")
WINDOWS = (1, 2, 16, 20)
SHAPES = {
    "mamba2": [(64, 64, 128, 8), (96, 80, 128, 8), (80, 64, 128, 1), (24, 128, 256, 1), (4, 16, 32, 1)],
    "gated_delta": [(32, 128, 128, 16), (30, 192, 96, 30), (8, 256, 128, 8), (2, 16, 32, 1)],
    "kimi_delta": [(32, 128, 128, 32), (8, 48, 64, 8)],
}


def options(family, window, copy):
    """What chooses code, one after the other."""
    if window == 1:
        return [":flush_read=copy"] if copy else [""]
    found = ["", ":buffer=bf16"] + ([":buffer=bf16:flush_read=copy"] if copy else [])
    if get_recurrence(family).delta_rule:
        found += [":buffer=bf16:contents=derived"]
        found += [":buffer=bf16:contents=derived:key_read=checkpoint"] if copy else []
    return found


def policies(family):
    for checkpoint, copy, window in product(CHECKPOINTS, COPIES, WINDOWS):
        for option in options(family, window, copy):
            yield parse_policy(f"{checkpoint}{copy}@{window}{option}")


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that work launches, as the bench counts them; nothing is compiled or run."""
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *given, **options: None)
    return lambda work: [name for name, _ in recorded_launches(work)]


def counted(family, served, work, launched, **room):
    """(policy, shape) -> the kernels that ``work`` launches on a pool of it."""
    found = {}
    for sizes, policy in product(SHAPES[family], policies(family)):
        if served(policy, family, StateShape(*sizes)) is None:
            (pool,) = allocate_pool(policy, family, StateShape(*sizes), 256, device="meta", **room)
            found[policy, sizes] = launched(lambda pool=pool: work(pool))
    return found


@pytest.mark.parametrize("family", SHAPES)
def test_a_token_takes_at_most_three(family, launched):
    found = counted(family, steps.served, decode, launched)
    assert len(found) > 100
    assert {case: names for case, names in found.items() if len(names) > 3} == {}
    rewritten = [names for (policy, _), names in found.items() if rewrites(policy)]
    assert len(rewritten) >= len(CHECKPOINTS)
    assert all(names == ["step_kernel"] for names in rewritten)


@pytest.mark.parametrize("family", SHAPES)
def test_a_verification_and_its_commit_take_three_or_four(family, launched):
    """Two that read and one that folds; before a delta rule's fold by matrix products another prepares the systems."""
    found = counted(family, drafts.served, verify_and_commit, launched, drafts=DRAFTS)
    assert len(found) > 50
    most = 4 if get_recurrence(family).delta_rule else 3
    assert {case: names for case, names in found.items() if len(names) > most} == {}


@pytest.mark.parametrize(("sizes", "few", "many"), [((64, 64, 128, 8), 4, 16), ((24, 128, 256, 1), 4, 8)])
def test_a_step_of_a_few_rows_has_more_programs(sizes, few, many):
    shape, policy = StateShape(*sizes), parse_policy("fp32@1")
    assert [configuration(policy, shape, batch).step.rows for batch in (1, 8, 256)] == [few, many, many]
    assert 8 * shape.heads * shape.value_dim // many >= FEWEST_STEPS
