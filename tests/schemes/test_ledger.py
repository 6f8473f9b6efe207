"""The byte ledger against a window that is simulated step by step, access by access.

The simulation knows nothing of closed sums: it walks the steps of some cycles and writes down, for each tensor in
memory, what a kernel has to fetch and to put back.  Tensors are named, so that two uses of one in a step count once.
"""

from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats import parse
from quantlab.recurrences import RECURRENCES
from quantlab.schemes import StateShape, parse_policy
from quantlab.schemes.ledger import ledger, native_verify_ledger, record_bytes, verify_ledger

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
    # beside it two components of 5 + 32 float16 a head, or one row of 32
    "nvfp4+rank2": ELEMENTS // 2 + ELEMENTS // 16 + 4 * 6 + 6 * 2 * 2 * (5 + 32),
    "nvfp4+keyscale": ELEMENTS // 2 + ELEMENTS // 16 + 4 * 6 + 6 * 32,  # a byte a key column and head
    "nvfp4+mean+ef": ELEMENTS // 2 + ELEMENTS // 16 + 4 * 6 + 6 * 2 * 32,
}
RESIDUAL = {"int8+ef": 2 * ELEMENTS, "int8+ef.fp32": 4 * ELEMENTS, "nvfp4+ef": 2 * ELEMENTS}
RESIDUAL["nvfp4+mean+ef"] = 2 * ELEMENTS
ALL = [
    *("fp32@1", "nvfp4@1", "int8+ef@1", "fp32/nvfp4@1:flush_read=copy", "int8+ef.fp32@5", "nvfp4+ef@2"),
    *("fp32@2", "fp32@16", "fp32@16:buffer=bf16", "fp64@4", "fp64@4:buffer=fp16", "fp64/nvfp4@4"),
    *("fp32/nvfp4@2", "fp16+sr/nvfp4@16", "fp8/nvfp4@4:flush_read=copy", "int8+ef/nvfp4@3:buffer=fp16"),
    *("fp32/nvfp4+rank2@16", "nvfp4+rank2@1", "nvfp4+mean+ef@4", "fp16/nvfp4+keyscale@4"),
]
DELTA = [
    *("fp32@4:contents=derived", "fp32/nvfp4@4:contents=derived", "fp32/nvfp4@4:key_read=checkpoint"),
    *("fp32/nvfp4@4:contents=derived:key_read=checkpoint", "fp32/nvfp4@4:contents=derived:flush_read=copy"),
    *("fp8/nvfp4@4:key_read=checkpoint:flush_read=copy", "fp32/nvfp4@1:flush_read=copy:key_read=checkpoint"),
    "fp16/nvfp4@5:contents=derived:flush_read=copy:key_read=checkpoint:buffer=bf16",
]
# The options that decide when and what is folded.
SCHEDULES = [
    *(
        "fp16@16:flush=early",
        "fp32/nvfp4@5:flush=early",
        "fp8/nvfp4@5:flush=early:flush_read=copy",
        "fp32@2:flush=early",
    ),
    *(
        "int8+ef@4:flush=early",
        "int8@4:schedule=step",
        "int8+ef@6:schedule=step:buffer=bf16",
        "fp16@2:schedule=step",
    ),
    *(
        "int8+ef@4:schedule=turn",
        "nvfp4@16:schedule=chunk:flush=early",
        "int8/nvfp4@4:schedule=turn",
        "int8@1:schedule=turn",
    ),
    *("int8+ef@4:ef_read=include", "nvfp4+ef@1:ef_read=include", "int8+ef@7:ef_read=include:flush=early"),
    *("fp32@16:buffer=hilo", "fp64@4:buffer=hilo:flush=early", "fp16@4:buffer=bf16:current=buffer"),
]
SCHEDULES_DELTA = [
    *("fp32/nvfp4@5:flush=early:contents=derived", "fp32/nvfp4@5:flush=early:key_read=checkpoint"),
    *(
        "fp16@16:flush=early:contents=derived",
        "fp8/nvfp4@6:schedule=chunk:key_read=checkpoint:flush_read=copy",
    ),
]
CASES = [(f, p) for f in sorted(RECURRENCES) for p in ALL + SCHEDULES] + [
    (f, p) for f in ("gated_delta", "kimi_delta") for p in DELTA + SCHEDULES_DELTA
]


