"""Run a Hugging Face model with every recurrent decode state held under a policy.

Two seams, both stable over the supported transformers releases: the recurrent ops are module globals looked
up at call time, and every cache keeps its recurrent states in ``LinearAttentionLayer.recurrent_states``.
While a policy is active the ops are replaced by adapters (``families``) and a cache slot holds an empty
tensor, the *handle*, that points to a decode state of ``quantlab.schemes``.  A handle is made when a
prefill hands its final state over, so any cache created inside, ``generate``'s own included, is covered
without being asked for.

Several tokens on top of a handle are a chunk of a prompt, which the model's own op runs from what the checkpoint
holds and which ends in one more store; or, if the cache records its past, drafts, which ``crop`` takes back.

The convolution state is left alone, in the model's own precision.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.cache_layers import patch_cache_layers
from quantlab.models.checks import check_model
from quantlab.models.device_states import DeviceLayers, HeldState, served
from quantlab.models.families import Family
from quantlab.models.families.base import refuse_packed
from quantlab.models.handles import Holding, Prefill, check_drafts, holding_of
from quantlab.models.patching import enter, replace
from quantlab.models.recurrent_layers import check_heads, op_namespaces, recurrent_layers
from quantlab.models.report import PolicyReport
from quantlab.models.running import Running, RunningLayers
from quantlab.recurrences import StepInputs
from quantlab.schemes import Policy, PolicyRules, checks, parse_rules, start_groups
from quantlab.schemes.policy import MAXIMUM_WINDOW
from quantlab.schemes.rows import DRAFTS
from quantlab.schemes.rules import number_text

_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


@contextlib.contextmanager
def run_with_policy(
    model: nn.Module,
    policy: str | Path | Policy | PolicyRules,
    *,
    seed: int = 0,
    sequence_ids: Sequence[int] | None = None,
    drafts: int = DRAFTS,
) -> Iterator[PolicyReport]:
    """``with run_with_policy(model, "fp32/nvfp4@16") as report: model.generate(...)``.

    Every cache that is created inside decodes under ``policy``: a policy or its text, or rules for layers and heads,
    parsed or the path of a .toml file; ``report`` says what happened.  The state left by a prefill is rounded once into
    every stored copy.  ``seed`` keys stochastic rounding; ``sequence_ids`` names the sequences of the batch for it
    (default 0, 1, ...).  ``drafts``: tokens that one forward of a cache that records its past may read (assisted
    generation: the candidates and one more).  Everything is restored on exit.

    Raises InputError for a model without recurrent layers or with layers that no adapter serves, for a compiled one
    and one without its weights, for rules about layers or heads that it does not have, inside another such block, for a
    cache that was filled outside, for a layer whose decays are not one for each head of its state, and, on a clean
    exit, unless every decode step went through the policy in every recurrent layer.
    """
    interception = Interception(model, policy, seed=seed, drafts=drafts)
    if sequence_ids is not None:
        try:
            count = len(sequence_ids)
        except TypeError:
            raise InputError("sequence_ids", sequence_ids, "one integer for each sequence") from None
        interception.sequence_ids = checks.sequence_ids(sequence_ids, count)
    with interception:
        yield interception.report
    interception.require_effect()


class Observer(Protocol):
    """What sees the inputs of the decode states, before any rounding."""

    def started(self, prefill: Prefill, initial: Tensor) -> None:
        """A layer's prefill ended in ``initial``: (B, heads, value_dim, key_dim)."""

    def decoded(self, layer: int, inputs: StepInputs) -> None:
        """A layer is about to decode one token: tensors (B, ...)."""


