"""The balance of error powers, one token at a time: what enters, what decays, what a read sees.

Errors of distinct roundings are taken to be independent with zero mean, so their variances add.  A variance c of one
part of the state (of all of it, of a key channel, or of an element: whatever decays as one) changes as

    c <- a^2 c                                        the decay a of the token
    c_i <- c_i (1 - 2 beta k_i^2) + beta^2 k_i^2 sum_j k_j^2 c_j        the erase of a delta rule
    c <- c + (what the table in ``noise_sources`` lists)

The erase is that of independent channel errors: E (e_i - beta k_i (e . k))^2.  It leaves out the correlations between
channels that the erase itself makes.  Averaged over keys without a preferred direction it is a factor

    rho = a^2 (1 - (2 beta - beta^2) / key_dim)

which is used where one number stands for a head, and for each channel in the closed form.

An error x of a log decay multiplies everything older by exp(x), so that the write of token j carries the sum X of the
x since then: error power sum_j w_j X_j^2, with w_j what is left of the write's power.  Its first two moments need no
memory of the tokens: with p the power of the state,

    m2 <- rho (m2 + 2 x m1 + x^2 p)          m1 <- rho (m1 + x p)

A decay that is rounded the same way at every token adds up, one that is rounded at random walks; both are in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab.drift.noise_sources import TokenNoise, WriteNoise, token_noise
from quantlab.drift.rounding_noise import FLOAT32_NOISE, narrow, residual_noise, spread_block
from quantlab.formats import Format
from quantlab.recurrences import Recurrence
from quantlab.schemes import Policy
from quantlab.schemes.ledger import uses_raw

# In powers of FLOAT32_NOISE: a fold multiplies and adds once.  Before that a window of L records is summed: a partial
# sum of i records has power i / L of the sum, so the L - 1 additions make (L - 1) / 2 of the window's share.  A read
# sums key_dim products: two accumulators of key_dim / 2 additions each make key_dim / 4, and the products 1 more; then
# it sums the records like a fold.
FOLD_OPERATIONS = 2.0
# The rounding of a decay to float32 matters beside nothing but errors of that size.
SMALLEST_STORE_NOISE = 1e-4


Power = NDArray | float


@dataclass(frozen=True)
class Token:
    """What the balance takes of one token, each (units, *channels); channels: (1,) for a decay of a head, (key_dim,)
    of a key channel, (value_dim, key_dim) of an element.  A dimension may be 1 where all entries are equal.

    decay: squared decay.  state: squared norm of the exact state after the token.  gain: power of the output's error
    for each unit of a state error's.  output: (units,) squared norm of the exact output.  log_decay: log of the decay.
    erase: factor of the isotropic erase; or key: squared key entries, with beta (units, 1), for the erase by channel.
    write: beta^2 |k|^4 / key_dim of the isotropic erase: share of a read error along k that is written back.
    update, value: powers of the write and of its value's share, needed where a policy makes noise there.
    gate: what a rounding site of the log decay rounds, if that is not log_decay (mamba1: dt, with the rates).
    """

    decay: NDArray
    state: NDArray
    gain: NDArray
    output: NDArray
    log_decay: NDArray
    erase: Power = 1.0
    write: Power = 0.0
    key: NDArray | None = None
    beta: NDArray | None = None
    update: Power = 0.0
    value: Power = 0.0
    gate: NDArray | None = None
    rates: Power = 1.0

    def moved(self, power: Power) -> Power:
        """Error power after the decay and the erase."""
        return power if isinstance(power, float) else self.erased(power * self.decay)

    def erased(self, power: NDArray) -> NDArray:
        """Error power after the erase."""
        if self.key is None:
            return power * self.erase
        assert self.beta is not None
        along = (power * self.key).sum(-1, keepdims=True)
        return power * (1 - 2 * self.beta * self.key) + self.beta**2 * self.key * along

    def written(self, power: NDArray) -> Power:
        """Error power that a read along k of a state with this error writes back."""
        if self.key is None:
            return power * self.write
        assert self.beta is not None
        return self.beta**2 * self.key * (power * self.key).sum(-1, keepdims=True)

    def gate_error(self, site: str, format: str) -> NDArray:
        """Error of the log decay if its ``site`` (gate or decay) is rounded to ``format``."""
        if site == "gate":
            exact = self.log_decay if self.gate is None else self.gate
            return (narrow(exact, format) - exact) * (1.0 if self.gate is None else self.rates)
        with np.errstate(divide="ignore"):
            found = np.log(narrow(np.exp(self.log_decay), format))
        # A decay that rounds to zero leaves nothing of the state for its error to lie on.
        return np.where(np.isfinite(found), found - self.log_decay, 0.0)


class ErrorBalance:
    """The error powers of one policy on many units at once, token by token.

    noise: relative RMS of one store, (units,), keys "checkpoint" and "read_copy"; see ``rounding_noise``.
    ``hand_off`` begins at a prefill state; ``step`` takes a token and gives the powers (units,) of the logical state's
    error and of the output's.  What it leaves out: correlated roundings (a state that stagnates), and errors that are
    no longer small against the state.
    """

    def __init__(
        self, policy: Policy, recurrence: Recurrence, noise: dict[str, NDArray], key_dim: int, axes: int = 1
    ):
        options = policy.options
        self.policy, self.delta = policy, recurrence.delta_rule
        self.tokens: TokenNoise = token_noise(policy, recurrence)
        self.axes = axes
        self.set_noise(noise)
        self.early = options.flush == "early"
        window = 1 if options.schedule == "step" else policy.window
        self.period = max(1, window - 1) if self.early else window
        self.feedback = bool(policy.checkpoint.error_feedback)
        self.residual_noise = residual_noise(policy.checkpoint, key_dim) ** 2
        self.includes = options.ef_read == "include"
        has_copy = self.copy_noise is not None
        keys_from_copy = has_copy and self.delta and options.key_read == "copy"
        self.carries = keys_from_copy and not uses_raw(policy, recurrence)
        self.view_erased = not self.delta or not has_copy or keys_from_copy
        self.stored_read = (options.flush_read == "copy") if has_copy else self.includes
        self.rounds_folds = options.schedule in ("flush", "step")
        self.arithmetic = FLOAT32_NOISE**2
        self.per_token = axes == 2  # a fold by element takes one record after the other
        self.read_noise = self.arithmetic * (key_dim / 4 + 1)
        small = max(float(np.max(n, initial=0.0)) for n in noise.values()) < SMALLEST_STORE_NOISE
        self.float32_decay = small or axes == 1
        self._spread = {
            part: _spreader(format, axes)
            for part, format in (("checkpoint", policy.checkpoint), ("read_copy", policy.read_copy))
            if format is not None
        }

    def set_noise(self, noise: dict[str, NDArray]) -> None:
        """Use these relative sizes of a store from now on."""
        widen = (slice(None), *[None] * self.axes)
        self.stored_noise = noise["checkpoint"][widen] ** 2
        self.copy_noise = noise["read_copy"][widen] ** 2 if "read_copy" in noise else None

    def hand_off(self, power: NDArray) -> None:
        """Begin at a prefill state of this power (units, *channels)."""
        # Error powers that nothing feeds stay the number 0.0.
        self.exact: Power = 0.0  # of the checkpoint; with feedback, of checkpoint plus residual
        self.held: Power = 0.0  # of the residual that error feedback held back at the last store
        self.shrink = np.ones_like(power)
        self.first: Power = 0.0  # moments of the error that rounded log decays leave
        self.second: Power = 0.0
        self.state, self.position = power, 0
        self._store(power, rounded=self.policy.options.schedule != "turn")

    def step(self, token: Token) -> tuple[NDArray, NDArray]:
        """Error powers (units,) of the logical state and of the output after this token."""
        flush = self.position == self.period - 1 if not self.early else False
        folds_history = self.early and self.position == self.period
        seen_exactly = (flush or folds_history) and not self.stored_read
        through_fold = None
        if folds_history:
            through_fold = self.view + self.reads
            if seen_exactly:
                through_fold = self.exact + self.held_now + self.folds + self.carried
            self.fold_history()
        carries = self.carries and not (folds_history and seen_exactly)
        if carries:
            # What an error of the view puts into d, before the view itself has moved on.
            self.carried = token.moved(self.carried) + token.written(self.view * token.decay)
        before = self.state * token.decay
        for name in ("exact", "reads", "folds", "held_now"):
            setattr(self, name, token.moved(getattr(self, name)))
        if self.feedback:
            self.shrink = self.shrink * np.sqrt(token.decay)
        self.view = token.moved(self.view) if self.view_erased else self.view * token.decay
        self._gates(token, flush)
        own = self._noise(self.tokens.now, token, before, self.tokens.beta)
        logical = self.exact + self.held_now + (self.carried if self.carries else 0.0)
        if flush:
            self.folds = self.folds + self._noise(self.tokens.folded_now, token, before, self.tokens.beta)
        if through_fold is not None:
            seen = token.moved(through_fold) + own
        elif flush and seen_exactly:
            seen = logical + self.folds
        else:
            seen = self.view + self.reads + own
        output = self._power((seen + self.second) * token.gain) + self._read_noise(token)
        if self.tokens.query:
            output = output + self.tokens.query * self._power(token.state * token.gain)
        output = output + self.tokens.output * token.output
        self.state = token.state
        if flush:
            self.exact = self.exact + self.folds + (self.carried if self.carries else 0.0)
            self._fold(token.state)
            logical = self.exact + self.held
        else:
            self.reads = self.reads + self._noise(self.tokens.record, token, before, self.tokens.beta)
            kept = self.tokens.kept_beta or self.tokens.beta
            self.folds = self.folds + self._noise(self.tokens.fold, token, before, kept)
            if self.per_token:
                self.folds = self.folds + self.arithmetic * FOLD_OPERATIONS * token.state
            logical = logical + self.folds
            self.position += 1
        return self._power(logical + self.second), output

    def fold_history(self) -> None:
        """``flush=early``: fold and store what the window holds, the current token left out."""
        self.exact = self.exact + self.folds + (self.carried if self.carries else 0.0)
        self._fold(self.state)

    def _fold(self, power: NDArray) -> None:
        records = 0.0 if self.per_token else (self.period - 1) / 2
        self.exact = self.exact + self.arithmetic * (
            FOLD_OPERATIONS * power + records * np.maximum(power - self.kept, 0.0)
        )
        self._store(power, rounded=self.rounds_folds)

    def _store(self, power: NDArray, *, rounded: bool) -> None:
        """Round and store a state of this power, and begin an empty window."""
        if rounded:
            rounding = self.stored_noise * (self._spread["checkpoint"](power) + self.exact)
            if self.feedback:
                # The residual re-enters undecayed, so the part that the state has forgotten is an error; and so is
                # what the residual's own format loses of it.
                forgotten = (1 - self.shrink) ** 2 * self.held
                self.exact, self.held = self.exact + forgotten + self.residual_noise * rounding, rounding
            else:
                self.exact = self.exact + rounding
        self.begin_window(power)

    def begin_window(self, power: NDArray) -> None:
        """An empty window on a stored state of this power, with the errors that ``exact`` and ``held`` say."""
        self.held_now, self.shrink = self.held, np.ones_like(power)
        self.view: Power = self.exact if self.includes else self.exact + self.held
        if self.copy_noise is not None:
            self.view = self.view + self.copy_noise * (self._spread["read_copy"](power) + self.exact)
        # Errors of the window's records as reads and as a fold take them.
        self.reads: Power = 0.0
        self.folds: Power = 0.0
        self.carried: Power = 0.0  # what derived d have carried from the read copy into the window
        self.kept: Power = power  # of the stored state, decayed since
        self.log_sum: Power = 0.0
        self.position = 0

    def _noise(self, noise: WriteNoise, token: Token, before: NDArray, beta: str | None) -> Power:
        """Power that one token's noise writes."""
        found: Power = 0.0
        if noise:
            found = noise.update * token.update + noise.value * token.value
            if noise.read:
                found = found + noise.read * token.written(before)
        if beta is not None and token.beta is not None:
            exact = token.beta
            relative = np.divide(
                narrow(exact, beta) - exact, exact, out=np.zeros_like(exact), where=exact > 0
            )
            found = found + relative**2 * token.update
        return found

    def _read_noise(self, token: Token) -> NDArray:
        """Power that the float32 arithmetic of a read adds."""
        found = self.read_noise * token.output
        if self.position and not self.per_token:
            total = self._power(token.state)
            share = 1 - np.divide(self._power(self.kept), total, out=np.ones_like(total), where=total > 0)
            found = found + self.arithmetic * self.position / 2 * np.clip(share, 0.0, 1.0) * token.output
        return found

    def _gates(self, token: Token, flush: bool) -> None:
        """Move the moments of the decay's error, and add this token's."""
        error: Power = 0.0
        for site, format in self.tokens.gate:
            error = error + token.gate_error(site, format)
        kept_gate = self.tokens.kept_gate
        if kept_gate is not None and not flush and ("gate", kept_gate) not in self.tokens.gate:
            error = error + token.gate_error("gate", kept_gate)
        if isinstance(error, np.ndarray):
            self._scale(error, self.state)
        self.first, self.second = token.moved(self.first), token.moved(self.second)
        # By channel the erase would bring power of slow channels to fast ones, which is not the stored state's.
        self.kept = token.moved(self.kept) if token.key is None else self.kept * token.decay
        if not self.float32_decay:
            return
        if self.per_token:
            self._scale(float32_decay_error(token.log_decay), token.moved(self.state))
            return
        self.log_sum = self.log_sum + token.log_decay
        if flush or (self.early and self.position == self.period - 1):
            error = float32_decay_error(np.asarray(self.log_sum))
            self._scale(error, self.kept)

    def _scale(self, error: NDArray, power: Power) -> None:
        """All that is left of a state, with this power, is off by one more relative error."""
        self.second = self.second + 2 * error * self.first + error**2 * power
        self.first = self.first + error * power

    @staticmethod
    def _power(power: Power) -> NDArray:
        return power.reshape(len(power), -1).sum(1) if isinstance(power, np.ndarray) else np.asarray(power)


