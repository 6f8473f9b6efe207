"""What the tests of MX blocks share: elements, codecs, vectors."""

from pathlib import Path

import numpy as np
import torch

from quantlab.formats import mx_profiles
from quantlab.formats.mx import Mx
from quantlab.formats.recipe import Scales
from quantlab.formats.rounding import decode_fields, encode_element
from quantlab.formats.table import FLOAT_ELEMENTS, Element

GOLDEN = Path(__file__).parents[1] / "data" / "golden"

ELEMENTS = {
    "e4m3": FLOAT_ELEMENTS["e4m3"],
    "e5m2": FLOAT_ELEMENTS["e5m2"],
    "e2m3": FLOAT_ELEMENTS["e2m3"],
    "e3m2": FLOAT_ELEMENTS["e3m2"],
    "e2m1": FLOAT_ELEMENTS["e2m1"],
    "mxint8": mx_profiles.MXINT8,
    "mxint4": mx_profiles.MXINT4,
}
FLOATS = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as arrays:
        return {key: arrays[key] for key in arrays.files}


def encoder(element: Element):
    return lambda quotients: encode_element(quotients, element).to(torch.uint8)


def decoded(codes: torch.Tensor, element: Element) -> torch.Tensor:
    return decode_fields(codes, element).to(torch.float32)


def encode(x: torch.Tensor, element: Element, mode: str, cast) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of the canonical recipe."""
    codes, scales = Mx(element, mode).encode(x, cast)
    return codes, scales.stored


def decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return Mx(ELEMENTS["e4m3"]).decode(values.clone(), Scales(scales))


def divide(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return Mx(ELEMENTS["e4m3"]).quotient(x, Scales(scales))


def stored(x: torch.Tensor, element: Element, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = encode(x, element, mode, encoder(element))
    return decoded(codes, element), scales


def profile_of_library(profiles, library: str, element: str, variant: str | None = None):
    """The row of a profile table; without a variant the library's first for the element."""
    fitting = [p for p in profiles if p.library == library and element in p.elements]
    return next(p for p in fitting if variant in (None, p.variant))
