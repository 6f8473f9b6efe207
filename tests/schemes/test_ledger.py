"""The byte ledger against a window that is simulated step by step, access by access.

The simulation knows nothing of closed sums: it walks the steps of some cycles and writes down, for each tensor in
memory, what a kernel has to fetch and to put back.  Tensors are named, so that two uses of one in a step count once.
"""

import pytest
import torch

from quantlab.recurrences import RECURRENCES
from quantlab.schemes import StateShape, parse_policy
from quantlab.schemes.ledger import ledger

SHAPE = StateShape(heads=6, value_dim=5, key_dim=32, key_heads=2)
ELEMENTS = 6 * 5 * 32
ROWS = 6 * 5
# Bytes of one stored state, by hand: codes, then scales.
STORED = {
    "fp64": 8 * ELEMENTS,
    "fp32": 4 * ELEMENTS,
    "fp16": 2 * ELEMENTS,
    "fp16+sr": 2 * ELEMENTS,
    "int8": ELEMENTS + 4 * ROWS,
    "int8+ef": ELEMENTS + 4 * ROWS,
    "int8+ef.fp32": ELEMENTS + 4 * ROWS,
    "fp8_e4m3": ELEMENTS + 4 * ROWS,
    # half a byte an element, an E4M3 scale for 16 of them, an FP32 scale a head
    "nvfp4": ELEMENTS // 2 + ELEMENTS // 16 + 4 * 6,
    "nvfp4+ef": ELEMENTS // 2 + ELEMENTS // 16 + 4 * 6,
}
RESIDUAL = {"int8+ef": 2 * ELEMENTS, "int8+ef.fp32": 4 * ELEMENTS, "nvfp4+ef": 2 * ELEMENTS}
ALL = [
    *("fp32@1", "nvfp4@1", "int8+ef@1", "fp32/nvfp4@1:flush_read=copy", "int8+ef.fp32@5", "nvfp4+ef@2"),
    *("fp32@2", "fp32@16", "fp32@16:buffer=bf16", "fp64@4", "fp64@4:buffer=fp16", "fp64/nvfp4@4"),
    *("fp32/nvfp4@2", "fp16+sr/nvfp4@16", "fp8/nvfp4@4:flush_read=copy", "int8+ef/nvfp4@3:buffer=fp16"),
]
DELTA = [
    *("fp32@4:contents=derived", "fp32/nvfp4@4:contents=derived", "fp32/nvfp4@4:key_read=checkpoint"),
    *("fp32/nvfp4@4:contents=derived:key_read=checkpoint", "fp32/nvfp4@4:contents=derived:flush_read=copy"),
    *("fp8/nvfp4@4:key_read=checkpoint:flush_read=copy", "fp32/nvfp4@1:flush_read=copy:key_read=checkpoint"),
    "fp16/nvfp4@5:contents=derived:flush_read=copy:key_read=checkpoint:buffer=bf16",
]
CASES = [(f, p) for f in sorted(RECURRENCES) for p in ALL] + [
    (f, p) for f in ("gated_delta", "kimi_delta") for p in DELTA
]


def record_bytes(policy, family):
    """Bytes of each field of one record; gates and write strengths stay in the dtype of the arithmetic."""
    arithmetic = 8 if policy.checkpoint.name == "fp64" else 4
    vector = {"fp32": arithmetic, "bf16": 2, "fp16": 2}[policy.options.buffer]
    return {
        "k": SHAPE.key_heads * SHAPE.key_dim * vector,
        "d": SHAPE.heads * SHAPE.value_dim * vector,
        "v": SHAPE.heads * SHAPE.value_dim * vector,
        "beta": SHAPE.heads * arithmetic,
        "gate": SHAPE.heads
        * {"mamba1": SHAPE.value_dim, "kimi_delta": SHAPE.key_dim}.get(family, 1)
        * arithmetic,
    }


