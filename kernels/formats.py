"""Triton twins of a Format's methods, equal to them bit for bit: ``quantize``, ``dequantize``, ``round``.

They serve float32, float16 and bfloat16 tensors in contiguous memory, NaN and Inf refused as by default, and every
unscaled element, FP32 scales, MX, and canonical NVFP4.  A format that follows a library's order of operations, key
scales, a component beside the codes, a rotation and error feedback have no kernel.
"""

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded, Format
from quantlab.formats.format import check_format
from quantlab.formats.fused import code_dtype
from quantlab.formats.rounding import EXACT_BITS
from quantlab.formats.storage import Packed
from quantlab.kernels import target
from quantlab.kernels.elements import decode_elements, encode_elements, round_elements
from quantlab.kernels.scaled import decode_scaled, encode_packed, encode_scaled, round_scaled, scale_layout
from quantlab.kernels.scales import recipe_of


def quantize(fmt: Format, x: Tensor, random_bits: Tensor | None = None) -> Encoded:
    """``fmt.quantize(x, random_bits)``, computed where x is.

    Raises:
        InputError: what ``Format.quantize`` raises; x is float64 or not contiguous or lies where no kernel runs; no
        kernel serves the format.
    """
    _admit(fmt, x, random_bits)
    if not fmt.rounded or x.numel() == 0:
        return fmt.quantize(x, random_bits)
    if fmt.recipe is not None:
        return encode_scaled(fmt, x, random_bits)
    bits = fmt.random_bits or EXACT_BITS
    return Encoded(encode_elements(x, fmt.element, fmt.rounding, random_bits, bits))


def quantize_packed(fmt: Format, x: Tensor, random_bits: Tensor | None = None) -> Packed:
    """``fmt.pack(fmt.quantize(x, random_bits))`` in one go, for 4-bit elements under scales within a value row.

    Raises:
        InputError: see ``quantize``; or the format is another one.
    """
    check_format(fmt)
    if fmt.element.bits != 4 or fmt.recipe is None or fmt.granularity in ("tile32", "head"):
        raise InputError("fmt", fmt.text, "a format of 4-bit elements with scales within a value row")
    _admit(fmt, x, random_bits)
    if x.numel() == 0:
        return fmt.pack(fmt.quantize(x, random_bits))
    return encode_packed(fmt, x, random_bits)


def dequantize(fmt: Format, encoded: Encoded) -> Tensor:
    """``fmt.dequantize(encoded)``.

    Raises:
        InputError: a tensor of ``encoded`` is none that ``quantize`` gives; no kernel serves the format.
    """
    _check_served(fmt)
    if not isinstance(encoded, Encoded):
        raise InputError("encoded", type(encoded).__name__, f"an Encoded of {fmt.text}")
    if not fmt.rounded:
        return fmt.dequantize(encoded)
    if not isinstance(encoded.codes, Tensor) or encoded.codes.dim() == 0:
        raise InputError("encoded.codes", encoded.codes, "a tensor of shape (..., K)")
    codes, scales, global_scale = encoded.codes, encoded.scales, encoded.global_scale
    _check_stored("encoded.codes", codes, code_dtype(fmt.element), codes.shape, codes.device)
    if fmt.recipe is None:
        return decode_elements(codes, fmt.element)
    layout = scale_layout(fmt, codes.shape)
    _check_stored("encoded.scales", scales, layout.dtype, layout.shape, codes.device)
    if layout.global_shape is not None:
        name = "encoded.global_scale"
        _check_stored(name, global_scale, torch.float32, layout.global_shape, codes.device)
    return decode_scaled(fmt, encoded)


def round(fmt: Format, x: Tensor, random_bits: Tensor | None = None) -> Tensor:
    """``fmt.round(x, random_bits)``: the values of ``quantize``, without storing a code.

    Raises:
        InputError: see ``quantize``.
    """
    _admit(fmt, x, random_bits)
    if not fmt.rounded or x.numel() == 0:
        return fmt.round(x, random_bits)
    if fmt.recipe is not None:
        return round_scaled(fmt, x, random_bits)
    return round_elements(x, fmt.element, fmt.rounding, random_bits, fmt.random_bits or EXACT_BITS)


def _admit(fmt: Format, x: Tensor, random_bits: Tensor | None) -> None:
    _check_served(fmt)
    if isinstance(x, Tensor) and x.dtype == torch.float64:
        raise InputError(
            "x", f"float64 {tuple(x.shape)}", "float32, float16 or bfloat16 (the kernel computes in float32)"
        )
    fmt.admit(x, random_bits, None, "raise")
    given = {"x": x} if random_bits is None else {"x": x, "random_bits": random_bits}
    for name, tensor in given.items():
        if not tensor.is_contiguous():
            value = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            raise InputError(name, value, "a contiguous tensor")
    for name, tensor in given.items():
        _check_device(name, tensor, x.device)


def _check_stored(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    wanted = f"contiguous {dtype} of shape {tuple(shape)}"
    if not isinstance(tensor, Tensor):
        raise InputError(name, tensor, wanted)
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        value = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise InputError(name, value, wanted)
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise InputError(name, f"a tensor on {tensor.device}", f"a tensor on {device} like the others")
    if reason := target.obstacle(device):
        raise InputError(name, f"a tensor on {device}", f"a device that runs kernels: {reason}")


def _check_served(fmt: Format) -> None:
    """InputError unless the kernels serve the format."""
    check_format(fmt)
    without = {
        "no library profile": fmt.profile is not None,
        "no four-over-six": fmt.four_over_six is not None,
        "no key scales": fmt.key_scale,
        "no component beside the codes": fmt.component is not None,
        "no rotation": fmt.hadamard is not None,
        "no error feedback": fmt.error_feedback is not None,
        "float32 arithmetic": fmt.name == "fp64",
    }
    for condition, broken in without.items():
        if broken:
            raise InputError("fmt", fmt.text, f"a format that a kernel serves: {condition}")
    if fmt.recipe is not None:
        recipe_of(fmt)
