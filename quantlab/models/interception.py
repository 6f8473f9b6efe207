"""Run a Hugging Face model with every recurrent decode state held under a policy.

Two seams, both stable over the supported transformers releases: the recurrent ops are module globals looked
up at call time, and every cache keeps its recurrent states in ``LinearAttentionLayer.recurrent_states``.
While a policy is active the ops are replaced by adapters (``families.py``) and a cache slot holds an empty
tensor, the *handle*, that points to a decode state of ``quantlab.schemes``.  A handle is made when a
prefill hands its final state over, so any cache created inside, ``generate``'s own included, is covered
without being asked for.

The convolution state is left alone, in the model's own precision.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.families import FAMILIES, UNSUPPORTED_OPS, Family
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


@dataclass(frozen=True)
class _Prefill:
    """Rides on the final state that a prefill op returns, until the cache layer takes that state."""

    interception: "Interception"
    family: Family
    layer: int
    key_heads: int
    continues: "_Holding | None"


class _Holding:
    """What a handle points to: one layer's decode state."""

    def __init__(self, interception: "Interception", family: Family, state: DecodeState):
        self.interception, self.family, self.state = interception, family, state

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Holding":
        # A copied cache is a fork of its sequences: the state is copied, the interception (and the model)
        # is not.
        copy = _Holding(self.interception, self.family, deepcopy(self.state, memo))
        self.interception.adopt(copy)
        return copy

    def handle(self, batch: int, device: torch.device) -> Tensor:
        # The batch dimension is real, so that code asking a state for its batch size gets the right answer.
        tensor = torch.empty((batch, 0), device=device)
        tensor._quantlab_holding = self  # pyright: ignore[reportAttributeAccessIssue]
        return tensor


