"""What a model did under a policy: the object that ``run_with_policy`` yields."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quantlab.models.device_states import HeldState
from quantlab.schemes import ByteLedger, PolicyRules, add_ledgers
from quantlab.schemes.rules import number_text


class Described(Protocol):
    """What a report takes down of a layer's decode state."""

    @property
    def effective_policy(self) -> str: ...

    @property
    def ledger(self) -> ByteLedger: ...

    @property
    def held_as(self) -> str: ...


class PolicyReport:
    """Filled while the model runs; read it at any time.

    policy: canonical text, of rules too.  layers: {layer: heads of its state} of all recurrent layers.
    step_hits, verify_hits, prefill_hits: calls of the recurrent ops by (op, layer), for one decoded token, for several
    that may be taken back, and for a prompt or a chunk of it; a prompt whose last tokens may be taken back counts as
    both.  uncached_hits: those of prefill_hits that ran without a cache, so that no state was kept.  state_dtype:
    what the model itself would have kept its state in.  backends: {layer: what decodes it and where, "triton on cuda:0:
    ..." or "torch on cuda:0: ..." with the reason}.  held_as: {layer: dtype of the checkpoint's memory}.
    conv_bytes: {layer: bytes per sequence} of the convolution states, which no policy touches.
    """

    def __init__(self, rules: PolicyRules, layers: Mapping[int, int], living: Callable[[], list[HeldState]]):
        self.policy = rules.text
        self.layers = dict(layers)
        self.step_hits: Counter[tuple[str, int]] = Counter()
        self.verify_hits: Counter[tuple[str, int]] = Counter()
        self.prefill_hits: Counter[tuple[str, int]] = Counter()
        self.uncached_hits: Counter[tuple[str, int]] = Counter()
        self.state_dtype: str | None = None
        self.backends: dict[int, str] = {}
        self.held_as: dict[int, str] = {}
        self.conv_bytes: dict[int, int] = {}
        self._rules = rules
        self._living = living
        self._ended: dict[str, int | None] = {}
        self._ledgers: dict[int, ByteLedger] = {}
        self._effective: dict[int, str] = {}

    def describe(self, layer: int, state: Described, backend: str) -> None:
        """Take down what is fixed once a layer's decode state exists.  backend: what decodes it, in words."""
        self.backends[layer] = backend
        self._effective[layer] = state.effective_policy
        self.held_as[layer] = state.held_as
        self._ledgers[layer] = state.ledger

    def count(self, state: HeldState) -> None:
        """Take this state's sequences as ended: their exercised counts enter the minimum for good."""
        self.count_stores(state.exercised)

    def count_stores(self, exercised: dict[str, int | None]) -> None:
        """``count`` where somebody else has the numbers of the sequences that ended."""
        self._ended = _smaller(self._ended, exercised)

    @property
    def effective_policy(self) -> str:
        """With the defaults of the model's recurrence filled in; where layers differ, by layer."""
        by_text: dict[str, list[int]] = {}
        for layer, text in sorted(self._effective.items()):
            by_text.setdefault(text, []).append(layer)
        if len(by_text) < 2:
            return next(iter(by_text), self.policy)
        return "; ".join(f"layers {number_text(layers)}: {text}" for text, layers in by_text.items())

    @property
    def op_hits(self) -> dict[str, dict[str, int]]:
        """{op: {layer: calls}}, decode-step and prefill ops, keys as text."""
        table: dict[str, dict[str, int]] = {}
        for (op, layer), calls in sorted((self.step_hits + self.verify_hits + self.prefill_hits).items()):
            table.setdefault(op, {})[str(layer)] = calls
        return table

    @property
    def decode_hits(self) -> dict[int, int]:
        """{layer: decode forwards that went through the policy}, of all recurrent layers."""
        hits = dict.fromkeys(self.layers, 0)
        for (_, layer), calls in (self.step_hits + self.verify_hits).items():
            hits[layer] = hits.get(layer, 0) + calls
        return hits

    @property
    def coverage(self) -> dict[int, dict[str, float]]:
        """{layer: {policy: fraction of the layer's state values that it governs}}, of all recurrent layers."""
        return {
            layer: {
                str(group.policy): len(group.heads) / heads for group in self._rules.of_layer(layer, heads)
            }
            for layer, heads in sorted(self.layers.items())
        }

    def touched(self, layer: int) -> float:
        """Fraction of the decode forwards that went through the policy in this layer: 1 unless it was passed over."""
        hits = self.decode_hits
        most = max(hits.values(), default=0)
        return hits.get(layer, 0) / most if most else 0.0

    @property
    def exercised(self) -> dict[str, int | None]:
        """Distinct stores that a later step read back, minimum over sequences and layers, per stored copy."""
        living = self._living()  # first: it may end some
        smallest = self._ended
        for state in living:
            smallest = _smaller(smallest, state.exercised)
        return {"checkpoint": smallest.get("checkpoint"), "read_copy": smallest.get("read_copy")}

    @property
    def ledger(self) -> ByteLedger:
        """Bytes of one sequence, summed over the recurrent layers, part by part; empty before the first
        prefill.
        """
        return add_ledgers(self._ledgers.values())

    def __str__(self) -> str:
        """Policy, calls of each op in each layer, exercised counts and bytes; ``as_dict`` has everything."""
        counts = ", ".join(
            f"{part.replace('_', ' ')} {count}" for part, count in self.exercised.items() if count is not None
        )
        lines = [f"policy: {self.policy}"]
        for op, calls in self.op_hits.items():
            by_count: dict[int, list[int]] = {}
            for layer, count in calls.items():
                by_count.setdefault(count, []).append(int(layer))
            told = (f"{count} call(s) in layers {number_text(layers)}" for count, layers in by_count.items())
            lines.append(f"{op}: {', '.join(told)}")
        silent = [layer for layer, count in self.decode_hits.items() if not count]
        if silent:
            lines.append(f"no decode step in layers {number_text(silent)}")
        lines.append(f"exercised: {counts or 'nothing'}")
        if self._ledgers:
            lines.append(f"bytes per token: {self.ledger.bytes_per_token:,.0f}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for a record or a results file."""
        ledger = self.ledger
        return {
            "policy": self.policy,
            "effective_policy": self.effective_policy,
            "op_hits": self.op_hits,
            "coverage": {str(layer): shares for layer, shares in self.coverage.items()},
            "touched": {str(layer): self.touched(layer) for layer in self.coverage},
            "exercised": self.exercised,
            "state_dtype_of_the_model": self.state_dtype,
            "state_held_as": {str(layer): text for layer, text in sorted(self.held_as.items())},
            "backends": {str(layer): text for layer, text in sorted(self.backends.items())},
            "conv_state_bytes": sum(self.conv_bytes.values()),
            "ledger": {side: getattr(ledger, side) for side in ("read", "written", "held")},
            "bits_per_value": ledger.bits_per_value if ledger.values else None,
            "bytes_per_token": ledger.bytes_per_token,
            "bytes_read_per_token": ledger.bytes_read_per_token,
            "bytes_written_per_token": ledger.bytes_written_per_token,
        }


def _smaller(known: dict[str, int | None], counts: dict[str, int | None]) -> dict[str, int | None]:
    merged = dict(known)
    for part, n in counts.items():
        old = merged.get(part)
        merged[part] = n if old is None else old if n is None else min(old, n)
    return merged
