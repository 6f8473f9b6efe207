"""Run a Hugging Face model with every recurrent decode state held under a policy.

Two seams, both stable over the supported transformers releases: the recurrent ops are module globals looked
up at call time, and every cache keeps its recurrent states in ``LinearAttentionLayer.recurrent_states``.
While a policy is active the ops are replaced by adapters (``families``) and a cache slot holds an empty
tensor, the *handle*, that points to a decode state of ``quantlab.schemes``.  A handle is made when a
prefill hands its final state over, so any cache created inside, ``generate``'s own included, is covered
without being asked for.

The convolution state is left alone, in the model's own precision.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.cache_layers import patch_cache_layers
from quantlab.models.families import Family
from quantlab.models.families.base import refuse_packed
from quantlab.models.handles import Holding, Prefill, holding_of
from quantlab.models.patching import replace
from quantlab.models.recurrent_layers import op_namespaces
from quantlab.models.report import PolicyReport
from quantlab.schemes import DecodeState, Policy, check_policy_fits, checks, parse_policy, start

# Blocks patch module globals and undo it in reverse order, which two threads would interleave.
_ENTERED = threading.RLock()

_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


@contextlib.contextmanager
def run_with_policy(
    model: nn.Module, policy: str | Policy, *, seed: int = 0, sequence_ids: Sequence[int] | None = None
) -> Iterator[PolicyReport]:
    """``with run_with_policy(model, "fp32/nvfp4@16") as report: model.generate(...)``.

    Every cache that is created inside decodes under ``policy`` (text or a parsed policy); ``report`` says
    what happened.  The state left by a prefill is rounded once into every stored copy.  ``seed`` keys
    stochastic rounding; ``sequence_ids`` names the sequences of the batch for it (default 0, 1, ...).
    Everything is restored on exit.

    Raises InputError for a model without recurrent layers or with layers that no adapter serves, for a
    cache that was filled outside, and, on a clean exit, when no decode step went through the policy.
    """
    interception = Interception(model, policy, seed=seed)
    if sequence_ids is not None:
        interception.sequence_ids = checks.sequence_ids(sequence_ids, len(sequence_ids))
    with interception:
        yield interception.report
    interception.require_effect()


class _Running(NamedTuple):
    """A layer whose forward runs: its number, its module, and what the forward was given."""

    layer: int
    module: nn.Module
    given: tuple[Any, ...]

    def cached_state(self) -> Tensor | None:
        """What the layer's cache holds for a recurrent state, for an op that is not told."""
        for value in self.given:
            if hasattr(value, "update_recurrent_state"):
                return value.layers[self.layer].recurrent_states[0]
        return None


