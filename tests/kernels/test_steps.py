"""Decode steps on pooled memory by kernels: the conformance suite, and what they refuse before any launch."""

from dataclasses import replace

import pytest

from quantlab.errors import InputError
from quantlab.kernels import steps
from quantlab.schemes import parse_policy
from quantlab.testing import IMPLEMENTATIONS
from quantlab.testing.pool_cases import CASES, DELTA, FAST, MODELS
from quantlab.testing.pools import check_pool

QUICK = {str(case) for case in (*FAST, *DELTA)}
LARGE = {str(case) for case in MODELS}
JOBS = [
    pytest.param(
        implementation,
        name,
        marks=pytest.mark.slow if implementation == "interpreter" and name not in QUICK else (),
    )
    for implementation in IMPLEMENTATIONS
    for name in CASES
    if implementation == "cuda" or name not in LARGE
]


def served(case):
    return steps.served(parse_policy(case.policy), case.family, case.shape)


@pytest.mark.parametrize(("implementation", "name"), JOBS, indirect=["implementation"])
def test_conformance(implementation, name):
    case = CASES[name]
    if implementation == "reference":
        if case.foreign:
            case = replace(case, foreign=False)
        check_pool(case, implementation)
    elif reason := served(case):
        with pytest.raises(InputError, match=r"^pool .*expected a policy that kernels serve: ") as refused:
            check_pool(case, implementation)
        assert reason in str(refused.value)
    else:
        check_pool(case, implementation)
