"""Runs of the bench: records, what a killed run goes on from, ratios, single kernels; on a GPU, real times."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from quantlab.kernels import bench, bench_timing
from quantlab.kernels.bench_cases import expand, launch_bytes
from quantlab.records import load_records
from quantlab.report.speed import speed_rows
from tests.kernels.bench_stand_ins import LARGE, SMALL, CountingTimer, case, run


def fake_launches(*names):
    """As if a token's work had launched kernels of these names."""

    def recorded(work):
        work()
        return [(name, lambda: None) for name in names]

    return recorded


def test_a_record_says_what_was_measured(tmp_path, monkeypatch):
    launched = fake_launches(
        "window_kernel", "read_copy_kernel", "fold_kernel", "fold_kernel", "other_kernel"
    )
    monkeypatch.setattr(bench_timing, "recorded_launches", launched)
    (record,) = run([case(batch=4)], folder=tmp_path)
    metrics = record["metrics"]
    assert record["status"] == "ok"
    visits = metrics["groups"] * metrics["layers"] * metrics["steps"]
    assert metrics["us"] == pytest.approx(2.0 / visits)
    assert metrics["us_lower"] < metrics["us"] < metrics["us_upper"]
    assert metrics["control_us"] == pytest.approx(2.0 / 16)
    assert metrics["control_share"] == pytest.approx(
        metrics["control_us"] / (metrics["layers"] * metrics["us"])
    )
    assert metrics["of_copy"] == pytest.approx(metrics["bytes"] / metrics["us"] / 4.0)
    assert metrics["kernels"] == ["window_kernel", "read_copy_kernel", "fold_kernel", "other_kernel"]
    assert metrics["launches"]["read"]["bytes"] == pytest.approx(launch_bytes(case(batch=4))["read"])
    assert metrics["launches"]["read"]["us"] == pytest.approx(2.0 / metrics["layers"] / metrics["groups"])
    assert metrics["launches"]["flush"]["kernels"] == ["fold_kernel"]
    assert metrics["launches"]["flush"]["us"] == metrics["launches"]["read"]["us"]  # two launches, one part
    assert set(metrics["launches"]["other_kernel"]) == {"kernels", "us", "us_lower", "us_upper"}
    assert metrics["comparison"]["error_over_limit"]["output"] <= 1
    assert record["point"]["device"] == "a made-up device"
    assert load_records(tmp_path) == [record]


def test_a_killed_run_goes_on_and_a_group_is_of_one_run(tmp_path):
    cases = expand("mamba2", SMALL, ["fp32@4", "fp32@1"], [2, 3], {})
    assert [(c.policy, c.batch) for c in cases] == [
        ("fp32@1", 2),
        ("fp32@4", 2),
        ("fp32@1", 3),
        ("fp32@4", 3),
    ]
    run(cases[:3], folder=tmp_path)  # as if it had been killed before the last
    timed = []
    records = run(cases, folder=tmp_path, show=lambda record, now: timed.append(now))
    assert timed == [False, False, True, True]
    assert len({r["metrics"]["run"] for r in records[2:]}) == 1
    assert records[0]["metrics"]["run"] != records[2]["metrics"]["run"]
    timed.clear()
    run(cases, folder=tmp_path, show=lambda record, now: timed.append(now))
    assert timed == [False] * 4
    timed.clear()
    run(cases, folder=tmp_path, again=True, show=lambda record, now: timed.append(now))
    assert timed == [True] * 4


def test_nothing_is_measured_when_everything_is_there(tmp_path):
    run([case("fp32@1")], folder=tmp_path)
    timer = CountingTimer()
    run([case("fp32@1")], folder=tmp_path, timer=timer, bandwidth=None)
    assert timer.measured == 0


