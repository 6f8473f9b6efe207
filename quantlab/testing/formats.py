"""The conformance suite of the formats' Triton twins: every result equals the torch definition, bit for bit.

``check_element`` covers an element's codes and rounding boundaries, ``check_format`` a format's methods,
``check_random_words`` the random words.  ``interpreter`` and ``cuda`` run the same cases.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from quantlab.formats import parse
from quantlab.formats import random as reference_random
from quantlab.formats.format import Format
from quantlab.formats.rounding import Rounding, decode_fields, encode_element, encode_integer
from quantlab.formats.storage import Encoded
from quantlab.formats.table import ELEMENTS, Element, Integer, Overflow
from quantlab.testing import in_triton_process, watched_allocations

IMPLEMENTATIONS = ("interpreter", "cuda")

ELEMENT_CASES: dict[str, Element | Integer] = {
    **{name: element for name, element in ELEMENTS.items() if name not in ("fp32", "fp64")},
    "e4m3_overflow_nan": dataclasses.replace(ELEMENTS["e4m3"], overflow=Overflow.NAN),
    "e5m2_overflow_infinity": dataclasses.replace(ELEMENTS["e5m2"], overflow=Overflow.INFINITY),
    "fp16_saturate": dataclasses.replace(ELEMENTS["fp16"], overflow=Overflow.SATURATE),
    "bf16_saturate": dataclasses.replace(ELEMENTS["bf16"], overflow=Overflow.SATURATE),
}
STOCHASTIC_BITS = (1, 8, 13, 20, 32)

FORMAT_CASES = tuple(
    "fp32 fp16+overflow.saturate e4m3+sr13 e2m1+rz fp8 fp8:tile32+rz fp8_e5m2:block32+sr8 fp8+scale.240 "
    "fp8+scale.recip int16:head int16:tile32+sr int8 int8:row+scale.recip int8:block32+sr int4 int4:block32 "
    "int4:row+sr8 nvfp4 nvfp4:row nvfp4:tensor nvfp4:none nvfp4+sr nvfp4+rz nvfp4:row+sr8+scale.ceil "
    "nvfp4+floor.0 nvfp4+floor.2^-6 mxfp4 mxfp4+scale.floor+sr8 mxfp6_e3m2+scale.even mxfp6_e2m3+scale.ceil+rz "
    "mxfp8_e4m3 mxfp8_e5m2+sr".split()
)


def check_element(name: str, implementation: str) -> None:
    """AssertionError unless the kernels round and decode ``ELEMENT_CASES[name]`` as rounding.py does."""
    _where(implementation, _check_element, name)


def check_format(text: str, implementation: str) -> None:
    """AssertionError unless the twins of a format's methods equal them."""
    _where(implementation, _check_format, text)


def check_random_words(implementation: str) -> None:
    """AssertionError unless ``random_words`` of the kernels are those of the simulator."""
    _where(implementation, _check_random_words)


def check_all(implementation: str) -> None:
    """The whole suite, for a machine without pytest."""
    for name in ELEMENT_CASES:
        check_element(name, implementation)
    for text in FORMAT_CASES:
        check_format(text, implementation)
    check_random_words(implementation)


def philox_4x32(counter: Tensor, key: tuple[int, int], rounds: int, implementation: str) -> Tensor:
    """The kernel's words, on the CPU."""
    return torch.from_numpy(_where(implementation, _philox_4x32, counter.numpy(), key, rounds))


def _where(implementation: str, function: Callable[..., Any], *arguments: Any) -> Any:
    if implementation == "interpreter":
        return in_triton_process(function, *arguments, "cpu", interpret=True)
    return function(*arguments, "cuda")


