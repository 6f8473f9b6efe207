"""The conformance suite of speculative decoding on pooled memory: what ``verify_tokens`` and ``commit_tokens`` must do.

``check_drafts`` runs rounds of both with an implementation, as ``pools.check_pool`` runs steps, and checks each against
the memory that it found: every draft's output and every fold against the recurrence in float64 under the bounds of
``pool_steps``, what was stored and encoded against the formats, and everything else against what was there before.
"""

import contextlib
import importlib
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from quantlab.recurrences import StepInputs
from quantlab.schemes.drafts import ORIGINS
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.pool import LayerPool, allocate_pool
from quantlab.testing import _same_memory_on, guarded
from quantlab.testing.pool_steps import (
    UNIT,
    Step,
    Terms,
    _check_checkpoint,
    _check_copy,
    _check_output,
    _check_record,
    _check_untouched,
    _counts,
    _decoded,
    _evaluate,
    _held,
    _terms,
)
from quantlab.testing.pools import (
    RINGS,
    PoolCase,
    _around,
    _as_bytes,
    _bytes,
    _guarded,
    _kernels_watched,
    _pool,
    _restored,
    _token,
    _where,
)

PLANNED = ("positions", "counts", "flush_rows", "flush_count")


@dataclass(frozen=True)
class DraftCase(PoolCase):
    """Rounds of a verification of ``drafts`` tokens and a commit.

    accepted: of each round, the drafts that each row with a slot accepts.
    """

    accepted: tuple[tuple[int, ...], ...] = ()

    def counts(self, n: int) -> Tensor:
        """Of round n, int32 (B,); more than there are for the padded row."""
        first, *others = self.accepted[n]
        return torch.tensor([first, 99, *others], dtype=torch.int32)


def check_drafts(case: DraftCase, implementation: str) -> None:
    """AssertionError unless every round of the case does what it must, and nothing else."""
    found = _where(implementation, _run, case)
    template, slots = _pool(case), case.live()
    pools = [_restored(template, memory) for memory in found["memory"]]
    for n in range(len(case.accepted)):
        before, verified, after = pools[2 * n : 2 * n + 3]
        tokens, what = _drafts(case, n), f"{case} {implementation} round {n}"
        output = torch.from_numpy(found["outputs"][n]).view(case.output).view(tokens.v.shape)
        plan = {name: torch.from_numpy(found[name][n]) for name in PLANNED}
        _check_verify(Step(before, verified, slots, tokens, output, plan, case.exact), f"{what} verify")
        counts = torch.where(slots >= 0, case.counts(n), 0)
        _check_commit(
            Step(verified, after, slots, tokens, output, plan, case.exact), counts, f"{what} commit"
        )


def _run(implementation: str, device: str, case: DraftCase) -> dict[str, Any]:
    """Memory before the first and after every verification and commit, outputs and plans, as arrays."""
    layer = "schemes" if implementation == "reference" else "kernels"
    steps, drafts = (importlib.import_module(f"quantlab.{layer}.{name}") for name in ("steps", "drafts"))
    pool = _guarded(_pool(case), device)
    around = _around(pool)
    slots, window = guarded(case.slots()).to(device), pool.policy.window
    if layer == "kernels":
        importlib.import_module("quantlab.kernels.arguments").pool(pool)  # takes memory without numbers, once
    found: dict[str, Any] = {name: [] for name in ("outputs", *PLANNED)}
    found["memory"] = [_bytes(pool)]
    for n in range(len(case.accepted)):
        tokens = _drafts(case, n)
        given = tokens.map(lambda t: _same_memory_on(guarded(t), device))
        counts = _same_memory_on(guarded(case.counts(n)), device)
        output = torch.full(tokens.v.shape, torch.nan, dtype=case.output)
        output = _same_memory_on(guarded(output), device)
        with _kernels_watched() if layer == "kernels" else contextlib.nullcontext():
            plan = steps.begin_step(pool.counters, slots, window)
            drafts.verify_tokens(pool, given, plan, output)
            drafts.end_verify(plan, case.drafts)
            found["memory"].append(_bytes(pool))
            plan = drafts.begin_commit(pool.counters, slots, counts, window)
            drafts.commit_tokens(pool, plan)
            drafts.end_commit(plan)
        found["outputs"].append(_as_bytes(output))
        for name in PLANNED:
            found[name].append(getattr(plan, name).cpu().numpy().copy())
        found["memory"].append(_bytes(pool))
    for one, other in zip(around, _around(pool), strict=True):
        assert torch.equal(one, other), "a kernel wrote outside of the pool's memory"
    return found


