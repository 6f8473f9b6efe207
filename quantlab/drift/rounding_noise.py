"""How large one rounding is: of a stored state, of a vector, relative to what is rounded."""

import dataclasses
import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from quantlab import formats
from quantlab.formats import Encoded, Format
from quantlab.formats.random import random_words
from quantlab.formats.table import Scaling
from quantlab.schemes import Policy

NOISE_ROWS = 512  # rows of the Gaussian state that the noise of a store is taken from
# One float32 operation: relative RMS of rounding a value whose mantissa is log-uniform, 2^-24 / sqrt(3) * 0.74.
FLOAT32_NOISE = 2.0**-24 / np.sqrt(3) * 0.74


def gaussian_noise(policy: Policy, key_dim: int = 128) -> dict[str, float]:
    """Relative RMS of one store of a Gaussian state (rows of ``key_dim``), for each copy of the policy."""
    site = state_site(policy)
    noise = {"checkpoint": _gaussian_noise(policy.checkpoint, key_dim, site)}
    if policy.read_copy is not None:
        noise["read_copy"] = _gaussian_noise(policy.read_copy, key_dim, site)
    return noise


@lru_cache(maxsize=256)
def _gaussian_noise(format: Format, key_dim: int, site: Format | None = None) -> float:
    state = torch.randn(
        1, 8, NOISE_ROWS // 8, key_dim, generator=torch.Generator().manual_seed(20), dtype=torch.float32
    )
    return float(rounding_noise(format, state, site).pow(2).mean().sqrt())


def rounding_noise(format: Format, state: torch.Tensor, site: Format | None = None) -> torch.Tensor:
    """Relative RMS error of storing ``state`` (batch, heads, value_dim, key_dim) once: (batch, heads).

    site: a format that the decoded state passes through as well, where a rounding site asks for it.  A zero state has
    no relative error: its entry is 0.  Infinite for a state that holds Inf or NaN, or overflows.
    """
    if not format.rounded and site is None:
        return torch.zeros(state.shape[:2], dtype=torch.float64)
    words = None
    if format.stochastic:
        batch, heads, value_dim, key_dim = state.shape
        numbers = torch.zeros(batch, dtype=torch.int64)
        words = random_words((batch, heads, value_dim, key_dim), 1, numbers, torch.arange(batch), 0, 0)
    lost = ~torch.isfinite(state).flatten(2).all(-1)
    state = state.masked_fill(lost[..., None, None], 0.0)
    found = format.dequantize(format.quantize(state, words)) if format.rounded else state
    if site is not None:
        found = site.round(found.float(), specials="hardware")
    error = (found.double() - state.double()).flatten(2).norm(dim=-1)
    norm = state.double().flatten(2).norm(dim=-1)
    return torch.where(norm > 0, error / norm, torch.zeros_like(error)).masked_fill(lost, torch.inf)


@lru_cache(maxsize=256)
def residual_noise(format: Format, key_dim: int = 128) -> float:
    """Relative RMS error of keeping what error feedback holds back of a Gaussian state in the residual's own format.

    0 without error feedback.  A residual of float32 or float16 loses next to nothing, one of four bits a tenth.
    """
    if format.error_feedback is None:
        return 0.0
    exact = dataclasses.replace(format, error_feedback="fp32")
    state = torch.randn(
        1, 8, NOISE_ROWS // 8, key_dim, generator=torch.Generator().manual_seed(22), dtype=torch.float32
    )
    held, kept = (f.residual_values(_residual(f, state)).double() for f in (exact, format))
    norm = float(held.norm())
    return float((kept - held).norm()) / norm if norm > 0 else 0.0


def _residual(format: Format, state: torch.Tensor) -> torch.Tensor | Encoded:
    residual = format.quantize(state).residual
    assert residual is not None
    return residual


def state_noise(policy: Policy, state: torch.Tensor) -> dict[str, NDArray]:
    """``rounding_noise`` of each copy on a float32 state of the stream itself: (batch * heads,) arrays.

    The checkpoint is rounded from the state, the read copy from the stored checkpoint; taking both from the state
    itself differs by a relative noise squared.
    """
    parts: dict[Literal["checkpoint", "read_copy"], Format | None]
    parts = {"checkpoint": policy.checkpoint, "read_copy": policy.read_copy}
    site = state_site(policy)
    return {
        part: rounding_noise(format, state.float(), site).numpy().reshape(-1)
        for part, format in parts.items()
        if format is not None
    }


def spread_block(format: Format) -> int | None:
    """Key columns over which a store spreads its error evenly, because they share a scale; 0 for a whole value row.

    None: an unscaled element, whose error follows its own magnitude.
    """
    if format.hadamard is not None:
        return 0  # turning back spreads the error
    scaling = format.row.scaling
    if scaling is Scaling.NONE:
        return None
    if scaling is Scaling.NVFP4:
        return 16
    if scaling is Scaling.MX or format.granularity in ("block32", "tile32"):
        return 32
    return 0


def sites_of(text: str) -> dict[str, str]:
    """Format names by rounding site, from an option's text ``SITE[.FORMAT]+...``; bf16 where none is named."""
    pairs = (part.partition(".") for part in text.split("+") if part)
    return {site: name or "bf16" for site, _, name in pairs}


def state_site(policy: Policy) -> Format | None:
    """The format of the rounding site ``state``, or None."""
    name = sites_of(policy.options.sites).get("state")
    return None if name is None else formats.parse(name)


def narrow(values: NDArray, name: str) -> NDArray:
    """``values`` (any shape) rounded to nearest in the element format ``name``, as float64."""
    flat = torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(-1))
    rounded = formats.parse(name).round(flat, specials="hardware")
    return rounded.double().numpy().reshape(np.shape(values))


@lru_cache(maxsize=512)
def vector_noise(chain: tuple[str, ...]) -> float:
    """Power of the relative error of a Gaussian vector that passes the roundings of ``chain``, oldest first.

    A name is an element format, ``hilo`` (a bfloat16 and the bfloat16 of the rest), ``tf32x3`` (one operand of three
    products of TF32 halves) or ``decay`` (a factor in between, behind which equal formats round anew).  Passing the
    same format twice costs nothing the second time, and the chain knows it.
    """
    exact = torch.randn(1 << 15, generator=torch.Generator().manual_seed(21), dtype=torch.float64).numpy()
    factor = np.exp(-np.linspace(0, math.log(2), len(exact)))
    found, scale, extra = exact, np.ones_like(exact), 0.0
    for name in chain:
        if name == "decay":
            found, scale = found * factor, scale * factor
        elif name == "hilo":
            high = narrow(found, "bf16")
            found = high + narrow(found - high, "bf16")
        elif name == "tf32x3":
            high = narrow(found, "tf32")
            low = narrow(found - high, "tf32")
            # The product of the two rests is left out: half of its power for each operand.
            extra += 0.5 * float((np.square(low).sum() / np.square(found).sum()) ** 2)
            found = high + low
        elif name not in ("fp32", "ieee"):
            found = narrow(found, name)
    return float(np.square(found / scale - exact).sum() / np.square(exact).sum()) + extra
