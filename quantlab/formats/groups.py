"""Which values share a scale, and the scale's way back to them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """A grid over the last two dims (V, K): ``rows`` value rows by ``columns`` key columns share one scale.

    None takes the whole dim; a last group may be short.  A vector (K,) is one row.
    """

    rows: int | None = 1
    columns: int | None = None

    def count(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of values of ``shape``."""
        columns = 1 if self.columns is None else -(-shape[-1] // self.columns)
        if len(shape) == 1:
            return (columns,)
        rows = 1 if self.rows is None else -(-shape[-2] // self.rows)
        return (*shape[:-2], rows, columns)

    def amax(self, x: Tensor) -> Tensor:
        """Largest magnitude of every group, in the dtype of x; a NaN does not count."""
        amax = self.largest(x)
        # Rare, and refused before unless asked for: so the check is on the few maxima, not on x.
        return self.largest(x.masked_fill(x.isnan(), 0.0)) if amax.isnan().any() else amax

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum, at most 0, and maximum, at least 0, of every group; NaN wins."""
        return -self.largest(x.clamp(max=0.0)), self.largest(x.clamp(min=0.0))

    def largest(self, x: Tensor) -> Tensor:
        """Largest magnitude of every group, 0 where there is nothing; NaN wins."""
        if x.numel() == 0:
            return x.new_zeros(self.count(x.shape))
        columns = _block_amax(x, self.columns or x.shape[-1])
        if self.rows == 1 or x.dim() == 1:
            return columns
        return _block_amax(columns.mT, self.rows or x.shape[-2]).mT

    def align(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Views of x and of its scales that broadcast against each other."""
        if self.rows is not None and self.rows > 1 and x.dim() > 1:
            scales = scales.repeat_interleave(self.rows, dim=-2)[..., : x.shape[-2], :]
        if self.columns is None or scales.shape[-1] == 1:
            return x, scales
        if x.shape[-1] % self.columns == 0:
            return x.unflatten(-1, (-1, self.columns)), scales[..., None]
        return x, scales.repeat_interleave(self.columns, dim=-1)[..., : x.shape[-1]]


def _block_amax(x: Tensor, block: int) -> Tensor:
    """(..., K) -> (..., ceil(K / block)); NaN wins."""
    size = x.shape[-1]
    if block >= size:
        return x.abs().amax(-1, keepdim=True)
    if size % block:
        x = torch.nn.functional.pad(x, (0, block - size % block))
    if x.dtype != torch.float32 or not x.is_contiguous():
        return x.unflatten(-1, (-1, block)).abs().amax(-1)
    # Magnitudes order like their bit patterns, and short integer reductions are several times faster.
    return (x.view(torch.int32) & 0x7FFFFFFF).unflatten(-1, (-1, block)).amax(-1).view(torch.float32)
