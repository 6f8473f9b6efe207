"""What one decode step must have done to pooled memory, derived from the memory before it.

Bounds.  A result is a polynomial of the inputs; whatever the order of its operations, its error is at most count * u
times the same polynomial with every magnitude and every sign positive, where u = 2^-24 and count is the most roundings
that a term passes through.  Sums on tensor cores may cut instead of round, so a summand counts twice.  A decay exp(g)
is off by the error of g, (n + 3) u times the sum of |g|, and by 4 u for the device's exponential.  Rounding to a format
is monotone, for one and the same random word too, so that a stored number lies between what the two ends of the band
become; where they agree, it is that one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.formats import Encoded, Format, parse
from quantlab.formats.random import random_words
from quantlab.formats.rounding import decode_fields, encode_element, encode_integer
from quantlab.formats.table import Element, Integer
from quantlab.recurrences import DecayAxis, StepInputs, expand_groups, get_recurrence
from quantlab.schemes.pool import LayerPool, copy_of, encoded_copy, pooled_copy
from quantlab.schemes.store import CHECKPOINT_PART
from quantlab.testing import assert_close

UNIT = 2.0**-24
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Step:
    """A step: memory before and after, what it was given, the output and the plan that it made.  On the CPU."""

    before: LayerPool
    after: LayerPool
    slots: Tensor
    inputs: StepInputs
    output: Tensor
    plan: dict[str, Tensor]
    exact: bool


@dataclass(frozen=True)
class Terms:
    """One row in float64, or the magnitudes of its numbers (``unsigned``): states (H, V, K), lists of its records."""

    base: Tensor
    view: Tensor
    records: list[dict[str, Tensor]]
    token: dict[str, Tensor]
    unsigned: bool


@dataclass(frozen=True)
class Results:
    """What a row's token makes: d and the output through the stored view, the fold and the output of that."""

    d: Tensor
    read: Tensor
    fold: Tensor
    fold_read: Tensor


def check_step(step: Step, what: str) -> None:
    """AssertionError unless the step did what it must and nothing else."""
    before, after = step.before, step.after
    live = [(b, int(slot)) for b, slot in enumerate(step.slots) if slot >= 0]
    positions = {slot: int(before.counters.cursor[slot]) for _, slot in live}
    full = before.policy.window - 1
    flushed = [slot for _, slot in live if positions[slot] == full]
    _check_plan(step, positions, what)
    _check_counters(step, positions, flushed, what)
    _check_untouched(step, positions, flushed, what)
    for b, slot in enumerate(step.slots.tolist()):
        if slot < 0:
            assert step.output[b].isnan().all(), f"{what}: the output of a padded row was written"
            continue
        where = f"{what}, slot {slot} at {positions[slot]}"
        flushes = slot in flushed
        truth, size = (_evaluate(before, _terms(step, b, slot, unsigned)) for unsigned in (False, True))
        counts = _counts(before, _terms(step, b, slot, False))
        exact_read = before.policy.options.flush_read == "exact" or before.policy.read_copy is None
        name = "fold_read" if flushes and exact_read else "read"
        _check_output(step.output[b], getattr(truth, name), getattr(size, name), counts["read"], where)
        if flushes:
            band = torch.zeros_like(size.fold) if step.exact else counts["fold"] * UNIT * size.fold
            _check_checkpoint(after, slot, truth.fold, band, where)
            _check_copy(after, slot, where)
        elif before.records:
            _check_record(step, b, slot, positions[slot], truth.d, counts["d"] * UNIT * size.d, where)


def _check_plan(step: Step, positions: dict[int, int], what: str) -> None:
    wanted = [positions.get(slot, -1) for slot in step.slots.tolist()]
    assert step.plan["positions"].tolist() == wanted, f"{what}: positions {step.plan['positions'].tolist()}"
    due = [b for b, n in enumerate(wanted) if n == step.before.policy.window - 1]
    assert step.plan["flush_count"].tolist() == [len(due)], f"{what}: flush_count"
    assert step.plan["flush_rows"][: len(due)].tolist() == due, f"{what}: flush_rows"


def _check_counters(step: Step, positions: dict[int, int], flushed: list[int], what: str) -> None:
    old, new = step.before.counters, step.after.counters
    cursor, numbers = old.cursor.clone(), old.store_numbers.clone()
    for slot, n in positions.items():
        cursor[slot] = 0 if slot in flushed else n + 1
        numbers[slot] += slot in flushed
    wanted = {**vars(old), "cursor": cursor, "store_numbers": numbers}
    for name, value in wanted.items():
        assert torch.equal(value, getattr(new, name)), f"{what}: counters.{name} {getattr(new, name)}"


def _check_untouched(
    step: Step, positions: dict[int, int], flushed: list[int], what: str, appended: int = 1
) -> None:
    """Slots outside the batch, stored copies of rows that do not flush, and records but those that were appended."""
    for name, old in vars(step.before).items():
        if not isinstance(old, Tensor):
            continue
        new, ring = getattr(step.after, name), name.endswith("_buffer")
        for slot in range(step.before.slots):
            if slot in flushed:
                continue
            one, other = old[slot].clone(), new[slot].clone()
            if ring and slot in positions:
                at = _ring(step.before, slot)[positions[slot] : positions[slot] + appended]
                one[:, at], other[:, at] = 0, 0
            same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            assert same, f"{what}: {name} of slot {slot} changed"