def _drafts(case: DraftCase, n: int) -> StepInputs:
    """Round n's drafted tokens of the whole batch; padded rows hold NaN."""
    rows = len(case.slots())
    tokens = [_token(case, 100 + n * case.drafts + t, rows) for t in range(case.drafts)]
    names = [name for name, value in vars(tokens[0]).items() if value is not None]
    stacked = {name: torch.stack([getattr(token, name) for token in tokens], 1) for name in names}
    inputs = StepInputs(**stacked).map(lambda t: t.to(case.token))
    return inputs.map(lambda t: t.index_fill(0, torch.tensor([1]), torch.nan))


def _check_verify(step: Step, what: str) -> None:
    """Outputs of all drafts, their records behind the cursor, and nothing else."""
    before, after, count = step.before, step.after, step.inputs.v.shape[1]
    live = [(b, int(slot)) for b, slot in enumerate(step.slots) if slot >= 0]
    positions = {slot: int(before.counters.cursor[slot]) for _, slot in live}
    pending = before.counters.pending.clone()
    pending[list(positions)] = count
    _check_counters(before, after, {"pending": pending}, what)
    _check_untouched(step, positions, [], what, count)
    padded = step.output[step.slots < 0]
    assert padded.isnan().all(), f"{what}: the output of a padded row was written"
    for b, slot in live:
        drafts = {unsigned: [] for unsigned in (False, True)}
        for t in range(count):
            where = f"{what}, slot {slot} at {positions[slot]}, draft {t}"
            token = replace(step, inputs=step.inputs.map(lambda x, t=t: x[:, t]))
            given = {unsigned: _terms(token, b, slot, unsigned) for unsigned in drafts}
            terms = {
                unsigned: replace(one, records=[*one.records, *drafts[unsigned]])
                for unsigned, one in given.items()
            }
            truth, size = (_evaluate(before, terms[unsigned]) for unsigned in (False, True))
            counts = _counts(before, terms[False])
            _check_output(step.output[b, t], truth.read, size.read, counts["read"], where)
            band = counts["d"] * UNIT * size.d
            _check_record(token, b, slot, positions[slot] + t, truth.d, band, where)
            for unsigned, result in ((False, truth), (True, size)):
                drafts[unsigned].append({**given[unsigned].token, "d": result.d})


