"""A config.json that is damaged ends in one line that names it, whatever it holds."""

import contextlib
import json

import pytest

from quantlab.drift.model_heads import heads_of_folder
from quantlab.errors import InputError
from quantlab.models.capacity import parse_bytes
from quantlab.models.config_geometry import read_config

MAMBA2 = {
    "model_type": "mamba2",
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 1,
}
QWEN = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 8,
    "linear_key_head_dim": 16,
}
VALUES = ["abc", -1, 1.5, True, [["x"]], {"a": 1}, float("nan"), float("inf"), 10**30]
SIZES = ("num_hidden_layers", "num_heads", "head_dim", "state_size")
DAMAGED = [
    MAMBA2 | {name: value} for name in SIZES for value in VALUES if (name, value) != ("head_dim", "abc")
]
DAMAGED += [QWEN | {name: value} for name in QWEN if name.endswith("dim") for value in VALUES]
DAMAGED += [{"model_type": value} for value in ([], ["a"], {}, None, 5)]
DAMAGED += [{"model_type": "mamba2", "text_config": {"model_type": value}} for value in (["a"], None)]
DAMAGED += [{"model_type": "kimi_linear", "linear_attn_config": value} for value in ("abc", 5, [1])]


@pytest.mark.parametrize("read", [heads_of_folder, read_config])
def test_damaged_configs_are_refused(read, tmp_path):
    taken = []
    for config in DAMAGED:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(InputError):
            read(tmp_path)
            taken.append(config)
    assert taken == []


@pytest.mark.parametrize("text", ["[" * 20_000, "\ufeff{", "", "null"])
@pytest.mark.parametrize("read", [heads_of_folder, read_config])
def test_files_that_are_no_object_are_refused(read, text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"^config "):
        read(tmp_path)


def test_kinds_of_layers_may_be_anything(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(QWEN | {"layer_types": ["linear_attention", ["x"], None]})
    )
    assert read_config(tmp_path).layers == 1


def test_bytes_beyond_any_machine_are_refused():
    for text in ("9" * 400, "9" * 30 + "GiB"):
        with pytest.raises(InputError, match=r"^memory "):
            parse_bytes("memory", text)
