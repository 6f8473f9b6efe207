"""Canonical formats by family, and what the tests of their properties share."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from quantlab.formats import Encoded, Format, parse
from quantlab.formats.table import Element, Integer, Scaling

search = settings(derandomize=True, deadline=None, max_examples=25, database=None)
# An example of ``states`` holds thousands of values and is shown to every format of a family.
search_states = settings(search, max_examples=15)

ELEMENTS = ("tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m2", "e2m3", "e2m1")
FAMILIES = {
    "float32 scales": (
        *("int16:tile32", "int8", "int8:block32", "int4:head"),
        *("fp8_e4m3", "fp8_e5m2:block32", "fp8_e4m3:tile32+scale.240"),
    ),
    "reciprocals": (
        *("int4:head+scale.recip", "int8+scale.recip", "int16:block32+scale.recip"),
        *("fp8_e4m3:tile32+scale.recip", "fp8_e4m3+scale.240.recip", "fp8_e5m2+scale.recip"),
    ),
    "mx": tuple(
        f"{name}+scale.{mode}" if mode != "rceil" else name
        for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")
        for mode in ("rceil", "floor", "even", "ceil")
    ),
    "nvfp4": (
        *("nvfp4", "nvfp4:row", "nvfp4:tensor", "nvfp4:none", "nvfp4+scale.ceil"),
        *("nvfp4+floor.0", "nvfp4:row+floor.2^-6", "nvfp4:none+scale.ceil+floor.0"),
    ),
    "four over six": ("nvfp4+4over6", "nvfp4:row+4over6.mae", "nvfp4+4over6.absmax.448"),
}
HADAMARD = ("int8+hadamard", "fp8_e4m3:block32+hadamard.7", "mxfp4+hadamard", "nvfp4+hadamard.3")
SCALED = [text for texts in FAMILIES.values() for text in texts]
SHAPE = (2, 34, 48)  # a short tile and a short block of 32


@st.composite
def states(draw, low: int = -8, high: int = 8) -> np.ndarray:
    """float32 of SHAPE: mantissas of 12 bits and exponents in a band, some rows zero, and a few drawn values.

    The drawn ones are small integers and halves times a power of two of the band, so that ties and equal maxima occur.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponents = (
        rng.integers(low, high + 1, SHAPE) if draw(st.booleans()) else rng.integers(low, high + 1, (2, 34, 1))
    )
    x = np.ldexp(rng.integers(-2048, 2049, SHAPE) / 2048, exponents)
    x[rng.random((2, 34)) < 0.1] = 0
    places = st.tuples(*(st.integers(0, size - 1) for size in SHAPE))
    edits = st.dictionaries(places, st.tuples(st.integers(-24, 24), st.integers(low, high)), max_size=8)
    for place, (units, exponent) in draw(edits).items():
        x[place] = units / 4 * 2.0**exponent
    return x.astype(np.float32)


def rounded(text: str, x: np.ndarray, word: int | None = None) -> np.ndarray:
    fmt, tensor = parse(text), torch.from_numpy(x)
    words = None if word is None else torch.full(x.shape, word)
    return fmt.round(tensor, words).numpy()


def group_shape(fmt: Format) -> tuple[int, int]:
    """Value rows and key columns under one scale."""
    if fmt.row.scaling is not Scaling.FLOAT32:
        return 1, fmt.row.block
    return {"row": (1, 48), "block32": (1, 32), "tile32": (32, 48), "head": (34, 48)}[fmt.granularity or ""]


def spread(fmt: Format, scales: np.ndarray) -> np.ndarray:
    """One entry a group -> one a value, for SHAPE."""
    rows, columns = group_shape(fmt)
    return scales.repeat(rows, -2)[:, : SHAPE[-2]].repeat(columns, -1)[..., : SHAPE[-1]]


def multipliers(fmt: Format, encoded: Encoded) -> np.ndarray:
    """float64: what every code is multiplied with, from the stored scales."""
    assert encoded.scales is not None
    scales = encoded.scales
    if fmt.row.scaling is Scaling.MX:
        values = np.ldexp(1.0, scales.numpy().astype(np.int32) - 127)
    elif fmt.row.scaling is Scaling.FLOAT32:
        values = scales.double().numpy()
    else:
        shared = torch.ones(()) if encoded.global_scale is None else encoded.global_scale
        shared = shared.reshape(*shared.shape, *(1,) * (3 - shared.dim()))
        values = (parse("e4m3").dequantize(Encoded(scales)) * shared).double().numpy()
    return spread(fmt, values)


def half_step(element: Element | Integer, quotient: np.ndarray) -> np.ndarray:
    """Half the distance of the element's numbers around the quotients; beyond the largest one the grid goes on."""
    if isinstance(element, Integer):
        return np.full(quotient.shape, 0.5)
    exponents = np.frexp(np.abs(quotient))[1] - 1
    return np.ldexp(0.5, exponents.clip(element.min_exponent, element.max_exponent) - element.mantissa_bits)


def exact_codes(fmt: Format) -> bool:
    """Whether quotient and product are exact: a scale that is a power of two."""
    return fmt.row.scaling is Scaling.MX


def slack(fmt: Format) -> float:
    """What float32 roundings add to the element's error, relative to |x|: see the recipes' docstrings."""
    if exact_codes(fmt):
        return 0.0
    return 2.0**-21 if "recip" in (fmt.scale or "") else 2.0**-22
