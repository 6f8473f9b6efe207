"""Tiny random models with a byte tokenizer, built on the spot: they prove plumbing, they rank no policy.

Untrained matrices, but the decay parameters follow the original training init of each family: the init that
transformers gives to random models forgets its state within a token or two, so no state error could show.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import unknown_name
from quantlab.models.live import generator_of, live_recurrence
from quantlab.models.tiny_kinds import TINY_KINDS


def build_tiny(kind: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a tiny model and its tokenizer to ``folder`` and return it.

    ``kind``: a model type of transformers in ``TINY_KINDS``, such as "mamba2" (two Mamba-2 layers, state 4 heads x 16 x
    32), "qwen3_5" (two gated-delta layers and one attention layer, state 4 heads x 8 x 32), "kimi_linear" or "mamba".
    "gated_delta" is "qwen3_5" with larger matrices.  The same kind and seed give the same weights with every supported
    release of transformers.  Raises InputError for another kind.
    """
    if kind not in TINY_KINDS:
        raise unknown_name("kind", kind, TINY_KINDS)
    folder = Path(folder)
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = TINY_KINDS[kind].build(
            {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "tie_word_embeddings": False,
            }
        )
    decays = live_recurrence(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in decays:
                _initialize(name, parameter, TINY_KINDS[kind].gain, seed)
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


def _initialize(name: str, parameter: Tensor, gain: float, seed: int) -> None:
    if parameter.ndim >= 2:
        # Experts are stacked in front of their matrices, and a convolution has one input channel: the last dim is what
        # a product sums over in all of them.
        noise = torch.randn(parameter.shape, generator=generator_of(name, seed))
        parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))
    elif name.endswith(".bias"):
        parameter.zero_()
