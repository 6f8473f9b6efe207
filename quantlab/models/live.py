"""Decays as models are trained from: the init of transformers gives most random models dead recurrences.

Its random models forget their state within a token or two (a median decay of 1e-4 and less), so that no error of a
state could show.  The original inits, of mamba_ssm and of flash-linear-attention, keep a state for tens of tokens.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from quantlab.models.recurrent_layers import recurrent_layers

_STEP_SIZE_RANGE = (1e-3, 1e-1)  # log-uniform, mamba_ssm and flash-linear-attention alike
_STEP_SIZE_FLOOR = 1e-4
# Uniform A of mamba_ssm's Mamba-2 and of KDA; of gated delta layers U(0, 16), kept off 0.
_LOWEST_A = {"mamba2": 1.0, "gated_delta": 0.01, "kimi_delta": 1.0}
_HIGHEST_A = 16.0


@torch.no_grad()
def live_recurrence(model: nn.Module, seed: int = 0) -> set[str]:
    """Set the decay parameters of every recurrent layer to the original training init of its family; returns their
    names.

    Mamba-2, gated delta, KDA: A uniform to 16, step size log-uniform from 1e-3 to 1e-1 (dt_bias is its inverse
    softplus).  Mamba-1: A = 1 .. N in every channel, the step size as before in the bias of ``dt_proj``.  The same seed
    and parameter names give the same values on every device.  Raises InputError for a model without recurrent layers.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = set()
    for layer in recurrent_layers(model).values():
        family = layer.family.recurrence
        for parameter in layer.module.parameters():
            name = names[id(parameter)]
            if name.endswith("A_log"):
                values = _decay_rates(parameter, family, generator_of(name, seed))
            elif name.endswith("dt_bias") or (family == "mamba1" and name.endswith("dt_proj.bias")):
                values = _step_sizes(parameter, generator_of(name, seed))
            else:
                continue
            parameter.copy_(values)
            found.add(name)
    return found


def generator_of(name: str, seed: int) -> torch.Generator:
    """Random numbers of one parameter: neither the order of the parameters nor a release decides them."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(key)


def _decay_rates(parameter: Tensor, family: str, generator: torch.Generator) -> Tensor:
    """log A."""
    if family == "mamba1":
        return torch.arange(1, parameter.shape[-1] + 1, dtype=torch.float32).log().expand(parameter.shape)
    low = _LOWEST_A[family]
    return (torch.rand(parameter.shape, generator=generator) * (_HIGHEST_A - low) + low).log()


def _step_sizes(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """The inverse of softplus of a step size."""
    low, high = (math.log(end) for end in _STEP_SIZE_RANGE)
    step_size = (torch.rand(parameter.shape, generator=generator) * (high - low) + low).exp()
    step_size = step_size.clamp(min=_STEP_SIZE_FLOOR)
    return step_size + torch.log(-torch.expm1(-step_size))
