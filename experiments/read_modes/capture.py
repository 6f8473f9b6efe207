"""Decode inputs of a gated-delta model, recorded while it decodes text.

The model is ``quantlab.models.tiny``'s: random matrices, gates as the published layers initialise them.  Its keys and
queries come out of a convolution, a SiLU and a normalisation, as in a trained model; what they hold does not.
"""

import pydoc_data.topics
import tempfile

import torch

from quantlab.drift import Stream
from quantlab.models.capture import capture as capture_streams
from quantlab.models.tiny import build_tiny, byte_tokenizer

TOPICS = ("assignment", "typesseq", "calls", "strings")


def capture(steps: int, prefill: int = 129, seed: int = 0) -> list[Stream]:
    """One stream a gated-delta layer: four texts, ``steps`` tokens each, behind a prefill."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(build_tiny("gated_delta", folder, seed))
    tokenizer = byte_tokenizer()
    texts = [pydoc_data.topics.topics[topic][: 2 * (steps + prefill)] for topic in TOPICS]
    tokens = torch.tensor([tokenizer(text)["input_ids"][: steps + prefill] for text in texts])
    streams = capture_streams(model, tokens, prefill=prefill, steps=steps)
    return [streams[layer] for layer in sorted(streams)]
