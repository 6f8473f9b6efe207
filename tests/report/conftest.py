"""Made-up records that look like real ones: error levels follow the closed form, with noise; some points go
wrong."""

import json
import math

import numpy as np
import pytest

from quantlab import records

ROUNDING = {"fp32": 3e-8, "bf16": 1.66e-3, "fp16": 2.1e-4, "int8": 6.1e-3, "int8+ef": 6.1e-3, "nvfp4": 9.5e-2}
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8.25, "int8+ef": 24.25, "nvfp4": 4.5}
POLICIES = (
    "fp32@1",
    "fp32@16",
    "bf16@1",
    "fp16@16",
    "int8@1",
    "int8@16",
    "int8+ef@1",
    "nvfp4@1",
    "nvfp4@16",
    "fp32/nvfp4@16",
)
ENVIRONMENT = {
    "quantlab": "0.1.0",
    "python": "3.11.9",
    "platform": "Linux x86_64",
    "cpu": "Example CPU @ 2.10GHz",
    "threads": 1,
    "versions": {
        "torch": "2.13.0",
        "triton": "3.7.1",
        "transformers": "5.24.0",
        "numpy": "2.4.6",
        "lm-eval": None,
    },
    "git": "0123456789abcdef0123456789abcdef01234567",
}


def parts(policy):
    stores, _, window = policy.partition("@")
    checkpoint, _, copy = stores.partition("/")
    return checkpoint, copy or None, int(window)


def levels(policy, alpha):
    checkpoint, copy, window = parts(policy)
    rho = alpha**2 * (1 - 0.6 / 128)
    state = ROUNDING[checkpoint] / math.sqrt(1 - rho**window)
    if checkpoint == "int8+ef":
        state = ROUNDING[checkpoint]
    read = ROUNDING[copy] * math.sqrt(np.mean(rho ** np.arange(1, window + 1))) if copy else state
    return state, read


def costs(policy, heads, value_dim, key_dim):
    checkpoint, copy, window = parts(policy)
    size = heads * value_dim * key_dim / 8
    read = size * BITS[copy or checkpoint]
    written = size * (BITS[checkpoint] + (BITS[copy] if copy else 0)) / window
    record = heads * (value_dim + key_dim) * 4 if window > 1 else 0
    return {
        "bits_per_value": BITS[checkpoint] + (BITS[copy] if copy else 0),
        "bytes_per_token": read + written + record * (1 + window / 2),
        "bytes_read_per_token": read + record * window / 2,
        "bytes_written_per_token": written + record,
    }


def finish(point, **result):
    return records.complete_record(point, result, environment=ENVIRONMENT, seconds=1.5)


