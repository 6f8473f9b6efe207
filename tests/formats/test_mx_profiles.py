"""Profiles of MX blocks: where the libraries disagree.  Their own vectors are in test_golden.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantlab.formats import mx, mx_profiles
from quantlab.formats.rounding import decode_fields, encode_element
from tests.formats import blocks as mx_blocks
from tests.formats.blocks import ELEMENTS, FLOATS, decoded, encoder, load, profile_of_library, stored

F32 = np.float32


@pytest.mark.parametrize("rounding", ["nearest", "even"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integer_elements_of_microxcaling(name, rounding):
    """MXINT8 and MXINT4, which no format text names, bit for bit; NaN equals NaN."""
    arrays, element = load("mx_blocks.npz"), ELEMENTS[f"mx{name}"]
    profile = profile_of_library(mx_profiles.MX_PROFILES, "microxcaling", element.name, rounding)
    codes, scales = mx_profiles.encode(torch.from_numpy(arrays["x"]), element, profile, encoder(element))
    ours = mx_profiles.decode(decoded(codes, element), scales, profile).numpy()
    golden = arrays[f"microxcaling_{name}_{rounding}__deq"]
    same = (ours.view(np.uint32) == golden.view(np.uint32)) | (np.isnan(ours) & np.isnan(golden))
    assert same.all(), [str(case) for case in arrays["case_names"][~same.all(-1)]]


def test_canonical_modes_are_torchaos():
    """Where torchao takes no short cut: a scale byte above 0, and a largest number that decodes without overflow.

    E4M3's even mode is ours alone: torchao bumps at 1.9375, we at 1.8125, where 464 rounds beyond 448.
    """
    arrays = load("mx_blocks.npz")
    finite = np.isfinite(arrays["x"]).all(-1)
    for name in FLOATS:
        for mode in mx.MODES:
            element, key = ELEMENTS[name], f"torchao_{name}_{mode}"
            codes, scales = mx_blocks.encode(torch.from_numpy(arrays["x"]), element, mode, encoder(element))
            compared = finite & (arrays[f"{key}__scale"] > 0)
            if (name, mode) == ("e4m3", "even"):
                significand = 2 * np.frexp(np.abs(arrays["x"]).max(-1))[0]
                compared &= (significand <= 1.8125) | (significand >= 1.9375)
            assert compared.sum() > 20
            assert np.array_equal(scales[:, 0].numpy()[compared], arrays[f"{key}__scale"][compared])
            assert np.array_equal(codes.numpy()[compared], arrays[f"{key}__code"][compared])


def block_of(*values: float) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(values), (0, 32 - len(values)))[None]


def library_values(library: str, name: str, variant: str | None, x: torch.Tensor) -> tuple[int, list[float]]:
    profile, element = profile_of_library(mx_profiles.MX_PROFILES, library, name, variant), ELEMENTS[name]
    codes, scales = mx_profiles.encode(x, element, profile, encoder(element))
    return int(scales[0, 0]), mx_profiles.decode(decoded(codes, element), scales, profile)[0].tolist()


def test_where_libraries_disagree():
    """The smallest inputs: what the documentation of the profiles tells, each against exact arithmetic."""
    tiny = float(F32(7.84e-39))
    byte, values = library_values("torchao", "e2m1", "floor", block_of(tiny))
    assert (byte, values[0]) == (0, 2.0**-128)  # 1.0 times 2^-127 halved by its divisor; exact: 1.5 * 2^-127
    assert library_values("torchao", "e2m1", "rceil", block_of(tiny))[1][0] == 0
    ours = stored(block_of(tiny), ELEMENTS["e2m1"], "floor")
    assert mx_blocks.decode(*ours)[0, 0] == 1.5 * 2.0**-127
    below = float(np.nextafter(F32(1024), F32(0)))
    assert library_values("microxcaling", "e2m1", "even", block_of(below))[1][0] == 1024
    assert library_values("torchao", "e2m1", "floor", block_of(below))[1][0] == 768  # 6 * 2^7 saturates
    even = {library: library_values(library, "e4m3", variant, block_of(1.875))[0]
            for library, variant in (("torchao", "even"), ("compressed_tensors", None))}  # fmt: skip
    assert even == {"torchao": 119, "compressed_tensors": 120}
    assert mx.scale_codes(torch.tensor([1.875]), ELEMENTS["e4m3"], "even").item() == 120
    assert mx.scale_codes(torch.tensor([1.8]), ELEMENTS["e4m3"], "even").item() == 119
    assert library_values("compressed_tensors", "e4m3", None, block_of(1.8))[0] == 120
    # A float logarithm hides one ulp above a power of two: the scale is too small, and the element saturates.
    above = float(np.nextafter(F32(6 * 2.0**20), F32(np.inf)))
    assert library_values("torchao", "e2m1", "rceil", block_of(above))[0] == 127 + 20
    assert library_values("fouroversix", "e2m1", "static_6", block_of(above))[0] == 127 + 21
    assert mx.scale_codes(torch.tensor([above]), ELEMENTS["e2m1"], "rceil").item() == 127 + 21
    ties = block_of(6, 0.75, 1.75, 3.5)
    assert library_values("modelopt", "e2m1", None, ties)[1][:4] == [6, 0.5, 1.5, 3]
    assert library_values("torchao", "e2m1", "rceil", ties)[1][:4] == [6, 1, 2, 4]


@pytest.mark.parametrize("name", ["mxint8", "mxint4"])
def test_fixed_point_elements(name):
    """Sign-magnitude codes, all steps equal: code / 2^(bits - 2); a row like any other."""
    element = ELEMENTS[name]
    count = 1 << (element.bits - 1)
    values = decode_fields(torch.arange(count), element)
    assert values.tolist() == [code / (count // 2) for code in range(count)]
    assert element.max == (count - 1) / (count // 2)
    assert element.max_exponent == 0
    x = torch.linspace(-2.1, 2.1, 999, dtype=torch.float64)
    expected = torch.round(x.abs() * (count // 2)).clamp(max=count - 1).to(torch.int64) + count * (x < 0)
    assert torch.equal(encode_element(x, element), expected)
    assert replace(element, name="other").bias == 1


def test_no_profile_hides_another():
    names = [(p.library, p.variant, name) for p in mx_profiles.MX_PROFILES for name in p.elements]
    assert len(names) == len(set(names))