class Interception:
    """A policy, or rules for layers and heads, bound to a model.  A context manager that may be entered again and
    again; its report adds up.  It does not keep the model alive.

    ``sequence_ids``: int64 (B,) names of the sequences that the next prefill starts, or None for 0 .. B-1.
    ``observer``: told of every layer that starts and of every token that one decodes, or None.
    pools: whether states are held in pooled memory, which kernels decode on: by default where they can; True wherever
    there is a layout, False nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Path | Policy | PolicyRules,
        *,
        seed: int = 0,
        drafts: int = DRAFTS,
        pools: bool | None = None,
    ):
        check_model(model)
        self.rules = parse_rules(policy)
        for name, value, limit in (("seed", seed, None), ("drafts", drafts, MAXIMUM_WINDOW)):
            if not checks.is_integer(value) or (limit is not None and not 0 <= value <= limit):
                raise InputError(name, value, "an integer" + ("" if limit is None else f" from 0 to {limit}"))
        self.seed, self.drafts = seed, drafts
        self.sequence_ids: Tensor | None = None
        self.observer: Observer | None = None
        self._namespaces = op_namespaces(model)
        layers = recurrent_layers(model)
        heads = {layer: found.heads for layer, found in layers.items()}
        self.rules.check(heads, {layer: found.family.recurrence for layer, found in layers.items()})
        self.report = PolicyReport(self.rules, heads, self.living)
        self._model = weakref.ref(model)
        self._running = RunningLayers()
        self._alive: list[tuple[weakref.ref[Holding], HeldState]] = []
        self._pools = pools
        # Of the prefill that each thread is at, for its layers to come; their states keep it.
        self._device_layers: weakref.WeakValueDictionary[int, DeviceLayers] = weakref.WeakValueDictionary()
        self._undo: contextlib.ExitStack | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Interception":
        return self  # it is of one model; what is copied is a cache, or the model

    def __reduce__(self) -> Any:
        expected = (
            "nothing to pickle: save_pretrained writes a model, copy.deepcopy copies a model or a cache"
        )
        raise InputError("policy", self.rules.text, expected)

    def __enter__(self) -> "Interception":
        model = self._model()
        if model is None:
            raise InputError("model", None, "a model that is still there")
        if self._undo is not None:
            raise InputError("policy", self.rules.text, "not to be entered twice at once")
        with contextlib.ExitStack() as stack:
            enter(stack, model, self.rules.text)
            self._running.watch(model, stack)
            for namespace, family in self._namespaces:
                replace(stack, namespace, family.step_op, lambda op, f=family: self._step_adapter(op, f))
                replace(
                    stack,
                    namespace,
                    family.prefill_op,
                    lambda op, f=family: self._prefill_adapter(op, f, f.prefill_op),
                )
            patch_cache_layers(stack)
            # What generate asks before it lets an assistant propose tokens: whether they cannot be taken back.
            _answer(stack, model, "_is_stateful", False)
            # A handle's attribute does not survive compilation.  (Layers that say so would do, but masks for static
            # caches ask them too.)
            _answer(stack, model, "_valid_auto_compile_criteria", _never)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.close()

    def require_effect(self) -> None:
        """InputError unless every decode step went through the policy in every recurrent layer."""
        hits = self.report.decode_hits
        most = max(hits.values())
        if most == 0:
            expected = f"at least one decode step in the block; it touched nothing: {self._why_nothing()}"
            raise InputError("policy", self.rules.text, expected)
        # A forward that raised may have reached some layers and not others.
        missed = [layer for layer, count in hits.items() if count + self._running.abandoned < most]
        if missed:
            count = min(hits[layer] for layer in missed)
            found = f"missed at layers {number_text(missed)}, which took {count} of {most} decode steps"
            raise InputError("policy", self.rules.text, f"every recurrent layer under it; {found}")

    def _why_nothing(self) -> str:
        if self.report.uncached_hits and self.report.uncached_hits == self.report.prefill_hits:
            return "every forward ran without a cache (use_cache=True keeps one)"
        if self.report.prefill_hits:
            return "prompts were read and no token after them"
        return "the model's recurrent layers did not run"

    def adopt(self, holding: Holding) -> None:
        """Count what this holding's state exercised, even after its cache is gone."""
        self._alive.append((weakref.ref(holding), holding.state))

    def living(self) -> list[HeldState]:
        """The states whose caches still exist; the others are counted for good and let go."""
        for ref, state in self._alive:
            if ref() is None:
                self.report.count(state)
        self._alive = [(ref, state) for ref, state in self._alive if ref() is not None]
        return [state for _, state in self._alive]

    def forget(self, states: Iterable[HeldState]) -> None:
        """Their sequences are over and were counted by whoever ran them, row by row."""
        over = {id(state) for state in states}
        self._alive = [(ref, state) for ref, state in self._alive if id(state) not in over]

    # -- the ops
    def _step_adapter(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            running = self._running.innermost()
            if running is None:  # another model that shares the module file
                return original(*args, **kwargs)
            if family.decodes is not None and not family.decodes(running.module, *args, **kwargs):
                return self._prefill_adapter(original, family, family.step_op)(*args, **kwargs)
            self.report.step_hits[family.step_op, running.layer] += 1
            call = family.token_inputs(running.module, *args, **kwargs)
            if self.observer is not None:
                self.observer.decoded(running.layer, call.inputs)
            return call.finish(self._find(call.state).step(call.inputs), call.state)

        return step

    def _prefill_adapter(self, original: Callable[..., Any], family: Family, op: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running = self._running.innermost()
            if running is None:
                return original(*args, **kwargs)
            if family.decodes is None:
                refuse_packed(running.module, kwargs)
            place, name = (op, running.layer), family.prefill_state
            handle = running.cached_state() if name is None else kwargs.get(name)
            before = None if handle is None else self._find(handle)
            if before is not None and before.recording:
                call = family.chunk_inputs(running.module, *args, **kwargs)
                self.report.verify_hits[place] += 1
                return call.finish(before.verify(call.inputs), handle)
            self.report.prefill_hits[place] += 1
            if before is not None:
                before.accept()
                if name is None:
                    call = family.chunk_inputs(running.module, *args, **kwargs)
                    return call.finish(before.state.extend(call.inputs), handle)
                kwargs[name] = family.to_model(before.state.materialize())
            elif last := self._kept_back(family, running, args):
                return self._recorded_prefill(original, family, running, last, args, kwargs)
            with self._running.nothing():  # an op may be made of others, the step op for one
                result = original(*args, **kwargs)
            if not isinstance(result, tuple) or result[1] is None:
                self.report.uncached_hits[place] += 1
                return result
            key_heads = family.key_heads(running.module, *args, **kwargs)
            rates = None if family.rates is None else family.rates(running.module, *args, **kwargs)
            prefill = Prefill(self, family, running.layer, key_heads, rates, before)
            if family.decodes is not None:
                return (result[0], self.hand_off(prefill, result[1]), *result[2:])
            prefill.ride(result[1])
            return result

        return run

    def _kept_back(self, family: Family, running: Running, args: tuple[Any, ...]) -> int:
        """How many tokens at the end of a prompt ``crop`` must be able to take back."""
        if not getattr(running.cache_layer(), "record_past", False):
            return 0
        count = args[0].shape[family.token_dim]
        kept = self._running.logits_kept()
        if kept is None:
            return min(self.drafts, count - 1)
        # generate asks for the logits of its candidates and of the token before them.
        check_drafts(kept - 1, self.drafts)
        return min(kept, count) - 1

    def _recorded_prefill(
        self,
        original: Callable[..., Any],
        family: Family,
        running: Running,
        last: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A prefill of all tokens but the ``last`` ones, which are drafts behind it."""
        dim, count = family.token_dim, args[0].shape[family.token_dim]

        def part(first: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def take(value: Any) -> Any:
                # What there is for each token has a batch and a channel dimension beside it.
                tokens = isinstance(value, Tensor) and value.ndim >= 3
                return value.narrow(dim, first, length) if tokens else value

            return tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()}

        own, options = part(0, count - last)
        with self._running.nothing():
            outputs, dense = original(*own, **options)
        key_heads = family.key_heads(running.module, *args, **kwargs)
        rates = None if family.rates is None else family.rates(running.module, *args, **kwargs)
        handle = self.hand_off(Prefill(self, family, running.layer, key_heads, rates, None), dense)
        own, options = part(count - last, last)
        call = family.chunk_inputs(running.module, *own, **options)
        self.report.verify_hits[family.prefill_op, running.layer] += 1
        holding = self._find(handle)
        holding.sit_in(running.cache_layer())
        drafted, handle = call.finish(holding.verify(call.inputs), handle)
        return torch.cat([outputs, drafted], dim), handle

    def _find(self, handle: Tensor | None) -> Holding:
        holding = holding_of(handle)
        if holding is None or holding.interception is not self:
            raise InputError(
                "cache",
                None if handle is None else tuple(handle.shape),
                f"one filled under policy {self.rules.text}, not one from outside the block",
            )
        return holding

    def hand_off(self, prefill: Prefill, dense: Tensor) -> Tensor:
        """The handle of a layer whose prefill ended in ``dense`` (the model's layout, unrounded)."""
        initial = prefill.family.to_state(dense)
        self.report.state_dtype = str(dense.dtype).removeprefix("torch.")
        holding = prefill.continues
        if holding is None:
            holding = self._start(prefill, initial)
        else:
            holding.state.store(initial)
        return holding.handle(len(initial), initial.device)

    def _start(self, prefill: Prefill, initial: Tensor) -> Holding:
        """A holding that begins at a prefill state (B, heads, value_dim, key_dim)."""
        self.living()
        if self.observer is not None:
            self.observer.started(prefill, initial)
        batch, heads, value_dim, key_dim = initial.shape
        check_heads(prefill.layer, self.report.layers[prefill.layer], heads)
        ids = self.sequence_ids
        if ids is not None and len(ids) != batch:
            raise InputError(
                "sequence_ids", len(ids), f"one name for each of the {batch} sequences of the batch"
            )
        groups, recurrence = self.rules.of_layer(prefill.layer, heads), prefill.family.recurrence
        shape = checks.state_shape(heads, value_dim, key_dim, prefill.key_heads)
        pooled, backend = served(groups, recurrence, shape, initial.device, self._pools)
        if pooled:
            layers = self._layers_of(prefill.layer, initial)
            state = layers.add(prefill.layer, groups, recurrence, initial, prefill.key_heads)
        else:
            state = start_groups(
                groups,
                recurrence,
                initial,
                key_heads=prefill.key_heads,
                rates=prefill.rates,
                seed=self.seed,
                layer=prefill.layer,
                sequence_ids=ids,
                drafts=self.drafts,
            )
        self.report.describe(prefill.layer, state, backend)
        holding = Holding(self, prefill.family, state)
        self.adopt(holding)
        return holding

    def _layers_of(self, layer: int, initial: Tensor) -> DeviceLayers:
        """Where the prefill that this thread runs holds its layers; ``layer`` is not among them yet."""
        thread, place = threading.get_ident(), (len(initial), initial.device)
        layers = self._device_layers.get(thread)
        # The same layer once more is another prompt.
        if layers is None or (layers.batch, layers.device) != place or layer in layers.numbers:
            names = self.sequence_ids
            layers = DeviceLayers(*place, sequence_ids=names, seed=self.seed, drafts=self.drafts)
            self._device_layers[thread] = layers
        return layers


def _answer(stack: contextlib.ExitStack, model: nn.Module, name: str, value: Any) -> None:
    """Let its class give ``model``, and no copy of it, another attribute until ``stack`` closes."""
    if hasattr(type(model), name):
        replace(stack, type(model), name, lambda own: _Answer(weakref.ref(model), value, own))


def _never(*_: Any, **__: Any) -> bool:
    return False


class _Answer:
    """An attribute of a class that is ``value`` for one object and ``own``, what the class had, for all others."""

    def __init__(self, model: "weakref.ref[nn.Module]", value: Any, own: Any):
        self._model, self._value, self._own = model, value, own

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None and instance is self._model():
            return self._value
        bind = getattr(type(self._own), "__get__", None)
        return self._own if bind is None else bind(self._own, instance, owner)


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
                shape = holding.state.shape
                zeros = recurrent.new_zeros(len(rows), shape.heads, shape.value_dim, shape.key_dim)
                holding.state.reset(rows, zeros)


def decode_states(cache: Any) -> dict[int, HeldState]:
    """The decode state of every recurrent layer of ``cache``, by layer index."""
    found = {}
    for number, layer in enumerate(cache.layers):
        for recurrent in getattr(layer, "recurrent_states", {}).values():
            if (holding := holding_of(recurrent)) is not None:
                found[number] = holding.state
    return found
