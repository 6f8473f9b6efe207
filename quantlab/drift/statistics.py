"""What the predictor takes from the float64 shadow of a run, collected as the run goes."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantlab.drift.balance import ErrorBalance, Token
from quantlab.drift.noise_sources import token_noise
from quantlab.drift.predictor import Prediction, StreamStatistics
from quantlab.drift.rounding_noise import state_noise
from quantlab.drift.sources import StreamSource
from quantlab.drift.streams import Stream
from quantlab.recurrences import DecayAxis, Recurrence, StepInputs, expand_groups, get_recurrence
from quantlab.schemes import Policy

_NAMES = ("decay", "erase", "write", "state", "output", "gain", "log_decay", "update", "value", "beta")


class ShadowStatistics:
    """Collects what the predictor and the pooled errors need from the shadow; ``add`` once a step.

    policies: whose errors will be predicted, which decides what is worth computing.  balances: where the decay differs
    within a head, those that run beside the shadow from block to block (``channel_balances``).
    """

    def __init__(
        self, stream: Stream, policies: Sequence[Policy] = (), balances: "ChannelBalances | None" = None
    ):
        self.stream = stream
        self.recurrence = get_recurrence(stream.family)
        shape = (stream.steps, stream.batch, stream.heads)
        self.values = {name: torch.zeros(shape, dtype=torch.float64) for name in _NAMES}
        self.key_dim = stream.initial.shape[-1]
        self.start = stream.initial.double().square().sum((-1, -2))
        self.writes = any(needs_writes(policy, self.recurrence) for policy in policies)
        self.balances = balances
        if balances is not None:
            balances.begin(stream.steps)

    def add(
        self, t: int, before: Tensor, after: Tensor, output: Tensor, inputs: StepInputs, rates: Tensor | None
    ) -> None:
        """One step of the shadow: states before and after, the exact output, the inputs in float64."""
        values = self.values
        values["state"][t] = after.square().sum((-1, -2))
        values["output"][t] = output.square().sum(-1)
        if self.balances is not None:
            token = channel_token(self.recurrence, before, after, output, inputs, rates, writes=self.writes)
            self.balances.add(t, token, after)
        if self.recurrence.axis is not DecayAxis.HEAD:
            return
        heads = self.stream.heads
        decay = torch.exp(2 * inputs.log_decay)
        k = expand_groups(inputs.k, heads, 1)
        key = k.square().sum(-1)
        values["decay"][t] = decay
        values["log_decay"][t] = inputs.log_decay
        values["erase"][t] = 1.0
        if self.recurrence.delta_rule:
            assert inputs.beta is not None
            beta = inputs.beta
            values["erase"][t] = 1 - (2 * beta * key - (beta * key).square()) / self.key_dim
            values["write"][t] = beta.square() * key.square() / self.key_dim
            values["beta"][t] = beta
        values["gain"][t] = expand_groups(inputs.q, heads, 1).square().sum(-1) / self.key_dim
        if self.writes:
            values["update"][t], values["value"][t] = _write_powers(
                self.recurrence, torch.exp(inputs.log_decay)[..., None, None] * before, inputs, k, key
            )

    def arrays(self) -> StreamStatistics:
        """Everything as (steps, units) arrays."""
        flat: dict[str, NDArray] = {name: value.flatten(1).numpy() for name, value in self.values.items()}
        return StreamStatistics(
            **flat,
            start=self.start.flatten().numpy(),
            key_dim=self.key_dim,
            curves=None if self.balances is None else self.balances.predictions(),
        )


def needs_writes(policy: Policy, recurrence: Recurrence) -> bool:
    """Whether the policy makes noise in what a token writes, so that the size of the writes matters."""
    noise = token_noise(policy, recurrence)
    parts = (noise.now, noise.record, noise.fold, noise.folded_now)
    return any(map(bool, parts)) or (noise.beta or noise.kept_beta) is not None


def _write_powers(
    recurrence: Recurrence, decayed: Tensor, inputs: StepInputs, k: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """|d|^2 |k|^2 and the value's share of it, from the decayed state."""
    if not recurrence.delta_rule:
        power = inputs.v.square().sum(-1) * key
        return power, power
    assert inputs.beta is not None
    d = inputs.beta[..., None] * (inputs.v - torch.matmul(decayed, k[..., None])[..., 0])
    value = inputs.beta.square() * inputs.v.square().sum(-1)
    return d.square().sum(-1) * key, value * key


