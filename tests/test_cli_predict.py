"""``quantlab predict --budget``: the table explains the rules that it writes, and bad input is one line."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from quantlab import cli
from quantlab.schemes.rules import parse_rules

CONFIG = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
}
LAYERS = (0, 2)


@pytest.fixture
def model(tmp_path):
    """A folder whose layers 0 and 2 have heads that forget between 1e-4 and 1 of their state a token."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    steps = torch.logspace(-4, 0, 16).reshape(2, 8)
    weights = {}
    for layer, step in zip(LAYERS, steps, strict=True):
        weights[f"model.layers.{layer}.linear_attn.A_log"] = torch.zeros(8)
        weights[f"model.layers.{layer}.linear_attn.dt_bias"] = torch.log(torch.expm1(step))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def run(monkeypatch, capfd):
    """The command line in this process: exit status, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["quantlab", "predict", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        shown = capfd.readouterr()
        return left.value.code or 0, shown.out, shown.err

    return call


def test_the_object_adds_up_and_the_file_says_the_same(model, run, tmp_path):
    path = tmp_path / "mine.toml"
    status, out, _ = run("--model", model, "--budget", 0.15, "--output", path, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["fraction"] == found["bytes_per_token"] / found["baseline_bytes_per_token"] <= 0.15
    assert found["baseline_bytes_per_token"] == 2 * 2 * 4 * 8 * 128 * 128  # layers, read and written, FP32
    assert [row["layer"] for row in found["layers"]] == list(LAYERS)
    assert sum(row["bytes_per_token"] for row in found["layers"]) == pytest.approx(found["bytes_per_token"])
    # Layers have equally many heads: the mean of their squares is the whole's.
    squares = [row["output_error"] ** 2 for row in found["layers"]]
    assert sum(squares) / 2 == pytest.approx(found["output_error"] ** 2)
    assert found["output_error"] < found["one_policy"]["output_error"]
    assert found["one_policy"]["bytes_per_token"] <= 0.15 * found["baseline_bytes_per_token"]
    rules = parse_rules(path)
    rules.check(dict.fromkeys(LAYERS, 8), "gated_delta")
    assert rules.toml() == found["rules"]
    assert len(rules.policies) > 1
    for row in found["layers"]:
        told = {str(group.policy): len(group.heads) for group in rules.of_layer(row["layer"], 8)}
        assert told == row["policies"]


def test_the_table_names_every_layer_the_bytes_and_the_one_policy(model, run):
    status, out, _ = run("--config", model, "--budget", 0.15)
    assert status == 0
    lines = out.splitlines()
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert rows[:3] == ["0", "2", "all"]
    assert sum(line.startswith("│ f") for line in lines) == 6  # the ladder, one policy for all heads
    for start in (
        "Bytes: ",
        "Predicted output error: ",
        "One policy for all heads within the same budget: fp16+sr/",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert "A_log and dt_bias of 2 layers" in out


def test_one_policy_that_is_as_good_is_named(model, run):
    """All the bytes there are buy the widest policy everywhere; few of them buy different ones."""
    said = "A mixture gains nothing here: fp32@16:buffer=bf16 for the whole model is as good."
    for budget, expected in ((1.0, True), (0.15, False)):
        status, out, _ = run("--model", model, "--budget", budget)
        assert status == 0
        assert (said in out.splitlines()) == expected
        assert ("gains nothing" in out) == expected


def test_policies_given_are_those_to_choose_from(model, run, tmp_path):
    path = tmp_path / "rules.toml"
    status, _, _ = run("fp32@16", "int8@16", "--model", model, "--budget", 0.4, "-o", path)
    assert status == 0
    assert {str(policy) for policy in parse_rules(path).policies} == {"fp32@16", "int8@16"}
    status, _, _ = run("fp32@1", "int8@16", "--model", model, "--budget", 1, "--mixed-windows", "-o", path)
    assert status == 0
    assert parse_rules(path).text == "fp32@1"


@pytest.mark.parametrize("budget", [(), ("--budget", 0.5)], ids=["heads", "budget"])
def test_built_in_models_have_heads(budget, run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    policies = () if budget else ("fp32@16",)
    status, out, err = run(*policies, "--model", "builtin:tiny-mamba2", *budget)
    assert status == 0, err
    assert "A_log and dt_bias of 2 layers in tiny-mamba2" in " ".join(out.split())
    assert list(tmp_path.glob("quantlab-*")) == []
    status, out, err = run(*policies, "--model", "builtin:tiny-mamba", *budget)
    assert (status, out) == (2, "")
    assert err.startswith("error: model 'builtin:tiny-mamba'")
    assert "nearest: builtin:tiny-mamba2" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--budget 0.05 --model MODEL -o out.toml", "budget 0.05: expected at least 0.11"),
        ("--budget 0 --model MODEL", "budget 0.0: expected bytes as a part of those of fp32@1"),
        ("--budget 0.5", "budget 0.5: expected --model beside it"),
        ("--budget 0.5 --model nowhere", "config 'nowhere'"),
        (
            "--budget 0.5 --model MODEL --output out.txt",
            "output 'out.txt': expected a file that ends in .toml",
        ),
        ("--budget 0.5 --model MODEL --output no/out.toml", "in a folder that exists"),
        ("--budget 0.5 --model MODEL --alpha 0.9", "alpha '[0.9]': expected no --budget"),
        ("--budget 0.5 --stream x", "stream 'x': expected no --budget"),
        ("--budget 0.5 --model MODEL fp33@1", "policy 'fp33@1'"),
        ("fp32@1 --output out.toml", "output 'out.toml': expected --budget beside it"),
        ("fp32@1 --mixed-windows", "mixed_windows 'True': expected --budget beside it"),
        ("", "policy None: expected at least one policy text"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, says, model, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*(str(model) if word == "MODEL" else word for word in arguments.split()))
    assert (status, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_of_some_layers_are_refused(model, run):
    config = CONFIG | {"layer_types": ["linear_attention"] * 4}
    (model / "config.json").write_text(json.dumps(config))
    status, _, err = run("--budget", 0.5, "--model", model)
    assert status == 2
    assert "weights of each recurrent layer of its config, not of 2" in err


def test_reference_models_have_heads(run):
    status, out, err = run("fp32/nvfp4@16", "--model", "reference:hybrid")
    assert status == 0, err
    assert "A_log and dt_bias of 2 layers in hybrid" in " ".join(out.split())


def test_a_read_that_asks_for_one_fact(run):
    """Of a built-in model's own questions; a coarser read copy errs more, and only stores can hold a state back."""
    policies = ("fp32/fp8_e4m3@16", "fp32/nvfp4@16", "int8@1")
    status, out, _ = run("--model", "reference:gated_delta", "--writes", 4, *policies, "--json")
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["policy"], row["layer"]) for row in rows] == [
        (p, layer) for p in policies for layer in range(3)
    ]
    fine, coarse = (sum(row["of_fact"] ** 2 for row in rows if row["policy"] == p) for p in policies[:2])
    assert 0 < fine < coarse
    assert all((row["kept"] is None) == ("/" in row["policy"]) for row in rows)
    status, out, _ = run("--model", "reference:gated_delta", "--writes", 4, "fp32/nvfp4@16")
    assert status == 0
    assert "error / fact" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--writes", 4, "nvfp4@1"), "writes 4: expected --model reference:NAME"),
        (("--writes", 4, "--model", "reference:hybrid"), "policy"),
        (("--writes", 4, "--model", "reference:hybird", "nvfp4@1"), "nearest: reference:hybrid"),
        (("--writes", 4, "--model", "reference:hybrid", "--alpha", 0.9, "nvfp4@1"), "alpha"),
        (("--writes", 4, "--model", "reference:hybrid", "--budget", 0.5), "writes"),
        (("--writes", 4, "--model", "reference:hybrid", "fp32/nvfp4@16:contents=derived"), "derived"),
    ],
)
def test_what_writes_do_not_go_with_is_one_line(run, arguments, named):
    status, _, err = run(*arguments)
    assert status == 2
    assert named in err.splitlines()[-1]
