"""What each option of a policy does, against the definition written out, or against a policy that must be equal."""

import dataclasses

import pytest
import torch

from quantlab.formats import parse
from quantlab.recurrences import RECURRENCES
from quantlab.schemes.sites import SITES, canonical_sites, narrow, parse_sites

from .streams import begin, relative, run, same_bits, stream, tokens

FAMILIES = sorted(RECURRENCES)
DELTA = [f for f in FAMILIES if RECURRENCES[f].delta_rule]
ROUNDED = ["bf16", "int8+ef", "int8+ef.int4", "fp16+sr", "nvfp4"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("store", ROUNDED)
def test_a_replay_per_step_has_the_bits_of_rewriting_the_state(family, store):
    """schedule=step: the window is only where the inputs wait, so nothing differs from window 1; drafts included."""
    s = stream(family, steps=18)
    rewritten, replayed, drafted = (
        begin(p, s) for p in (f"{store}@1", f"{store}@8:schedule=step", f"{store}@8:schedule=step")
    )
    expected = run(rewritten, s)
    assert torch.equal(run(replayed, s), expected)
    assert torch.equal(replayed.materialize(), rewritten.materialize())
    for t in range(0, 18, 3):
        outputs = drafted.verify(tokens(s, t, t + 3))
        torch.testing.assert_close(outputs.transpose(0, 1), expected[t : t + 3], rtol=1e-5, atol=1e-5)
        drafted.commit(torch.full((s.batch,), 3))
    assert torch.equal(drafted.materialize(), rewritten.materialize())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [2, 3, 5, 16])
def test_flushing_early_is_the_same_recurrence(family, window):
    s = stream(family, steps=37)
    reference = run(begin("fp64@1", s), s)
    assert relative(run(begin(f"fp64@{window}:flush=early", s), s), reference) <= 1e-12


def test_early_flush_keeps_the_current_token_and_stores_every_window_less_one():
    s = stream("mamba2", steps=16)
    state, stores = begin("fp32@5:flush=early", s), []
    for t in range(16):
        state.step(s.step(t))
        stores.append(int(state._checkpoint.numbers[0]))
    # Tokens 0 to 3 fill four places; token 4 finds 4 + 2 > 5 and folds them first, then every fourth does.
    assert stores == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert state.cursor.tolist() == [4, 4, 4]


