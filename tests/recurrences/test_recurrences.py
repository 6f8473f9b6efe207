"""The recurrences against a literal elementwise loop, and the window sums against stepping."""

import dataclasses

import numpy as np
import pytest
import torch

from quantlab.drift import synthetic_stream
from quantlab.recurrences import RECURRENCES, Records, chunk, fold, solve_deltas, window_read
from quantlab.recurrences.base import StepInputs, expand_groups

FAMILIES = sorted(RECURRENCES)


def stream(family, **changes):
    shape = {"heads": 4, "key_heads": 2, "steps": 7, "sequences": 3, "value_dim": 5, "key_dim": 6, "seed": 3}
    return synthetic_stream(family, preset="realistic", **(shape | changes))


def literal_step(family, state, q, k, v, log_decay, beta, rates):
    """The definition, one scalar at a time (numpy, float64)."""
    heads, value_dim, key_dim = state.shape
    per_group = heads // k.shape[0]
    new, output = np.empty_like(state), np.zeros((heads, value_dim))
    for h in range(heads):
        kh, qh = k[h // per_group], q[h // per_group]
        for row in range(value_dim):
            decayed = [
                state[h, row, n]
                * np.exp(
                    rates[h, row, n] * log_decay[h, row]
                    if family == "mamba1"
                    else log_decay[h, n]
                    if family == "kimi_delta"
                    else log_decay[h]
                )
                for n in range(key_dim)
            ]
            write = v[h, row]
            if family in ("gated_delta", "kimi_delta"):
                write = beta[h] * (v[h, row] - sum(decayed[n] * kh[n] for n in range(key_dim)))
            for n in range(key_dim):
                new[h, row, n] = decayed[n] + write * kh[n]
                output[h, row] += new[h, row, n] * qh[n]
    return new, output


@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_the_definition(family):
    s = stream(family)
    rates = None if s.rates is None else s.rates.double()
    state = s.initial.double()
    expected = state.numpy().copy()
    for t in range(s.steps):
        inputs = s.step(t).to(torch.float64)
        state, output = RECURRENCES[family].step(state, inputs, rates)
        for b in range(s.batch):
            expected[b], literal = literal_step(
                family,
                expected[b],
                inputs.q[b].numpy(),
                inputs.k[b].numpy(),
                inputs.v[b].numpy(),
                inputs.log_decay[b].numpy(),
                None if inputs.beta is None else inputs.beta[b].numpy(),
                None if rates is None else rates.numpy(),
            )
            # A dozen float64 operations a step on values of order 100: 1e-12 leaves a factor of 50.
            np.testing.assert_allclose(output[b].numpy(), literal, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(state.numpy(), expected, rtol=1e-12, atol=1e-12)


def window_of(s, count):
    def stack(name):
        return torch.stack([getattr(s.step(t).to(torch.float64), name) for t in range(count)], 1)

    beta = stack("beta") if s.beta is not None else None
    return Records(stack("k"), stack("v"), stack("log_decay"), stack("v"), beta)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_window_sums_are_steps(family, count):
    s = stream(family)
    recurrence, rates = RECURRENCES[family], None if s.rates is None else s.rates.double()
    base = s.initial.double()
    records = window_of(s, count)
    if recurrence.delta_rule:
        deltas = solve_deltas(recurrence, base, records)
        records = Records(records.k, deltas, records.log_decay, records.v, records.beta)
    state = base
    for t in range(count):
        state, output = recurrence.step(state, s.step(t).to(torch.float64), rates)
    # The same sum in another order: float64 rounding only.
    torch.testing.assert_close(fold(recurrence, base, records, rates), state, rtol=1e-11, atol=1e-11)
    # Reading just before the last token was written, plus its own term, is the output after it.
    before = Records(records.k[:, :-1], records.d[:, :-1], records.log_decay[:, :-1])
    last = s.step(count - 1).to(torch.float64)
    q, k = expand_groups(last.q, s.heads, 1), expand_groups(last.k, s.heads, 1)
    read = window_read(recurrence, base, before, last.log_decay[:, None], q[:, :, None], rates)[:, :, 0]
    read = read + records.d[:, -1] * (k * q).sum(-1, keepdim=True)
    torch.testing.assert_close(read, output, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta"])
def test_solved_deltas_survive_decays_that_underflow(family):
    """A gate that closes fully (exp(-200) = 0 in float32) must give zeros, not NaN, in the triangular system."""
    s = stream(family)
    records = window_of(s, 7)
    hard = Records(
        records.k.float(),
        None,
        torch.full_like(records.log_decay, -200.0).float(),
        records.v.float(),
        records.beta.float(),
    )
    deltas = solve_deltas(RECURRENCES[family], s.initial, hard)
    # With everything forgotten, each delta is beta v.
    torch.testing.assert_close(deltas, records.beta.float()[..., None] * records.v.float())


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta", "mamba2"])
@pytest.mark.parametrize("closed", [-1e6, -float("inf")])
def test_a_closed_gate_forgets_what_came_before_and_nothing_else(family, closed):
    """After a decay of zero a window is the window of the later records, in float32 to a few units of 6e-8."""
    s, recurrence = stream(family), RECURRENCES[family]
    records = window_of(s, 7)
    gate = records.log_decay.clone()
    gate[:, 2] = closed

    def cut(first, log_decay):
        def narrow(t):
            return None if t is None else t[:, first:].float()

        found = Records(
            narrow(records.k), narrow(records.d), narrow(log_decay), narrow(records.v), narrow(records.beta)
        )
        if not recurrence.delta_rule:
            return found
        base = s.initial if first == 0 else torch.zeros_like(s.initial)
        return dataclasses.replace(found, d=solve_deltas(recurrence, base, found))

    whole, rest = cut(0, gate), cut(2, records.log_decay)
    folded = fold(recurrence, s.initial, whole)
    expected = fold(recurrence, torch.zeros_like(s.initial), rest)
    torch.testing.assert_close(folded, expected, rtol=1e-5, atol=1e-5)
    q = expand_groups(s.q[0], s.heads, 1)[:, :, None]
    read = window_read(recurrence, s.initial, whole, s.log_decay[6][:, None], q)
    torch.testing.assert_close(
        read,
        window_read(recurrence, torch.zeros_like(s.initial), rest, s.log_decay[6][:, None], q),
        rtol=1e-4,
        atol=1e-5,
    )


def tokens_of(s, dtype=torch.float64):
    """The whole stream as tokens of one chunk."""
    found = [s.step(t).to(dtype) for t in range(s.steps)]
    stacked = {
        name: None if getattr(found[0], name) is None else torch.stack([getattr(i, name) for i in found], 1)
        for name in ("q", "k", "v", "log_decay", "beta")
    }
    return StepInputs(**stacked)


def stepped(recurrence, state, tokens, rates):
    outputs = []
    for t in range(tokens.v.shape[1]):
        state, output = recurrence.step(state, tokens.token(t), rates)
        outputs.append(output)
    return state, torch.stack(outputs, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 16, 17, 131])
def test_chunk_form_is_the_step_form(family, steps):
    """Within 1e-12 of the largest entry in float64, over chunk borders, with K != V and grouped heads."""
    s, recurrence = stream(family, steps=steps), RECURRENCES[family]
    tokens, rates = tokens_of(s), None if s.rates is None else s.rates.double()
    state, outputs = stepped(recurrence, s.initial.double(), tokens, rates)
    found, found_outputs = chunk(recurrence, s.initial.double(), tokens, rates)
    assert float((found - state).abs().max() / state.abs().max()) <= 1e-12
    assert float((found_outputs - outputs).abs().max() / outputs.abs().max()) <= 1e-12


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta"])
def test_chunk_form_with_negative_eigenvalues(family):
    """beta up to 2 reflects along the key; with unit keys nothing grows, and both forms agree."""
    s, recurrence = stream(family, steps=131), RECURRENCES[family]
    tokens = tokens_of(s)
    tokens = dataclasses.replace(tokens, beta=2 * tokens.beta)
    assert float(tokens.beta.max()) > 1.5
    state, outputs = stepped(recurrence, s.initial.double(), tokens, None)
    found, found_outputs = chunk(recurrence, s.initial.double(), tokens)
    assert float((found - state).abs().max() / state.abs().max()) <= 1e-12
    assert float((found_outputs - outputs).abs().max() / outputs.abs().max()) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_their_own_length(family):
    """A row stops at its length, whatever stands behind it, and its other outputs are zero."""
    s, recurrence = stream(family, steps=23), RECURRENCES[family]
    tokens, rates = tokens_of(s), None if s.rates is None else s.rates.double()
    lengths = torch.tensor([0, 9, 23])
    behind = torch.arange(23) >= lengths[:, None]
    poisoned = tokens.map(
        lambda t: t.masked_fill(behind.view(*behind.shape, *[1] * (t.ndim - 2)), float("nan"))
    )
    state, outputs = chunk(recurrence, s.initial.double(), poisoned, rates, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = tokens.map(lambda t, row=row, length=length: t[row : row + 1, :length])
        initial = s.initial[row : row + 1].double()
        expected, expected_outputs = chunk(recurrence, initial, alone, rates)
        assert float((state[row] - expected[0]).abs().max() / expected.abs().max()) <= 1e-12
        torch.testing.assert_close(outputs[row, :length], expected_outputs[0], rtol=1e-11, atol=1e-11)
        assert not outputs[row, length:].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_float_dtype(family, dtype):
    """Step and chunk form run in the dtype they are given and are off by what its rounding explains.

    A state of T tokens rounds a few times a token; errors of unit roundoff u add up to at most about 6 T u times the
    largest entry (each token: decay, two products, a sum, for the outer products also the solve).
    """
    s, recurrence = stream(family, steps=8), RECURRENCES[family]
    rates = None if s.rates is None else s.rates.double()
    exact, _ = stepped(recurrence, s.initial.double(), tokens_of(s), rates)
    narrow_rates = None if rates is None else rates.to(dtype)
    tokens, initial = tokens_of(s, dtype), s.initial.to(dtype)
    bound = 6 * 8 * torch.finfo(dtype).eps / 2
    for form in (stepped, chunk):
        state, outputs = form(recurrence, initial, tokens, narrow_rates)
        assert state.dtype == outputs.dtype == dtype
        assert float((state.double() - exact).abs().max() / exact.abs().max()) <= bound