def test_ratios_are_of_one_run():
    def record(us, run="a", implementation="quantlab", policy="fp32@1", batch=8, bits=32):
        point = replace(case("fp32@1", batch), policy=policy, implementation=implementation).point("x")
        metrics = {"run": run, "checkpoint_bits": bits} | ({"us": us} if us else {})
        return {"point": point, "metrics": metrics, "status": "ok" if us else "failed", "message": None}

    records = [
        record(40.0),
        record(10.0, policy="fp32/nvfp4@16"),
        record(44.0, implementation="vllm"),
        record(30.0, implementation="replayssm", policy="fp32@16"),
        record(1.0, implementation="vllm", run="b"),
        record(2.0, implementation="vllm", batch=16),
        record(None, implementation="fla"),
        record(20.0, implementation="vllm", policy="fp16@1", bits=16),
        record(8.0, policy="fp16/nvfp4@16", bits=16),
    ]
    rows = list(speed_rows(records))
    against = [row["against_baseline"] for row in rows[:4]]
    assert against == pytest.approx([1, 4, 40 / 44, 40 / 30])
    assert [row["against_peer"] for row in rows[:4]] == [0.75, 3, None, None]
    assert (rows[1]["peer"], rows[1]["peer_policy"]) == ("replayssm", "fp32@16")
    assert rows[4]["against_baseline"] is None
    assert rows[6]["us"] is None
    assert rows[6]["against_peer"] is None
    # A 16-bit state is a rival of a 16-bit checkpoint, and of no 32-bit one.
    assert (rows[8]["peer_policy"], rows[8]["against_peer"]) == ("fp16@1", 2.5)


def test_no_group_begins_after_the_deadline(tmp_path):
    cases = expand("mamba2", SMALL, ["fp32@1"], [2, 3], {})
    assert run(cases, folder=tmp_path, deadline=0.0) == []
    run(cases[:1], folder=tmp_path)
    assert len(run(cases, folder=tmp_path, deadline=0.0)) == 1  # what has a record needs no time


def test_single_kernels_are_timed_where_they_are_wanted():
    cases = expand("mamba2", SMALL, ["fp32@1"], [2, 3], {})
    records = run(cases, single_kernels=lambda c: c.batch == 3)
    assert ["launches" in record["metrics"] for record in records] == [False, True]


def test_launches_are_recorded_and_repeated(monkeypatch):
    calls = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *given, **options: calls.append((given, options)))

    def some_kernel(x):
        pass

    kernel = SimpleNamespace(fn=some_kernel)
    before = JITFunction.run

    def work():
        JITFunction.run(kernel, 1, grid=(2,), warmup=False)
        JITFunction.run(kernel, 3, grid=(2,), warmup=True)

    ((name, again),) = bench_timing.recorded_launches(work)
    assert name == "some_kernel"
    assert JITFunction.run is before
    again()
    assert calls == [((n,), {"grid": (2,), "warmup": w}) for n, w in ((1, False), (3, True), (1, False))]


def test_names_say_parts():
    names = {
        "step_kernel": "step",
        "window_kernel": "window",
        "read_copy_kernel": "read",
        "flush_kernel": "flush",
        "window_fold_kernel": "flush",
        "encode_kernel": "encode",
        "another_kernel": "another_kernel",
    }
    assert {name: bench.part_of(name) for name in names} == names


@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
def test_cuda_graphs_are_replayed(implementation):
    timer = bench_timing.GraphTimer(seconds=0.01)
    assert bench_timing.copy_bandwidth(timer, 2**26) > 0
    x = torch.ones(1 << 20, device=timer.device)
    found = timer.measure(lambda: x.add_(1))
    assert found.count >= bench_timing.FEWEST
    assert 0 < found.lower <= found.median <= found.upper


@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
@pytest.mark.parametrize("policy", ["fp32@1", "fp32@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16"])
def test_cuda_times_a_step_that_passes(implementation, policy, tmp_path):
    timer = bench_timing.GraphTimer(seconds=0.01)
    one = case(policy, 20, shape=LARGE)
    (record,) = bench.run_cases([one], timer, environment={}, folder=tmp_path, bandwidth=4e6)
    assert record["status"] == "ok", record["message"]
    metrics = record["metrics"]
    assert metrics["us"] > 0
    assert metrics["kernels"]
    assert set(metrics["launches"]) >= {"step" if policy == "fp32@1" else "read"}
    assert 0 < metrics["control_share"] < 1
