"""Layers that call flash-linear-attention's ops as its own do, and plain torch in place of its Triton kernels.

Written from the signatures and the documented formulas of flash-linear-attention 0.5.2: the recurrent op below 65
tokens, raw gates, a state of (N, H, V, K), a padded batch as one packed row, a cache that keeps the state it is given.
"""

import torch
import torch.nn.functional as F
from torch import nn


def _run(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state,
    output_final_state,
    cu_seqlens,
    allow_neg_eigval,
    lower_bound=None,
):
    """The delta rule, token by token; g (B, T, H) or (B, T, H, K)."""
    if cu_seqlens is not None:
        spans = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        parts = [
            _run(
                *(t[:, first:last] for t in (q, k, v, g, beta)),
                A_log,
                dt_bias,
                None if initial_state is None else initial_state[i : i + 1],
                True,
                None,
                allow_neg_eigval,
                lower_bound,
            )
            for i, (first, last) in enumerate(spans)
        ]
        states = torch.cat([state for _, state in parts])
        return torch.cat([o for o, _ in parts], 1), states if output_final_state else None
    heads = v.shape[2]
    q, k = (F.normalize(t, dim=-1, eps=1e-3).repeat_interleave(heads // t.shape[2], 2) for t in (q, k))
    g = g + dt_bias.view(g.shape[2:])
    rate = A_log.exp().view(-1, *[1] * (g.ndim - 3))
    g = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    decay = g.exp() if g.ndim == 4 else g.exp()[..., None]
    beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    state = k.new_zeros(len(k), heads, v.shape[-1], k.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(k.shape[1]):
        state = state * decay[:, t, :, None, :]
        delta = beta[:, t, :, None] * (v[:, t] - (state @ k[:, t, :, :, None])[..., 0])
        state = state + delta[..., :, None] * k[:, t, :, None, :]
        outputs.append((state @ q[:, t, :, :, None])[..., 0] * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, A_log, dt_bias, initial_state, output_final_state, cu_seqlens, allow_neg_eigval, **_
):
    return _run(
        q, k, v, g, beta, A_log, dt_bias, initial_state, output_final_state, cu_seqlens, allow_neg_eigval
    )


def chunk_gated_delta_rule(**call):
    return fused_recurrent_gated_delta_rule(**call)


def fused_recurrent_kda(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state,
    output_final_state,
    cu_seqlens,
    allow_neg_eigval,
    lower_bound,
    **_,
):
    return _run(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        output_final_state,
        cu_seqlens,
        allow_neg_eigval,
        lower_bound,
    )


def chunk_kda(**call):
    return fused_recurrent_kda(**call)


class Layer(nn.Module):
    """2 key heads, 4 value heads, K 16, V 8; ``kimi``: a gate a key channel."""

    def __init__(self, layer_idx, *, kimi, allow_neg_eigval=False, lower_bound=None):
        super().__init__()
        self.layer_idx, self.kimi = layer_idx, kimi
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, lower_bound
        generator = torch.Generator().manual_seed(layer_idx)
        gates = 64 if kimi else 4
        self.widths = [32, 32, 32, gates, 4]
        self.weight = nn.Parameter(torch.randn(12, sum(self.widths), generator=generator) / 4)
        self.out = nn.Parameter(torch.randn(32, 12, generator=generator) / 4)
        self.A_log = nn.Parameter(torch.rand(4, generator=generator) - 1)
        self.dt_bias = nn.Parameter(torch.rand(gates, generator=generator) - 3)

    def forward(self, x, mask=None, cache=None):
        batch, length, _ = x.shape
        offsets, kept = None, None
        if mask is not None:
            kept = mask[:, -length:].bool()
            offsets = F.pad(kept.sum(1).cumsum(0), (1, 0))
            x = x[kept][None]
        q, k, v, g, beta = (x @ self.weight).split(self.widths, -1)
        call = {
            "q": q.unflatten(-1, (2, 16)),
            "k": k.unflatten(-1, (2, 16)),
            "v": v.unflatten(-1, (4, 8)),
            "g": g.unflatten(-1, (4, 16)) if self.kimi else g,
            "beta": beta,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "initial_state": cache.get(self.layer_idx),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": True,
            "cu_seqlens": offsets,
        }
        if self.kimi:
            op = fused_recurrent_kda if length <= 64 else chunk_kda
            o, state = op(**call, lower_bound=self.lower_bound)
        else:
            op = fused_recurrent_gated_delta_rule if length <= 64 else chunk_gated_delta_rule
            o, state = op(**call)
        cache[self.layer_idx] = state
        y = x + torch.tanh(o.flatten(2) @ self.out)
        if kept is None:
            return y
        padded = y.new_zeros(batch, length, y.shape[-1])
        padded[kept] = y[0]
        return padded


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList([Layer(0, **options), Layer(1, **options)])

    def forward(self, x, mask=None, cache=None):
        for layer in self.layers:
            x = layer(x, mask, cache)
        return x
