"""The public numeric cases of the field's trackers (B1 to B18), each one runnable: expected, measured, verdict.

Add a case: a ``Case`` in the file of its group, in that file's ``CASES``.
"""

from quantlab.drift.evidence import arithmetic, gates, grouping, slots, storage
from quantlab.drift.evidence.case import Case, Figure, Measured, Outcome, outcomes
from quantlab.drift.evidence.run import run_cases
from quantlab.errors import unknown_name

_FILES = (storage, arithmetic, grouping, gates, slots)
CASES: dict[str, Case] = {
    case.name: case
    for case in sorted(
        (case for file in _FILES for case in file.CASES), key=lambda case: int(case.name.removeprefix("B"))
    )
}


def get_case(name: str) -> Case:
    """The case called ``name`` ("B1"); raises InputError that lists the cases."""
    if name not in CASES:
        raise unknown_name("case", name, CASES)
    return CASES[name]


__all__ = ["CASES", "Case", "Figure", "Measured", "Outcome", "get_case", "outcomes", "run_cases"]
