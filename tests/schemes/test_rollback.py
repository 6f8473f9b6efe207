"""Verify and roll back: for 2 to 8 drafts, every accept count and every cursor, under every kind of policy.

Rows of one batch stand at every cursor and accept every count, so that one verify serves all of them.
"""

import pytest
import torch

from quantlab.recurrences import RECURRENCES
from quantlab.schemes import DecodeState, SlotPool, StateShape, parse_policy, start
from quantlab.schemes.ledger import uses_raw
from tests.schemes.streams import made

FAMILIES = sorted(RECURRENCES)
LENGTHS = range(2, 9)
POLICIES = [
    "fp32@1", "bf16@1", "int8+ef@1", "int8+ef.int4@1", "fp32/nvfp4@1:flush_read=copy", "fp16+sr@4", "nvfp4@4",
    "int8+ef@4", "fp32@4", "fp32@4:buffer=bf16", "fp32@4:buffer=hilo", "fp32@4:buffer=bf16:current=buffer",
    "fp32/nvfp4@4", "fp16+sr/nvfp4+sr8@4", "fp8/nvfp4@4:flush_read=copy", "fp32@8:flush=early",
    "fp32/nvfp4@8:flush=early", "int8+ef@8:flush=early:ef_read=include", "fp8/nvfp4@8:flush=early:flush_read=copy",
    "int8+ef@4:schedule=step", "nvfp4@4:schedule=chunk", "bf16/nvfp4@4:schedule=turn", "int8+ef@4:ef_read=include",
    "fp32@4:sites=gate+q+k.fp16+v+d+state+buffer+output", "fp32/nvfp4+rank2@4", "nvfp4+rank1@1", "nvfp4+mean@4",
    "fp16+sr/nvfp4+keyscale@4",
]  # fmt: skip
MATRIX_POLICIES = ["fp32@4:dot=bf16", "fp32@4:dot=tf32x3", "fp16@4:sites=decay+dot"]
DELTA_POLICIES = [
    "fp32@4:contents=derived", "nvfp4@4:contents=derived", "fp32/nvfp4@4:key_read=checkpoint",
    "fp8/nvfp4@4:contents=derived:key_read=checkpoint:flush_read=copy", "fp32@4:sites=beta+d",
]  # fmt: skip
CASES = [
    (family, policy)
    for family in FAMILIES
    for policy in POLICIES
    + (MATRIX_POLICIES if family != "mamba1" else [])
    + (DELTA_POLICIES if RECURRENCES[family].delta_rule else [])
]
DRAFTS = 8
READ_MARKS = ("unread", "read_stores")
"""What a save holds of who read a store: a verify reads, whatever becomes of its drafts."""


def stream(family, rows, steps):
    """Every row has the same tokens, so that rows differ in what is asked of them alone."""
    s = made(family, heads=2, key_heads=1, steps=steps, value_dim=4, key_dim=16, seed=5)
    return s, torch.zeros(rows, dtype=torch.int64)


def tokens_of(s, rows, first, last):
    steps = [s.step(t).map(lambda x: x[rows]) for t in range(first, last)]
    names = [n for n, value in vars(steps[0]).items() if value is not None]
    return type(steps[0])(**{n: torch.stack([getattr(x, n) for x in steps], 1) for n in names})


def at_cursors(policy, family, accepts, **changes):
    """A state with a row for each cursor and each number in ``accepts``: (state, stream, rows, accept counts).

    A verify brings the rows to their cursors, with flush=full behind a fold, so that their rings begin anywhere.
    """
    window = parse_policy(policy).window
    cursors = [c for c in range(window) for _ in accepts]
    s, rows = stream(family, len(cursors), 2 + 2 * DRAFTS)
    state = start(
        policy, family, s.initial[rows], key_heads=1, rates=s.rates, seed=11, drafts=DRAFTS,
        sequence_ids=torch.arange(len(rows)), **changes,
    )  # fmt: skip
    state.extend(tokens_of(s, rows, 0, 2))
    state.verify(tokens_of(s, rows, 2, 2 + DRAFTS))
    early = state.policy.options.flush == "early"
    state.commit(torch.tensor([c + (0 if early or c + window > DRAFTS else window) for c in cursors]))
    if state.policy.options.schedule != "step":
        assert state.cursor.tolist() == cursors
    return state, s, rows, torch.tensor(list(accepts) * window)


