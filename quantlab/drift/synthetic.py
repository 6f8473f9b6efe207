"""Made streams: what a preset draws, for a whole stream at once or block by block."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.drift.shadow import ExactState
from quantlab.drift.streams import Stream, check_memory
from quantlab.errors import InputError, unknown_name
from quantlab.recurrences import DecayAxis, StepInputs, expand_groups, get_recurrence

PRESETS = ("evidence", "realistic", "near")
DEFAULT_SHAPE = {"gated_delta": (128, 128), "kimi_delta": (128, 128), "mamba2": (64, 128), "mamba1": (64, 16)}
PREFILL_STEPS = 512
CHUNK = 256
"""Steps that one seed draws where a stream is made in blocks."""
LARGEST_SEED = 2**63 - 1  # what a 64-bit integer column holds
SINK_SHARE, SINK_GATE = 0.05, 10.0
NEAR_NOISE = 0.01
# Preset near only writes what the state already holds, so that the state fades as alpha^steps: this far, in nepers,
# float32 values and their rounding errors are still normal numbers.
LARGEST_FADE = 40.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a made stream: checked arguments of ``synthetic_stream``."""

    family: str
    preset: str
    steps: int
    sequences: int
    heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    seed: int
    alpha: float
    beta: float | None
    negative_eigenvalues: bool

    @property
    def meta(self) -> dict[str, Any]:
        """How the stream is made, for its files and records."""
        meta = {"preset": self.preset, "seed": self.seed} | {
            name: getattr(self, name)
            for name in ("steps", "sequences", "heads", "key_heads", "value_dim", "key_dim")
        }
        if self.preset != "realistic":
            meta |= {"alpha": self.alpha, "beta": self.beta}
        return meta | ({"negative_eigenvalues": True} if self.negative_eigenvalues else {})


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
    negative_eigenvalues: bool = False,
) -> Stream:
    """A made stream of ``sequences`` x ``heads`` independent recurrences.

    preset "evidence" (what ``alpha`` gives): the same decay alpha in every head and step, keys and queries uniform on
    the unit sphere, v ~ N(0, 1), beta = sigmoid(N(0, 1)) or the constant ``beta``, zero start.
    preset "realistic" (the default without ``alpha``): 1 - alpha of each head log-uniform in [1e-4, 0.5], its gate
    fluctuating as softplus(bias + N(0, 1)); 5 % sink steps with a gate ten times as large; channel scales lognormal
    (sigma 1); SiLU-like keys and queries; GDN values within 1 % of what the state already holds, except on sink steps,
    which write something new; a prefill state taken after 512 generated steps.
    preset "near" (delta rules, with ``alpha``): like evidence, but each value within 1 % of what the state holds along
    the key, v = S k (1 + 0.01 N(0, 1)), from the state after 512 steps of the evidence preset.  Such a state fades as
    alpha^steps, so alpha^steps below exp(-40) is refused.
    negative_eigenvalues: beta twice as large, in (0, 2) (delta rules without a constant ``beta``).
    Raises InputError for an unknown family or preset and for values out of range.
    """
    recipe = make_recipe(
        family,
        preset=preset,
        heads=heads,
        steps=steps,
        alpha=alpha,
        seed=seed,
        sequences=sequences,
        key_heads=key_heads,
        value_dim=value_dim,
        key_dim=key_dim,
        beta=beta,
        negative_eigenvalues=negative_eigenvalues,
    )
    gates = math.prod(get_recurrence(family).gate_shape(recipe.heads, recipe.value_dim, recipe.key_dim))
    token = 2 * recipe.key_heads * recipe.key_dim + recipe.heads * (recipe.value_dim + 1) + gates
    state = recipe.sequences * recipe.heads * recipe.value_dim * recipe.key_dim
    check_memory("stream", _counts(recipe), recipe.steps * recipe.sequences * token + state)
    generator = torch.Generator().manual_seed(recipe.seed)
    layer: dict[str, Tensor] = {}
    if recipe.preset == "realistic":
        arrays = _realistic(recipe, generator, layer)
    else:
        arrays = {"evidence": _evidence, "near": _near}[recipe.preset](recipe, generator)
    # Mamba-2 keeps decay rate x step size; with the rates the step sizes can be had back.
    known = {"decay_rates": layer["rate"].tolist()} if family == "mamba2" and layer else {}
    return Stream(family=family, meta=recipe.meta | known, **arrays)


