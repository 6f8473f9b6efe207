"""A spec says what it means or is refused in one line that names the field."""

import numpy as np
import pytest

from quantlab.errors import InputError
from quantlab.records import canonical_json, save_stream_file
from quantlab.sweep import expand, load_study


def write(tmp_path, text):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return path


def jobs_of(tmp_path, text, **options):
    return expand(load_study(write(tmp_path, text)), tmp_path, **options)


def points_of(*args, **options):
    return [point for job in jobs_of(*args, **options) for point in job.points]


DRIFT = """
title = "t"
policies = ["fp32@1", "nvfp4 @1"]
[[drift]]
family = "mamba2"
alpha = [0.9, 0.99]
seed = [0, 1]
steps = 64
"""


def test_expansion_is_the_product_grouped_by_stream(tmp_path, parser):
    jobs = jobs_of(tmp_path, DRIFT)
    assert [[point["policy"] for point in job.points] for job in jobs] == [["fp32@1", "nvfp4@1"]] * 4
    assert [(p["stream"]["alpha"], p["stream"]["seed"]) for p in (job.points[0] for job in jobs)] == [
        (0.9, 0),
        (0.9, 1),
        (0.99, 0),
        (0.99, 1),
    ]
    stream = {"preset": "evidence", "family": "mamba2", "alpha": 0.9, "heads": 8, "sequences": 2, "steps": 64}
    stream |= {"value_dim": 64, "key_dim": 128, "seed": 0}
    assert jobs[0].points[0] == {"kind": "drift", "policy": "fp32@1", "stream": stream}


def test_spelling_does_not_change_a_point(tmp_path, parser):
    short = 'title = "t"\n[[drift]]\nfamily = "gated_delta"\npolicies = ["a"]\n'
    full = short + 'preset = "realistic"\nheads = 8\nseed = [0]\nsequences = 2\nsteps = 1024\nkey_dim = 128\n'
    assert [canonical_json(p) for p in points_of(tmp_path, short)] == [
        canonical_json(p) for p in points_of(tmp_path, full)
    ]


def test_a_point_named_twice_is_run_once(tmp_path, parser):
    twice = (
        DRIFT + '[[drift]]\nfamily = "mamba2"\nalpha = 0.9\nsteps = 64\npolicies = ["fp32 @1", "fp16@1"]\n'
    )
    assert len(points_of(tmp_path, twice)) == 9
    assert len(jobs_of(tmp_path, twice)) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title = ", "valid TOML"),
        ("title = " + "[" * 100_000, "valid TOML"),
        ("title = " + "9" * 6000, "valid TOML"),
        ("description = 'x'", "title"),
        ("title = 't'", r"\[\[drift\]\]"),
        (DRIFT + "[[drfit]]\n", "spec field 'drfit'.*nearest: drift"),
        (DRIFT.replace("alpha", "aplha"), r"drift\[1\] field 'aplha'.*nearest: alpha"),
        (DRIFT.replace("64", "'64'"), r"drift\[1\].steps '64': expected a valid integer"),
        (DRIFT.replace("64", "0"), r"drift\[1\].steps 0"),
        (DRIFT.replace("0.99", "1.5"), r"drift\[1\].alpha"),
        (DRIFT.replace("mamba2", "manba2"), r"drift\[1\].family 'manba2'.*nearest: mamba2"),
        (DRIFT + "preset = 'realistic'\n", r"drift\[1\].alpha"),
        (DRIFT + "stream_file = 'x'\n", r"drift\[1\].alpha.*stream_file decides"),
        ("title='t'\npolicies=['a']\n[[drift]]\nstream_file = 'x'\n", "stream file"),
        ("title='t'\npolicies=['a']\n[[drift]]\npreset = 'evidence'\nfamily='mamba2'\n", "alpha None"),
        ("title='t'\npolicies=['a']\n[[drift]]\n", "family = "),
        ("title='t'\n[[drift]]\nfamily = 'mamba2'\n", "at least one policy"),
        ("title='t'\n[[eval]]\nmodel = 'x'\ntasks = []\n", r"eval\[1\].tasks"),
        ("title='t'\n[[eval]]\ntasks = ['a']\n", r"eval\[1\].model None.*required"),
        ("title='t'\npolicies=['a']\n[[eval]]\nmodel = 'x'\ntasks = ['a']\n", "model folder"),
        (
            "title='t'\npolicies=['a']\n[[eval]]\nmodel='builtin:tiny-mamba'\ntasks=['a']\n",
            "nearest: builtin:tiny-mamba2",
        ),
        (
            "title='t'\npolicies=['a']\n[[eval]]\nmodel='builtin:tiny-mamba2'\ntasks=['a']\n",
            "fp32@1 among them",
        ),
        (
            "title='t'\npolicies=['fp32@1']\n[[eval]]\nmodel='builtin:tiny-mamba2'\ntasks=['a']\ndata='no.csv'\n",
            "readable CSV",
        ),
        ("title='t'\npolicies=['a']\n[[script]]\nname='s'\nrunner='no.py:f'\n", "readable Python"),
        ("title='t'\npolicies=['a']\n[[script]]\nname='s'\nrunner='spec.toml'\n", "path.py:function"),
        (DRIFT + "[quick]\ndrop = ['evals']\n", "quick.drop 'evals'.*nearest: eval"),
        (DRIFT + "[quick]\nstep = 3\n", "quick field 'step'.*nearest: steps"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path, parser, text, says):
    with pytest.raises(InputError, match=says) as error:
        jobs_of(tmp_path, text, quick=True)
    assert "\n" not in str(error.value)


