"""Streams: the decode inputs of a batch of sequences, step by step, synthetic or captured from a model."""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.errors import InputError, unknown_name
from quantlab.recurrences import DecayAxis, StepInputs, get_recurrence

PRESETS = ("evidence", "realistic")
DEFAULT_SHAPE = {"gated_delta": (128, 128), "kimi_delta": (128, 128), "mamba2": (64, 128), "mamba1": (64, 16)}
PREFILL_STEPS = 512
LARGEST_SEED = 2**63 - 1  # what a 64-bit integer column holds


@dataclass(frozen=True)
class Stream:
    """What ``steps`` tokens feed to one layer's recurrence.

    q, k: (steps, batch, key_heads, key_dim); v: (steps, batch, heads, value_dim);
    log_decay: (steps, batch, heads), kimi_delta (steps, batch, heads, key_dim), mamba1 (steps, batch, heads, value_dim)
    = dt; beta: (steps, batch, heads) or None;
    initial: (batch, heads, value_dim, key_dim), the unrounded prefill state; rates: A (heads, value_dim, key_dim) of
    mamba1.  All float32, on the CPU, without gradients.  meta: how it was made.  Raises InputError for anything else,
    for NaN, Inf and shapes that disagree.
    """

    family: str
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    initial: Tensor
    beta: Tensor | None = None
    rates: Tensor | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recurrence = get_recurrence(self.family)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("family", "meta") or (value is None and f.name in ("beta", "rates")):
                continue
            if not isinstance(value, Tensor):
                raise InputError(f"stream {f.name}", type(value).__name__, "a float32 tensor")
            if value.dtype != torch.float32 or value.requires_grad or value.device.type != "cpu":
                found = f"{value.dtype} on {value.device}{', requires_grad' * value.requires_grad}"
                raise InputError(f"stream {f.name}", found, "float32 on the CPU, without gradients")
        if self.initial.ndim != 4:
            raise InputError(
                "stream initial", tuple(self.initial.shape), "shape (batch, heads, value_dim, key_dim)"
            )
        batch, heads, value_dim, key_dim = self.initial.shape
        steps = self.v.shape[0] if self.v.ndim else 0
        groups = self.k.shape[2] if self.k.ndim == 4 else 0
        gate = (steps, batch, *recurrence.gate_shape(heads, value_dim, key_dim))
        expected: dict[str, tuple[int, ...] | None] = {
            "q": (steps, batch, groups, key_dim),
            "k": (steps, batch, groups, key_dim),
            "v": (steps, batch, heads, value_dim),
            "log_decay": gate,
            "beta": (steps, batch, heads) if recurrence.delta_rule else None,
            "rates": (heads, value_dim, key_dim) if recurrence.needs_rates else None,
        }
        for name, shape in expected.items():
            value = getattr(self, name)
            found = None if value is None else tuple(value.shape)
            if found != shape:
                raise InputError(f"stream {name}", found, f"shape {shape} for {self.family}")
        if min(self.initial.shape) < 1:
            raise InputError(
                "stream initial", tuple(self.initial.shape), "at least one entry along each axis"
            )
        if steps < 1 or groups < 1 or heads % groups:
            raise InputError("stream k", tuple(self.k.shape), f"steps >= 1 and key heads that divide {heads}")
        for name, value in self.tensors().items():
            if not bool(torch.isfinite(value).all()):
                raise InputError(f"stream {name}", "NaN or Inf", "finite values")

    def tensors(self) -> dict[str, Tensor]:
        """The arrays that are there, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def steps(self) -> int:
        return self.v.shape[0]

    @property
    def batch(self) -> int:
        return self.v.shape[1]

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def key_heads(self) -> int:
        return self.k.shape[2]

    @property
    def hash(self) -> str:
        """SHA-256 over family, shapes and values (16 hex digits): equal hashes mean equal inputs, bit for bit."""
        digest = hashlib.sha256(self.family.encode())
        for name, value in self.tensors().items():
            array = value.contiguous().numpy()
            digest.update(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def step(self, index: int) -> StepInputs:
        """The inputs of one token."""
        beta = None if self.beta is None else self.beta[index]
        return StepInputs(self.q[index], self.k[index], self.v[index], self.log_decay[index], beta)


def save_stream(stream: Stream, path: str | Path) -> None:
    """Write a stream file (safetensors with a schema version; see ``quantlab.records``)."""
    from quantlab.records import save_stream_file

    arrays = {name: value.contiguous().numpy() for name, value in stream.tensors().items()}
    save_stream_file(Path(path), arrays, {"family": stream.family, **stream.meta})


def load_stream(path: str | Path) -> Stream:
    """Read a stream file.  Raises InputError if it is unreadable, of another version, or holds NaN or Inf."""
    from quantlab.records import load_stream_file

    arrays, meta = load_stream_file(Path(path))
    names = {f.name for f in fields(Stream)} - {"family", "meta"}
    missing = {"q", "k", "v", "log_decay", "initial"} - arrays.keys()
    if missing or not arrays.keys() <= names or "family" not in meta:
        raise InputError(
            "stream", str(path), f"arrays q, k, v, log_decay, initial [beta, rates]; got {sorted(arrays)}"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is Inf from here on, and refused as such
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a, np.float32)) for name, a in arrays.items()}
    return Stream(family=meta["family"], meta=meta, **tensors)


def synthetic_stream(
    family: str,
    *,
    preset: str | None = None,
    heads: int = 8,
    steps: int = 1024,
    alpha: float | None = None,
    seed: int = 0,
    sequences: int = 2,
    key_heads: int | None = None,
    value_dim: int | None = None,
    key_dim: int | None = None,
    beta: float | None = None,
) -> Stream:
    """A made stream of ``sequences`` x ``heads`` independent recurrences.

    preset "evidence" (what ``alpha`` gives): the same decay alpha in every head and step, keys and queries uniform on
    the unit sphere, v ~ N(0, 1), beta = sigmoid(N(0, 1)) or the constant ``beta``, zero start.
    preset "realistic" (the default without ``alpha``): 1 - alpha of each head log-uniform in [1e-4, 0.5], its gate
    fluctuating as softplus(bias + N(0, 1)); 5 % sink steps with a gate ten times as large; channel scales lognormal
    (sigma 1); SiLU-like keys and queries; GDN values within 1 % of what the state already holds, except on sink steps,
    which write something new; a prefill state taken after 512 generated steps.
    Raises InputError for an unknown family or preset and for values out of range.
    """
    get_recurrence(family)
    if preset is None:
        preset = "realistic" if alpha is None else "evidence"
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if preset == "realistic" and value is not None:
            raise InputError(
                name, value, "no alpha or beta with preset realistic, which draws them for each head"
            )
    if beta is not None and not get_recurrence(family).delta_rule:
        raise InputError("beta", beta, f"no beta with {family}, which has no delta rule")
    alpha = 0.99 if alpha is None else alpha
    if not isinstance(alpha, (int, float)) or not 0.0 < alpha <= 1.0:
        raise InputError("alpha", alpha, "a decay per step in (0, 1]")
    if beta is not None and (not isinstance(beta, (int, float)) or not 0.0 <= beta <= 2.0):
        raise InputError("beta", beta, "a write strength in [0, 2]")
    default_value, default_key = DEFAULT_SHAPE[family]
    value_dim = default_value if value_dim is None else value_dim
    key_dim = default_key if key_dim is None else key_dim
    groups = heads if key_heads is None else key_heads
    counts = {"heads": heads, "steps": steps, "sequences": sequences, "key_heads": groups}
    for name, count in (counts | {"value_dim": value_dim, "key_dim": key_dim}).items():
        if not _is_integer(count) or count < 1:
            raise InputError(name, count, "an integer of at least 1")
    if heads % groups:
        raise InputError("key_heads", groups, f"a divisor of heads = {heads}")
    if not _is_integer(seed) or not 0 <= seed <= LARGEST_SEED:
        raise InputError("seed", seed, f"a whole number from 0 to {LARGEST_SEED}")
    shape = _Shape(steps, sequences, heads, groups, value_dim, key_dim)
    gates = math.prod(get_recurrence(family).gate_shape(heads, value_dim, key_dim))
    token = sequences * (2 * groups * key_dim + heads * (value_dim + 1) + gates)
    check_memory("stream", counts, steps * token + sequences * heads * value_dim * key_dim)
    generator = torch.Generator().manual_seed(seed)
    make = _evidence if preset == "evidence" else _realistic
    arrays = make(family, shape, generator, alpha, beta)
    meta = {"preset": preset, "seed": seed, **vars(shape)}
    if preset == "evidence":
        meta |= {"alpha": alpha, "beta": beta}
    return Stream(family=family, meta=meta, **arrays)


def check_memory(argument: str, sizes: Mapping[str, int], values: int) -> None:
    """InputError if ``values`` float32 numbers are more than this machine's memory holds.

    Asked for in vain, so much memory ends in an exception of the allocator, or the process is killed.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * values > memory:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InputError(argument, shown, f"sizes that fit into this machine's {memory / 2**30:.0f} GiB")