def simulate(policy, family, cycles=3):
    """(read, written) bytes per token by part, (held) bytes by part."""
    options, delta = policy.options, family in ("gated_delta", "kimi_delta")
    raw = delta and policy.window > 1 and options.contents != "derived"
    sizes = {"checkpoint": STORED[policy.checkpoint.text]}
    residual = RESIDUAL.get(policy.checkpoint.text)
    if policy.read_copy:
        sizes["read copy"] = STORED[policy.read_copy.text]
    fields = record_bytes(policy, family)
    kept = ["k", "d", "gate"] + (["v", "beta"] if raw else [])
    serves_q = "read copy" if policy.read_copy else "checkpoint"
    serves_k = "checkpoint" if options.key_read == "checkpoint" else serves_q
    read, written, window, most = {}, {}, [], 0

    def count(table, part, size):
        table[part] = table.get(part, 0) + size

    for token in range(cycles * policy.window):
        touched = set()

        def read_through(store, touched=touched, window=window):
            touched.add(store)
            for j in window:
                touched.update((j, name) for name in ("k", "d", "gate"))

        flush = len(window) == policy.window - 1
        if not flush or options.flush_read == "copy":
            read_through(serves_q)
        # The current token's d of a delta rule: read where the key is read, unless a flush solves for it.
        if delta and (not flush or not raw or options.flush_read == "copy"):
            read_through(serves_k)
        if flush:
            touched.add("checkpoint")
            for j in window:
                touched.update(
                    (j, name) for name in (("k", "v", "beta", "gate") if raw else ("k", "d", "gate"))
                )
            if residual:
                touched.add("residual")
                count(written, "residual", residual)
            for part, size in sizes.items():
                count(written, part, size)
        for tensor in touched:
            if isinstance(tensor, tuple):
                count(read, "buffer", fields[tensor[1]])
            else:
                count(read, tensor, residual if tensor == "residual" else sizes[tensor])
        if flush:
            window = []
        else:
            window.append(token)
            count(written, "buffer", sum(fields[name] for name in kept))
        most = max(most, len(window))
    held = dict(sizes)
    if residual:
        held["residual"] = residual
    if most:
        held["buffer"] = most * sum(fields[name] for name in kept)
    tokens = cycles * policy.window
    return {p: n / tokens for p, n in read.items()}, {p: n / tokens for p, n in written.items()}, held


@pytest.mark.parametrize(("family", "text"), CASES)
def test_the_ledger_is_what_a_kernel_moves(family, text):
    policy = parse_policy(text)
    found = ledger(policy, RECURRENCES[family], SHAPE)
    read, written, held = simulate(policy, family)
    # Sums of whole numbers of bytes divided by the window: float64 rounding only.
    assert found.read == pytest.approx(read, rel=1e-12)
    assert found.written == pytest.approx(written, rel=1e-12)
    assert found.held == pytest.approx(held, rel=1e-12)
    assert found.bytes_per_token == pytest.approx(sum(read.values()) + sum(written.values()), rel=1e-12)
    assert found.bits_per_value == pytest.approx(8 * sum(held.values()) / ELEMENTS, rel=1e-12)


# Bytes of padding of one copy of 6 heads of 5 rows of 20, by hand: NVFP4 fills two blocks of 16 with 12 nibbles more,
# MX one block of 32.  An int4 row of 20 ends on a byte; one of 21 leaves half of one.
PADDED = {
    ("nvfp4", 20): 30 * 6,
    ("nvfp4:none", 20): 30 * 6,
    ("mxfp4", 20): 30 * 6,
    ("mxfp6_e2m3", 20): 30 * 9,
    ("mxfp8_e4m3+sr", 20): 30 * 12,
    ("int4", 21): 30 / 2,
    ("int4", 20): 0,
    ("int8+ef.nvfp4", 20): 0,  # the residual's padding counts as residual
    ("nvfp4+ef.nvfp4", 20): 30 * 6,
}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(("text", "key_dim"), PADDED)
def test_a_key_dim_that_is_no_multiple_of_the_block(text, key_dim, window):
    """Padding is a part of its own, moves with its copy, and the parts add up to the bytes that are packed."""
    shape = StateShape(heads=6, value_dim=5, key_dim=key_dim, key_heads=2)
    policy = parse_policy(f"fp32/{text}@{window}" if window > 1 and "+ef" not in text else f"{text}@{window}")
    found, padding = ledger(policy, RECURRENCES["mamba2"], shape), PADDED[text, key_dim]
    fmt = policy.read_copy or policy.checkpoint
    x = torch.randn(6, 5, key_dim, generator=torch.Generator().manual_seed(0))
    words = torch.zeros(x.shape, dtype=torch.int64) if fmt.stochastic else None
    packed = fmt.pack(fmt.quantize(x, words))
    copy = "read copy" if policy.read_copy else "checkpoint"
    assert found.held.get("padding", 0) == padding
    stored = found.held[copy] + padding + found.held.get("residual", 0)
    assert stored == packed.nbytes
    reads = (window - 1) / window if policy.read_copy else 1
    assert found.read.get("padding", 0) == pytest.approx(padding * reads, rel=1e-12)
    assert found.read[copy] == pytest.approx(found.held[copy] * reads, rel=1e-12)
    assert found.written.get("padding", 0) == pytest.approx(padding / window, rel=1e-12)
