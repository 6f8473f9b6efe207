"""The dual read kernel against its torch twin: the conformance suite, and what only a kernel promises."""

import numpy
import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels import target
from quantlab.kernels.dual_read import bytes_moved, constants, dual_read, launch_metadata
from quantlab.schemes.dual_read import check_arguments
from quantlab.testing import (
    IMPLEMENTATIONS,
    KERNEL_SUITES,
    check_kernel,
    in_triton_process,
    run_kernel,
)

CASES = KERNEL_SUITES["dual_read"].cases


def arguments():
    return CASES["batch1"]()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_conformance(implementation, case):
    check_kernel("dual_read", case, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_a_stored_element_is_read_exactly(implementation):
    """A unit query picks one element: one product of 2 by 4 bits, all else zero, so nothing rounds."""
    stored = CASES["unit_queries"]()
    codes, scales = stored["codes"][0, 0].numpy(), stored["scales"][0, 0]
    magnitudes = numpy.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = numpy.concatenate([magnitudes, -magnitudes])
    elements = numpy.empty((codes.shape[0], 2 * codes.shape[1]))
    elements[:, 0::2], elements[:, 1::2] = values[codes & 15], values[codes >> 4]
    expected = elements * scales.view(torch.float8_e4m3fn).double().numpy().repeat(16, axis=1)
    # A row holds four blocks; a NaN scale in one of them makes every read of the row NaN.
    expected[numpy.isnan(expected).any(axis=1)] = numpy.nan
    got = run_kernel("dual_read", "unit_queries", implementation)[:, 0].T.numpy()
    numpy.testing.assert_array_equal(got, expected.astype(numpy.float32))


@pytest.mark.parametrize("name", list(CASES["batch1"]()))
def test_a_tensor_that_is_not_contiguous_is_refused(name):
    given = arguments()
    wide = torch.stack([given[name], given[name]], dim=-1)
    given[name] = wide[..., 0]
    if given[name].is_contiguous():  # one element
        given[name] = torch.empty_strided(
            given[name].shape, (7,) * given[name].dim(), dtype=given[name].dtype
        )
        assert given[name].is_contiguous(), "torch ignores the strides of a single element"
        return
    with pytest.raises(InputError, match=rf"^{name} .*strides .*expected a contiguous tensor"):
        dual_read(**given)


def test_float64_is_refused():
    given = arguments()
    given["q"] = given["q"].double()
    with pytest.raises(InputError, match=r"^q 'float64 .*expected float32"):
        dual_read(**given)


def test_codes_that_are_not_word_aligned_are_refused():
    given = arguments()
    codes = torch.zeros(given["codes"].numel() + 1, dtype=torch.uint8)[1:].view(given["codes"].shape)
    with pytest.raises(InputError, match=r"^codes .*4-byte aligned"):
        dual_read(**given | {"codes": codes})


def test_a_device_without_kernels_is_refused():
    reason = in_triton_process(target.obstacle, torch.device("cpu"), interpret=False)
    assert reason is not None
    assert "TRITON_INTERPRET=1" in reason
    assert in_triton_process(target.obstacle, torch.device("cpu"), interpret=True) is None


def test_bytes_moved_counts_each_tensor_once():
    given = CASES["H4_G2_V64_K128_L16_bf16"]()
    sizes = check_arguments(**given)
    buffers = ("k_buffer", "d_buffer", "log_decay_buffer")
    records = int(given["cursor"].sum())
    slots = sizes.batch * sizes.window
    expected = sum(
        tensor.nbytes * records // slots if name in buffers else tensor.nbytes
        for name, tensor in given.items()
    )
    output = sizes.batch * sizes.heads * sizes.value_dim * 4
    assert bytes_moved(sizes, records, buffer_itemsize=2, token_itemsize=2) == expected + output


def test_a_profiler_is_told_of_full_windows():
    given = CASES["H4_G2_V64_K128_L16_bf16"]()
    sizes = check_arguments(**given)
    shown = launch_metadata(None, None, {**given, **constants(sizes)})
    full = sizes.batch * sizes.window
    assert shown["bytes"] == bytes_moved(sizes, full, buffer_itemsize=2, token_itemsize=2)
    assert shown["name"] == "dual_read_H4_V64_K128_L16"