@dataclass(frozen=True)
class _Shape:
    steps: int
    sequences: int
    heads: int
    key_heads: int
    value_dim: int
    key_dim: int


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _evidence(
    family: str, s: _Shape, generator: torch.Generator, alpha: float, beta: float | None
) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lead = (s.steps, s.sequences)
    log_alpha = float(np.log(alpha))
    recurrence = get_recurrence(family)
    arrays = {
        "k": _unit(normal(*lead, s.key_heads, s.key_dim)),
        "q": _unit(normal(*lead, s.key_heads, s.key_dim)),
        "v": normal(*lead, s.heads, s.value_dim),
        "log_decay": torch.full((*lead, *recurrence.gate_shape(s.heads, s.value_dim, s.key_dim)), log_alpha),
        "initial": torch.zeros(s.sequences, s.heads, s.value_dim, s.key_dim),
    }
    if recurrence.delta_rule:
        drawn = torch.sigmoid(normal(*lead, s.heads))
        arrays["beta"] = drawn if beta is None else torch.full_like(drawn, beta)
    if family == "mamba1":
        arrays["log_decay"] = torch.ones(*lead, s.heads, s.value_dim)
        arrays["rates"] = torch.full((s.heads, s.value_dim, s.key_dim), log_alpha)
    return arrays