def make_recipe(
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
    negative_eigenvalues: bool = False,
) -> Recipe:
    """The arguments of ``synthetic_stream``, checked, with their defaults; raises InputError."""
    recurrence = get_recurrence(family)
    if preset is None:
        preset = "realistic" if alpha is None else "evidence"
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    if preset == "near" and not recurrence.delta_rule:
        raise InputError("preset", preset, f"evidence or realistic with {family}, which has no delta rule")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if preset == "realistic" and value is not None:
            raise InputError(
                name, value, "no alpha or beta with preset realistic, which draws them for each head"
            )
    if beta is not None and not recurrence.delta_rule:
        raise InputError("beta", beta, f"no beta with {family}, which has no delta rule")
    if negative_eigenvalues and (beta is not None or not recurrence.delta_rule):
        expected = (
            "a beta up to 2 itself" if beta is not None else f"none with {family}, which has no delta rule"
        )
        raise InputError("negative_eigenvalues", True, expected)
    alpha = 0.99 if alpha is None else alpha
    if not isinstance(alpha, (int, float)) or not 0.0 < alpha <= 1.0:
        raise InputError("alpha", alpha, "a decay per step in (0, 1]")
    if beta is not None and (not isinstance(beta, (int, float)) or not 0.0 <= beta <= 2.0):
        raise InputError("beta", beta, "a write strength in [0, 2]")
    default_value, default_key = DEFAULT_SHAPE[family]
    groups = heads if key_heads is None else key_heads
    recipe = Recipe(
        family=family,
        preset=preset,
        steps=steps,
        sequences=sequences,
        heads=heads,
        key_heads=groups,
        value_dim=default_value if value_dim is None else value_dim,
        key_dim=default_key if key_dim is None else key_dim,
        seed=seed,
        alpha=alpha,
        beta=beta,
        negative_eigenvalues=negative_eigenvalues,
    )
    shape = {"value_dim": recipe.value_dim, "key_dim": recipe.key_dim}
    for name, count in (_counts(recipe) | shape).items():
        if not _is_integer(count) or count < 1:
            raise InputError(name, count, "an integer of at least 1")
    if heads % groups:
        raise InputError("key_heads", groups, f"a divisor of heads = {heads}")
    if not _is_integer(seed) or not 0 <= seed <= LARGEST_SEED:
        raise InputError("seed", seed, f"a whole number from 0 to {LARGEST_SEED}")
    if preset == "near" and -steps * math.log(alpha) > LARGEST_FADE:
        longest = int(LARGEST_FADE / -math.log(alpha))
        raise InputError(
            "steps", steps, f"at most {longest} at alpha {alpha:g}: beyond, the state has faded away"
        )
    return recipe


def _counts(recipe: Recipe) -> dict[str, int]:
    return {name: getattr(recipe, name) for name in ("heads", "steps", "sequences", "key_heads")}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _evidence(r: Recipe, generator: torch.Generator, steps: int | None = None) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lead = (r.steps if steps is None else steps, r.sequences)
    log_alpha = float(np.log(r.alpha))
    recurrence = get_recurrence(r.family)
    arrays = {
        "k": _unit(normal(*lead, r.key_heads, r.key_dim)),
        "q": _unit(normal(*lead, r.key_heads, r.key_dim)),
        "v": normal(*lead, r.heads, r.value_dim),
        "log_decay": torch.full((*lead, *recurrence.gate_shape(r.heads, r.value_dim, r.key_dim)), log_alpha),
        "initial": torch.zeros(r.sequences, r.heads, r.value_dim, r.key_dim),
    }
    if recurrence.delta_rule:
        drawn = torch.sigmoid(normal(*lead, r.heads))
        drawn = 2 * drawn if r.negative_eigenvalues else drawn
        arrays["beta"] = drawn if r.beta is None else torch.full_like(drawn, r.beta)
    if r.family == "mamba1":
        arrays["log_decay"] = torch.ones(*lead, r.heads, r.value_dim)
        arrays["rates"] = torch.full((r.heads, r.value_dim, r.key_dim), log_alpha)
    return arrays


def _near(r: Recipe, generator: torch.Generator) -> dict[str, Tensor]:
    state = _near_prefill(r, generator)
    return _near_tokens(r, generator, r.steps, state) | {"initial": state.initial}


