"""B7, B13, B14, B15, B16, B17: schedules, gates that test nothing, random numbers, slots and rollback."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quantlab.drift.evidence.case import Case, Figure, Measured, pooled_over
from quantlab.drift.evidence.streams import channel_decays, gdn, gdn_stream
from quantlab.drift.measure import run_drift
from quantlab.drift.streams import Stream
from quantlab.drift.synthetic import synthetic_stream
from quantlab.formats import parse
from quantlab.recurrences import StepInputs
from quantlab.recurrences.base import expand_groups, matvec
from quantlab.schemes import DecodeState, SlotPool, StateShape, start
from quantlab.schemes.store import CHECKPOINT_PART, Store


def tokens_of(stream: Stream, first: int, last: int) -> StepInputs:
    """Tokens first .. last - 1 with the token dimension after the batch."""
    tokens = StepInputs(stream.q, stream.k, stream.v, stream.log_decay, stream.beta)
    return tokens.map(lambda t: t[first:last].transpose(0, 1))


def _grouped_stream(family: str) -> Stream:
    """16 tokens, 2 heads, K = 16, V = 128; values of the first 64 channels 80 times smaller than of the second."""
    stream = synthetic_stream(
        family, alpha=0.95, steps=16, heads=2, sequences=1, key_dim=16, value_dim=128, seed=514
    )
    scale = torch.tensor([0.05, 4.0]).repeat_interleave(64)
    return channel_decays(replace(stream, v=stream.v * scale))


def _in_tiles(stream: Stream) -> Stream:
    """The same with each head cut into two tiles of 64 value channels, which share keys and gates."""
    steps, batch, heads, _ = stream.v.shape
    return Stream(
        stream.family,
        q=stream.q,
        k=stream.k,
        v=stream.v.reshape(steps, batch, 2 * heads, 64),
        log_decay=stream.log_decay.repeat_interleave(2, 2),
        beta=None if stream.beta is None else stream.beta.repeat_interleave(2, 2),
        initial=stream.initial.reshape(batch, 2 * heads, 64, -1),
    )


def _outputs_and_state(stream: Stream, *, stored_read: bool = False) -> tuple[Tensor, Tensor]:
    state = start("int8:head@1", stream.family, stream.initial, key_heads=stream.key_heads)
    outputs = []
    for t in range(stream.steps):
        inputs = stream.step(t)
        output = state.step(inputs)
        if stored_read:
            output = matvec(state.materialize(), expand_groups(inputs.q, stream.heads, 1))
        outputs.append(output.reshape(1, 2, 128))
    return torch.stack(outputs), state.materialize().reshape(1, 2, 128, 16)


def _b7(full: bool) -> dict[str, Measured]:
    found = {}
    for name, family in (("GDN", "gated_delta"), ("KDA", "kimi_delta")):
        stream = _grouped_stream(family)
        outputs, state = _outputs_and_state(stream)
        variants = {
            "working read": _outputs_and_state(stream),
            "stored read": _outputs_and_state(stream, stored_read=True),
            "tiled side": _outputs_and_state(_in_tiles(stream)),
        }
        for variant, (other, other_state) in variants.items():
            found[f"{name}, {variant}, output"] = Measured(float((other - outputs).norm() / outputs.norm()))
            found[f"{name}, {variant}, state"] = Measured(float((other_state - state).norm() / state.norm()))
        for variant, part in _B7_LEVELS:
            found[f"thread {name}, {variant}, {part}"] = found[f"{name}, {variant}, {part}"]
    # An integer grid: bfloat16 between 128 and 256.
    one = torch.ones(1, 1, 1)
    token = StepInputs(one, one, 0.6 * one, torch.zeros(1, 1))
    for name, policy in (("end only", "bf16@2"), ("each step", "bf16@2:schedule=step")):
        toy = start(policy, "mamba2", torch.full((1, 1, 1, 1), 128.0))
        for _ in range(2):
            toy.step(token)
        found[f"toy, {name}"] = Measured(toy.materialize().item() - 128.0)
    return found


_GENERATOR = (
    "the level needs the thread's generator (keys, gates, write strengths); where it is zero does not"
)
_B7_LEVELS = {
    ("stored read", "output"): {"GDN": "0.0225", "KDA": "0.0197"},
    ("tiled side", "output"): {"GDN": "0.0522", "KDA": "0.0518"},
    ("tiled side", "state"): {"GDN": "0.257", "KDA": "0.214"},
}
B7 = Case(
    "B7",
    "which groups share a scale, and whether S q is read before or after the store (Model-Optimizer)",
    (
        *(
            figure
            for name in ("GDN", "KDA")
            for figure in (
                Figure(f"{name}, working read, output", "= 0"),
                Figure(f"{name}, working read, state", "= 0"),
                Figure(
                    f"{name}, stored read, output", ">= 1e-6", why="not zero: above what float32 makes of it"
                ),
                Figure(f"{name}, stored read, state", "= 0"),
                Figure(
                    f"{name}, tiled side, output", ">= 1e-6", why="not zero: above what float32 makes of it"
                ),
                Figure(
                    f"{name}, tiled side, state", ">= 1e-6", why="not zero: above what float32 makes of it"
                ),
                *(
                    Figure(f"thread {name}, {variant}, {part}", row[name], comparable=False, why=_GENERATOR)
                    for (variant, part), row in _B7_LEVELS.items()
                ),
            )
        ),
        Figure("toy, end only", "= 1"),
        Figure("toy, each step", "= 2"),
    ),
    _b7,
)


def _b13(full: bool) -> dict[str, Measured]:
    sequences = 32 if full else 8
    generator = torch.Generator().manual_seed(9)
    forget = torch.empty(sequences, 8).uniform_(np.log(1e-4), np.log(0.1), generator=generator).exp()
    stream = gdn_stream(
        torch.log1p(-forget).expand(512, -1, -1).contiguous(), seed=10, key_dim=64, value_dim=64
    )
    half_life = (np.log(0.5) / np.log1p(-forget.double().numpy())).flatten()
    found = {}
    result = run_drift(stream, ["int8@1", "int4@1"])
    for run in result.runs:
        measured = np.isfinite(run.state_error).all(1)
        error = run.state_error[measured].sum(0) / result.state_reference[measured].sum(0)
        found[f"{run.policy}, rank correlation"] = Measured(_rank_correlation(half_life, error))
    return found


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(v)).astype(float) for v in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


B13 = Case(
    "B13",
    "heads that remember longer keep more error: half-life against state error (STEPQuant)",
    (
        Figure("int8@1, rank correlation", ">= 0.8", why="the file's bound for INT6, which lies between"),
        Figure("int4@1, rank correlation", ">= 0.8", why="the file's bound for INT6, which lies between"),
    ),
    _b13,
)


def _b14(full: bool) -> dict[str, Measured]:
    stream = gdn(0.99, 256, full)
    result = run_drift(stream, ["fp32@1", "bf16@1:schedule=turn", "bf16@1"])
    exact, vacuous, real = result.runs
    found = {
        "never stored: stores read": Measured(vacuous.exercised["checkpoint"] or 0),
        "never stored: not_exercised": Measured(vacuous.status == "not_exercised"),
        "never stored: error - fp32@1's": Measured(
            float(np.abs(vacuous.output_error - exact.output_error).max())
        ),
        "every token: stores read": Measured(real.exercised["checkpoint"] or 0),
        "every token: error": pooled_over(real.output_error, result.output_reference),
    }
    for name, size in (("one chunk of 256", 256), ("four of 64", 64)):
        outputs, stores = {}, 0
        for policy in ("fp32@1", "bf16@1"):
            state = start(policy, stream.family, stream.initial)
            parts = [state.extend(tokens_of(stream, n, n + size)) for n in range(0, 256, size)]
            outputs[policy] = torch.cat(parts, 1)
            # The hand-off of a zero state rounds nothing.
            stores = (state.exercised["checkpoint"] or 0) - 1
        difference = outputs["bf16@1"] - outputs["fp32@1"]
        found[f"{name}: stores read"] = Measured(stores)
        found[f"{name}: error"] = Measured(float(difference.norm() / outputs["fp32@1"].norm()))
    return found


B14 = Case(
    "B14",
    "a gate in which no stored state is read back passes, whatever the format (LocalAI)",
    (
        Figure("never stored: stores read", "= 0"),
        Figure("never stored: not_exercised", "= 1"),
        Figure("never stored: error - fp32@1's", "= 0", why="the thread: 100 % agreement at 256 tokens"),
        Figure("every token: stores read", "= 256", why="255 stores and the hand-off"),
        Figure("every token: error", "0.0094", why="B8"),
        Figure("one chunk of 256: stores read", "= 0"),
        Figure(
            "one chunk of 256: error",
            "= 0",
            why="one ubatch: the bf16 state is written and never read",
        ),
        Figure("four of 64: stores read", "= 3"),
        Figure(
            "four of 64: error",
            ">= 1e-4",
            why="the state is read back: a tenth of bf16's eps is already too much",
        ),
    ),
    _b14,
)


def bias_statistic(stores: int, values: int, *, repeated: bool) -> float:
    """Mean over values of z^2, z the average rounding error of one value over many stores in standard errors.

    1 if every store draws fresh bits; the number of stores if all draw the same.  repeated: one store number for all.
    """
    format = parse("bf16+sr")
    generator = torch.Generator().manual_seed(11)
    # In [1, 2) the grid step is 2^-7, whatever the value: p is the fraction of it.
    x = 1 + torch.rand(1, 1, 1, values, generator=generator)
    p = ((x - 1) * 128) % 1.0
    total = torch.zeros(1, 1, 1, values, dtype=torch.float64)
    store = Store(
        format, CHECKPOINT_PART, dtype=torch.float32, seed=3, layer=0, sequence_ids=torch.tensor([0])
    )
    for _ in range(stores):
        if repeated:
            store.hand_off(x)
        else:
            store.write(x)
        total += (store.decoded.double() - x.double()) * 128
    variance = (p * (1 - p)).double() * stores
    kept = variance > 0.01 * stores
    return float((total.square() / variance)[kept].mean())


def _b15(full: bool) -> dict[str, Measured]:
    stores, values = (1000 if full else 250), 4096
    found = {}
    fresh, frozen = (bias_statistic(stores, values, repeated=r) for r in (False, True))
    # z^2 has mean 1 and variance 2.
    found["counters advance: mean z^2"] = Measured(fresh, 2**0.5, values)
    # Of one store (e / sd)^2, the variance is (1 - 2 p)^2 / (p (1 - p)): 5.2 on average over p in [.01, .99].
    found["replayed: mean z^2 / stores"] = Measured(frozen / stores, 5.2**0.5, values)
    initial = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(12))
    codes = {}
    for name, seed, ids in (
        ("first", 7, (0, 1)),
        ("again", 7, (0, 1)),
        ("moved", 7, (1, 0)),
        ("seed", 8, (0, 1)),
    ):
        order = list(ids)
        state = start("fp16+sr@1", "mamba2", initial[order], seed=seed, sequence_ids=torch.tensor(order))
        codes[name] = state.materialize()[order]
    found["same number: codes that differ"] = Measured(int((codes["again"] != codes["first"]).sum()))
    found["other slot: codes that differ"] = Measured(int((codes["moved"] != codes["first"]).sum()))
    found["other seed: share that differs"] = Measured(
        float((codes["seed"] != codes["first"]).double().mean())
    )
    pool = SlotPool("fp16+sr@1", "mamba2", StateShape(2, 16, 64, 2), 1)
    reused = []
    for _ in range(2):
        slot = pool.allocate(initial[0])
        reused.append(pool.materialize(slot))
        pool.free(slot)
    found["reused slot: share that differs"] = Measured(float((reused[0] != reused[1]).double().mean()))
    return found


_SHARE = (
    "two independent roundings of a fraction p differ with probability 2 p (1 - p), 1/3 on average over p; .25 leaves"
    " room for values that fp16 holds exactly"
)
B15 = Case(
    "B15",
    "random bits that repeat under graph replay are a fixed dither, and a bias test must see it",
    (
        Figure("counters advance: mean z^2", "1.0", units=4096),
        Figure(
            "replayed: mean z^2 / stores",
            "1.0",
            units=4096,
            why="the same error each time: n^2 in place of n",
        ),
        Figure("same number: codes that differ", "= 0"),
        Figure("other slot: codes that differ", "= 0"),
        Figure("other seed: share that differs", ">= 0.25", why=_SHARE),
        Figure("reused slot: share that differs", ">= 0.25", why=_SHARE),
    ),
    _b15,
)

# The fork's (heads, P, N, groups), an eighth of the heads, a quarter of P, a half or a quarter of N.
GEOMETRIES = ((12, 20, 32, 1), (16, 16, 64, 2), (32, 16, 32, 4))
PAIRS = tuple(
    f"{store}@{{}}:buffer={buffer}" for store in ("fp32", "bf16", "fp16") for buffer in ("fp32", "bf16")
)


@dataclass(frozen=True)
class SlotReport:
    """Against lone runs: largest difference of an output over its norm, states with other bits, values not finite."""

    difference: float
    states: int
    unfinite: int


def slot_hazards(policy: str, geometry: tuple[int, int, int, int], null: str, tokens: int) -> SlotReport:
    """A pool with padded, shuffled rows against every sequence on its own.

    Four sequences enter one after the other, so that their windows fill at different steps; rows of every forward are
    shuffled and padded with null rows whose inputs are NaN; a fifth sequence takes over the slot of one that ended.
    """
    heads, value_dim, key_dim, groups = geometry
    stream = synthetic_stream(
        "mamba2", alpha=0.9, steps=tokens, heads=heads, sequences=5, key_heads=groups,
        value_dim=value_dim, key_dim=key_dim, seed=13,
    )  # fmt: skip
    shape = StateShape(heads, value_dim, key_dim, groups)
    pool = SlotPool(policy, "mamba2", shape, 5 if null == "zero" else 4, null=null)
    lone = [
        start(policy, "mamba2", stream.initial[:1], key_heads=groups, sequence_ids=torch.tensor([n]))
        for n in range(5)
    ]
    generator = torch.Generator().manual_seed(14)
    entered, at = {}, [0] * 5
    difference, unfinite = 0.0, 0
    for forward in range(tokens):
        if forward < 8 and forward % 2 == 0:
            entered[forward // 2] = pool.allocate(sequence_id=forward // 2)
        if forward == tokens // 2:
            pool.free(entered.pop(1))
            entered[4] = pool.allocate(sequence_id=4)
        rows = [*entered, -1, -1]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
        slots = [entered[n] if n >= 0 else (0 if null == "zero" else -1) for n in rows]
        parts = [stream.step(at[n]).map(lambda t, n=n: t[n]) for n in entered]
        blank = parts[0].map(lambda t: torch.full_like(t, torch.nan))
        given = dict(zip(entered, parts, strict=True))
        picked = [given.get(n, blank) for n in rows]
        batch = StepInputs(
            *(torch.stack(f) for f in zip(*((p.q, p.k, p.v, p.log_decay) for p in picked), strict=True))
        )
        outputs = pool.step(batch, slots)
        for n, output in zip(rows, outputs, strict=True):
            expected = torch.zeros_like(output)
            if n >= 0:
                expected = lone[n].step(given[n].map(lambda t: t[None]))[0]
                at[n] += 1
            norm = float(expected.norm())
            distance = float((output - expected).norm())
            difference = max(difference, distance / norm if norm else distance)
            unfinite += int((~torch.isfinite(output)).sum())
    states = sum(
        not torch.equal(pool.materialize(slot), lone[n].materialize()[0]) for n, slot in entered.items()
    )
    return SlotReport(difference, states, unfinite)


def _b16(full: bool) -> dict[str, Measured]:
    found = {}
    for window in (1, 4, 16):
        reports = [
            slot_hazards(pair.format(window), geometry, null, 96 if full else 36)
            for geometry, pair, null in itertools.product(GEOMETRIES, PAIRS, ("negative", "zero"))
            if window > 1 or "buffer=bf16" not in pair
        ]
        found[f"L {window}: largest output difference"] = Measured(max(r.difference for r in reports))
        found[f"L {window}: states with other bits"] = Measured(sum(r.states for r in reports))
        found[f"L {window}: values not finite"] = Measured(sum(r.unfinite for r in reports))
    return found


B16 = Case(
    "B16",
    "slots: null rows of NaN, reused slots, windows that fill at different steps, wrap-around",
    tuple(
        figure
        for window in (1, 4, 16)
        for figure in (
            Figure(
                f"L {window}: largest output difference",
                "<= 1e-5",
                why="rows of one forward are read through a window as long as the longest: other sums, of at most"
                " window + key_dim = 80 terms, each rounded to 2^-24. A stale or leaked record would be of order 1",
            ),
            Figure(f"L {window}: states with other bits", "= 0"),
            Figure(f"L {window}: values not finite", "= 0"),
        )
    ),
    _b16,
)


def rollback(policy: str, stream: Stream, drafted: int, accepted: int, before: int) -> tuple[bool, float]:
    """Verify, accept some, flush; against plain steps of the accepted tokens: (same bits, relative difference)."""
    plain, drafts = (start(policy, stream.family, stream.initial) for _ in range(2))
    for t in range(before):
        plain.step(stream.step(t))
        drafts.step(stream.step(t))
    drafts.verify(tokens_of(stream, before, before + drafted))
    drafts.commit(torch.full((stream.batch,), accepted))
    for t in range(before, before + accepted):
        plain.step(stream.step(t))
    _settle(plain, drafts)
    first, second = plain.materialize(), drafts.materialize()
    return bool(torch.equal(first, second)), float((first - second).norm() / first.norm())


def _settle(*states: DecodeState) -> None:
    for state in states:
        state.flush()


ROLLBACK = {
    "exact fold": "fp32@16",
    "exact fold, INT8": "int8@16",
    "exact fold, dual": "fp16/nvfp4@16",
    "derived d": "fp32@16:contents=derived",
}


def _b17(full: bool) -> dict[str, Measured]:
    stream = gdn_stream(torch.full((32, 2, 2), 0.97).log(), seed=15, key_dim=64, value_dim=64)
    found = {}
    for name, policy in ROLLBACK.items():
        cells = [
            rollback(policy, stream, drafted, accepted, before)
            for before in (3, 12)
            for drafted in range(2, 9)
            for accepted in range(drafted + 1)
        ]
        if name == "derived d":
            found[f"{name}: largest difference"] = Measured(max(d for _, d in cells))
        else:
            found[f"{name}: unequal of {len(cells)}"] = Measured(sum(not e for e, _ in cells))
    return found


B17 = Case(
    "B17",
    "rollback: T = 2 .. 8 drafts, every accept length, with and without a flush among them",
    (
        *(
            Figure(f"{name}: unequal of 84", "= 0", why="bit for bit")
            for name in ("exact fold", "exact fold, INT8", "exact fold, dual")
        ),
        Figure(
            "derived d: largest difference",
            "<= 5e-6",
            why="d comes from one product of T + window + key_dim = 88 terms instead of T: 88 roundings of 2^-24 each;"
            " far below B10's .003",
        ),
    ),
    _b17,
)

CASES = (B7, B13, B14, B15, B16, B17)
