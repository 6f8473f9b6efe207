"""Models of published geometry with random weights and live recurrences; only the shapes matter to a time.

Sizes are those of the models' public configurations; of Kimi-Linear it is one block of four layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantlab.models import live_recurrence

NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention", "E": "moe"}


@dataclass(frozen=True)
class Geometry:
    """build(): the model on the default device, in the default dtype.  attention, mlp: class names of the modules that
    the split leaves out in turn.
    """

    build: Callable[[], Any]
    attention: str
    mlp: tuple[str, ...]


def _nemotron(pattern: str, **sizes: Any) -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    common: dict[str, Any] = {
        "head_dim": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "vocab_size": 131072,
    }
    kinds = [_KINDS[symbol] for symbol in pattern]
    return NemotronHForCausalLM(NemotronHConfig(layers_block_type=kinds, **(common | sizes)))


def nano_4b(pattern: str = NANO_4B, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 3136,
        "intermediate_size": 12544,
        "mamba_num_heads": 96,
        "mamba_head_dim": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    }
    return _nemotron(pattern, **(sizes | changes))


def nano_30b() -> Any:
    return _nemotron(
        NANO_30B,
        hidden_size=2688,
        intermediate_size=1856,
        mamba_num_heads=64,
        mamba_head_dim=64,
        num_attention_heads=32,
        num_key_value_heads=2,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    )


def qwen35_4b() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 8
    sizes: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "layer_types": kinds,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, tie_word_embeddings=True))


def kimi_block() -> Any:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return KimiLinearForCausalLM(KimiLinearConfig(num_hidden_layers=4, layer_types=kinds))


MODELS = {
    "nano_4b": Geometry(nano_4b, "NemotronHAttention", ("NemotronHMLP",)),
    "nano_30b": Geometry(nano_30b, "NemotronHAttention", ("NemotronHMoE",)),
    "qwen35_4b": Geometry(qwen35_4b, "Qwen3_5Attention", ("Qwen3_5MLP",)),
    "kimi_block": Geometry(kimi_block, "KimiLinearAttention", ("KimiLinearMLP", "KimiLinearMoE")),
}


def random_model(
    build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Any:
    """A model with transformers' own random weights, drawn on the device, and decays as trained models begin with."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = build()
    finally:
        torch.set_default_dtype(before)
    live_recurrence(model, seed)
    return model.eval()
