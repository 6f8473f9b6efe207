"""What a model did under a policy: the object that ``run_with_policy`` yields."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from quantlab.schemes import ByteLedger, DecodeState


class PolicyReport:
    """Filled while the model runs; read it at any time.

    policy: canonical text.  effective_policy: with the defaults of the model's recurrence filled in.
    step_hits, prefill_hits: calls of the recurrent ops by (op, layer).  state_dtype: what the model itself
    would have kept its state in.  conv_bytes: {layer: bytes per sequence} of the convolution states, which
    no policy touches.
    """

    def __init__(self, policy: str, living: Callable[[], list[DecodeState]]):
        self.policy = policy
        self.effective_policy = policy
        self.step_hits: Counter[tuple[str, int]] = Counter()
        self.prefill_hits: Counter[tuple[str, int]] = Counter()
        self.state_dtype: str | None = None
        self.conv_bytes: dict[int, int] = {}
        self._living = living
        self._ended: dict[str, int | None] = {}
        self._ledgers: dict[int, ByteLedger] = {}

    def describe(self, layer: int, state: DecodeState) -> None:
        """Take down what is fixed once a layer's decode state exists."""
        self.effective_policy = state.effective_policy
        self._ledgers[layer] = state.ledger

    def count(self, state: DecodeState) -> None:
        """Take this state's sequences as ended: their exercised counts enter the minimum for good."""
        self._ended = _smaller(self._ended, state.exercised)

    @property
    def op_hits(self) -> dict[str, dict[str, int]]:
        """{op: {layer: calls}}, decode-step and prefill ops, keys as text."""
        table: dict[str, dict[str, int]] = {}
        for (op, layer), calls in sorted((self.step_hits + self.prefill_hits).items()):
            table.setdefault(op, {})[str(layer)] = calls
        return table

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
        sums = [_summed([getattr(ledger, side) for ledger in self._ledgers.values()]) for side in _SIDES]
        return ByteLedger(*sums, values=sum(ledger.values for ledger in self._ledgers.values()))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for a record or a results file."""
        ledger = self.ledger
        return {
            "policy": self.policy,
            "effective_policy": self.effective_policy,
            "op_hits": self.op_hits,
            "exercised": self.exercised,
            "state_dtype_of_the_model": self.state_dtype,
            "conv_state_bytes": sum(self.conv_bytes.values()),
            "ledger": {side: getattr(ledger, side) for side in _SIDES},
            "bits_per_value": ledger.bits_per_value if ledger.values else None,
            "bytes_per_token": ledger.bytes_per_token,
            "bytes_read_per_token": ledger.bytes_read_per_token,
            "bytes_written_per_token": ledger.bytes_written_per_token,
        }


_SIDES = ("read", "written", "held")


def _summed(parts: list[dict[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)  # pyright: ignore[reportArgumentType]
    return dict(total)


def _smaller(known: dict[str, int | None], counts: dict[str, int | None]) -> dict[str, int | None]:
    merged = dict(known)
    for part, n in counts.items():
        old = merged.get(part)
        merged[part] = n if old is None else old if n is None else min(old, n)
    return merged
