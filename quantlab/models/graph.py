"""Decoding on a GPU, one CUDA graph a step: recurrent states in pools under a policy, everything else where it is.

The shapes of a decode step never change, and which rows of a window are folded is decided on the device, so one
captured step serves every token.  On a CPU the same step runs eagerly through the torch twins of the kernels.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.errors import InputError
from quantlab.models.checks import check_model, in_memory
from quantlab.models.families import Family, mamba2
from quantlab.models.forwards import check_count, check_tokens
from quantlab.models.fusion import fuse, fused_token
from quantlab.models.interception import cache_keyword
from quantlab.models.patching import enter_step
from quantlab.models.patching import replace as patch
from quantlab.models.recurrent_layers import check_heads, op_namespaces, recurrent_layers
from quantlab.models.running import RunningLayers
from quantlab.models.static_cache import (
    capturable_experts,
    clear,
    fill_rows,
    group_attention,
    set_length,
    static_cache,
)
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.schemes import Policy, PolicyRules, backend, checks, parse_rules
from quantlab.schemes.ledger import ByteLedger, StateShape, add_ledgers, ledger
from quantlab.schemes.pool import LayerPool, SlotCounters, allocate_pool
from quantlab.schemes.store import Diverged

PROMPTS_AT_ONCE = 8
"""Rows of a prefill that the model reads together."""
CHECKED_EVERY = 16
"""Steps of ``generate`` between two looks at whether the logits are finite; each waits for the device."""


@dataclass(frozen=True)
class GraphReport:
    """What a ``DecodeGraph`` did.

    policy: canonical text.  steps: tokens that every recurrent layer decoded under it since the prefill.  backends:
    what serves each layer's step.  stores: of a checkpoint since the prefill's, minimum over sequences and layers.
    ledger: bytes of one sequence, summed over the layers.
    """

    policy: str
    steps: int
    backends: dict[int, str]
    stores: int
    ledger: ByteLedger


class DecodeGraph:
    """``batch`` sequences of a model, of up to ``length`` tokens, decoded together under a policy.

        graph = DecodeGraph(model, "fp16+sr/nvfp4@16:buffer=bf16", batch=256, length=512)
        logits = graph.prefill(ids)              # (batch, n): prompts of one length, without padding
        logits = graph.step(logits.argmax(-1))   # (batch, vocabulary), overwritten by the next step

    A policy may differ from layer to layer, not within one.  q, k and v of a token are rounded to the model's dtype on
    their way to the kernels, as its own activations are; a model in float32 decodes as ``run_with_policy`` does.

    Raises InputError for a model that ``run_with_policy`` would refuse, for a policy that pools have no layout for and,
    on a GPU, one that no kernel serves, for Mamba-1, whose states pools do not hold, for a length or a batch that is no
    positive integer or that no memory holds, inside of a block of the same model, and while another thread is inside of
    one or of a step on the CPU; when it is copied or pickled.  Where an exception ended a prefill or a step, the
    sequences are lost.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Path | Policy | PolicyRules,
        batch: int,
        length: int,
        *,
        seed: int = 0,
    ):
        check_model(model)
        for name, value in (("batch", batch), ("length", length)):
            if not checks.is_integer(value) or value < 1:
                raise InputError(name, value, "an integer of at least 1")
        self.rules, self.batch, self.length, self._model = parse_rules(policy), batch, length, model
        found = recurrent_layers(model)
        self.rules.check(
            {layer: each.heads for layer, each in found.items()},
            {layer: each.family.recurrence for layer, each in found.items()},
        )
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._running, self._namespaces = RunningLayers(), op_namespaces(model)
        self._families = {layer: each.family for layer, each in found.items()}
        shapes, filled = self._geometry()
        for layer, shape in shapes.items():
            check_heads(layer, found[layer].heads, shape.heads)
        self._shared: dict[int, SlotCounters] = {}
        fitting = f"sequences of {length} tokens that fit into the memory of {self.device}"
        with in_memory("batch", batch, fitting):
            self.pools = {layer: self._pool(layer, shape, seed) for layer, shape in shapes.items()}
        self._serving = {layer: self._backends(pool) for layer, pool in self.pools.items()}
        with in_memory("batch", batch, fitting):
            self.cache: Any = static_cache(model.config, filled, batch, length)
            self.slots = torch.arange(batch, dtype=torch.int32, device=self.device)
            self.tokens = torch.zeros((batch, 1), dtype=torch.long, device=self.device)
        self._positions = self._number_positions()
        self._plans: dict[int, Any] = {}
        self._skips: dict[int, tuple[Tensor, Tensor]] = {}
        self._fused: list[Any] = []
        self._held = self._steps = 0
        self._placed = self._places()
        self._graph, self.logits = None, torch.empty(0)
        if self.device.type == "cuda":
            self._capture()

    def __reduce_ex__(self, _: Any) -> Any:
        """Of copies and pickles: a captured step is of the memory that it was captured in."""
        raise InputError(
            "DecodeGraph", self.rules.text, "no copy and no pickle of it: make another DecodeGraph"
        )

    @torch.no_grad()
    def prefill(self, ids: Tensor, *, at_once: int = PROMPTS_AT_ONCE) -> Tensor:
        """New sequences from ids (batch, n), n below ``length``.  Returns the last tokens' logits (batch, vocabulary).

        The model reads ``at_once`` rows at a time by its own ops; the state that it is left with is rounded once into
        every stored copy.
        """
        self._check_prompts(ids)
        check_count("at_once", at_once)
        self._check_places()
        ids, logits = check_tokens(self._model, ids, 1, "a prompt"), []
        self._held = 0  # until all have been read
        clear(self.cache)
        for counters in self._shared.values():
            for counter in (counters.cursor, counters.origin, counters.pending, counters.store_numbers):
                counter.zero_()
        for rows in torch.arange(self.batch, device=self.device).split(at_once):
            with contextlib.ExitStack() as stack:
                enter_step(stack, self._model, self.rules.text, reads=True)
                filled, found = self._read(ids[rows])
            logits.append(found)
            fill_rows(self.cache, filled, rows)
            for layer, pool in self.pools.items():
                dense = self._families[layer].to_state(filled.layers[layer].recurrent_states[0].float())
                self.load_states(pool, self.slots[rows], dense)
        self.resume(ids.shape[1])
        return torch.cat(logits)

    def _check_prompts(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise InputError("ids", type(ids).__name__, f"a tensor ({self.batch}, n)")
        if ids.ndim != 2 or ids.shape[0] != self.batch or not 0 < ids.shape[1] < self.length:
            raise InputError("ids", tuple(ids.shape), f"({self.batch}, n) with n from 1 to {self.length - 1}")

    def load_states(self, pool: LayerPool, slots: Tensor, dense: Tensor) -> None:
        """Hand unrounded states (n, heads, value_dim, key_dim) to slots of one of ``pools``."""
        self._serving[pool.layer]["load_states"].function(pool, slots, dense)

    def resume(self, held: int) -> None:
        """Every sequence holds ``held`` tokens, as whoever filled pools and caches knows."""
        self._held, self._steps = held, 0
        set_length(self.cache, held)
        self._positions.fill_(held)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Decode one token a sequence: tokens (batch,), what each just got.  Returns logits (batch, vocabulary), in
        memory that the next step writes again.  Does not wait for the device.
        """
        if not self._held:
            raise InputError("step", "before any prompt", "prefill(ids) first")
        if self._held == self.length:
            raise InputError("length", self.length, f"at least {self.length + 1} for another token")
        if not isinstance(tokens, Tensor) or tuple(tokens.shape) != (self.batch,):
            found = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InputError("tokens", found, f"({self.batch},)")
        if tokens.device.type != "cuda":
            tokens = check_tokens(self._model, tokens[:, None], 1, "one a row", "tokens")[:, 0]
        elif tokens.is_floating_point():  # their values are on the device, and nobody looks
            raise InputError("tokens", str(tokens.dtype), "whole numbers")
        if self._graph is None:
            self._check_places()
        self.tokens.copy_(tokens[:, None])
        held, self._held = self._held, 0  # what an exception leaves in the middle is no state of anything
        self.replay()
        self._held, self._steps = held + 1, self._steps + 1
        return self.logits

    @torch.no_grad()
    def replay(self) -> None:
        """A step with the tokens of the last one, unchecked and uncounted."""
        if self._graph is None:
            with self._patched():
                self.logits = self._forward()
        else:
            self._graph.replay()

    def generate(self, ids: Tensor, count: int) -> Tensor:
        """The greedy continuation (batch, count) of prompts (batch, n).

        It does not stop at an end-of-sequence token: every row gets ``count`` tokens.  The last of them is not read, so
        that n + count - 1 may be ``length``; InputError beyond it, before anything is read.  Raises Diverged once
        logits are not finite.
        """
        check_count("count", count)
        self._check_prompts(ids)
        most = self.length + 1 - ids.shape[1]
        if count > most:
            expected = f"at most {most}: prompts of {ids.shape[1]} tokens in a length of {self.length}"
            raise InputError("count", count, expected)
        logits, found = self.prefill(ids), []
        for number in range(count):
            if number % CHECKED_EVERY == 0 or number == count - 1:
                finite = logits.isfinite().all(-1)
                if not bool(finite.all()):
                    rows = (~finite).nonzero()[:, 0].tolist()
                    raise Diverged(f"logits of rows {rows} are not finite by token {number}")
            found.append(logits.argmax(-1))
            if number < count - 1:
                logits = self.step(found[-1])
        return torch.stack(found, 1)

    @property
    def report(self) -> GraphReport:
        """Waits for the device."""
        # Store 0 is the prefill's.
        stores = [int(counters.store_numbers.min()) for counters in self._shared.values()]
        return GraphReport(
            policy=self.rules.text,
            steps=self._steps,
            backends={layer: str(found["decode_token"]) for layer, found in self._serving.items()},
            stores=min(stores),
            ledger=add_ledgers(
                ledger(pool.policy, get_recurrence(pool.family), pool.shape) for pool in self.pools.values()
            ),
        )

    # -- setting up
    def _number_positions(self) -> Tensor:
        """Position ids of a step: one for all rows here (1, 1)."""
        return torch.zeros((1, 1), dtype=torch.long, device=self.device)

    def _geometry(self) -> tuple[dict[int, StateShape], Any]:
        """The state of every recurrent layer, and the cache behind a prompt of two tokens, for its shapes."""
        key_heads: dict[int, int] = {}

        def noting(original: Callable[..., Any], family: Family) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if (running := self._running.innermost()) is not None:
                    key_heads[running.layer] = family.key_heads(running.module, *args, **kwargs)
                return original(*args, **kwargs)

            return run

        with contextlib.ExitStack() as stack:
            enter_step(stack, self._model, self.rules.text, reads=True)
            self._running.watch(self._model, stack)
            for file, family in self._namespaces:
                patch(stack, file, family.prefill_op, lambda op, f=family: noting(op, f))
            filled, _ = self._read(torch.zeros((1, 2), dtype=torch.long, device=self.device))
        shapes = {}
        for layer, family in self._families.items():
            states = getattr(filled.layers[layer], "recurrent_states", {})
            if family.rates is not None or family.decodes is not None or states.get(0) is None:
                raise InputError(
                    "model", f"{family.recurrence} at layer {layer}", "layers whose states a pool holds"
                )
            _, heads, value_dim, key_dim = family.to_state(states[0]).shape
            shapes[layer] = StateShape(heads, value_dim, key_dim, key_heads[layer])
        return shapes, filled

    def _pool(self, layer: int, shape: StateShape, seed: int) -> LayerPool:
        group, *others = self.rules.of_layer(layer, shape.heads)
        if others:
            raise InputError(
                "policy", self.rules.text, f"one policy for all heads of a layer, of layer {layer} too"
            )
        policy, family = group.policy, self._families[layer].recurrence
        shared = self._shared.get(policy.window)
        (pool,) = allocate_pool(
            policy, family, shape, self.batch, layers=[layer], seed=seed, device=self.device, counters=shared
        )
        # Windows of one length move together.
        self._shared[policy.window] = pool.counters
        return pool

    def _backends(self, pool: LayerPool) -> dict[str, backend.Backend]:
        work = pool.policy, pool.family, pool.shape
        names = ("begin_step", "decode_token", "end_step", "load_states")
        found = {name: backend.choose(f"steps.{name}", self.device, *work) for name in names}
        token = found["decode_token"]
        if self.device.type == "cuda" and token.kind != "triton":
            raise InputError("policy", str(pool.policy), f"one that kernels serve: {token.reason}")
        return found

    def _read(self, ids: Tensor) -> tuple[Any, Tensor]:
        """The cache behind prompts, and the logits (rows, vocabulary) of their last tokens."""
        from transformers import DynamicCache

        config: Any = self._model.config
        cache = DynamicCache(config=config)
        return cache, self._call(ids, cache)

    def _call(self, ids: Tensor, cache: Any, **options: Any) -> Tensor:
        takes = inspect.signature(self._model.forward).parameters
        options |= {"logits_to_keep": 1, cache_keyword(self._model): cache, "use_cache": True}
        return self._model(ids, **{name: value for name, value in options.items() if name in takes}).logits[
            :, -1
        ]

    def _capture(self) -> None:
        """What the warm-up leaves in states, counters and caches, the prefill overwrites."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), self._patched():
            with torch.cuda.stream(stream):
                self._forward()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._forward()
        self._graph = graph

    def _places(self) -> list[tuple[Any, ...]]:
        """Where the weights are and what they are, as far as this depends on it: a captured step reads memory."""
        captured = self.device.type == "cuda"
        return [
            (weight.dtype, weight.device, weight.data_ptr() if captured else 0)
            for weight in self._model.parameters()
        ]

    def _check_places(self) -> None:
        if self._places() != self._placed:
            expected = "weights of the dtype and in the memory that they had: make another DecodeGraph"
            raise InputError("model", type(self._model).__name__, expected)

    # -- a step
    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            enter_step(stack, self._model, self.rules.text, reads=False)
            self._running.watch(self._model, stack)
            self._attend(stack)
            capturable_experts(stack, self._model)
            self._skips.clear()
            files = [file for file, _ in self._namespaces]
            self._fused = fuse(stack, self._model, files, self._skips)
            for file, family in self._namespaces:
                patch(stack, file, family.step_op, lambda op, f=family: self._adapter(op, f))
            yield

    def _forward(self) -> Tensor:
        with self.windows():
            logits = self._call(self.tokens, self.cache, position_ids=self._positions)
        assert not self._skips, "a norm that was to add D x did not run"
        self._advance()
        return logits

    def _attend(self, stack: contextlib.ExitStack) -> None:
        group_attention(stack, self._model)

    def _advance(self) -> None:
        self._positions.add_(1)

    @contextlib.contextmanager
    def windows(self) -> Iterator[None]:
        """One token of every sequence: inside, ``decode`` once a layer."""
        for window, counters in self._shared.items():
            self._plans[window] = self._op(window, "begin_step")(counters, self.slots, window)
        yield
        for window, plan in self._plans.items():
            self._op(window, "end_step")(plan)

    def decode(self, layer: int, inputs: StepInputs, output: Tensor | None = None) -> Tensor:
        """A layer's outputs (batch, heads, value_dim) for one token, in ``output`` or in the dtype of ``inputs.v``."""
        pool = self.pools[layer]
        plan = self._plans[pool.policy.window]
        return self._serving[layer]["decode_token"].function(pool, inputs, plan, output)

    def _op(self, window: int, name: str) -> Callable[..., Any]:
        layer = next(layer for layer, pool in self.pools.items() if pool.policy.window == window)
        return self._serving[layer][name].function

    def _adapter(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            running = self._running.innermost()
            if running is None:
                return original(*args, **kwargs)
            if family is mamba2.FAMILY and (
                token := fused_token(running.module, self._skips, *args, **kwargs)
            ):
                return self.decode(running.layer, token, torch.empty_like(token.v, dtype=torch.float32))
            call = family.token_inputs(running.module, *args, **kwargs)
            gates = ("log_decay", "beta")
            given = {
                name: value.to(value.dtype if name in gates else self.dtype).contiguous()
                for name, value in vars(call.inputs).items()
                if value is not None
            }
            inputs = replace(call.inputs, **given)
            return call.finish(self.decode(running.layer, inputs, torch.empty_like(inputs.v)), call.state)

        return step
