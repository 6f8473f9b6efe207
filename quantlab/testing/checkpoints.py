"""The conformance suite of ``quantlab.kernels.checkpoints``: every stored bit is that of the format, and decodes so.

``check_checkpoint`` runs a format's cases with an implementation, ``interpreter`` or ``cuda``.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats import Encoded, Format, parse
from quantlab.kernels import target
from quantlab.kernels.checkpoints import Store, decoded_tile, rounded_tile, store_of
from quantlab.testing import in_triton_process
from quantlab.testing.formats import element_inputs, element_words

FORMATS = tuple(f"{name}{rounding}" for name in ("bf16", "fp16", "fp8", "int8") for rounding in ("", "+sr"))
COLUMNS = 64


@triton.jit
def probe_kernel(
    x, words, codes, scales, values, decoded, R: tl.constexpr, N: tl.constexpr, STORE: tl.constexpr
):
    """A tile of R rows: its codes and scales, the values that rounding reports and those that decoding gives."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    random = None
    if STORE.stochastic:
        random = tl.load(words + at).to(tl.uint32)
    stored, row_scales, reported = rounded_tile(tl.load(x + at), random, STORE)
    tl.store(codes + at, stored)
    tl.store(values + at, reported)
    if scales is not None:
        tl.store(scales + row, row_scales)
    tl.store(decoded + at, decoded_tile(stored, row_scales, STORE))


def check_checkpoint(text: str, implementation: str) -> None:
    """AssertionError unless codes, scales and values are those of ``parse(text)``, for every case."""
    if implementation == "interpreter":
        in_triton_process(_check, text, "cpu", interpret=True)
    else:
        _check(text, "cuda")


def _check(text: str, device: str) -> None:
    fmt = parse(text)
    store = store_of(fmt)
    for what, x in cases(fmt).items():
        words = _words(fmt, x)
        expected = fmt.quantize(x, words)
        got, values, decoded = run(store, x, words, device)
        for part in ("codes", "scales"):
            one, other = getattr(expected, part), getattr(got, part)
            assert _same(one, other), f"{text} {what}: {_differing(one, other)} {part} differ"
        want = fmt.dequantize(expected)
        assert _same(want, values), f"{text} {what}: {_differing(want, values)} reported values differ"
        assert _same(want, decoded), f"{text} {what}: {_differing(want, decoded)} decoded values differ"


def run(store: Store, x: Tensor, words: Tensor | None, device: str) -> tuple[Encoded, Tensor, Tensor]:
    """x (rows, columns) rounded by the kernel's helpers: what is stored as the format has it, and its values twice."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.uint8, "int8": torch.int8}
    held = torch.float32 if store.element is None else dtype[store.element.name]
    codes = torch.zeros(x.shape, dtype=held, device=device)
    scales = None if store.scale is None else torch.zeros(len(x), device=device)
    values, decoded = torch.zeros(2, *x.shape, device=device)
    rows = 16
    assert len(x) % rows == 0
    random = None if words is None else words.to(device)
    arguments = x.to(device), random, codes, scales, values, decoded
    kernel: Any = probe_kernel
    meta = {"R": rows, "N": x.shape[1], "STORE": store}
    kernel[(len(x) // rows,)](*arguments, **meta, num_warps=1, **target.LAUNCH_OPTIONS)
    codes = _one_nan(codes.cpu())
    if held in (torch.bfloat16, torch.float16):
        codes = codes.view(torch.int16)
    stored = Encoded(codes, None if scales is None else scales.cpu()[:, None])
    return stored, _one_nan(values.cpu()), _one_nan(decoded.cpu())


def _one_nan(tensor: Tensor) -> Tensor:
    """A NaN stays one; which of them is the device's own: a GPU's conversions set every bit of the mantissa."""
    return tensor.nan_to_num(torch.nan, torch.inf, -torch.inf) if tensor.is_floating_point() else tensor


def decoded_specials(text: str, implementation: str) -> Tensor:
    """What a checkpoint decodes to (16, 64) when element 0 of its first three rows is NaN, Inf and -Inf."""
    if implementation == "interpreter":
        return torch.from_numpy(in_triton_process(_decoded_specials, text, "cpu", interpret=True))
    return torch.from_numpy(_decoded_specials(text, "cuda"))


def _decoded_specials(text: str, device: str) -> numpy.ndarray:
    fmt = parse(text)
    x = torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(4))
    x[:3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    words = torch.full(x.shape, 2**32 - 1) if fmt.stochastic else None
    return run(store_of(fmt), x, words, device)[2].numpy()


def cases(fmt: Format) -> dict[str, Tensor]:
    """Inputs (rows, columns) by what they are about."""
    random = torch.Generator().manual_seed(3)
    normal = torch.randn(32, COLUMNS, generator=random)
    # Magnitudes of each row apart, from the subnormals of float32 to its largest numbers.
    powers = torch.linspace(-149, 126, 32).round()[:, None].double()
    found = {
        "normal numbers": normal,
        "rows of every size": (normal.double().clamp(-1, 1) * 2.0**powers).float(),
        "elements of every size": normal * torch.exp2(-50 * torch.rand(32, COLUMNS, generator=random)),
        "zeros of both signs": torch.cat([torch.zeros(16, COLUMNS), -torch.zeros(16, COLUMNS)]),
    }
    if fmt.recipe is None:
        around = element_inputs(fmt.element, 1 << 12)
        return found | {"around every number": _tiled(around)}
    # A largest element that makes the scale 1, or a number without short reciprocal; every boundary beside it.
    around = element_inputs(fmt.element, 1 << 11)
    around = around[around.abs() <= fmt.element.max]
    tile = _tiled(around)
    tile[:, 0] = fmt.element.max
    found["around every number under scale 1"] = tile
    for number, scale in enumerate((3.0, 0.1, 7.7e-38, 1.3e-42)):
        scaled = tile * torch.tensor(scale)
        found[f"around every number under scale {number}"] = scaled
    return found


def _tiled(x: Tensor) -> Tensor:
    """x in whole tiles, its end filled from its start."""
    tile = 16 * COLUMNS
    count = -(-len(x) // tile) * tile
    return torch.cat([x, x[: count - len(x)]]).view(-1, COLUMNS).clone()


def _words(fmt: Format, x: Tensor) -> Tensor | None:
    """Random words, many of them where the decision between two codes tips."""
    if not fmt.stochastic:
        return None
    if fmt.recipe is None:
        return element_words(x, fmt.element, 32)
    scales = parse(fmt.text.removesuffix("+sr")).quantize(x).scales
    assert scales is not None
    return element_words(x / scales, fmt.element, 32)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype == torch.float32:
        one, other = one.view(torch.int32), other.view(torch.int32)
    return torch.equal(one, other)


def _differing(one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None:
        return "all"
    differ = (one != other).nonzero()
    at = tuple(differ[0].tolist()) if len(differ) else ()
    return f"{len(differ)} of {one.numel()}" + (
        f", first {one[at]} against {other[at]} at {at}" if at else ""
    )