def drift_record(family, alpha, seed, policy, steps=1024, heads=8):
    rng = np.random.default_rng([seed, int(alpha * 1000), POLICIES.index(policy)])
    value_dim, key_dim = (128, 128) if family == "gated_delta" else (64, 128)
    stream = {
        "preset": "evidence",
        "family": family,
        "alpha": alpha,
        "heads": heads,
        "sequences": 2,
        "steps": steps,
    }
    stream |= {"value_dim": value_dim, "key_dim": key_dim, "seed": seed}
    point = {"kind": "drift", "policy": policy, "stream": stream}
    state, read = levels(policy, alpha)
    checkpoint, copy, window = parts(policy)
    step = np.unique(np.geomspace(1, steps, 24).round())
    rise = np.sqrt(1 - (alpha**2) ** np.maximum(step, 1)) if copy is None else np.ones(len(step))
    output = read * rise * np.exp(rng.normal(0, 0.04, len(step)))
    metrics = {"stream_hash": records.content_hash(stream), "steady": alpha < 0.999, "warning": None}
    metrics |= {"exercised": {"checkpoint": steps // window, "read_copy": steps // window if copy else None}}
    metrics |= costs(policy, heads, value_dim, key_dim) | {"diverged_at": None}
    curve = {"step": step.tolist(), "output_error": output.tolist(), "state_error": (state * rise).tolist()}
    curve |= {"read_error": output.tolist()}
    curve |= {"predicted_low": (read * rise / 1.4).tolist(), "predicted_high": (read * rise * 1.4).tolist()}
    if policy == "nvfp4@1" and alpha == 0.999:
        blown = [value * 1.02**s for value, s in zip(output, step, strict=True) if s < 700]
        curve = curve | {"step": step[: len(blown)].tolist(), "output_error": blown}
        curve |= {"state_error": blown, "read_error": blown, "predicted_low": None, "predicted_high": None}
        metrics |= {
            "diverged_at": 700,
            "state_error": math.inf,
            "read_error": math.inf,
            "output_error": math.inf,
        }
        metrics |= {
            "growth_exponent": math.nan,
            "growth_ci": [None, None],
            "output_bias": None,
            "output_std": None,
        }
        metrics |= {"predicted_output_error": math.inf, "predicted_state_error": math.inf, "steady": False}
        return finish(
            point, status="diverged", message="output is not finite at step 700", metrics=metrics, curve=curve
        )
    late = output[step > steps / 2].mean()
    if checkpoint == "nvfp4" and alpha == 0.9:
        late = late * 1.7
    slope = 0.25 if alpha == 0.999 and copy is None and window == 1 and checkpoint != "int8+ef" else 0.01
    metrics |= {
        "state_error": state * rise[-1],
        "read_error": late,
        "output_error": late,
        "output_bias": late / 50,
    }
    metrics |= {"output_std": late, "growth_exponent": slope, "growth_ci": [slope - 0.05, slope + 0.06]}
    metrics |= {"predicted_output_error": read * rise[-1], "predicted_state_error": state * rise[-1]}
    return finish(point, metrics=metrics, curve=curve)


def scan_record(policy):
    window = parts(policy)[2]
    _, read = levels(policy, 0.97)
    point = {
        "kind": "scan",
        "name": "typeseg",
        "runner": "run.py:run_points",
        "length": 512,
        "policy": policy,
    }
    metrics = {
        "kl": 0.0 if policy == "fp32@1" else read**2 * 3,
        "label_flips": min(0.4, read / 4),
        "logit_error": read * 0.8,
        "state_error": read * 0.9,
        "read_error": read,
        "output_error": read,
        "predicted_output_error": read * 1.2,
        "growth_exponent": 0.03,
        "growth_ci": [-0.02, 0.08],
        "exercised": {"checkpoint": 512 // window, "read_copy": None},
        "positions": 10240,
    } | costs(policy, 1, 256, 16)
    step = np.geomspace(8, 512, 8)
    curve = {
        "step": step.tolist(),
        "output_error": (read * np.ones(8)).tolist(),
        "state_error": None,
        "read_error": None,
    }
    return finish(point, metrics=metrics, curve=curve)


def eval_record(policy, flips, n=198):
    point = {
        "kind": "eval",
        "policy": policy,
        "model": "builtin:tiny-mamba2",
        "tasks": ["gpqa_diamond_zeroshot"],
    }
    point |= {"data": "questions.csv", "data_hash": "00", "limit": None, "batch_size": 8}
    lost, gained = flips
    noise = np.random.default_rng(POLICIES.index(policy)).normal(0, levels(policy, 0.97)[1], (n, 4))
    documents = []
    for i in range(n):
        correct = i % 3 == 0
        if i % 3 == 0 and i // 3 < lost:
            correct = False
        if i % 3 == 1 and i // 3 < gained:
            correct = True
        likelihoods = (-10 - np.arange(4) + noise[i]).tolist()
        documents.append({"hash": f"d{i:04d}", "loglikelihoods": likelihoods, "correct": correct})
    accuracy = sum(d["correct"] for d in documents) / n
    task = {"acc": accuracy, "acc_stderr": math.sqrt(accuracy * (1 - accuracy) / n), "n": n}
    metrics = {
        "tasks": {"gpqa_diamond_zeroshot": task},
        "documents": documents,
        "exercised": {"checkpoint": 220 // parts(policy)[2], "read_copy": None},
        "op_hits": {"mamba2_step": {"0": 43560, "1": 43560}},
    } | costs(policy, 8, 64, 128)
    return finish(point, metrics=metrics)


def make_records():
    found = [
        drift_record(family, alpha, seed, policy)
        for family in ("gated_delta", "mamba2")
        for alpha in (0.9, 0.99, 0.999)
        for seed in (0, 1)
        for policy in POLICIES
    ]
    found += [scan_record(policy) for policy in POLICIES]
    flips = {
        "fp32@1": (0, 0),
        "fp32@16": (0, 0),
        "int8@1": (9, 4),
        "nvfp4@16": (24, 8),
        "fp32/nvfp4@16": (7, 5),
    }
    found += [eval_record(policy, counts) for policy, counts in flips.items()]
    stream = {
        "preset": "realistic",
        "family": "mamba2",
        "alpha": None,
        "heads": 8,
        "sequences": 2,
        "steps": 64,
    }
    stream |= {"value_dim": 64, "key_dim": 128, "seed": 0}
    point = {"kind": "drift", "policy": "fp16@16", "stream": stream}
    found.append(finish(point, status="failed", message="the worker process was killed by SIGKILL"))
    point = point | {"policy": "int8@128"}
    found.append(
        finish(point, status="not_exercised", message="64 steps, but the first store comes after 128")
    )
    return found


@pytest.fixture(scope="session")
def fake_records():
    return make_records()


def fill(target, found):
    """A results folder as a sweep leaves it."""
    inner = records.check_output_folder(target / "records")
    for record in found:
        records.save_record(inner, record)
    about = {
        "title": "Which store survives?",
        "description": "A made-up study.",
        "quick": False,
        "spec": "title = 1\n",
    }
    about["command"] = "quantlab study experiments/made-up"
    (target / "study.json").write_text(json.dumps(about))
    return target


@pytest.fixture
def folder(tmp_path, fake_records):
    """The records, without a report."""
    return fill(tmp_path, fake_records)


@pytest.fixture(scope="session")
def written(tmp_path_factory, fake_records):
    """The records and the report on them, to be read only."""
    from quantlab.report import write_report

    return write_report(fill(tmp_path_factory.mktemp("written"), fake_records)).parent
