"""Every named specialisation compiles for every target, without a GPU, to the arithmetic its source says."""

import re

import pytest

from quantlab.kernels.specialisations import LIMIT, compile_for, specialisations
from quantlab.kernels.target import COMPILE_CAPABILITIES
from quantlab.testing import in_triton_process

NAMES = [specialisation.name for specialisation in specialisations()]

FAST = {
    ("dual_read_mamba2_value_dim_80", 80),
    ("dual_read_mamba2_value_dim_80", 90),
    ("dual_read_mamba2_value_dim_80", 100),
    ("dual_read_mamba2_8_groups_fp32", 90),
    ("dual_read_odd_sizes", 90),
    ("encode_e4m3_sr", 90),
    ("encode_fp8_reciprocal", 90),
    ("encode_nvfp4", 80),
    ("encode_nvfp4_odd_sizes", 100),
    ("encode_mxfp4_packed", 90),
    ("decode_nvfp4", 90),
    ("random_words", 90),
}

# Kernels with a division of float32, which rounds correctly; powers of two are multiplied by.
DIVIDING = {
    "encode_int8",
    "encode_int16_head_sr",
    "encode_int4_packed",
    "encode_fp8_reciprocal",
    "encode_fp8_tile32",
    "encode_nvfp4",
    "encode_nvfp4_packed",
    "encode_nvfp4_sr8",
    "encode_nvfp4_odd_sizes",
    "global_scale_nvfp4",
}

SURPRISES = {
    "float64 arithmetic": r"\.f64\b",
    "tensor cores, so tf32 or 16-bit products": r"tf32|\bw?gmma|\bmma|tcgen05",
    "flushed subnormals, which E2M1 decodes to": r"\b(mul|add|sub|fma)\S*\.ftz",
    "rounding to 16 or 8 bits": r"\bcvt\.r\w+\.(\w+\.)?(bf16|f16|e4m3|e5m2)",
    "registers spilled to memory": r"\.local\b",
    "approximate division": r"\bdiv\.(full|approx)|\brcp\b",
}


JOBS = [
    pytest.param(
        name,
        capability,
        id=f"{name}-sm_{capability}",
        marks=() if (name, capability) in FAST else pytest.mark.slow,
    )
    for name in NAMES
    for capability in COMPILE_CAPABILITIES
]


@pytest.mark.parametrize(("name", "capability"), JOBS)
def test_compiles_without_a_gpu(name, capability):
    built = in_triton_process(compile_for, name, capability, interpret=False)
    assert built["cubin"].startswith(b"\x7fELF")
    assert f".target sm_{capability}" in built["ptx"]
    found = [what for what, pattern in SURPRISES.items() if re.search(pattern, built["ptx"])]
    assert found == []
    assert ("div.rn.f32" in built["ptx"]) == (name in DIVIDING)
    if not name.startswith("dual_read"):
        assert ".ftz" not in built["ptx"]
        assert "fma" not in built["ptx"], "a contracted product rounds otherwise than the definition"


def test_the_table_stays_small():
    assert len(set(NAMES)) == len(NAMES) <= LIMIT
    assert {(name, capability) for name in NAMES for capability in COMPILE_CAPABILITIES} >= FAST
    assert set(NAMES) >= DIVIDING
