"""What a case of the bench moves and how its pools stand: bytes against counts by hand, cursors, shapes."""

import math
from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels import bench
from quantlab.kernels.bench_cases import expand, launch_bytes, parse_shape, traffic
from quantlab.kernels.bench_pools import desynchronised_cursors, desynchronised_pool
from quantlab.kernels.bench_timing import quartiles
from quantlab.schemes import steps
from tests.kernels.bench_stand_ins import LARGE, SMALL, case


def test_bytes_of_a_rewritten_state():
    found = traffic(case("fp32@1", 256, shape=LARGE))
    state = 256 * 64 * 64 * 128 * 4
    assert found.read == {"checkpoint": state}
    assert found.written == {"checkpoint": state}
    # q, k and v in, the output out, in bfloat16; one float32 log decay a head.
    assert found.tokens == 256 * (2 * 8 * 128 * 2 + 64 * 64 * 2 + 64 * 4 + 64 * 64 * 2)


def test_bytes_of_a_dual_checkpoint():
    found = traffic(case(batch=256, shape=LARGE))
    values = 64 * 64 * 128
    copy = values // 2 + values // 16 + 64 * 4  # codes, scales, one global scale a head
    record = 8 * 128 * 2 + 64 * 64 * 2 + 64 * 4
    assert found.read["read copy"] == pytest.approx(256 * copy * 15 / 16)
    assert found.read["checkpoint"] == pytest.approx(256 * values * 4 / 16)
    # 0 to 14 records before the tokens that read, 15 before the one that folds.
    assert found.read["buffer"] == pytest.approx(256 * record * (sum(range(15)) + 15) / 16)
    assert found.written["buffer"] == pytest.approx(256 * record * 15 / 16)
    assert found.bytes == pytest.approx(sum(found.read.values()) + sum(found.written.values()))


@pytest.mark.parametrize(
    ("policy", "microseconds"), [("fp32", 17), ("fp16", 10), ("fp8", 6)], ids=["fp32", "fp16", "fp8"]
)
def test_the_floors_that_were_measured_against(policy, microseconds):
    # The floors of issue 5's kernels at a copy of 4.28 TB/s: a read of every row 105 MB (25 us), a flush of 1 in 16.
    copy = 4.28e6
    found = launch_bytes(case(f"{policy}/nvfp4@16:buffer=bf16", 256, shape=LARGE))
    every_row = (found["read"] + found["window"]) * 16 / 15
    assert every_row / 1e6 == pytest.approx(105, rel=0.03)
    assert every_row / copy == pytest.approx(25, abs=1)
    assert found["flush"] / copy == pytest.approx(microseconds, abs=0.5)


def test_launches_are_those_that_the_policy_has():
    assert set(launch_bytes(case("fp16@1"))) == {"step"}
    assert set(launch_bytes(case("fp32@16:buffer=bf16"))) == {"window", "read", "flush"}
    assert set(launch_bytes(case())) == {"window", "read", "flush"}
    assert set(launch_bytes(case(), window=False, encode=True)) == {"read", "flush", "encode"}
    assert set(launch_bytes(case("fp32@16"), encode=True)) == {"window", "read", "flush"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba2", ""),
        ("mamba2", ":flush_read=copy"),
        ("gated_delta", ""),
        ("gated_delta", ":contents=derived"),
        ("gated_delta", ":flush_read=copy"),
        ("kimi_delta", ":key_read=checkpoint"),
    ],
)
def test_launches_together_are_the_ledger_and_the_tokens(family, options):
    shape = LARGE if family != "kimi_delta" else replace(LARGE, key_heads=64)
    one = case("fp32/nvfp4@16:buffer=bf16" + options, 256, family, shape)
    whole = traffic(one)
    # Read and window share the queries, keys and gates of a token; an encode reads what the flush has just stored.
    gates = 4 * 64 * (128 if family == "kimi_delta" else 1)
    strengths = 0 if family == "mamba2" else 4 * 64
    shared = 256 * 15 / 16 * (shape.key_heads * 128 * 2 + gates + strengths)
    stored = 256 / 16 * 64 * 64 * 128 * 4
    for window, encode in ((True, False), (True, True), (False, False), (False, True)):
        again = window * shared + encode * stored
        found = launch_bytes(one, window=window, encode=encode)
        assert sum(found.values()) == pytest.approx(whole.bytes + whole.tokens + again, rel=1e-6)