def _check_commit(step: Step, counts: Tensor, what: str) -> None:
    """Windows that accepted drafts complete are folded and stored, the counters moved, and nothing else."""
    before, after, window = step.before, step.after, step.before.policy.window
    live = [(b, int(slot)) for b, slot in enumerate(step.slots) if slot >= 0]
    old = before.counters
    held = {slot: int(old.cursor[slot] + counts[b]) for b, slot in live}
    folded = {slot: n >= window for slot, n in held.items()}
    positions = [int(old.cursor[slot]) if slot >= 0 else -1 for slot in step.slots.tolist()]
    assert step.plan["positions"].tolist() == positions, f"{what}: positions"
    assert torch.equal(step.plan["counts"], counts), f"{what}: counts {step.plan['counts'].tolist()}"
    due = [b for b, slot in live if folded[slot]]
    assert step.plan["flush_count"].tolist() == [len(due)], f"{what}: flush_count"
    assert step.plan["flush_rows"][: len(due)].tolist() == due, f"{what}: flush_rows"
    moved = {name: getattr(old, name).clone() for name in ("cursor", "origin", "pending", "store_numbers")}
    for slot, n in held.items():
        moved["cursor"][slot] = n - window * folded[slot]
        moved["origin"][slot] = (int(old.origin[slot]) + window * folded[slot]) & ORIGINS
        moved["pending"][slot] = 0
        moved["store_numbers"][slot] += folded[slot]
    _check_counters(before, after, moved, what)
    _check_untouched(step, held, [slot for slot in folded if folded[slot]], what, 0)
    for name in RINGS:
        one, other = (getattr(pool, name) for pool in (before, after))
        same = one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert same, f"{what}: {name} changed"
    for slot in (slot for slot in folded if folded[slot]):
        where = f"{what}, slot {slot} with {held[slot]}"
        truth, size = (_fold_terms(before, slot, unsigned) for unsigned in (False, True))
        count = _counts(before, truth)["fold"]
        truth, size = (_evaluate(before, terms).fold for terms in (truth, size))
        band = torch.zeros_like(size) if step.exact else count * UNIT * size
        _check_checkpoint(after, slot, truth, band, where)
        _check_copy(after, slot, where)


def _fold_terms(pool: LayerPool, slot: int, unsigned: bool) -> Terms:
    """The checkpoint and a whole window, behind which stands a token that changes nothing."""
    records = _held(pool, slot, pool.policy.window, unsigned)
    base = _decoded(pool, slot).double()
    base = base.abs() if unsigned else base
    sources = {"q": "k", "k": "k", "v": "d", "log_decay": "log_decay"}
    token = {name: torch.zeros_like(records[0][source]) for name, source in sources.items()}
    token["beta"] = torch.zeros_like(token["v"][:, 0])
    return Terms(base, base, records, token, unsigned)


def _check_counters(before: LayerPool, after: LayerPool, moved: dict[str, Tensor], what: str) -> None:
    for name, value in {**vars(before.counters), **moved}.items():
        got = getattr(after.counters, name)
        assert torch.equal(value, got), f"{what}: counters.{name} {got.tolist()}, expected {value.tolist()}"


def outputs_beside_a_draft(family: str, last: tuple[float, ...], implementation: str) -> list[numpy.ndarray]:
    """Outputs (B, T, H, V) of three drafts on a fresh pool, for each number that the last one has in all of its v."""
    device = "cuda" if implementation == "cuda" else "cpu"
    shape = StateShape(4, 16, 32, 2) if family == "mamba2" else StateShape(1, 16, 32, 1)
    layer = "schemes" if implementation == "reference" else "kernels"
    steps, drafts = (importlib.import_module(f"quantlab.{layer}.{name}") for name in ("steps", "drafts"))
    pool = allocate_pool("fp32/nvfp4@4:buffer=bf16", family, shape, 2, drafts=3, device=device)[0]
    slots = torch.arange(2, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(3)
    heads, keys = shape.heads, shape.key_heads
    steps.load_states(pool, slots, torch.randn((2, heads, 16, 32), generator=generator).to(device))
    q, k = torch.randn((2, 2, 3, keys, 32), generator=generator)
    v = torch.randn((2, 3, heads, 16), generator=generator)
    gate = (2, 3, heads, 32) if family == "kimi_delta" else (2, 3, heads)
    log_decay = -torch.rand(gate, generator=generator)
    beta = None if family == "mamba2" else torch.full((2, 3, heads), 0.5)
    plan, found = steps.begin_step(pool.counters, slots, 4), []
    for number in last:
        v[:, -1] = number
        tokens = StepInputs(q, k / k.norm(dim=-1, keepdim=True), v, log_decay, beta).map(
            lambda t: t.to(device)
        )
        found.append(drafts.verify_tokens(pool, tokens, plan).cpu().numpy())
    return found
