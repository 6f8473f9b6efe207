"""The recurrences against a literal elementwise loop, and the window sums against stepping."""

import dataclasses

import numpy as np
import pytest
import torch

from quantlab.drift import synthetic_stream
from quantlab.recurrences import RECURRENCES, Records, decayed_read, fold, solve_deltas
from quantlab.recurrences.base import expand_groups

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
                * np.exp(rates[h, row, n] * log_decay[h, row] if family == "mamba1" else log_decay[h])
                for n in range(key_dim)
            ]
            write = v[h, row]
            if family == "gated_delta":
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
    read = decayed_read(recurrence, base, before, last.log_decay, q[:, :, None], rates)[:, :, 0]
    read = read + records.d[:, -1] * (k * q).sum(-1, keepdim=True)
    torch.testing.assert_close(read, output, rtol=1e-11, atol=1e-11)


def test_solved_deltas_survive_decays_that_underflow():
    """A gate that closes fully (exp(-200) = 0 in float32) must give zeros, not NaN, in the triangular system."""
    s = stream("gated_delta")
    records = window_of(s, 7)
    hard = Records(
        records.k.float(), None, torch.full((3, 7, 4), -200.0), records.v.float(), records.beta.float()
    )
    deltas = solve_deltas(RECURRENCES["gated_delta"], s.initial, hard)
    # With everything forgotten, each delta is beta v.
    torch.testing.assert_close(deltas, records.beta.float()[..., None] * records.v.float())


@pytest.mark.parametrize("family", ["gated_delta", "mamba2"])
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
    read = decayed_read(recurrence, s.initial, whole, s.log_decay[6], q)
    torch.testing.assert_close(
        read,
        decayed_read(recurrence, torch.zeros_like(s.initial), rest, s.log_decay[6], q),
        rtol=1e-4,
        atol=1e-5,
    )
