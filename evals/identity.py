"""Which model, tokenizer and software a number comes from, as short hashes that name no folder."""

import hashlib
import json
from importlib.metadata import version
from typing import Any

from torch import nn

_SAMPLED = 64
"""Values of each weight that enter the hash, evenly spread: a checkpoint of gigabytes is not read for it."""
_NOT_IDENTITY = ("_name_or_path", "name_or_path", "transformers_version")


def model_identity(model: nn.Module) -> str:
    """Hash of the configuration, the weights' names, shapes and dtypes, and 64 values of each."""
    digest = hashlib.sha256(type(model).__name__.encode())
    config: Any = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    settings = {name: value for name, value in settings.items() if name not in _NOT_IDENTITY}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash of how text becomes tokens."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    text = core.to_str() if core is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def software() -> dict[str, str]:
    """Versions of what computes a sample."""
    return {name: version(name) for name in ("torch", "transformers", "lm_eval", "quantlab")}