def make(text):
    """The policy of a text; options are set by hand, so that a grammar that lags behind does not matter."""
    store, _, rest = text.partition("@")
    window, *keys = rest.split(":")
    policy = parse_policy(f"{store}@2")
    options = replace(policy.options, **dict(key.split("=") for key in keys))
    return replace(policy, window=int(window), options=options)


def record_bytes_by_hand(policy, family):
    """Bytes of each field of one record; gates and write strengths stay in the dtype of the arithmetic."""
    arithmetic = 8 if policy.checkpoint.name == "fp64" else 4
    vector = {"fp32": arithmetic, "bf16": 2, "fp16": 2, "hilo": 2 + 2}[policy.options.buffer]
    return {
        "k": SHAPE.key_heads * SHAPE.key_dim * vector,
        "d": SHAPE.heads * SHAPE.value_dim * vector,
        "v": SHAPE.heads * SHAPE.value_dim * vector,
        "beta": SHAPE.heads * arithmetic,
        "gate": SHAPE.heads
        * {"mamba1": SHAPE.value_dim, "kimi_delta": SHAPE.key_dim}.get(family, 1)
        * arithmetic,
    }


class Memory:
    """The memory of one sequence: names, sizes, and what was moved by part."""

    def __init__(self, policy, family):
        self.policy, self.options = policy, policy.options
        self.delta = family in ("gated_delta", "kimi_delta")
        self.fields = record_bytes_by_hand(policy, family)
        self.parked = self.options.schedule in ("chunk", "turn")  # the format is applied outside decoding
        arithmetic = 8 if policy.checkpoint.name == "fp64" else 4
        self.state = "working state" if self.parked else "checkpoint"
        self.sizes = {self.state: arithmetic * ELEMENTS if self.parked else STORED[policy.checkpoint.text]}
        if policy.read_copy:
            self.sizes["read copy"] = STORED[policy.read_copy.text]
        self.residual = RESIDUAL.get(policy.checkpoint.text)
        self.replays = self.options.schedule == "step"
        self.raw = self.delta and self.options.contents != "derived"
        self.inputs = [*("k", "v" if self.delta else "d"), *(["beta"] if self.delta else []), "gate"]
        # What a token leaves: inputs alone where a replay steps through them, else inputs and d, or d for v.
        if self.replays or policy.window == 1:
            self.kept = self.inputs
        else:
            self.kept = [*self.inputs, "d"] if self.raw and self.delta else ["k", "d", "gate"]
        self.moved = {"read": {}, "written": {}}
        self.touched = set()

    def count(self, side, part, size):
        self.moved[side][part] = self.moved[side].get(part, 0) + size

    def launch(self):
        """A kernel starts: what it fetches twice it fetches once."""
        for tensor in self.touched:
            if isinstance(tensor, tuple):
                self.count("read", "buffer", self.fields[tensor[1]])
            else:
                self.count("read", tensor, self.residual if tensor == "residual" else self.sizes[tensor])
        self.touched = set()

    def read_through(self, store, window):
        self.touched.add(store)
        if store == self.state and self.residual and (self.options.ef_read == "include" or self.replays):
            self.touched.add("residual")
        names = self.inputs if self.replays else ("k", "d", "gate")
        self.touched.update((j, name) for j in window for name in names)

    def read_token(self, window, *, q=True, k=True):
        serves_q = "read copy" if self.policy.read_copy else self.state
        if q:
            self.read_through(serves_q, window)
        if k and self.delta:
            self.read_through(self.state if self.options.key_read == "checkpoint" else serves_q, window)

    def fold(self, window):
        self.touched.add(self.state)
        again = self.replays or self.policy.window == 1 or (self.delta and self.raw)
        names = self.inputs if again else ("k", "d", "gate")
        self.touched.update((j, name) for j in window for name in names)
        if self.residual and not self.parked:
            self.touched.add("residual")
            self.count("written", "residual", self.residual)
        for part, size in self.sizes.items():
            self.count("written", part, size)

    def append(self):
        self.count("written", "buffer", sum(self.fields[name] for name in self.kept))

    def held(self, records):
        held = dict(self.sizes)
        if self.residual:
            held["residual"] = self.residual
        if records:
            held["buffer"] = records * sum(self.fields[name] for name in self.kept)
        return held

    def mean(self, times):
        return [{part: n / times for part, n in self.moved[side].items()} for side in ("read", "written")]


