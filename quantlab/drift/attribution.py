"""The attribution ladder: one suspected defect at a time on the same stream, and each one's share of the error.

Public reports often name two causes for one bad run.  The ladder tells them apart: a base without any defect, each
suspect alone on top of it, and the policy with all of its parts.  Independent errors add in squares, so the share of a
suspect is its squared error over the sum of all squares; how far that sum is from the square of the whole says how much
the parts interact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from quantlab.drift.streams import Stream
from quantlab.errors import InputError
from quantlab.recurrences import DecayAxis, StepInputs, get_recurrence
from quantlab.schemes import Diverged, Options, Policy, check_policy_fits, parse_policy, start
from quantlab.schemes.sites import SITES, parse_sites

Alter = Callable[[StepInputs], StepInputs]

WINDOW = 16
"""Of the suspects that need one, where the policy has none."""
STANDARD = (
    *(name for name in SITES if name not in ("state", "buffer", "dot")),
    "store=bf16",
    "buffer=bf16",
    "dot=bf16",
    "float32",
)
"""Suspects of a policy that rounds nothing itself: bfloat16 in every place where it is met, each place once."""


@dataclass(frozen=True)
class Suspect:
    """name: as on the command line; policy: the base with this defect alone; alter: of the inputs, or None.

    arithmetic: of this rung; all but "float32" compute in float64, so that a rung holds one defect.
    """

    name: str
    policy: Policy
    alter: Alter | None = None
    arithmetic: torch.dtype = torch.float64


@dataclass(frozen=True)
class Rung:
    """Measured errors of one suspect: relative, pooled over the second half of the run and all heads.

    share: of the sum of squares of all suspects, or None for the whole policy.  status: "ok", or "diverged" (at step
    ``diverged_at``, counted from 1).
    """

    name: str
    policy: str
    output_error: float
    state_error: float
    share: float | None
    status: str
    diverged_at: int | None


@dataclass(frozen=True)
class Ladder:
    """rungs: one a suspect, largest error first; whole: the policy itself; quadrature: root of the sum of squares."""

    rungs: tuple[Rung, ...]
    whole: Rung
    quadrature: float


def attribute(
    stream: Stream,
    policy: "str | Policy",
    suspects: Sequence[str] | None = None,
    *,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Ladder:
    """Run every suspect alone, and the policy, beside one float64 shadow.

    suspects: names; by default the parts of the policy, or ``STANDARD`` where it rounds nothing.  A name is a rounding
    site (``beta``, ``k.fp16``), an option of the policy text (``buffer=bf16``, ``dot=tf32``, ``flush_read=copy``),
    ``store=FORMAT`` or ``read_copy=FORMAT``, ``float32`` (the arithmetic itself) or ``dt_clamp=X`` (Mamba, on streams
    that know their step sizes).  Raises InputError for any other, and for what the family cannot use.
    """
    policy = parse_policy(policy)
    check_policy_fits(policy, stream.family)
    names = names_of(policy, stream, suspects)
    made = [suspect(name, policy, stream) for name in names]
    whole = Suspect(str(policy), policy, arithmetic=_own_arithmetic(policy))
    *measured, complete = _run(stream, [*made, whole], seed, on_step)
    squares = [rung.output_error**2 for rung in measured]
    total = float(np.sum(squares))
    rungs = [
        replace(rung, share=square / total if 0 < total < np.inf else None)
        for rung, square in zip(measured, squares, strict=True)
    ]
    order = sorted(rungs, key=lambda rung: np.nan_to_num(rung.output_error, nan=np.inf), reverse=True)
    return Ladder(tuple(order), complete, float(np.sqrt(total)))


def names_of(policy: Policy, stream: Stream, suspects: Sequence[str] | None = None) -> list[str]:
    """The suspects of a ladder: those given, else the parts of the policy, else those of ``STANDARD`` that fit."""
    names = list(suspects) if suspects else parts_of(policy)
    if not names:
        names = [name for name in STANDARD if _fits(name, policy, stream)]
    if len(set(names)) != len(names):
        raise InputError("suspect", names, "each suspect once")
    return names


def parts_of(policy: Policy) -> list[str]:
    """The suspects that a policy consists of, the arithmetic included; [] if only that is left."""
    options, names = policy.options, []
    if policy.checkpoint.rounded:
        names.append(f"store={policy.checkpoint.text}")
    if policy.read_copy is not None and policy.read_copy.rounded:
        names.append(f"read_copy={policy.read_copy.text}")
    if options.buffer != "fp32":
        names.append(f"buffer={options.buffer}")
    if options.dot != "ieee":
        names.append(f"dot={options.dot}")
    names += [f"{site}.{format.text}" for site, format in parse_sites(options.sites).items()]
    return [*names, "float32"] if names else []


def suspect(name: str, policy: Policy, stream: Stream) -> Suspect:
    """The suspect called ``name`` beside ``policy``, whose window, schedule and read options it keeps.

    Raises InputError (argument "suspect") for a name that is none, or that the family cannot use.
    """
    try:
        return _suspect(name, policy, stream)
    except InputError as error:
        if error.argument == "suspect":
            raise
        raise InputError("suspect", name, f"a defect that {stream.family} can have: {error}") from None


def _suspect(name: str, policy: Policy, stream: Stream) -> Suspect:
    key, equals, value = name.partition("=")
    window = policy.window
    if name == "float32":
        return Suspect(name, _checked(f"fp32@{window}", stream), arithmetic=torch.float32)
    if key == "dt_clamp" and equals:
        return Suspect(name, _checked(f"fp64@{window}", stream), _clamp(value, name, stream))
    kept = _kept_options(policy)
    if key == "store" and equals:
        # What says when a rounded store takes place belongs to the store.
        kept |= {k: getattr(policy.options, k) for k in ("schedule",) if value == policy.checkpoint.text}
        return Suspect(name, _checked(_with(f"{value}@{window}", kept), stream))
    if key == "read_copy" and equals:
        reads = {k: getattr(policy.options, k) for k in ("key_read", "flush_read")}
        if window == 1:
            reads["flush_read"] = "copy"
        return Suspect(name, _checked(_with(f"fp64/{value}@{window}", kept | reads), stream))
    window = max(window, WINDOW) if key in ("buffer", "dot") else window
    if equals and key in {f.name for f in fields(Options)} - {"sites"}:
        return Suspect(name, _checked(_with(f"fp64@{window}", kept | {key: value}), stream))
    if not equals and name.partition(".")[0] in SITES:
        return Suspect(name, _checked(_with(f"fp64@{window}", kept | {"sites": name}), stream))
    expected = (
        f"a site ({', '.join(SITES)}), store=, read_copy=, an option (dot=tf32), float32 or dt_clamp=0.1"
    )
    raise InputError("suspect", name, expected)


def _kept_options(policy: Policy) -> dict[str, str | None]:
    """Options that say what is read and folded when, without rounding anything themselves."""
    names = ("contents", "flush")
    return {name: getattr(policy.options, name) for name in names}


def _with(text: str, options: dict[str, str | None]) -> str:
    defaults = {f.name: f.default for f in fields(Options)}
    return text + "".join(f":{k}={v}" for k, v in options.items() if v is not None and v != defaults[k])


def _checked(text: str, stream: Stream) -> Policy:
    policy = parse_policy(text)
    check_policy_fits(policy, stream.family)
    return policy


def _fits(name: str, policy: Policy, stream: Stream) -> bool:
    try:
        suspect(name, policy, stream)
    except InputError:
        return False
    return True


def _own_arithmetic(policy: Policy) -> torch.dtype:
    return torch.float64 if policy.checkpoint.name == "fp64" else torch.float32


def _clamp(value: str, name: str, stream: Stream) -> Alter:
    """Step sizes limited from above, as one port of Mamba-2 did: both the decay and what is written shrink."""
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise InputError("suspect", name, "dt_clamp=X with a number X above 0")
    if get_recurrence(stream.family).axis is DecayAxis.ELEMENT:

        def step_size(inputs: StepInputs) -> torch.Tensor:
            return inputs.log_decay

    elif "decay_rates" in stream.meta and stream.family == "mamba2":
        rates = torch.tensor(stream.meta["decay_rates"], dtype=torch.float64)

        def step_size(inputs: StepInputs) -> torch.Tensor:
            return inputs.log_decay / rates

    else:
        raise InputError("suspect", name, "a Mamba stream that knows its step sizes (preset realistic)")

    def alter(inputs: StepInputs) -> StepInputs:
        dt = step_size(inputs)
        factor = torch.where(dt > limit, limit / dt, torch.ones_like(dt)).to(inputs.v.dtype)
        of_value = factor if factor.ndim == inputs.v.ndim else factor[..., None]
        return replace(inputs, log_decay=inputs.log_decay * factor, v=inputs.v * of_value)

    return alter


def _run(
    stream: Stream, suspects: Sequence[Suspect], seed: int, on_step: Callable[[int], None] | None
) -> list[Rung]:
    recurrence = get_recurrence(stream.family)
    rates = None if stream.rates is None else stream.rates.double()
    options = {"key_heads": stream.key_heads, "rates": stream.rates, "seed": seed}
    states = [
        start(s.policy, stream.family, stream.initial, arithmetic=s.arithmetic, **options) for s in suspects
    ]
    errors = np.zeros(len(suspects))
    lost_at: list[int | None] = [None] * len(suspects)
    shadow, reference = stream.initial.double(), 0.0
    with torch.inference_mode():
        for t in range(stream.steps):
            inputs = stream.step(t)
            shadow, output = recurrence.step(shadow, inputs.to(torch.float64), rates)
            counted = t >= stream.steps // 2
            reference += float(output.square().sum()) if counted else 0.0
            for i, (s, state) in enumerate(zip(suspects, states, strict=True)):
                if lost_at[i] is not None:
                    continue
                try:
                    found = state.step(inputs if s.alter is None else s.alter(inputs))
                except Diverged:
                    found = torch.full_like(output, torch.inf)
                squared = float((found.double() - output).square().sum())
                if not np.isfinite(squared):
                    lost_at[i], errors[i] = t + 1, np.inf
                elif counted:
                    errors[i] += squared
            if on_step is not None:
                on_step(t + 1)
    norm = float(shadow.norm())
    rungs = []
    for i, (s, state) in enumerate(zip(suspects, states, strict=True)):
        lost = lost_at[i] is not None
        distance = np.inf if lost else float((state.materialize().double() - shadow).norm()) / norm
        rungs.append(
            Rung(
                name=s.name,
                policy=str(s.policy),
                output_error=float(np.sqrt(errors[i] / reference)) if reference > 0 else float("nan"),
                state_error=distance,
                share=None,
                status="diverged" if lost else "ok",
                diverged_at=lost_at[i],
            )
        )
    return rungs
