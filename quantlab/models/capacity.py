"""How many sequences fit, what a decoded token moves, and from which batch on the state decides.

Per sequence and over all recurrent layers of a model: the byte ledger of the layers and the convolution state.
"""

import re
from dataclasses import dataclass

from quantlab.errors import InputError
from quantlab.formats import Format
from quantlab.models.published import Geometry
from quantlab.recurrences import get_recurrence
from quantlab.schemes import Policy, check_policy_fits
from quantlab.schemes.ledger import ledger, native_verify_ledger, verify_ledger

UNITS = {"B": 1} | {
    f"{prefix}{ending}": base ** (power + 1)
    for ending, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
LARGEST_BYTES = 1e18
"""Of memory, weights or cache; beyond this a typing error, not a machine."""
_BYTES = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)")


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: a forward verifies the last token and ``drafts`` drafted ones, ``accepted`` of all stay."""

    drafts: int
    accepted: int

    @property
    def tokens(self) -> int:
        return self.drafts + 1


@dataclass(frozen=True)
class Demand:
    """What one sequence costs under one policy, in bytes, over all recurrent layers.

    read, written: by part, per forward (a token, or a verify with ``speculation``); the convolution state is a part.
    held: by part, per request.  states: copies of the state that a request holds.  accepted: tokens of a forward.
    stored_per_value: bytes of one state element in its stores: codes, scales, residual, read copy, padding; without
    window, convolution and further states.
    """

    geometry: Geometry
    policy: Policy
    read: dict[str, float]
    written: dict[str, float]
    held: dict[str, float]
    states: int
    accepted: int
    stored_per_value: float

    @property
    def bytes_read(self) -> float:
        """Of a forward."""
        return sum(self.read.values())

    @property
    def bytes_written(self) -> float:
        """Of a forward."""
        return sum(self.written.values())

    @property
    def bytes_per_forward(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def bytes_per_token(self) -> float:
        """Read plus written, for each token that stays."""
        return self.bytes_per_forward / self.accepted

    @property
    def bytes_held(self) -> float:
        """Of a request."""
        return sum(self.held.values())

    @property
    def slots_per_gib(self) -> int:
        """Requests whose state fits into 2^30 bytes."""
        return int(2**30 // self.bytes_held)


CONV = "conv state"


def demand(geometry: Geometry, policy: Policy, speculation: Speculation | None = None) -> Demand:
    """What one sequence of a model moves and holds under ``policy``.

    The convolution state (bf16, never quantised) is read and rewritten by each forward; drafts widen it by a column
    each, so that they can be taken back.  With ``speculation``, a policy of window 1 is served as engines do without a
    window: a state and a convolution state for each token of a forward.  A policy with a window holds one state and a
    ring of window - 1 + tokens records.
    Raises InputError if ``policy`` does not fit the family.
    """
    check_policy_fits(policy, geometry.family)
    recurrence, shape, layers = get_recurrence(geometry.family), geometry.shape, geometry.counted_layers
    states, accepted = 1, 1
    if speculation is None:
        found = ledger(policy, recurrence, shape)
        conv = float(geometry.conv_bytes())
        conv_written, conv_held = conv, conv
    elif policy.window == 1 and policy.read_copy is None:
        states, accepted = speculation.tokens, speculation.accepted
        found = native_verify_ledger(policy.checkpoint, shape, states, accepted)
        conv = float(geometry.conv_bytes())
        conv_written = conv_held = conv * states
    else:
        accepted = speculation.accepted
        found = verify_ledger(policy, recurrence, shape, speculation.tokens, accepted)
        conv = conv_written = conv_held = float(geometry.conv_bytes(drafts=speculation.drafts))
    read, written, held = (
        {name: size * layers for name, size in part.items()} | ({CONV: extra} if extra else {})
        for part, extra in ((found.read, conv), (found.written, conv_written), (found.held, conv_held))
    )
    stored = sum(_stored(store, geometry) for store in (policy.checkpoint, policy.read_copy) if store)
    return Demand(geometry, policy, read, written, held, states, accepted, stored / shape.values)


def shares(store: Format, geometry: Geometry) -> dict[str, float]:
    """Which parts of a store's bytes, residual and padding apart, are codes, scales and component."""
    bits = store.stored_bits(_dimensions(geometry))
    scales = sum(bits.get(part, 0) for part in ("scales", "global scale", "key scales"))
    parts = {"codes": bits["codes"], "scales": scales, "component": bits.get("component", 0)}
    return {name: part / sum(parts.values()) for name, part in parts.items() if part}


def _stored(store: Format, geometry: Geometry) -> float:
    return sum(store.stored_bits(_dimensions(geometry)).values()) / 8


def _dimensions(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.heads, geometry.value_dim, geometry.key_dim


@dataclass(frozen=True)
class Machine:
    """What else occupies memory and bandwidth.

    memory: bytes of the accelerator.  weights: bytes of the weights that it holds.  weights_read: bytes of weights
    that one decode step reads (a mixture of experts reads fewer than it holds).  kv_per_token: bytes of KV cache
    of one token in all attention layers.  context: tokens in it.
    Raises InputError if the weights leave no memory.
    """

    memory: float | None = None
    weights: float = 0.0
    weights_read: float = 0.0
    kv_per_token: float = 0.0
    context: int = 0

    def __post_init__(self) -> None:
        if self.memory is not None and self.weights >= self.memory:
            raise InputError("weights", f"{self.weights:.0f} B", f"less than the memory, {self.memory:.0f} B")

    @property
    def kv(self) -> float:
        """Bytes of KV cache of one sequence, all of them read by each step."""
        return self.kv_per_token * self.context


def concurrency(found: Demand, machine: Machine) -> int:
    """Requests that fit into the memory beside the weights.

    Raises InputError if ``machine`` names no memory.
    """
    if machine.memory is None:
        raise InputError("memory", None, "the bytes of the accelerator, such as 80GiB")
    return int((machine.memory - machine.weights) // (found.bytes_held + machine.kv))


def state_share(baseline: Demand, machine: Machine, batch: int) -> float:
    """f: part of the bytes of a decode step that belongs to recurrent layers' states, convolution included."""
    state = batch * baseline.bytes_per_forward
    return state / (machine.weights_read + batch * machine.kv + state)


def speed_bound(share: float, ratio: float) -> float:
    """At most so many times faster if the state's share f of the bytes shrinks by r: 1 / (1 - f + f / r)."""
    return 1 / (1 - share + share / ratio)


def batch_of_equal_traffic(found: Demand, machine: Machine) -> float:
    """Batch at which a decode step moves as many bytes of state as of weights."""
    return machine.weights_read / found.bytes_per_forward


def batch_of_equal_memory(found: Demand, machine: Machine) -> float:
    """Requests whose states hold as many bytes as the weights."""
    return machine.weights / found.bytes_held


def parse_bytes(argument: str, text: str) -> float:
    """Bytes of ``80GiB`` (2^30), ``80GB`` (10^9), ``24KB`` or ``24000B``.  Raises InputError, also without a unit."""
    match = _BYTES.fullmatch(text.strip())
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise InputError(
            argument, text, f"a number and one of {', '.join(UNITS)}: GB is 10^9 bytes, GiB 2^30"
        )
    size = float(match[1]) * units[match[2].lower()]
    if size > LARGEST_BYTES:
        raise InputError(argument, text, f"at most {LARGEST_BYTES:g} bytes")
    return size
