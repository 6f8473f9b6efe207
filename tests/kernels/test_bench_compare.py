"""No speed without a comparison: the torch twin passes, and kernels that are wrong in one thing do not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels.bench_compare import Comparer
from quantlab.records import load_records
from quantlab.recurrences import StepInputs
from quantlab.schemes import parse_policy, steps
from quantlab.schemes.ledger import StateShape
from tests.kernels.bench_stand_ins import SMALL, CountingTimer, case, run

FAMILIES = {"mamba2": SMALL, "gated_delta": SMALL, "kimi_delta": replace(SMALL, key_heads=4)}
POLICIES = [
    "fp32@1",
    "fp16+sr@1",
    "fp32@16:buffer=bf16",
    "fp16+sr/nvfp4@16:buffer=bf16",
    "int8/mxfp4@4",
    "fp8/fp8@8",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_passes_its_own_comparison(family):
    comparer = Comparer(steps, "cpu")
    for policy in POLICIES:
        for batch in (1, 9):
            found = comparer.compare(case(policy, batch, family, FAMILIES[family]))
            assert found.passed, (policy, batch, found)
            assert set(found.measured) >= {"output", "checkpoint", "padding", "cursor"}


def altered(**functions):
    names = ("begin_step", "decode_token", "end_step", "load_states")
    return SimpleNamespace(**{name: getattr(steps, name) for name in names} | functions)


def wrong_output(pool, inputs, plan, output):
    """Off by an eighth of half a unit of bfloat16."""
    return steps.decode_token(pool, replace(inputs, q=inputs.q.float() * (1 + 2**-11)), plan, output)


def wrong_neighbour(pool, inputs, plan, output):
    steps.decode_token(pool, inputs, plan, output)
    return output.copy_(output.roll(1, 1))


def wrong_padding(pool, inputs, plan, output):
    steps.decode_token(pool, inputs, plan, output)
    output[plan.slots < 0] = 0
    return output


def wrong_copy(pool, inputs, plan, output):
    steps.decode_token(pool, inputs, plan, output)
    rows = plan.flush_rows[: int(plan.flush_count)].long()
    pool.copy_codes[plan.slots[rows].long(), 0, 0, 0] ^= 1
    return output


def wrong_record(pool, inputs, plan, output):
    steps.decode_token(pool, inputs, plan, output)
    pool.k_buffer.mul_(1.01)
    return output


def wrong_checkpoint(pool, inputs, plan, output):
    """As if the newest record were missing from the fold."""
    nothing = StepInputs(inputs.q, inputs.k, torch.zeros_like(inputs.v), inputs.log_decay, inputs.beta)
    kept = pool.checkpoint.clone()
    steps.decode_token(pool, nothing, plan, output.clone())
    folded, pool_before = pool.checkpoint.clone(), kept
    pool.checkpoint.copy_(pool_before)
    steps.decode_token(pool, inputs, plan, output)
    pool.checkpoint.copy_(folded)
    return output


def nearest_only(pool, inputs, plan, output):
    """Rounds to nearest where the policy says stochastic."""
    nearest = replace(pool, policy=parse_policy(str(pool.policy).replace("+sr", "")))
    return steps.decode_token(nearest, inputs, plan, output)


def never_ends(plan):
    pass


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"decode_token": wrong_output}, "output"),
        ({"decode_token": wrong_neighbour}, "output"),
        ({"decode_token": wrong_padding}, "padding"),
        ({"decode_token": wrong_copy}, "read copy"),
        ({"decode_token": wrong_record}, "k records"),
        ({"decode_token": wrong_checkpoint}, "checkpoint"),
        ({"decode_token": nearest_only}, "stored values"),
        ({"end_step": never_ends}, "cursor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_kernel_has_no_speed(change, part, tmp_path):
    timer = CountingTimer()
    one = case("fp16+sr/nvfp4@16:buffer=bf16", shape=StateShape(4, 64, 128, 2))
    (record,) = run([one], steps=altered(**change), timer=timer, folder=tmp_path)
    assert record["status"] == "comparison_failed"
    assert record["message"].startswith(part)
    assert "us" not in record["metrics"]
    assert timer.measured == 0
    assert load_records(tmp_path) == [record]


def test_a_case_without_a_kernel_says_why():
    def refuses(pool, inputs, plan, output):
        raise InputError("policy", str(pool.policy), "a checkpoint that has a kernel")

    (record,) = run([case()], steps=altered(decode_token=refuses))
    assert record["status"] == "not_served"
    assert "a checkpoint that has a kernel" in record["message"]
    (record,) = run([case("nvfp4@16")])
    assert record["status"] == "not_served"
    assert "a checkpoint of fp32" in record["message"]

    def breaks(pool, inputs, plan, output):
        raise RuntimeError("out of registers")

    (record,) = run([case()], steps=altered(decode_token=breaks))
    assert (record["status"], record["message"]) == ("failed", "RuntimeError: out of registers")