def element_inputs(element: Element | Integer, limit: int | None = None) -> Tensor:
    """float32 of both signs around every number of the element and every midpoint, and what else is special.

    limit: at most that many numbers, drawn with a fixed seed.
    """
    if isinstance(element, Integer):
        numbers = torch.arange(element.max + 2, dtype=torch.float64)
    else:
        numbers = decode_fields(torch.arange(element.max_code + 1), element)
        beyond = 2 * element.max - numbers[-2]  # what would follow the largest number
        numbers = torch.cat([numbers, beyond[None]])
    random = torch.Generator().manual_seed(0)
    near = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    if limit is not None and len(near) > limit:
        # The ends of the range, subnormals and overflow, always stay.
        kept = torch.randint(0, len(near), (limit,), generator=random)
        near = torch.cat([near[kept], numbers[:64], numbers[-64:], (near[-64:] + 0)])
    bits = near.to(torch.float32).view(torch.int32)
    anything = torch.randint(0, 0x7F800000, (4096,), generator=random, dtype=torch.int32)
    special = [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F800000]
    nans = [0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    edges = torch.tensor(special + nans, dtype=torch.int32)
    magnitudes = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0), anything, edges])
    return torch.cat([magnitudes, magnitudes | torch.iinfo(torch.int32).min]).view(torch.float32)


def element_words(x: Tensor, element: Element | Integer, bits: int) -> Tensor:
    """int64 random words for x, many of them where the decision between two codes tips; high bits are noise."""
    random = torch.Generator().manual_seed(bits)
    magnitude = x.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    quantum = torch.ones_like(magnitude)
    if isinstance(element, Element):
        exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=element.min_exponent)
        quantum = torch.ldexp(quantum, exponent - element.mantissa_bits)
    units = magnitude / quantum
    share = ((units - units.floor()) * 2.0**bits).floor().long()
    whole = 1 << bits
    choices = [whole - share + step for step in (-1, 0, 1)] + [share + step for step in (-1, 0, 1, 2)]
    choices += [torch.zeros_like(share), torch.full_like(share, whole - 1)]
    choices.append(torch.randint(0, whole, x.shape, generator=random))
    pick = torch.randint(0, len(choices), x.shape, generator=random)
    low = torch.stack(choices).gather(0, pick[None])[0].clamp(0, whole - 1)
    return low | torch.randint(0, 1 << (32 - bits), x.shape, generator=random) << bits


def _check_element(name: str, device: str) -> None:
    from quantlab.kernels import elements as kernels

    element = ELEMENT_CASES[name]
    x = element_inputs(element, None if element.bits <= 16 else 1 << 13)
    some = element_inputs(element, 1 << 12)
    jobs = [(x, Rounding.NEAREST, None, 32), (some, Rounding.TOWARD_ZERO, None, 32)]
    jobs += [
        (some, Rounding.STOCHASTIC, element_words(some, element, bits), bits) for bits in STOCHASTIC_BITS
    ]
    for values, rounding, words, bits in jobs:
        what = f"{name} {rounding.value} {bits}"
        expected = _encoded(values, element, rounding, words, bits)
        given = values.to(device), element, rounding, None if words is None else words.to(device), bits
        with watched_allocations():
            codes = kernels.encode_elements(*given)
            rounded = kernels.round_elements(*given)
        _assert_same(expected.to(codes.dtype), codes, what, values)
        _assert_same(_decoded(expected, element), rounded, f"{what} values", values)
    # Every float16 and bfloat16, which float32 holds exactly.
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        codes = kernels.encode_elements(half.to(device), element)
        expected = _encoded(half.float(), element).to(codes.dtype)
        _assert_same(expected, codes, f"{name} of {dtype}", half.float())
    codes = torch.arange(1 << element.bits)
    if isinstance(element, Integer):
        codes -= 1 << (element.bits - 1)
    with watched_allocations():
        stored = codes.to(kernels.code_dtype(element))
        values = kernels.decode_elements(stored.to(device), element)
    _assert_same(_decoded(codes, element), values, f"{name} decoded", codes)


def _encoded(x: Tensor, element: Element | Integer, *how: Any) -> Tensor:
    if isinstance(element, Integer):
        return encode_integer(x, element, *how)
    return encode_element(x, element, *how)


