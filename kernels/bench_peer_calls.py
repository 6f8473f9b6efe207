"""How each peer's function is called for one token of one layer, and what it then ought to give, in our terms.

A call owns its tensors.  Rows stand in random slots from 1 on: slot 0 is the engines' null block.  Engines hand cursors
over in tensors that the step before prepared; here each phase of the window has its own, so a peer pays for no counter.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.kernels.bench_cases import Case
from quantlab.kernels.bench_pools import desynchronised_cursors, prefill_states
from quantlab.recurrences import Records, StepInputs, fold, get_recurrence

STATE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_L2_EPSILON = 1e-6


@dataclass(frozen=True)
class Call:
    """run(phase): one step at that phase of the window (0 under @1).  output(): (B, H, V) of the last run.

    token: the step's inputs in our terms, float64.  logical(phase): the dense state before it (B, H, V, K), float64.
    """

    run: Callable[[int], object]
    output: Callable[[], Tensor]
    token: StepInputs
    logical: Callable[[int], Tensor]


class Draw:
    """Random tensors on the device."""

    def __init__(self, case: Case, device: torch.device, seed: int):
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(sizes, generator=self.generator, device=self.device).to(dtype)

    def uniform(self, low: float, high: float, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        numbers = torch.rand(sizes, generator=self.generator, device=self.device)
        return (low + (high - low) * numbers).to(dtype)

    def states(self, extra: int = 0) -> Tensor:
        shape, dtype = self.case.shape, STATE_DTYPES[self.case.parsed.checkpoint.name]
        return prefill_states(shape, self.case.batch + extra, self.generator).to(dtype)

    def slots(self) -> Tensor:
        batch = self.case.batch
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch))
        return (1 + order).int().to(self.device)


def supported(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this release of the function takes."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in known}


@dataclass(frozen=True)
class _MambaToken:
    """One scalar decay and step size a head, expanded as engines do, so that kernels take their short path."""

    x: Tensor
    dt: Tensor
    rate: Tensor
    k: Tensor
    q: Tensor

    def arguments(self, case: Case) -> dict[str, Any]:
        shape = case.shape
        zeros = torch.zeros(shape.heads, device=self.x.device)[:, None].expand(-1, shape.value_dim)
        return {
            "x": self.x,
            "dt": self.dt[..., None].expand(-1, -1, shape.value_dim),
            "A": self.rate[:, None, None].expand(-1, shape.value_dim, shape.key_dim),
            "B": self.k,
            "C": self.q,
            "D": zeros,
            "dt_bias": zeros,
            "dt_softplus": False,
        }

    def token(self) -> StepInputs:
        dt = self.dt.double()
        return StepInputs(
            q=self.q.double(),
            k=self.k.double(),
            v=dt[..., None] * self.x.double(),
            log_decay=dt * self.rate.double(),
        )


def mamba_token(draw: Draw) -> _MambaToken:
    shape, batch = draw.case.shape, draw.case.batch
    return _MambaToken(
        x=draw.normal(batch, shape.heads, shape.value_dim),
        dt=draw.uniform(0.01, 0.1, batch, shape.heads, dtype=torch.bfloat16),
        rate=-draw.uniform(0.5, 2.0, shape.heads),
        k=draw.normal(batch, shape.key_heads, shape.key_dim),
        q=draw.normal(batch, shape.key_heads, shape.key_dim),
    )


def selective_state_update(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """Mamba-2, the state rewritten each token, in place."""
    draw = Draw(case, device, seed)
    states, slots, token = draw.states(extra=1), draw.slots(), mamba_token(draw)
    found = {"out": torch.empty_like(token.x)}
    arguments = supported(
        function, state=states, state_batch_indices=slots, out=found["out"], **token.arguments(case)
    )

    def run(phase: int) -> None:
        returned = function(**arguments)
        if "out" not in arguments:
            found["out"] = returned

    at = slots.long()
    return Call(run, lambda: found["out"], token.token(), lambda phase: states[at].double())


def replayed_state_update(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """Mamba-2 with a buffer of inputs (x, dt, B); the state is rewritten once a window."""
    draw, shape, window = Draw(case, device, seed), case.shape, case.parsed.window
    states, slots, token = draw.states(extra=1), draw.slots(), mamba_token(draw)
    held = case.batch + 1
    x_cache = draw.normal(held, shape.heads, window, shape.value_dim)
    dt_cache = draw.uniform(0.01, 0.1, held, shape.heads, window)
    k_cache = draw.normal(held, shape.key_heads, window, shape.key_dim)
    products = torch.empty(case.batch, shape.key_heads, window, device=device)
    out, cursors = torch.empty_like(token.x), _cursors(case, device)
    arguments = supported(
        function,
        state=states,
        x_cache=x_cache,
        dt_cache=dt_cache,
        B_cache=k_cache,
        bc_pre=products,
        max_cache_len=window,
        state_batch_indices=slots,
        out=out,
        **token.arguments(case),
    )
    full = [cursor == window - 1 for cursor in cursors]

    def run(phase: int) -> None:
        function(**arguments, write_pos=cursors[phase], is_flush=full[phase])

    def logical(phase: int) -> Tensor:
        at, used = slots.long(), _used(cursors[phase % window], window)
        dt = dt_cache[at].double() * used[:, None]
        return _folded(
            case,
            states[at],
            k_cache[at].double() * used[:, None, :, None],
            dt[..., None] * x_cache[at].double(),
            dt * token.rate.double()[:, None],
        )

    return Call(run, lambda: out, token.token(), logical)


@dataclass(frozen=True)
class _DeltaToken:
    """Queries, keys and values in one row, gates before their activation: as a layer's projection gives them."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    rate_log: Tensor
    bias: Tensor

    def arguments(self, case: Case) -> dict[str, Any]:
        return {
            "mixed_qkv": self.mixed,
            "a": self.a,
            "b": self.b,
            "A_log": self.rate_log,
            "dt_bias": self.bias,
            "scale": case.shape.key_dim**-0.5,
            "use_qk_l2norm_in_kernel": True,
        }

    def token(self, case: Case) -> StepInputs:
        shape, batch = case.shape, case.batch
        width = shape.key_heads * shape.key_dim
        q, k, v = self.mixed.double().split([width, width, shape.heads * shape.value_dim], 1)
        q, k = (_unit(t.view(batch, shape.key_heads, shape.key_dim)) for t in (q, k))
        return StepInputs(
            q=q * shape.key_dim**-0.5,
            k=k,
            v=v.view(batch, shape.heads, shape.value_dim),
            log_decay=-self.rate_log.double().exp() * F.softplus(self.a.double() + self.bias.double()),
            beta=torch.sigmoid(self.b.double()),
        )


