"""What is timed: a case, the bytes that it has to move, and how a family's shape is written on the command line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantlab.errors import InputError
from quantlab.kernels.choice import choose
from quantlab.recurrences import get_recurrence
from quantlab.schemes import checks
from quantlab.schemes.fits import check_policy_fits
from quantlab.schemes.ledger import (
    StateShape,
    ledger,
    native_verify_ledger,
    record_bytes,
    uses_raw,
    verify_ledger,
)
from quantlab.schemes.policy import Policy, parse_policy

OURS = "quantlab"
BASELINE = "fp32@1"
LARGEST_BATCH = 1024
LARGEST_DRAFTS = 64
INPUT_BYTES = 2
"""Of a query, key, value or output element: bfloat16, as the engines decode."""


@dataclass(frozen=True)
class Case:
    """One decode step of one layer, or one verification and its commit.

    policy: canonical text; of a peer, what its state amounts to in our words.  batch: rows, all of them live.
    implementation: "quantlab" or a peer.  drafts: tokens of a verification, all of which are accepted; 0 for a step.
    """

    family: str
    shape: StateShape
    policy: str
    batch: int
    implementation: str = OURS
    drafts: int = 0

    @property
    def rounds(self) -> int:
        """Of steps, or of verifications and commits, until every cursor is where it was."""
        window = self.parsed.window
        return window // math.gcd(window, max(self.drafts, 1))

    @property
    def parsed(self) -> Policy:
        return parse_policy(self.policy)

    @property
    def group(self) -> "Case":
        """Equal for the cases that are compared with each other."""
        return replace(self, policy=BASELINE, implementation=OURS, drafts=0)

    @property
    def label(self) -> str:
        drafts = f" {self.drafts} drafts" if self.drafts else ""
        where = f"{self.family} {shape_text(self.shape)} batch {self.batch}"
        return f"{where} {self.policy} {self.implementation}{drafts}"

    def point(self, device: str) -> dict[str, Any]:
        """What decides the record's name: the case, and the device by name.  A step has no ``drafts``."""
        drafts = {"drafts": self.drafts} if self.drafts else {}
        return drafts | {
            "kind": "bench",
            "policy": self.policy,
            "implementation": self.implementation,
            "family": self.family,
            "batch": self.batch,
            **vars(self.shape),
            "device": device,
        }


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step (or verification and commit) of a whole batch in one layer, amortised over the window.

    read, written: of state and records, by part, as the ledger counts them.  tokens: inputs read and outputs written,
    which every implementation has alike; not part of ``bytes``.
    """

    read: dict[str, float]
    written: dict[str, float]
    tokens: float

    @property
    def bytes(self) -> float:
        return sum(self.read.values()) + sum(self.written.values())


def traffic(case: Case) -> Traffic:
    """The policy's own bytes at the case's batch."""
    of = case.parsed, get_recurrence(case.family), case.shape
    if case.drafts and case.parsed.window == 1:  # of an engine that stores a state for every draft
        found = native_verify_ledger(case.parsed.checkpoint, case.shape, case.drafts, case.drafts)
    else:
        found = verify_ledger(*of, case.drafts, case.drafts) if case.drafts else ledger(*of)
    return Traffic(
        {part: case.batch * size for part, size in found.read.items()},
        {part: case.batch * size for part, size in found.written.items()},
        float(case.batch * max(case.drafts, 1) * sum(_token_bytes(case))),
    )


def _token_bytes(case: Case) -> tuple[int, int, int]:
    """Of one token: q and k; v, gates and strengths; the output."""
    shape, recurrence = case.shape, get_recurrence(case.family)
    gates = record_bytes(case.parsed, recurrence, shape)["gate"]
    vector = shape.heads * shape.value_dim * INPUT_BYTES
    strength = 4 * shape.heads if recurrence.delta_rule else 0
    return 2 * shape.key_heads * shape.key_dim * INPUT_BYTES, vector + gates + strength, vector


def launch_bytes(case: Case, *, window: bool = True, encode: bool = False) -> dict[str, float]:
    """Bytes that each launch of one step has to move, with inputs and outputs, rows spread evenly over the window.

    window: k and gates of the records before each token, for the rows that do not flush.  read: what serves those rows
    (read copy or checkpoint), the d of their records, and the record that they leave.  flush: checkpoint and records of
    the rows that flush, the checkpoint back, and the read copy.  step: the whole step under @1.  Nothing with
    flush=early, which folds before it reads, and of drafts.

    window: whether the key part has a launch of its own; else ``read`` does it.  encode: whether the read copy has one,
    which reads the stored checkpoint again; else ``flush`` does it.
    """
    policy, batch, shape = case.parsed, case.batch, case.shape
    if policy.options.flush == "early" or case.drafts:
        return {}
    recurrence = get_recurrence(case.family)
    full = (shape.heads, shape.value_dim, shape.key_dim)
    checkpoint = sum(policy.checkpoint.stored_bits(full).values()) / 8
    copy = sum(policy.read_copy.stored_bits(full).values()) / 8 if policy.read_copy else 0.0
    keys, values, output = _token_bytes(case)
    if policy.window == 1:
        return {"step": batch * (2 * checkpoint + copy + keys + values + output)}
    fields, raw = record_bytes(policy, recurrence, shape), uses_raw(policy, recurrence)
    derived = fields["k"] + fields["d"] + fields["gate"]
    inputs = fields["k"] + fields["gate"] + fields.get("v", 0) + fields.get("beta", 0)
    kept = inputs + fields["d"] if raw else derived
    own_keys = recurrence.delta_rule and policy.options.key_read == "checkpoint"
    # As the ledger has it: what a flush reads beside the checkpoint, and what a token reads beside the copy.
    through_copy = bool(copy) and (
        policy.options.flush_read == "copy" or (recurrence.delta_rule and not raw and not own_keys)
    )
    folded = (inputs if raw else derived) + (fields["d"] if through_copy and raw else 0)
    held = (policy.window - 2) / 2  # mean of the cursors of rows that do not flush
    reading, flushing = batch * (policy.window - 1) / policy.window, batch / policy.window
    gates = values - shape.heads * shape.value_dim * INPUT_BYTES
    served = (copy or checkpoint) + (checkpoint if copy and own_keys else 0)
    key_part = held * (fields["k"] + fields["gate"])
    found = {"window": reading * (key_part + keys + gates)} if window else {}
    found |= {
        "read": reading
        * (served + held * fields["d"] + kept + (keys / 2 if window else keys + key_part) + values + output),
        "flush": flushing
        * (
            2 * checkpoint
            + (copy if through_copy else 0)
            + (0 if encode else copy)
            + (policy.window - 1) * folded
            + keys
            + values
            + output
        ),
    }
    return found | ({"encode": flushing * (checkpoint + copy)} if copy and encode else {})


def parse_shape(text: str) -> StateShape:
    """``HEADS,VALUE_DIM,KEY_DIM,KEY_HEADS``; raises InputError, argument "shape"."""
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InputError("shape", text, "HEADS,VALUE_DIM,KEY_DIM,KEY_HEADS, for example 64,64,128,8")
    numbers = [int(part) for part in parts]
    if 0 in numbers:
        raise InputError("shape", text, "integers above zero, for example 64,64,128,8")
    shape = StateShape(*numbers)
    checks.whole_shape(shape)
    return shape


def shape_text(shape: StateShape) -> str:
    return f"{shape.heads},{shape.value_dim},{shape.key_dim},{shape.key_heads}"


def expand(
    family: str,
    shape: StateShape,
    policies: list[str],
    batches: list[int],
    peers: dict[str, list[str]],
    drafts: Sequence[int] = (),
    verifying: Mapping[str, list[str]] | None = None,
    chosen: bool = False,
) -> list[Case]:
    """Every case, those that are compared with each other together, ``fp32@1`` first if it is among the policies.

    peers: name -> texts of the policies that it implements for the family.  drafts: numbers of tokens; policies with a
    window then verify so many instead of taking steps, beside ``fp32@1`` in any case, and so do peers: verifying says
    under which policies.  chosen: at batches where another policy is chosen in place of one of these
    (``kernels.choice``) that one is timed, too.
    Raises InputError for a policy that does not fit the family, a batch outside 1 to 1024, drafts outside 1 to 64, and
    drafts of which neither a policy nor a peer verifies any.
    """
    checks.whole_shape(shape)
    for count in drafts:
        if not checks.is_integer(count) or not 1 <= count <= LARGEST_DRAFTS:
            raise InputError("drafts", count, f"1 to {LARGEST_DRAFTS} tokens of a verification")
    parsed = list(
        dict.fromkeys(str(parse_policy(text)) for text in [*policies, *([BASELINE] if drafts else [])])
    )
    for text in parsed:
        check_policy_fits(parse_policy(text), family)
    if drafts and not verifying and all(parse_policy(text).window == 1 for text in parsed):
        raise InputError("drafts", drafts[0], "a policy with a window: those with @1 verify none")
    for batch in batches:
        if not checks.is_integer(batch) or not 1 <= batch <= LARGEST_BATCH:
            raise InputError("batch", batch, f"1 to {LARGEST_BATCH} rows")
    counts = list(dict.fromkeys(drafts))
    found = []
    for batch in dict.fromkeys(batches):
        stand_ins = [
            str(choose(text, family, shape, batch).policy) for text in parsed if chosen and not counts
        ]
        texts = sorted(dict.fromkeys([*parsed, *stand_ins]), key=lambda text: text != BASELINE)
        found += _group(family, shape, texts, batch, peers, counts, verifying or {})
    return found


def _group(
    family: str,
    shape: StateShape,
    policies: list[str],
    batch: int,
    peers: dict[str, list[str]],
    drafts: list[int],
    verifying: Mapping[str, list[str]],
) -> Iterator[Case]:
    for text in policies:
        windowed = parse_policy(text).window > 1
        for count in drafts if drafts and windowed else [0]:
            yield Case(family, shape, text, batch, drafts=count)
    for name, texts in peers.items():
        for text in texts:
            yield Case(family, shape, str(parse_policy(text)), batch, name)
    for name, texts in verifying.items():
        for text in texts:
            for count in drafts:
                yield Case(family, shape, str(parse_policy(text)), batch, name, count)
