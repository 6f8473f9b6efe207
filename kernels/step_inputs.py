"""What a layer's convolution and projections give, as the inputs of ``steps.decode_token``, in one launch.

``decode_token`` wants contiguous q, k, v and log_decay; a model has columns of one wide matrix, and gates without bias,
softplus and norm.  A program makes a piece of one row: of v, of q and k, or of the gates.
"""

# A constexpr stands for the value that it wraps, and a jit function returns; a type checker does not know that.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.errors import InputError
from quantlab.kernels import row_arguments, target
from quantlab.kernels.activations import sigmoid, softplus
from quantlab.kernels.arithmetic import narrowed
from quantlab.kernels.decode import widened
from quantlab.recurrences import StepInputs

L2_EPSILON = 1e-6
"""Inside the square root of the norms of query and key, in every model's own op."""


@dataclass(frozen=True)
class Configuration:
    """values: numbers that one program makes.  warps: of one program."""

    values: int
    warps: int


def configuration(batch: int, values: int) -> Configuration:
    """Small programs until there are several for each multiprocessor.  values: of one row, all together."""
    return Configuration(1024, 4) if batch * values >= 1 << 20 else Configuration(512, 2)


def mamba2_inputs(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None = None,
    *,
    A: Tensor | None = None,
    A_log: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> StepInputs:
    """One token of a Mamba-2 layer, from the convolution's x | B | C and the projection's dt.

    step = softplus(dt + dt_bias);  q = C, k = B, v = step x, log_decay = step A,  A = -exp(A_log)

    In float32, rounded once to ``dtype``: the arithmetic of ``quantlab.models.families.mamba2``.  (transformers'
    ``mamba2_selective_state_update`` rounds dt + dt_bias and the step to the model's dtype, too.)

    x: (batch, H, P), dt: (batch, H), raw; B, C: (batch, G, N): float32, bfloat16 or float16, the numbers of a row
    neighbours.  dt_bias, A, A_log: (H,), contiguous; one of A and A_log.  dtype: of q, k and v; that of x where it is
    None.

    Returns: contiguous q and k (batch, G, N), v (batch, H, P); log_decay (batch, H) in float32.

    Raises:
        InputError: an argument does not fit; names it, and nothing was launched.
    """
    x, B = row_arguments.batched("x", x, 3), row_arguments.batched("B", B, 3)
    (batch, heads, value_dim), device = _three("x", x), x.device
    _, groups, key_dim = _three("B", B)
    _check_groups("B", groups, heads)
    strides = (
        row_arguments.rows("x", x, (batch, heads, value_dim), device),
        row_arguments.rows("dt", dt, (batch, heads), device),
        row_arguments.rows("B", B, (batch, groups, key_dim), device),
        row_arguments.rows("C", C, (batch, groups, key_dim), device),
    )
    if (A is None) == (A_log is None):
        raise InputError("A", "given twice" if A is not None else None, "exactly one of A and A_log")
    row_arguments.whole("A_log" if A is None else "A", A_log if A is None else A, (heads,), device)
    if dt_bias is not None:
        row_arguments.whole("dt_bias", dt_bias, (heads,), device)
    dtype = row_arguments.target_dtype(dtype, x.dtype)
    q, k = (torch.empty((batch, groups, key_dim), dtype=dtype, device=device) for _ in range(2))
    v = torch.empty((batch, heads, value_dim), dtype=dtype, device=device)
    log_decay = torch.empty((batch, heads), dtype=torch.float32, device=device)
    keys, values = groups * key_dim, heads * value_dim
    chosen = configuration(batch, values + 2 * keys)
    run = min(value_dim & -value_dim, 128, chosen.values)  # a power of two, so that no lane is idle
    pieces = -(-values // chosen.values), -(-keys // chosen.values)
    if batch:
        kernel: Any = mamba2_inputs_kernel
        kernel[(batch * sum(pieces),)](
            x,
            dt,
            B,
            C,
            dt_bias,
            A_log if A is None else A,
            q,
            k,
            v,
            log_decay,
            *strides,
            H=heads,
            P=value_dim,
            KEYS=keys,
            LOGARITHM=A is None,
            VALUE_PIECES=pieces[0],
            KEY_PIECES=pieces[1],
            RUN=run,
            BLOCK=chosen.values,
            num_warps=chosen.warps,
            **target.LAUNCH_OPTIONS,
        )
    return StepInputs(q, k, v, log_decay)


def gated_delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    negative_eigenvalues: bool = False,
    dtype: torch.dtype | None = None,
) -> StepInputs:
    """One token of a Gated DeltaNet layer, from the convolution's query | key | value and the projections a and b.

    q = query / sqrt(|query|^2 + 1e-6) / sqrt(K), k = key / sqrt(|key|^2 + 1e-6), v = value,
    log_decay = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), rounded to the dtype of b, twice that with
    negative eigenvalues

    In float32, rounded once to ``dtype``: what ``Qwen3_5GatedDeltaNet`` of transformers and the op that it calls do,
    but that these keep q and k in float32 (``dtype=torch.float32`` does).

    query, key: (batch, HK, K), not repeated; value: (batch, H, V); a, b: (batch, H): float32, bfloat16 or float16,
    the numbers of a row neighbours.  A_log, dt_bias: (H,), contiguous.  dtype: of q, k and v; that of value where it
    is None.

    Returns: contiguous q and k (batch, HK, K), v (batch, H, V), log_decay (batch, H) in float32, beta (batch, H) in the
    dtype of b.

    Raises:
        InputError: an argument does not fit; names it, and nothing was launched.
    """
    return _delta_inputs(query, key, value, ("a", a), b, A_log, dt_bias, negative_eigenvalues, dtype)


def kimi_delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    negative_eigenvalues: bool = False,
    dtype: torch.dtype | None = None,
) -> StepInputs:
    """One token of a Kimi Delta Attention layer: ``gated_delta_inputs`` with a decay for each key channel.

    log_decay = -exp(A_log) softplus(g + dt_bias) as in ``KimiLinearForgetGate`` of transformers, which forms
    log(1 + exp(x)) directly and so loses the last places of small steps: 2^-24 absolutely.

    g: (batch, H, K), raw; dt_bias: (H K,); A_log: of H numbers, any shape; others as in ``gated_delta_inputs``.

    Returns: as ``gated_delta_inputs``, log_decay (batch, H, K).

    Raises:
        InputError: an argument does not fit; names it, and nothing was launched.
    """
    return _delta_inputs(query, key, value, ("g", g), b, A_log, dt_bias, negative_eigenvalues, dtype)


