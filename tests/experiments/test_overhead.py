"""experiments/overhead: the two sides are compared before they are timed; no figure is asserted."""

import pytest

from experiments.overhead.run import SAME, measure


@pytest.mark.parametrize("kind", ["mamba2", pytest.param("gated_delta", marks=pytest.mark.slow)])
def test_a_row_holds_both_times_and_the_comparison(kind):
    row = measure(kind, 64, "fp32@1", rounds=2, steps=2)
    assert 0 <= row["difference"] < SAME
    assert row["stock_ms"] > 0
    assert row["policy_ms"] > 0
    low, high = row["quartiles"]
    assert low <= row["overhead"] <= high


def test_sides_that_disagree_get_no_figure():
    with pytest.raises(ArithmeticError, match="logits differ"):
        measure("mamba2", 64, "nvfp4@1", rounds=1, steps=4)