def _holding(tensor: Any) -> _Holding | None:
    return getattr(tensor, "_quantlab_holding", None)


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
        self._namespaces = _op_namespaces(model)
        for _, family in self._namespaces:
            check_policy_fits(self.policy, family.recurrence)
        self._running: dict[int, list[tuple[int, nn.Module]]] = {}  # by thread
        self._alive: list[tuple[weakref.ref[_Holding], DecodeState]] = []
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
                    stack.callback(module.register_forward_pre_hook(self._enter_layer).remove)
                    stack.callback(module.register_forward_hook(self._leave_layer, always_call=True).remove)
            for namespace, family in self._namespaces:
                _replace(stack, namespace, family.step_op, lambda op, f=family: self._step_adapter(op, f))
                _replace(
                    stack, namespace, family.prefill_op, lambda op, f=family: self._prefill_adapter(op, f)
                )
            _patch_cache_layers(stack)
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

    def adopt(self, holding: _Holding) -> None:
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
    def _calls(self) -> list[tuple[int, nn.Module]]:
        """The recurrent modules that this thread runs now, innermost last."""
        return self._running.setdefault(threading.get_ident(), [])

    def _enter_layer(self, module: nn.Module, args: Any) -> None:
        self._calls.append((module.layer_idx, module))  # pyright: ignore[reportArgumentType]

    def _leave_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._calls:
            self._calls.pop()

    # -- the ops
    def _step_adapter(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:  # another model that shares the module file
                return original(*args, **kwargs)
            layer, module = self._calls[-1]
            self.report.step_hits[family.step_op, layer] += 1
            return family.step(self._find, module, *args, **kwargs)

        return step

    def _prefill_adapter(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        def prefill(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:
                return original(*args, **kwargs)
            layer, module = self._calls[-1]
            self.report.prefill_hits[family.prefill_op, layer] += 1
            given = kwargs.get(family.prefill_state)
            before = None
            if given is not None:
                # Several tokens on top of a stored state: they continue from what the checkpoint holds.
                self._find(given)
                before = _holding(given)
                assert before is not None
                kwargs[family.prefill_state] = family.to_model(before.state.materialize())
            result = original(*args, **kwargs)
            if isinstance(result, tuple) and result[1] is not None:
                key_heads = family.key_heads(module, *args, **kwargs)
                result[1]._quantlab_prefill = _Prefill(self, family, layer, key_heads, before)
            return result

        return prefill

    def _find(self, handle: Tensor) -> DecodeState:
        holding = _holding(handle)
        if holding is None or holding.interception is not self:
            raise InputError(
                "cache",
                tuple(handle.shape),
                f"one filled under policy {self.policy}, not one from outside the block",
            )
        return holding.state

    def hand_off(self, prefill: _Prefill, dense: Tensor) -> Tensor:
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
            seed=self.seed,
            layer=prefill.layer,
            sequence_ids=ids,
        )
        self.report.describe(prefill.layer, state)
        holding = _Holding(self, prefill.family, state)
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
            holding = _holding(recurrent)
            if holding is not None:
                zeros = torch.zeros_like(holding.state.materialize()[rows])
                holding.state.reset(rows, zeros)


def decode_states(cache: Any) -> dict[int, DecodeState]:
    """The decode state of every recurrent layer of ``cache``, by layer index."""
    found = {}
    for number, layer in enumerate(cache.layers):
        for recurrent in getattr(layer, "recurrent_states", {}).values():
            if (holding := _holding(recurrent)) is not None:
                found[number] = holding.state
    return found


def _op_namespaces(model: nn.Module) -> list[tuple[Any, Family]]:
    """(module, family) for every module file of the model that defines a family's step op."""
    if not isinstance(model, nn.Module):
        raise InputError("model", type(model).__name__, "a loaded model (torch.nn.Module)")
    files = {
        cls.__module__: sys.modules[cls.__module__]
        for part in model.modules()
        for cls in type(part).__mro__
        if cls.__module__ in sys.modules
    }
    for namespace in files.values():
        for op, recurrence in UNSUPPORTED_OPS.items():
            if op in vars(namespace):
                raise InputError(
                    "model",
                    type(model).__name__,
                    f"recurrent layers that a policy serves; {recurrence} is not built yet",
                )
    found = [
        (namespace, family)
        for namespace in files.values()
        for family in FAMILIES
        if family.step_op in vars(namespace)
    ]
    if not found:
        ops = ", ".join(family.step_op for family in FAMILIES)
        raise InputError(
            "model", type(model).__name__, f"a model with recurrent layers (one that calls {ops})"
        )
    return found


_MISSING = object()


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``make(current)``, and undo it when the stack closes."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, make(getattr(owner, name, None)))
    if own is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)


def _patch_cache_layers(stack: contextlib.ExitStack) -> None:
    """Teach every linear-attention cache layer about handles.  Layers without one behave as before."""
    from transformers.cache_utils import LinearAttentionLayer as Layer

    def update(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_recurrent_state(
            self: Any, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
        ) -> Tensor:
            if _holding(recurrent_states) is not None:  # the step already moved it
                return recurrent_states
            prefill = getattr(recurrent_states, "_quantlab_prefill", None)
            if prefill is None:
                return original(self, recurrent_states, state_idx, **kwargs)
            handle = prefill.interception.hand_off(prefill, recurrent_states)
            self.recurrent_states[state_idx] = handle
            self.is_recurrent_states_initialized[state_idx] = True
            conv = self.conv_states[state_idx]
            if conv is not None:
                prefill.interception.report.conv_bytes[prefill.layer] = conv[0].numel() * conv.element_size()
            return handle

        return update_recurrent_state

    def reorder(original: Callable[..., Any]) -> Callable[..., Any]:
        def reorder_cache(self: Any, beam_idx: Tensor) -> None:
            held = {index: _holding(tensor) for index, tensor in self.recurrent_states.items()}
            original(self, beam_idx)
            for index, holding in held.items():
                if holding is not None:
                    rows = beam_idx.cpu()
                    holding.state.select(rows)
                    self.recurrent_states[index] = holding.handle(
                        len(rows), self.recurrent_states[index].device
                    )

        return reorder_cache

    def batch_method(
        name: str, rows_of: Callable[[Any, Any], Tensor]
    ) -> Callable[[Any], Callable[..., None]]:
        def method(self: Any, argument: Any) -> None:
            Layer.reorder_cache(self, rows_of(self, argument))  # pyright: ignore[reportArgumentType]
            attention = getattr(super(Layer, self), name, None)  # the other half of a hybrid layer
            if attention is not None:
                attention(argument)

        return lambda _: method

    def repeated(self: Any, repeats: int) -> Tensor:
        batch = next(t for t in self.conv_states.values() if t is not None).shape[0]
        return torch.arange(batch, device=self.device).repeat_interleave(repeats)

    _replace(stack, Layer, "update_recurrent_state", update)
    _replace(stack, Layer, "reorder_cache", reorder)
    select = batch_method("batch_select_indices", lambda _, rows: rows)
    _replace(stack, Layer, "batch_select_indices", select)
    _replace(stack, Layer, "batch_repeat_interleave", batch_method("batch_repeat_interleave", repeated))
    # A handle's attribute does not survive compilation, and generate compiles whatever says that it may be.
    _replace(stack, Layer, "is_compileable", lambda _: False)
