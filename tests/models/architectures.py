"""What the tests know of each architecture by themselves, and how they run a model whatever its signature."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from quantlab.models.interception import cache_keyword


@dataclass(frozen=True)
class Architecture:
    """layers: the recurrent ones.  key_dim: the dim of the model's own state that decays and writes share with keys.
    shape: heads, value dim, key dim.  key_heads: distinct ones.  mask: whether a decode step takes a padding mask.
    """

    family: str
    layers: tuple[int, ...]
    key_dim: int
    shape: tuple[int, int, int]
    key_heads: int
    mask: bool = True


MAMBA2 = ("mamba2", (0, 1), 3, (4, 16, 32), 2)
DELTA = ("gated_delta", (0, 1), 2, (4, 8, 32), 2)
MAMBA1 = ("mamba1", (0, 1), 2, (1, 32, 16), 1, False)
ARCHITECTURES = {
    "mamba2": Architecture(*MAMBA2),
    "nemotron_h": Architecture("mamba2", (0, 2), *MAMBA2[2:]),
    "bamba": Architecture(*MAMBA2),
    "falcon_h1": Architecture(*MAMBA2),
    "zamba2": Architecture("mamba2", (0, 1, 2), *MAMBA2[2:]),
    "granitemoehybrid": Architecture(*MAMBA2),
    "qwen3_next": Architecture(*DELTA),
    "qwen3_5": Architecture(*DELTA),
    "qwen3_5_moe": Architecture(*DELTA),
    "olmo_hybrid": Architecture(*DELTA),
    "kimi_linear": Architecture("kimi_delta", (0, 1), 2, (2, 32, 32), 2),
    "mamba": Architecture(*MAMBA1),
    "falcon_mamba": Architecture(*MAMBA1),
}
# These run in the fast tier: each op but the gated delta rule's, which the tests of interception run, and the one call
# that hands its gate to the Mamba-2 op.
FAST = ("falcon_h1", "kimi_linear", "mamba")


@torch.no_grad()
def forward(
    model, ids: Tensor, cache: DynamicCache, mask: Tensor | None = None, past: int = 0, **options
) -> Tensor:
    """Logits (B, T, vocabulary) of ids (B, T) behind ``past`` tokens.  mask: (B, past + T), 0 = padding."""
    keywords = {cache_keyword(model): cache, "use_cache": True, **options}
    if mask is not None:
        keywords["attention_mask"] = mask
    # Some models number the tokens of a second chunk from 0 if nobody tells them.
    if "position_ids" in inspect.signature(model.forward).parameters:
        length = past + ids.shape[1]
        positions = (
            torch.arange(length).expand(len(ids), -1) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        )
        keywords["position_ids"] = positions[:, past:]
    return model(ids, **keywords).logits


def decode(
    model, ids: Tensor, prompt: int, *, mask: Tensor | None = None, chunks: tuple[int, ...] = (), masked=True
):
    """Logits after the prompt and after each token behind it: (B, T - prompt + 1, vocabulary).

    chunks: where the prompt is split.  masked: whether steps are given the mask too.
    """
    cache, logits, past = DynamicCache(config=model.config), [], 0
    for end in (*chunks, *range(prompt, ids.shape[1] + 1)):
        seen = mask[:, :end] if mask is not None and (masked or past < prompt) else None
        logits.append(forward(model, ids[:, past:end], cache, seen, past)[:, -1])
        past = end
    return torch.stack(logits[len(chunks) :], 1)
