"""Decode inputs of a gated-delta model, recorded while it decodes text.

The model is ``quantlab.models.tiny``'s: random matrices, gates as the published layers initialise them.  Its keys and
queries come out of a convolution, a SiLU and a normalisation, as in a trained model; what they hold does not.
"""

import pydoc_data.topics
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantlab.drift import Stream
from quantlab.models.tiny import build_tiny, byte_tokenizer

OP = "torch_recurrent_gated_delta_rule"
TOPICS = ("assignment", "typesseq", "calls", "strings")


@dataclass(frozen=True)
class Captured:
    """A layer's decode inputs, and the state that the model itself had at their end."""

    stream: Stream
    last: Tensor


def capture(steps: int, prefill: int = 128, seed: int = 0) -> list[Captured]:
    """One stream a gated-delta layer: four texts, ``steps`` tokens each, behind a prefill.

    The stream starts from the model's own state after ``prefill`` tokens, and ends in its last one (tested).
    """
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(build_tiny("gated_delta", folder, seed))
    tokenizer = byte_tokenizer()
    texts = [pydoc_data.topics.topics[topic][: 2 * (steps + prefill)] for topic in TOPICS]
    tokens = torch.tensor([tokenizer(text)["input_ids"][: steps + prefill + 1] for text in texts])
    module = sys.modules[type(model).__module__]
    original = getattr(module, OP)
    calls: list[dict[str, Tensor]] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        output, state = original(q, k, v, **options)
        vectors = {"q": q, "k": k, "v": v, "log_decay": options["g"], "beta": options["beta"]}
        # The op keeps (key_dim, value_dim).
        calls.append(vectors | {"before": options["initial_state"].mT.clone(), "after": state.mT.clone()})
        return output, state

    setattr(module, OP, recording)
    try:
        with torch.inference_mode():
            past = model(tokens[:, :1], use_cache=True).past_key_values
            for t in range(1, tokens.shape[1]):
                past = model(tokens[:, t : t + 1], past_key_values=past, use_cache=True).past_key_values
    finally:
        setattr(module, OP, original)
    layers = len(calls) // (steps + prefill)
    return [_captured(calls[layer::layers][prefill:]) for layer in range(layers)]


def _captured(calls: list[dict[str, Tensor]]) -> Captured:
    arrays: dict[str, Any] = {
        name: torch.stack([call[name][:, 0] for call in calls])
        for name in ("q", "k", "v", "log_decay", "beta")
    }
    # The op normalises and scales; transformers 5.17 hands over one key a value head, later releases one a key head.
    for name, scale in (("k", 1.0), ("q", arrays["q"].shape[-1] ** -0.5)):
        x = arrays[name]
        arrays[name] = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * scale
    kept = {name: value.float().contiguous() for name, value in arrays.items()}
    stream = Stream("gated_delta", initial=calls[0]["before"].float().contiguous(), **kept)
    return Captured(stream, calls[-1]["after"])