def _delta_token(draw: Draw) -> _DeltaToken:
    shape, batch = draw.case.shape, draw.case.batch
    width = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim
    return _DeltaToken(
        mixed=draw.normal(batch, width),
        a=draw.normal(batch, shape.heads),
        b=draw.normal(batch, shape.heads),
        rate_log=draw.uniform(-4.0, -2.0, shape.heads),
        bias=draw.uniform(-1.0, 1.0, shape.heads),
    )


def packed_gated_delta(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """GDN, the state rewritten each token, in place."""
    draw, shape = Draw(case, device, seed), case.shape
    states, slots, token = draw.states(extra=1), draw.slots(), _delta_token(draw)
    out = torch.empty(case.batch, 1, shape.heads, shape.value_dim, dtype=torch.bfloat16, device=device)
    arguments = supported(
        function, initial_state=states, ssm_state_indices=slots, out=out, **token.arguments(case)
    )
    at = slots.long()
    return Call(
        lambda phase: function(**arguments),
        lambda: out[:, 0],
        token.token(case),
        lambda phase: states[at].double(),
    )


def replayed_gated_delta(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """GDN with a buffer of (d, k, g); the state is rewritten once a window."""
    draw, shape, window = Draw(case, device, seed), case.shape, case.parsed.window
    states, slots, token = draw.states(extra=1), draw.slots(), _delta_token(draw)
    held = case.batch + 1
    d_cache = draw.normal(held, shape.heads, window, shape.value_dim)
    k_cache = F.normalize(
        draw.normal(held, shape.key_heads, window, shape.key_dim, dtype=torch.float32), dim=-1
    ).bfloat16()
    g_cache = -draw.uniform(0.0, 0.2, held, shape.heads, window)
    out = torch.empty(case.batch, 1, shape.heads, shape.value_dim, dtype=torch.bfloat16, device=device)
    cursors = _cursors(case, device)
    arguments = supported(
        function,
        initial_state=states,
        d_cache=d_cache,
        k_cache=k_cache,
        g_cache=g_cache,
        ssm_state_indices=slots,
        out=out,
        **token.arguments(case),
    )

    def logical(phase: int) -> Tensor:
        at, used = slots.long(), _used(cursors[phase % window], window)
        return _folded(
            case,
            states[at],
            k_cache[at].double() * used[:, None, :, None],
            d_cache[at].double() * used[:, None, :, None],
            g_cache[at].double() * used[:, None],
        )

    return Call(
        lambda phase: function(**arguments, write_pos=cursors[phase]),
        lambda: out[:, 0],
        token.token(case),
        logical,
    )


def fused_recurrent(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """GDN and KDA, one token of a sequence; the state comes back in new memory (B, H, K, V)."""
    draw, shape, batch = Draw(case, device, seed), case.shape, case.batch
    states = draw.states().transpose(-1, -2).contiguous()
    k = F.normalize(draw.normal(batch, shape.key_heads, shape.key_dim, dtype=torch.float32), dim=-1)
    q = draw.normal(batch, shape.key_heads, shape.key_dim, dtype=torch.float32) * shape.key_dim**-0.5
    gate = get_recurrence(case.family).gate_shape(shape.heads, shape.value_dim, shape.key_dim)
    token = StepInputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=draw.normal(batch, shape.heads, shape.value_dim),
        log_decay=-draw.uniform(0.0, 0.2, batch, *gate),
        beta=torch.sigmoid(draw.normal(batch, shape.heads, dtype=torch.float32)),
    )
    one = token.map(lambda t: t[:, None].contiguous())
    found: dict[str, Tensor] = {"state": states}
    arguments = {
        "q": one.q,
        "k": one.k,
        "v": one.v,
        "g": one.log_decay,
        "beta": one.beta,
        "scale": 1.0,
        "initial_state": states,
        "output_final_state": True,
    }

    def run(phase: int) -> None:
        found["out"], found["state"] = function(**arguments)

    return Call(
        run,
        lambda: found["out"][:, 0],
        token.map(lambda t: t.double()),
        lambda phase: found["state"].transpose(-1, -2).double(),
    )


def relative_errors(call: Call, case: Case, phase: int) -> dict[str, float]:
    """One run at ``phase``: norm of the error of output and of stored state over that of the float64 result."""
    recurrence, state = get_recurrence(case.family), call.logical(phase)
    if case.drafts:
        outputs = []
        for draft in range(case.drafts):
            state, output = recurrence.step(state, call.token.map(lambda t, draft=draft: t[:, draft]))
            outputs.append(output)
        output = torch.stack(outputs, 1)
    else:
        state, output = recurrence.step(state, call.token)
    call.run(phase)
    got = {"output": (output, call.output()), "state": (state, call.logical(phase + 1))}
    return {name: float((b.double() - a).norm() / a.norm()) for name, (a, b) in got.items()}


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPSILON)


def _cursors(case: Case, device: torch.device) -> list[Tensor]:
    window = case.parsed.window
    first = desynchronised_cursors(case.batch, window)
    return [((first + phase) % window).int().to(device) for phase in range(window)]


def _used(cursor: Tensor, window: int) -> Tensor:
    return torch.arange(window, device=cursor.device) < cursor[:, None]


def _folded(case: Case, base: Tensor, k: Tensor, d: Tensor, log_decay: Tensor) -> Tensor:
    """float64 state from ring buffers (B, G, L, K), (B, H, L, V), (B, H, L), unused records zero."""
    records = Records(k.transpose(1, 2), d.transpose(1, 2), log_decay.transpose(1, 2))
    return fold(get_recurrence(case.family), base.double(), records)
