"""Every conformance test runs once for each implementation.

``cuda`` needs a GPU: run ``pytest tests/kernels -k cuda`` where there is one.
"""

from collections.abc import Callable

import pytest


@pytest.fixture
def implementation(request: pytest.FixtureRequest, runnable: Callable[[str], str]) -> str:
    """For ``parametrize("implementation", ..., indirect=True)``."""
    return runnable(request.param)