def simulate(policy, family, cycles=3):
    """(read, written) bytes per token by part, (held) bytes by part: plain decoding from one fold to another."""
    memory, options, window = Memory(policy, family), policy.options, []
    most, tokens, folds = 0, 0, 0
    for token in range((cycles + 1) * policy.window):
        if options.flush == "early" and len(window) + 2 > policy.window:
            folds += 1
            if folds == 1:  # the first cycle starts with an empty window, unlike all others
                memory.moved, tokens = {"read": {}, "written": {}}, 0
            if folds == cycles + 1:
                break
            memory.fold(window)  # and the token reads what the fold left on chip
            window = []
        elif options.flush == "full" and len(window) == policy.window - 1:
            copied = options.flush_read == "copy"
            # The current token's d of a delta rule: read where the key is read, unless a flush solves for it.
            again = policy.window > 1 and (memory.raw or memory.replays)
            memory.read_token(window, q=copied, k=copied or not again)
            memory.fold(window)
            memory.launch()
            window, tokens = [], tokens + 1
            continue
        else:
            memory.read_token(window)
        memory.launch()
        memory.append()
        window.append(token)
        tokens, most = tokens + 1, max(most, len(window))
    assert folds == cycles + 1 if options.flush == "early" else tokens == (cycles + 1) * policy.window
    return *memory.mean(tokens), memory.held(most)


@pytest.mark.parametrize(("family", "text"), CASES)
def test_the_ledger_is_what_a_kernel_moves(family, text):
    policy = make(text)
    found = ledger(policy, RECURRENCES[family], SHAPE)
    read, written, held = simulate(policy, family)
    # Sums of whole numbers of bytes divided by the window: float64 rounding only.
    assert found.read == pytest.approx(read, rel=1e-12)
    assert found.written == pytest.approx(written, rel=1e-12)
    assert found.held == pytest.approx(held, rel=1e-12)
    assert found.bytes_per_token == pytest.approx(sum(read.values()) + sum(written.values()), rel=1e-12)
    assert found.bits_per_value == pytest.approx(8 * sum(held.values()) / ELEMENTS, rel=1e-12)


def simulate_verify(policy, family, tokens, accepted, forwards=200):
    """(read, written) bytes per forward by part, from a forward to a later one that finds the window as it did."""
    memory, window, at_start, since, counted = Memory(policy, family), [], None, 0, None
    for forward in range(forwards):
        if forward == 50:
            memory.moved, at_start, since = {"read": {}, "written": {}}, len(window), 0
        elif at_start is not None and len(window) == at_start:
            counted = since
            break
        since += 1
        if policy.options.flush == "early" and len(window) + 2 * tokens > policy.window:
            if window:
                memory.fold(window)
            else:
                memory.read_token(window)
            window = []
        else:
            memory.read_token(window)
        memory.launch()
        for _ in range(tokens):
            memory.append()
        window = window + [(forward, t) for t in range(accepted)]
        if policy.options.flush == "full" and len(window) >= policy.window:
            complete = len(window) - len(window) % policy.window
            memory.fold(window[:complete])
            memory.launch()
            window = window[complete:]
    assert counted
    return memory.mean(counted)


VERIFIED = [
    *(
        "fp32@1",
        "fp32@16",
        "fp16@16:flush=early",
        "int8+ef@16:flush=early:ef_read=include",
        "fp32/nvfp4@16:buffer=bf16",
    ),
    *(
        "fp32/nvfp4@16:flush=early",
        "int8+ef@8:schedule=step",
        "int8+ef@5:schedule=turn",
        "nvfp4+ef@3",
        "int8+ef@1",
    ),
]
VERIFIED_DELTA = [
    *(
        "fp32/nvfp4@16:key_read=checkpoint",
        "fp32/nvfp4@16:flush=early:key_read=checkpoint",
        "fp32@16:contents=derived",
    ),
    "fp32/nvfp4@12:contents=derived:flush=early:key_read=checkpoint",
]


