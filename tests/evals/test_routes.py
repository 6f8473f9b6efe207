"""The model class by its three routes: quantlab eval, lm-eval's command line from quantlab, and lm-eval's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantlab.evals.plugin import TASK_FOLDER
from quantlab.models import build_tiny

POLICY, TASK, ITEMS = "fp16+sr/nvfp4@4", "running_arithmetic", 3


def ran(command, cwd):
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    return found


def lm_eval(program, tasks, folder, place, policy=POLICY, **more):
    """One run of lm-eval's command line."""
    given = {
        "pretrained": folder,
        "policy": policy,
        "state_seed": 0,
        "sidecar": place / "sidecar.jsonl",
    } | more
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    options = {"--model": "quantlab", "--model_args": arguments, "--tasks": tasks, "--device": "cpu"}
    options |= {"--metadata": json.dumps({"items": ITEMS}), "--output_path": place / "out"}
    ran([*program, "run", *(str(part) for pair in options.items() for part in pair)], place)
    (results,) = (place / "out").rglob("results_*.json")
    return json.loads(results.read_text())


@pytest.mark.slow
def test_three_routes_give_the_same_answers(tmp_path):
    folder = build_tiny("mamba2", tmp_path / "mamba2")
    ours = [
        sys.executable,
        "-m",
        "quantlab.cli",
        "eval",
        "--model",
        folder,
        "--policy",
        POLICY,
        "--tasks",
        TASK,
    ]
    ran([*map(str, ours), "--items", str(ITEMS), "--output", str(tmp_path / "ours")], tmp_path)
    (place,) = (tmp_path / "ours").iterdir()
    (results,) = place.glob("results_*.json")
    runs = [json.loads(results.read_text())]
    sidecars = [place / "generations.jsonl"]
    for name, program, tasks in (
        ("module", [sys.executable, "-m", "quantlab.evals"], TASK),
        ("plain", [sys.executable, "-m", "lm_eval"], TASK_FOLDER / f"{TASK}.yaml"),
    ):
        (tmp_path / name).mkdir()
        runs.append(lm_eval(program, tasks, folder, tmp_path / name))
        sidecars.append(tmp_path / name / "sidecar.jsonl")
    told = [run["config"] for run in runs]
    for name in (
        "policy",
        "effective_policy",
        "exercised",
        "policy_seed",
        "scoring",
        "state_held_as",
        "op_hits",
    ):
        assert told[0][name] == told[1][name] == told[2][name]
    for name in ("sequences", "generated_tokens", "finish", "sampling", "engine"):
        assert len({json.dumps(config["generation"][name]) for config in told}) == 1
    scores = [run["results"][TASK]["exact_match,last_answer"] for run in runs]
    assert scores[0] == scores[1] == scores[2]
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in sidecars]
    assert all(header["over"] and header["settings"] == rows[0][0]["settings"] for header, *_ in rows)
    ends = [sorted((row["doc_id"], row["prompt"], row["tokens"]) for row in lines[1:]) for lines in rows]
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0]) == ITEMS
