"""Published geometries against the sizes that public sources print, and configurations read back."""

import json

import pytest

from quantlab.errors import InputError
from quantlab.models.config_geometry import READERS, read_config
from quantlab.models.published import PUBLISHED, Geometry, published
from quantlab.recurrences import RECURRENCES
from quantlab.schemes import parse_policy
from quantlab.schemes.ledger import record_bytes

# name -> as printed: FP32 MiB of a layer, MiB of a sequence, MiB of a layer's ring of 16 records (bf16 vectors, FP32
# gates).  "" where the source prints none.
PRINTED = {
    "Nemotron-3-Nano-4B": ("3.75", "79", ".271"),
    "Nemotron-3-Nano-30B-A3B": ("2.0", "46", ".160"),
    "Nemotron-3-Super-120B-A12B": ("4.0", "160", ".289"),
    "Nemotron-3-Ultra": ("8.0", "", ""),
    "Nemotron-H-8B": ("4.0", "96", ".289"),
    "Nemotron-Nano-9B-v2": ("5.0", "135", ".352"),
    "Mamba2-2.7B": ("2.5", "160", ".165"),
    "Codestral-Mamba-7B": ("4.0", "256", ".289"),
    "Falcon-H1-0.5B": (".75", "", ".05"),
    "Falcon-H1-1.5B": ("3", "", ""),
    "Falcon-H1-3B": ("4", "", ""),
    "Falcon-H1-7B": ("3", "", ""),
    "Falcon-H1-34B": ("4", "", ".14"),
    "Bamba-9B": ("4.0", "116", ".262"),
    "Granite-4.0-h-small": ("4.0", "144", ".262"),
    "Qwen3-Next-80B-A3B": ("2.0", "72", ".189"),
    "Qwen3.5-0.8B": ("1.0", "18", ".126"),
    "Qwen3.5-4B": ("2.0", "48", ".189"),
    "Qwen3.5-122B-A10B": ("4.0", "144", ".316"),
    "Qwen3.5-397B-A17B": ("4.0", "180", ".316"),
    "Qwen3.8-27B": ("3.0", "144", ""),
    "Kimi-Linear-48B-A3B": ("2.0", "40", ".50"),
    "OLMo-Hybrid": ("2.1", "51", ".266"),
}
MIB = 2**20


def ring(geometry: Geometry) -> int:
    """Bytes of a layer's ring of 16 derived records, as an engine allocates it."""
    policy = parse_policy("fp32@16:buffer=bf16")
    fields = record_bytes(policy, RECURRENCES[geometry.family], geometry.shape)
    return 16 * (fields["k"] + fields["d"] + fields["gate"])


def digits(value: float, text: str) -> str:
    """``value`` with as many decimals as ``text`` has."""
    return f"{value:.{len(text.partition('.')[2])}f}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_printed_sizes_come_out(name):
    geometry = PUBLISHED[name]
    layer = 4 * geometry.shape.values / MIB
    for text, value in zip(
        PRINTED[name], (layer, layer * (geometry.layers or 0), ring(geometry) / MIB), strict=True
    ):
        if text:
            assert float(digits(value, text)) == float(text)


def test_every_published_row_is_checked_and_named_alike():
    assert set(PRINTED) == set(PUBLISHED)
    assert all(name == row.name for name, row in PUBLISHED.items())
    assert {row.family for row in PUBLISHED.values()} == {"mamba2", "gated_delta", "kimi_delta"}
    assert all(row.source and row.heads % row.key_heads == 0 for row in PUBLISHED.values())
    assert published("QWEN3.5-4b") is PUBLISHED["Qwen3.5-4B"]
    with pytest.raises(InputError, match=r"nearest: Qwen3\.5-4B"):
        published("Qwen3.5-4")


def test_bytes_that_public_threads_state():
    """Exact figures, to the byte."""
    assert ring(PUBLISHED["Nemotron-3-Super-120B-A12B"]) == 303_104
    assert ring(PUBLISHED["Qwen3.8-27B"]) == 265_216
    small = PUBLISHED["Qwen3.5-0.8B"]
    assert 18 * 4 * small.shape.values == 18_874_368
    # lattice keeps the convolution state in FP32: 73,728 bytes a layer.
    assert small.conv_bytes(value_bytes=4) == 18 * 73_728
    assert 18_874_368 + small.conv_bytes(value_bytes=4) == 20_201_472
    # Mamba-2: d_inner + 2 groups x state under the convolution, three columns of bf16.
    assert PUBLISHED["Mamba2-2.7B"].conv_bytes() == 64 * (2 * 2560 + 2 * 128) * 3 * 2
    assert PUBLISHED["Mamba2-2.7B"].conv_bytes(drafts=4) == 64 * (2 * 2560 + 2 * 128) * 7 * 2
    assert PUBLISHED["Nemotron-3-Ultra"].conv_bytes() == 0


# What config.json files say, cut down to what describes the recurrence.
GATED = {
    "num_hidden_layers": 8,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M*-M",
    "mamba_num_heads": 64,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
}
BAMBA = {
    "model_type": "bamba",
    "hidden_size": 512,
    "mamba_expand": 2,
    "num_hidden_layers": 8,
    "attn_layer_indices": [2, 5],
    "mamba_n_heads": 16,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}