@pytest.mark.parametrize("copy_read", ["exact", "copy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_early_flush_reads_what_flush_read_says(family, copy_read):
    """On a flush step exact is the step of the exact state, copy is off by NVFP4's error."""
    s = stream(family, steps=5)
    state = begin(f"fp32/nvfp4@5:flush=early:flush_read={copy_read}", s)
    run(state, s, 0, 4)
    exact = state.materialize()
    output = state.step(s.step(4))
    _, expected = RECURRENCES[family].step(exact.double(), s.step(4).to(torch.float64), _rates(s))
    # Float32 sums of a few dozen terms against a copy whose blocks are off by several per cent.
    assert (relative(output, expected) < 1e-5) == (copy_read == "exact")


def _rates(s):
    return None if s.rates is None else s.rates.double()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["bf16", "fp16", "hilo"])
def test_records_are_held_in_the_buffer_format(family, name):
    """buffer=: what the window gives back is on the format's grid, and hilo keeps 16 bits."""
    s = stream(family, steps=3)
    state = begin(f"fp32@8:buffer={name}", s)
    run(state, s)
    held = state.window_tensors
    for t in range(3):
        exact = s.step(t).k
        kept = held["k"][:, t]
        if name == "hilo":
            high = exact.bfloat16().float()
            assert torch.equal(kept, high + (exact - high).bfloat16().float())
            # bfloat16 keeps 8 bits: the rest is at most 2^-8 of the value, its own rounding 2^-8 of that.
            assert float(((kept - exact).abs() / exact.abs()).max()) <= 2.0**-16
        else:
            assert torch.equal(kept, exact.to({"bf16": torch.bfloat16, "fp16": torch.float16}[name]).float())
        assert torch.equal(held["log_decay"][:, t], s.step(t).log_decay)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rounded_current_token_is_a_token_that_was_rounded_before(family):
    """current=buffer: as feeding k and v that are on the grid already (mamba: d = v, so nothing else is rounded)."""
    s = stream(family, steps=12)
    state = begin("fp32@4:buffer=bf16:current=buffer", s)
    twin = begin("fp32@4:buffer=bf16", s)
    bf16 = parse("bf16")
    for t in range(12):
        inputs = s.step(t)
        rounded = dataclasses.replace(inputs, k=narrow(inputs.k, bf16), v=narrow(inputs.v, bf16))
        one, other = state.step(inputs), twin.step(rounded)
        if RECURRENCES[family].delta_rule:
            # d itself is rounded too, before it is used: one bfloat16 rounding of what a token adds.
            assert relative(one, other) < 2.0**-8
        else:
            assert torch.equal(one, other)


def test_the_product_of_a_fold_rounds_its_operands():
    """dot=: a window of one record from a zero state is exactly the product of two rounded numbers."""
    s = stream("mamba2", steps=2)
    s = dataclasses.replace(s, initial=torch.zeros_like(s.initial))
    inputs = [s.step(t) for t in range(2)]
    for dot in ("tf32", "bf16"):
        state = begin(f"fp32@2:dot={dot}", s)
        for token in inputs:
            state.step(token)
        fmt = parse(dot)
        first = inputs[0].v * torch.exp(inputs[1].log_decay)[..., None]
        k = [t.k.repeat_interleave(2, 1) for t in inputs]
        expected = sum(
            narrow(d, fmt)[..., :, None].double() * narrow(key, fmt)[..., None, :].double()
            for d, key in ((first, k[0]), (inputs[1].v, k[1]))
        )
        # Two products and one sum in float32.
        error = (state.materialize().double() - expected).abs()
        assert float((error / expected.abs().amax()).max()) < 3 * 2.0**-24
    ieee, three = (
        run(begin(f"fp32@4:dot={d}", stream("mamba2")), stream("mamba2")) for d in ("ieee", "tf32x3")
    )
    tf32 = run(begin("fp32@4:dot=tf32", stream("mamba2")), stream("mamba2"))
    # tf32 keeps 11 bits of each operand: 2^-11 each.  tf32x3 leaves out the product of the two rests, 2^-22, and adds
    # two float32 sums.
    assert relative(three, ieee) < 2.0**-22 + 4 * 2.0**-24
    assert 10 * relative(three, ieee) < relative(tf32, ieee) < 2 * 2.0**-11


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_with_the_residual_see_what_was_stored(family):
    """ef_read=include with an exact residual (fp32): the read loses nothing, though the store keeps 8 bits."""
    s = stream(family, steps=1)
    exact = run(begin("fp32@4", s), s)
    included = run(begin("int8+ef.fp32@4:ef_read=include", s), s)
    excluded = run(begin("int8+ef.fp32@4", s), s)
    # decoded + residual = state, up to the rounding of the two to float32 (2^-24 of the largest entry of a row each),
    # summed over the 32 columns of a read; int8 itself is off by a part in a few hundred.
    assert relative(excluded, exact) == 0.0 or relative(excluded, exact) < 0.1
    state = begin("int8+ef.fp32@4", s)
    assert relative(state.materialize(), s.initial) > 1e-3
    handed = begin("int8+ef.fp32@4:ef_read=include", s)
    assert relative(handed.read_state(), s.initial) < 1e-6
    assert relative(included, exact) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schedule", "rounds"), [("flush", 4), ("chunk", 2), ("turn", 1)])
def test_when_a_schedule_rounds(family, schedule, rounds):
    """Stores of rounded bits: hand-off, two full windows, one prefill chunk, one explicit flush."""
    s = stream(family, steps=12)
    state = begin(f"bf16@4:schedule={schedule}", s)
    exact = begin("fp32@4", s)
    run(state, s, 0, 8)
    run(exact, s, 0, 8)
    if schedule in ("chunk", "turn"):
        start_from = parse("bf16").round(s.initial) if schedule == "chunk" else s.initial
        unrounded = begin("fp32@4", dataclasses.replace(s, initial=start_from))
        run(unrounded, s, 0, 8)
        assert torch.equal(state.materialize(), unrounded.materialize())
    state.extend(tokens(s, 8, 12))
    state.flush()
    assert torch.equal(state.materialize(), parse("bf16").round(state.materialize()))
    # Numbers count from 0, the hand-off or what takes its place.
    assert (state._checkpoint.numbers + 1).tolist() == [rounds + (schedule == "chunk") * 0] * s.batch


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["fp64@1", "fp64@5", "fp64@5:flush=early"])
def test_prefill_chunks_are_steps(family, policy):
    """extend at any point of a window, rows of their own length, against single steps."""
    s = stream(family, steps=20)
    lengths = torch.tensor([0, 5, 9])
    state = begin(policy, s)
    run(state, s, 0, 7)
    outputs = state.extend(tokens(s, 7, 16), lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        only = torch.tensor([row])
        alone = begin("fp64@1", s, only, sequence_ids=only)
        run(alone, s, 0, 7, rows=only)
        if length:
            expected = run(alone, s, 7, 7 + length, rows=only)
            assert relative(outputs[row, :length], expected[:, 0]) <= 1e-12
        assert not outputs[row, length:].any()
        assert relative(state.materialize(only), alone.materialize()) <= 1e-12


SITE_CASES = [
    pytest.param(f, site, marks=[] if f in ("gated_delta", "mamba1") else pytest.mark.slow)
    for f in FAMILIES
    for site in SITES
    # What a family has no use for is refused: tests/schemes/test_policy.py.
    if not (site == "beta" and f not in DELTA) and not (site in ("decay", "dot") and f == "mamba1")
]


@pytest.mark.parametrize(("family", "site"), SITE_CASES)
def test_every_site_rounds_something_and_only_by_its_format(family, site):
    """bf16 moves the outputs by at most a few per cent, fp32 not at all, and the text is canonical either way."""
    s = stream(family, steps=13)
    exact = run(begin("fp32@4", s), s)
    rounded = run(begin(f"fp32@4:sites={site}", s), s)
    assert 0 < relative(rounded, exact) < 0.1
    wide = run(begin(f"fp32@4:sites={site}.fp32", s), s)
    # exp and log of a float32 decay are exact to an ulp; every other site leaves float32 as it is.
    assert relative(wide, exact) <= (1e-6 if site == "decay" else 0.0)


def test_sites_that_meet_a_token_first_round_it_as_if_it_came_so():
    s = stream("gated_delta", steps=9)
    state = begin("fp32@4:sites=beta+gate.fp16+q+k.e4m3+v", s)
    twin = begin("fp32@4", s)
    formats = {"beta": "bf16", "log_decay": "fp16", "q": "bf16", "k": "e4m3", "v": "bf16"}
    for t in range(9):
        inputs = s.step(t)
        changes = {n: parse(f).round(getattr(inputs, n)) for n, f in formats.items()}
        assert torch.equal(state.step(inputs), twin.step(dataclasses.replace(inputs, **changes)))
    assert torch.equal(state.materialize(), twin.materialize())


def test_output_and_state_sites_are_roundings_of_what_is_read():
    s = stream("mamba2", steps=5)
    rounded, plain = begin("fp32@8:sites=output", s), begin("fp32@8", s)
    for t in range(5):
        assert torch.equal(rounded.step(s.step(t)), parse("bf16").round(plain.step(s.step(t))))
    narrow_state = begin("fp32@8:sites=state", s)
    from_grid = begin("fp32@8", dataclasses.replace(s, initial=parse("bf16").round(s.initial)))
    assert torch.equal(run(narrow_state, s), run(from_grid, s))


def test_the_decay_site_is_the_rounded_factor():
    """A decay of .999 is 1.0 in bfloat16: nothing is forgotten any more."""
    s = stream("mamba2", steps=1)
    gate = torch.full_like(s.step(0).log_decay, -1e-3)
    silent = dataclasses.replace(s.step(0), log_decay=gate, v=torch.zeros_like(s.step(0).v))
    state = begin("fp32@1:sites=decay", s)
    state.step(silent)
    assert torch.equal(state.materialize(), s.initial)


def test_site_text():
    assert canonical_sites("output+beta.bf16+k.fp16") == "beta+k.fp16+output"
    assert list(parse_sites("output+beta")) == ["beta", "output"]


@pytest.mark.parametrize("family", DELTA)
@pytest.mark.parametrize("form", ["steps", "drafts", "raw fold"])
def test_a_rounded_d_enters_the_tokens_behind_it(family, form):
    """sites=d, token by token from the definition in float64: d_t = round(beta (v - S k)), S from rounded d only."""
    s = stream(family, steps=3)
    state = begin("fp64@4:sites=d.e4m3", s)
    if form == "drafts":
        outputs = state.verify(tokens(s, 0, 3)).transpose(0, 1)
        state.commit(torch.full((s.batch,), 3))
    else:
        outputs = run(state, s)
    expected, e4m3 = s.initial.double(), parse("e4m3")
    for t in range(3):
        inputs = s.step(t).to(torch.float64)
        decay = torch.exp(inputs.log_decay)
        expected = expected * (decay[..., None, None] if decay.ndim == 2 else decay[..., None, :])
        k, q = (x.repeat_interleave(2, 1) for x in (inputs.k, inputs.q))
        d = inputs.beta[..., None] * (inputs.v - (expected * k[..., None, :]).sum(-1))
        d = e4m3.round(d).double()
        expected = expected + d[..., None] * k[..., None, :]
        assert relative(outputs[t], (expected * q[..., None, :]).sum(-1)) <= 1e-12
    dense = state.materialize() if form == "raw fold" else state.read_state()
    assert relative(dense, expected) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["int8+ef@4", "fp16+sr@4", "fp32/nvfp4@4", "bf16@4:schedule=turn"])
