"""The chunk form: many tokens at once on a dense state, by the matrix products that prefill uses.

A chunk of C tokens from the state S_0 (g_j the cumulative log decay inside the chunk):

    o_j = S_0 exp(g_j) q_j + sum_{i<=j} (q_j . exp(g_j - g_i) k_i) d_i
    S_C = S_0 exp(g_C) + sum_i d_i (x) exp(g_C - g_i) k_i

d_i = v_i, or for a delta rule the solution of the triangular system in ``window.solve_deltas``.  Source: the SSD form
of Mamba-2 (arXiv 2405.21060, section 6), the chunkwise delta rule (arXiv 2406.06484; gated: 2412.06464, eq. 11-14).
"""

import torch
from torch import Tensor

from quantlab.recurrences.base import DecayAxis, Records, Recurrence, StepInputs
from quantlab.recurrences.window import EMPTY, fold, read_tokens

# Products inside a chunk grow with its square; with a decay a key channel they hold key_dim numbers a pair of tokens.
CHUNK = {DecayAxis.HEAD: 64, DecayAxis.KEY: 16, DecayAxis.ELEMENT: 64}


def chunk(
    recurrence: Recurrence,
    state: Tensor,
    tokens: StepInputs,
    rates: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state after T tokens and their outputs: (batch, heads, value_dim, key_dim), (batch, T, heads, value_dim).

    tokens: with a token dimension T after the batch.  lengths: (batch,) integers, tokens of each row that count; what
    stands behind them is ignored, NaN too, and has output 0.
    """
    if lengths is not None:
        tokens = keep_first(tokens, lengths)
    count, size, outputs = tokens.v.shape[1], CHUNK[recurrence.axis], []
    for first in range(0, count, size):
        part = tokens.map(lambda t, first=first: t[:, first : first + size])
        d, output = read_tokens(recurrence, state, EMPTY, part, rates)
        state = fold(recurrence, state, Records(part.k, d, part.log_decay), rates)
        outputs.append(output)
    if not outputs:
        return state, torch.zeros_like(tokens.v)
    return state, torch.cat(outputs, 1)


def keep_first(tokens: StepInputs, lengths: Tensor) -> StepInputs:
    """Tokens behind ``lengths`` made to change nothing: no decay, nothing written, nothing read."""
    used = torch.arange(tokens.v.shape[1], device=lengths.device) < lengths[:, None]
    if bool(used.all()):
        return tokens
    return tokens.map(lambda t: torch.where(used.view(*used.shape, *[1] * (t.ndim - 2)), t, 0.0))
