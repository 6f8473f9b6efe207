"""Where a policy makes noise besides its stores: each source, where it enters, and its power.

With e(f) the relative RMS of rounding a Gaussian vector to the format f (``vector_noise``), u = |d|^2 |k|^2 the power
of what a token writes, w = beta^2 |v|^2 |k|^2 the share of its value, and r = beta^2 |k|^2 |S k~|^2 the power that an
error of k sends through the read S k (delta rule only):

| source | enters | power |
|---|---|---|
| store of the checkpoint | at each fold (window, schedule, flush rule) | eps^2 |S|^2, spread over a scale's values |
| store of the read copy | in reads until the next fold | eps^2 |S|^2 |
| error feedback | part that the state forgot before it came back | (1 - decay of the window)^2 eps^2 |S|^2 |
| site state | with the store: both roundings of one state | measured on the state, so bf16 in bf16 is free |
| buffer, site buffer | in reads of later tokens, in the fold | (e_k^2 + e_d^2) u; raw: e_k^2 (u + r) + e_v^2 w |
| current=buffer, sites k, v, d | before the token's own output | e_k^2 (u + r), e_v^2 w, e_d^2 u |
| site beta (raw: buffer) | before its own output (in the fold) | relative error of this beta, squared, times u |
| sites gate, decay (buffer) | in the decay of everything older | error of this log decay, summed with its sign |
| dot, site dot | in the fold, both operands | (e^2 + e^2) u; d (kimi_delta: k) carries the decay before it rounds |
| site q, site output | in the output | e^2 |S|^2 |q|^2 / K, e^2 |o|^2 |
| float32 arithmetic | folds, reads, exp of the log decay | ``balance`` |

Formats in a row are rounded in a row: a bf16 buffer behind a bf16 site adds nothing.  Left out: range (a record below
float16's normal numbers), and the errors of one token's several sites being correlated.
"""

from dataclasses import dataclass

from quantlab.drift.rounding_noise import sites_of, vector_noise
from quantlab.recurrences import DecayAxis, Recurrence
from quantlab.schemes import Policy
from quantlab.schemes.ledger import uses_raw


@dataclass(frozen=True)
class WriteNoise:
    """Relative noise powers of one token's write: of the update d (x) k, of the value's share, of S k (delta rule)."""

    update: float = 0.0
    value: float = 0.0
    read: float = 0.0

    def __bool__(self) -> bool:
        return self.update + self.value + self.read > 0


@dataclass(frozen=True)
class TokenNoise:
    """What one token's vectors suffer, by the place that sees it.

    now: in its own output, and in everything later.  record: as later reads of the window see it.  fold: as a fold of
    records takes it.  folded_now: as the fold takes the token that fills the window.
    beta, kept_beta: formats of the write strength when used, and in raw records.  gate: (site, format) roundings of
    the log decay; kept_gate: in records.
    query, output: relative powers in the output.
    """

    now: WriteNoise
    record: WriteNoise
    fold: WriteNoise
    folded_now: WriteNoise
    beta: str | None
    kept_beta: str | None
    gate: tuple[tuple[str, str], ...]
    kept_gate: str | None
    query: float
    output: float


def token_noise(policy: Policy, recurrence: Recurrence) -> TokenNoise:
    """The noise of one token under ``policy``."""
    options, sites = policy.options, sites_of(policy.options.sites)
    delta, raw = recurrence.delta_rule, uses_raw(policy, recurrence)
    has_product = recurrence.axis is not DecayAxis.ELEMENT
    dots = [options.dot] if options.dot != "ieee" else []
    dots = dots + ([sites["dot"]] if "dot" in sites else [])
    dots = dots if has_product else []
    kept = [] if policy.window == 1 else [options.buffer, *([sites["buffer"]] if "buffer" in sites else [])]
    kept = [name for name in kept if name != "fp32"]
    current = kept[:1] if options.current == "buffer" and options.buffer != "fp32" else []

    def noise(used: list[str], held: list[str], product: list[str], decayed: bool) -> WriteNoise:
        """used: roundings before use; held: by the record, which a raw fold solves again."""
        carries = ["decay", *product] if decayed and product else product
        key_first = recurrence.axis is DecayAxis.KEY

        def at(site: str) -> list[str]:
            return [sites[site]] if site in sites else []

        k = at("k") + used + held
        # Mamba has no d of its own: what is written is the value.
        d = at("d") + used + ([] if raw else held) if delta else at("v") + at("d") + used + held
        update = vector_noise(tuple(k + (carries if key_first else product)))
        update += vector_noise(tuple(d + (product if key_first else carries)))
        if not delta:
            return WriteNoise(update)
        solved = held if raw else []
        value = vector_noise(tuple(at("v") + used + solved))
        return WriteNoise(update, value, vector_noise(tuple(at("k") + used + solved)))

    def as_read(used: list[str], held: list[str]) -> WriteNoise:
        """Records as the window's reads take them: d is the one that was computed when the token came."""
        found = noise(used, [], [], False)
        extra = [*used, *held]

        def chain(names: tuple[str, ...]) -> float:
            return vector_noise(tuple([sites[n] for n in names if n in sites] + extra))

        written = ("d",) if delta else ("v", "d")
        return WriteNoise(chain(("k",)) + chain(written), found.value, found.read)

    return TokenNoise(
        now=noise(current, [], [], False),
        record=as_read(current, kept),
        fold=noise(current, kept, dots, policy.window > 1),
        # A replay that keeps per-token rounding folds the token as the buffer will give it back.
        folded_now=noise(current, kept if options.schedule == "step" else [], dots, False),
        beta=sites.get("beta"),
        kept_beta=sites.get("buffer") if raw else None,
        gate=tuple((site, sites[site]) for site in ("gate", "decay") if site in sites),
        kept_gate=sites.get("buffer") if policy.window > 1 else None,
        query=vector_noise((sites["q"],)) if "q" in sites else 0.0,
        output=vector_noise((sites["output"],)) if "output" in sites else 0.0,
    )
