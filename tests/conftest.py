"""What this machine cannot run is skipped here alone: cases for a GPU, which the machines of ``make test`` lack."""

from collections.abc import Callable

import pytest

from quantlab.testing import unavailable


@pytest.fixture
def runnable() -> Callable[[str], str]:
    """The name of an implementation, if it runs here; else the case is skipped with the reason."""

    def check(implementation: str) -> str:
        if reason := unavailable(implementation):
            pytest.skip(reason)
        return implementation

    return check