def _check_output(got: Tensor, truth: Tensor, size: Tensor, count: float, what: str) -> None:
    if got.dtype != torch.float32:
        band = count * UNIT * size
        _within(got, (truth - band).to(got.dtype), (truth + band).to(got.dtype), f"{what} output")
        return
    limits = {"max_rel": count * UNIT, "rms_rel": 2 * count**0.5 * UNIT}
    assert_close(truth, got, scale=size, what=f"{what} output", **limits)


def _check_record(step: Step, b: int, slot: int, n: int, d: Tensor, band: Tensor, what: str) -> None:
    """The record behind the cursor: the inputs to the bit, and a delta rule's d as rounding of a number in its band."""
    pool, inputs = step.after, step.inputs
    at = _ring(pool, slot)[n]
    given = {"k": inputs.k, "log_decay": inputs.log_decay, "v": inputs.v, "beta": inputs.beta}
    if not get_recurrence(pool.family).delta_rule:
        given["d"] = inputs.v
    for name, value in given.items():
        ring = getattr(pool, f"{name}_buffer")
        if ring is not None and value is not None:
            wanted = parse(_DTYPES[ring.dtype]).round(value[b].float()).to(ring.dtype)
            assert torch.equal(ring[slot, :, at], wanted), f"{what}: the appended {name}"
    if "d" not in given and pool.d_buffer is not None:
        dtype = pool.d_buffer.dtype
        low, high = (d - band).to(dtype), (d + band).to(dtype)
        _within(pool.d_buffer[slot, :, at], low, high, f"{what} appended d")


def _check_checkpoint(pool: LayerPool, slot: int, fold: Tensor, band: Tensor, what: str) -> None:
    """The stored fold: codes between those of the band's ends, under a scale that its largest number gives."""
    fmt, got = pool.policy.checkpoint, pool.checkpoint[slot]
    if not fmt.rounded:
        _within(got, (fold - band).float(), (fold + band).float(), f"{what} checkpoint")
        return
    words = _words(pool, slot) if fmt.stochastic else None
    if pool.checkpoint_scales is None:
        low, high = (_element(fold + sign * band, fmt, words) for sign in (-1, 1))
        _within(got, low, high, f"{what} checkpoint")
        return
    scales = pool.checkpoint_scales[slot][..., None].double()
    if not bool(band.any()):
        expected = fmt.quantize(fold.float(), words)
        assert torch.equal(expected.codes, got), f"{what}: codes of the checkpoint"
        assert expected.scales is not None
        assert torch.equal(expected.scales, scales.float()), f"{what}: scales of the checkpoint"
        return
    largest, slack = fold.abs().amax(-1, keepdim=True), band.amax(-1, keepdim=True)
    off = (scales * fmt.element.max - largest).abs()
    assert (off <= slack + 4 * UNIT * largest).all(), f"{what}: scales of the checkpoint"
    # The quotient is rounded once before the element is.
    low, high = (
        _element((fold + sign * (band + 2 * UNIT * fold.abs())) / scales, fmt, words) for sign in (-1, 1)
    )
    _within(_values(got, fmt), low, high, f"{what} checkpoint in units of its scales")


def _check_copy(pool: LayerPool, slot: int, what: str) -> None:
    """The read copy is the encoded stored checkpoint, bit for bit."""
    copy = pool.policy.read_copy
    if copy is None:
        return
    for name, wanted in pooled_copy(copy.quantize(_decoded(pool, slot)[None]), copy).items():
        memory = getattr(pool, name)
        differ = memory[slot] != wanted[0].view(memory.dtype)
        assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} {name} differ"


def _within(got: Tensor, low: Tensor, high: Tensor, what: str) -> None:
    """Every number of ``got`` lies between low and high, and both are the same where rounding has no choice."""
    got, low, high = got.double(), low.double(), high.double()
    outside = ~((low <= got) & (got <= high))
    if outside.any():
        at = tuple(outside.nonzero()[0].tolist())
        found = f"{got[at].item()!r}, expected {low[at].item()!r} to {high[at].item()!r}"
        raise AssertionError(f"{what}: {int(outside.sum())} of {got.numel()} outside, {at} is {found}")


def _element(x: Tensor, fmt: Format, words: Tensor | None) -> Tensor:
    """x rounded to the format's element, float64."""
    if isinstance(fmt.element, Integer):
        return encode_integer(x, fmt.element, fmt.rounding, words).double()
    return decode_fields(encode_element(x, fmt.element, fmt.rounding, words), fmt.element)


def _values(codes: Tensor, fmt: Format) -> Tensor:
    return decode_fields(codes, fmt.element) if isinstance(fmt.element, Element) else codes.double()


