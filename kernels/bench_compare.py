"""Whether kernels do what the torch twin does, on a few rows: what a speed needs before it may be shown.

The rows stand at cursors around a flush, three steps are taken, and before each the kernels get the twin's bits anew,
so that a step is compared from equal memory and no error travels from step to step.  A case is compared at its own
batch: the other rows are padding, so the kernels choose the launch that will be timed.

Limits.  Both sides sum in float32, in orders of their own.  A sum of n terms is off by at most n u times the sum of the
terms' magnitudes, u = 2^-24; n is at most K products of the state's row, three terms a record (its product, its decay,
its addition), and 16 for the token, the scales and the exponentials.  The sum of magnitudes is bounded by norms
(Cauchy-Schwarz): |S[p] q| <= |S[p]| |q|.  The d of a delta rule is such a sum itself, and under contents=raw those of
the window pass through a unit triangular system; for the unit keys that are drawn here its inverse has a norm below 4.
What is rounded to a format on the way out adds half a unit in the last place, a stored value a whole one, because the
two sums may fall on different sides of a midpoint (or of a random threshold).  How many do tells more than how far: a
sum whose error is e crosses with probability e / unit, and e is sqrt(n) u times the magnitudes where roundings are
independent; the limit is twice that for either side.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantlab.kernels.bench_cases import Case
from quantlab.kernels.bench_pools import fill_records, prefill_states, random_token
from quantlab.recurrences import StepInputs, expand_groups, get_recurrence
from quantlab.schemes import steps as twin
from quantlab.schemes.ledger import uses_raw
from quantlab.schemes.pool import COPY_PARTS, LayerPool, allocate_pool, pooled_copy

ROWS = 5
STEPS = 3
UNIT = 2.0**-24
SYSTEM = 4.0
"""Bound of the norm of the inverse of the window's unit triangular system."""

_SPACING = {"fp32": (0.0, 0.0), "bf16": (2.0**-7, 0.0), "fp16": (2.0**-10, 2.0**-24)}
"""(relative, absolute) distance of neighbours, an upper bound."""


@dataclass(frozen=True)
class Comparison:
    """passed; reason: what was out of its limit, or why it could not be compared; measured: error / limit, by part."""

    passed: bool
    reason: str | None
    measured: dict[str, float]


@dataclass(frozen=True)
class _Step:
    """One step of the twin: the pool before it, inputs, output (rows, H, V) float32, and the pool after it.

    checkpoint: what is stored after it, decoded.  sizes: sums of magnitudes, as ``_sizes`` has them.
    """

    before: LayerPool
    inputs: StepInputs
    output: Tensor
    after: LayerPool
    checkpoint: Tensor
    sizes: dict[str, Tensor]


class Comparer:
    """Compares cases with the torch twin, which runs once for all batches of a policy and shape."""

    def __init__(self, steps: ModuleType | Any, device: torch.device | str, seed: int = 5):
        self.steps, self.device, self.seed = steps, torch.device(device), seed
        self._known: dict[Case, list[_Step]] = {}

    def compare(self, case: Case) -> Comparison:
        """Run the kernels beside the twin at ``case.batch``; raises what the kernels raise."""
        alone = replace(case, batch=1)
        if alone not in self._known:
            self._known[alone] = _twin_steps(alone, self.seed)
        measured: dict[str, float] = {}
        for index, step in enumerate(self._known[alone]):
            for part, ratio in self._step(case, step).items():
                measured[part] = max(measured.get(part, 0.0), ratio)
                if not ratio <= 1.0:  # NaN is no pass
                    reason = f"{part} is {ratio:.3g} times its limit in step {index + 1} of {STEPS}"
                    return Comparison(False, reason, measured)
        return Comparison(True, None, measured)

    def _step(self, case: Case, step: _Step) -> dict[str, float]:
        batch, device = case.batch, self.device
        live = min(batch, ROWS)
        # Spread over the batch, so that a kernel that reads its neighbour's row is caught.
        at = torch.arange(live) * batch // live
        slots = torch.full((batch,), -1, dtype=torch.int32)
        slots[at] = torch.arange(live, dtype=torch.int32)
        pool = _moved(step.before, device)
        inputs = step.inputs.map(lambda t: _placed(t[:live], at, batch).to(device))
        output = torch.full_like(inputs.v, torch.nan)
        plan = self.steps.begin_step(pool.counters, slots.to(device), case.parsed.window)
        self.steps.decode_token(pool, inputs, plan, output)
        self.steps.end_step(plan)
        got, read = _moved(pool, torch.device("cpu")), output.cpu()
        padding = torch.ones(batch, dtype=torch.bool)
        padding[at] = False
        return _ratios(case, step, got, read[at].float(), live) | {
            "padding": 0.0 if bool(read[padding].isnan().all()) else torch.inf
        }


