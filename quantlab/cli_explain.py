"""``quantlab explain``: what a policy stores, reads and costs."""

import importlib.util
from typing import TYPE_CHECKING, Annotated

import typer

from quantlab.terminal import print_json, print_sections, text_of

if TYPE_CHECKING:
    from quantlab.schemes import Policy, StateShape

EPILOG = "Example: [bold]quantlab explain fp16+sr/nvfp4@16 --family gated_delta[/bold]"


def explain(
    policy: Annotated[str, typer.Argument(help="Policy text.")],
    family: Annotated[
        str, typer.Option("--family", help="gated_delta, kimi_delta, mamba2 or mamba1.")
    ] = "gated_delta",
    heads: Annotated[int, typer.Option(help="Heads of a layer.", min=1)] = 32,
    key_heads: Annotated[int | None, typer.Option(help="Key heads (default: heads).", min=1)] = None,
    value_dim: Annotated[int, typer.Option(help="Value dim of a head.", min=1)] = 128,
    key_dim: Annotated[int, typer.Option(help="Key dim of a head.", min=1)] = 128,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line instead of a table.")
    ] = False,
) -> None:
    """Say what a policy stores, reads and costs, with the defaults of the family filled in."""
    import torch

    from quantlab.drift import check_memory, steady_output_error
    from quantlab.schemes import start

    sizes = {"heads": heads, "value_dim": value_dim, "key_dim": key_dim}
    check_memory("state", sizes, heads * value_dim * key_dim)
    state = start(
        policy,
        family,
        torch.zeros(1, heads, value_dim, key_dim),
        key_heads=key_heads,
        rates=_rates(family, heads, value_dim, key_dim),
    )
    ledger, parsed = state.ledger, state.policy
    about = {
        "policy": str(parsed),
        "layer": f"{family}, {heads} heads of {value_dim} x {key_dim}, {state.shape.key_heads} key heads; one sequence",
        "in_force": state.effective_policy,
        "checkpoint": f"{parsed.checkpoint.text}: drives the recurrence, {_when_stored(parsed)}",
        "read_copy": f"{parsed.read_copy.text}: serves reads" if parsed.read_copy else "none",
        "buffer": _buffer(parsed),
        "rounds_on_the_way": _roundings(parsed),
        "kernel": _kernel(parsed, family, state.shape),
        "bits_per_value": ledger.bits_per_value,
        "bytes_held": ledger.held,
        "bytes_read_per_token": ledger.read,
        "bytes_written_per_token": ledger.written,
        "bytes_per_token": ledger.bytes_per_token,
        "against_fp32": ledger.bytes_per_token / (8.0 * ledger.values),
        "predicted_output_error_at_alpha_0.99": steady_output_error(parsed, family, 0.99, key_dim),
    }
    if as_json:
        print_json([about])
        return
    lines = []
    for name, value in about.items():
        if isinstance(value, dict):
            value = ", ".join(f"{part} {size:,.0f}" for part, size in value.items())
        lines.append((name.replace("_", " "), text_of(value)))
    print_sections([(f"quantlab explain {policy}", lines)])


def _kernel(policy: "Policy", family: str, shape: "StateShape") -> str:
    """Whether kernels decode under the policy on a GPU."""
    if importlib.util.find_spec("triton") is None:
        return "none here, as triton is not installed: torch serves every step"
    from quantlab.kernels import steps

    if reason := steps.served(policy, family, shape):
        return f"none, torch serves every step: no kernel serves {reason}"
    return "decode kernels, on a GPU"


def _when_stored(policy: "Policy") -> str:
    schedule, window = policy.options.schedule, policy.window
    if schedule == "step":
        return "rounded after every token, by a replay of the window"
    if schedule in ("chunk", "turn"):
        ends = "prefill chunks and at explicit flushes" if schedule == "chunk" else "turns (explicit flushes)"
        return f"FP32 while decoding, rounded at the end of {ends}"
    every = window - 1 if policy.options.flush == "early" else window
    return "stored after every token" if every == 1 else f"stored every {every} tokens"


def _buffer(policy: "Policy") -> str:
    if policy.window == 1:
        return "none"
    held = f"up to {policy.window - 1} records in {policy.options.buffer}"
    if policy.options.flush == "early":
        return f"{held}; folded, without the tokens of a forward, before one that finds no room for two of its size"
    return f"{held}; the token that fills the window is folded with them"


def _roundings(policy: "Policy") -> str:
    from quantlab.schemes.sites import SITES, parse_sites

    options = policy.options
    found = [f"{name} in {fmt.text}: {SITES[name]}" for name, fmt in parse_sites(options.sites).items()]
    if options.dot != "ieee":
        found.append(f"operands of the fold's product in {options.dot}")
    if options.current == "buffer":
        found.append("the current token, as the buffer will hold it")
    return "; ".join(found) or "nothing"


def _rates(family: str, heads: int, value_dim: int, key_dim: int):
    import torch

    return -torch.ones(heads, value_dim, key_dim) if family == "mamba1" else None