def test_launches_of_an_early_flush_are_not_told_apart():
    assert launch_bytes(case("fp32@16:flush=early")) == {}


@pytest.mark.parametrize(
    ("batch", "window"), [(1, 16), (3, 16), (8, 16), (24, 16), (256, 16), (100, 7), (5, 1)]
)
def test_every_step_flushes_as_many_rows(batch, window):
    cursor = desynchronised_cursors(batch, window)
    counts = torch.bincount(cursor, minlength=window)
    assert counts.sum() == batch
    assert counts.max() - counts.min() <= 1
    flushed = []
    for _ in range(window):
        flushed.append(int((cursor == window - 1).sum()))
        cursor = (cursor + 1) % window
    assert sum(flushed) == batch
    assert max(flushed) - min(flushed) <= 1


def test_a_pool_in_the_middle_of_decoding_goes_round():
    layers = desynchronised_pool(case(batch=20), 2, steps.load_states, seed=3)
    counters = layers.pools[0].counters
    assert sorted(layers.slots.tolist()) == list(range(20))
    assert layers.slots.tolist() != list(range(20))
    before = counters.cursor.clone()
    assert sorted(before.tolist()) == sorted(desynchronised_cursors(20, 16).tolist())
    for _ in range(16):
        plan = steps.begin_step(counters, layers.slots, 16)
        assert int(plan.flush_count) in (1, 2)
        for pool, inputs, output in zip(layers.pools, layers.inputs, layers.outputs, strict=True):
            steps.decode_token(pool, inputs, plan, output)
            assert bool(output.isfinite().all())
        steps.end_step(plan)
    assert torch.equal(counters.cursor, before)
    assert counters.store_numbers.tolist() == [2] * 20


@pytest.mark.parametrize("batch", [1, 8, 100, 1024])
@pytest.mark.parametrize("policy", ["fp32@1", "fp32/nvfp4@16:buffer=bf16", "fp32@12"])
def test_a_graph_has_every_phase_and_more_memory_than_the_cache(batch, policy):
    one = case(policy, batch, shape=LARGE)
    plan = bench.schedule(one, 50 * 2**20, 3e6, 140e9)
    assert plan.groups * plan.steps == one.parsed.window
    assert plan.layers >= bench.FEWEST_LAYERS
    moved = plan.groups * plan.layers * traffic(one).bytes
    assert moved >= bench.CACHES * 50 * 2**20 or plan.groups * plan.layers >= bench.MOST_LAYERS
    assert plan.groups * plan.layers * 3e6 * batch <= bench.MEMORY_SHARE * 140e9
    with pytest.raises(InputError, match="GiB a layer"):
        bench.schedule(one, 50 * 2**20, 3e6, 1e6)


@pytest.mark.parametrize(
    "text", ["64,64,128", "64;64;128;8", "64,64,128,7", "0,64,128,8", "a,b,c,d", "1,2,3,4,5"]
)
def test_shapes_that_are_none(text):
    with pytest.raises(InputError):
        parse_shape(text)


def test_shapes_and_cases():
    assert parse_shape("64, 64,128,8") == LARGE
    with pytest.raises(InputError, match="1 to 1024"):
        expand("mamba2", SMALL, ["fp32@1"], [0], {})
    with pytest.raises(InputError, match="contents="):
        expand("mamba2", SMALL, ["fp32@16:contents=raw"], [1], {})
    found = expand("mamba2", SMALL, ["fp32@1", "fp32@1"], [1], {"vllm": ["fp32@1"]})
    assert [c.implementation for c in found] == ["quantlab", "vllm"]
    assert len({c.group for c in found}) == 1


def test_quartiles():
    found = quartiles([float(n) for n in range(1, 12)])
    assert (found.lower, found.median, found.upper, found.count) == (3, 6, 9, 11)
    assert math.isclose(found.per(2).median, 3)
