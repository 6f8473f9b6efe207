"""``quantlab size``: the tables and the JSON say what the capacity functions count; bad input is one line."""

import json

import pytest
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.cli_size import BATCHES, DEFAULTS, DEFAULTS_OF_ONE
from quantlab.errors import InputError
from quantlab.models.capacity import Machine, Speculation, concurrency, demand, speed_bound, state_share
from quantlab.models.published import PUBLISHED
from quantlab.schemes import parse_policy


def size(*arguments):
    done = CliRunner().invoke(app, ["size", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def objects(*arguments):
    return [json.loads(line) for line in size(*arguments, "--json").splitlines()]


def cells(output, start):
    """The cells of the first row of a table that begins so."""
    for line in output.splitlines():
        row = [cell.strip() for cell in line.strip("│ \n").split("│")]
        if row[: len(start)] == start:
            return row[len(start) :]
    raise AssertionError(f"no row {start}:\n{output}")


def test_every_published_model_and_both_units():
    output = size()
    for name in PUBLISHED:
        assert f" {name}" in output
    assert cells(output, ["Qwen3.8-27B", "fp32@1"]) == [
        "4.000",
        "153.94",
        "153.94",
        "100%",
        "153.94",
        "146.81",
        "6",
    ]
    assert "Nemotron-3-Ultra: number of layers unknown" in output
    assert "Granite-4.0-h-small: layers, all_layers from memory, unchecked" in output
    rows = objects()
    assert [(row["model"], row["policy"]) for row in rows] == [(n, p) for n in PUBLISHED for p in DEFAULTS]


def test_the_parts_add_up():
    rows = objects("-m", "Qwen3.5-4B", "-p", "int8+ef/nvfp4@16:buffer=bf16", "-p", "fp32@1")
    for row in rows:
        found = demand(PUBLISHED["Qwen3.5-4B"], parse_policy(row["policy"]))
        assert row["bytes_read_per_forward"] == found.read
        assert row["bytes_written_per_forward"] == found.written
        assert row["bytes_held"] == found.held
        assert row["slot_bytes"] == sum(row["bytes_held"].values())
        assert row["slot_mb"] * 1e6 == pytest.approx(row["slot_bytes"])
        assert row["slot_mib"] * 2**20 == pytest.approx(row["slot_bytes"])
        moved = sum(row["bytes_read_per_forward"].values()) + sum(row["bytes_written_per_forward"].values())
        assert row["bytes_per_token"] == pytest.approx(moved)
    assert rows[1]["against_fp32"] == 1
    assert set(rows[0]["bytes_held"]) == {"checkpoint", "read copy", "residual", "buffer", "conv state"}


def test_what_error_feedback_costs_is_in_plain_sight():
    output = size("-m", "Qwen3.5-0.8B")
    assert all(text in output for text in DEFAULTS_OF_ONE)
    assert cells(output, ["int8+ef@1"])[0] == "3.031"
    assert "int8+ef@1: 8-bit codes, but 3.03 B a value with scales and residual; bf16 takes 2" in output
    for part in (
        "checkpoint codes",
        "checkpoint scales",
        "residual",
        "read copy scales",
        "buffer",
        "conv state",
    ):
        assert cells(output, [part])
    assert "bf16 takes 2" not in size("-m", "Qwen3.5-0.8B", "-p", "int8@1", "-p", "fp32/nvfp4@16")


def test_the_parts_of_a_table_are_those_of_the_ledger():
    output = size("-m", "Qwen3.5-0.8B", "-p", "int8+ef@1")
    codes, scales = cells(output, ["checkpoint codes"]), cells(output, ["checkpoint scales"])
    values = 18 * 16 * 128 * 128
    assert float(codes[2]) == pytest.approx(values / 1e6, abs=5e-3)
    assert float(scales[2]) == pytest.approx(values / 128 * 4 / 1e6, abs=5e-3)
    assert float(codes[3]) == pytest.approx(values / 2**20, abs=5e-3)


def test_a_shape_by_hand_and_a_configuration(tmp_path):
    shape = "--heads 48 --key-heads 16 --value-dim 128 --key-dim 128 --layers 48 --conv-kernel 4".split()
    (row,) = objects("--family", "gated_delta", *shape, "-p", "fp32@1")
    (same,) = objects("-m", "Qwen3.8-27B", "-p", "fp32@1")
    assert row["bytes_held"] == same["bytes_held"]
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (read,) = objects("--config", tmp_path, "-p", "fp32@1")
    assert read["bytes_held"] == same["bytes_held"]
    assert read["model"] == tmp_path.name
    (one,) = objects("--family", "mamba2", "--heads", 2, "--value-dim", 4, "--key-dim", 16, "-p", "fp32@1")
    assert one["bytes_held"] == {"checkpoint": 4 * 2 * 4 * 16}
    assert "convolution unknown, not counted" in size(
        "--family", "mamba2", *"--heads 2 --value-dim 4 --key-dim 16".split()
    )


def test_memory_and_break_even_are_those_of_the_functions():
    options = "--memory 80GiB --weights 8.4GB --kv-per-token 32KB --context 4096".split()
    rows = objects("-m", "Qwen3.5-4B", *options)
    machine = Machine(80 * 2**30, 8.4e9, 8.4e9, 32e3, 4096)
    baseline = demand(PUBLISHED["Qwen3.5-4B"], parse_policy("fp32@1"))
    for row in rows:
        found = demand(PUBLISHED["Qwen3.5-4B"], parse_policy(row["policy"]))
        assert row["requests"] == concurrency(found, machine)
        assert row["request_bytes"] == found.bytes_held + 32e3 * 4096
        for batch, entry in zip(BATCHES, row["break_even"], strict=True):
            share = state_share(baseline, machine, batch)
            ratio = baseline.bytes_per_forward / found.bytes_per_forward
            assert entry == {
                "batch": batch,
                "state_share_fp32": share,
                "speed_bound": speed_bound(share, ratio),
            }
    output = size("-m", "Qwen3.5-4B", *options, "--weights-read", "4GB", "--batch", 7)
    words = " ".join(output.split())  # titles are broken at the width of their table
    assert "Requests in 80 GiB beside 7.823 GiB of weights, KV cache of 4,096 tokens each" in words
    assert "A step that also reads 4 GB of weights and 4,096 tokens of KV cache a sequence" in words
    assert "x at 7" in output
    assert "x at 8" not in output


def test_speculation_names_the_states_that_a_request_holds():
    rows = objects("-m", "Qwen3.8-27B", "--drafts", 4, "--accepted", 3, "-p", "fp32@1", "-p", "fp32@16")
    assert [row["states_held"] for row in rows] == [5, 1]
    assert [row["tokens_per_forward"] for row in rows] == [5, 5]
    found = demand(PUBLISHED["Qwen3.8-27B"], parse_policy("fp32@16"), Speculation(4, 3))
    assert rows[1]["bytes_per_token"] == found.bytes_per_token
    output = size("-m", "Qwen3.8-27B", "--drafts", 4, "-p", "fp32@1")
    assert "5 tokens in a forward, 5 of them stay" in " ".join(output.split())
    assert cells(output, ["fp32@1"])[-1] == "5"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-m nope", "model 'nope': expected one of"),
        ("-m Qwen3.5-4B --family mamba2", "one of --model, --config or --family"),
        ("--family nope", "family 'nope'"),
        ("--family gated_delta --heads 3", "--value-dim beside it"),
        ("--family mamba2 --heads 3 --key-heads 2 --value-dim 4 --key-dim 4", "a divisor of heads = 3"),
        ("--layers 3", "layers 3: expected --family beside it"),
        ("--config /nowhere", "config.json"),
        ("--accepted 2", "--drafts beside it"),
        ("-m Qwen3.5-4B --drafts 2 --accepted 4", "1 to 3"),
        ("--memory 80G", "GiB 2^30"),
        ("--memory 1GB --weights 2GB", "less than the memory"),
        ("--context 4096", "both --kv-per-token and --context"),
        ("--batch 8", "--weights or --weights-read"),
        ("-m Mamba2-2.7B -p fp32@16:contents=raw", "delta rule"),
        ("-p nope@1", "policy 'nope@1'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_before_it(arguments, complaint, capsys):
    with pytest.raises(InputError) as error:
        size(*arguments.split())
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""
