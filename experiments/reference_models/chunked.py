"""The recurrences over a whole sequence, all chunks at once where they do not depend on each other.

The same equations as ``quantlab.recurrences.chunk``, which goes from chunk to chunk: here products inside of chunks are
one call for all of them, and only the state passes from one to the next.  Made for training: fewer launches, gradients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.recurrences import StepInputs
from quantlab.recurrences.base import DecayAxis, Recurrence, expand_groups

CHUNK = {DecayAxis.HEAD: 64, DecayAxis.KEY: 16}


def outputs(recurrence: Recurrence, tokens: StepInputs) -> Tensor:
    """Outputs (batch, T, heads, value_dim) from a state of zeros; tokens with a token dimension after the batch."""
    size = CHUNK[recurrence.axis]
    count, heads = tokens.v.shape[1], tokens.v.shape[2]
    padding = -count % size

    def chunks(x: Tensor) -> Tensor:
        """(batch, T, H, *) -> (batch, H, chunks, size, *)"""
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
        return x.unflatten(1, (-1, size)).movedim(3, 1)

    q, k = (chunks(expand_groups(x, heads, 2)) for x in (tokens.q, tokens.k))
    v, log_decay = chunks(tokens.v), chunks(tokens.log_decay)
    since = log_decay.cumsum(3)  # the log decay since the chunk began
    whole = since[:, :, :, -1:]
    ones = torch.ones(size, size, dtype=torch.bool, device=v.device)
    upto, before = ones.tril(), ones.tril(-1)
    if recurrence.axis is DecayAxis.HEAD:
        gap = (since[..., :, None] - since[..., None, :]).masked_fill(~upto, -torch.inf).exp()
        reads, writes = (x @ k.mT * gap for x in (q, k))
        since, whole = since[..., None], whole[..., None]
    else:
        gap = since[..., :, None, :] - since[..., None, :, :]
        gap = gap.masked_fill(~upto[..., None], -torch.inf).exp() * k[..., None, :, :]
        reads, writes = ((x[..., :, None, :] * gap).sum(-1) for x in (q, k))
    reading, left = q * since.exp(), k * (whole - since).exp()
    decay = whole.exp()  # (batch, H, chunks, 1, 1 or key_dim)
    if recurrence.delta_rule:
        assert tokens.beta is not None
        beta = chunks(tokens.beta)[..., None]
        system = torch.eye(size, device=v.device, dtype=v.dtype) + (beta * writes).masked_fill(~before, 0.0)
        right = torch.cat([beta * v, beta * k * since.exp()], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    else:
        erased = None
    state = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1])
    found = []
    for c in range(v.shape[2]):
        d = v[:, :, c] if erased is None else v[:, :, c] - erased[:, :, c] @ state.mT
        found.append(reading[:, :, c] @ state.mT + reads[:, :, c] @ d)
        state = state * decay[:, :, c] + d.mT @ left[:, :, c]
    return torch.cat(found, 2)[:, :, :count].movedim(1, 2)