def drafts_of(s, rows, count):
    return tokens_of(s, rows, 2 + DRAFTS, 2 + DRAFTS + count)


def stored(state, *, marks=True):
    """All bits that a save holds of what is in use: records in order, without the memory behind them."""
    saved = state.save()
    found = {n: t for n, t in saved.items() if not n.startswith("buffer.")}
    if not marks:
        found = {n: t for n, t in found.items() if not n.endswith(READ_MARKS)}
    found["cursor"] = saved["buffer.cursor"]
    capacity, origin = state._buffer.capacity, saved["buffer.origin"]
    index = (origin[:, None] + torch.arange(capacity)) % capacity
    used = torch.arange(capacity) < saved["buffer.cursor"][:, None]
    for name, value in state._buffer.fields.items():
        ordered = value[torch.arange(len(origin))[:, None], index]
        found[name] = torch.where(used.view(*used.shape, *[1] * (value.ndim - 2)), ordered, 0.0)
    return found


def assert_same_bits(found, expected, *, without=()):
    assert set(found) == set(expected)
    for name, value in expected.items():
        if name not in without:
            assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), CASES)
def test_nothing_accepted_is_nothing_done(family, policy):
    """Every bit is as before; an early flush may come first, and is then the same whatever the drafts were."""
    begun, s, rows, _ = at_cursors(policy, family, (0,))
    none = torch.zeros(len(rows), dtype=torch.int64)
    before = stored(begun, marks=False)
    for count in LENGTHS:
        state, other = (DecodeState.restore(begun.save()) for _ in range(2))
        state.verify(drafts_of(s, rows, count))
        state.commit(none)
        if state.policy.options.flush == "early":
            other.verify(drafts_of(s, rows, count).map(lambda t: t.flip(1)))
            other.commit(none)
            assert_same_bits(stored(state), stored(other))
            stays = before["cursor"] + 2 * count <= state.policy.window
            assert torch.equal(state.cursor, torch.where(stays, before["cursor"], 0))
        else:
            assert_same_bits(stored(state, marks=False), before)


# Under schedule=step a draft is rounded like a stored state, and one that no store could hold is an error at once.
REJECTED = [
    (f, p, r) for f, p in CASES for r in ("normal", 1e30, torch.nan) if r == "normal" or "=step" not in p
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy", "rejected"), REJECTED)
def test_rejected_drafts_leave_no_trace(family, policy, rejected):
    """Two verifies that differ behind the accepted drafts: equal outputs before, and equal bits after the commit."""
    generator = torch.Generator().manual_seed(3)
    begun, s, rows, accepts = at_cursors(policy, family, range(DRAFTS + 1))
    for count in LENGTHS if rejected == "normal" else (2, DRAFTS):
        state, other = (DecodeState.restore(begun.save()) for _ in range(2))
        accepted = accepts.clamp(max=count)
        drafts = drafts_of(s, rows, count)
        kept = torch.arange(count) < accepted[:, None]
        altered = {}
        for name, t in vars(drafts).items():
            if t is None:
                continue
            # Another token, of a magnitude that the recurrence can have; else q, k and v that overflow.
            noise = t * torch.randn(t.shape, generator=generator).abs()
            if rejected != "normal" and name in ("q", "k", "v"):
                noise = torch.full_like(t, rejected)
            altered[name] = torch.where(kept.view(*kept.shape, *[1] * (t.ndim - 2)), t, noise)
        one, two = state.verify(drafts), other.verify(type(drafts)(**altered))
        assert torch.equal(one[kept], two[kept])
        state.commit(accepted)
        other.commit(accepted)
        assert_same_bits(stored(state), stored(other))


def records_are_inputs(policy, family):
    """Whether a fold takes nothing from a record but what came in, as it came in.

    Single steps fold the token that fills a window as it is, ``commit`` folds what the buffer kept of it.
    """
    options, recurrence = policy.options, RECURRENCES[family]
    kept_exactly = options.current == "buffer" or (options.buffer == "fp32" and "buffer" not in options.sites)
    one_view = policy.read_copy is None or policy.options.schedule == "step"
    window_one = policy.window == 1 and not one_view
    return kept_exactly and (not recurrence.delta_rule or uses_raw(policy, recurrence)) and not window_one


INPUT_CASES = [(f, p) for f, p in CASES if records_are_inputs(parse_policy(p), f) and "early" not in p]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), INPUT_CASES)
def test_accepted_drafts_are_single_steps(family, policy):
    """verify n + commit n stores the very bits that n steps store, for every n and cursor, in float32.

    d of a raw record is left out: reads produced it, in another order of sums, and no fold looks at it.
    """
    begun, s, rows, _ = at_cursors(policy, family, (0,))
    for count in LENGTHS:
        for cursor in range(len(rows)):
            state = DecodeState.restore(begun.save())
            state.select(torch.tensor([cursor]))
            steps = DecodeState.restore(state.save())
            drafts = drafts_of(s, rows[:1], count)
            state.verify(drafts)
            state.commit(torch.tensor([count]))
            for t in range(count):
                steps.step(drafts.token(t))
            raw = uses_raw(state.policy, state.recurrence)
            assert_same_bits(
                stored(state, marks=False), stored(steps, marks=False), without=("d",) if raw else ()
            )


