"""Holm's procedure: a case by hand, and the law that defines it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.statistics.multiple import holm


def test_a_case_by_hand():
    # Sorted .01 .02 .03 .04 times 4 3 2 1 is .04 .06 .06 .04; the last may not fall below the one before.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.sampled_from([0.01, 0.05, 0.2]))
def test_it_rejects_what_stepping_down_rejects(p_values, level):
    """From the smallest on, reject while p <= level / (hypotheses left), stop at the first that is not."""
    rejected = set()
    for left, index in zip(range(len(p_values), 0, -1), np.argsort(p_values, kind="stable"), strict=True):
        if p_values[index] * left > level:
            break
        rejected.add(int(index))
    assert {i for i, adjusted in enumerate(holm(p_values)) if adjusted <= level} == rejected


def test_a_false_alarm_is_as_rare_as_it_says():
    """Ten true hypotheses, strongly dependent or not at all: any rejection in at most 5 % of the families."""
    rng = np.random.default_rng(0)
    for families in (rng.random((20000, 10)), np.repeat(rng.random((20000, 2)), 5, axis=1)):
        alarms = np.mean([min(holm(family)) <= 0.05 for family in families])
        # Monte Carlo error 0.15 points.
        assert alarms <= 0.05 + 4 * 0.0015


@pytest.mark.parametrize("wrong", [[-0.1], [1.5], [float("nan")]])
def test_no_p_value(wrong):
    with pytest.raises(InputError, match="from 0 to 1"):
        holm(wrong)
