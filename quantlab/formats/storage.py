"""What is stored: unpacked for arithmetic, packed as bytes, and counted in bits."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats.components import DTYPE, check_component_shape, component_shapes
from quantlab.formats.float_scales import GROUPS
from quantlab.formats.key_scales import DTYPE as KEY_SCALE_DTYPE
from quantlab.formats.key_scales import key_scale_shape
from quantlab.formats.packing import pack_bits, unpack_bits
from quantlab.formats.table import ELEMENTS, Scaling

if TYPE_CHECKING:
    from quantlab.formats.format import Format

RESIDUAL_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Encoded:
    """What is stored, one code an entry.  Absent parts are None.

    codes (..., K): uint8 bit patterns (also of elements below 8 bits), int8 integers, int16 integers or bit
    patterns, int32 bit patterns (tf32), or the float tensor itself for fp32 and fp64.
    scales (..., groups): uint8 E4M3 bytes (nvfp4) or E8M0 bytes (mx), or float32.
    global_scale: float32; x.shape[:-2], x.shape[:-1] with granularity "row", () with "tensor".
    residual: the error-feedback residual, (..., K) in its own dtype or itself encoded.
    key_factor, value_factor: float16 factors (..., r, K) and (..., V, r) of the component that the codes leave out; of
    a mean the key factor alone, (..., 1, K).
    key_scales: uint8 E8M0 bytes (..., 1, K), one a key column.
    """

    codes: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    residual: "Tensor | Encoded | None" = None
    key_factor: Tensor | None = None
    value_factor: Tensor | None = None
    key_scales: Tensor | None = None


@dataclass(frozen=True)
class Packed:
    """The same as bytes.  codes: uint8 (..., bytes of a row), little-endian, the first element lowest.

    key_dim: values of a row; behind them a row is padded with zero codes to a whole block, and to a byte.
    """

    codes: Tensor
    key_dim: int
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    residual: "Tensor | Packed | None" = None
    key_factor: Tensor | None = None
    value_factor: Tensor | None = None
    key_scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """All bytes stored."""
        parts = (self.codes, self.scales, self.global_scale)
        beside = (self.key_factor, self.value_factor, self.key_scales)
        tensors = [t for t in (*parts, *beside) if t is not None]
        residual = 0 if self.residual is None else self.residual.nbytes
        return sum(tensor.nbytes for tensor in tensors) + residual


def pack(fmt: "Format", encoded: Encoded) -> Packed:
    """See Format.pack."""
    check_encoded(fmt, encoded)
    codes, key_dim = encoded.codes, encoded.codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, _padded(fmt, key_dim) - key_dim))
    residual = encoded.residual
    if isinstance(residual, Encoded):
        assert fmt.residual_format is not None
        residual = pack(fmt.residual_format, residual)
    packed = pack_bits(codes, fmt.element.storage_bits)
    beside = encoded.key_factor, encoded.value_factor, encoded.key_scales
    return Packed(packed, key_dim, encoded.scales, encoded.global_scale, residual, *beside)


def unpack(fmt: "Format", packed: Packed) -> Encoded:
    """See Format.unpack."""
    if not isinstance(packed, Packed):
        raise InputError("packed", type(packed).__name__, "a Packed")
    key_dim = packed.key_dim
    if not (_is_size(key_dim) or (key_dim == 0 and isinstance(key_dim, int))):
        raise InputError("packed.key_dim", key_dim, "a number of values")
    count = _padded(fmt, packed.key_dim)
    codes = unpack_bits(packed.codes, fmt.element.storage_bits, count, _code_dtype(fmt))[
        ..., : packed.key_dim
    ]
    residual = packed.residual
    if isinstance(residual, Packed):
        if fmt.residual_format is None:
            raise InputError("packed.residual", "Packed", f"no packed residual for {fmt.text}")
        residual = unpack(fmt.residual_format, residual)
    beside = packed.key_factor, packed.value_factor, packed.key_scales
    encoded = Encoded(codes.contiguous(), packed.scales, packed.global_scale, residual, *beside)
    check_encoded(fmt, encoded, "packed")
    return encoded


def check_encoded(fmt: "Format", encoded: Encoded, name: str = "encoded", residual: bool = True) -> None:
    """InputError unless every part is there with the dtype and shape that ``fmt.quantize`` gives it.

    Codes and scales of another format, or of other values, would decode to numbers that mean nothing.
    name: what the message calls it.  residual: whether that is checked, too; it may be absent.
    """
    if not isinstance(encoded, Encoded):
        raise InputError(name, type(encoded).__name__, f"an Encoded of {fmt.text}")
    codes = encoded.codes
    if not isinstance(codes, Tensor) or codes.dtype != _code_dtype(fmt) or codes.dim() == 0:
        expected = f"{_code_dtype(fmt)} of shape (..., K) for {fmt.text}"
        raise InputError(f"{name}.codes", _described(codes), expected)
    shape, scaling = tuple(codes.shape), fmt.row.scaling
    dtype = torch.float32 if scaling is Scaling.FLOAT32 else torch.uint8
    scales: tuple[int, ...] | None = None
    if scaling is Scaling.FLOAT32:
        scales = GROUPS[fmt.granularity or ""].count(shape)
    elif scaling is not Scaling.NONE:
        scales = (*shape[:-1], math.ceil(shape[-1] / fmt.row.block))
    _check_part(fmt, f"{name}.scales", encoded.scales, dtype, scales)
    shared = None
    if scaling is Scaling.NVFP4:
        shared = {"matrix": shape[:-2], "row": shape[:-1], "tensor": ()}.get(fmt.granularity or "")
    _check_part(fmt, f"{name}.global_scale", encoded.global_scale, torch.float32, shared)
    check_matrices(fmt, shape, f"{name}.codes")
    key: tuple[int, ...] | None = None
    value: tuple[int, ...] | None = None
    if fmt.component is not None:
        key, value = component_shapes(fmt.component, shape)
    _check_part(fmt, f"{name}.key_factor", encoded.key_factor, DTYPE, key)
    _check_part(fmt, f"{name}.value_factor", encoded.value_factor, DTYPE, value)
    by_key = key_scale_shape(shape) if fmt.key_scale else None
    _check_part(fmt, f"{name}.key_scales", encoded.key_scales, KEY_SCALE_DTYPE, by_key)
    if not residual or encoded.residual is None:
        return
    left, name = encoded.residual, f"{name}.residual"
    if fmt.residual_format is None:
        dtype = RESIDUAL_DTYPES[fmt.error_feedback or "fp16"]
        _check_part(fmt, name, left, dtype, shape if fmt.error_feedback else None)  # type: ignore
        return
    check_encoded(fmt.residual_format, left, name)  # type: ignore
    _check_part(fmt, f"{name}.codes", left.codes, _code_dtype(fmt.residual_format), shape)  # type: ignore


def check_matrices(fmt: "Format", shape: tuple[int, ...], argument: str) -> None:
    """InputError unless ``shape`` has the matrices (..., V, K) that a component or key scales need."""
    if not fmt.key_scale and fmt.component is None:
        return
    if len(shape) < 2:
        raise InputError(argument, shape, f"(..., V, K), a matrix a head, for {fmt.text}")
    if fmt.component is not None:
        check_component_shape(fmt.component, shape, argument, fmt.text)


def _check_part(
    fmt: "Format", name: str, part: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None
) -> None:
    if shape is None and part is None:
        return
    if not isinstance(part, Tensor) or part.dtype != dtype or tuple(part.shape) != shape:
        expected = "None" if shape is None else f"{dtype} of shape {shape}"
        raise InputError(name, _described(part), f"{expected} for {fmt.text}")


def _described(part: object) -> object:
    """A value short enough for a message."""
    if part is None:
        return None
    return f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__


def _code_dtype(fmt: "Format") -> torch.dtype:
    from quantlab.formats.fused import code_dtype

    return {"fp32": torch.float32, "fp64": torch.float64}.get(fmt.name) or code_dtype(fmt.element)


def stored_bits(fmt: "Format", shape: tuple[int, ...]) -> dict[str, int]:
    """See Format.stored_bits."""
    if not isinstance(shape, (tuple, list)) or not shape or any(not _is_size(n) for n in shape):
        raise InputError("shape", shape, "positive sizes (..., V, K)")
    key_dim, rows, values = shape[-1], math.prod(shape[:-1]), math.prod(shape)
    width = fmt.element.storage_bits
    row_bits = 8 * math.ceil(_padded(fmt, key_dim) * width / 8)
    parts = {"codes": values * width, "padding": rows * row_bits - values * width}
    if fmt.row.scaling is Scaling.FLOAT32:
        parts["scales"] = 32 * math.prod(GROUPS[fmt.granularity or ""].count(tuple(shape)))
    elif fmt.row.scaling is not Scaling.NONE:
        parts["scales"] = 8 * rows * math.ceil(key_dim / fmt.row.block)
    if fmt.row.scaling is Scaling.NVFP4:
        counts = {"matrix": math.prod(shape[:-2]), "row": rows, "tensor": 1, "none": 0}
        parts["global scale"] = 32 * counts[fmt.granularity or ""]
    check_matrices(fmt, tuple(shape), "shape")
    if fmt.key_scale:
        parts["key scales"] = 8 * math.prod(key_scale_shape(tuple(shape)))
    if fmt.component is not None:
        factors = component_shapes(fmt.component, tuple(shape))
        parts["component"] = 8 * DTYPE.itemsize * sum(math.prod(factor) for factor in factors if factor)
    if fmt.residual_format is not None:
        parts["residual"] = sum(stored_bits(fmt.residual_format, shape).values())
    elif fmt.error_feedback is not None:
        parts["residual"] = values * ELEMENTS[fmt.error_feedback].storage_bits
    return {name: bits for name, bits in parts.items() if bits}


def map_tensors(encoded: Encoded, function: Callable[[Tensor], Tensor]) -> Encoded:
    """``encoded`` with ``function`` applied to every tensor of it, the residual's included."""
    new = {}
    for field in dataclasses.fields(Encoded):
        value = getattr(encoded, field.name)
        if isinstance(value, Encoded):
            value = map_tensors(value, function)
        new[field.name] = function(value) if isinstance(value, Tensor) else value
    return Encoded(**new)


def _padded(fmt: "Format", key_dim: int) -> int:
    """Codes that a row stores: whole blocks."""
    return -(-key_dim // fmt.row.block) * fmt.row.block


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
