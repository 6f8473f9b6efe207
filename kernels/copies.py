"""The read copy in NVFP4, encoded from the stored checkpoint."""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from quantlab.kernels.decode import element_value, widened
from quantlab.kernels.key_scales import inverse_factors, scale_codes
from quantlab.kernels.nvfp4_encode import block_maxima, block_pointers, encode_blocks, pack_words
from quantlab.kernels.scales import float_scale


@triton.jit
def stored_blocks(
    checkpoint, checkpoint_scales, head, row, P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """float32 values of the value rows ``row`` of a head's checkpoint, shape of ``block_pointers``."""
    ELEMENT: tl.constexpr = STORE.element
    values = tl.load(block_pointers(checkpoint + head * (P * N), row, N, WIDTH))
    if STORE.scale is None:
        values = widened(values)
    else:
        row_scales = tl.load(checkpoint_scales + head * P + row)
        values = element_value(values, ELEMENT) * row_scales[None, :, None, None]
    return values


@triton.jit
def store_key_scales(
    checkpoint, checkpoint_scales, key_scales, head,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Derive and store the key scales of a head, R value rows at a time.

    Returns their inverses (16 / WIDTH, N / 16, WIDTH), places as ``block_pointers`` has them, and the largest magnitude
    of what is left of the head.
    """
    largest = tl.zeros((16 // WIDTH, N // 16, WIDTH), tl.float32)
    for tile in tl.range(P // R):
        row = tile * R + tl.arange(0, R)
        values = stored_blocks(checkpoint, checkpoint_scales, head, row, P, N, WIDTH, STORE)
        largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
    codes = scale_codes(largest)
    part, block, place = tl.arange(0, 16 // WIDTH), tl.arange(0, N // 16), tl.arange(0, WIDTH)
    column = WIDTH * part[:, None, None] + 16 * block[None, :, None] + place[None, None, :]
    tl.store(key_scales + head * N + column, codes.to(tl.uint8))
    inverse = inverse_factors(codes)
    return inverse, tl.max(largest * inverse)


@triton.jit
def encode_rows(
    checkpoint, checkpoint_scales, words, scales, head, first, shared, inverse,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The R value rows of a head from ``first`` on, under the global scale ``shared``.

    inverse: of ``store_key_scales``, None without key scales.  WIDTH: values that make 16 bytes of the checkpoint, 4 to
    16.
    """
    block, row = tl.arange(0, N // 16), first + tl.arange(0, R)
    values = stored_blocks(checkpoint, checkpoint_scales, head, row, P, N, WIDTH, STORE)
    if inverse is not None:
        values *= inverse[:, None, :, :]
    tops, scale = encode_blocks(values, block_maxima(values), shared, BLOCK)
    scale_at = scales + head * (P * N // 16) + (row[:, None] * (N // 16) + block[None, :])
    tl.store(scale_at, scale.to(tl.uint8))
    half = tl.arange(0, 2)
    inner = row[:, None] * (N // 8) + 2 * block[None, :]
    word_at = words + head * (P * N // 8) + (half[:, None, None] + inner[None, :, :])
    tl.store(word_at, pack_words(tops, R, N, WIDTH))


@triton.jit
def encode_kernel(
    rows, count, slots, largest, checkpoint, checkpoint_scales, words, scales, global_scale,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, STORE: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The read copies of whole slots.  rows (B,): batch rows, ``count`` of them.  largest (B, H, PARTS): of
    |checkpoint| of parts of each head.

    LANES: a power of two >= PARTS.  Without row scales P and N, a power of two, may be another shape of one matrix.
    """
    TILES: tl.constexpr = P // R
    total = tl.load(count) * (H * TILES)
    part = tl.arange(0, LANES)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        i, h, first = item // (H * TILES), (item // TILES) % H, (item % TILES) * R
        slot = tl.load(slots + tl.load(rows + i)).to(tl.int64)
        head = slot * H + h
        largest_at = largest + (i * H + h) * PARTS + part
        amax = tl.max(tl.load(largest_at, mask=part < PARTS, other=0), 0)
        shared, _ = float_scale(amax, 1.0, GLOBAL)
        if first == 0:
            tl.store(global_scale + head, shared)
        encode_rows(
            checkpoint,
            checkpoint_scales,
            words,
            scales,
            head,
            first,
            shared,
            None,
            P,
            N,
            R,
            WIDTH,
            STORE,
            BLOCK,
        )


@triton.jit
def encode_heads_kernel(
    rows, count, slots, checkpoint, checkpoint_scales, words, scales, global_scale, key_scales,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, STORE: tl.constexpr,
    GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``encode_kernel``, with key scales: a program has whole heads, R value rows of them at a time."""
    total = tl.load(count) * H
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        slot = tl.load(slots + tl.load(rows + item // H)).to(tl.int64)
        head = slot * H + item % H
        inverse, amax = store_key_scales(
            checkpoint, checkpoint_scales, key_scales, head, P, N, R, WIDTH, STORE
        )
        shared, _ = float_scale(amax, 1.0, GLOBAL)
        tl.store(global_scale + head, shared)
        for tile in tl.range(P // R):
            encode_rows(
                checkpoint,
                checkpoint_scales,
                words,
                scales,
                head,
                tile * R,
                shared,
                inverse,
                P,
                N,
                R,
                WIDTH,
                STORE,
                BLOCK,
            )
