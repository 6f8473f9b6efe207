"""Whether kernels verify and commit drafts as the torch twin does, on a few rows; as ``bench_compare`` for steps.

Rounds of a verification and a commit; before each of the two the kernels get the twin's bits anew.  Rows stand at
cursors around the end of a window, and accept all drafts, none, and numbers in between.

Limits.  As in ``bench_compare``, with the drafts before a token as further terms of its sums.  Their d are not rounded
on the way from one to the next, so those of a delta rule are no data that both sides share: d = (I + A)^-1 r, where r
is what each draft would write without the others, and A is the strictly lower triangular part of the keys' products.
The norm of the inverse is below ``SYSTEM`` for the keys that are drawn, so |d_t| is at most SYSTEM times the largest r
up to t, and so are its error and that of the sum of magnitudes.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantlab.kernels import bench_compare as steps_compare
from quantlab.kernels.bench_cases import Case
from quantlab.kernels.bench_compare import ROWS, STEPS, SYSTEM, UNIT, Comparison
from quantlab.kernels.bench_pools import fill_records, prefill_states, random_token
from quantlab.recurrences import StepInputs, expand_groups, get_recurrence
from quantlab.schemes import drafts as twin
from quantlab.schemes import steps as twin_steps
from quantlab.schemes.pool import COPY_PARTS, LayerPool, allocate_pool

RINGS = ("k_buffer", "v_buffer", "beta_buffer", "log_decay_buffer", "d_buffer")
STORED = ("checkpoint", "checkpoint_scales", *COPY_PARTS)


@dataclass(frozen=True)
class _Round:
    """One round of the twin: pools before it, between verification and commit, and after it; inputs, accepted counts
    (rows,), output (rows, T, H, V) float32.

    sizes: sums of magnitudes of output and d, (rows, T, H, V), and of the folded state.
    """

    before: LayerPool
    verified: LayerPool
    after: LayerPool
    tokens: StepInputs
    counts: Tensor
    output: Tensor
    sizes: dict[str, Tensor]


class DraftComparer:
    """Compares cases with the torch twin, which runs once for all batches of a policy, shape and number of drafts."""

    def __init__(
        self,
        steps: ModuleType | Any,
        drafts: ModuleType | Any,
        device: torch.device | str,
        seed: int = 6,
    ):
        self.steps, self.drafts, self.device, self.seed = steps, drafts, torch.device(device), seed
        self._known: dict[Case, list[_Round]] = {}

    def compare(self, case: Case) -> Comparison:
        """Run the kernels beside the twin at ``case.batch``; raises what the kernels raise."""
        alone = replace(case, batch=1)
        if alone not in self._known:
            self._known[alone] = _twin_rounds(alone, self.seed)
        measured: dict[str, float] = {}
        for index, one in enumerate(self._known[alone]):
            for part, ratio in (*self._verify(case, one).items(), *self._commit(case, one).items()):
                measured[part] = max(measured.get(part, 0.0), ratio)
                if not ratio <= 1.0:  # NaN is no pass
                    reason = f"{part} is {ratio:.3g} times its limit in round {index + 1} of {STEPS}"
                    return Comparison(False, reason, measured)
        return Comparison(True, None, measured)

    def _rows(self, batch: int) -> tuple[int, Tensor, Tensor]:
        """Rows that live, where they stand in the batch, and the batch's slots."""
        live = min(batch, ROWS)
        at = torch.arange(live) * batch // live
        slots = torch.full((batch,), -1, dtype=torch.int32)
        slots[at] = torch.arange(live, dtype=torch.int32)
        return live, at, slots.to(self.device)

    def _verify(self, case: Case, one: _Round) -> dict[str, float]:
        live, at, slots = self._rows(case.batch)
        pool = steps_compare._moved(one.before, self.device)
        tokens = one.tokens.map(lambda t: steps_compare._placed(t[:live], at, case.batch).to(self.device))
        output = torch.full_like(tokens.v, torch.nan)
        plan = self.steps.begin_step(pool.counters, slots, case.parsed.window)
        self.drafts.verify_tokens(pool, tokens, plan, output)
        self.drafts.end_verify(plan, case.drafts)
        got, read = steps_compare._moved(pool, torch.device("cpu")), output.cpu()
        padding = torch.ones(case.batch, dtype=torch.bool)
        padding[at] = False
        sums = _terms(case) * UNIT
        size, truth = one.sizes["output"][:live], one.output[:live]
        half = steps_compare._half_unit(tokens.v.dtype)
        error = (read[at].float() - truth).abs()
        found = {"output": steps_compare._over(error, sums * size + half * truth.abs())}
        if half:
            others = (read[at] != truth.to(tokens.v.dtype)).float().mean()
            found["output values"] = float(others / steps_compare._likely(size, sums, half * truth.abs()))
        found["padding"] = 0.0 if bool(read[padding].isnan().all()) else torch.inf
        found |= _counters(got, one.verified, live)
        found["untouched"] = 0.0 if _same(one.before, got, STORED, live) else torch.inf
        return found | _records(got, one, live, sums * one.sizes["d"])

    def _commit(self, case: Case, one: _Round) -> dict[str, float]:
        live, at, slots = self._rows(case.batch)
        pool = steps_compare._moved(one.verified, self.device)
        counts = torch.full((case.batch,), case.drafts, dtype=torch.int32)
        counts[at] = one.counts[:live]
        plan = self.drafts.begin_commit(pool.counters, slots, counts.to(self.device), case.parsed.window)
        self.drafts.commit_tokens(pool, plan)
        self.drafts.end_commit(plan)
        got = steps_compare._moved(pool, torch.device("cpu"))
        held = one.verified.counters.cursor[:live] + one.counts[:live]
        folded = held >= case.parsed.window
        found = _counters(got, one.after, live)
        found["untouched"] = 0.0 if _same(one.verified, got, RINGS, live) else torch.inf
        found["untouched"] += steps_compare._untouched(one.verified, got, ~folded)["untouched"]
        sums, size = _terms(case) * UNIT, one.sizes["state"][:live][folded]
        stored = steps_compare.decoded_checkpoint(got)[:live]
        expected = steps_compare.decoded_checkpoint(one.after)[:live]
        spacing = steps_compare._checkpoint_spacing(one.after, expected)[folded]
        error = (stored - expected).abs()[folded]
        found["checkpoint"] = steps_compare._over(error, sums * size + spacing)
        likely = steps_compare._likely(size, sums, spacing / 2)
        return (
            found
            | steps_compare._flips(got, one.after, folded, likely)
            | steps_compare._copy(case, got, stored, folded)
        )


