"""NVFP4 as other libraries compute it, bit for bit: each library's float32 operations, in its order.

The shapes of what the functions get, and the encoder that calls them, are in nvfp4_arithmetic.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quantlab.formats.nvfp4_arithmetic import (
    CODE_MAX,
    NO_CODE,
    SCALE_ELEMENT,
    ElementCast,
    Nvfp4Arithmetic,
    divide,
    to_e4m3,
)

_FULL_SCALE = SCALE_ELEMENT.max * CODE_MAX  # 2688: the largest code times the largest scale
_SIXTH = 1 / CODE_MAX  # rounded to float32 where it meets a tensor
_LARGEST = torch.finfo(torch.float32).max


def amax_over_full_scale(amax: Tensor) -> Tensor:
    """A / 2688, the factor that decodes; 0 for a zero tensor."""
    return divide(amax, _FULL_SCALE)


def full_scale_over_amax(amax: Tensor) -> Tensor:
    """2688 * (1 / A), the factor that encodes, rounded twice; Inf for a zero tensor.

    These libraries write 2688 / A with a Python number, which torch computes like this.
    """
    return _FULL_SCALE * amax.reciprocal()


def amax_itself(amax: Tensor) -> Tensor:
    """A."""
    return amax


# torchao: torchao/prototype/mx_formats/nvfp4_tensor.py nvfp4_quantize, NVFP4Tensor.dequantize.


def _torchao_block_scale(amax: Tensor, global_scale: Tensor) -> Tensor:
    # The clamp keeps NaN: a zero tensor, 0 / 0, is NaN throughout.
    return to_e4m3((divide(amax, CODE_MAX) / global_scale).clamp(SCALE_ELEMENT.min_normal, SCALE_ELEMENT.max))


def _torchao_quotient(x: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return x * ((1.0 / global_scale) / scale)


def _decode_by_product(value: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return value * (scale * global_scale)


# Model-Optimizer: modelopt/torch/quantization/qtensor/nvfp4_tensor.py NVFP4QTensor.


def _modelopt_block_scale(amax: Tensor, global_scale: Tensor) -> Tensor:
    scale = amax / (CODE_MAX * global_scale)
    return to_e4m3(scale.masked_fill(scale == 0, 1.0).clamp(SCALE_ELEMENT.smallest, SCALE_ELEMENT.max))


def _modelopt_quotient(x: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return x / (scale * global_scale)


def _modelopt_decode(value: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """By the product of the scales; its decoding table has +0.0 for both zeros."""
    return (value + 0.0) * (scale * global_scale)


# compressed-tensors: quantization/utils/helpers.py generate_gparam and calculate_qparams, lifecycle/forward.py.


def _compressed_tensors_global(amax: Tensor) -> Tensor:
    """full_scale_over_amax in the dtype of A; 1 where that is no number, as for a zero tensor."""
    divisor = full_scale_over_amax(amax.clamp(min=torch.finfo(amax.dtype).tiny))
    return divisor.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).to(torch.float32)


def _compressed_tensors_block_scale(amax: Tensor, global_divisor: Tensor) -> Tensor:
    scale = to_e4m3(global_divisor * divide(amax, CODE_MAX).to(torch.float32))
    return scale.masked_fill(scale == 0, 0.125)


def _compressed_tensors_quotient(x: Tensor, scale: Tensor, global_divisor: Tensor) -> Tensor:
    return x / (scale / global_divisor)


def _decode_by_quotient(value: Tensor, scale: Tensor, global_divisor: Tensor) -> Tensor:
    return value * (scale / global_divisor)


# vLLM: model_executor/layers/quantization/utils/nvfp4_emulation_utils.py ref_nvfp4_quant_dequant.
# flashinfer: tests/test_helpers/utils_fp4.py ref_fp4_quant, quantization/nvfp4_quantization_utils.py.


def _sixth_block_scale(amax: Tensor, global_factor: Tensor) -> Tensor:
    return to_e4m3(global_factor * (amax * _SIXTH))


def _vllm_reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 1e-8 for zero."""
    return 1.0 / (x + (x == 0) * 1e8)


def _flashinfer_global(amax: Tensor) -> Tensor:
    """full_scale_over_amax; the largest float32 for a zero tensor (make_nvfp4_global_scale)."""
    return full_scale_over_amax(amax).masked_fill(amax == 0, _LARGEST)


def _flashinfer_reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 for zero."""
    return torch.where(x == 0, 0.0, 1.0 / x)


def _reciprocal_quotient(
    x: Tensor, scale: Tensor, global_factor: Tensor, reciprocal: Callable[[Tensor], Tensor]
) -> Tensor:
    return x * reciprocal(scale * reciprocal(global_factor))


def _flashinfer_decode(value: Tensor, scale: Tensor, global_factor: Tensor) -> Tensor:
    """By the factor 1 / G, which flashinfer's decoder takes from its caller."""
    return value * (scale * (1.0 / global_factor))


# TransformerEngine: pytorch/custom_recipes NVFP4QuantizerRef, common/cast/nvfp4/dequantize_nvfp4.cuh.
# flashinfer has the same arithmetic in ref_fp4_quant_te, with S as the global value.


def te_encode_scale(amax: Tensor, full_scale: float = _FULL_SCALE) -> Tensor:
    """S = full_scale / A, at most the largest float32; 1 where that is zero, for A = Inf."""
    scale = divide(full_scale, amax).clamp(max=_LARGEST)
    return scale.masked_fill(scale == 0, 1.0)


