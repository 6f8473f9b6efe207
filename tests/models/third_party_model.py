"""A model that nobody here knows: its ops have names and layouts of their own, which it declares in this one file."""

import torch
from torch import nn

from quantlab.models.families import Family, OpCall, key_dim_swapped
from quantlab.recurrences import StepInputs


def their_step(state, decay, k, v, q):
    """One token: state (B, H, K, V) changes in place; k and q (B, H, K), v (B, H, V), decay (B, H)."""
    state.mul_(decay[..., None, None]).add_(k[..., :, None] * v[..., None, :])
    return torch.einsum("bhkv,bhk->bhv", state, q)


def their_scan(decay, k, v, q, *, start=None):
    """T tokens, with a token dim behind the batch: outputs (B, T, H, V) and the last state."""
    state = k.new_zeros(len(k), *k.shape[2:], v.shape[-1]) if start is None else start.clone()
    steps = [their_step(state, decay[:, t], k[:, t], v[:, t], q[:, t]) for t in range(k.shape[1])]
    return torch.stack(steps, 1), state


class Mixer(nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        generator = torch.Generator().manual_seed(layer_idx)
        self.layer_idx = layer_idx
        self.A_log = nn.Parameter(torch.rand(2, generator=generator) - 3)
        self.weight = nn.Parameter(torch.randn(8, 2 * (16 + 16 + 4), generator=generator) / 3)
        self.out = nn.Parameter(torch.randn(2 * 4, 8, generator=generator) / 6)

    def forward(self, x, cache):
        q, k, v = (x @ self.weight).unflatten(-1, (2, 36)).split([16, 16, 4], -1)
        decay = torch.exp(-self.A_log.exp()).expand(q.shape[:3])
        state = cache.layers[self.layer_idx].recurrent_states[0]
        if state is not None and x.shape[1] == 1:
            y = their_step(state, decay[:, 0], k[:, 0], v[:, 0], q[:, 0])[:, None]
        else:
            y, last = their_scan(decay, k, v, q, start=state)
            cache.update_recurrent_state(last, self.layer_idx)
        return x + torch.tanh(y.flatten(2) @ self.out / 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mixer(0), Mixer(1)])

    def forward(self, x, cache):
        for layer in self.layers:
            x = layer(x, cache)
        return x


def new_cache():
    from transformers import DynamicCache, MambaConfig

    return DynamicCache(config=MambaConfig(num_hidden_layers=2))


def _token(mixer, state, decay, k, v, q):
    return OpCall(state, StepInputs(q=q, k=k, v=v, log_decay=decay.log()), lambda output, _: output)


def _chunk(mixer, decay, k, v, q, *, start=None):
    return OpCall(
        start, StepInputs(q=q, k=k, v=v, log_decay=decay.log()), lambda outputs, state: (outputs, state)
    )


QUANTLAB_FAMILIES = (
    Family(
        "mamba2",
        step_op="their_step",
        prefill_op="their_scan",
        prefill_state="start",
        to_state=key_dim_swapped,
        to_model=key_dim_swapped,
        token_inputs=_token,
        chunk_inputs=_chunk,
        key_heads=lambda mixer, decay, k, *_, **__: k.shape[2],
    ),
)