def _decoded(codes: Tensor, element: Element | Integer) -> Tensor:
    if isinstance(element, Integer):
        return codes.to(torch.float32)
    return decode_fields(codes, element).to(torch.float32)


def format_inputs(fmt: Format) -> Iterator[Tensor]:
    """Values whose scales lie anywhere, in odd shapes and every dtype that the kernels read."""
    random = torch.Generator().manual_seed(3)
    row, element = torch.arange(34), fmt.element

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    x = normal(5, 34, 72)
    # Rows from below the smallest float32 to the largest, and moderate ones that differ from block to block.
    x[0] *= torch.exp2(torch.linspace(-148, 126, 34))[:, None]
    x[0, 1] = torch.where(torch.arange(72) % 7 == 0, 2.0**-149, 0.0)
    x[1] *= torch.exp2(torch.randint(-12, 12, (34, 9), generator=random)).repeat_interleave(8, dim=1)
    x[1, 3, :40], x[1, 4], x[1, 5, 1:] = 0.0, -0.0, 0.0
    x[1, 6, 35], x[1, 7] = 2.0**-149, torch.finfo(torch.float32).tiny / 2
    if fmt.rounded:
        # Largest magnitudes that a scale of powers of two turns on.
        power = 2.0 ** math.floor(math.log2(element.max))
        step = element.eps * power if isinstance(element, Element) else 1.0
        turns = torch.tensor([element.max, element.max + step / 2, power])
        bits = turns.view(torch.int32)
        turns = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
        x[1, 12:21] *= 2.0**-24
        x[1, 12:21, ::32] = turns[:, None]
    # One matrix of zeros, one with the largest float32.
    x[2] = torch.where(row[:, None] % 2 == 0, 0.0, -0.0)
    x[3] *= 1e30
    x[3, 0, 5] = -torch.finfo(torch.float32).max
    if fmt.rounded:
        # Ties: midpoints and their neighbours under scales that are powers of two.
        near = element_inputs(element, 256)
        near = near[near.abs() <= element.max]
        pick = torch.randint(0, len(near), (34, 72), generator=random)
        x[4] = near[pick] * torch.exp2(row - 17)[:, None]
        x[4, :, ::16] = element.max * torch.exp2(row - 17)[:, None]
        x[4, 33, 0] = 448 * element.max * 2.0**16
    if isinstance(element, Element) and element.nan_code is not None:
        x[1, 9, 2], x[1, 10, 20:60], x[4, 3, 3] = math.nan, math.nan, -math.nan
    if fmt.recipe is None and isinstance(element, Element) and element.infinity_code is not None:
        x[0, 0, 0] = math.inf
    yield x
    yield normal(5, 1, 33).to(torch.bfloat16)
    yield (normal(7) * 1e-4).to(torch.float16)
    yield normal(2, 3, 1)


def _check_format(text: str, device: str) -> None:
    from quantlab.kernels import formats as kernels

    fmt = parse(text)
    nibbles = fmt.recipe is not None and fmt.element.bits == 4 and fmt.granularity not in ("tile32", "head")
    for x in format_inputs(fmt):
        what = f"{text} {tuple(x.shape)} {x.dtype}"
        words = None
        if fmt.stochastic:
            words = torch.randint(0, 1 << 32, x.shape, generator=torch.Generator().manual_seed(4))
        given = x.to(device), None if words is None else words.to(device)
        expected = fmt.quantize(x, words)
        stored = _any_encoded(expected, fmt)
        with watched_allocations():
            got = kernels.quantize(fmt, *given)
            rounded = kernels.round(fmt, *given)
            decoded = kernels.dequantize(fmt, _on(stored, device))
            packed = kernels.quantize_packed(fmt, *given) if nibbles else None
        _assert_same_parts(expected, got, what)
        _assert_same(fmt.dequantize(expected), rounded, f"{what} rounded", x)
        _assert_same(fmt.dequantize(stored), decoded, f"{what} decoded", stored.codes)
        if packed is not None:
            _assert_same_parts(fmt.pack(expected), packed, f"{what} packed")