def _realistic(
    family: str, s: _Shape, generator: torch.Generator, alpha: float, beta: float | None
) -> dict[str, Tensor]:
    steps = PREFILL_STEPS + s.steps

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    lead = (steps, s.sequences)
    forget = torch.exp(uniform(s.heads) * np.log(0.5 / 1e-4) + np.log(1e-4))
    recurrence = get_recurrence(family)
    gate_shape = recurrence.gate_shape(s.heads, s.value_dim, s.key_dim)
    channels = len(gate_shape) > 1  # one gate a channel (mamba1, kimi_delta) instead of one a head
    # softplus(bias) log-uniform in [1e-3, 1e-1], the initialisation of the published layers (dt_bias).
    typical = torch.exp(uniform(s.heads) * np.log(100.0) + np.log(1e-3))
    bias = torch.log(torch.expm1(typical))
    bias = bias[:, None] if channels else bias
    sink = uniform(*lead, 1) < 0.05
    gate = F.softplus(bias + normal(*lead, *gate_shape))
    gate = gate * torch.where(sink[..., None] if channels else sink, 10.0, 1.0)
    scale = torch.exp(normal(s.heads, s.value_dim))
    mean_gate = gate.mean(dim=(0, 1, 3) if channels else (0, 1))
    rate = torch.log1p(-forget) / mean_gate
    fresh = scale * normal(*lead, s.heads, s.value_dim)
    keys = F.silu(normal(*lead, s.key_heads, s.key_dim))
    queries = F.silu(normal(*lead, s.key_heads, s.key_dim))
    arrays: dict[str, Tensor] = {}
    if recurrence.delta_rule:
        if recurrence.axis is DecayAxis.KEY:
            # The channels of a head forget at rates of their own, a factor of e apart.
            rate = rate[:, None] * torch.exp(normal(s.heads, s.key_dim) - 0.5)
        arrays |= {"k": _unit(keys), "q": _unit(queries) * s.key_dim**-0.5, "log_decay": gate * rate}
        arrays["beta"] = torch.sigmoid(normal(*lead, s.heads))
        arrays["v"] = fresh
        near = 1.0 + 0.01 * normal(*lead, s.heads, s.value_dim)
    else:
        log_decay = gate if family == "mamba1" else gate * rate
        arrays |= {"k": keys, "q": queries, "log_decay": log_decay}
        arrays["v"] = fresh * (gate if family == "mamba1" else gate[..., None])
        near = torch.empty(0)
    rates = None
    if family == "mamba1":
        spread = torch.exp(0.5 * normal(s.heads, s.value_dim, s.key_dim))
        rates = (rate[:, None, None] * spread).float()
    # From here on the stored float32 values are the stream; the prefill state is theirs, in float64.
    arrays = {name: value.float() for name, value in arrays.items()}
    state = torch.zeros(s.sequences, s.heads, s.value_dim, s.key_dim, dtype=torch.float64)
    wide_rates = None if rates is None else rates.double()
    initial = state
    for t in range(steps):
        if t == PREFILL_STEPS:
            initial = state
        if recurrence.delta_rule:
            k = arrays["k"][t].double().repeat_interleave(s.heads // s.key_heads, 1)
            held = torch.matmul(state, k[..., None])[..., 0] * near[t]
            arrays["v"][t] = torch.where(sink[t][..., None], fresh[t], held).float()
        elif t >= PREFILL_STEPS:
            break
        inputs = StepInputs(
            arrays["q"][t], arrays["k"][t], arrays["v"][t], arrays["log_decay"][t], _at(arrays.get("beta"), t)
        )
        state, _ = recurrence.step(state, inputs.to(torch.float64), wide_rates)
    arrays = {name: value[PREFILL_STEPS:].contiguous() for name, value in arrays.items()}
    arrays["initial"] = initial.float()
    return arrays if rates is None else arrays | {"rates": rates}


def _at(tensor: Tensor | None, index: int) -> Tensor | None:
    return None if tensor is None else tensor[index]