def _twin_steps(case: Case, seed: int) -> list[_Step]:
    """The rows before, at and behind a flush: each of them flushes or reads a window of another length."""
    policy = case.parsed
    (pool,) = allocate_pool(policy, case.family, case.shape, ROWS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(ROWS, dtype=torch.int32)
    twin.load_states(pool, slots, prefill_states(case.shape, ROWS, generator))
    fill_records(pool, generator)
    last = policy.window - 1
    cursors = (max(last - 1, 0), last, max(last - 2, 0), 0, last // 2)
    pool.counters.cursor.copy_(torch.tensor(cursors))
    pool.counters.store_numbers.copy_(torch.arange(1, ROWS + 1))
    pool.counters.sequence_ids.copy_(torch.arange(ROWS) + 100)
    found = []
    for _ in range(STEPS):
        inputs = random_token(case.family, case.shape, ROWS, generator)
        before = _moved(pool, torch.device("cpu"))
        plan = twin.begin_step(pool.counters, slots, policy.window)
        output = twin.decode_token(pool, inputs, plan, torch.zeros(inputs.v.shape))
        twin.end_step(plan)
        after = _moved(pool, torch.device("cpu"))
        sizes = _sizes(case, before, inputs)
        found.append(_Step(before, inputs, output, after, decoded_checkpoint(after), sizes))
    return found


def _moved(pool: LayerPool, device: torch.device) -> LayerPool:
    """A copy on ``device``, counters included."""

    def copied(value: Any) -> Any:
        return value.to(device, copy=True) if isinstance(value, Tensor) else value

    counters = replace(pool.counters, **{name: copied(value) for name, value in vars(pool.counters).items()})
    values = {name: copied(value) for name, value in vars(pool).items() if isinstance(value, Tensor)}
    return replace(pool, counters=counters, **values)


def _placed(rows: Tensor, at: Tensor, batch: int) -> Tensor:
    """``rows`` at their places among a batch that is NaN elsewhere: a padded row's inputs are not looked at."""
    whole = rows.new_full((batch, *rows.shape[1:]), torch.nan)
    whole[at] = rows
    return whole


def _ratios(case: Case, step: _Step, got: LayerPool, output: Tensor, live: int) -> dict[str, float]:
    """The largest error of each part over its limit; exact parts give 0 or inf."""
    before, after = step.before, step.after
    window = case.parsed.window
    cursor = before.counters.cursor[:live].long()
    flushed = cursor == window - 1
    sizes = {name: size[:live] for name, size in step.sizes.items()}
    sums = (case.shape.key_dim + 3 * window + 16) * UNIT
    half = _half_unit(step.inputs.v.dtype)
    truth, error = step.output[:live], sums * sizes["output"]
    found = {"output": _over((output - truth).abs(), error + half * truth.abs())}
    if half:
        # Beside the rounding itself nothing would be seen of an error below it; how many roundings turn shows it.
        others = (output != truth.to(step.inputs.v.dtype).float()).float().mean()
        found["output values"] = float(others / _likely(sizes["output"], sums, half * truth.abs()))
    for name in ("cursor", "origin", "pending", "store_numbers", "sequence_ids"):
        mine, theirs = getattr(got.counters, name)[:live], getattr(after.counters, name)[:live]
        found[name] = 0.0 if torch.equal(mine, theirs) else torch.inf
    stored, expected = decoded_checkpoint(got)[:live], step.checkpoint[:live]
    error = sums * sizes["state"]
    spacing = _checkpoint_spacing(after, expected)
    found["checkpoint"] = _over((stored - expected).abs()[flushed], (error + spacing)[flushed])
    found |= _flips(got, after, flushed, _likely(sizes["state"][flushed], sums, spacing[flushed] / 2))
    found |= _copy(case, got, stored, flushed)
    found |= _untouched(before, got, ~flushed)
    return found | _records(got, after, cursor, flushed, sums * sizes["d"])


def _sizes(case: Case, pool: LayerPool, inputs: StepInputs) -> dict[str, Tensor]:
    """Sums of magnitudes of the output and of d (rows, H, V), and of the state (rows, H, V, K)."""
    heads = case.shape.heads
    recurrence = get_recurrence(case.family)
    inputs = inputs.map(lambda t: t.float())
    k, q = expand_groups(inputs.k, heads, 1), expand_groups(inputs.q, heads, 1)
    base = decoded_checkpoint(pool).abs()
    rows = base.norm(dim=-1)
    amount, held = inputs.v.abs(), torch.zeros_like(rows)
    if pool.k_buffer is not None and pool.d_buffer is not None:
        used = torch.arange(pool.records) < pool.counters.cursor[:, None]
        keys = expand_groups(pool.k_buffer.float(), heads, 1)
        size = pool.d_buffer.float().abs()
        if uses_raw(case.parsed, recurrence):
            assert pool.v_buffer is not None
            raw = pool.v_buffer.float().abs() + rows[:, :, None] * keys.norm(dim=-1)[..., None]
            size = size.maximum(2 * SYSTEM * raw)
        size = torch.where(used[:, None, :, None], size, 0)
        keys = torch.where(used[:, None, :, None], keys, 0)
        held = (size * keys.norm(dim=-1)[..., None]).sum(2)
        base = base + torch.einsum("bhjv,bhjk->bhvk", size, keys.abs())
    rows = rows + held
    if recurrence.delta_rule:
        amount = 2 * (amount + rows * k.norm(dim=-1)[..., None])
    state = base + amount[..., None] * k.abs()[:, :, None]
    output = (rows + amount * k.norm(dim=-1)[..., None]) * q.norm(dim=-1)[..., None]
    return {"output": output, "state": state, "d": amount}


def decoded_checkpoint(pool: LayerPool) -> Tensor:
    """float32 (S, H, V, K)."""
    if pool.checkpoint_scales is None:
        return pool.checkpoint.float()
    codes = pool.checkpoint
    values = codes.view(torch.float8_e4m3fn).float() if codes.dtype == torch.uint8 else codes.float()
    return values * pool.checkpoint_scales[..., None]


def _half_unit(dtype: torch.dtype) -> float:
    """Of rounding a float32 result to ``dtype``, relative."""
    return {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]


def _checkpoint_spacing(pool: LayerPool, values: Tensor) -> Tensor:
    """Distance of the stored value to its neighbours, an upper bound, elementwise."""
    name = pool.policy.checkpoint.name
    if pool.checkpoint_scales is None:
        relative, absolute = _SPACING[name]
        return relative * values.abs() + absolute
    scales = pool.checkpoint_scales[: len(values), ..., None].expand_as(values)
    return scales if name == "int8" else (2.0**-3 * values.abs()).maximum(2.0**-9 * scales)


def _likely(size: Tensor, sums: float, unit: Tensor) -> float:
    """Share of values that the errors of either side's sums turn into their neighbours; unit: a lower bound."""
    if size.numel() == 0:
        return 1.0
    independent = 4 * (sums * UNIT) ** 0.5 * size
    return float((independent / unit).clamp(max=1.0).mean() + 2 / size.numel())


def _flips(got: LayerPool, after: LayerPool, flushed: Tensor, likely: float) -> dict[str, float]:
    """How many stored values are others, over how many the sums' errors would turn."""
    if got.policy.checkpoint.name == "fp32" or not flushed.any():
        return {}
    live = len(flushed)
    mine, theirs = got.checkpoint[:live][flushed], after.checkpoint[:live][flushed]
    return {"stored values": float((mine != theirs).float().mean() / likely)}


def _copy(case: Case, got: LayerPool, stored: Tensor, flushed: Tensor) -> dict[str, float]:
    """The read copy is the encoded checkpoint, bit for bit, whatever the checkpoint is."""
    fmt = case.parsed.read_copy
    if fmt is None or not flushed.any():
        return {}
    equal = True
    for name, theirs in pooled_copy(fmt.quantize(stored[flushed]), fmt).items():
        part = getattr(got, name)[: len(flushed)][flushed]
        equal &= torch.equal(_bits(part), _bits(theirs.reshape(part.shape)))
    return {"read copy": 0.0 if equal else torch.inf}


def _untouched(before: LayerPool, got: LayerPool, reading: Tensor) -> dict[str, float]:
    """Rows that do not flush keep checkpoint and read copy."""
    for name in ("checkpoint", "checkpoint_scales", *COPY_PARTS):
        old, new = getattr(before, name), getattr(got, name)
        if old is not None:
            live = len(reading)
            if not torch.equal(_bits(old[:live][reading]), _bits(new[:live][reading])):
                return {"untouched": torch.inf}
    return {"untouched": 0.0}


def _records(
    got: LayerPool, after: LayerPool, cursor: Tensor, flushed: Tensor, error: Tensor
) -> dict[str, float]:
    """The window of every row that did not flush, the new record included; d is computed, the rest copied."""
    rings = ("k_buffer", "v_buffer", "beta_buffer", "log_decay_buffer", "d_buffer")
    found: dict[str, float] = {}
    for name in rings:
        mine, theirs = getattr(got, name), getattr(after, name)
        if mine is None:
            continue
        worst = 0.0
        for row in (~flushed).nonzero()[:, 0].tolist():
            origin, last = int(after.counters.origin[row]), int(cursor[row])
            at = (origin + torch.arange(last + 1)) % after.records
            new, old = mine[row][:, at].float(), theirs[row][:, at].float()
            if name == "d_buffer" and get_recurrence(got.family).delta_rule:
                spacing = _SPACING[got.policy.options.buffer]
                limit = spacing[0] * old[:, -1].abs() + spacing[1] + error[row]
                worst = max(worst, _over((new[:, -1] - old[:, -1]).abs(), limit))
                new, old = new[:, :-1], old[:, :-1]
            worst = max(worst, 0.0 if torch.equal(new, old) else torch.inf)
        found[name.removesuffix("_buffer") + " records"] = worst
    return found


def _over(error: Tensor, limit: Tensor) -> float:
    if error.numel() == 0:
        return 0.0
    ratio = torch.where(error == 0, 0.0, error / limit)
    return float(torch.where(ratio.isnan(), torch.inf, ratio).max())


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.element_size()])