@pytest.mark.parametrize(("tokens", "accepted"), [(1, 1), (4, 1), (4, 3), (5, 5), (8, 2), (8, 8)])
@pytest.mark.parametrize(
    ("family", "text"),
    [(f, p) for f in sorted(RECURRENCES) for p in VERIFIED]
    + [(f, p) for f in ("gated_delta", "kimi_delta") for p in VERIFIED_DELTA],
)
def test_a_verify_is_what_its_kernels_move(family, text, tokens, accepted):
    policy = make(text)
    found = verify_ledger(policy, RECURRENCES[family], SHAPE, tokens, accepted)
    read, written = simulate_verify(policy, family, tokens, accepted)
    # Sums of whole numbers of bytes divided by the forwards of a cycle: float64 rounding only.
    assert found.read == pytest.approx(read, rel=1e-12)
    assert found.written == pytest.approx(written, rel=1e-12)
    total = sum(read.values()) + sum(written.values())
    assert found.bytes_per_forward == pytest.approx(total, rel=1e-12)
    assert found.bytes_per_token == pytest.approx(total / accepted, rel=1e-12)
    assert found.held == Memory(policy, family).held(policy.window - 1 + tokens)
    assert ledger(policy, RECURRENCES[family], SHAPE, drafts=tokens).held == found.held


def test_a_verify_of_one_token_with_an_early_flush_is_plain_decoding():
    """The early flush decides before the forward, so that a single accepted token goes the way of a step."""
    for text in ("fp16@16:flush=early", "int8+ef@7:flush=early:ef_read=include", "fp8/nvfp4@5:flush=early"):
        for family in sorted(RECURRENCES):
            plain = ledger(make(text), RECURRENCES[family], SHAPE)
            found = verify_ledger(make(text), RECURRENCES[family], SHAPE, 1, 1)
            assert (found.read, found.written) == (
                pytest.approx(plain.read, rel=1e-12),
                pytest.approx(plain.written, rel=1e-12),
            )


@pytest.mark.parametrize(("tokens", "accepted"), [(1, 1), (4, 3), (5, 1)])
def test_native_speculation_stores_a_state_a_token(tokens, accepted):
    state = STORED["int8+ef"] + RESIDUAL["int8+ef"]
    found = native_verify_ledger(parse("int8+ef"), SHAPE, tokens, accepted)
    assert found.bytes_per_forward == state * (1 + tokens)
    assert found.bytes_per_token == state * (1 + tokens) / accepted
    assert found.bytes_held == state * tokens
    assert found.read == {"checkpoint": STORED["int8+ef"], "residual": RESIDUAL["int8+ef"]}


@pytest.mark.parametrize(("tokens", "accepted"), [(0, 0), (4, 0), (4, 5), (4, -1)])
def test_counts_that_no_verify_has(tokens, accepted):
    with pytest.raises(InputError, match="token"):
        verify_ledger(parse_policy("fp32@16"), RECURRENCES["mamba2"], SHAPE, tokens, accepted)
    with pytest.raises(InputError, match="token"):
        native_verify_ledger(parse("fp32"), SHAPE, tokens, accepted)


@pytest.mark.parametrize("family", sorted(RECURRENCES))
@pytest.mark.parametrize("text", ["fp32@16:buffer=bf16", "fp64@4", "fp16@4:buffer=hilo"])
def test_fields_of_a_record(family, text):
    by_hand = record_bytes_by_hand(make(text), family)
    found = record_bytes(make(text), RECURRENCES[family], SHAPE)
    assert found == {name: by_hand[name] for name in found}
    assert ("beta" in found) == (family in ("gated_delta", "kimi_delta"))


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
    ("nvfp4+rank2", 20): 30 * 6,
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
