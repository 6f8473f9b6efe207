"""Value rows of a state in the layout of tensor cores, from load to store: decoded, rounded, encoded.

A warp has 16 value rows: lane 4 s + t holds rows 8 p + s and four neighbours of every 16 key dims, which stand for
columns 2 t, 2 t + 1 of two tiles of eight in a matrix product (``key_of_place``).  The key dim comes in pieces of
``PIECE``, so that a product's 16-bit parts of only one are in registers at a time.

A piece of R rows is stored as (4, 8, R / 16, 2, PIECE / 16, 4): t, s, warp, p, sixteen, place in it; lanes come first,
because that is how the compiler deals out what is loaded.  ``lanes`` are the same numbers as (R, PIECE), rows ordered
s, warp, p and columns t, sixteen, place.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from quantlab.kernels.arithmetic import INTERPRETED
from quantlab.kernels.checkpoints import (
    decoded_lanes,
    distance,
    ordinary_distance,
    plain_codes,
    quick_codes,
    row_quotients,
    saturated,
    scale_of_bits,
    small_codes,
)
from quantlab.kernels.decode import widened
from quantlab.kernels.key_scales import inverse_factors
from quantlab.kernels.nvfp4_encode import LIFT, SMALL, block_scales, e2m1_nearest, quotient
from quantlab.kernels.random import element_words

PIECE: tl.constexpr = tl.constexpr(32)
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)


@triton.jit
def key_of_place(place):
    """Which key dim stands at a column of the products."""
    return 16 * (place // 16) + 4 * ((place // 2) % 4) + 2 * ((place // 8) % 2) + place % 2


@triton.jit
def row_of_lane(R: tl.constexpr):
    """Value row of each row of ``lanes``, (R,)."""
    WARPS: tl.constexpr = R // 16
    row = tl.arange(0, R)
    return 16 * ((row // 2) % WARPS) + 8 * (row % 2) + row // (2 * WARPS)


@triton.jit
def piece_offsets(R: tl.constexpr, K: tl.constexpr):
    """Offsets of a stored piece, R rows of K, from the first of its numbers."""
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    s = tl.arange(0, 8)[None, :, None, None, None, None]
    w = tl.arange(0, R // 16)[None, None, :, None, None, None]
    p = tl.arange(0, 2)[None, None, None, :, None, None]
    n = tl.arange(0, PIECE // 16)[None, None, None, None, :, None]
    column = 16 * n + 4 * t + tl.arange(0, 4)[None, None, None, None, None, :]
    return (16 * w + 8 * p + s) * K + column


@triton.jit
def apart(lane):
    """int32 ``lane`` as numbers that the compiler knows nothing of.  Of what is side by side in memory it would give
    one lane several, and pass them through shared memory.
    """
    if not INTERPRETED:
        lane = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [lane], tl.int32, is_pure=True, pack=1)
    return lane


@triton.jit
def row_of_piece(R: tl.constexpr):
    """Value row of each entry of a stored piece, (1, 8, R / 16, 2), ``apart``."""
    s, w = apart(tl.arange(0, 8))[None, :, None, None], tl.arange(0, R // 16)[None, None, :, None]
    return 16 * w + 8 * tl.arange(0, 2)[None, None, None, :] + s


@triton.jit
def piece_columns(R: tl.constexpr):
    """Key dim within a piece of every entry of a vector that each lane loads for itself."""
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    n = tl.arange(0, PIECE // 16)[None, None, None, None, :, None]
    column = 16 * n + 4 * t + tl.arange(0, 4)[None, None, None, None, None, :]
    return tl.broadcast_to(column, (4, 8, R // 16, 1, PIECE // 16, 4))


@triton.jit
def lanes_of_piece(x, R: tl.constexpr):
    """A stored piece as ``lanes``."""
    return tl.reshape(tl.permute(x, (1, 2, 3, 0, 4, 5)), (R, PIECE))


@triton.jit
def piece_of_lanes(x, R: tl.constexpr):
    """The inverse."""
    x = tl.reshape(x, (8, R // 16, 2, 4, PIECE // 16, 4))
    return tl.permute(x, (3, 0, 1, 2, 4, 5))


@triton.jit
def decoded_piece(codes, row_scales, R: tl.constexpr, STORE: tl.constexpr):
    """A stored piece's float32 values; row_scales (R,) in the order of ``lanes``, None where the format has none."""
    if STORE.scale is None:
        values = widened(codes)
    else:
        values = piece_of_lanes(decoded_lanes(lanes_of_piece(codes, R), row_scales, STORE), R)
    return values


