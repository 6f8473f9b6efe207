"""Cases B14 and B15: tests that pass whatever the format is, and the test that must not."""

import numpy as np
import torch

from quantlab.drift.evidence.case import Case, Figure, Measured, pooled_over
from quantlab.drift.evidence.streams import gdn, tokens_of
from quantlab.drift.measure import run_drift
from quantlab.formats import parse
from quantlab.schemes import SlotPool, StateShape, start
from quantlab.schemes.store import CHECKPOINT_PART, Store


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

CASES = (B14, B15)
