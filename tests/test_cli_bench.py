"""``quantlab bench`` without a GPU: what it lists and refuses, and records, table and figures with a made-up clock."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.cli_bench import POLICIES
from quantlab.errors import InputError
from quantlab.kernels import bench_timing
from quantlab.kernels.bench_timing import Times
from quantlab.records import complete_record, load_records, record_path, save_record
from quantlab.report.speed import _styles, draw_speed, in_order, load_speed_records, speed_rows
from quantlab.schemes import drafts, steps


def bench(*arguments, status=0):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.stdout


def objects(*arguments, status=0):
    return [json.loads(line) for line in bench(*arguments, "--json", status=status).splitlines()]


# -- without a GPU
def test_a_dry_run_lists_bytes_and_the_wall():
    rows = objects("--dry-run", "--batch", 256, "--bandwidth", 4.28)
    assert [row["policy"] for row in rows] == [p.replace("fp8+", "fp8_e4m3+") for p in POLICIES]
    assert rows[0]["bytes"] == 2 * 4 * 64 * 64 * 128 * 256
    assert rows[0]["wall_us"] == pytest.approx(rows[0]["bytes"] / 4.28e6)
    # The wall of kernel_measurements: 43 and 36 us with inputs and outputs.
    for row, wall in ((rows[2], 43), (rows[3], 36)):
        assert (row["bytes"] + row["token_bytes"]) / 4.28e6 == pytest.approx(wall, rel=0.12)
    one = ("--dry-run", "--batch", 1, "-p", "fp32/nvfp4@16:buffer=bf16")
    assert [row["policy"] for row in objects(*one, "--choose")] == ["fp32@1", one[-1]]
    assert [row["policy"] for row in objects(*one)] == [one[-1]]
    output = bench("--dry-run", "--batch", 8, "--peer", "replayssm", "--peer", "vllm")
    assert "us at 4.2 TB/s" in output
    assert output.count("replayssm") == output.count("vllm") == 2


def test_a_dry_run_says_what_no_kernel_serves():
    given = "--dry-run", "--shape", "4,20,32,2", "-p", "nvfp4@16", "-p", "fp32@1", "--batch", 1, "--batch", 2
    lines = [line for line in bench(*given).splitlines() if "not served" in line]
    assert len(lines) == 2
    assert lines[0].startswith("fp32@1 at 4,20,32,2, not served by kernels: a value dim")
    assert {row["not_served"] is None for row in objects(*given)} == {False}
    assert {row["not_served"] for row in objects("--dry-run", "--peer", "vllm")} == {None}


def test_a_model_gives_the_shape():
    (row,) = objects("--dry-run", "--model", "kimi-linear-48b-a3b", "-p", "fp32@1", "--batch", 1)
    assert (row["family"], row["shape"]) == ("kimi_delta", "32,128,128,32")
    assert row["bytes"] == 2 * 4 * 32 * 128 * 128
    shapes = objects("--dry-run", "--shape", "4,8,32,2", "--shape", "8,8,32,2", "-p", "fp32@1", "--batch", 1)
    assert [row["shape"] for row in shapes] == ["4,8,32,2", "8,8,32,2"]


def test_drafts_are_listed_beside_steps_of_the_baseline():
    given = "--dry-run", "--family", "gated_delta", "-p", "fp32/nvfp4@16", "--batch", 4, "--drafts", 4
    step, verify = objects(*given)
    assert (step["policy"], step["drafts"]) == ("fp32@1", None)
    assert (verify["policy"], verify["drafts"]) == ("fp32/nvfp4@16", 4)
    assert verify["token_bytes"] == 4 * step["token_bytes"]
    assert "a step, or a verification of drafts and its commit" in " ".join(bench(*given).split())
    assert "drafts" not in bench(*given[:-2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_what_is_needed(tmp_path):
    with pytest.raises(InputError, match="device 'none': expected a CUDA GPU") as raised:
        bench("--output", tmp_path / "results")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 0 --dry-run", "batch 0"),
        ("--batch 1025", "1 to 1024"),
        ("--shape 64,64,128", "shape '64,64,128'"),
        ("--shape 64,64,128,7 --dry-run", "divisor of heads"),
        ("--shape 64,64,0,8 --dry-run", "shape '64,64,0,8': expected integers above zero"),
        ("--family mamba1 --dry-run", "family 'mamba1'"),
        ("--model nothing", "model 'nothing'"),
        ("--model Mamba2-2.7B --family mamba2", "not both"),
        ("-p fp32@0", "policy 'fp32@0'"),
        ("-p fp32@16:contents=raw", "contents="),
        ("--peer vlm", "peer 'vlm'"),
        ("--peer vllm=/nowhere", "vllm=PATH"),
        ("--bandwidth 3", "--dry-run"),
        ("--drafts 0 --dry-run", "drafts 0"),
        ("--drafts 4 -p fp32@1 --dry-run", "drafts 4: expected a policy with a window"),
        ("--figure . --batch 3", "nothing beside --figure"),
        ("--figure . --family kimi_delta", "nothing beside --figure"),
        ("--figure . --dry-run", "nothing beside --figure"),
        ("--dry-run --output results/none", "nothing beside --dry-run, which times nothing"),
        ("--figure /nowhere", "existing folder"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError) as raised:
        bench(*arguments.split())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# -- with a made-up clock
class Clock:
    """Runs the work and says that it took as many microseconds as it was told to take the next time."""

    device = torch.device("cpu")
    name = "a made-up device"
    l2_bytes = 1

    def measure(self, work):
        work()
        return Times(640.0, 600.0, 700.0, 11)

    def free_bytes(self):
        return 2**30


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(bench_timing, "obstacle", lambda: None)
    monkeypatch.setattr(bench_timing, "GraphTimer", Clock)
    monkeypatch.setattr(bench_timing, "gpu_environment", lambda timer: {"gpu": timer.name})
    monkeypatch.setattr("quantlab.kernels.bench.FEWEST_LAYERS", 1)
    monkeypatch.setattr("quantlab.kernels.bench.copy_bandwidth", lambda timer: 10.0)
    monkeypatch.setitem(sys.modules, "quantlab.kernels.steps", steps)


SMALL = ("--shape", "2,16,32,1", "-p", "fp32@1", "-p", "fp32/nvfp4@4", "--batch", 2, "--batch", 3)


def test_a_run_leaves_records_a_table_and_figures(clock, tmp_path, monkeypatch):
    output = bench(*SMALL, "--output", tmp_path)
    assert "a step of a layer" in output
    assert "fp32/nvfp4@4" in output
    records = load_records(tmp_path / "records")
    assert len(records) == 4
    assert {record["environment"]["gpu"] for record in records} == {"a made-up device"}
    assert all(record["metrics"]["copy_bandwidth"] == 10 for record in records)
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch"], row["policy"]) for row in rows] == [
        ("2", "fp32@1"),
        ("2", "fp32/nvfp4@4"),
        ("3", "fp32@1"),
        ("3", "fp32/nvfp4@4"),
    ]
    assert float(rows[0]["against_baseline"]) == 1
    assert (tmp_path / "speed-mamba2-2x16x32x1.png").stat().st_size > 10_000
    assert (tmp_path / "speed-mamba2-2x16x32x1.svg").read_text().startswith("<?xml")
    drawn = bench("--figure", tmp_path, "--output", tmp_path / "drawn")
    assert "a step of a layer" in drawn
    assert (tmp_path / "drawn" / "bench.csv").read_text() == (tmp_path / "bench.csv").read_text()
    assert len(list((tmp_path / "drawn").iterdir())) == 3
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "records").iterdir()}
    monkeypatch.setattr("quantlab.report.speed.draw_speed", lambda rows, folder: [])
    again = objects(*SMALL, "--output", tmp_path)
    assert [row["us"] for row in again] == [float(row["us"]) for row in rows]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "records").iterdir()}


def test_drafts_have_a_row_and_a_ratio(clock, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "quantlab.kernels.drafts", drafts)
    given = "--shape", "2,16,32,1", "-p", "fp32/nvfp4@4", "--batch", 2, "--drafts", 2
    output = bench(*given, "--output", tmp_path)
    assert "drafts" in output
    step, verify = (row for row in csv.DictReader((tmp_path / "bench.csv").open()))
    assert (step["policy"], step["drafts"]) == ("fp32@1", "")
    assert (verify["policy"], verify["drafts"]) == ("fp32/nvfp4@4", "2")
    ratio = 2 * float(step["us"]) / float(verify["us"])
    assert float(verify["against_baseline"]) == pytest.approx(ratio)
    words = (tmp_path / "speed-mamba2-2x16x32x1.svg").read_text()
    shown = "fp32@1, one step", "fp32/nvfp4@4, 2 drafts"
    assert all(f"<!-- {text} -->" in words for text in shown)
    assert "<!-- mamba2, 2 heads of 16 x 32, 1 key head; a made-up device -->" in words


def test_a_failed_comparison_ends_with_status_1(clock, monkeypatch, tmp_path):
    def wrong(pool, inputs, plan, output):
        return steps.decode_token(pool, inputs, plan, output).mul_(1.1)

    module = type(sys)("quantlab.kernels.steps")
    vars(module).update({**vars(steps), "decode_token": wrong})
    monkeypatch.setitem(sys.modules, "quantlab.kernels.steps", module)
    monkeypatch.setattr("quantlab.report.speed.draw_speed", lambda rows, folder: [])
    output = bench(*SMALL, "--output", tmp_path, status=1)
    assert "comparison_failed" in output
    assert "times its limit" in output
    assert {record["status"] for record in load_records(tmp_path / "records")} == {"comparison_failed"}
    assert all("us" not in record["metrics"] for record in load_records(tmp_path / "records"))


def test_a_policy_without_a_kernel_is_no_failure(clock):
    output = bench("--shape", "2,16,32,1", "-p", "nvfp4@4", "--batch", 2)
    assert "not_served" in output


BROKEN = {
    "no bits": (lambda r: r["metrics"].pop("checkpoint_bits"), r"metrics.checkpoint_bits None"),
    "no metrics": (lambda r: r["metrics"].clear(), r"metrics.checkpoint_bits None"),
    "a text for a time": (lambda r: r["metrics"].update(us="4"), r"metrics.us '4'"),
    "no time at all": (lambda r: r["metrics"].update(us=0), r"metrics.us 0"),
    "a median alone": (lambda r: r["metrics"].pop("us_upper"), r"metrics.us_upper None"),
    "a number for kernels": (lambda r: r["metrics"].update(kernels=5), r"metrics.kernels 5"),
    "a text for a choice": (lambda r: r["metrics"].update(chosen="x"), r"metrics.chosen 'x'"),
    "launches without a time": (
        lambda r: r["metrics"].update(launches={"read": {"kernels": []}}),
        r"metrics.launches",
    ),
    "a point without a batch": (lambda r: r["point"].pop("batch"), r"point.batch None"),
    "a text for a size": (lambda r: r["point"].update(heads="64"), r"point.heads '64'"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_record_that_no_table_can_show_is_refused(change, message, clock, tmp_path, monkeypatch):
    """By the figure, and by a run before it times anything."""
    (tmp_path / "records").mkdir()
    made_up(tmp_path / "records", batches=(8,))
    record = load_records(tmp_path / "records")[0]
    (tmp_path / "records" / record_path("", record["point"])).unlink()
    change(record)
    save_record(tmp_path / "records", record)
    monkeypatch.setattr("quantlab.kernels.bench.run_cases", None)
    for arguments in (("--figure", tmp_path), (*SMALL, "--output", tmp_path)):
        with pytest.raises(InputError, match=rf"^record [0-9a-f]+\.json {message}.*: expected ") as raised:
            bench(*arguments)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "bench.csv").exists()


SCRIPTS = {
    "nothing to report": ("run.py --report --output {}/none", "output "),
    "no records": ("fit.py {}", "records folder "),
    "no times": ("fit.py {}/failed", "records folder "),
}


@pytest.mark.parametrize(("command", "message"), SCRIPTS.values(), ids=SCRIPTS)
def test_the_scripts_of_the_study_end_with_one_line(command, message, tmp_path, monkeypatch, capfd):
    # In this process: a new one takes seconds to import torch, and nothing here depends on it.
    (tmp_path / "failed").mkdir()
    point = {
        "kind": "bench",
        "policy": "fp32@1",
        "implementation": "quantlab",
        "family": "mamba2",
        "batch": 8,
    }
    point |= {"heads": 64, "value_dim": 64, "key_dim": 128, "key_heads": 8, "device": "x"}
    result = {"status": "failed", "message": "no reason", "metrics": {"checkpoint_bits": 32}}
    save_record(tmp_path / "failed", complete_record(point, result, environment={}))
    script, *arguments = command.format(tmp_path).split()
    path = Path(__file__).resolve().parent.parent / "experiments" / "kernels_h200" / script
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    assert left.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


# -- figures
def made_up(folder, batches=(1, 8, 32, 64, 256, 512), more=()):
    """Records with plausible numbers of ours and two peers, and more kinds."""
    kinds = (
        *more,
        ("quantlab", "fp32@1", 1.05, 4.2e6),
        ("quantlab", "fp32@16:buffer=bf16", 0.58, 3.9e6),
        ("quantlab", "fp32/nvfp4@16:buffer=bf16", 0.16, 2.9e6),
        ("quantlab", "fp16+sr/nvfp4@16:buffer=bf16", 0.13, 2.6e6),
        ("quantlab", "fp8_e4m3+sr/nvfp4@16:buffer=bf16", 0.11, 2.4e6),
        ("vllm", "fp32@1", 1.05, 3.9e6),
        ("replayssm", "fp32@16:buffer=bf16", 0.58, 3.3e6),
    )
    for batch in batches:
        for implementation, policy, size, rate in kinds:
            moved = size * 4.2e6 * batch
            us = moved / rate + 2.5
            point = {"kind": "bench", "policy": policy, "implementation": implementation, "family": "mamba2"}
            point |= {"batch": batch, "heads": 64, "value_dim": 64, "key_dim": 128, "key_heads": 8}
            metrics = {"run": "one", "us": us, "us_lower": us * 0.99, "us_upper": us * 1.02, "bytes": moved}
            metrics |= {"bytes_per_us": moved / us, "of_copy": moved / us / 4.25e6, "copy_bandwidth": 4.25e6}
            metrics["chosen"] = {"policy": "fp32@1" if batch == 1 else policy}
            metrics["checkpoint_bits"] = {"fp32": 32, "fp16": 16, "fp8_": 8}[policy[:4]]
            record = complete_record(
                point | {"device": "NVIDIA H200"}, {"metrics": metrics}, environment={"gpu": "x"}
            )
            save_record(folder, record)


def test_a_figure_of_made_up_records(tmp_path):
    made_up(tmp_path)
    rows = list(speed_rows(load_speed_records(tmp_path)))
    png, svg = draw_speed(rows, tmp_path)
    assert png.stat().st_size > 20_000
    # Text is drawn as paths; matplotlib notes the words beside them.
    assert all(f"<!-- {text} -->" in svg.read_text() for text in ("copy, 4.25 TB/s", "vllm: fp32@1", "512"))
    assert rows
    assert all((row["against_peer"] is None) == (row["implementation"] != "quantlab") for row in rows)


def test_no_two_lines_of_a_figure_look_alike(tmp_path):
    more = [
        *(("quantlab", policy, 0.5, 3.0e6) for policy in ("fp16@1", "fp16@16", "fp16/nvfp4@16")),
        *(("mamba_ssm", policy, 0.5, 3.0e6) for policy in ("fp32@1", "fp16@1")),
        *(("vllm", "fp16@1", 0.5, 3.0e6), ("replayssm", "fp16@16:buffer=bf16", 0.5, 3.0e6)),
    ]
    made_up(tmp_path, batches=(8,), more=more)
    styles = _styles(list(speed_rows(load_speed_records(tmp_path))))
    assert len(styles) == 14
    assert len({style.color for style in styles.values()}) == 14
    assert len({(style.dash, style.marker) for style in styles.values()}) > 10


def test_rows_have_an_order(tmp_path):
    made_up(tmp_path, batches=(8, 1))
    rows = in_order(list(speed_rows(load_speed_records(tmp_path))))
    assert [row["batch"] for row in rows] == [1] * 7 + [8] * 7
    assert [row["implementation"] for row in rows[:7]] == ["quantlab"] * 5 + ["replayssm", "vllm"]
    assert rows[0]["policy"] == rows[7]["policy"] == "fp32@1"


def test_there_is_something_to_draw(tmp_path):
    with pytest.raises(InputError, match="at least one record of quantlab bench"):
        load_speed_records(tmp_path)
    (tmp_path / "other").mkdir()
    point = {"kind": "scan", "policy": "fp32@1"}
    save_record(tmp_path, complete_record(point, {}, environment={}))
    with pytest.raises(InputError, match="at least one record of quantlab bench"):
        load_speed_records(tmp_path)
