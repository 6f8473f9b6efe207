"""Streams of a delta rule in which one statistic of keys, queries or values is varied at a time."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.drift import Stream
from quantlab.recurrences import StepInputs, get_recurrence

PREFILL = 256
HEADS, SEQUENCES, KEY_DIM, VALUE_DIM = 8, 2, 128, 32


@dataclass(frozen=True)
class Statistics:
    """How a stream is drawn; everything else is the unit Gaussian protocol (keys and queries uniform on the sphere).

    alpha: decay a token.  mean: share of the squared length of every key and query that lies along one direction of its
    head.  rank: keys lie in a subspace of that dimension; queries too, unless ``free_queries``.  recent: probability
    that the query is the key of one of the last eight tokens.  own: share of the query along the token's own key.
    near: values within 1 % of what the state holds (d is then that small), else N(0, 1).
    """

    alpha: float = 0.99
    mean: float = 0.0
    rank: int | None = None
    free_queries: bool = False
    recent: float = 0.0
    own: float = 0.0
    near: bool = False
    family: str = "gated_delta"


def draw(s: Statistics, steps: int, seed: int = 0) -> Stream:
    """A stream of ``steps`` tokens whose prefill state is that of 256 tokens of the same statistics."""
    generator = torch.Generator().manual_seed(seed)
    total, lead = PREFILL + steps, (PREFILL + steps, SEQUENCES, HEADS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(normal(HEADS, KEY_DIM, KEY_DIM))[0]
    if s.rank is not None:
        basis = basis[..., : s.rank]

    def vectors(free: bool) -> Tensor:
        if free or s.rank is None:
            x = F.normalize(normal(*lead, KEY_DIM), dim=-1)
        else:
            x = F.normalize(torch.einsum("hkr,tbhr->tbhk", basis, normal(*lead, s.rank)), dim=-1)
        return math.sqrt(s.mean) * basis[..., 0] + math.sqrt(1 - s.mean) * x

    k, q = F.normalize(vectors(False), dim=-1), F.normalize(vectors(s.free_queries), dim=-1)
    if s.recent:
        back = torch.randint(1, 9, lead, generator=generator)
        at = (torch.arange(total)[:, None, None] - back).clamp_min(0)
        earlier = k.gather(0, at[..., None].expand_as(k))
        repeated = torch.rand(lead, generator=generator) < s.recent
        q = torch.where(repeated[..., None], earlier, q)
    q = F.normalize(math.sqrt(s.own) * k + math.sqrt(1 - s.own) * q, dim=-1)
    beta = torch.sigmoid(normal(*lead))
    log_decay = torch.full(lead, math.log(s.alpha), dtype=torch.float64)
    if s.family == "kimi_delta":
        # Channels of a head forget at rates of their own, a factor of nine apart.
        rates = torch.logspace(-0.5, 0.5, KEY_DIM, base=9.0, dtype=torch.float64)
        log_decay = log_decay[..., None] * rates
    v, relative = normal(*lead, VALUE_DIM), 1 + 0.01 * normal(*lead, VALUE_DIM)
    recurrence = get_recurrence(s.family)
    state = initial = torch.zeros(SEQUENCES, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float64)
    for t in range(total):
        if t == PREFILL:
            initial = state
            if not s.near:
                break
        # The state must first hold something: the prefill of a stream with values near S k writes new ones.
        if s.near and t >= PREFILL:
            decayed = recurrence.decay(log_decay[t]) * state
            v[t] = torch.matmul(decayed, k[t][..., None])[..., 0] * relative[t]
        state, _ = recurrence.step(state, StepInputs(q[t], k[t], v[t], log_decay[t], beta[t]))
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    kept: dict[str, Any] = {name: value[PREFILL:].float().contiguous() for name, value in arrays.items()}
    return Stream(s.family, initial=initial.float(), **kept)


def erased(stream: Stream, window: int) -> float:
    """What is left of a read error's power after the window has erased along its keys, on average over a window.

    The error E of a read copy that serves S k as well as S q moves through the recurrence itself: after the tokens
    1 .. n of a window it is E prod(decay (I - beta k k^T)), and the n-th output is off by that times q.  With S k from
    the checkpoint it is E prod(decay).  For an E without preferred direction the power ratio of the two is that of
    |prod(decay (I - beta k k^T)) q|^2 and |prod(decay) q|^2, averaged here over tokens and positions.
    """
    heads = stream.heads
    repeat = heads // stream.key_heads
    k, q = (t.double().repeat_interleave(repeat, 2) for t in (stream.k, stream.q))
    assert stream.beta is not None
    beta = stream.beta.double()[..., None]
    decay = stream.log_decay.double().exp()
    decay = decay[..., None] if decay.ndim == 3 else decay
    through, past = 0.0, 0.0
    for last in range(stream.steps):
        # Backwards through the window that ends at this token.
        vector, plain = q[last], q[last]
        for t in range(last, last - last % window - 1, -1):
            vector = decay[t] * (vector - beta[t] * (k[t] * vector).sum(-1, keepdim=True) * k[t])
            plain = decay[t] * plain
        through += float(vector.square().sum())
        past += float(plain.square().sum())
    return through / past


def aligned(stream: Stream, window: int) -> float:
    """Mean share of a query's squared length in the span of the keys of the window so far, its own included."""
    heads, total, count = stream.heads, 0.0, 0
    k, q = (t.double().repeat_interleave(heads // stream.key_heads, 2) for t in (stream.k, stream.q))
    for last in range(0, stream.steps, 7):  # 7 meets every position of a window of 4 or 16
        keys = k[last - last % window : last + 1].permute(1, 2, 3, 0)
        span = torch.linalg.svd(keys, full_matrices=False)
        basis = span.U * (span.S > 1e-9)[..., None, :]
        inside = torch.matmul(basis.transpose(-1, -2), q[last][..., None])
        total += float(inside.square().sum() / q[last].square().sum())
        count += 1
    return total / count