def test_missing_spec(tmp_path):
    with pytest.raises(InputError, match="readable TOML"):
        load_study(tmp_path / "none.toml")


def test_script_function_is_checked_without_running_the_script(tmp_path, parser):
    (tmp_path / "s.py").write_text("def run_points(points): ...\nraise RuntimeError('was run')\n")
    text = "title='t'\npolicies=['a']\n[[script]]\nname='s'\nparams = { a = 1 }\nrunner='s.py:run_points'\n"
    (point,) = points_of(tmp_path, text)
    assert point == {"kind": "scan", "name": "s", "runner": "s.py:run_points", "a": 1, "policy": "a"}
    with pytest.raises(InputError, match=r"params 'policy'"):
        points_of(tmp_path, text.replace("a = 1", "policy = 1"))
    with pytest.raises(InputError, match="nearest: run_points"):
        points_of(tmp_path, text.replace("py:run_points", "py:run_point"))


def test_stream_file_is_known_by_its_content(tmp_path, parser):
    arrays = {"v": np.ones((3, 1, 2, 4), np.float32)}
    digest = save_stream_file(tmp_path / "x.safetensors", arrays, {"family": "mamba2"})
    (point,) = points_of(tmp_path, "title='t'\npolicies=['a']\n[[drift]]\nstream_file = 'x.safetensors'\n")
    assert point["stream"] == {"file": "x.safetensors", "hash": digest}


def test_eval_point_knows_its_data(tmp_path, parser):
    (tmp_path / "d.csv").write_text("a,b\n")
    text = (
        "title='t'\npolicies=['fp32@1']\n[[eval]]\nmodel='builtin:tiny-mamba2'\ntasks=['a']\ndata='d.csv'\n"
    )
    (before,) = points_of(tmp_path, text)
    (tmp_path / "d.csv").write_text("a,c\n")
    (after,) = points_of(tmp_path, text)
    assert before["data"] == after["data"] == "d.csv"
    assert before["data_hash"] != after["data_hash"]


def test_quick_replaces_and_drops(tmp_path, parser):
    (tmp_path / "s.py").write_text("def run_points(points): ...\n")
    text = (
        DRIFT
        + "[[drift]]\nname = 'long'\nfamily = 'gated_delta'\n"
        + "[[script]]\nname='s'\nparams = { a = 1, b = 2 }\nrunner='s.py:run_points'\n"
        + "[quick]\nsteps = 8\nmax_policies = 1\nmax_seeds = 1\nmax_alphas = 1\n"
        + "drop = ['long']\nparams = { a = 0 }\n"
    )
    drift, script = points_of(tmp_path, text, quick=True)
    assert drift["stream"]["steps"] == 8
    assert drift["stream"]["alpha"] == 0.9
    assert (script["a"], script["b"]) == (0, 2)
    assert len(points_of(tmp_path, text)) == 12
