"""What a family of model ops has in common: how its tensors become a decode state's inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.recurrences import StepInputs


@dataclass(frozen=True)
class OpCall:
    """One call of a recurrent op, read.

    state: the state that the op was given, a handle or a dense tensor; None if it was given none.
    inputs: what the recurrence gets, float32: q scaled, k normalised, key heads not repeated.
    finish(outputs, state): what the op returns, given the recurrence's outputs (the shape of ``inputs.v``) and
    the state to return where the op returns one.
    """

    state: Tensor | None
    inputs: StepInputs
    finish: Callable[[Tensor, Tensor | None], Any]


def refuse_packed(mixer: nn.Module | None, options: dict[str, Any]) -> None:
    """InputError if an op's further arguments say that its rows hold several sequences, one behind the other."""
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if options.get(name) is not None:
            layer = "" if mixer is None else f" at layer {getattr(mixer, 'layer_idx', '?')}"
            raise InputError(
                name, f"given{layer}", "None: one sequence a row of the batch, padded on the left"
            )


def key_dim_last(dense: Tensor) -> Tensor:
    """(B, H, V, K) as it is, contiguous."""
    return dense.contiguous()


def key_dim_swapped(dense: Tensor) -> Tensor:
    """(B, H, K, V) <-> (B, H, V, K), contiguous."""
    return dense.transpose(-1, -2).contiguous()


@dataclass(frozen=True)
class Family:
    """One family of recurrent ops.

    The mixers that call them are modules with an integer ``layer_idx`` and a parameter ``A_log``, one number for each
    value head: by these a model's recurrent layers and their heads are found.

    recurrence: a name of ``quantlab.recurrences``.
    step_op, prefill_op: the module globals to replace.
    prefill_state: the keyword under which the prefill op takes the state to continue from; None for an op that takes
    none: several tokens on top of a stored state then run through ``chunk_inputs`` and the decode state itself.
    to_state, to_model: the model's dense state -> (B, H, V, K) with the key dim contiguous, and back.
    token_inputs(mixer, *args, **kwargs), chunk_inputs(mixer, *args, **kwargs): the step op's or the prefill op's
    arguments behind ``mixer`` (the calling module, or None) as an ``OpCall``, of one token (B, ...) or of several
    (B, T, ...).
    key_heads(mixer, *args, **kwargs): the number of key heads, read off the prefill op's arguments.
    rates(mixer, *args, **kwargs): the fixed rates (H, V, K) of a recurrence that needs them, read off the same.
    token_dim: of the prefill op's arguments, the first one and others of at least three dimensions, and of its outputs.
    decodes(mixer, *args, **kwargs): for ops whose caller keeps the state that they return as it is, and packs rows:
    whether a call of the step op is a decode step, and not a prompt.
    """

    recurrence: str
    step_op: str
    prefill_op: str
    prefill_state: str | None
    to_state: Callable[[Tensor], Tensor]
    to_model: Callable[[Tensor], Tensor]
    token_inputs: Callable[..., OpCall]
    chunk_inputs: Callable[..., OpCall]
    key_heads: Callable[..., int]
    rates: Callable[..., Tensor] | None = None
    token_dim: int = 1
    decodes: Callable[..., bool] | None = None
