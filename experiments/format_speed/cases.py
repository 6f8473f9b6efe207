"""What is timed: a task, who does it, and how the result is held against ours."""

# The peers are not installed where types are checked.
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.formats import compiled, parse


@dataclass(frozen=True)
class Case:
    """make() gives a function of x (rows, 4096), float32, whose result has that shape; it may raise ImportError."""

    task: str
    name: str
    make: Callable[[], Callable[[Tensor], Tensor]]
    reference: str
    """Text of our format whose values the result is compared with."""

    def compare(self, result: Tensor, x: Tensor) -> str:
        """ "equal" or the share of values that differ and by how much."""
        expected = parse(self.reference).round(x)
        if torch.equal(result, expected):
            return f"equal to {self.reference}"
        # A library that multiplies in another order differs in the last bits of float32; that is no other code.
        different = (result - expected).abs() > 2.0**-20 * expected.abs()
        worst = ((result - expected).abs().amax() / expected.abs().amax()).item()
        share = different.float().mean().item()
        return f"codes of {self.reference} but for {share:.1e} of them, at most {worst:.1e} of amax apart"


def all_cases() -> list[Case]:
    nvfp4, mxfp8 = "nvfp4:tensor", "mxfp8_e4m3+scale.floor"
    return [
        Case("nvfp4", "quantlab eager", lambda: _encode_decode(nvfp4, False), nvfp4),
        Case("nvfp4", "quantlab compiled", lambda: _encode_decode(nvfp4, True), nvfp4),
        Case("nvfp4", "torchao eager", _torchao_nvfp4, nvfp4),
        Case("nvfp4", "torchao compiled", lambda: torch.compile(_torchao_nvfp4()), nvfp4),
        Case("nvfp4", "modelopt eager", _modelopt_nvfp4, nvfp4),
        Case("nvfp4", "compressed-tensors eager", _compressed_tensors_nvfp4, nvfp4),
        Case("mxfp8", "quantlab eager", lambda: _encode_decode(mxfp8, False), mxfp8),
        Case("mxfp8", "quantlab compiled", lambda: _encode_decode(mxfp8, True), mxfp8),
        Case("mxfp8", "torchao eager", _torchao_mxfp8, mxfp8),
        Case("mxfp8", "torchao compiled", lambda: torch.compile(_torchao_mxfp8()), mxfp8),
        Case("mxfp8", "torchao compiled in halves", _torchao_mxfp8_in_halves, mxfp8),
        Case("round_e4m3", "quantlab eager", lambda: parse("e4m3").round, "e4m3"),
        Case("round_e4m3", "quantlab compiled", lambda: lambda x: compiled.round(parse("e4m3"), x), "e4m3"),
        Case("round_e4m3", "torch eager", lambda: _torch_cast, "e4m3"),
        Case("round_e4m3", "torch compiled", lambda: torch.compile(_torch_cast), "e4m3"),
        Case("round_e4m3", "ml_dtypes", _ml_dtypes_cast, "e4m3"),
    ]


def _encode_decode(text: str, fast: bool) -> Callable[[Tensor], Tensor]:
    fmt = parse(text)
    if fast:
        return lambda x: compiled.dequantize(fmt, compiled.quantize(fmt, x))
    return lambda x: fmt.dequantize(fmt.quantize(x))


def _torch_cast(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def _ml_dtypes_cast() -> Callable[[Tensor], Tensor]:
    import ml_dtypes
    import numpy as np

    return lambda x: torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def _torchao_nvfp4() -> Callable[[Tensor], Tensor]:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def function(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)

    return function


def _torchao_mxfp8() -> Callable[[Tensor], Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, 32).dequantize(torch.float32)


def _torchao_mxfp8_in_halves() -> Callable[[Tensor], Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    encode = torch.compile(lambda x: to_mx(x, torch.float8_e4m3fn, 32))
    decode = torch.compile(lambda c, s: to_dtype(c, s, torch.float8_e4m3fn, 32, torch.float32))

    def function(x: Tensor) -> Tensor:
        scales, codes = encode(x)
        return decode(codes, scales)

    return function


def _modelopt_nvfp4() -> Callable[[Tensor], Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def function(x: Tensor) -> Tensor:
        stored, scale, double_scale = NVFP4QTensor.quantize(x, 16, try_tensorrt=False)
        return stored.dequantize(
            dtype=torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16}
        )

    return function


def _compressed_tensors_nvfp4() -> Callable[[Tensor], Tensor]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(
        num_bits=4,
        type="float",  # type: ignore
        strategy=QuantizationStrategy.TENSOR_GROUP,
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )

    def function(x: Tensor) -> Tensor:
        low, high = torch.aminmax(x)
        global_scale = generate_gparam(low, high)
        low, high = torch.aminmax(x.unflatten(-1, (-1, 16)), dim=-1)
        scale, zero = calculate_qparams(low, high, arguments, global_scale=global_scale)
        codes = quantize(x, scale, zero, arguments, global_scale=global_scale)
        return dequantize(codes, scale, zero, arguments, global_scale=global_scale)

    return function