def encode_scale_quotient(x: Tensor, scale: Tensor, encode_scale: Tensor) -> Tensor:
    """x * min(1 / (scale * (1 / S)), largest float32): the quotient of TE under the global encode scale S."""
    return x * (1.0 / (scale * (1.0 / encode_scale))).clamp(max=_LARGEST)


def te_quotient(x: Tensor, scale: Tensor, amax: Tensor, full_scale: float = _FULL_SCALE) -> Tensor:
    """encode_scale_quotient under the stored maximum A."""
    return encode_scale_quotient(x, scale, te_encode_scale(amax, full_scale))


def te_decode(value: Tensor, scale: Tensor, amax: Tensor, full_scale: float = _FULL_SCALE) -> Tensor:
    """value * ((scale * A) * (1 / full_scale)), the reciprocal rounded to float32."""
    return value * (scale * amax * (1 / full_scale))


def _encode_scale_block_scale(amax: Tensor, encode_scale: Tensor) -> Tensor:
    return to_e4m3(amax * (encode_scale * _SIXTH))


def _te_block_scale(amax: Tensor, global_amax: Tensor) -> Tensor:
    return _encode_scale_block_scale(amax, te_encode_scale(global_amax))


# fouroversix: src/fouroversix/quantize/pytorch/reference.py, quantize/backend.py dequantize.


def _fouroversix_block_scale(
    amax: Tensor, global_amax: Tensor, largest: float, full_scale: float, ratio: float
) -> Tensor:
    # A zero tensor, 0 * (1 / 0), has zero scales.
    scale = divide(amax, largest) * divide(full_scale, global_amax)
    return to_e4m3(scale.masked_fill(global_amax == 0, 0.0) * ratio)


def fouroversix_quotient(x: Tensor, scale: Tensor, amax: Tensor, full_scale: float) -> Tensor:
    """x * (1 / ((1 / (full_scale / A)) * scale)); 0 under a zero scale."""
    return torch.where(scale == 0, 0.0, x * (1.0 / ((1.0 / divide(full_scale, amax)) * scale)))


def fouroversix_decode(value: Tensor, scale: Tensor, amax: Tensor, full_scale: float) -> Tensor:
    """((value * scale) * A) / full_scale."""
    return divide(value * scale * amax, full_scale)


def fouroversix(
    name: str, largest: float = CODE_MAX, scale_max: float = SCALE_ELEMENT.max, ratio: float = 1.0
) -> Nvfp4Arithmetic:
    """fouroversix with A at largest * scale_max; block scales are ratio * a / largest."""
    full_scale = largest * scale_max
    return Nvfp4Arithmetic(
        name,
        amax_itself,
        partial(_fouroversix_block_scale, largest=largest, full_scale=full_scale, ratio=ratio),
        partial(fouroversix_quotient, full_scale=full_scale),
        partial(fouroversix_decode, full_scale=full_scale),
        ElementCast(nan_code=11, saturates=False),  # Inf turns into 0 * Inf there, a negative NaN on x86
    )


def flashinfer_te(name: str, full_scale: float = _FULL_SCALE) -> Nvfp4Arithmetic:
    """flashinfer's arithmetic without fast math: that of TE, with S as the global value."""
    return Nvfp4Arithmetic(
        name,
        partial(te_encode_scale, full_scale=full_scale),
        _encode_scale_block_scale,
        encode_scale_quotient,
        _flashinfer_decode,
        ElementCast(NO_CODE),
    )


_ALL = (
    Nvfp4Arithmetic(
        "torchao",
        amax_over_full_scale,
        _torchao_block_scale,
        _torchao_quotient,
        _decode_by_product,
        # What its integer rounding makes of the NaN of an E4M3 scale, negative where x86 made it of 0 / 0.
        ElementCast(nan_code=12, keeps_minus_zero=True),
        one_level=True,
    ),
    Nvfp4Arithmetic(
        "modelopt",
        amax_over_full_scale,
        _modelopt_block_scale,
        _modelopt_quotient,
        _modelopt_decode,
        ElementCast(nan_code=7),
    ),
    Nvfp4Arithmetic(
        "compressed_tensors",
        _compressed_tensors_global,
        _compressed_tensors_block_scale,
        _compressed_tensors_quotient,
        _decode_by_quotient,
        ElementCast(nan_code=0),  # kept as a float by its rounding, lost on packing
        keeps_bfloat16=True,
    ),
    Nvfp4Arithmetic(
        "vllm",
        full_scale_over_amax,
        _sixth_block_scale,
        partial(_reciprocal_quotient, reciprocal=_vllm_reciprocal),
        _decode_by_quotient,
        ElementCast(NO_CODE),
    ),
    Nvfp4Arithmetic("te", amax_itself, _te_block_scale, te_quotient, te_decode, ElementCast(nan_code=0)),
    Nvfp4Arithmetic(
        "flashinfer",
        _flashinfer_global,
        _sixth_block_scale,
        partial(_reciprocal_quotient, reciprocal=_flashinfer_reciprocal),
        _flashinfer_decode,
        ElementCast(NO_CODE),
    ),
    flashinfer_te("flashinfer.te"),
    fouroversix("fouroversix"),
    fouroversix("fouroversix.static_4", largest=4.0),
)
PROFILES: dict[str, Nvfp4Arithmetic] = {profile.name: profile for profile in _ALL}