class _Settled(ExactState):
    """A state that makes the values which it is then fed; ``initial`` is where its stream begins."""

    def __init__(self, r: Recipe, rates: Tensor | None = None):
        super().__init__(r.family, torch.zeros(r.sequences, r.heads, r.value_dim, r.key_dim), rates)
        self.initial = torch.empty(0)

    def feed(
        self, arrays: dict[str, Tensor], near: Tensor | None = None, fresh: Tensor | None = None
    ) -> None:
        """Step through ``arrays``; with ``near`` (steps, ..., value_dim) each v first becomes near * (S k), in place,
        but for the steps named by ``fresh`` (steps, sequences, 1, 1), which keep theirs."""
        for t in range(len(arrays["v"])):
            if near is not None:
                k = expand_groups(arrays["k"][t].double(), self.state.shape[1], 1)
                held = (self.read(k[:, :, None])[:, :, 0] * near[t]).float()
                arrays["v"][t] = held if fresh is None else torch.where(fresh[t], arrays["v"][t], held)
            inputs = StepInputs(
                arrays["q"][t],
                arrays["k"][t],
                arrays["v"][t],
                arrays["log_decay"][t],
                _at(arrays.get("beta"), t),
            )
            self.step(inputs.to(torch.float64))


def _near_prefill(r: Recipe, generator: torch.Generator) -> _Settled:
    state = _Settled(r)
    state.feed(_evidence(r, generator, PREFILL_STEPS))
    state.initial = state.state.float()
    return state


def _near_tokens(r: Recipe, generator: torch.Generator, steps: int, state: _Settled) -> dict[str, Tensor]:
    arrays = _evidence(r, generator, steps)
    noise = torch.randn(arrays["v"].shape, generator=generator, dtype=torch.float64)
    state.feed(arrays, 1.0 + NEAR_NOISE * noise)
    return arrays


