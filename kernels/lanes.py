"""Tiles of a state that stay in the layout of tensor cores from load to store.

Lane 4 s + t of a warp holds, of a product's tile of 16 rows by 8 columns, columns 2 t and 2 t + 1 of rows s and s + 8.
Which column of the state stands there is free, as long as both operands agree.  Here runs of RUN neighbours of a value
row belong to one lane: run t of every 4 RUN neighbours stands for columns 2 t, 2 t + 1 of RUN / 2 tiles, and ``placed``
orders the other operand so.  A lane then loads, rounds, encodes and stores neighbours, and nothing passes through
shared memory.

Row form is (R, N) with places for columns: 16 rows a warp, 16 WARPS / R warps side by side.  Of wide tiles (64 rows on)
each of these has neighbouring places; of narrow ones (16 rows) every WARPS-th eight of them, as ``mma`` has it.  Lane
form is (R N / (4 RUN), 4 RUN): the runs of four lanes make a line.  It has two dimensions, because which of several
equal ones the compiler spreads lanes over differs between its releases.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def placed(x, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """(J, N) in the order of columns -> of places: place 8 m + 2 t + e of 4 RUN is column RUN t + 2 m + e of a line."""
    J: tl.constexpr = x.shape[0]
    BESIDE: tl.constexpr = WARPS * 16 // R if R < 64 else 1
    runs = tl.reshape(x, (J, BESIDE, N // (4 * RUN * BESIDE), 4, RUN // 2, 2))
    return tl.reshape(tl.permute(runs, (0, 2, 4, 1, 3, 5)), (J, N))


@triton.jit
def column_of_place(place, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Which column of the state stands at a place of row form: the inverse of ``placed``."""
    BESIDE: tl.constexpr = WARPS * 16 // R if R < 64 else 1
    side, m = (place // 8) % BESIDE, (place // (8 * BESIDE)) % (RUN // 2)
    line = place // (4 * RUN * BESIDE) + (N // (4 * RUN * BESIDE)) * side
    return (4 * line + (place // 2) % 4) * RUN + 2 * m + place % 2


@triton.jit
def line_offsets(R: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Where each line of lane form begins, (R N / (4 RUN),), in rows of ROW numbers."""
    BESIDE: tl.constexpr = WARPS * 16 // R
    y = tl.arange(0, R * N // (4 * RUN))
    s, w, v, p = y % 8, (y // 8) % (R // 16), (y // (R // 2)) % BESIDE, (y // (R // 2 * BESIDE)) % 2
    n = y // (R * BESIDE) + (N // (4 * RUN * BESIDE)) * v
    return (16 * w + 8 * p + s) * ROW + 4 * RUN * n


@triton.jit
def lane_offsets(R: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Offsets of a tile in lane form, in rows of ROW numbers."""
    # Said in this way, the compiler sees runs, and gives a lane no more than one of them.
    place = tl.arange(0, 4 * RUN)[None, :]
    return (line_offsets(R, N, ROW, RUN, WARPS)[:, None] + place // RUN * RUN) + place % RUN


@triton.jit
def to_rows(x, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Lane form -> row form."""
    BESIDE: tl.constexpr = WARPS * 16 // R
    x = tl.reshape(x, (N // (4 * RUN * BESIDE), 2, BESIDE, R // 16, 8, 4, RUN // 2, 2))
    if R < 64:
        x = tl.permute(x, (3, 1, 4, 0, 6, 2, 5, 7))
    else:
        x = tl.permute(x, (3, 1, 4, 2, 0, 6, 5, 7))
    return tl.reshape(x, (R, N))


@triton.jit
def from_rows(x, R: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, WARPS: tl.constexpr):
    """Row form -> lane form."""
    BESIDE: tl.constexpr = WARPS * 16 // R
    LINES: tl.constexpr = N // (4 * RUN * BESIDE)
    if R < 64:
        x = tl.permute(
            tl.reshape(x, (R // 16, 2, 8, LINES, RUN // 2, BESIDE, 4, 2)), (3, 1, 5, 0, 2, 6, 4, 7)
        )
    else:
        x = tl.permute(
            tl.reshape(x, (R // 16, 2, 8, BESIDE, LINES, RUN // 2, 4, 2)), (4, 1, 3, 0, 2, 6, 5, 7)
        )
    return tl.reshape(x, (R * N // (4 * RUN), 4 * RUN))
