"""The comparison helpers: what passes, what fails and what the failure says."""

import pytest
import torch

from quantlab.testing import assert_close, guarded, ulps


def test_equal_passes_and_a_bit_fails():
    ref = torch.tensor([1.0, -2.0, float("nan"), float("inf"), 0.0])
    assert_close(ref, ref.clone())
    off = ref.clone()
    off[1] = torch.nextafter(off[1], torch.tensor(0.0))
    with pytest.raises(AssertionError, match=r"worst at \(1,\): expected -2.0, got -1.99\d*, 1 ulps apart"):
        assert_close(ref, off)


def test_integers_must_be_equal_whatever_the_limit():
    ref = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    with pytest.raises(AssertionError, match=r"1 differ, worst at \(1, 0\): expected 3, got 5"):
        assert_close(ref, torch.tensor([[1, 2], [5, 4]], dtype=torch.uint8), max_rel=10.0)


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("-inf")])
def test_special_values_must_stand_in_the_same_places(wrong):
    ref = torch.tensor([1.0, float("inf")])
    with pytest.raises(AssertionError, match=r"1 non-finite, worst at \(1,\)"):
        assert_close(ref, torch.tensor([1.0, wrong]), max_rel=10.0)
    with pytest.raises(AssertionError, match="non-finite"):
        assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), max_rel=10.0)


def test_the_two_limits_are_apart():
    ref = torch.ones(100, dtype=torch.float64)
    got = ref.clone()
    got[7] += 0.01
    assert_close(ref, got, max_rel=0.0101, rms_rel=0.0011)
    with pytest.raises(AssertionError, match=r"max 1.000e-02 \(limit 5.000e-03\)"):
        assert_close(ref, got, max_rel=0.005)
    with pytest.raises(AssertionError, match=r"rms 1.000e-03 \(limit 9.000e-04\)"):
        assert_close(ref, got, max_rel=0.02, rms_rel=0.0009)


def test_a_small_element_is_measured_by_the_rms_unless_a_scale_says_otherwise():
    ref, got = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-3])
    assert_close(ref, got, max_rel=2e-3)
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):
        assert_close(ref, got, max_rel=2e-3, scale=torch.tensor([1.0, 0.1]))


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"output: shape \(1, 2\), expected \(2,\)"):
        assert_close(torch.zeros(2), torch.zeros(1, 2), what="output")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ulps_count_representable_numbers(dtype):
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    ref = torch.tensor([1.0, 1.0, 0.0, -tiny, 1.0], dtype=dtype)
    got = torch.tensor([1.0, 1.0 + 3 * eps, -0.0, tiny, 1.0 - eps], dtype=dtype)
    assert ulps(ref, got).tolist() == [0, 3, 0, 2, 2]


def test_guarded_memory_is_poisoned_on_both_sides():
    inside = guarded(torch.zeros(3, 2))
    whole = torch.empty(0).set_(inside.untyped_storage())
    assert inside.is_contiguous()
    assert whole.isnan().sum() == 128
    assert (
        torch.empty(0, dtype=torch.uint8).set_(guarded(torch.zeros(2, dtype=torch.uint8)).untyped_storage())[
            :64
        ]
        == 255
    ).all()
