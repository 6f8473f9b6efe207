"""Read copies of states that are hard to encode, bit for bit those of the format."""

import numpy
import pytest
import torch

from quantlab.formats import pack_nibbles, parse
from quantlab.testing import in_triton_process
from quantlab.testing.copies import THRESHOLDS, encoded, hard_states, wrong_quotients

# The interpreter has two of them in the fast tier: bits of every kind, and every block at a tie.
FAST = ("normal", "ties")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in hard_states()]
)
@pytest.mark.parametrize("implementation", ["interpreter", "cuda"], indirect=True)
def test_hard_states_are_encoded_as_the_format_says(implementation, name):
    if implementation == "cuda":
        codes, scales, shared = encoded(name, "cuda")
    else:
        codes, scales, shared = in_triton_process(encoded, name, "cpu", interpret=True)
    expected = parse("nvfp4").quantize(hard_states()[name])
    numpy.testing.assert_array_equal(shared, expected.global_scale.numpy())
    numpy.testing.assert_array_equal(scales, expected.scales.numpy())
    numpy.testing.assert_array_equal(codes, pack_nibbles(expected.codes).numpy())


def test_the_hard_states_are_what_their_names_say():
    """A state that had no zero scale, subnormal or tie in it would prove nothing about them."""
    states = hard_states()
    fmt = parse("nvfp4")
    expected = {name: fmt.quantize(state) for name, state in states.items()}
    assert (expected["zeros"].scales == 0).any()
    assert (states["zeros"].view(torch.int32) == -(2**31)).any()
    assert (expected["subnormal matrices"].global_scale < 2.0**-126).any()
    assert (expected["zeros"].scales == 1).any(), "the smallest scale"
    assert (states["largest numbers"].abs().amax() > 3e38).all()


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
def test_every_quotient_beside_a_threshold_is_the_rounded_one(implementation, threshold):
    """A proof by exhaustion: quotients depend on the divisor's 2^23 significands alone, as powers of two are exact.

    Codes are a function of the quotient rounded to float32, and change at seven magnitudes.  One refinement of
    x * (1 / b) may miss the rounded quotient by so little that only x / b next to a midpoint of two float32 can show it
    (Brisebarre, Muller and Raina, IEEE Transactions on Computers 53, 2004); here are all that matter for a code.
    """
    assert wrong_quotients(threshold, "cuda") == 0