@triton.jit
def operand(x, R: tl.constexpr):
    """A stored piece, of any number of sixteens, as (warps, 16, columns), these as ``key_of_place`` says."""
    N: tl.constexpr = x.shape[4]
    x = tl.reshape(x, (4, 8, R // 16, 2, N, 2, 2))
    return tl.reshape(tl.permute(x, (2, 3, 1, 4, 5, 0, 6)), (R // 16, 16, 16 * N))


@triton.jit
def piece_of_operand(x, R: tl.constexpr):
    """The inverse."""
    N: tl.constexpr = x.shape[2] // 16
    x = tl.reshape(x, (R // 16, 2, 8, N, 2, 4, 2))
    return tl.reshape(tl.permute(x, (5, 2, 0, 1, 3, 4, 6)), (4, 8, R // 16, 2, N, 4))


# The other operand of a product comes from memory as tensor cores take it, too, each warp by itself: nothing passes
# through shared memory, and no warp waits for another.  Records stand at columns as ``key_of_place`` says.


@triton.jit
def row_of_record(N: tl.constexpr):
    """N rows in the order of ``key_of_place``, as lanes hold a right operand's: (1, 8, 1, N / 8)."""
    place = 8 * tl.arange(0, N // 8)[None, None, None, :] + tl.arange(0, 8)[None, :, None, None]
    return key_of_place(place)


@triton.jit
def columns_of_lane(R: tl.constexpr, N: tl.constexpr):
    """Columns of 16 that stand in one row, four neighbours a lane: (4, 8, R / 16, N / 8, 4)."""
    column = 4 * tl.arange(0, 4)[:, None, None, None, None] + tl.arange(0, 4)[None, None, None, None, :]
    return tl.broadcast_to(column, (4, 8, R // 16, N // 8, 4))


@triton.jit
def right_operand(x, R: tl.constexpr):
    """x (4, 8, R / 16, N / 8, 4): 16 columns of N rows, as above -> (warps, 16, N)."""
    EIGHTS: tl.constexpr = x.shape[3]
    x = tl.reshape(x, (4, 8, R // 16, EIGHTS, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 0, 5, 3, 1)), (R // 16, 16, 8 * EIGHTS))


@triton.jit
def right_piece(x, R: tl.constexpr):
    """x (4, 8, R / 16, 2, PIECE / 16, 4): a piece of 16 records -> (warps, PIECE, 16)."""
    x = tl.reshape(x, (4, 8, R // 16, 2, PIECE // 16, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 5, 0, 6, 3, 1)), (R // 16, PIECE, 16))


@triton.jit
def afresh(codes):
    """``codes`` as something that the compiler does not know (the grid has one dimension), so that what was made of
    them need not stay in registers.
    """
    if not INTERPRETED:
        BYTES: tl.constexpr = codes.dtype.primitive_bitwidth // 8
        if BYTES < 4:
            codes = tl.inline_asm_elementwise(
                "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; xor.b32 $0, $1, zero; }",
                "=r,r",
                [codes],
                codes.dtype,
                is_pure=True,
                pack=4 // BYTES,
            )
    return codes


@triton.jit
def stored_rows(
    pieces, checkpoint, checkpoint_scales, first, counter, names, R: tl.constexpr, K: tl.constexpr,
    STORE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Round the pieces (``lanes``) of R whole value rows from ``first`` on and store them; returns what they decode to.

    counter: of ``element_words`` at the first element.  names: its other arguments.
    """
    PIECES: tl.constexpr = K // PIECE
    ELEMENT: tl.constexpr = STORE.element
    at = checkpoint + first * K + piece_offsets(R, K)
    scales = 1.0
    found = ()
    if STORE.scale is not None:
        OPTIONS: tl.constexpr = STORE.scale
        bits = tl.zeros((R,), tl.int32)
        for c in tl.static_range(PIECES):
            bits = tl.maximum(bits, tl.max(pieces[c].to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
        scales = scale_of_bits(bits, OPTIONS)
        tl.store(checkpoint_scales + first + row_of_lane(R), scales)
    QUICK: tl.constexpr = STORE.stochastic and hasattr(ELEMENT, "exponent_bits")
    ordinary = True
    if QUICK and STORE.scale is not None:
        # What quick_codes asks of quotients, which saturate; a scale that is NaN or too small for this fails.
        SMALLEST: tl.constexpr = 2.0**ELEMENT.min_exponent
        least = tl.full((R, PIECE), float("inf"), tl.float32)
        for c in tl.static_range(PIECES):
            least = tl.minimum(least, tl.abs(pieces[c]))
        large = (tl.min(least, 1) >= scales * SMALLEST) & (scales >= LEAST_SCALE)
        ordinary = tl.min(large.to(tl.int32)) > 0
    elif QUICK:
        beyond = tl.zeros((R, PIECE), tl.uint32)
        for c in tl.static_range(PIECES):
            beyond = tl.maximum(beyond, distance(saturated(pieces[c], ELEMENT), ELEMENT))
        ordinary = tl.max(beyond) <= ordinary_distance(ELEMENT)
    number, sequence, stream, seed = names
    quad = row_of_lane(R)[:, None] * (K // 4)
    inner = tl.arange(0, PIECE // 4)[None, :]  # t, sixteen
    quad = counter + quad + (4 * (inner % (PIECE // 16)) + inner // (PIECE // 16))
    for c in tl.static_range(PIECES):
        x = pieces[c]
        if STORE.scale is not None:
            x = row_quotients(x, scales)
        if STORE.element is None:
            codes = x
        else:
            words = None
            if STORE.stochastic:
                words = element_words(
                    (quad + c * (PIECE // 4)).to(tl.uint32), number, sequence, stream, seed, ROUNDS
                )
            if QUICK:
                if ordinary:
                    codes, _, _ = quick_codes(x, words, ELEMENT)
                else:
                    codes = general_codes(x, words, STORE)
            else:
                codes = general_codes(x, words, STORE)
        tl.store(at + c * PIECE, piece_of_lanes(codes, R))
        found += (codes,)
    return found, scales


@triton.jit
def general_codes(x, words, STORE: tl.constexpr):
    """Codes of x, in units of its row scales, whatever x is."""
    if STORE.scale is None:
        codes, _ = plain_codes(x, words, STORE)
    else:
        codes = small_codes(x, x, words, STORE)
    return codes


@triton.jit
def divided_piece(codes, row_scales, key_scales, c: tl.constexpr, R: tl.constexpr, STORE: tl.constexpr):
    """``decoded_piece`` of the ``c``-th piece of a head's rows, over its key scales where there are any."""
    values = decoded_piece(codes, row_scales, R, STORE)
    if key_scales is not None:
        # Of a piece's whole shape, so that the compiler gives each lane those of its own numbers.
        exponents = tl.load(key_scales + tl.broadcast_to(piece_columns(R) + c * PIECE, values.shape))
        values *= inverse_factors(exponents.to(tl.int32))
    return values


@triton.jit
def block_maxima(pieces, row_scales, key_scales, R: tl.constexpr, STORE: tl.constexpr):
    """Largest magnitudes of the blocks of whole rows (stored pieces): one (4, 8, R / 16, 2, PIECE / 16) for every four
    pieces.

    Four lanes share a block, so each gets those of another piece's to derive scales from.
    """
    found = ()
    t = tl.arange(0, 4)[:, None, None, None, None]
    for four in tl.static_range(0, len(pieces), 4):
        amax = tl.zeros((4, 8, R // 16, 2, PIECE // 16), tl.float32)
        for c in tl.static_range(four, min(four + 4, len(pieces))):
            largest = tl.max(
                tl.max(tl.abs(divided_piece(pieces[c], row_scales, key_scales, c, R, STORE)), 5), 0
            )
            amax = tl.where(t == c - four, largest[None, :, :, :, :], amax)
        found += (amax,)
    return found


@triton.jit
def encode_rows(
    checkpoint, checkpoint_scales, key_scales, first, shared, code_halves, scale_pairs, R: tl.constexpr,
    K: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The read copy of R whole value rows from ``first`` on, from what is stored of them, under the global scale.

    key_scales: of the head, stored already; None without.  code_halves: int16, four codes each.  scale_pairs: int16,
    two scales each.
    """
    PIECES: tl.constexpr = K // PIECE
    at = checkpoint + first * K + piece_offsets(R, K)
    pieces, row_scales = (), None
    for c in tl.static_range(PIECES):
        pieces += (tl.load(at + c * PIECE),)
    if STORE.scale is not None:
        row_scales = tl.load(checkpoint_scales + first + row_of_lane(R))
    maxima = block_maxima(pieces, row_scales, key_scales, R, STORE)
    t, n = apart(tl.arange(0, 4))[:, None, None, None], tl.arange(0, PIECE // 16)[None, None, None, None, :]
    place = tl.arange(0, 4)[None, None, None, None, None, :]
    row = first + row_of_piece(R)
    lift = tl.where(shared < SMALL, LIFT, 1.0)
    half_at = row[:, :, :, :, None] * (K // 4) + (4 * n + t[:, :, :, :, None])
    pair_at = row * (K // 32) + t
    for four in tl.static_range(0, PIECES, 4):
        scales, divisors, inverses = block_scales(maxima[four // 4] * lift, shared, lift, BLOCK)
        pairs = tl.sum(scales << (8 * n), 4)
        tl.store(scale_pairs + (pair_at + four), pairs.to(tl.int16), mask=t < PIECES - four)
        for c in tl.static_range(four, min(four + 4, PIECES)):
            own = t[:, :, :, :, None] == c - four
            divisor = tl.sum(tl.where(own, divisors, 0.0), 0)[None, :, :, :, :, None]
            inverse = tl.sum(tl.where(own, inverses, 0.0), 0)[None, :, :, :, :, None]
            blocks = divided_piece(afresh(pieces[c]), row_scales, key_scales, c, R, STORE)
            if shared < SMALL:  # remainders would be subnormal
                blocks *= LIFT
            divisor = tl.broadcast_to(divisor, blocks.shape)
            inverse = tl.broadcast_to(inverse, blocks.shape)
            codes = e2m1_nearest(quotient(blocks, divisor, inverse), blocks)
            halves = tl.sum(codes << (4 * place), 5)
            tl.store(code_halves + (half_at + c * (PIECE // 4)), halves.to(tl.int16))