def magnitude_of(state_norm, drafts, tokens):
    """M of ``test_verify_and_single_steps_differ_by_the_order_of_sums``."""
    # |d_j| <= beta (|v_j| + |S| |k_j|), beta and |k| at most 1 in these streams.
    k, q = drafts.k.norm(dim=-1).max().clamp(min=1), drafts.q.norm(dim=-1).max().clamp(min=1)
    return float((state_norm + tokens * (drafts.v.norm(dim=(-1, -2)).max() + state_norm * k) * k) * q)


EXACT = ["@1", "@4", "@4:contents=derived", "@8:flush=early", "@8:flush=early:contents=derived"]
FLOAT_CASES = [
    (f, p, n) for f in FAMILIES for p in EXACT for n in ("fp32", "fp64")
    if RECURRENCES[f].delta_rule or "contents" not in p
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy", "dtype"), FLOAT_CASES)
def test_verify_and_single_steps_differ_by_the_order_of_sums(family, policy, dtype):
    """With no rounding between, outputs and state of verify n + commit n against n steps.

    Both compute one sum, of K products and one term for each of N = window + T tokens, in two orders.  With u the unit
    roundoff and M = (|S| + sum |d_j|) max(|q|, 1) in Frobenius norms, which bounds the sum of the magnitudes (unit
    keys; decays are at most 1), each order is off by at most (K + N + 8) u M, the 8 for a decay's exponential and its
    products.  A delta rule's d inherits the errors of the N tokens before it; as I - beta k k^T does not stretch, they
    add: N times that, for each of the two.
    """
    policy = dtype + policy
    window, key_dim = parse_policy(policy).window, 16
    unit = torch.finfo(torch.float32 if dtype == "fp32" else torch.float64).eps / 2
    begun, s, rows, _ = at_cursors(policy, family, (0,))
    for count in LENGTHS:
        for cursor in range(window):
            state = DecodeState.restore(begun.save())
            state.select(torch.tensor([cursor]))
            steps = DecodeState.restore(state.save())
            drafts = drafts_of(s, rows[:1], count)
            outputs = state.verify(drafts)
            state.commit(torch.tensor([count]))
            singles, written = [], steps.materialize().norm()
            for t in range(count):
                singles.append(steps.step(drafts.token(t)))
                written = torch.maximum(written, steps.materialize().norm())
            tokens = window + count
            magnitude = magnitude_of(written, drafts, tokens)
            bound = 2 * tokens * (key_dim + tokens + 8) * unit * magnitude
            assert (outputs - torch.stack(singles, 1)).abs().max() <= bound
            assert (state.materialize() - steps.materialize()).abs().max() <= bound
            assert dtype == "fp32" or bound <= 1e-12 * magnitude
            assert torch.equal(state.cursor, steps.cursor) or "early" in policy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_that_is_not_finite_reaches_no_earlier_one(family):
    state, s, rows, _ = at_cursors("fp32@4", family, (0,))
    other, drafts = DecodeState.restore(state.save()), drafts_of(s, rows, 4)
    expected = other.verify(drafts)
    drafts.v[:, 2] = torch.nan
    outputs = state.verify(drafts)
    assert torch.equal(outputs[:, :2], expected[:, :2])
    assert outputs[:, 2:].isnan().all()


def test_rows_named_in_another_order_keep_their_tokens():
    """A prefill chunk that names every row, in an order of its own."""
    s, rows = stream("mamba2", 3, 4)
    initial = torch.randn(3, 2, 4, 16, generator=torch.Generator().manual_seed(1))
    one, two = (start("fp32@4", "mamba2", initial, key_heads=1) for _ in range(2))
    tokens = tokens_of(s, rows, 0, 4).map(
        lambda t: t * torch.tensor([1.0, 0.5, 0.25]).view(3, *[1] * (t.ndim - 1))
    )
    order = torch.tensor([2, 0, 1])
    assert torch.equal(two.extend(tokens.map(lambda t: t[order]), order), one.extend(tokens)[order])
    assert torch.equal(one.materialize(), two.materialize())


def test_a_window_full_of_accepted_drafts_is_saved_and_copied():
    """flush=early leaves it to the next forward to fold; until then the cursor is the window."""
    s, rows = stream("gated_delta", 1, 5)
    pool = SlotPool("fp32@4:flush=early", "gated_delta", StateShape(2, 4, 16, 1), 3)
    slot = pool.allocate(s.initial[0])
    pool.verify(tokens_of(s, rows, 0, 4), [slot])
    pool.commit(torch.tensor([4]), [slot])
    assert pool.cursor(slot) == 4
    (twin,) = pool.fork(slot)
    back = pool.restore(pool.preempt(slot))
    assert torch.equal(pool.materialize(back), pool.materialize(twin))
    token = s.step(4).map(lambda t: t[[0, 0]])
    first, second = pool.step(token, [back, twin])
    assert torch.equal(first, second)
    assert pool.cursor(back) == 1


# A ring of 16 records has no place to spare behind a window of 9 and 8 drafts.
RAGGED_POLICIES = [
    "fp32@8:flush=early", "fp32@9:flush=early", "fp16+sr/nvfp4+sr8@9:flush=early",
    "int8+ef@8:flush=early:ef_read=include", "fp8/nvfp4@8:flush=early:flush_read=copy:buffer=bf16",
    "nvfp4@8:flush=early:schedule=chunk", "bf16@4", "fp32/nvfp4@4", "int8+ef@4:schedule=step",
]  # fmt: skip
RAGGED = [(f, p) for f in FAMILIES for p in RAGGED_POLICIES]
SLOW_RAGGED = [
    c if c[0] == "gated_delta" or c[1] == "fp32@9:flush=early" else pytest.param(*c, marks=pytest.mark.slow)
    for c in RAGGED
]


@pytest.mark.parametrize(("family", "policy"), SLOW_RAGGED)
def test_a_row_does_not_depend_on_the_lengths_of_its_batch_mates(family, policy):
    """Rounds of verify, commit and extend with a length for each row: every stored bit is that of a row alone.

    Arithmetic is float64: another order of sums moves a value by some 1e-15 of it, and so crosses the boundary
    between two stored numbers, of 2**-24 of it at the finest, about once in 1e7 elements; a fold of other tokens
    moves them all.
    Outputs differ by the order of sums, twice (K + N + 8) u M for each of N tokens as derived in
    ``test_verify_and_single_steps_differ_by_the_order_of_sums``.  d of a record differs like an output.
    """
    generator = torch.Generator().manual_seed(9)
    n, key_dim, unit = 4, 16, torch.finfo(torch.float64).eps / 2
    s, rows = stream(family, n, 6 * 8)
    ids = torch.arange(n)
    options = {"key_heads": 1, "rates": s.rates, "seed": 11, "drafts": DRAFTS, "arithmetic": torch.float64}
    state = start(policy, family, s.initial[rows], sequence_ids=ids, **options)
    alone = [start(policy, family, s.initial[:1], sequence_ids=ids[i : i + 1], **options) for i in range(n)]
    folded = set()
    for turn in range(6):
        count = min(8, state.policy.window) if "early" in policy else 8
        drafts = tokens_of(s, rows, 8 * turn, 8 * turn + count)
        lengths = torch.randint(0, count + 1, (n,), generator=generator)
        lengths[turn % n] = count
        lengths[(turn + 1) % n] = 0
        operation = "extend" if turn == 3 else "verify"
        norm = torch.maximum(state.materialize().norm(), state.read_state().norm())
        before = state.cursor
        outputs = getattr(state, operation)(drafts, lengths=lengths)
        accepted = (lengths * torch.rand(n, generator=generator)).round().long()
        if turn % 2:
            accepted = lengths
        if operation == "verify":
            state.commit(accepted)
        for i in range(n):
            length = int(lengths[i])
            assert not outputs[i, length:].any()
            if length == 0:
                continue
            mine = drafts.map(lambda t, i=i, length=length: t[i : i + 1, :length])
            expected = getattr(alone[i], operation)(mine)
            if operation == "verify":
                alone[i].commit(accepted[i : i + 1])
                if "early" in policy and before[i]:
                    due = int(before[i]) + 2 * length > state.policy.window
                    assert int(state.cursor[i]) == int(accepted[i]) + (0 if due else int(before[i]))
                    folded.add(due)
            total = state.policy.window + count
            bound = 2 * total * (key_dim + total + 8) * unit * magnitude_of(norm, mine, total)
            assert (outputs[i, :length] - expected[0]).abs().max() <= bound
    for i in range(n):
        row = DecodeState.restore(state.save(torch.tensor([i])))
        # Between chunks schedule=chunk holds the fold as the arithmetic has it.
        assert_same_bits(stored(row), stored(alone[i]), without=("d", "checkpoint.unrounded"))
        assert (row.materialize() - alone[i].materialize()).abs().max() <= bound
    assert "early" not in policy or "@4" in policy or folded == {False, True}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [*RAGGED_POLICIES, "fp32@1", "bf16/nvfp4@4:schedule=turn"])
