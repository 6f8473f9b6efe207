"""The torch dual read against the recurrence itself, stepped literally in float64."""

import math

import numpy
import pytest
import torch

from quantlab.errors import InputError
from quantlab.schemes.dual_read import dual_read
from quantlab.testing import KERNEL_SUITES, assert_close

SUITE = KERNEL_SUITES["dual_read"]


def e2m1_value(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def e4m3_value(byte: int) -> float:
    if byte & 0x7F == 0x7F:
        return math.nan
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte >> 7 else magnitude


def step_by_step(
    codes, scales, global_scale, k_buffer, d_buffer, log_decay_buffer, cursor, q, k, d, log_decay
):
    """S <- exp(a) S + d k^T for every record, then the current token; o = S q.  Decodes by table."""
    batch, heads, value_dim, half = codes.shape
    groups = q.shape[1]
    e2m1 = numpy.array([e2m1_value(code) for code in range(16)], dtype=numpy.float32)
    e4m3 = numpy.array([e4m3_value(byte) for byte in range(256)], dtype=numpy.float32)
    output = numpy.empty((batch, heads, value_dim))
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            state = numpy.empty((value_dim, 2 * half))
            for element in range(2 * half):
                code = codes[b, h, :, element // 2] >> (4 * (element % 2)) & 15
                # The stored number is a float32: the product of the scales rounds, then that with the code.
                scale = e4m3[scales[b, h, :, element // 16]] * numpy.float32(global_scale[b, h])
                state[:, element] = e2m1[code] * scale
            for j in range(cursor[b]):
                state = math.exp(log_decay_buffer[b, j, h]) * state + numpy.outer(
                    d_buffer[b, j, h], k_buffer[b, j, g]
                )
            state = math.exp(log_decay[b, h]) * state + numpy.outer(d[b, h], k[b, g])
            output[b, h] = state @ q[b, g]
    return output


@pytest.mark.parametrize("case", SUITE.cases)
def test_equals_the_recurrence(case):
    arguments = SUITE.cases[case]()
    arrays = {
        name: x.double().numpy() if x.is_floating_point() else x.numpy() for name, x in arguments.items()
    }
    expected = torch.from_numpy(step_by_step(**arrays))
    got = SUITE.truth(arguments)
    # The suite's bound in units of float64 instead of float32, once for either side.
    max_rel = 2 * SUITE.limits(arguments)[0] * 2.0 ** (24 - 53)
    assert got.dtype == torch.float64
    assert_close(expected, got, max_rel=max_rel, scale=SUITE.size(arguments), what=case)


def test_undefined_memory_never_shows():
    """Any bits behind the cursor give the same bits of output."""
    arguments = SUITE.cases["every_cursor_L5"]()
    poisoned = dual_read(**arguments)
    for name in ("k_buffer", "d_buffer", "log_decay_buffer"):
        for row, cursor in enumerate(arguments["cursor"].tolist()):
            arguments[name][row, cursor:] = torch.inf
    assert poisoned.isfinite().all()
    assert torch.equal(poisoned, dual_read(**arguments))


def test_a_row_does_not_depend_on_the_batch():
    arguments = SUITE.cases["every_cursor_L5"]()
    together = dual_read(**arguments)
    for row in range(together.shape[0]):
        alone = dual_read(**{name: tensor[row : row + 1] for name, tensor in arguments.items()})
        # Batched matrix products may add in another order.
        assert_close(
            together[row : row + 1],
            alone,
            max_rel=SUITE.limits(arguments)[0],
            scale=SUITE.size(arguments)[row],
        )


def test_float64_only_on_request():
    arguments = SUITE.cases["batch1"]()
    assert dual_read(**arguments).dtype == torch.float32
    with pytest.raises(InputError, match=r"^d 'float64"):
        dual_read(**arguments | {"d": arguments["d"].double()})


@pytest.mark.parametrize("name", list(SUITE.cases["batch1"]()))
@pytest.mark.parametrize("fault", ["shape", "dtype", "dimension"])
def test_a_wrong_argument_is_named(name, fault):
    arguments = SUITE.cases["H6_G3"]()
    right = arguments[name]
    if fault == "shape":
        arguments[name] = torch.cat([right, right[..., :1]], dim=-1)
    elif fault == "dtype":
        arguments[name] = right.to(torch.int64)
    else:
        arguments[name] = right[None]
    with pytest.raises(InputError, match=rf"^{name} '\w+ \(.*expected "):
        dual_read(**arguments)
