"""What is stored: unpacked for arithmetic, packed as bytes, and counted in bits."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats.float_scales import GROUPS
from quantlab.formats.packing import pack_bits, unpack_bits
from quantlab.formats.table import ELEMENTS, Scaling

if TYPE_CHECKING:
    from quantlab.formats.format import Format


@dataclass(frozen=True)
class Encoded:
    """What is stored, one code an entry.  Absent parts are None.

    codes (..., K): uint8 bit patterns (also of elements below 8 bits), int8 integers, int16 integers or bit
    patterns, int32 bit patterns (tf32), or the float tensor itself for fp32 and fp64.
    scales (..., groups): uint8 E4M3 bytes (nvfp4) or E8M0 bytes (mx), or float32.
    global_scale: float32; x.shape[:-2], x.shape[:-1] with granularity "row", () with "tensor".
    residual: the error-feedback residual, (..., K) in its own dtype or itself encoded.
    """

    codes: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    residual: "Tensor | Encoded | None" = None


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

    @property
    def nbytes(self) -> int:
        """All bytes stored."""
        tensors = [t for t in (self.codes, self.scales, self.global_scale) if t is not None]
        residual = 0 if self.residual is None else self.residual.nbytes
        return sum(tensor.nbytes for tensor in tensors) + residual


def pack(fmt: "Format", encoded: Encoded) -> Packed:
    """See Format.pack."""
    codes, key_dim = encoded.codes, encoded.codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, _padded(fmt, key_dim) - key_dim))
    residual = encoded.residual
    if isinstance(residual, Encoded):
        assert fmt.residual_format is not None
        residual = pack(fmt.residual_format, residual)
    packed = pack_bits(codes, fmt.element.storage_bits)
    return Packed(packed, key_dim, encoded.scales, encoded.global_scale, residual)


def unpack(fmt: "Format", packed: Packed) -> Encoded:
    """See Format.unpack."""
    from quantlab.formats.fused import code_dtype

    dtypes = {"fp32": torch.float32, "fp64": torch.float64}
    dtype = dtypes.get(fmt.name) or code_dtype(fmt.element)
    count = _padded(fmt, packed.key_dim)
    codes = unpack_bits(packed.codes, fmt.element.storage_bits, count, dtype)[..., : packed.key_dim]
    residual = packed.residual
    if isinstance(residual, Packed):
        assert fmt.residual_format is not None
        residual = unpack(fmt.residual_format, residual)
    return Encoded(codes.contiguous(), packed.scales, packed.global_scale, residual)


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
