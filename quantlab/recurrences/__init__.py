"""The maths of each recurrence family, in plain torch and any float dtype: the readable truth.

Add a family: one file with a ``Recurrence``, one line in ``RECURRENCES``.
"""

from quantlab.errors import unknown_name
from quantlab.recurrences import gated_delta, kimi_delta, mamba1, mamba2
from quantlab.recurrences.base import DecayAxis, Records, Recurrence, StepInputs, expand_groups
from quantlab.recurrences.chunk import chunk
from quantlab.recurrences.window import fold, read_tokens, solve_deltas, window_read

RECURRENCES: dict[str, Recurrence] = {
    r.name: r for r in (mamba2.RECURRENCE, gated_delta.RECURRENCE, kimi_delta.RECURRENCE, mamba1.RECURRENCE)
}


def get_recurrence(name: str) -> Recurrence:
    """The recurrence called ``name``; raises InputError that lists the families."""
    if not isinstance(name, str) or name not in RECURRENCES:
        raise unknown_name("family", name, RECURRENCES)
    return RECURRENCES[name]


__all__ = [
    "RECURRENCES",
    "DecayAxis",
    "Records",
    "Recurrence",
    "StepInputs",
    "chunk",
    "expand_groups",
    "fold",
    "get_recurrence",
    "read_tokens",
    "solve_deltas",
    "window_read",
]
