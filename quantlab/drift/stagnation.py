"""Rounding to nearest that holds a state back, in closed form: what of a decay, a write and a fact it lets through.

A store moves an element from a number of its grid by an increment.  Below half a step nothing moves: not by a decay of
(1 - alpha) x, which would have to reach the half step that the largest element of the block sets, and not by a small
write.  Increments of many sizes dither the rounding, and let the small ones through on average.  For Gaussian
increments of rms d and steps 2 h both follow from the step function, with r = d / h (``gain_and_error``):

    gain  = (2 / r) sum over odd n of phi(n / r)                      what is let through: E[move increment] / d^2
    error = d^2 (1 - 2 gain) + (2 h)^2 sum over odd n > 0 of 2 n Q(n / r)                     E[(move - increment)^2]

phi and Q the normal density and upper tail; for r > 1 the Poisson sums 1 + 2 sum (-1)^k exp(-(k pi r)^2 / 2) and
h^2 (1/3 + 4/pi^2 sum (-1)^k exp(-(k pi r)^2 / 2) / k^2).  So gain -> 1 and error -> h^2 / 3 where increments are large,
gain -> 0 and error -> d^2 where they are small.

A held column loses its decay and grows, and with it the step of its block.  With S the exact and X the held column, D
the exact increment and mu = 1 - decay, the held increment is D - mu (X - S), and three moments go from store to store:

    <X X> += 2 gain <X (D - mu (X - S))> + power of the move
    <X S> += lambda <S D> + gain <(S + D)(D - mu (X - S))>

with lambda = <X S> / <S S> the part of X that follows S.  They give the gains of all columns at all stores; with those
the read is followed back as in ``fact_error``, each store letting its gain of decay, erase and writes through.

Source: the describing function of a quantizer (Gelb and Vander Velde, Multiple-Input Describing Functions, 1968) by
Bussgang's theorem.  A scale that moves shifts all numbers of its block, which dithers too: the relative change of the
exact state's scale counts as one more increment.  Means over value rows and over the pair stand for each element.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.drift.fact_error import pairs_of
from quantlab.drift.risks import cycle_length
from quantlab.drift.rounding_noise import spread_block
from quantlab.drift.streams import Stream
from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.formats.key_scales import key_scales
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import Integer, Scaling
from quantlab.recurrences import DecayAxis, Recurrence, expand_groups, get_recurrence
from quantlab.schemes import Policy, parse_policy

TERMS = 8
"""Of a sum; what is left out is below exp(-100)."""
LEAST = 1e-30
NODES = (0.1, 0.32, 0.55, 0.81, 1.15, 1.73)
"""Of |N(0, 1)|, each the middle of a sixth: an element's own size sets its step in a float format."""


@dataclass(frozen=True)
class HeldRead:
    """Each (heads,), float64.  error: size of the last output's error; kept: share of the fact that it still tells."""

    error: Tensor
    kept: Tensor


def holds_back(policy: "str | Policy") -> bool:
    """Whether the checkpoint is rounded to nearest without feedback, in a format whose steps are known here."""
    format = parse_policy(policy).checkpoint
    plain = format.hadamard is None and format.component is None and format.four_over_six is None
    return format.rounded and format.rounding is Rounding.NEAREST and not format.error_feedback and plain


