"""Every conformance test runs once for each implementation; what this machine cannot run is skipped here alone.

``cuda`` needs a GPU, which the machines of ``make test`` lack: run ``pytest tests/kernels -k cuda`` where there is one.
"""

import pytest

from quantlab.testing import unavailable


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> str:
    """For ``parametrize("implementation", ..., indirect=True)``."""
    if reason := unavailable(request.param):
        pytest.skip(reason)
    return request.param
