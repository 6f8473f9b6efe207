"""Checkpoints inside kernels against the formats' definitions, bit for bit."""

import pytest

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.kernels.checkpoints import store_of, unserved
from quantlab.testing.checkpoints import FORMATS, check_checkpoint, decoded_specials
from quantlab.testing.formats import IMPLEMENTATIONS


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_what_is_stored(implementation, text):
    check_checkpoint(text, implementation)


@pytest.mark.parametrize("text", ["nvfp4", "fp16+sr13", "int8:block32", "fp8+scale.recip", "int8+ef", "fp64"])
def test_other_formats_are_refused(text):
    fmt = parse(text)
    assert unserved(fmt) is not None
    with pytest.raises(InputError, match=r"^fmt .*expected a checkpoint "):
        store_of(fmt)


@pytest.mark.parametrize("text", ["fp32", *FORMATS])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_what_is_not_finite_stays_visible(implementation, text):
    finite = decoded_specials(text, implementation).isfinite()
    assert finite[3:].all()
    assert not finite[:3, 0].any()
