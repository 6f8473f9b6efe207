"""What the closed form knows of the heads of a layer, and the stationary error of a policy on them."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quantlab.drift.balance import ErrorBalance, Token
from quantlab.drift.rounding_noise import NOISE_ROWS, gaussian_noise, state_noise
from quantlab.drift.statistics import channel_token
from quantlab.drift.streams import Stream, check_memory
from quantlab.drift.synthetic import DEFAULT_SHAPE
from quantlab.errors import InputError
from quantlab.recurrences import DecayAxis, expand_groups, get_recurrence
from quantlab.schemes import Policy, parse_policy

# beta = sigmoid(N(0, 1)).
MEAN_BETA, MEAN_SQUARED_BETA = 0.5, 0.2934
SMALLEST_FORGETTING = (
    1e-9  # 1 - rho below this is a state that never forgets: the closed form has no stationary state
)


@dataclass(frozen=True)
class HeadStatistics:
    """Of each head; arrays (heads, *channels) with channels (1,), kimi_delta (key_dim,), mamba1 (value_dim, key_dim).

    decay: mean of alpha^2.  log_decay: log of the typical decay.  persistence: correlation of the state with itself one
    token later.  state: mean squared norm of the part of the state.  update, value: mean squared norms of what a token
    writes and of its value's share.
    erase, write: (heads, 1) factors of the isotropic erase, 1 and 0 without a delta rule.  beta: typical, 0 without.
    largest: (heads,) largest magnitude of an element that was seen, or None.  sample: (1, heads, value_dim, key_dim)
    a state of the stream, on which the rounding is measured; None for a Gaussian one.
    names: of the heads.  source: one sentence on where all this comes from.
    """

    family: str
    value_dim: int
    key_dim: int
    decay: NDArray
    log_decay: NDArray
    persistence: NDArray
    state: NDArray
    update: NDArray
    value: NDArray
    erase: NDArray
    write: NDArray
    beta: float
    source: str
    names: tuple[str, ...] = ()
    largest: NDArray | None = None
    sample: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.decay.shape[0]

    @property
    def channel_axes(self) -> tuple[int, ...]:
        return tuple(range(1, self.decay.ndim))

    @property
    def half_life(self) -> NDArray:
        """Tokens in which a write loses half of its amplitude, the slowest channel of each head: (heads,)."""
        slowest = np.max(self.log_decay, axis=self.channel_axes)
        return np.log(0.5) / np.minimum(slowest, -1e-300)

    @property
    def forgetting(self) -> NDArray:
        """1 - rho of each channel, erase included: (heads, *channels)."""
        return np.maximum(
            1 - self.decay * self.erase.reshape(self.heads, *[1] * (self.decay.ndim - 1)), 1e-300
        )


def heads_of_decay(
    family: str,
    log_decay: NDArray,
    *,
    decay: NDArray | None = None,
    mean: NDArray | None = None,
    beta: float | None = None,
    value_dim: int | None = None,
    key_dim: int | None = None,
    write_power: NDArray | float = 1.0,
    source: str = "a constant decay, unit keys, v ~ N(0, 1)",
    names: tuple[str, ...] = (),
) -> HeadStatistics:
    """Heads whose tokens write independent values of unit variance.

    log_decay: (heads, *channels).  decay, mean: means of alpha^2 and of alpha, of the log decay itself if left out.
    beta: constant write strength; sigmoid(N(0, 1)) if None.  write_power: of v, relative to N(0, 1) (Mamba: dt^2).

    Errors of independent tokens: E prod a_t^2 = (E a^2)^n, so a fluctuating decay enters by its mean square alone.  The
    state's power is that of the writes, each weighted with what is left of it, w / (1 - rho).  A delta rule writes
    beta (v - S k): of its power beta^2 |S k|^2 comes from the state, and the erase takes it out again.
    """
    recurrence = get_recurrence(family)
    value_dim, key_dim = value_dim or DEFAULT_SHAPE[family][0], key_dim or DEFAULT_SHAPE[family][1]
    check_memory("key_dim", {"key_dim": key_dim}, NOISE_ROWS * key_dim)
    check_memory("value_dim", {"value_dim": value_dim}, NOISE_ROWS * value_dim)
    decay = np.exp(2 * log_decay) if decay is None else decay
    mean = np.exp(log_decay) if mean is None else mean
    heads, channels = len(log_decay), log_decay[0].size
    ones = np.ones((heads, 1))
    erase, write, strength, squared = ones, 0 * ones, 0.0, 1.0
    keys = 1.0 if recurrence.delta_rule else float(key_dim)
    if recurrence.delta_rule:
        strength, squared = (MEAN_BETA, MEAN_SQUARED_BETA) if beta is None else (beta, beta**2)
        erase = (1 - (2 * strength - squared) / key_dim) * ones
        write = squared / key_dim * ones
    # All elements of a head share its power: |v|^2 |k|^2, split over the channels.
    value = squared * write_power * np.ones_like(decay) * value_dim * keys / channels
    wide = erase.reshape(heads, *[1] * (decay.ndim - 1))
    state = value / np.maximum(1 - decay * wide, SMALLEST_FORGETTING)
    update = value
    if recurrence.delta_rule:
        # |S k~|^2 of the decayed state along a key without direction, split over the channels like the key.
        read = (decay * state).reshape(heads, -1).sum(1)[:, None] / key_dim / channels
        update = value + squared * read
    persistence = mean * (1 - strength / key_dim)
    return HeadStatistics(
        family=family,
        value_dim=value_dim,
        key_dim=key_dim,
        decay=decay,
        log_decay=log_decay,
        persistence=persistence,
        state=state,
        update=update,
        value=value,
        erase=erase,
        write=write,
        beta=strength,
        source=source,
        names=names or tuple(f"head {h}" for h in range(heads)),
    )


def heads_of_gates(
    family: str, a_log: Tensor, dt_bias: Tensor, *, gate_spread: float = 0.0, **options
) -> HeadStatistics:
    """Heads from the parameters of a layer: alpha = exp(-exp(A_log) softplus(a + dt_bias)).

    a_log, dt_bias: (heads,); kimi_delta dt_bias (heads, key_dim); mamba1 a_log (heads, value_dim, key_dim) and dt_bias
    (heads, value_dim).  gate_spread: standard deviation of the projected input a ~ N(0, gate_spread^2), which the
    parameters do not tell; the means over it are taken by Gauss-Hermite quadrature.
    Other options as in ``heads_of_decay``.
    """
    recurrence = get_recurrence(family)
    rates = torch.exp(a_log.double())
    bias = dt_bias.double()
    if recurrence.axis is DecayAxis.HEAD:
        rates, bias = rates[:, None], bias[:, None]
    elif recurrence.axis is DecayAxis.KEY:
        rates = rates[:, None]
    else:
        bias = bias[..., None]
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    weights = weights / weights.sum()
    logs, means, squares, steps = 0.0, 0.0, 0.0, 0.0
    for node, weight in zip(nodes, weights, strict=True):
        step = F.softplus(bias + gate_spread * float(node))
        log = -rates * step
        logs, means = logs + weight * log, means + weight * torch.exp(log)
        squares, steps = squares + weight * torch.exp(2 * log), steps + weight * step.square()
    assert isinstance(logs, Tensor) and isinstance(means, Tensor)
    assert isinstance(squares, Tensor) and isinstance(steps, Tensor)
    # Mamba writes dt x.
    power = np.ones_like(logs.numpy()) if recurrence.delta_rule else steps.expand_as(logs).numpy()
    return heads_of_decay(
        family, logs.numpy(), decay=squares.numpy(), mean=means.numpy(), write_power=power, **options
    )


def heads_of_stream(stream: Stream) -> HeadStatistics:
    """Statistics of every head of a stream, means over its sequences and over the second half of its tokens."""
    recurrence = get_recurrence(stream.family)
    rates = None if stream.rates is None else stream.rates.double()
    state, sample = stream.initial.double(), stream.initial
    heads = stream.heads
    sums: dict[str, NDArray | float] = dict.fromkeys(
        ("decay", "mean", "log", "state", "before", "along", "update", "value", "erase", "write", "beta"), 0.0
    )
    largest = np.zeros(heads)
    counted = 0
    with torch.inference_mode():
        for t in range(stream.steps):
            inputs = stream.step(t).to(torch.float64)
            before = state
            state, output = recurrence.step(state, inputs, rates)
            if t == stream.steps // 2:
                sample = state[:1].float()
            if t < stream.steps // 2:
                continue
            counted += 1
            token = _token(recurrence, before, state, output, inputs, rates)
            along = before * state
            along = along if recurrence.axis is DecayAxis.ELEMENT else along.sum(-2)
            earlier = before.square() if recurrence.axis is DecayAxis.ELEMENT else before.square().sum(-2)
            if recurrence.axis is DecayAxis.HEAD:
                along, earlier = along.sum(-1, keepdim=True), earlier.sum(-1, keepdim=True)
            found = {
                "decay": token.decay,
                "mean": np.sqrt(token.decay),
                "log": token.log_decay,
                "state": token.state,
                "before": earlier.flatten(0, 1).numpy(),
                "along": along.flatten(0, 1).numpy(),
                "update": token.update,
                "value": token.value,
                "erase": token.erase,
                "write": token.write,
                "beta": 0.0 if token.beta is None else token.beta,
            }
            for name, value in found.items():
                if isinstance(value, np.ndarray):
                    value = value.reshape(stream.batch, heads, *value.shape[1:]).mean(0)
                sums[name] = sums[name] + value
            largest = np.maximum(largest, state.abs().amax((0, 2, 3)).numpy())
    mean = {name: value / max(counted, 1) for name, value in sums.items()}
    ones = np.ones((heads, 1))
    erase, write = mean["erase"] * ones, mean["write"] * ones
    if recurrence.axis is DecayAxis.KEY:
        # The isotropic erase, where the balance of a stream has the keys themselves.
        strength = mean["beta"] * ones
        erase = 1 - (2 * strength - strength**2) / stream.initial.shape[-1]
        write = strength**2 / stream.initial.shape[-1]
    persistence = np.clip(
        np.divide(mean["along"], mean["before"], out=np.ones_like(mean["along"]), where=mean["before"] > 0),
        0.0,
        1.0,
    )
    return HeadStatistics(
        family=stream.family,
        value_dim=stream.initial.shape[2],
        key_dim=stream.initial.shape[3],
        decay=np.asarray(mean["decay"]),
        log_decay=np.asarray(mean["log"]),
        persistence=persistence,
        state=np.asarray(mean["state"]),
        update=np.asarray(mean["update"]),
        value=np.asarray(mean["value"]),
        erase=erase,
        write=write,
        beta=float(np.mean(mean["beta"])),
        source=f"stream {stream.hash}, second half of {stream.steps} tokens x {stream.batch}",
        names=tuple(f"head {h}" for h in range(heads)),
        largest=largest,
        sample=sample,
    )


def _token(recurrence, before, after, output, inputs, rates) -> Token:
    """``channel_token``, and the same for a decay of a head, where it is one channel."""
    if recurrence.axis is not DecayAxis.HEAD:
        return channel_token(recurrence, before, after, output, inputs, rates, writes=True)
    heads, key_dim = after.shape[1], after.shape[-1]

    def units(x: Tensor) -> NDArray:
        return x.flatten(0, 1).numpy()[:, None]

    k = expand_groups(inputs.k, heads, 1)
    key = k.square().sum(-1)
    decay = torch.exp(inputs.log_decay)
    erase, write, beta = torch.ones_like(decay), torch.zeros_like(decay), None
    v = inputs.v
    if recurrence.delta_rule:
        beta = inputs.beta
        erase = 1 - (2 * beta * key - (beta * key).square()) / key_dim
        write = beta.square() * key.square() / key_dim
        v = beta[..., None] * v
    update = (after - decay[..., None, None] * before).square().sum((-1, -2))
    return Token(
        decay=units(decay.square()),
        state=units(after.square().sum((-1, -2))),
        gain=np.ones((after.shape[0] * heads, 1)) / key_dim,
        output=units(output.square().sum(-1))[:, 0],
        log_decay=units(inputs.log_decay),
        erase=units(erase),
        write=units(write),
        beta=None if beta is None else units(beta),
        update=units(update),
        value=units(v.square().sum(-1) * key),
    )


@dataclass(frozen=True)
class SteadyErrors:
    """Stationary errors of a policy, each (heads,).

    state, output: relative RMS error of the logical state and of the output, means over one cycle of the window.
    growth: factor of a small error's power over one cycle, its own rounding included; 1 or more diverges.
    margin: (1 - rho^L) / eps^2 of the slowest channel, above 1 where the state holds; infinite without rounding, and
    with error feedback, which gives each rounding back.  noise: eps of the checkpoint.
    """

    state: NDArray
    output: NDArray
    growth: NDArray
    margin: NDArray
    noise: NDArray

    @property
    def diverges(self) -> NDArray:
        return self.growth >= 1


def steady_errors(policy: "str | Policy", heads: HeadStatistics) -> SteadyErrors:
    """The fixed point of the error balance over one cycle of the window.

    With constant statistics a cycle maps the powers x at its start to M x + b, channel by channel: x = (checkpoint,
    residual of the feedback, two moments of the decay's error).  M and b come from one run of the cycle for each entry
    of x, and the stationary x solves (1 - M) x = b.  For plain rounding this is eps^2 / (1 - rho^L (1 + eps^2)).
    """
    policy = parse_policy(policy)
    recurrence = get_recurrence(heads.family)
    noise = _noise(policy, heads)
    # A state beyond the format's range has no finite rounding: its errors are infinite, whatever else holds.
    beyond = ~np.isfinite(sum(noise.values()))
    noise = {part: np.where(beyond, 0.0, eps) for part, eps in noise.items()}
    axes = heads.decay.ndim - 1
    token = _steady_token(heads, axes)
    balance = ErrorBalance(policy, recurrence, noise, heads.key_dim, axes)
    power = heads.state
    with np.errstate(over="ignore", invalid="ignore"):
        balance.hand_off(power)
        zero = np.zeros((4, *power.shape))
        offset, *_ = _cycle(balance, token, zero)
        # The checkpoint's error always counts; the others only where something feeds them.
        used = [i for i in range(4) if i == 0 or bool(np.any(offset[i] != 0))]
        columns = []
        for i in used:
            probe = zero.copy()
            probe[i] = power
            found, *_ = _cycle(balance, token, probe)
            columns.append((found - offset)[used] / np.maximum(power, 1e-300))
        matrix = np.moveaxis(np.stack(columns), (0, 1), (-1, -2))
        right = np.moveaxis(offset[used], 0, -1)[..., None]
        solved = _solve(np.eye(len(used)) - matrix, right)[..., 0]
        start = zero.copy()
        start[used] = np.moveaxis(solved, -1, 0)
        _, state, output = _cycle(balance, token, start)
    eigenvalues = np.abs(np.linalg.eigvals(matrix[..., :2, :2] if 1 in used else matrix[..., :1, :1])).max(-1)
    # Without rounding a state that never forgets keeps its error; that is no divergence.
    eps = noise["checkpoint"]
    growth = eigenvalues.reshape(heads.heads, -1).max(1)
    total = power.reshape(heads.heads, -1).sum(1)
    growth = np.where(beyond, np.inf, growth)
    eps = np.where(beyond, np.inf, eps)
    lost = (growth >= 1) & (eps > 0)
    forgets = 1 - (1 - heads.forgetting) ** balance.period
    slowest = forgets.reshape(heads.heads, -1).min(1)
    feedback = bool(policy.checkpoint.error_feedback) or not balance.rounds_folds
    margin = np.full_like(slowest, np.inf)
    if not feedback:
        margin = np.where(beyond, 0.0, np.divide(slowest, eps**2, out=margin, where=eps > 0))
    relative = [np.sqrt(np.maximum(state / total, 0)), np.sqrt(np.maximum(output / token.output, 0))]
    state_error, output_error = (np.where(lost, np.inf, r) for r in relative)
    return SteadyErrors(state_error, output_error, growth, margin, eps)


def _solve(matrix: NDArray, right: NDArray) -> NDArray:
    # Against the rows' lengths: what forgets little is small in every row, and far from singular.
    lengths = np.linalg.norm(matrix, axis=-1)
    singular = (lengths < 1e-14).any(-1) | (np.abs(np.linalg.det(matrix)) < 1e-14 * lengths.prod(-1))
    matrix = np.where(singular[..., None, None], np.eye(matrix.shape[-1]), matrix)
    return np.where(singular[..., None, None], np.inf, np.linalg.solve(matrix, right))


def _cycle(balance: ErrorBalance, token: Token, start: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """One cycle of the window from these powers (4, heads, *channels): the powers at its end, and the mean powers of
    the state's and the output's error over it, (heads,)."""
    balance.exact, balance.held, balance.first, balance.second = start
    balance.state = token.state
    balance.begin_window(token.state)
    state = output = np.zeros(start.shape[1])
    for _ in range(balance.period):
        found = balance.step(token)
        state, output = state + found[0], output + found[1]
    if balance.early:
        balance.fold_history()
    parts = (balance.exact, balance.held, balance.first, balance.second)
    end = np.stack([np.broadcast_to(part, start[0].shape) for part in parts])
    return end, state / balance.period, output / balance.period


def _steady_token(heads: HeadStatistics, axes: int) -> Token:
    widen = (slice(None), *[None] * (axes - 1), slice(None))
    total = heads.state.reshape(heads.heads, -1).sum(1)
    return Token(
        decay=heads.decay,
        state=heads.state,
        gain=np.full((heads.heads, *[1] * axes), 1.0 / heads.key_dim),
        output=total / heads.key_dim,
        log_decay=heads.log_decay,
        erase=heads.erase[widen],
        write=heads.write[widen],
        beta=None if heads.beta == 0 else np.full((heads.heads, *[1] * axes), heads.beta),
        update=heads.update,
        value=heads.value,
    )


def _noise(policy: Policy, heads: HeadStatistics) -> dict[str, NDArray]:
    if heads.sample is not None:
        return state_noise(policy, heads.sample)
    return {part: np.full(heads.heads, eps) for part, eps in gaussian_noise(policy, heads.key_dim).items()}


def steady_output_error(policy: "str | Policy", family: str, alpha: float, key_dim: int = 128) -> float:
    """Relative output error of a long run at constant decay ``alpha`` (mean write strength of the evidence preset).

    Infinite where rounding noise outgrows the decay: rho^L (1 + eps^2) >= 1, which is eps^2 >= 1 - rho^L for small eps.
    Raises InputError for an alpha outside (0, 1].
    """
    if not 0.0 < alpha <= 1.0:
        raise InputError("alpha", alpha, "a decay per step in (0, 1]")
    check_memory("key_dim", {"key_dim": key_dim}, NOISE_ROWS * key_dim)
    # Beyond this a state of unit writes has no finite power.
    log_decay = min(np.log(alpha), -SMALLEST_FORGETTING / 2)
    channels = {DecayAxis.HEAD: (1,), DecayAxis.KEY: (1,), DecayAxis.ELEMENT: (1, 1)}[
        get_recurrence(family).axis
    ]
    heads = heads_of_decay(family, np.full((1, *channels), log_decay), key_dim=key_dim)
    return float(steady_errors(policy, heads).output[0])
