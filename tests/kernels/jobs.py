"""Which implementation runs which conformance case in which tier."""

from collections.abc import Iterable

import pytest

from quantlab.testing import IMPLEMENTATIONS


def jobs(cases: Iterable[str], quick: Iterable[object], large: Iterable[object]) -> list:
    """Every implementation with every case; the interpreter leaves ``large`` out, ``quick`` is fast."""
    fast, models = {str(case) for case in quick}, {str(case) for case in large}
    return [
        pytest.param(
            implementation,
            name,
            marks=pytest.mark.slow if implementation == "interpreter" and name not in fast else (),
        )
        for implementation in IMPLEMENTATIONS
        for name in cases
        if implementation == "cuda" or name not in models
    ]
