"""What the tests of MX blocks share: elements, codecs, vectors."""

from pathlib import Path

import numpy as np
import torch

from quantlab.formats import mx, mx_profiles
from quantlab.formats.rounding import decode_fields, encode_element
from quantlab.formats.table import FLOAT_ELEMENTS, Element, Overflow, Specials
from tests.formats.oracle import LAYOUTS, Layout

GOLDEN = Path(__file__).parents[1] / "data" / "golden"

LAYOUTS.setdefault("e2m3", Layout(2, 3, 1, 32, False, None))
LAYOUTS.setdefault("e3m2", Layout(3, 2, 3, 32, False, None))
ELEMENTS = {
    "e4m3": FLOAT_ELEMENTS["e4m3"],
    "e5m2": FLOAT_ELEMENTS["e5m2"],
    "e2m3": Element("e2m3", 2, 3, Specials.NONE, Overflow.SATURATE),
    "e3m2": Element("e3m2", 3, 2, Specials.NONE, Overflow.SATURATE),
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


def stored(x: torch.Tensor, element: Element, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = mx.encode(x, element, mode, encoder(element))
    return decoded(codes, element), scales