def test_an_explicit_flush_is_idempotent_and_ends_the_window(family, policy):
    s = stream(family, steps=13)
    state = begin(policy, s)
    run(state, s, 0, 6)
    logical = state.materialize()
    state.flush()
    assert state.cursor.tolist() == [0, 0, 0]
    once = state.save()
    state.flush()
    assert all(torch.equal(once[n].nan_to_num(7.0), t.nan_to_num(7.0)) for n, t in state.save().items())
    fmt = state.policy.checkpoint
    if not fmt.stochastic and fmt.error_feedback is None:
        assert torch.equal(state.materialize(), fmt.round(logical))
    assert not same_bits(state, begin(policy, s))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operation", ["step", "verify", "extend"])
def test_rows_may_come_in_any_order(family, operation):
    """All rows, named in another order: each input goes to the row that it is for."""
    s = stream(family, steps=6)
    order = torch.tensor([2, 0, 1])
    state, straight = begin("fp64@4", s), begin("fp64@4", s)
    if operation == "step":
        outputs = state.step(s.step(0).map(lambda t: t[order]), order)
        expected = straight.step(s.step(0))
    else:
        several = tokens(s, 0, 6)
        outputs = getattr(state, operation)(several.map(lambda t: t[order]), order)
        expected = getattr(straight, operation)(several)
    if operation == "verify":
        state.commit(torch.tensor([6, 4, 5]), order)
        straight.commit(torch.tensor([4, 5, 6]))
    assert relative(outputs, expected[order]) <= 1e-12
    assert relative(state.materialize(), straight.materialize()) <= 1e-12


def test_the_read_view_knows_nothing_of_the_folds_product():
    s = stream("mamba2", steps=3)
    rounded, plain = begin("fp32@8:dot=bf16", s), begin("fp32@8", s)
    run(rounded, s)
    run(plain, s)
    assert torch.equal(rounded.read_state(), plain.read_state())
    assert not torch.equal(rounded.materialize(), plain.materialize())