def _realistic(r: Recipe, generator: torch.Generator, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    recurrence = get_recurrence(r.family)
    arrays, near, sink = _realistic_draws(r, generator, PREFILL_STEPS + r.steps, layer)
    fresh = arrays["v"]
    rates = arrays.pop("rates", None)
    # From here on the stored float32 values are the stream; the prefill state is theirs, in float64.
    arrays = {name: value.float() for name, value in arrays.items()}
    state = torch.zeros(r.sequences, r.heads, r.value_dim, r.key_dim, dtype=torch.float64)
    wide_rates = None if rates is None else rates.double()
    initial = state
    for t in range(PREFILL_STEPS + r.steps):
        if t == PREFILL_STEPS:
            initial = state
        if recurrence.delta_rule:
            k = arrays["k"][t].double().repeat_interleave(r.heads // r.key_heads, 1)
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


def _realistic_draws(
    r: Recipe, generator: torch.Generator, steps: int, layer: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What ``steps`` tokens draw, in float64: the arrays (v as a fresh value), nearness (of a delta rule) and sinks.

    layer: what belongs to the heads and not to a token.  What is missing there is drawn, in the order in which a whole
    stream always drew it, and put there.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def once(name: str, draw: Callable[[], Tensor]) -> Tensor:
        if name not in layer:
            layer[name] = draw()
        return layer[name]

    lead = (steps, r.sequences)
    forget = once("forget", lambda: torch.exp(uniform(r.heads) * np.log(0.5 / 1e-4) + np.log(1e-4)))
    recurrence = get_recurrence(r.family)
    gate_shape = recurrence.gate_shape(r.heads, r.value_dim, r.key_dim)
    channels = len(gate_shape) > 1  # one gate a channel (mamba1, kimi_delta) instead of one a head
    # softplus(bias) log-uniform in [1e-3, 1e-1], the initialisation of the published layers (dt_bias).
    typical = once("typical", lambda: torch.exp(uniform(r.heads) * np.log(100.0) + np.log(1e-3)))
    bias = torch.log(torch.expm1(typical))
    sink = uniform(*lead, 1) < SINK_SHARE
    gate = F.softplus((bias[:, None] if channels else bias) + normal(*lead, *gate_shape))
    gate = gate * torch.where(sink[..., None] if channels else sink, SINK_GATE, 1.0)
    scale = once("scale", lambda: torch.exp(normal(r.heads, r.value_dim)))
    mean_gate = layer.get("mean_gate", gate.mean(dim=(0, 1, 3) if channels else (0, 1)))
    rate = torch.log1p(-forget) / mean_gate
    layer["rate"] = rate
    fresh = scale * normal(*lead, r.heads, r.value_dim)
    keys = F.silu(normal(*lead, r.key_heads, r.key_dim))
    queries = F.silu(normal(*lead, r.key_heads, r.key_dim))
    arrays: dict[str, Tensor] = {}
    near = torch.empty(0)
    if recurrence.delta_rule:
        if recurrence.axis is DecayAxis.KEY:
            # The channels of a head forget at rates of their own, a factor of e apart.
            rate = rate[:, None] * once("channels", lambda: torch.exp(normal(r.heads, r.key_dim) - 0.5))
        arrays |= {"k": _unit(keys), "q": _unit(queries) * r.key_dim**-0.5, "log_decay": gate * rate}
        beta = torch.sigmoid(normal(*lead, r.heads))
        arrays |= {"beta": 2 * beta if r.negative_eigenvalues else beta, "v": fresh}
        near = 1.0 + NEAR_NOISE * normal(*lead, r.heads, r.value_dim)
    else:
        log_decay = gate if r.family == "mamba1" else gate * rate
        arrays |= {"k": keys, "q": queries, "log_decay": log_decay}
        arrays["v"] = fresh * (gate if r.family == "mamba1" else gate[..., None])
    if r.family == "mamba1":
        spread = once("spread", lambda: torch.exp(0.5 * normal(r.heads, r.value_dim, r.key_dim)))
        arrays["rates"] = (rate[:, None, None] * spread).float()
    return arrays, near, sink


class BlockMaker:
    """Makes a stream ``CHUNK`` steps at a time: each chunk has a seed of its own, the state goes from chunk to chunk.

    Step n is the same whatever the number of steps.  It is not the stream of ``synthetic_stream``: there one generator
    draws each array of the whole stream in turn, and the gates of preset realistic are scaled by their mean over it
    (here by their expectation).
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self._number = 0
        self._layer: dict[str, Tensor] = {}
        rates = None
        if recipe.preset == "realistic":
            arrays, _, _ = _realistic_draws(recipe, self._generator("layer"), 1, self._layer)
            self._layer["mean_gate"] = _expected_gate(self._layer["typical"])
            if recipe.family == "mamba1":
                arrays, _, _ = _realistic_draws(recipe, self._generator("layer"), 1, self._layer)
                rates = arrays["rates"]
        elif recipe.family == "mamba1":
            rates = _evidence(recipe, self._generator("layer"), 1)["rates"]
        self.rates = rates
        self._state = _Settled(recipe, rates)
        if recipe.preset != "evidence":
            for _ in range(PREFILL_STEPS // CHUNK):
                self._make(prefill=True)
        self.initial = self._state.state.float()

    def chunk(self) -> dict[str, Tensor]:
        """The arrays of the next ``CHUNK`` steps, float32."""
        return self._make(prefill=False)

    def _make(self, *, prefill: bool) -> dict[str, Tensor]:
        recipe, generator = self.recipe, self._generator(self._number)
        self._number += 1
        near = fresh = None
        if recipe.preset == "realistic":
            arrays, drawn, sink = _realistic_draws(recipe, generator, CHUNK, self._layer)
            arrays = {name: value.float() for name, value in arrays.items()}
            if get_recurrence(recipe.family).delta_rule:
                near, fresh = drawn, sink[..., None]
        else:
            arrays = _evidence(recipe, generator, CHUNK)
            if recipe.preset == "near" and not prefill:
                noise = torch.randn(arrays["v"].shape, generator=generator, dtype=torch.float64)
                near = 1.0 + NEAR_NOISE * noise
        if near is not None or prefill:
            self._state.feed(arrays, near, fresh)
        return {name: value for name, value in arrays.items() if name not in ("initial", "rates")}

    def _generator(self, part: "int | str") -> torch.Generator:
        """A generator for one chunk, or for what belongs to the layer."""
        digest = hashlib.sha256(f"{self.recipe.seed} {part}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def _expected_gate(typical: Tensor) -> Tensor:
    """Mean of a gate softplus(bias + N(0, 1)), sink steps included, for softplus(bias) = ``typical`` (heads,)."""
    points, weights = np.polynomial.hermite_e.hermegauss(64)
    bias = torch.log(torch.expm1(typical))
    values = F.softplus(bias[:, None] + torch.from_numpy(points)) @ torch.from_numpy(weights)
    return values / math.sqrt(2 * math.pi) * (1 + SINK_SHARE * (SINK_GATE - 1))


def _at(tensor: Tensor | None, index: int) -> Tensor | None:
    return None if tensor is None else tensor[index]
