"""Streams: the decode inputs of a batch of sequences, step by step, synthetic or captured from a model."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.recurrences import StepInputs, get_recurrence


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
    return stream_of_arrays(arrays, meta, str(path))


def stream_of_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], source: str) -> Stream:
    """The stream that a file's arrays make, in float32; raises InputError, which names ``source``."""
    names = {f.name for f in fields(Stream)} - {"family", "meta"}
    missing = {"q", "k", "v", "log_decay", "initial"} - arrays.keys()
    if missing or not arrays.keys() <= names or "family" not in meta:
        raise InputError(
            "stream", source, f"arrays q, k, v, log_decay, initial [beta, rates]; got {sorted(arrays)}"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is Inf from here on, and refused as such
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a, np.float32)) for name, a in arrays.items()}
    return Stream(family=meta["family"], meta=meta, **tensors)


def check_memory(argument: str, sizes: Mapping[str, int], values: int) -> None:
    """InputError if ``values`` float32 numbers are more than this machine's memory holds.

    Asked for in vain, so much memory ends in an exception of the allocator, or the process is killed.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * values > memory:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InputError(argument, shown, f"sizes that fit into this machine's {memory / 2**30:.0f} GiB")
