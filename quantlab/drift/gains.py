"""Output error of a policy per unit of rounding: the balance by element, linear, so that one pass serves many formats.

``balance`` runs once a policy.  Where many formats share a window and the state is large (a whole network's scans),
the linear part of it is enough: errors of distinct stores are independent with zero mean, so their variances add and
decay with the squares,

    c <- a_t^2 c,   at a store: c <- c + m,   at an output: sum_k q_k^2 c_k,

with m the variance of a rounding of relative size 1.  That variance follows the element's own square for unscaled
formats and the mean square of its row for scaled ones, because a shared scale spreads the error over its block.  The
read copy's error is renewed at each flush and only decays in between.  Each is linear in eps^2.  Left out, beside what
``balance`` leaves out: the noise that errors add to m itself, error feedback, and everything but the stores.
"""

from dataclasses import dataclass, field

import torch

from quantlab.drift.rounding_noise import spread_block
from quantlab.formats import Format


@dataclass
class Gain:
    """Output error energy per eps^2 in one layer, summed over the second half of the run: one window, one kind of m.

    ``step`` is told every step's decay and state.  checkpoint: from errors of stored checkpoints; copy: from errors of
    read copies, which non-flush steps alone read.
    """

    window: int
    scaled: bool
    length: int
    checkpoint: float = 0.0
    copy: float = 0.0
    _position: int = 0
    _variance: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, decay: torch.Tensor, state: torch.Tensor, query: torch.Tensor) -> None:
        """decay and state after the step (rows, V, K), query (rows, K)."""
        if not self._variance:
            self._variance = {part: torch.zeros_like(decay) for part in ("checkpoint", "copy")}
        square, weight = decay.square(), query.square()[:, None]
        flush = self._position % self.window == self.window - 1
        counted = self._position >= self.length // 2
        for part, variance in self._variance.items():
            variance *= square
            if counted and not (flush and part == "copy"):
                energy = float((variance * weight).sum())
                setattr(self, part, getattr(self, part) + energy)
        if flush:
            noise = state.square().mean(-1, keepdim=True).expand_as(state) if self.scaled else state.square()
            self._variance["checkpoint"] += noise
            self._variance["copy"] = noise.clone()
        self._position += 1


def is_scaled(format: Format) -> bool:
    """Whether values share a scale, so that a store spreads its error over them."""
    return spread_block(format) is not None


def relative_rounding_error(format: Format, states: torch.Tensor, seed: int = 0) -> float:
    """eps: RMS of round(S) - S over RMS of S, states (..., V, K)."""
    states = states.to(torch.float32)
    bits = None
    if format.stochastic:
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 2**32, states.shape, generator=generator)
    return float(
        (format.round(states, bits) - states).norm(dtype=torch.float64) / states.norm(dtype=torch.float64)
    )
