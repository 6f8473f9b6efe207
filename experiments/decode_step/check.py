"""Does a model decode on the GPU as on the CPU?  Asked of a few layers of each kind, in float32."""

from collections.abc import Sequence
from typing import Any

import torch

from experiments.decode_step.models import nano_4b, random_model
from quantlab.models import DecodeGraph

PROMPT = 3
VOCABULARY = 512


def cut(name: str) -> Any:
    """A builder of the model with one layer of each kind (and one more recurrent one), and a small vocabulary."""
    import transformers as t

    if name == "nano_4b":
        return lambda: nano_4b("M-*M", vocab_size=VOCABULARY, num_attention_heads=10, num_key_value_heads=2)
    if name == "nano_30b":
        return lambda: nano_4b(
            "ME*M",
            vocab_size=VOCABULARY,
            hidden_size=2688,
            mamba_num_heads=64,
            mamba_head_dim=64,
            num_attention_heads=32,
            num_key_value_heads=2,
            n_routed_experts=16,
            num_experts_per_tok=6,
            moe_intermediate_size=464,
            moe_shared_expert_intermediate_size=928,
        )
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    common: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": kinds, "vocab_size": VOCABULARY}
    if name == "qwen35_4b":
        config = t.Qwen3_5TextConfig(hidden_size=2560, intermediate_size=2304, **common)
        return lambda: t.Qwen3_5ForCausalLM(config)
    padding: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = t.KimiLinearConfig(num_local_experts=16, intermediate_size=2304, **common, **padding)
    return lambda: t.KimiLinearForCausalLM(config)


@torch.no_grad()
def difference(name: str, device: torch.device, batch: int, steps: int, policies: Sequence[str]) -> float:
    """The largest difference of a logit over ``steps`` forced tokens, graph against CPU, over the largest logit."""
    on_cpu = random_model(cut(name), torch.device("cpu"), torch.float32)
    ids = torch.randint(0, VOCABULARY, (batch, PROMPT + steps), generator=torch.Generator().manual_seed(1))
    expected = {
        policy: _forced(DecodeGraph(on_cpu, policy, batch, PROMPT + steps), ids) for policy in policies
    }
    on_gpu = on_cpu.to(device)
    worst = 0.0
    for policy, logits in expected.items():
        found = _forced(DecodeGraph(on_gpu, policy, batch, PROMPT + steps), ids.to(device)).cpu()
        worst = max(worst, float((found - logits).abs().max() / logits.abs().max()))
    return worst


def _forced(graph: DecodeGraph, ids: torch.Tensor) -> torch.Tensor:
    logits = [graph.prefill(ids[:, :PROMPT]).clone()]
    logits += [graph.step(ids[:, t]).clone() for t in range(PROMPT, ids.shape[1])]
    return torch.stack(logits, 1)
