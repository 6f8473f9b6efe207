"""The kernels around a recurrence compile for every target, without a GPU, to one launch with wide loads and stores."""

import re

import pytest

from quantlab.kernels.target import COMPILE_CAPABILITIES
from quantlab.testing import in_triton_process
from tests.kernels.glue_launches import CASES, compile_case

WIDE = {
    "conv": {"ld.global.v2.b64", "st.global.v2.b64"},
    "conv_one_row": {"ld.global.b64", "st.global.b64"},
    "conv_width_2": {"ld.global.v2.b32", "st.global.v2.b32"},
    "kimi_delta_norm": {"ld.global.v2.b32", "st.global.v2.b32"},  # four numbers a lane
    "conv_width_3": set(),
}
"""The widest access of each kernel, where it is not four words."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", COMPILE_CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_a_gpu(name, capability):
    built = in_triton_process(compile_case, name, capability, interpret=False)
    assert built["cubin"].startswith(b"\x7fELF")
    ptx = built["ptx"]
    assert f".target sm_{capability}" in ptx
    assert not re.search(r"\.f64\b|tf32|mma|\.local\b|\bdiv\.", ptx)
    found = set(re.findall(r"(?:ld|st)\.global[\w.]*", ptx))
    assert found >= WIDE.get(name, {"ld.global.v4.b32", "st.global.v4.b32"})
