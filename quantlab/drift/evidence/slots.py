"""Cases B16 and B17: rows that come and go, and drafts that are taken back."""

import itertools
from dataclasses import dataclass

import torch

from quantlab.drift.evidence.case import Case, Figure, Measured
from quantlab.drift.evidence.streams import gdn_stream, tokens_of
from quantlab.drift.streams import Stream
from quantlab.drift.synthetic import synthetic_stream
from quantlab.recurrences import StepInputs
from quantlab.schemes import DecodeState, SlotPool, StateShape, start

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

CASES = (B16, B17)
