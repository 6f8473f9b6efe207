"""Every named specialisation compiles for every target, without a GPU, to the arithmetic its source says."""

import re

import pytest

from quantlab.kernels.specialisations import LIMIT, compile_for, specialisations
from quantlab.kernels.target import COMPILE_CAPABILITIES
from quantlab.testing import in_triton_process

NAMES = [specialisation.name for specialisation in specialisations()]

FAST = {
    ("step_fp32_nvfp4_read_copy", 90),
    ("step_fp32_nvfp4_flush_head", 80),
    ("step_fp8_sr_nvfp4_encode", 90),
    ("step_fp8_sr_nvfp4_keyscale_read_copy", 90),
    ("step_plan", 90),
    ("encode_nvfp4_packed", 80),
    ("dual_read_mamba2_value_dim_80", 90),
    ("step_gdn_drafts_head_draft_window", 90),
    ("dual_read_odd_sizes", 90),
    ("encode_fp8_reciprocal", 90),
    ("decode_nvfp4", 90),
    ("random_words", 90),
}

# Kernels with a division of float32, which rounds correctly; powers of two are multiplied by.
DIVIDING = {
    "step_fp8_sr_long_keys_step",
    "step_fp8_sr_window_flush",
    "step_fp32_nvfp4_flush_head",
    "step_fp8_sr_nvfp4_keyscale_flush_head",
    "step_fp8_sr_nvfp4_keyscale_encode_heads",
    "step_fp16_nvfp4_value_dim_80_flush_head",
    "step_fp8_sr_nvfp4_load",
    "step_gdn_product_fold",
    "step_gdn_derived_product_fold",
    "step_kda_keyscale_product_fold",
    "step_fp8_sr_nvfp4_encode",
    "encode_int16_head_sr",
    "encode_int4_packed",
    "encode_fp8_reciprocal",
    "encode_nvfp4_packed",
    "global_scale_nvfp4",
}

SURPRISES = {
    "float64 arithmetic": r"\.f64\b",
    "tf32 products": r"tf32",
    "tensor cores, so 16-bit products": r"\bw?gmma|\bmma|tcgen05",
    "flushed subnormals, which E2M1 decodes to": r"\b(mul|add|sub|fma)\S*\.ftz",
    "rounding to 16 or 8 bits": r"\bcvt\.r\w+\.(\w+\.)?(bf16|f16|e4m3|e5m2)",
    "registers spilled to memory": r"\.local\b",
    # But for an estimate that ``nvfp4_encode.reciprocal`` refines.
    "approximate division": r"\bdiv\.(full|approx)|\brcp\.(?!rn|approx\.ftz\.f32 estimate)",
}

# Products of the window and of a read copy are exact in 16 bits; tokens, records and outputs are bfloat16.
WANTED = {
    "_read_copy": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "_system": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "_fold": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "gdn_read": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "gdn_mxfp4_read": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "kda_fp8_read": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "_flush_head": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "_draft_read": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "_flush": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "channel_draft_window": {"tensor cores, so 16-bit products", "rounding to 16 or 8 bits"},
    "_window": {"rounding to 16 or 8 bits"},
    "_read": {"rounding to 16 or 8 bits"},
    "_step": {"rounding to 16 or 8 bits"},
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
    found = {what for what, pattern in SURPRISES.items() if re.search(pattern, built["ptx"])}
    wanted = (what for ending, what in WANTED.items() if name.startswith("step_") and name.endswith(ending))
    assert found - next(wanted, set()) == set()
    assert ("div.rn.f32" in built["ptx"]) == (name in DIVIDING)
    if name.startswith(("encode", "decode", "global_scale", "random")):
        assert ".ftz" not in built["ptx"]
        assert "fma" not in built["ptx"], "a contracted product rounds otherwise than the definition"


def test_the_table_stays_small():
    assert len(set(NAMES)) == len(NAMES) <= LIMIT
    assert {(name, capability) for name in NAMES for capability in COMPILE_CAPABILITIES} >= FAST
    assert set(NAMES) >= DIVIDING
