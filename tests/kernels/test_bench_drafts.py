"""The bench of drafts: cases, bytes, comparison with the torch twin, records and their ratio with steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels.bench import run_cases
from quantlab.kernels.bench_cases import expand, launch_bytes, traffic
from quantlab.kernels.bench_draft_compare import DraftComparer
from quantlab.kernels.bench_pools import desynchronised_cursors, desynchronised_pool
from quantlab.kernels.bench_rounds import Rounds
from quantlab.kernels.bench_timing import GraphTimer
from quantlab.records import load_records
from quantlab.report.speed import speed_rows
from quantlab.schemes import drafts, steps
from quantlab.schemes.ledger import StateShape
from tests.kernels.bench_stand_ins import LARGE, SMALL, CountingTimer, case, run

FAMILIES = {"mamba2": SMALL, "gated_delta": SMALL, "kimi_delta": replace(SMALL, key_heads=4)}


def test_policies_with_a_window_verify_beside_steps_of_the_baseline():
    found = expand("gated_delta", SMALL, ["fp32@16", "fp16@1"], [2], {"fla": ["fp32@1"]}, [4, 8, 4])
    assert [(c.policy, c.drafts, c.implementation) for c in found] == [
        ("fp32@1", 0, "quantlab"),
        ("fp32@16", 4, "quantlab"),
        ("fp32@16", 8, "quantlab"),
        ("fp16@1", 0, "quantlab"),
        ("fp32@1", 0, "fla"),
    ]
    assert len({c.group for c in found}) == 1
    assert "drafts" not in found[0].point("x")
    assert found[1].point("x")["drafts"] == 4
    assert [c.rounds for c in found] == [1, 4, 2, 1, 1]
    assert case("fp32@16", drafts=6).rounds == 8
    with pytest.raises(InputError, match=r"^drafts 0: expected 1 to 64"):
        expand("mamba2", SMALL, ["fp32@16"], [2], {}, [0])


def test_bytes_of_a_verification_and_its_commit():
    found = traffic(case(batch=256, shape=LARGE, drafts=4))
    values = 64 * 64 * 128
    copy = values // 2 + values // 16 + 64 * 4  # codes, scales, one global scale a head
    record = 8 * 128 * 2 + 64 * 64 * 2 + 64 * 4
    assert found.read["read copy"] == pytest.approx(256 * copy)
    assert found.read["checkpoint"] == found.written["checkpoint"] == pytest.approx(256 * values * 4 / 4)
    # A window stands at 0, 4, 8 or 12 records; one round in four folds 16.
    assert found.read["buffer"] == pytest.approx(256 * record * (0 + 4 + 8 + 12 + 16) / 4)
    assert found.written["buffer"] == pytest.approx(256 * record * 4)
    assert found.tokens == 4 * traffic(case(batch=256, shape=LARGE)).tokens
    assert launch_bytes(case(drafts=4)) == {}


@pytest.mark.parametrize(("window", "count"), [(16, 4), (16, 6), (12, 8), (4, 1)])
def test_every_round_folds_as_many_rows(window, count):
    cursor, folded = desynchronised_cursors(24, window, count), []
    first = cursor.clone()
    rounds = case(f"fp32@{window}", drafts=count).rounds
    for _ in range(rounds):
        folded.append(int((cursor + count >= window).sum()))
        cursor = (cursor + count) % window
    assert torch.equal(cursor, first)
    assert max(folded) - min(folded) <= 24 // rounds
    assert sum(folded) == 24 * rounds * count // window


def test_rounds_go_round():
    one = case("fp16/nvfp4@8:buffer=bf16", 6, "gated_delta", drafts=3)
    model = desynchronised_pool(one, 2, steps.load_states)
    counters = model.pools[0].counters
    before = counters.cursor.clone()
    for _ in range(one.rounds):
        Rounds(one, steps, drafts).run(model)
        assert all(bool(output.isfinite().all()) for output in model.outputs)
    assert torch.equal(counters.cursor, before)
    assert counters.store_numbers.tolist() == [1 + 3] * 6
    assert not counters.pending.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_passes_its_own_comparison(family):
    comparer = DraftComparer(steps, drafts, "cpu")
    for policy in ("fp32@16:buffer=bf16", "fp16+sr/nvfp4@8:buffer=bf16", "int8/fp8@4"):
        for batch in (1, 9):
            found = comparer.compare(case(policy, batch, family, FAMILIES[family], 3))
            assert found.passed, (policy, batch, found)
            assert set(found.measured) >= {
                "output",
                "checkpoint",
                "padding",
                "pending",
                "origin",
                "d records",
            }


def altered(**functions):
    names = ("verify_tokens", "end_verify", "begin_commit", "commit_tokens", "end_commit")
    return SimpleNamespace(**{name: getattr(drafts, name) for name in names} | functions)


def wrong_output(pool, tokens, plan, output):
    """Off by a unit of bfloat16."""
    return drafts.verify_tokens(pool, replace(tokens, q=tokens.q.float() * (1 + 2**-7)), plan, output)


def wrong_padding(pool, tokens, plan, output):
    drafts.verify_tokens(pool, tokens, plan, output)
    output[plan.slots < 0] = 0
    return output


def alone(pool, tokens, plan, output):
    """Every draft as if there were none before it."""
    drafts.verify_tokens(pool, tokens, plan, output)
    for t in range(1, tokens.v.shape[1]):
        other = replace(pool, **{n: getattr(pool, n).clone() for n in RINGS})
        one = tokens.map(lambda x, t=t: x[:, t : t + 1])
        drafts.verify_tokens(other, one, plan, output[:, t : t + 1])
    return output


def wrong_record(pool, tokens, plan, output):
    drafts.verify_tokens(pool, tokens, plan, output)
    pool.d_buffer.mul_(1.01)
    return output


def stores_at_once(pool, tokens, plan, output):
    drafts.verify_tokens(pool, tokens, plan, output)
    pool.checkpoint.mul_(1.5)
    return output


def wrong_copy(pool, plan):
    drafts.commit_tokens(pool, plan)
    rows = plan.flush_rows[: int(plan.flush_count)].long()
    pool.copy_codes[plan.slots[rows].long(), 0, 0, 0] ^= 1


def folds_nothing(pool, plan):
    pass


def never_ends(plan):
    pass


RINGS = ("k_buffer", "d_buffer", "v_buffer", "beta_buffer", "log_decay_buffer")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"verify_tokens": wrong_output}, "output"),
        ({"verify_tokens": wrong_padding}, "padding"),
        ({"verify_tokens": alone}, "output"),
        ({"verify_tokens": wrong_record}, "d records"),
        ({"verify_tokens": stores_at_once}, "untouched"),
        ({"commit_tokens": wrong_copy}, "read copy"),
        ({"commit_tokens": folds_nothing}, "checkpoint"),
        ({"end_commit": never_ends}, "cursor"),
        ({"end_verify": lambda plan, drafted: None}, "pending"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_kernel_has_no_speed(change, part, tmp_path):
    timer = CountingTimer()
    one = case("fp16+sr/nvfp4@16:buffer=bf16", 8, "gated_delta", StateShape(2, 32, 128, 1), drafts=4)
    (record,) = run([one], drafts=altered(**change), timer=timer, folder=tmp_path)
    assert record["status"] == "comparison_failed", record["message"]
    assert record["message"].startswith(part)
    assert "us" not in record["metrics"]
    assert timer.measured == 0
    assert load_records(tmp_path) == [record]


def test_a_record_and_its_ratio(tmp_path):
    cases = expand("gated_delta", SMALL, ["fp32/nvfp4@8"], [3], {}, [2])
    step, verify = run(cases, folder=tmp_path)
    assert (step["status"], verify["status"]) == ("ok", "ok")
    assert verify["point"]["drafts"] == 2
    metrics = verify["metrics"]
    assert metrics["groups"] * metrics["steps"] == 4
    assert metrics["us"] == pytest.approx(2.0 / (4 * metrics["layers"]))
    assert metrics["bytes"] == pytest.approx(traffic(cases[1]).bytes)
    assert metrics["comparison"]["error_over_limit"]["d records"] <= 1
    rows = list(speed_rows(load_records(tmp_path)))
    (row,) = (row for row in rows if row["drafts"])
    assert row["against_baseline"] == pytest.approx(2 * step["metrics"]["us"] / metrics["us"])
    timed = []
    run(cases, folder=tmp_path, show=lambda record, now: timed.append(now))
    assert timed == [False, False]


def test_a_policy_under_which_nothing_verifies_says_why():
    refusing = altered(served=lambda policy, family, shape: f"no kernel for {policy}")
    (record,) = run([case("fp32@4", drafts=2)], drafts=refusing)
    assert (record["status"], record["message"]) == ("not_served", "no kernel for fp32@4")


@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_times_drafts_that_pass(implementation, family, tmp_path):
    shape = StateShape(8, 128, 128, 8)
    one = case("fp32/nvfp4@16:buffer=bf16", 20, family, shape, drafts=4)
    options = {"environment": {}, "folder": tmp_path, "bandwidth": 4e6}
    (record,) = run_cases([one], GraphTimer(seconds=0.01), **options)
    assert record["status"] == "ok", record["message"]
    assert record["metrics"]["us"] > 0
    assert set(record["metrics"]["launches"]) >= {"read", "window", "flush"}
