"""The reference models: small configurations of transformers' own classes, and their names.

1.35 to 1.5 million parameters: hidden size 256, three layers of a recurrent mixer and an MLP.  States are a few heads
of 16 or 32 values by 32 or 64 keys, so that facts crowd them.

transformers asks the cache of these classes how many tokens it holds, which attention layers alone know.  The models
without attention therefore end in an attention layer of one head whose output matrix is zero and stays so: nothing of
what it sees reaches the logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantlab.models import live_recurrence
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.models.reference import vocabulary

HIDDEN, LAYERS = 256, 3


@dataclass(frozen=True)
class Kind:
    """One architecture.

    config: class of transformers' configuration; model: of the model; fields: of the configuration.  inert: whether its
    attention is to have no effect.
    """

    config: str
    model: str
    fields: dict[str, Any]
    inert: bool = True

    def build(self) -> nn.Module:
        import transformers

        return getattr(transformers, self.model)(getattr(transformers, self.config)(**_COMMON, **self.fields))


_COMMON: dict[str, Any] = {
    "vocab_size": vocabulary.VOCABULARY_SIZE,
    "hidden_size": HIDDEN,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
}
_NEMOTRON: dict[str, Any] = {
    "intermediate_size": 480,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 64,
    "n_groups": 1,  # the gated norm of several groups differs between releases of transformers
    "conv_kernel": 4,
    "chunk_size": 64,
    # A prefill of this class clamps step sizes from below, its decode step does not: leave nothing to clamp.
    "time_step_min": 1e-12,
}
_ONE_HEAD: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
_LAYERS = ["linear_attention"] * LAYERS + ["full_attention"]


def _nemotron(pattern: str, inert: bool, **fields: Any) -> Kind:
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    fields |= {"layers_block_type": [names[symbol] for symbol in pattern]}
    return Kind("NemotronHConfig", "NemotronHForCausalLM", _NEMOTRON | fields, inert)


KINDS = {
    # Without attention, twice the keys of the hybrid: at 64 right letters end at 89 to 95 %.
    "mamba2": _nemotron("M-M-M-*", True, ssm_state_size=128, **_ONE_HEAD),
    "hybrid": _nemotron("M-*-M-", False, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "gated_delta": Kind(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "num_hidden_layers": LAYERS + 1,
            "layer_types": _LAYERS,
            "intermediate_size": 320,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            **_ONE_HEAD,
        },
    ),
    "kimi_delta": Kind(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": LAYERS + 1,
            "layer_types": _LAYERS,
            "mlp_layer_types": ["dense"] * (LAYERS + 1),
            "intermediate_size": 320,
            "linear_num_heads": 2,
            "linear_head_dim": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}


def initial_model(kind: str, seed: int, device: torch.device) -> Any:
    """A model before training: matrices of standard deviation 1 / sqrt(fan-in), embeddings of 0.02, decays of the
    original init of each family.
    """
    torch.manual_seed(seed)
    build: Callable[[], Any] = KINDS[kind].build
    model = build().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                small = "embed" in name
                parameter.copy_(noise * (0.02 if small else parameter.shape[-1] ** -0.5))
            elif name.endswith("bias") and "dt_bias" not in name:
                parameter.zero_()
    live_recurrence(model, seed)
    if KINDS[kind].inert:
        for name, parameter in attention_parameters(model):
            parameter.requires_grad_(False)
            if "o_proj" in name:
                parameter.data.zero_()
    return model.to(device)


def attention_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Of attention layers, by name."""
    recurrent = {id(layer.module) for layer in recurrent_layers(model).values()}
    for prefix, part in model.named_modules():
        if type(part).__name__.endswith("Attention") and id(part) not in recurrent:
            for name, parameter in part.named_parameters():
                yield f"{prefix}.{name}", parameter