def channel_token(
    recurrence: Recurrence,
    before: Tensor,
    after: Tensor,
    output: Tensor,
    inputs: StepInputs,
    rates: Tensor | None,
    *,
    writes: bool = False,
) -> Token:
    """One step of a family whose decay differs within a head, for ``ErrorBalance``: channels (key_dim,) or
    (value_dim, key_dim), units = batch x heads.  Shapes as in ``Recurrence.step``; any float dtype."""
    heads = after.shape[1]
    k, q = (expand_groups(x, heads, 1) for x in (inputs.k, inputs.q))

    def units(x: Tensor) -> NDArray:
        return x.flatten(0, 1).numpy()

    factor = recurrence.decay(inputs.log_decay, rates)
    common = {"output": units(output.square().sum(-1))}
    if recurrence.axis is DecayAxis.ELEMENT:
        v = inputs.v.square()[..., None] * k.square()[..., None, :] if writes else None
        assert rates is not None
        return Token(
            decay=units(factor.square()),
            state=units(after.square()),
            gain=units(q.square()[..., None, :]),
            log_decay=units(inputs.log_decay[..., None] * rates),
            gate=units(inputs.log_decay[..., None]),
            rates=units(rates.expand(before.shape[0], *rates.shape)),
            update=0.0 if v is None else units(v),
            value=0.0 if v is None else units(v),
            **common,
        )
    assert inputs.beta is not None
    update = value = 0.0
    if writes:
        of_d, of_v = _write_powers(recurrence, factor * before, inputs, k, torch.ones_like(inputs.beta))
        update, value = (units(p[..., None] * k.square()) for p in (of_d, of_v))
    return Token(
        decay=units(factor.square()[..., 0, :]),
        state=units(after.square().sum(-2)),
        gain=units(q.square()),
        log_decay=units(inputs.log_decay),
        key=units(k.square()),
        beta=units(inputs.beta[..., None]),
        update=update,
        value=value,
        **common,
    )


class ChannelBalances:
    """Balances of several policies that run beside a shadow whose decay differs within a head.

    The size of a store's rounding is measured on the shadow's state, at the start and after 1, 2, 4, 8, ... steps.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        recurrence: Recurrence,
        initial: Tensor,
    ):
        self.axes = 2 if recurrence.axis is DecayAxis.ELEMENT else 1
        self.units = initial.shape[0] * initial.shape[1]
        self.steps = 0
        self.balances: dict[Policy, ErrorBalance] = {}
        self.found: dict[Policy, Prediction] = {}
        power = initial.square().flatten(0, 1)
        power = (power if self.axes == 2 else power.sum(-2)).numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            for policy in policies:
                noise = state_noise(policy, initial)
                balance = ErrorBalance(policy, recurrence, noise, initial.shape[-1], self.axes)
                balance.hand_off(power)
                self.balances[policy] = balance

    def begin(self, steps: int) -> None:
        """Room for the curves of the next ``steps`` steps."""
        shape = (steps, self.units)
        self.found = {policy: Prediction(np.empty(shape), np.empty(shape)) for policy in self.balances}

    def add(self, t: int, token: Token, state: Tensor) -> None:
        """The token of step ``t`` of the block, and the shadow's state after it."""
        self.steps += 1
        measure = self.steps & (self.steps - 1) == 0
        with np.errstate(over="ignore", invalid="ignore"):
            for policy, balance in self.balances.items():
                if measure:
                    balance.set_noise(state_noise(policy, state))
                found = self.found[policy]
                found.state[t], found.output[t] = balance.step(token)

    def predictions(self) -> dict[Policy, Prediction]:
        """The curves of the block."""
        return self.found


def channel_balances(source: StreamSource, policies: Sequence[Policy]) -> ChannelBalances | None:
    """Balances of the policies for a source whose decay differs within a head, else None."""
    recurrence = get_recurrence(source.family)
    if recurrence.axis is DecayAxis.HEAD:
        return None
    kept = [policy for policy in policies if policy.checkpoint.name != "fp64"]
    return ChannelBalances(kept, recurrence, source.initial.double())
