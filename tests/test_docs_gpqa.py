"""docs/gpqa.md tells the truth: its commands parse; its numbers are those of records, `quantlab size`, arithmetic."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.evals.preflight import needs_data
from quantlab.schemes import parse_policy

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gpqa.md").read_text(encoding="utf-8")
RECORDS = ROOT / "experiments" / "decode_step" / "records"
COMMANDS = re.findall(
    r"^quantlab .*$", "\n".join(re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE
)
TOKENS = 198 * 8 * 13_000
POSITIONS = 33_792
KV = {"nano_4b": 16 * 1024, "qwen35_4b": 32 * 1024}


def table(first):
    """The cells of the rows of the table whose heading begins with ``first``."""
    rows = re.search(rf"^\| {re.escape(first)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert rows, first
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


def parsed(command):
    program, verb, *arguments = shlex.split(command)
    assert program == "quantlab"
    found = get_command(app).commands[verb]  # pyright: ignore[reportAttributeAccessIssue]
    return verb, found.make_context(verb, arguments, resilient_parsing=False).params


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_one(command):
    verb, given = parsed(command)
    for policy in given.get("policy") or ():
        parse_policy(policy)
    if verb == "eval":
        tasks = given["tasks"].split(",")
        assert needs_data(tasks) == tasks
        assert given["data"] == "hub"
        assert given["chat_template"] is True
    if verb == "compare":
        written = set()
        for other in COMMANDS:
            name, options = parsed(other)
            if name == "eval" and not options["preflight"]:
                written |= {str(options["output"] / parse_policy(p).file_name) for p in options["policy"]}
        assert {str(given["base"]), *map(str, given["candidates"]), *map(str, given["aa"])} == written


def test_the_page_has_its_commands():
    verbs = [command.split()[1] for command in COMMANDS]
    assert {verb: verbs.count(verb) for verb in set(verbs)} == {"eval": 5, "compare": 1, "size": 2}
    base, control = (parsed(command)[1] for command in COMMANDS[2:4])
    assert {name for name in base if base[name] != control[name]} == {"seed", "output"}


def test_the_cost_of_a_whole_sample_is_that_of_its_record():
    (found,) = re.findall(
        r"([\d,]+) steps at most, of ([\d.]+) ms.*?record (\w+)\), so ([\d.]+) minutes", PAGE
    )
    steps, step, name, minutes = found
    record = json.loads((RECORDS / f"{name}.json").read_text())
    assert steps == f"{2 * 32_768:,}"
    assert [record["point"][key] for key in ("model", "batch", "policy")] == ["nano_4b", 8, "fp32@1"]
    assert step == f"{record['metrics']['us'] / 1e3:.2f}"
    assert minutes == f"{2 * 32_768 * record['metrics']['us'] / 6e7:.1f}"


def test_the_steps_are_those_of_the_records_and_the_hours_follow():
    rows = table("model | rows | policy")
    assert len(rows) == 8
    for model, count, policy, step, name, rate, hours, bound in rows:
        record = json.loads((RECORDS / f"{name}.json").read_text())
        point, batch = record["point"], int(count)
        assert (point["model"], point["batch"], point["policy"]) == (model, batch, policy)
        assert (point["length"], point["device"]) == (512, "NVIDIA H200")
        us = record["metrics"]["us"]
        steps = TOKENS / batch
        assert step == f"{us / 1e3:.2f}"
        assert rate == f"{batch / us * 1e6:,.0f}"
        assert hours == f"{steps * us / 3.6e9:.2f}"
        held = batch * POSITIONS * KV[model]
        if held > 141e9 - 8.4e9:
            assert bound == "does not fit"
        else:
            read = held / record["metrics"]["copy_bandwidth"]
            assert bound == f"{steps * (us - record['metrics']['attention'] + read) / 3.6e9:.2f}"
        assert f"{record['metrics']['copy_bandwidth'] / 1e6:.2f}" == "4.23"


@pytest.mark.parametrize("row", table("model | row under fp32@1"), ids=lambda row: row[0])
def test_the_memory_is_what_quantlab_size_says(row):
    model, whole, state, *requests = row
    (command,) = (c for c in COMMANDS if c.startswith(f"quantlab size --model {model} "))
    for memory, count in zip(("24GB", "80GB", "141GB"), requests, strict=True):
        arguments = shlex.split(command.replace("80GB", memory))[1:]
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout.splitlines()[0])
        assert found["policy"] == "fp32@1"
        assert count == str(found["requests"])
        assert whole == f"{found['request_bytes'] / 1e6:,.0f}"
        assert state == f"{found['slot_mb']:.0f}"
    batches = {given["generation_batch"] for verb, given in map(parsed, COMMANDS) if verb == "eval"}
    assert batches == {128, 64}
    # Three quarters of what a card of 141 GB holds.
    assert {"Nemotron-3-Nano-4B": 128, "Qwen3.5-4B": 64}[model] <= 0.75 * int(requests[-1])


def test_what_the_study_can_see_follows_from_the_beta_that_is_named():
    a, b = 0.51, 0.34
    # E[p] and E[p (1 - p)] of a Beta, and the probability that one of eight is right.
    assert round(100 * a / (a + b)) == 60
    within = a * b / ((a + b) * (a + b + 1))
    none = math.exp(math.lgamma(b + 8) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + 8))
    assert abs(100 * (1 - none) - 85.35) < 1
    for k, error, seen in table("responses k"):
        sd = 100 * math.sqrt(2 * within / (198 * int(k)))
        digits = len(error.partition(".")[2])
        assert error == f"{sd:.{digits}f}"
        assert seen == f"{(1.95996 + 0.84162) * sd:.1f}"
    assert f"{100 / 198:.3f}" == "0.505"
    assert f"{100 * math.sqrt(0.532 * 0.468 / 198):.1f}" == "3.5"