def _delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: tuple[str, Tensor],
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    negative_eigenvalues: bool,
    dtype: torch.dtype | None,
) -> StepInputs:
    query, value = row_arguments.batched("query", query, 3), row_arguments.batched("value", value, 3)
    (batch, key_heads, key_dim), device = _three("query", query), query.device
    _, heads, value_dim = _three("value", value)
    _check_groups("query", key_heads, heads)
    by_channel = gate[0] == "g"
    gate_sizes = (batch, heads, key_dim) if by_channel else (batch, heads)
    strides = (
        row_arguments.rows("query", query, (batch, key_heads, key_dim), device),
        row_arguments.rows("key", key, (batch, key_heads, key_dim), device),
        row_arguments.rows("value", value, (batch, heads, value_dim), device),
        row_arguments.rows(*gate, gate_sizes, device),
        row_arguments.rows("b", b, (batch, heads), device),
    )
    row_arguments.whole("dt_bias", dt_bias, (heads * key_dim if by_channel else heads,), device)
    sizes = tuple(A_log.shape) if isinstance(A_log, Tensor) and A_log.numel() == heads else (heads,)
    row_arguments.whole("A_log", A_log, sizes, device)
    dtype = row_arguments.target_dtype(dtype, value.dtype)
    q, k = (torch.empty((batch, key_heads, key_dim), dtype=dtype, device=device) for _ in range(2))
    v = torch.empty((batch, heads, value_dim), dtype=dtype, device=device)
    log_decay = torch.empty(gate_sizes, dtype=torch.float32, device=device)
    beta = torch.empty((batch, heads), dtype=b.dtype, device=device)
    chosen = configuration(batch, 2 * key_heads * key_dim + heads * value_dim)
    block = triton.next_power_of_2(key_dim)
    rows = max(1, chosen.values // block)
    gate_rows = rows if by_channel else triton.next_power_of_2(heads)
    pieces = -(-heads * value_dim // chosen.values), -(-key_heads // rows), -(-heads // gate_rows)
    if batch:
        kernel: Any = delta_inputs_kernel
        kernel[(batch * sum(pieces),)](
            query,
            key,
            value,
            gate[1],
            b,
            A_log,
            dt_bias,
            q,
            k,
            v,
            log_decay,
            beta,
            *strides,
            H=heads,
            HK=key_heads,
            K=key_dim,
            VALUES=heads * value_dim,
            CHANNELS=key_dim if by_channel else 1,
            SCALE=key_dim**-0.5,
            EPS=L2_EPSILON,
            TWICE=bool(negative_eigenvalues),
            VALUE_PIECES=pieces[0],
            KEY_PIECES=pieces[1],
            GATE_PIECES=pieces[2],
            ROWS=rows,
            GATE_ROWS=gate_rows,
            KEY_BLOCK=block,
            BLOCK=chosen.values,
            num_warps=chosen.warps,
            **target.LAUNCH_OPTIONS,
        )
    return StepInputs(q, k, v, log_decay, beta)


def _three(name: str, given: Tensor) -> tuple[int, int, int]:
    if given.ndim != 3 or not all(given.shape[1:]):
        raise InputError(name, tuple(given.shape), "shape (batch, heads, dim)")
    batch, heads, dim = given.shape
    return batch, heads, dim


def _check_groups(name: str, key_heads: int, heads: int) -> None:
    if heads % key_heads:
        raise InputError(name, f"{key_heads} key heads", f"a number that divides {heads} heads")


@triton.jit
def mamba2_inputs_kernel(
    x, dt, B, C, dt_bias, A, q, k, v, log_decay, x_stride, dt_stride, B_stride, C_stride,
    H: tl.constexpr, P: tl.constexpr, KEYS: tl.constexpr, LOGARITHM: tl.constexpr, VALUE_PIECES: tl.constexpr,
    KEY_PIECES: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of v, in runs of RUN that belong to one head, or of k and q a program."""
    PIECES: tl.constexpr = VALUE_PIECES + KEY_PIECES
    piece = tl.program_id(0) % PIECES
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    if piece < VALUE_PIECES:
        run = piece * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        here, head = run < H * P // RUN, run // (P // RUN)
        step = widened(tl.load(dt + row * dt_stride + head, mask=here, other=0))
        if dt_bias is not None:
            step += widened(tl.load(dt_bias + head, mask=here, other=0))
        step = softplus(step)
        rate = widened(tl.load(A + head, mask=here, other=0))
        if LOGARITHM:
            rate = -tl.exp(rate)
        tl.store(log_decay + row * H + head, step * rate, mask=here & (run % (P // RUN) == 0))
        at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        values = widened(tl.load(x + row * x_stride + at, mask=here[:, None], other=0)) * step[:, None]
        tl.store(v + row * (H * P) + at, narrowed(values, v.dtype.element_ty), mask=here[:, None])
    else:
        place = (piece - VALUE_PIECES) * BLOCK + tl.arange(0, BLOCK)
        inside = place < KEYS
        keys = tl.load(B + row * B_stride + place, mask=inside, other=0)
        queries = tl.load(C + row * C_stride + place, mask=inside, other=0)
        tl.store(k + row * KEYS + place, narrowed(keys, k.dtype.element_ty), mask=inside)
        tl.store(q + row * KEYS + place, narrowed(queries, q.dtype.element_ty), mask=inside)


@triton.jit
def delta_inputs_kernel(
    query, key, value, gate, b, A_log, dt_bias, q, k, v, log_decay, beta, query_stride, key_stride, value_stride,
    gate_stride, b_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, TWICE: tl.constexpr, VALUE_PIECES: tl.constexpr,
    KEY_PIECES: tl.constexpr, GATE_PIECES: tl.constexpr, ROWS: tl.constexpr, GATE_ROWS: tl.constexpr,
    KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of v, ROWS key heads of q and k, or the gates of GATE_ROWS heads a program."""
    PIECES: tl.constexpr = VALUE_PIECES + KEY_PIECES + GATE_PIECES
    piece = tl.program_id(0) % PIECES
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    column = tl.arange(0, KEY_BLOCK)
    # Names of tensors of different shapes differ from branch to branch: the compiler wants it so.
    if piece < VALUE_PIECES:
        place = piece * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(value + row * value_stride + place, mask=place < VALUES, other=0)
        tl.store(v + row * VALUES + place, narrowed(values, v.dtype.element_ty), mask=place < VALUES)
    elif piece < VALUE_PIECES + KEY_PIECES:
        key_head = (piece - VALUE_PIECES) * ROWS + tl.arange(0, ROWS)
        inside = (key_head < HK)[:, None] & (column < K)[None, :]
        at = key_head[:, None] * K + column[None, :]
        queries = widened(tl.load(query + row * query_stride + at, mask=inside, other=0))
        keys = widened(tl.load(key + row * key_stride + at, mask=inside, other=0))
        queries = queries * tl.rsqrt(tl.sum(queries * queries, 1) + EPS)[:, None] * SCALE
        keys = keys * tl.rsqrt(tl.sum(keys * keys, 1) + EPS)[:, None]
        tl.store(q + row * (HK * K) + at, narrowed(queries, q.dtype.element_ty), mask=inside)
        tl.store(k + row * (HK * K) + at, narrowed(keys, k.dtype.element_ty), mask=inside)
    else:
        head = (piece - VALUE_PIECES - KEY_PIECES) * GATE_ROWS + tl.arange(0, GATE_ROWS)
        there = head < H
        rate = tl.exp(widened(tl.load(A_log + head, mask=there, other=0)))
        strength = sigmoid(widened(tl.load(b + row * b_stride + head, mask=there, other=0)))
        strength = narrowed(strength, beta.dtype.element_ty)
        if TWICE:
            strength = narrowed(widened(strength) * 2.0, beta.dtype.element_ty)
        tl.store(beta + row * H + head, strength, mask=there)
        if CHANNELS == 1:
            _store_decay(gate, dt_bias, log_decay, row * gate_stride, row * H, head, rate, there)
        else:
            channel = head[:, None] * K + column[None, :]
            known = there[:, None] & (column < K)[None, :]
            _store_decay(
                gate, dt_bias, log_decay, row * gate_stride, row * (H * K), channel, rate[:, None], known
            )


@triton.jit
def _store_decay(gate, dt_bias, log_decay, gate_row, row, place, rate, inside):
    """-rate softplus(gate + dt_bias) at each place."""
    step = widened(tl.load(gate + gate_row + place, mask=inside, other=0))
    step = softplus(step + widened(tl.load(dt_bias + place, mask=inside, other=0)))
    tl.store(log_decay + row + place, -rate * step, mask=inside)