def float32_decay_error(log_decay: NDArray) -> NDArray:
    """Relative error of exp() of a float32 log decay: up to half an ulp, always the same for the same decay.

    It adds up along the state instead of averaging out: with alpha = 0.999 it is most of the error of an FP32 state.
    """
    found = torch.exp(torch.from_numpy(log_decay.astype(np.float32))).double().numpy()
    exact = np.exp(log_decay)
    # A decay below float32's normal numbers leaves nothing of the state for its error to lie on.
    return np.divide(found, exact, out=np.ones_like(exact), where=exact > 2.0**-126) - 1


def _spreader(format: Format, axes: int):
    """How a store's error lies over the channels: as each one's own power, or evenly over the values of a scale."""
    block = spread_block(format)
    if block is None or (axes == 1 and block == 1):
        return lambda power: power

    def even(power: NDArray) -> NDArray:
        if axes == 2 and format.granularity in ("matrix", "head") and block == 0:
            return np.broadcast_to(power.mean((1, 2), keepdims=True), power.shape)
        columns = power.shape[-1]
        size = min(block or columns, columns)
        if columns % size:
            return np.broadcast_to(power.mean(-1, keepdims=True), power.shape)
        blocks = power.reshape(*power.shape[:-1], columns // size, size)
        return np.broadcast_to(blocks.mean(-1, keepdims=True), blocks.shape).reshape(power.shape)

    return even
