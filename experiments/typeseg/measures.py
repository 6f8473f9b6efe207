"""Errors of a scan and of the network's output, each a plain function of arrays."""

import numpy as np
import torch
from scipy.special import log_softmax

from quantlab.drift.growth import Growth, growth, pooled
from quantlab.drift.sums import BinnedSums

Array = np.ndarray


def label_divergence(reference: Array, logits: Array) -> Array:
    """KL(reference || logits) in nats of the label distributions at each position: (..., labels) -> (...)."""
    p, q = log_softmax(reference.astype(np.float64), -1), log_softmax(logits.astype(np.float64), -1)
    return (np.exp(p) * (p - q)).sum(-1)


def label_flips(reference: Array, logits: Array) -> Array:
    """Whether the most probable label differs, at each position: (..., labels) -> (...) bool."""
    return reference.argmax(-1) != logits.argmax(-1)


def relative_error(reference: Array, value: Array) -> float:
    """sqrt(sum |value - reference|^2 / sum |reference|^2) over everything, in float64."""
    reference = reference.astype(np.float64)
    return float(np.sqrt(((value - reference) ** 2).sum() / (reference**2).sum()))


class Energies:
    """Squared errors and squared references of one quantity, each (layers, rows, steps), summed over a row's values.

    Steps that were not measured are NaN, which ``quantlab.drift.growth`` passes over.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self._layers: list[Array] = []

    def add(self, value: torch.Tensor, reference: torch.Tensor, at: slice = slice(None)) -> None:
        """One layer: value and float64 reference (rows, measured steps, ...); ``at`` picks the measured steps."""
        difference = value.to(torch.float64) - reference
        energies = np.full((2, len(value), self.steps), np.nan)
        for part, tensor in enumerate((difference, reference)):
            energies[part][:, at] = tensor.square().flatten(2).sum(-1).numpy()
        self._layers.append(energies)

    def pooled(self, layer: int | None = None, rows: slice = slice(None)) -> float:
        """sqrt(sum |e|^2 / sum |ref|^2) over the second half of the run, all layers or one, all rows or some."""
        chosen = self._layers if layer is None else self._layers[layer : layer + 1]
        error, reference = np.stack(chosen, 1)[:, :, rows, self.steps // 2 :]
        return pooled(error, reference)

    def curve(self, edges: Array) -> tuple[Array, Array]:
        """(centre, pooled error) of each bin; edges: log-spaced steps, the last one inside the last bin."""
        error, reference = self._by_step()
        bounds = [*edges[:-1], edges[-1] + 1] if len(edges) > 1 else [edges[0], edges[0] + 1]
        sums = BinnedSums(np.asarray(bounds), error.shape[1])
        sums.add(1, error, reference)
        return sums.curve()

    def growth_fit(self) -> Growth:
        """The growth exponent over all scans, for a quantity measured at every step."""
        return growth(*self._by_step())

    def _by_step(self) -> tuple[Array, Array]:
        stacked = np.concatenate(self._layers, 1)
        return stacked[0].T, stacked[1].T
