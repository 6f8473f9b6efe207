"""Streams in blocks and runs that keep no step: the same numbers as in memory, flat memory, no half-written file."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from quantlab.drift import (
    block_stream,
    load_stream,
    measure,
    run_drift,
    run_long,
    save_stream,
    synthetic_stream,
)
from quantlab.drift.long import share_policies
from quantlab.drift.point import run_points
from quantlab.drift.shadow import ExactState
from quantlab.drift.sources import FileSource, as_source
from quantlab.drift.sums import BinnedSums, LostAt
from quantlab.errors import InputError
from quantlab.recurrences import RECURRENCES, StepInputs, expand_groups
from quantlab.schemes import parse_policy, start

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"heads": 4, "sequences": 2, "steps": 300, "value_dim": 8, "key_dim": 16, "key_heads": 2, "seed": 5}
CASES = [
    *(
        pytest.param(f, {"preset": "realistic"}, marks=[] if f == "kimi_delta" else pytest.mark.slow)
        for f in sorted(RECURRENCES)
    ),
    *(pytest.param(family, {"alpha": 0.97}, marks=pytest.mark.slow) for family in sorted(RECURRENCES)),
    ("gated_delta", {"preset": "near", "alpha": 0.97}),
    pytest.param("kimi_delta", {"preset": "near", "alpha": 0.97}, marks=pytest.mark.slow),
    pytest.param("gated_delta", {"alpha": 0.97, "negative_eigenvalues": True}, marks=pytest.mark.slow),
]
SHORT = SHAPE | {"steps": 70}
# Errors of every kind: small, large, never read back, stochastic, without a prediction.
POLICIES = ["fp32/nvfp4@16", "nvfp4@1", "fp32/nvfp4@512", "fp16+sr@3", "fp64@16"]


def joined(source, length):
    blocks = list(source.blocks(length))
    assert all(block.steps == length for block in blocks[:-1])
    per_token = [name for name in blocks[0].tensors() if name not in ("initial", "rates")]
    return {name: torch.cat([getattr(block, name) for block in blocks]) for name in per_token}


@pytest.mark.parametrize(("family", "options"), CASES)
def test_blocks_change_no_value(family, options):
    source = block_stream(family, **SHAPE | options)
    whole = joined(source, 10**6)
    assert len(whole["v"]) == SHAPE["steps"]
    digest = source.hash
    for length in (1, 7, 64, 256, 299):
        found = joined(source, length)
        assert all(torch.equal(found[name], value) for name, value in whole.items())
        assert source.hash == digest
    longer = joined(block_stream(family, **SHAPE | options | {"steps": 520}), 64)
    assert all(torch.equal(longer[name][: SHAPE["steps"]], value) for name, value in whole.items())
    # A stream that has other values has another hash: in the last step as in the first.
    assert block_stream(family, **SHAPE | options | {"seed": 6}).hash != digest
    assert block_stream(family, **SHAPE | options | {"steps": 299}).hash != digest


def test_made_blocks_have_the_law_of_a_whole_stream():
    """Per head of preset realistic: 1 - alpha in its range, 5 % sinks, and no step with the randomness of another."""
    source = block_stream("mamba2", heads=4, sequences=1, steps=2048, value_dim=4, key_dim=8, seed=1)
    arrays = joined(source, 64)
    rows = arrays["k"].flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)
    log_decay = arrays["log_decay"][:, 0].double()
    # log(1 - forget) is the mean log decay: a gate's relative spread is about 2 with its sinks, so the mean of 2048
    # of them is good to 2 / sqrt(2048) = 4.4 %; 1 - alpha lies in [1e-4, 0.5].
    assert bool((-log_decay.mean(0) > 0.8e-4).all())
    assert bool((-log_decay.mean(0) < 0.8).all())
    # A sink multiplies the gate by 10: its share of large steps, counted in a head, 5 % +- 3 x 0.5 %.
    typical = log_decay.median(0).values
    assert 0.02 < float((log_decay < 8 * typical).double().mean()) < 0.2


@pytest.mark.parametrize(
    "family",
    [
        f if f in ("kimi_delta", "mamba1") else pytest.param(f, marks=pytest.mark.slow)
        for f in sorted(RECURRENCES)
    ],
)
def test_a_long_run_is_the_run_in_memory_to_the_last_bit(family, tmp_path):
    source = block_stream(family, **SHORT)
    policies = [parse_policy(text) for text in POLICIES]
    kept = run_drift(source, policies, seed=3)
    series = {policy: tmp_path / f"{i}.parquet" for i, policy in enumerate(policies)}
    found = run_long(source, policies, series=series, seed=3)
    assert found.stream_hash == kept.stream_hash
    statuses = [run.status for run in kept.runs]
    assert "not_exercised" in statuses
    for run, other in zip(kept.runs, found.runs, strict=True):
        np.testing.assert_equal(found.metrics(other), kept.metrics(run))
        np.testing.assert_equal(other.curve(), kept.curve(run))
        assert other.status == run.status
        table = kept.policy_table(run).drop(columns="policy")
        pd.testing.assert_frame_equal(pd.read_parquet(series[run.policy]), table, check_exact=True)
    assert len(list(tmp_path.iterdir())) == len(policies)


@pytest.fixture(scope="module")
def growing():
    """A stream whose state leaves float16 behind, and two policies on it in blocks of the usual length."""
    stream = synthetic_stream("mamba2", **SHAPE | {"alpha": 0.9, "steps": 400, "heads": 1, "key_heads": 1})
    # Growth by 3 % a step leaves float16 behind after some 350 steps.
    source = dataclasses.replace(stream, log_decay=torch.full_like(stream.log_decay, 0.03))
    policies = ["fp16@1", "nvfp4@3"]
    return source, policies, run_drift(source, policies)


@pytest.mark.parametrize("length", [1, 7, 16, 1000])
def test_the_length_of_blocks_changes_no_number(length, growing, monkeypatch):
    source, policies, expected = growing
    assert [run.status for run in expected.runs] == ["diverged", "ok"]
    assert expected.runs[0].diverged_at > 100
    monkeypatch.setattr(measure, "BLOCK", length)
    found = run_drift(source, policies)
    for run, other in zip(expected.runs, found.runs, strict=True):
        np.testing.assert_equal(found.metrics(other), expected.metrics(run))
        np.testing.assert_equal(found.curve(other), expected.curve(run))
        np.testing.assert_array_equal(other.output_error, run.output_error)


@pytest.mark.slow
def test_processes_change_no_number():
    source = block_stream("gated_delta", **SHORT | {"alpha": 0.97})
    seen = []
    one = run_long(source, POLICIES, seed=1)
    two = run_long(source, POLICIES, seed=1, processes=2, on_step=seen.append)
    assert [run.policy for run in two.runs] == [parse_policy(text) for text in POLICIES]
    for run, other in zip(one.runs, two.runs, strict=True):
        np.testing.assert_equal(two.metrics(other), one.metrics(run))


@pytest.mark.slow
def test_an_error_in_a_process_is_the_error_of_the_run(tmp_path):
    stream = synthetic_stream("mamba2", **SHAPE | {"alpha": 0.9})
    source = as_source(stream)
    policies = [parse_policy(text) for text in ("fp32@1", "bf16@1")]
    series = {policy: tmp_path / "missing" / f"{policy.window}" for policy in policies}
    with pytest.raises(OSError, match="missing"):
        run_long(source, policies, series=series, processes=2)
    with pytest.raises(InputError, match="delta rule only"):
        run_long(source, ["fp32/nvfp4@4:key_read=checkpoint"])
    for processes in (0, True, 1.5):
        with pytest.raises(InputError, match="processes"):
            run_long(source, policies, processes=processes)


def test_shares_hold_every_policy_once_and_about_the_same_cost():
    names = "fp32@1 bf16@1 fp16+sr@1 int8@16 nvfp4@16 fp8/nvfp4@16 fp16+sr/nvfp4@16 fp32/nvfp4@16".split()
    policies = [parse_policy(name) for name in names]
    for processes in (1, 2, 3, 20):
        shares = share_policies(policies, processes)
        assert sorted(map(str, (p for share in shares for p in share))) == sorted(map(str, policies))
        assert len(shares) == min(processes, len(policies))
        assert all(shares)
    first, second = share_policies(policies, 2)
    dear = first if policies[2] in first else second
    assert len(dear) < len(policies) / 2  # the one that draws a word for every element in every step


def test_a_file_is_read_in_parts(tmp_path):
    path = tmp_path / "stream.safetensors"
    for family in sorted(RECURRENCES):
        stream = synthetic_stream(family, **SHORT | {"preset": "realistic"})
        save_stream(stream, path)
        source = FileSource(path)
        assert source.hash == stream.hash == load_stream(path).hash
        for length in (1, 64, 70):
            found = joined(source, length)
            assert all(torch.equal(found[name], getattr(stream, name)) for name in found)
        kept, found = run_drift(stream, ["nvfp4@4"]), run_long(source, ["nvfp4@4"], processes=1)
        np.testing.assert_equal(found.metrics(found.runs[0]), kept.metrics(kept.runs[0]))
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(8))
    with pytest.raises(InputError, match="the file was changed"):
        FileSource(path)
    (tmp_path / "broken").write_bytes(b"not a stream")
    with pytest.raises(InputError, match="broken"):
        FileSource(tmp_path / "broken")


@pytest.mark.parametrize("family", sorted(RECURRENCES))
def test_the_shadow_is_the_recurrence(family):
    """Updated in place, with one product for both reads: other last bits, nothing else."""
    stream = synthetic_stream(family, **SHAPE | {"preset": "realistic", "steps": 200})
    exact = ExactState(family, stream.initial, stream.rates)
    initial = stream.initial.double()
    state, rates = initial, None if stream.rates is None else stream.rates.double()
    for t in range(stream.steps):
        inputs = stream.step(t).to(torch.float64)
        state, output = RECURRENCES[family].step(state, inputs, rates)
        found = exact.step(inputs)
        # 16 terms a sum and a state that forgets: some 100 ulps of 1e-16 at most.
        assert float((found - output).norm()) <= 1e-13 * float(state.norm())
    assert float((exact.state - state).norm()) <= 1e-13 * float(state.norm())
    assert torch.equal(stream.initial.double(), initial)


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta"])
@pytest.mark.parametrize("make", [synthetic_stream, block_stream])
def test_near_values_are_what_the_state_holds(family, make):
    source = as_source(make(family, preset="near", alpha=0.99, **SHAPE))
    state = source.initial.double()
    assert float(state.norm()) > 1
    ratios = []
    for block in source.blocks():
        for t in range(block.steps):
            inputs = block.step(t).to(torch.float64)
            held = torch.matmul(state, expand_groups(inputs.k, 4, 1)[..., None])[..., 0]
            ratios.append(inputs.v / held)
            state, _ = RECURRENCES[family].step(state, inputs)
    ratio = torch.cat(ratios).flatten()
    # The prefill state was rounded to float32 once, 1e-7 of a state in values 1e-3 of it; hence the robust spread.
    low, middle, high = ratio.quantile(torch.tensor([0.1587, 0.5, 0.8413], dtype=torch.float64)).tolist()
    assert middle == pytest.approx(1.0, abs=4 * 0.01 / len(ratio) ** 0.5 * 1.25)
    assert (high - low) / 2 == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("make", [synthetic_stream, block_stream])
def test_negative_eigenvalues_double_beta(make):
    for options in ({"alpha": 0.97}, {"preset": "realistic"}, {"preset": "near", "alpha": 0.99}):
        one = joined(as_source(make("gated_delta", **SHAPE | options)), 64)
        two = joined(as_source(make("gated_delta", **SHAPE | options, negative_eigenvalues=True)), 64)
        assert torch.equal(two["beta"], 2 * one["beta"])
        assert torch.equal(two["k"], one["k"])


@pytest.mark.parametrize("make", [synthetic_stream, block_stream])
@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("mamba2", {"preset": "near", "alpha": 0.99}, "no delta rule"),
        ("gated_delta", {"preset": "near", "alpha": 0.9, "steps": 500}, "steps 500: expected at most 379"),
        ("mamba2", {"negative_eigenvalues": True}, "no delta rule"),
        ("gated_delta", {"negative_eigenvalues": True, "alpha": 0.9, "beta": 1.0}, "a beta up to 2"),
        ("gated_delta", {"heads": 10**12}, "GiB"),
    ],
)
def test_streams_that_cannot_be_made(make, family, options, says):
    with pytest.raises(InputError, match=says):
        make(family, **{"steps": 4, "heads": 1} | options)


def test_sums_in_any_blocks_are_sums_in_one():
    rng = np.random.default_rng(2)
    error = rng.lognormal(0, 6, (200, 3))
    error[rng.random((200, 3)) < 0.1] = np.nan
    bounds = np.array([3, 4, 50, 180])
    whole = BinnedSums(bounds, 3)
    whole.add(1, error, np.ones((200, 3)))
    for length in (1, 2, 13, 100):
        parts = BinnedSums(bounds, 3)
        for first in range(0, 200, length):
            parts.add(
                first + 1, error[first : first + length], np.ones((len(error[first : first + length]), 3))
            )
        assert np.array_equal(parts.error, whole.error)
        assert np.array_equal(parts.reference, whole.reference)
        assert np.array_equal(parts.count, whole.count)
    assert whole.error.sum() == pytest.approx(np.nansum(error[2:179]), rel=1e-13)
    assert whole.count.sum() == np.isfinite(error[2:179]).sum()


@pytest.mark.parametrize("lost", [None, 0, 15, 16, 100, 191, 192, 199])
def test_a_run_is_lost_in_the_same_span_whatever_the_blocks(lost):
    error, reference = np.full((200, 2), 50.0), np.ones((200, 2))
    if lost is not None:
        error[lost:] = 1e6
    found = set()
    for length in (1, 5, 16, 64, 200):
        watch = LostAt()
        for first in range(0, 200, length):
            watch.add(error[first : first + length], reference[first : first + length])
        found.add(watch.step)
    # Only whole spans of 16 count: the last 8 steps of 200 are none.
    assert found == {None if lost is None or lost >= 192 else lost // 16 * 16 + 1}


def test_turns_and_chunks_are_what_the_state_does_with_them():
    """Against a literal run: a flush every 10 tokens, and 7 tokens at a time, the last chunk shorter."""
    stream = synthetic_stream("gated_delta", **SHORT | {"alpha": 0.97})
    policy = "bf16/nvfp4@16"
    exact, state = stream.initial.double(), start(policy, "gated_delta", stream.initial, key_heads=2)
    chunks = start(policy, "gated_delta", stream.initial, key_heads=2)
    wanted, outputs, chunked = [], [], []
    for t in range(stream.steps):
        exact, output = RECURRENCES["gated_delta"].step(exact, stream.step(t).to(torch.float64))
        wanted.append(output)
        outputs.append(state.step(stream.step(t)))
        if (t + 1) % 10 == 0:
            state.flush()
    for first in range(0, stream.steps, 7):
        parts = {
            n: v[first : first + 7].transpose(0, 1) for n, v in stream.tensors().items() if n != "initial"
        }
        chunked.append(chunks.extend(StepInputs(**parts)))
    turned, in_chunks = (run_drift(stream, [policy], turn=10), run_drift(stream, [policy], chunk=7))
    for result, found in ((turned, torch.stack(outputs)), (in_chunks, torch.cat(chunked, 1).transpose(0, 1))):
        error = (found.double() - torch.stack(wanted)).square().sum(-1).flatten(1).numpy()
        np.testing.assert_allclose(result.runs[0].output_error, error, rtol=1e-6)
        metrics = result.metrics(result.runs[0])
        assert np.isnan(metrics["predicted_output_error"])
        assert "turns or chunks" in metrics["prediction_note"]
    # 7 flushes of turns (none is left at 70 of 10 within 16), 10 chunks; the last store is read by nobody.
    assert turned.runs[0].exercised["checkpoint"] == 7
    assert in_chunks.runs[0].exercised["checkpoint"] == 10
    one = run_drift(stream, [policy], chunk=1)
    assert one.runs[0].exercised["checkpoint"] == stream.steps


@pytest.mark.parametrize("options", [{"turn": 10}, {"chunk": 7}, {"chunk": 200}])
def test_long_runs_have_turns_and_chunks_too(options, monkeypatch):
    source = block_stream("mamba2", **SHORT)
    kept = run_drift(source, ["fp16+sr@16", "nvfp4@16:schedule=turn"], **options)
    found = run_long(source, ["fp16+sr@16", "nvfp4@16:schedule=turn"], **options)
    for run, other in zip(kept.runs, found.runs, strict=True):
        np.testing.assert_equal(found.metrics(other), kept.metrics(run))


def test_turns_and_chunks_that_cannot_be():
    stream = synthetic_stream("mamba2", **SHORT)
    for options, says in (
        ({"turn": 0}, "turn 0"),
        ({"chunk": -1}, "chunk -1"),
        ({"turn": 4, "chunk": 4}, "not both"),
    ):
        with pytest.raises(InputError, match=says):
            run_drift(stream, ["fp32@1"], **options)


def test_points_may_name_a_stream_in_blocks():
    stream = {"generator": "blocks", "family": "mamba2", "alpha": 0.97, **SHORT}
    point = {"kind": "drift", "stream": stream, "policy": "nvfp4@4"}
    ((_, record),) = run_points([point], threads=1, on_progress=lambda *_: None)
    expected = run_long(block_stream("mamba2", alpha=0.97, **SHORT), ["nvfp4@4"])
    np.testing.assert_equal(record["metrics"], expected.metrics(expected.runs[0]))


MEMORY = """
import resource, sys, torch
from quantlab.drift import block_stream, run_long
torch.set_num_threads(1)
source = block_stream("mamba2", alpha=0.99, heads=16, sequences=1, value_dim=1, key_dim=256, steps=int(sys.argv[1]))
run_long(source, ["fp32@1", "nvfp4@16"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps():
    def peak(steps):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(steps)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        return int(done.stdout)

    short, long, units = 1024, 4096, 16
    more = long - short
    stream = more * units * (2 * 256 + 2) * 4
    # What may grow: the scratch file's pages (7 statistics) and one policy's prediction with what it takes to make it
    # (2 results, 5 intermediates), 8 bytes a unit each; the allocators' own rounding, 8 MiB.
    allowed = more * units * 8 * 14 + 8 * 2**20
    assert stream > 5 * allowed  # so that a run that keeps its stream fails
    assert peak(long) - peak(short) < allowed


def drift(folder, *arguments):
    command = [sys.executable, "-m", "quantlab.cli", "drift", "--family", "mamba2", "--heads", "1"]
    command += ["--value-dim", "8", "--key-dim", "16", "--alpha", "0.99", "--sequences", "1", "--json"]
    command += ["-p", "fp32@1", "-p", "nvfp4@16", "--output", str(folder), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def visible(folder):
    return [path for path in folder.glob("records/*") if not path.name.startswith(".")]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_no_partial_output_and_runs_again(workers, tmp_path):
    from quantlab.records import load_records

    killed = drift(tmp_path, "--steps", 200_000, "--workers", workers)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("records/.*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert visible(tmp_path) == []
    again = drift(tmp_path, "--steps", 100, "--workers", workers)
    stdout, stderr = again.communicate()
    assert again.returncode == 0, stderr
    assert {path.suffix for path in visible(tmp_path)} == {".json", ".parquet"}
    assert len(visible(tmp_path)) == 4
    rows = [json.loads(line) for line in stdout.splitlines()]
    expected = run_long(
        block_stream("mamba2", alpha=0.99, heads=1, sequences=1, value_dim=8, key_dim=16, steps=100),
        ["fp32@1", "nvfp4@16"],
    )
    for row, run in zip(rows, expected.runs, strict=True):
        assert row["output_error"] == expected.metrics(run)["output_error"]
    for record in load_records(tmp_path / "records"):
        table = pd.read_parquet(tmp_path / "records" / record["series"])
        assert table.step.max() == 100
    # Workers of the killed run notice that nobody listens, and put their files away.
    while list(tmp_path.glob("records/.*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("records/.*")) == []


@pytest.mark.slow
def test_the_same_command_goes_on_where_records_are_missing(tmp_path):
    first, _ = drift(tmp_path, "--steps", 40).communicate()
    written = {path: path.stat().st_mtime_ns for path in visible(tmp_path)}
    second, _ = drift(tmp_path, "--steps", 40, "-p", "bf16@1").communicate()
    assert second.splitlines()[:2] == first.splitlines()
    assert len(second.splitlines()) == 3
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert len(visible(tmp_path)) == 6


def test_a_stream_that_a_source_refuses_names_the_array(tmp_path):
    stream = synthetic_stream("mamba2", **SHAPE | {"alpha": 0.9})
    with pytest.raises(InputError, match="stream v"):
        dataclasses.replace(stream, v=stream.v * torch.nan)