class Interception:
    """A policy bound to a model.  A context manager that may be entered again and again; its report adds
    up.

    ``sequence_ids``: int64 (B,) names of the sequences that the next prefill starts, or None for 0 .. B-1.
    """

    def __init__(self, model: nn.Module, policy: str | Policy, *, seed: int = 0):
        self.policy = parse_policy(policy)
        self.seed = seed
        self.sequence_ids: Tensor | None = None
        self.report = PolicyReport(str(self.policy), self.living)
        self._model = model
        self._namespaces = op_namespaces(model)
        for _, family in self._namespaces:
            check_policy_fits(self.policy, family.recurrence)
        self._running: dict[int, list[_Running]] = {}  # by thread
        self._alive: list[tuple[weakref.ref[Holding], DecodeState]] = []
        self._undo: contextlib.ExitStack | None = None

    def __enter__(self) -> "Interception":
        if self._undo is not None:
            raise InputError("policy", str(self.policy), "not to be entered twice at once")
        if not _ENTERED.acquire(blocking=False):
            raise InputError(
                "policy", str(self.policy), "one thread at a time: another is inside such a block"
            )
        with contextlib.ExitStack() as stack:
            stack.callback(_ENTERED.release)
            for module in self._model.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    enter = module.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
                    stack.callback(enter.remove)
                    stack.callback(module.register_forward_hook(self._leave_layer, always_call=True).remove)
            for namespace, family in self._namespaces:
                replace(stack, namespace, family.step_op, lambda op, f=family: self._step_adapter(op, f))
                replace(
                    stack, namespace, family.prefill_op, lambda op, f=family: self._prefill_adapter(op, f)
                )
            patch_cache_layers(stack)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.close()
        self._running.clear()

    def require_effect(self) -> None:
        """InputError unless at least one decode step ran through the policy."""
        if not any(self.report.step_hits.values()):
            raise InputError(
                "policy",
                str(self.policy),
                "at least one decode step in the block; it touched nothing (was a cache used?)",
            )

    def adopt(self, holding: Holding) -> None:
        """Count what this holding's state exercised, even after its cache is gone."""
        self._alive.append((weakref.ref(holding), holding.state))

    def living(self) -> list[DecodeState]:
        """The states whose caches still exist; the others are counted for good and let go."""
        for ref, state in self._alive:
            if ref() is None:
                self.report.count(state)
        self._alive = [(ref, state) for ref, state in self._alive if ref() is not None]
        return [state for _, state in self._alive]

    # -- which layer is running
    @property
    def _calls(self) -> "list[_Running]":
        """The recurrent modules that this thread runs now, innermost last."""
        return self._running.setdefault(threading.get_ident(), [])

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append(_Running(int(module.layer_idx), module, (*args, *kwargs.values())))  # pyright: ignore[reportArgumentType]

    def _leave_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._calls:
            self._calls.pop()

    # -- the ops
    def _step_adapter(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:  # another model that shares the module file
                return original(*args, **kwargs)
            layer, module, _ = self._calls[-1]
            self.report.step_hits[family.step_op, layer] += 1
            call = family.token_inputs(module, *args, **kwargs)
            return call.finish(self._find(call.state).step(call.inputs), call.state)

        return step

    def _prefill_adapter(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        def prefill(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:
                return original(*args, **kwargs)
            layer, module, _ = running = self._calls[-1]
            self.report.prefill_hits[family.prefill_op, layer] += 1
            refuse_packed(module, kwargs)
            name, before = family.prefill_state, None
            # Several tokens on top of a stored state continue from what the checkpoint holds.
            if name is None:
                if (handle := running.cached_state()) is not None:
                    call = family.chunk_inputs(module, *args, **kwargs)
                    return call.finish(self._find(handle).extend(call.inputs), handle)
            elif kwargs.get(name) is not None:
                self._find(kwargs[name])
                before = holding_of(kwargs[name])
                assert before is not None
                kwargs[name] = family.to_model(before.state.materialize())
            result = original(*args, **kwargs)
            if isinstance(result, tuple) and result[1] is not None:
                key_heads = family.key_heads(module, *args, **kwargs)
                rates = None if family.rates is None else family.rates(module, *args, **kwargs)
                Prefill(self, family, layer, key_heads, rates, before).ride(result[1])
            return result

        return prefill

    def _find(self, handle: Tensor | None) -> DecodeState:
        holding = holding_of(handle)
        if holding is None or holding.interception is not self:
            raise InputError(
                "cache",
                None if handle is None else tuple(handle.shape),
                f"one filled under policy {self.policy}, not one from outside the block",
            )
        return holding.state

    def hand_off(self, prefill: Prefill, dense: Tensor) -> Tensor:
        """The handle of a layer whose prefill ended in ``dense`` (the model's layout, unrounded)."""
        self.living()
        initial = prefill.family.to_state(dense)
        batch = initial.shape[0]
        self.report.state_dtype = str(dense.dtype).removeprefix("torch.")
        if prefill.continues is not None:
            holding = prefill.continues
            holding.state.reset(torch.arange(batch), initial)
            return holding.handle(batch, initial.device)
        ids = self.sequence_ids
        if ids is not None and len(ids) != batch:
            raise InputError(
                "sequence_ids", len(ids), f"one name for each of the {batch} sequences of the batch"
            )
        state = start(
            self.policy,
            prefill.family.recurrence,
            initial,
            key_heads=prefill.key_heads,
            rates=prefill.rates,
            seed=self.seed,
            layer=prefill.layer,
            sequence_ids=ids,
        )
        self.report.describe(prefill.layer, state)
        holding = Holding(self, prefill.family, state)
        self.adopt(holding)
        return holding.handle(batch, initial.device)


def cache_keyword(model: nn.Module) -> str:
    """The name under which this model's forward takes its cache; releases differ."""
    import inspect

    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_KEYWORDS:
        if name in parameters:
            return name
    raise InputError(
        "model", type(model).__name__, f"a forward method with one of {', '.join(_CACHE_KEYWORDS)}"
    )


def select_rows(cache: Any, rows: Tensor) -> None:
    """Make row i of every state in ``cache`` what row ``rows[i]`` was: reorders, drops or forks sequences
    in place.
    """
    cache.reorder_cache(rows)


def reset_rows(cache: Any, rows: Tensor) -> None:
    """Start new sequences, from zero states, in these rows of a cache that holds recurrent states only.

    Raises InputError for a cache with attention layers: their rows share one length.
    """
    for layer in cache.layers:
        if not hasattr(layer, "recurrent_states") or hasattr(layer, "keys"):
            raise InputError(
                "cache", type(layer).__name__, "recurrent layers only; attention rows share one length"
            )
    for layer in cache.layers:
        for index, recurrent in layer.recurrent_states.items():
            if layer.conv_states[index] is not None:
                layer.conv_states[index][rows] = 0
            holding = holding_of(recurrent)
            if holding is not None:
                zeros = torch.zeros_like(holding.state.materialize()[rows])
                holding.state.reset(rows, zeros)


def decode_states(cache: Any) -> dict[int, DecodeState]:
    """The decode state of every recurrent layer of ``cache``, by layer index."""
    found = {}
    for number, layer in enumerate(cache.layers):
        for recurrent in getattr(layer, "recurrent_states", {}).values():
            if (holding := holding_of(recurrent)) is not None:
                found[number] = holding.state
    return found