def test_a_row_without_tokens_is_left_as_it_was(family, policy):
    """Padding: every tensor that ``save`` has of it, who read its stores and memory behind its cursor included.

    Its tokens are NaN, its window as full as it can be; two mates have tokens.
    """
    window, early = parse_policy(policy).window, "early" in policy
    s, rows = stream(family, 3, 24)
    state = start(policy, family, s.initial[rows], key_heads=1, rates=s.rates, drafts=DRAFTS)
    count = min(window, DRAFTS) if early else DRAFTS
    full = min(window, DRAFTS) if early else window - 1
    state.verify(tokens_of(s, rows, 0, count))
    state.commit(torch.full((3,), full))
    if early and window > DRAFTS:
        state.step(tokens_of(s, rows, 8, 9).token(0))
    tokens = tokens_of(s, rows, 10, 10 + count)
    for t in vars(tokens).values():
        if t is not None:
            t[1] = torch.nan
    lengths = torch.tensor([count, 0, 1])
    before, others = state.save(torch.tensor([1])), state.save(torch.tensor([0, 2]))

    def untouched():
        found = state.save(torch.tensor([1]))
        if "checkpoint.live" not in before and "checkpoint.live" in found:
            # A mate's fold is not rounded yet, and a save then says of every row whether its is.
            assert not found.pop("checkpoint.live").any()
            del found["checkpoint.unrounded"]
        return bits_equal(found, before)

    assert not state.verify(tokens, lengths=lengths)[1].any()
    assert state.pending.tolist() == lengths.tolist()
    state.commit(lengths)
    assert untouched()
    assert not state.extend(tokens, lengths=lengths)[1].any()
    assert untouched()
    assert not bits_equal(state.save(torch.tensor([0, 2])), others)
    for operation in (state.verify, state.extend):
        assert not operation(tokens, lengths=torch.zeros(3, dtype=torch.int64)).any()
    assert untouched()


def bits_equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[n].contiguous().view(torch.uint8), other[n].contiguous().view(torch.uint8))
        for n in one
    )


@pytest.mark.parametrize("operation", ["verify", "extend"])
def test_outputs_behind_a_length_are_zero_whatever_stands_before_them(operation):
    s, rows = stream("gated_delta", 2, 4)
    state = start("fp32@8", "gated_delta", s.initial[rows], key_heads=1, drafts=DRAFTS)
    drafts = tokens_of(s, rows, 0, 4)
    drafts.v[0, 1 if operation == "verify" else 2] = torch.nan
    outputs = getattr(state, operation)(drafts, lengths=torch.tensor([2, 4]))
    assert not outputs[0, 2:].any()
    assert outputs[0, 1].isnan().all() == (operation == "verify")
    assert outputs[1].isfinite().all()
