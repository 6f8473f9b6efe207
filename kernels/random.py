"""Random words drawn inside a kernel: the twins of ``quantlab.formats.random``.

The generator is Philox-4x32 under a 64-bit key, the numbers of Triton's own ``tl.philox``; tests hold it to known
answers.  Triton forms the halves of a product apart, which makes a round seven instructions; here it is four.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats.random import check_counters
from quantlab.kernels import target
from quantlab.kernels.arithmetic import INTERPRETED

COUNTERS = 256
"""Of one program.  The interpreter pays by the program, so it takes far more at once."""
INTERPRETED_COUNTERS = 8192

MULTIPLIER_A: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLIER_B: tl.constexpr = tl.constexpr(0xCD9E8D57)
WEYL_A: tl.constexpr = tl.constexpr(0x9E3779B9)
WEYL_B: tl.constexpr = tl.constexpr(0xBB67AE85)


@triton.jit
def element_words(counter, store_number, sequence_id, stream, seed, ROUNDS: tl.constexpr):
    """uint32 words of consecutive elements: counters (..., N) give words (..., 4 N).

    counter: element index within one sequence's state // 4, uint32.  store_number, sequence_id, stream (4 * layer
    + part): uint32, scalars or of a shape that broadcasts with counter.  seed: a 64-bit integer.
    """
    zero = (counter ^ store_number ^ sequence_id ^ stream) & 0
    c0, c1, c2, c3 = counter + zero, store_number + zero, sequence_id + zero, stream + zero
    seed = seed.to(tl.uint64)
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high_a, low_a = wide_product(c0, MULTIPLIER_A)
        high_b, low_b = wide_product(c2, MULTIPLIER_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ key_low, low_b, high_a ^ c3 ^ key_high, low_a
        key_low += WEYL_A
        key_high += WEYL_B
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def wide_product(x, FACTOR: tl.constexpr):
    """The upper and the lower half of the 64-bit product of uint32 x and a constant."""
    factor = tl.full(x.shape, FACTOR, tl.uint32)
    if INTERPRETED:
        high, low = tl.umulhi(x, factor), x * factor
    else:
        high, low = tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product; }",
            "=r,=r,r,r",
            [x, factor],
            (tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    return high, low


@triton.jit(do_not_specialize=("seed", "count"))
def philox_kernel(counters, output, seed, count, ROUNDS: tl.constexpr, COUNTERS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * COUNTERS
    at = first + tl.arange(0, COUNTERS)
    mask = at < count
    c0 = tl.load(counters + 4 * at, mask=mask, other=0).to(tl.uint32)
    c1 = tl.load(counters + 4 * at + 1, mask=mask, other=0).to(tl.uint32)
    c2 = tl.load(counters + 4 * at + 2, mask=mask, other=0).to(tl.uint32)
    c3 = tl.load(counters + 4 * at + 3, mask=mask, other=0).to(tl.uint32)
    words = element_words(c0, c1, c2, c3, seed, ROUNDS)
    word = 4 * first + tl.arange(0, 4 * COUNTERS)
    tl.store(output + word, words.to(tl.int64), mask=word < 4 * count)


# Triton would compile anew for every number that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=("seed", "stream", "elements"))
def random_words_kernel(
    store_numbers, sequence_ids, output, seed, stream, elements, ROUNDS: tl.constexpr, COUNTERS: tl.constexpr
):
    row = tl.program_id(0)
    first = tl.program_id(1) * COUNTERS
    counter = (first + tl.arange(0, COUNTERS)).to(tl.uint32)
    store_number = tl.load(store_numbers + row).to(tl.uint32)
    sequence_id = tl.load(sequence_ids + row).to(tl.uint32)
    words = element_words(counter, store_number, sequence_id, stream.to(tl.uint32), seed, ROUNDS)
    element = first.to(tl.int64) * 4 + tl.arange(0, 4 * COUNTERS)
    tl.store(output + row.to(tl.int64) * elements + element, words.to(tl.int64), mask=element < elements)


def philox_4x32(counter: Tensor, key: tuple[int, int], rounds: int = 10) -> Tensor:
    """See ``quantlab.formats.random.philox_4x32``; counter is contiguous.

    Raises:
        InputError: names the argument that is no such thing, or that lies where no kernel runs.
    """
    if counter.dtype != torch.int64 or counter.dim() == 0 or counter.shape[-1] != 4:
        raise InputError("counter", f"{counter.dtype} {tuple(counter.shape)}", "int64 of shape (..., 4)")
    if not counter.is_contiguous():
        raise InputError("counter", f"strides {counter.stride()}", "a contiguous tensor")
    if rounds < 1:
        raise InputError("rounds", rounds, "at least 1")
    _check_device("counter", counter)
    output = torch.empty(counter.shape, dtype=torch.int64, device=counter.device)
    count, counters = counter.numel() // 4, _counters()
    if count:
        grid = (triton.cdiv(count, counters),)
        options = {"ROUNDS": rounds, "COUNTERS": counters, **target.LAUNCH_OPTIONS}
        philox_kernel[grid](counter, output, key[0] | key[1] << 32, count, **options)
    return output


def random_words(
    shape: tuple[int, int, int, int],
    seed: int,
    store_numbers: Tensor,
    sequence_ids: Tensor,
    layer: int,
    part: int,
    rounds: int = 10,
) -> Tensor:
    """See ``quantlab.formats.random.random_words``; computed where ``store_numbers`` is; both are contiguous.

    Raises:
        InputError: names the argument that is no such thing, or that lies where no kernel runs.
    """
    check_counters(shape, seed, store_numbers, sequence_ids, layer, part, rounds)
    batch, elements = shape[0], shape[1] * shape[2] * shape[3]
    for name, value in (("store_numbers", store_numbers), ("sequence_ids", sequence_ids)):
        if not value.is_contiguous():
            raise InputError(name, f"strides {value.stride()}", "a contiguous tensor")
        _check_device(name, value)
    output = torch.empty(shape, dtype=torch.int64, device=store_numbers.device)
    if output.numel():
        counters = _counters()
        grid = batch, triton.cdiv(-(-elements // 4), counters)
        options = {"ROUNDS": rounds, "COUNTERS": counters, **target.LAUNCH_OPTIONS}
        numbers = seed & (2**64 - 1), 4 * layer + part, elements
        random_words_kernel[grid](store_numbers, sequence_ids, output, *numbers, **options)
    return output


def _counters() -> int:
    return INTERPRETED_COUNTERS if target.interpreting() else COUNTERS


def _check_device(name: str, tensor: Tensor) -> None:
    if reason := target.obstacle(tensor.device):
        raise InputError(name, f"a tensor on {tensor.device}", f"a device that runs kernels: {reason}")