def _words(pool: LayerPool, slot: int) -> Tensor:
    """Of the slot's last store."""
    counters, shape = pool.counters, pool.shape
    number, sequence = counters.store_numbers[slot : slot + 1], counters.sequence_ids[slot : slot + 1]
    sizes = (1, shape.heads, shape.value_dim, shape.key_dim)
    return random_words(sizes, int(counters.seed), number, sequence, pool.layer, CHECKPOINT_PART)[0]


def _terms(step: Step, b: int, slot: int, unsigned: bool) -> Terms:
    pool = step.before
    records = _held(pool, slot, int(pool.counters.cursor[slot]), unsigned)
    token = {name: value[b].double() for name, value in vars(step.inputs).items() if value is not None}
    base = _decoded(pool, slot)
    view = base if pool.policy.read_copy is None else _decoded_copy(pool, slot)
    base, view = (x.double().abs() if unsigned else x.double() for x in (base, view))
    return Terms(base, view, records, _of_heads(token, pool.shape.heads, unsigned), unsigned)


def _held(pool: LayerPool, slot: int, count: int, unsigned: bool) -> list[dict[str, Tensor]]:
    """The first records of a slot's window."""
    rings = {name: getattr(pool, f"{name}_buffer") for name in ("k", "d", "v", "beta", "log_decay")}
    records, at = [], _ring(pool, slot)
    for j in range(count):
        fields = {name: ring[slot, :, at[j]].double() for name, ring in rings.items() if ring is not None}
        records.append(_of_heads(fields, pool.shape.heads, unsigned))
    return records


def _of_heads(fields: dict[str, Tensor], heads: int, unsigned: bool) -> dict[str, Tensor]:
    """Keys and queries repeated for every head; a log decay keeps its sign, as its exponential is positive."""
    found = {
        name: value.abs() if unsigned and name != "log_decay" else value for name, value in fields.items()
    }
    return {
        name: expand_groups(value, heads, 0) if name in ("q", "k") else value for name, value in found.items()
    }


def _evaluate(pool: LayerPool, terms: Terms) -> Results:
    """The recurrence on a dense state, as ``DecodeState`` defines a step."""
    delta, options = get_recurrence(pool.family).delta_rule, pool.policy.options
    token, sign = terms.token, 1 if terms.unsigned else -1

    def step(state: Tensor, record: dict[str, Tensor], d: Tensor | None) -> tuple[Tensor, Tensor]:
        factor = torch.exp(record["log_decay"])
        by_channel = get_recurrence(pool.family).axis is DecayAxis.KEY
        state = state * (factor[:, None, :] if by_channel else factor[:, None, None])
        if d is None:
            held = (state * record["k"][:, None, :]).sum(-1)
            d = record["beta"][:, None] * (record["v"] + sign * held)
        return state + d[..., None] * record["k"][:, None, :], d

    def read(state: Tensor) -> Tensor:
        return (state * token["q"][:, None, :]).sum(-1)

    def through(state: Tensor, raw: bool) -> Tensor:
        for record in terms.records:
            state, _ = step(state, record, None if raw else record["d"])
        return state

    view, own = through(terms.view, False), None if delta else token["v"]
    if delta and options.key_read == "checkpoint":
        _, own = step(through(terms.base, False), token, None)
    seen, d = step(view, token, own)
    # With window 1 a read copy serves S k of the stored token, too.
    raw = pool.raw or (delta and not pool.records and pool.policy.read_copy is None)
    fold, _ = step(through(terms.base, raw), token, None if raw else d)
    return Results(d, read(seen), fold, read(fold))


def _counts(pool: LayerPool, terms: Terms) -> dict[str, float]:
    """Roundings that a term of each result passes through."""
    n, sums = len(terms.records), 2 * pool.shape.key_dim + 8
    decays = torch.stack([record["log_decay"] for record in (*terms.records, terms.token)])
    # A decay of a key channel may be formed on both vectors of a product.
    own = 2 * ((n + 3) * float(decays.abs().sum(0).max()) + 4)
    window = 2 * (n + 1) + 12 + own
    if not get_recurrence(pool.family).delta_rule:
        return {"d": 0.0, "read": window + sums, "fold": window}
    # Each d is read from a state that holds those before it.
    solved = (n + 1) * sums + window
    return {"d": solved, "read": solved + sums, "fold": solved}


def _ring(pool: LayerPool, slot: int) -> Tensor:
    """Ring positions of the slot's records, oldest first."""
    return (int(pool.counters.origin[slot]) + torch.arange(max(pool.records, 1))) % max(pool.records, 1)


def _decoded(pool: LayerPool, slot: int) -> Tensor:
    """float32 values of a slot's checkpoint."""
    codes = pool.checkpoint[slot]
    codes = codes.view(torch.int16) if codes.dtype in (torch.bfloat16, torch.float16) else codes
    scales = None if pool.checkpoint_scales is None else pool.checkpoint_scales[slot][..., None]
    return pool.policy.checkpoint.dequantize(Encoded(codes, scales))


def _decoded_copy(pool: LayerPool, slot: int) -> Tensor:
    """float32 values of a slot's read copy."""
    assert pool.policy.read_copy is not None
    copy = encoded_copy(copy_of(pool, torch.tensor([slot])), pool.policy.read_copy)
    return pool.policy.read_copy.dequantize(copy)[0]