def _terms(case: Case) -> int:
    return case.shape.key_dim + 3 * (case.parsed.window + case.drafts) + 16


def _twin_rounds(case: Case, seed: int) -> list[_Round]:
    policy, count = case.parsed, case.drafts
    (pool,) = allocate_pool(policy, case.family, case.shape, ROWS, seed=seed, drafts=count)
    generator = torch.Generator().manual_seed(seed)
    slots, last = torch.arange(ROWS, dtype=torch.int32), policy.window - 1
    twin_steps.load_states(pool, slots, prefill_states(case.shape, ROWS, generator))
    fill_records(pool, generator)
    cursors = (max(last - 1, 0), last, max(last - 2, 0), 0, last // 2)
    pool.counters.cursor.copy_(torch.tensor(cursors))
    pool.counters.origin.copy_(torch.arange(ROWS) * 3)
    pool.counters.store_numbers.copy_(torch.arange(1, ROWS + 1))
    pool.counters.sequence_ids.copy_(torch.arange(ROWS) + 100)
    found, cpu = [], torch.device("cpu")
    for index in range(STEPS):
        tokens = random_token(case.family, case.shape, ROWS, generator, drafts=count)
        before = steps_compare._moved(pool, cpu)
        plan = twin_steps.begin_step(pool.counters, slots, policy.window)
        output = twin.verify_tokens(pool, tokens, plan, torch.zeros(tokens.v.shape))
        twin.end_verify(plan, count)
        verified = steps_compare._moved(pool, cpu)
        counts = ((count - torch.arange(ROWS) - index) % (count + 1)).int()
        commit = twin.begin_commit(pool.counters, slots, counts, policy.window)
        twin.commit_tokens(pool, commit)
        twin.end_commit(commit)
        sizes = _sizes(case, before, verified, tokens)
        after = steps_compare._moved(pool, cpu)
        found.append(_Round(before, verified, after, tokens, counts, output, sizes))
    return found


def _sizes(case: Case, before: LayerPool, verified: LayerPool, tokens: StepInputs) -> dict[str, Tensor]:
    """Sums of magnitudes of every draft's output and d (rows, T, H, V), and of the state that a commit folds."""
    delta, before = get_recurrence(case.family).delta_rule, _from_the_start(before)
    outputs, amounts = [], []
    held, largest = torch.zeros(()), torch.zeros(())
    for t in range(case.drafts):
        token = tokens.map(lambda x, t=t: x[:, t])
        alone = steps_compare._sizes(case, before, token)
        largest = torch.maximum(largest, SYSTEM * alone["d"]) if delta else alone["d"]
        k, q = (
            expand_groups(x.float(), case.shape.heads, 1).norm(dim=-1)[..., None] for x in (token.k, token.q)
        )
        held = held + largest * k
        outputs.append(alone["output"] + held * q)
        amounts.append(largest)
    window = replace(verified.counters, cursor=torch.full_like(verified.counters.cursor, case.parsed.window))
    nothing = tokens.map(lambda x: torch.zeros_like(x[:, 0]))
    folded = steps_compare._sizes(case, _from_the_start(replace(verified, counters=window)), nothing)
    return {"output": torch.stack(outputs, 1), "d": torch.stack(amounts, 1), "state": folded["state"]}


def _from_the_start(pool: LayerPool) -> LayerPool:
    """The same window in rings that begin at their first position."""
    rolled = {}
    for name in RINGS:
        ring = getattr(pool, name)
        if ring is not None:
            turned = zip(ring, pool.counters.origin.tolist(), strict=True)
            rolled[name] = torch.stack([one.roll(-origin, 1) for one, origin in turned])
    origin = torch.zeros_like(pool.counters.origin)
    return replace(pool, counters=replace(pool.counters, origin=origin), **rolled)


def _counters(got: LayerPool, wanted: LayerPool, live: int) -> dict[str, float]:
    found = {}
    for name in ("cursor", "origin", "pending", "store_numbers", "sequence_ids"):
        mine, theirs = (getattr(pool.counters, name)[:live] for pool in (got, wanted))
        found[name] = 0.0 if torch.equal(mine, theirs) else torch.inf
    return found


def _same(one: LayerPool, other: LayerPool, names: tuple[str, ...], live: int) -> bool:
    """Whether the rows' memory of these names has the same bits."""
    return all(
        torch.equal(steps_compare._bits(mine[:live]), steps_compare._bits(getattr(other, name)[:live]))
        for name in names
        if (mine := getattr(one, name)) is not None
    )


def _records(got: LayerPool, one: _Round, live: int, error: Tensor) -> dict[str, float]:
    """Windows and drafts behind them; the drafts' d of a delta rule is computed, the rest copied."""
    wanted, found = one.verified, {}
    count, spacing = one.tokens.v.shape[1], steps_compare._SPACING[got.policy.options.buffer]
    for name in RINGS:
        mine, theirs = getattr(got, name), getattr(wanted, name)
        if mine is None:
            continue
        worst = 0.0
        for row in range(live):
            cursor = int(wanted.counters.cursor[row])
            at = (int(wanted.counters.origin[row]) + torch.arange(cursor + count)) % wanted.records
            new, old = mine[row][:, at].float(), theirs[row][:, at].float()
            if name == "d_buffer" and get_recurrence(got.family).delta_rule:
                drafted = old[:, cursor:]
                limit = spacing[0] * drafted.abs() + spacing[1] + error[row].transpose(0, 1)
                worst = max(worst, steps_compare._over((new[:, cursor:] - drafted).abs(), limit))
                new, old = new[:, :cursor], old[:, :cursor]
            worst = max(worst, 0.0 if torch.equal(new, old) else torch.inf)
        found[name.removesuffix("_buffer") + " records"] = worst
    return found
