"""Random words drawn inside a kernel: the twins of ``quantlab.formats.random``.

The generator is Triton's own ``tl.philox``, Philox-4x32 under a 64-bit key; tests hold it to known answers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats.random import check_counters
from quantlab.kernels import target

COUNTERS = 256
"""Of one program.  The interpreter pays by the program, so it takes far more at once."""
INTERPRETED_COUNTERS = 8192


@triton.jit
def element_words(counter, store_number, sequence_id, stream, seed, ROUNDS: tl.constexpr):
    """uint32 words of consecutive elements: counters (..., N) give words (..., 4 N).

    counter: element index within one sequence's state // 4, uint32.  store_number, sequence_id, stream (4 * layer
    + part): uint32, scalars or of a shape that broadcasts with counter.  seed: a 64-bit integer.
    """
    zero = (counter ^ store_number ^ sequence_id ^ stream) & 0
    r0, r1, r2, r3 = tl.philox(  # pyright: ignore[reportGeneralTypeIssues]
        seed, counter + zero, store_number + zero, sequence_id + zero, stream + zero, ROUNDS
    )
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))


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