KIMI = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "kda_layers": list(range(20)),
        "full_attn_layers": list(range(7)),
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 128,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
}
ZAMBA = {
    "model_type": "zamba2",
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "n_mamba_heads": 8,
    "mamba_headdim": 64,
    "mamba_d_state": 64,
    "mamba_ngroups": 2,
    "mamba_d_conv": 4,
    "chunk_size": 256,
}
MAMBA2 = {
    "model_type": "mamba2",
    "num_hidden_layers": 6,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 256,
}
CONFIGS = [
    # config, (family, heads, key heads, V, K, recurrent layers, all layers, kernel)
    (
        GATED | {"model_type": "qwen3_next", "full_attention_interval": 4},
        ("gated_delta", 32, 16, 64, 128, 6, 8, 4),
    ),
    (
        GATED | {"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention"] * 3},
        ("gated_delta", 32, 16, 64, 128, 3, 6, 4),
    ),
    (
        {
            "model_type": "qwen3_5",
            "text_config": GATED | {"model_type": "qwen3_5_text", "full_attention_interval": 4},
        },
        ("gated_delta", 32, 16, 64, 128, 6, 8, 4),
    ),
    (NEMOTRON, ("mamba2", 64, 8, 80, 128, 4, 8, 4)),
    (
        {
            **NEMOTRON,
            "hybrid_override_pattern": None,
            "layers_block_type": ["linear_attention", "moe", "mlp"],
        },
        ("mamba2", 64, 8, 80, 128, 1, 3, 4),
    ),
    (BAMBA, ("mamba2", 16, 1, 64, 128, 6, 8, 4)),
    (
        BAMBA
        | {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_d_head": 32,
        },
        ("mamba2", 16, 1, 32, 128, 2, 3, 4),
    ),
    (
        {k: v for k, v in BAMBA.items() if k != "attn_layer_indices"} | {"model_type": "falcon_h1"},
        ("mamba2", 16, 1, 64, 128, 8, 8, 4),
    ),
    (ZAMBA, ("mamba2", 8, 2, 64, 64, 4, 4, 4)),
    (MAMBA2, ("mamba2", 128, 8, 64, 128, 6, 6, 4)),
    (KIMI, ("kimi_delta", 32, 32, 128, 128, 20, 27, 4)),
    (JAMBA, ("mamba1", 1, 1, 256, 16, 28, 32, 4)),
    (
        {
            "model_type": "falcon_mamba",
            "hidden_size": 64,
            "expand": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "num_hidden_layers": 3,
        },
        ("mamba1", 1, 1, 128, 16, 3, 3, 4),
    ),
]


@pytest.mark.parametrize(("config", "expected"), CONFIGS, ids=[c["model_type"] for c, _ in CONFIGS])
def test_a_configuration_is_read(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    sizes = (found.heads, found.key_heads, found.value_dim, found.key_dim)
    assert (found.family, *sizes, found.layers, found.all_layers, found.conv_kernel) == expected
    assert read_config(tmp_path / "config.json") == found
    assert found.name == tmp_path.name


@pytest.mark.parametrize(
    ("model_type", "heads", "state_bytes"),
    [
        # Defaults of transformers' classes; bytes of an FP32 state of one layer, by hand.
        ("mamba2", 128, 4 * 128 * 64 * 128),
        ("zamba2", 8, 4 * 8 * 640 * 64),
        ("granitemoehybrid", 128, 4 * 128 * 64 * 256),
        ("qwen3_next", 32, 4 * 32 * 128 * 128),
        ("olmo_hybrid", 30, 4 * 30 * 192 * 96),
        ("nemotron_h", 128, 4 * 128 * 64 * 128),
        ("bamba", 128, 4 * 128 * 64 * 256),
        ("falcon_h1", 128, 4 * 128 * 8 * 256),
        ("qwen3_5", 32, 4 * 32 * 128 * 128),
        ("qwen3_5_moe", 32, 4 * 32 * 128 * 128),
        ("kimi_linear", 32, 4 * 32 * 128 * 128),
        ("falcon_mamba", 1, 4 * 1536 * 16),
        ("mamba", 1, 4 * 1536 * 16),
        ("jamba", 1, 4 * 8192 * 16),
    ],
)
def test_configurations_that_transformers_saves(tmp_path, model_type, heads, state_bytes):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    found = read_config(tmp_path)
    assert (found.heads, 4 * found.shape.values) == (heads, state_bytes)
    assert found.conv_kernel == 4
    assert found.layers
    assert found.all_layers
    assert found.layers <= found.all_layers


def write(folder, text):
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "JSON"),
        ("[]", "model_type"),
        ('{"model_type": "llama"}', "model_type 'llama': expected one of"),
        ('{"model_type": "kimi_linear", "num_hidden_layers": 3}', "linear_num_heads"),
        (json.dumps(MAMBA2 | {"num_heads": 0}), "num_heads = 0.*above 0"),
        (json.dumps(MAMBA2 | {"n_groups": 3}), "key heads that divide"),
        (json.dumps(MAMBA2 | {"state_size": "128"}), "state_size = 128.*whole number"),
        (json.dumps(NEMOTRON | {"hybrid_override_pattern": "*-*-"}), "at least one recurrent layer"),
        (json.dumps(JAMBA | {"hidden_size": None}), "hidden_size"),
    ],
)
def test_a_configuration_that_says_too_little(tmp_path, text, complaint):
    with pytest.raises(InputError, match=complaint):
        read_config(write(tmp_path, text))


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(tmp_path)
    assert {"mamba2", "nemotron_h", "kimi_linear", "qwen3_5_moe", "falcon_h1"} <= set(READERS)
