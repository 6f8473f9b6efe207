"""The kernels' decode helpers against the formats' definitions, exhaustively and to the bit."""

import numpy
import pytest

from quantlab.testing import in_triton_process
from tests.kernels.decode_probe import every_byte


def e2m1_value(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


@pytest.mark.parametrize("implementation", ["interpreter", "cuda"], indirect=True)
def test_every_byte_under_every_scale(implementation):
    interpreted = implementation == "interpreter"
    decoded = in_triton_process(every_byte, "cpu", interpret=True) if interpreted else every_byte("cuda")
    scales = numpy.array([e4m3_value(byte) for byte in range(256)])
    for nibble in range(2):
        codes = numpy.array([e2m1_value(byte >> 4 * nibble & 15) for byte in range(256)])
        # 2 bits times 4 bits of significand: the product is exact in float32, zeros keep their sign.
        expected = (codes[:, None] * scales[None, :]).astype(numpy.float32)
        number = ~numpy.isnan(expected)
        for place in range(4):
            got = decoded[place, nibble]
            assert numpy.isnan(got[~number]).all()
            assert (got.view(numpy.int32) == expected.view(numpy.int32))[number].all(), (place, nibble)