def _any_encoded(encoded: Encoded, fmt: Format) -> Encoded:
    """The same shapes, where every second code and scale is any that memory may hold."""
    random = torch.Generator().manual_seed(5)

    def disturbed(part: Tensor, mask: int = -1) -> Tensor:
        if part.dtype.is_floating_point:
            bits = torch.randint(0, 0x7F800000, part.shape, generator=random, dtype=torch.int32)
            other = bits.view(torch.float32)
        else:
            bounds = torch.iinfo(part.dtype)
            other = torch.randint(bounds.min, bounds.max, part.shape, generator=random) & mask
            other = other.to(part.dtype)
        return torch.where(torch.rand(part.shape, generator=random) < 0.5, part, other)

    if not fmt.rounded:
        return encoded
    codes = disturbed(encoded.codes, -1 if isinstance(fmt.element, Integer) else (1 << fmt.element.bits) - 1)
    scales = None if encoded.scales is None else disturbed(encoded.scales)
    return Encoded(codes, scales, encoded.global_scale)


def _on(encoded: Encoded, device: str) -> Encoded:
    scales, global_scale = (
        None if part is None else part.to(device) for part in (encoded.scales, encoded.global_scale)
    )
    return Encoded(encoded.codes.to(device), scales, global_scale)


def _check_random_words(device: str) -> None:
    from quantlab.kernels import random as kernels

    store_numbers = torch.tensor([0, 1, (1 << 32) + 5, -1])
    sequence_ids = torch.tensor([7, 0, 1 << 40, 3])
    # seed, layer, part, rounds
    streams = ((0, 0, 0, 10), (1, 0, 1, 7), ((1 << 63) + 12345, 91, 3, 5), (-7, 3, 2, 10))
    for shape in ((4, 2, 5, 9), (4, 1, 1, 1), (4, 1, 64, 160)):
        for seed, *given in streams:
            expected = reference_random.random_words(shape, seed, store_numbers, sequence_ids, *given)
            with watched_allocations():
                on_device = store_numbers.to(device), sequence_ids.to(device)
                got = kernels.random_words(shape, seed, *on_device, *given)
            _assert_same(expected, got, f"random words {shape} {seed} {given}", expected)


def _philox_4x32(counter: numpy.ndarray, key: tuple[int, int], rounds: int, device: str) -> numpy.ndarray:
    from quantlab.kernels import random as kernels

    with watched_allocations():
        return kernels.philox_4x32(torch.from_numpy(counter).to(device), key, rounds).cpu().numpy()


def _assert_same_parts(expected: Any, got: Any, what: str) -> None:
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(expected, field.name), getattr(got, field.name)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            _assert_same(ours, theirs, f"{what} {field.name}", None)
        else:
            assert ours == theirs, f"{what} {field.name}: {theirs!r}, expected {ours!r}"


def _assert_same(expected: Tensor, got: Tensor, what: str, of: Tensor | None) -> None:
    """Dtype, shape and bits; a NaN equals any NaN, because a product may change its payload."""
    got = got.cpu()
    assert expected.dtype == got.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert expected.shape == got.shape, f"{what}: {tuple(got.shape)}, expected {tuple(expected.shape)}"
    differ = expected != got
    if expected.dtype.is_floating_point:
        differ |= expected.signbit() != got.signbit()
        differ &= ~(expected.isnan() & got.isnan())
    if differ.any():
        at = tuple(int(i) for i in differ.nonzero()[0])
        source = "" if of is None else f" from {of[at].item()!r}"
        values = f"{got[at].item()!r}{source}, expected {expected[at].item()!r}"
        raise AssertionError(f"{what}: {int(differ.sum())} differ, first at {at}: {values}")
