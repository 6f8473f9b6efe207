"""Errors of a scan and of the network's output, each a plain function of arrays."""

from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.special import log_softmax

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


@dataclass
class Energies:
    """Squared errors and squared references of one quantity, summed over the values of a scan's row.

    ``add`` appends one layer: arrays (rows, samples), the samples being steps of the scan.
    """

    error: list[Array] = field(default_factory=list)
    reference: list[Array] = field(default_factory=list)

    def add(self, value: torch.Tensor, reference: torch.Tensor) -> None:
        """One layer: value and float64 reference (rows, samples, ...)."""
        difference = value.to(torch.float64) - reference
        self.error.append(difference.square().flatten(2).sum(-1).numpy())
        self.reference.append(reference.square().flatten(2).sum(-1).numpy())

    def pooled(self, samples: slice = slice(None), layer: int | None = None, rows: slice = slice(None)) -> float:
        """sqrt(sum |e|^2 / sum |ref|^2) over the layers (or one layer), rows and samples."""
        chosen = slice(None) if layer is None else slice(layer, layer + 1)
        error, reference = np.stack(self.error)[chosen, rows, samples], np.stack(self.reference)[chosen, rows, samples]
        return float(np.sqrt(error.sum() / reference.sum()))

    def curve(self, bins: list[Array]) -> list[float]:
        """The pooled error in each bin, a bin being an array of sample numbers; nan where a bin is empty."""
        error, reference = np.stack(self.error).sum((0, 1)), np.stack(self.reference).sum((0, 1))
        return [float(np.sqrt(error[b].sum() / reference[b].sum())) if len(b) else float("nan") for b in bins]


def log_bins(first: float, last: int, count: int) -> Array:
    """``count + 1`` edges, evenly spaced in the logarithm of the step, from ``first`` to ``last``."""
    return np.geomspace(first, last, count + 1)


def growth_exponent(energies: Energies) -> float:
    """Slope of log pooled error over log step in [T/8, T], eight log-spaced bins; energies at every step.

    0 says that the error has settled, 1/2 that independent errors add up, 1 and more that they compound.
    """
    steps = np.arange(1, energies.error[0].shape[1] + 1)
    edges = log_bins(len(steps) / 8, len(steps), 8)
    bins = [np.flatnonzero((steps > low) & (steps <= high)) for low, high in zip(edges[:-1], edges[1:], strict=True)]
    bins = [b for b in bins if len(b)]
    errors = np.array(energies.curve(bins))
    if not (np.isfinite(errors).all() and (errors > 0).all()):
        return float("nan")
    centres = [np.log(steps[b]).mean() for b in bins]
    return float(np.polyfit(centres, np.log(errors), 1)[0])
