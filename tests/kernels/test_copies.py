"""Read copies of states that are hard to encode, bit for bit those of the format."""

import numpy
import pytest
import torch

from quantlab.formats import parse
from quantlab.schemes.pool import pooled_copy
from quantlab.testing import in_triton_process
from quantlab.testing.copies import THRESHOLDS, encoded, hard_states, wrong_quotients

# The interpreter has two of them in the fast tier: bits of every kind, and every block at a tie.
FAST = (("nvfp4", "normal"), ("nvfp4", "ties"), ("nvfp4+keyscale", "columns of all sizes"))


@pytest.mark.parametrize(
    ("copy", "name"),
    [
        pytest.param(copy, name, marks=() if (copy, name) in FAST else pytest.mark.slow)
        for copy in ("nvfp4", "nvfp4+keyscale")
        for name in hard_states()
    ],
)
@pytest.mark.parametrize("implementation", ["interpreter", "cuda"], indirect=True)
def test_hard_states_are_encoded_as_the_format_says(implementation, copy, name):
    if implementation == "cuda":
        found = encoded(name, "cuda", copy)
    else:
        found = in_triton_process(encoded, name, "cpu", copy, interpret=True)
    fmt = parse(copy)
    expected = pooled_copy(fmt.quantize(hard_states()[name]), fmt)
    assert found.keys() == expected.keys()
    for part, wanted in expected.items():
        numpy.testing.assert_array_equal(found[part], wanted.numpy(), err_msg=part)


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
    for name, code in (("zeros", 127), ("columns of all sizes", 0)):
        keyed = parse("nvfp4+keyscale").quantize(states[name])
        assert keyed.key_scales is not None
        assert (keyed.key_scales == code).any(), name
    assert (states["zeros"].abs().amax(-2) == 0).any(), "a column of zeros"


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
def test_every_quotient_beside_a_threshold_is_the_rounded_one(implementation, threshold):
    """A proof by exhaustion: quotients depend on the divisor's 2^23 significands alone, as powers of two are exact.

    Codes are a function of the quotient rounded to float32, and change at seven magnitudes.  One refinement of
    x * (1 / b) may miss the rounded quotient by so little that only x / b next to a midpoint of two float32 can show it
    (Brisebarre, Muller and Raina, IEEE Transactions on Computers 53, 2004); here are all that matter for a code.
    """
    assert wrong_quotients(threshold, "cuda") == 0
