"""Tiny random models with a byte tokenizer, built on the spot: they prove plumbing, they rank no policy.

Untrained matrices, but the decay parameters follow the original training init of each family: the init that
transformers gives to random models forgets its state within a token or two, so no state error could show.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import unknown_name

# Wide enough that the recurrence, not the token embedding alone, decides the logits (chosen by the effect
# of a 4-bit state on log-likelihoods; see tests/models/test_tiny.py).
_GAIN = 2.0
_STEP_SIZE_RANGE = (1e-3, 1e-1)  # log-uniform, mamba_ssm and flash-linear-attention alike
_STEP_SIZE_FLOOR = 1e-4


def build_tiny(kind: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a tiny model and its tokenizer to ``folder`` and return it.

    ``kind``: "mamba2" (two Mamba-2 layers, state 4 heads x 16 x 32) or "gated_delta" (two gated-delta
    layers and one attention layer, state 4 heads x 8 x 32).  The same kind and seed give the same weights
    with every supported release of transformers.  Raises InputError for another kind.
    """
    if kind not in TINY_KINDS:
        raise unknown_name("kind", kind, TINY_KINDS)
    folder = Path(folder)
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = TINY_KINDS[kind](
            {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "tie_word_embeddings": False,
            }
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialize(name, parameter, seed)
    model.float().eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte (ids 0 .. 255 in alphabet order) and <pad>, <bos>, <eos>; no file
    is read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def _mamba2(common: dict[str, Any]) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=16,
            state_size=32,
            n_groups=2,
            expand=2,
            chunk_size=32,
            **common,
        )
    )


def _gated_delta(common: dict[str, Any]) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=8,
            max_position_embeddings=8192,
            **common,
        )
    )


TINY_KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {"mamba2": _mamba2, "gated_delta": _gated_delta}


def _initialize(name: str, parameter: Tensor, seed: int) -> None:
    # Every tensor draws from its own generator, so that neither the order of parameters nor the init code
    # of a transformers release decides the weights.
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(key)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        low = (
            1.0 if ".mixer." in name else 0.01
        )  # mamba_ssm: U[1, 16]; flash-linear-attention: U(0, 16), kept off 0
        parameter.copy_((torch.rand(parameter.shape, generator=generator) * (16 - low) + low).log())
    elif leaf == "dt_bias":
        low, high = (math.log(end) for end in _STEP_SIZE_RANGE)
        step_size = (torch.rand(parameter.shape, generator=generator) * (high - low) + low).exp()
        step_size = step_size.clamp(min=_STEP_SIZE_FLOOR)
        parameter.copy_(step_size + torch.log(-torch.expm1(-step_size)))  # inverse of softplus
    elif parameter.ndim >= 2:
        fan_in = parameter[0].numel()
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * _GAIN / math.sqrt(fan_in))
