"""Several hypotheses at once: p-values that keep the chance of even one false alarm below the level."""

from collections.abc import Sequence

import numpy as np

from quantlab.errors import InputError


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given (Holm 1979, Scandinavian Journal of Statistics 6:65).

    The i-th smallest of m is multiplied by m - i + 1 and never falls below the one before it.  Rejecting where the
    adjusted value is at most a makes a false rejection with probability at most a, however the tests depend on each
    other.  Raises InputError for a value outside [0, 1].
    """
    values = np.asarray(p_values, float)
    if not np.all((values >= 0) & (values <= 1)):
        raise InputError("p_values", list(p_values), "numbers from 0 to 1")
    order = np.argsort(values, kind="stable")
    factors = np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * factors))
    return adjusted.tolist()
