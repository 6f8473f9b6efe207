"""What every recurrence has in common: its inputs for one token, and the parts that a scheme composes."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one decoded token, or of several: then every tensor has a token dimension after the batch.

    q, k: (batch, key_heads, key_dim); head ``h`` of ``heads`` uses key head ``h // (heads // key_heads)``.
    v: (batch, heads, value_dim).  Mamba: v = dt * x, so that the update is always ``d (x) k``.
    log_decay: (batch, heads), the log of the decay of the step; kimi_delta: (batch, heads, key_dim), one for each key
    channel; mamba1: (batch, heads, value_dim) = dt.
    beta: (batch, heads), the write strength of a delta rule (0 to 1, to 2 with negative eigenvalues); None for the
    other families.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "StepInputs":
        """The same inputs in ``dtype`` (no copy where they already are)."""
        return self.map(lambda t: t.to(dtype))

    def map(self, function: Callable[[Tensor], Tensor]) -> "StepInputs":
        """``function`` applied to each tensor that is there."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: function(t) for n, t in values.items() if t is not None})

    def token(self, index: int) -> "StepInputs":
        """One token of several."""
        return self.map(lambda t: t[:, index])


@dataclass(frozen=True)
class Records:
    """``n`` consecutive tokens of one window, oldest first.

    k: (batch, n, key_heads, key_dim); d: (batch, n, heads, value_dim), what was (or is to be) written along k;
    log_decay: (batch, n, heads), kimi_delta (batch, n, heads, key_dim), mamba1 (batch, n, heads, value_dim);
    v: like d, and beta: (batch, n, heads): the raw inputs of a delta rule, else None.
    """

    k: Tensor
    d: Tensor | None
    log_decay: Tensor
    v: Tensor | None = None
    beta: Tensor | None = None

    def __len__(self) -> int:
        return self.k.shape[1]


class DecayAxis(enum.Enum):
    """What one entry of a decay acts on."""

    HEAD = "head"
    """The whole state of a head: the decay commutes with reads and writes."""
    KEY = "key"
    """One key channel (a column of the state): it can be moved onto the vectors that read or were written."""
    ELEMENT = "element"
    """One element: nothing but the dense state will do."""


@dataclass(frozen=True)
class Recurrence:
    """One family.

    name: as in policies, streams and reports.
    step(state, inputs, rates) -> (new state, output): one token; state (batch, heads, value_dim, key_dim).
    decay(log_decay, rates) -> factor that broadcasts against the state.
    delta_rule: whether d depends on the state (d = beta (v - S k)) or is v itself.
    axis: what one entry of the decay acts on.
    """

    name: str
    step: Callable[..., tuple[Tensor, Tensor]]
    decay: Callable[..., Tensor]
    delta_rule: bool = False
    axis: DecayAxis = DecayAxis.HEAD

    @property
    def needs_rates(self) -> bool:
        """Whether the decay is made from a gate and fixed rates (mamba1), which the caller then gives."""
        return self.axis is DecayAxis.ELEMENT

    def gate_shape(self, heads: int, value_dim: int, key_dim: int) -> tuple[int, ...]:
        """Shape of one token's ``log_decay`` without the batch."""
        extra = {DecayAxis.HEAD: (), DecayAxis.KEY: (key_dim,), DecayAxis.ELEMENT: (value_dim,)}
        return (heads, *extra[self.axis])


def expand_groups(x: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat key heads so that dimension ``dim`` has one entry a head (grouped heads share keys and queries)."""
    groups = x.shape[dim]
    return x if groups == heads else x.repeat_interleave(heads // groups, dim)


def head_decay(log_decay: Tensor, rates: Tensor | None = None) -> Tensor:
    """exp(log_decay) for families with one decay a head: (..., heads) -> (..., heads, 1, 1)."""
    return torch.exp(log_decay)[..., None, None]


def key_decay(log_decay: Tensor, rates: Tensor | None = None) -> Tensor:
    """exp(log_decay) for families with one decay a key channel: (..., heads, key_dim) -> (..., heads, 1, key_dim)."""
    return torch.exp(log_decay)[..., None, :]


def delta_rule_step(state: Tensor, inputs: StepInputs, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Decay by ``factor``, erase along k, write along k, read along q: (new state, output)."""
    heads = state.shape[1]
    k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
    assert inputs.beta is not None  # checked where inputs enter: DecodeState and Stream
    state = factor * state
    d = inputs.beta[..., None] * (inputs.v - matvec(state, k))
    state = state + outer(d, k)
    return state, matvec(state, q)


def outer(d: Tensor, k: Tensor) -> Tensor:
    """d (x) k over the last dimensions: (..., value_dim), (..., key_dim) -> (..., value_dim, key_dim)."""
    return d[..., :, None] * k[..., None, :]


def matvec(state: Tensor, vector: Tensor) -> Tensor:
    """S w: (..., value_dim, key_dim), (..., key_dim) -> (..., value_dim)."""
    # As a row times the transposed state: the product with a column takes a path six times slower on a CPU.
    return torch.matmul(vector[..., None, :], state.transpose(-1, -2))[..., 0, :]