def gain_and_error(rms: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """(gain, error power) of rounding increments N(0, rms^2) from a grid of steps 2 ``half``; like ``rms``."""
    ratio = (rms / half.clamp_min(LEAST)).clamp_min(1e-6)
    k = torch.arange(1, TERMS + 1, dtype=rms.dtype).view(-1, *[1] * rms.ndim)
    odd, signs = 2 * k - 1, (-1.0) ** k
    fine = signs * torch.exp(-((k * math.pi * ratio) ** 2) / 2)
    many = 1 + 2 * fine.sum(0), 1 / 3 + 4 / math.pi**2 * (fine / k**2).sum(0)
    density = torch.exp(-((odd / ratio) ** 2) / 2) / math.sqrt(2 * math.pi)
    gain = 4 / ratio * density.sum(0)
    few = gain, ratio**2 * (1 - 2 * gain) + 8 * (odd * torch.special.ndtr(-odd / ratio)).sum(0)
    gain, error = (torch.where(ratio > 1, a, b) for a, b in zip(many, few, strict=True))
    return gain, error * half**2


def held_read(stream: Stream, policy: "str | Policy") -> HeldRead:
    """The last read of ``stream`` under a policy of which ``holds_back`` is true; the checkpoint's part alone.

    stream: as of ``fact_errors``.  Raises InputError for an odd batch, another policy, and for mamba1.
    """
    parsed, recurrence, heads = parse_policy(policy), get_recurrence(stream.family), stream.heads
    if not holds_back(parsed):
        raise InputError("policy", str(parsed), "a checkpoint that is rounded to nearest, without feedback")
    if recurrence.axis is DecayAxis.ELEMENT:
        raise InputError("stream", stream.family, "a family with one decay a head or key channel")
    count = pairs_of(stream)
    with torch.inference_mode():
        gains, errors, output = _moments(stream, parsed.checkpoint, cycle_length(parsed), recurrence)
        path = expand_groups(stream.q[-1].double(), heads, 1)
        beside, power, linear = torch.zeros_like(path), torch.zeros(path.shape[:2]).double(), 0.0
        for t in range(stream.steps - 1, -1, -1):
            inputs = stream.step(t).to(torch.float64)
            k = expand_groups(inputs.k, heads, 1)
            reached = (k * path).sum(-1, keepdim=True)
            strength = 1.0 if inputs.beta is None else inputs.beta[..., None]
            linear = linear + strength * reached * inputs.v
            if inputs.beta is not None:
                path = path - strength * reached * k
            path = recurrence.decay(inputs.log_decay, None).squeeze(-2) * path
            if t in gains or t == 0:
                path, beside = path + beside, torch.zeros_like(path)
            if t in gains:
                gain, error = (x.repeat(2, 1, 1) for x in (gains[t], errors[t]))
                power = power + stream.initial.shape[2] * (path.square() * error).sum(-1)
                path, beside = gain * path, (1 - gain) * path
        linear = linear + (stream.initial.double() * path[:, :, None]).sum(-1)
    told, tells = (x[:count] - x[count:] for x in (output, linear))
    kept = (told * tells).sum((0, 2)) / told.square().sum((0, 2)).clamp_min(LEAST)
    return HeldRead(power.mean(0).sqrt(), kept)


def _moments(
    stream: Stream, format: Format, cycle: int, recurrence: Recurrence
) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
    """Gains and error powers (pairs, heads, key_dim) of the stores behind token t, and the exact last outputs."""
    state, output = stream.initial.double(), torch.empty(0)
    before, seen = state, _Scales(format, state)
    held = follows = _columns(state)
    lost, gains, errors = torch.zeros(()).double(), {}, {}
    for t in range(1, stream.steps + 1):
        inputs = stream.step(t - 1).to(torch.float64)
        state, output = recurrence.step(state, inputs, None)
        lost = lost + inputs.log_decay
        if t % cycle or t == stream.steps:
            continue
        old, new, moved = _columns(before), _columns(state), _columns(state - before)
        mu = -torch.expm1(_pair(lost if lost.ndim == 3 else lost[..., None]))
        along = (new - old - moved) / 2  # <S D>
        part = (follows / old.clamp_min(LEAST)).clamp(0, 1.5)
        error = (held - 2 * follows + old).clamp_min(0)
        size = (moved - 2 * mu * (part - 1) * along + mu**2 * error).clamp_min(LEAST)
        scales = _Scales(format, state)
        shift = scales.moved(seen) * (old / held.clamp_min(LEAST)).clamp(max=1) * held
        half = scales.half_steps(held.maximum(1e-6 * new))
        gain, wrong = (x.mean(0) for x in gain_and_error((size + shift).sqrt().expand_as(half), half))
        power = (wrong - size + 2 * gain * size).clamp_min(0)
        held_along = part * along - mu * (held - follows)
        exact_along = along - mu * (follows - old) + moved - mu * (part - 1) * along
        held = (held + 2 * gain * held_along + power).clamp_min(0)
        follows = follows + part * along + gain * exact_along
        follows = follows.clamp(max=(held * new).sqrt())
        gains[t], errors[t] = gain, wrong
        before, seen, lost = state, scales, torch.zeros(()).double()
    return gains, errors, output


def _pair(x: Tensor) -> Tensor:
    """Means over the two sequences of each pair."""
    one, other = x.chunk(2)
    return (one + other) / 2


def _columns(state: Tensor) -> Tensor:
    """Mean square of each key column: (pairs, heads, key_dim)."""
    return _pair(state.square().mean(2))


class _Scales:
    """What the elements of a state's blocks share, and the steps that follow from it."""

    def __init__(self, format: Format, state: Tensor):
        self.format, key_dim = format, state.shape[-1]
        block = spread_block(format)
        self.block = None if block is None else (block or key_dim)
        self.peaks = (state.abs().amax(2).square() / state.square().mean(2).clamp_min(LEAST)).sqrt()
        if self.block is None:
            return
        if format.key_scale:
            state = state / torch.exp2(key_scales(state.float()).double() - 127)
        self.largest = state.abs().unflatten(-1, (-1, self.block)).amax(-1)
        columns = state.square().mean(2).unflatten(-1, (-1, self.block)).amax(-1)
        self.crest = _pair((self.largest.square().mean(2) / columns.clamp_min(LEAST)).sqrt())

    def moved(self, before: "_Scales") -> Tensor:
        """Mean square relative change of the scales: (pairs, heads, key_dim) or a zero."""
        if self.block is None:
            return torch.zeros(()).double()
        change = self._stored() / before._stored().clamp_min(LEAST) - 1
        return _pair(change.clamp(-1, 1).square().mean(2)).repeat_interleave(self.block, -1)

    def _stored(self) -> Tensor:
        """The scales as they are stored, but for a constant: NVFP4's with three mantissa bits, MX's with none."""
        scaling = self.format.row.scaling
        if scaling not in (Scaling.NVFP4, Scaling.MX):
            return self.largest
        bits = 3 if scaling is Scaling.NVFP4 else 0
        unit = torch.exp2(self.largest.clamp_min(LEAST).log2().floor() - bits)
        return (self.largest / unit).round() * unit if bits else unit

    def half_steps(self, columns: Tensor) -> Tensor:
        """Half the distance to the next number at typical elements of columns of these mean squares: (nodes, ...)."""
        size, scale, own = columns.sqrt(), torch.ones_like(columns), torch.ones_like(columns)
        if self.format.key_scale:
            own = torch.exp2((size * _pair(self.peaks)).clamp_min(LEAST).log2().floor())
            size = size / own
        element = self.format.element
        if self.block is not None:
            largest = size.unflatten(-1, (-1, self.block)).amax(-1) * self.crest
            scale = (largest / element.max).repeat_interleave(self.block, -1)
        if isinstance(element, Integer):
            return (0.5 * scale * own)[None]
        nodes = torch.tensor(NODES, dtype=columns.dtype).view(-1, *[1] * columns.ndim)
        magnitude = (nodes * size / scale.clamp_min(LEAST)).clamp(element.min_normal, element.max)
        return torch.exp2(magnitude.log2().floor() - element.mantissa_bits - 1) * scale * own
