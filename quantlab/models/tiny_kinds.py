"""The tiny models, one row an architecture: its classes in transformers, and widths that build in every release.

State sizes are a few heads of 8 to 16 values by 32 keys: two blocks of NVFP4 along the key dim.  Key heads are fewer
than value heads where the architecture allows it, and key dim and value dim differ, so that a mixed-up layout shows.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TinyKind:
    """One architecture: names of its config and model class, the config's fields, and the gain of random matrices.

    A gain of 1 keeps the size of what a matrix is applied to.  The more, the more the recurrence decides the logits,
    and the more the rounding of float32 grows on the way through the layers.
    """

    config: str
    model: str
    fields: dict[str, Any]
    gain: float = 0.7

    def build(self, common: dict[str, Any]) -> Any:
        """The model with random weights; ``common``: further fields of its config."""
        import transformers

        config = getattr(transformers, self.config)(**self.fields, **common)
        return getattr(transformers, self.model)(config)


# Chosen by the effect of a 4-bit state on log-likelihoods.
_WIDE_GAIN = 2.0
_LAYERS = ["linear_attention", "linear_attention", "full_attention"]
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
_MLP = {"hidden_size": 32, "intermediate_size": 64}
_POSITIONS = {"max_position_embeddings": 8192}
# Heads x value dim 4 x 16 = 2 x hidden, key dim 32, two groups; as the Bamba configuration names them.
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}
_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_QWEN = (
    _MLP
    | _ATTENTION
    | _POSITIONS
    | _DELTA_RULE
    | {"num_hidden_layers": 3, "layer_types": _LAYERS, "head_dim": 16}
)
_MAMBA1 = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 16, "time_step_rank": 4}

TINY_KINDS: dict[str, TinyKind] = {
    "mamba2": TinyKind(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 32,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 32,
        },
        _WIDE_GAIN,
    ),
    "nemotron_h": TinyKind(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        _MLP
        | _ATTENTION
        | _POSITIONS
        | {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 32,
            "n_groups": 2,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "bamba": TinyKind(
        "BambaConfig",
        "BambaForCausalLM",
        _MLP | _ATTENTION | _POSITIONS | _MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [2]},
    ),
    "falcon_h1": TinyKind(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        _MLP | _ATTENTION | _POSITIONS | _MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
    ),
    "zamba2": TinyKind(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        _MLP
        | _POSITIONS
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_attention_heads": 2,
            "n_mamba_heads": 4,
            "mamba_d_state": 32,
            "mamba_ngroups": 2,
            "chunk_size": 32,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "granitemoehybrid": TinyKind(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MLP
        | _ATTENTION
        | _POSITIONS
        | _MAMBA2
        | {
            "num_hidden_layers": 3,
            "layer_types": _LAYERS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "qwen3_next": TinyKind(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _QWEN | _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": TinyKind("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN),
    "qwen3_5_moe": TinyKind(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {name: value for name, value in _QWEN.items() if name != "intermediate_size"}
        | _EXPERTS
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "olmo_hybrid": TinyKind(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        _MLP
        | _ATTENTION
        | _POSITIONS
        | _DELTA_RULE
        | {"num_hidden_layers": 3, "layer_types": _LAYERS, "rope_parameters": None},
    ),
    "kimi_linear": TinyKind(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _MLP
        | _POSITIONS
        | {
            "num_hidden_layers": 3,
            "layer_types": _LAYERS,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
        },
    ),
    "mamba": TinyKind("MambaConfig", "MambaForCausalLM", _MAMBA1),
    "falcon_mamba": TinyKind("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA1),
}
# The model of the built-in evaluations, whose weights stay what they were.
TINY_KINDS["gated_delta"] = replace(TINY_KINDS["qwen3_5"], gain=_WIDE_GAIN)
