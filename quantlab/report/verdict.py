"""The decision: what each policy did on everything it was tried on, and which one to take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantlab.report.load import BASELINE, Record
from quantlab.report.tables import AGREEMENT, DriftRow, EvalRow

# RMS of one bf16 rounding of a Gaussian: the activations around the state are rounded like this anyway.
BF16_ROUNDING = 1.66e-3
# A growth exponent whose whole interval lies above this is growth; 0 is flat, 0.5 is a random walk.
FLAT = 0.1
# Above this share of the signal the output is more error than answer, whatever the trend.
RUINOUS = 0.5

WORDS = {
    "invisible": "below bf16 noise",
    "bounded": "bounded",
    "unclear": "growth unclear",
    "untimed": "no growth interval",
    "grows": "grows",
    "ruinous": "ruinous",
    "loses": "loses accuracy",
    "diverged": "diverges",
    "unproven": "not proven",
    "baseline": "baseline",
}


@dataclass(frozen=True)
class Verdict:
    """One policy over all streams: worst output error, widest growth, cost against fp32@1 on the same
    streams."""

    policy: str
    verdict: str
    streams: int
    bad: int
    worst_error: float | None
    growth: float | None
    growth_low: float | None
    growth_high: float | None
    traffic: float | None
    bits: float | None
    agreeing: int
    predicted: int
    kl: float | None
    accuracy: EvalRow | None

    @property
    def word(self) -> str:
        return WORDS[self.verdict]


def verdicts(
    policies: Sequence[str],
    records: Sequence[Record],
    drift: Sequence[DriftRow],
    evaluation: Sequence[EvalRow],
) -> list[Verdict]:
    """A verdict for each policy, best first: by class, then by traffic."""
    cost = {(row.stream, row.policy): row.bytes_per_token for row in drift}
    found = []
    for policy in policies:
        rows = [row for row in drift if row.policy == policy]
        mine = [record for record in records if record["point"]["policy"] == policy]
        bad = sum(record["status"] in ("failed", "not_exercised") for record in mine)
        errors = [row.output_error for row in rows if row.output_error is not None]
        ratios = [row.ratio for row in rows if row.ratio is not None]
        widest = max(rows, key=lambda row: -math.inf if row.growth is None else row.growth, default=None)
        pairs = [(row.bytes_per_token, cost.get((row.stream, BASELINE))) for row in rows]
        shares = [mine_ / base for mine_, base in pairs if mine_ and base]
        tested = [row for row in evaluation if row.policy == policy]
        # The task on which it looks worst decides; a paired row is worth more than an unpaired one.
        worst = min(tested, key=lambda row: row.paired.difference if row.paired else 1.0, default=None)
        divergences = [record["metrics"].get("kl") for record in mine if record["kind"] == "scan"]
        divergences = [value for value in divergences if value is not None]
        verdict = _classify(policy, rows, bad, worst)
        if verdict == "diverged":
            # The streams that it survived say nothing about the one that it did not.
            widest = None
        found.append(
            Verdict(
                policy=policy,
                verdict=verdict,
                streams=len(rows),
                bad=bad,
                worst_error=max(errors, default=None),
                growth=widest.growth if widest else None,
                growth_low=widest.growth_low if widest else None,
                growth_high=widest.growth_high if widest else None,
                traffic=sum(shares) / len(shares) if shares else None,
                bits=next((row.bits for row in rows if row.bits is not None), None),
                agreeing=sum(1 / AGREEMENT <= ratio <= AGREEMENT for ratio in ratios),
                predicted=len(ratios),
                kl=max(divergences, default=None),
                accuracy=worst,
            )
        )
    order = list(WORDS)
    order.insert(0, order.pop(order.index("baseline")))
    return sorted(found, key=lambda v: (order.index(v.verdict), math.inf if v.traffic is None else v.traffic))


def _classify(policy: str, rows: Sequence[DriftRow], bad: int, worst: EvalRow | None) -> str:
    if any(row.status == "diverged" for row in rows):
        return "diverged"
    if policy == BASELINE:
        return "baseline"
    if worst is not None and worst.paired is not None and worst.paired.high < 0:
        return "loses"
    if bad or not rows or any(row.output_error is None or not row.checkpoint_stores for row in rows):
        return "unproven"
    if all(row.output_error is not None and row.output_error <= BF16_ROUNDING for row in rows):
        return "invisible"
    if any(row.output_error is not None and row.output_error > RUINOUS for row in rows):
        return "ruinous"
    if any(row.growth_low is not None and row.growth_low > FLAT for row in rows):
        return "grows"
    if all(row.growth_high is not None and row.growth_high <= FLAT for row in rows):
        return "bounded"
    return "untimed" if any(row.growth_low is None for row in rows) else "unclear"


@dataclass(frozen=True)
class Answer:
    """The headline: a sentence to act on, and sentences that say how sure it is."""

    headline: str
    details: list[str]
    sure: list[str]


def answer(found: Sequence[Verdict], streams: int, drift: Sequence[DriftRow]) -> Answer:
    """Pick the cheapest policy that nobody can see, then the cheapest that stays bounded, and say what to
    avoid."""
    invisible = _cheapest(found, "invisible")
    bounded = _cheapest(found, "bounded")
    details = []
    if invisible is not None:
        headline = (
            f"Take {invisible.policy}: {_traffic(invisible)} at a worst output error of "
            f"{scientific(invisible.worst_error)}, below one bf16 rounding."
        )
    elif bounded is not None:
        headline = (
            f"Nothing cheaper than {BASELINE} is invisible. {bounded.policy} is the cheapest whose error "
            f"stays bounded: {_traffic(bounded)}, worst output error {scientific(bounded.worst_error)}."
        )
    elif drift:
        headline = f"Keep {BASELINE}: no cheaper policy tried here is both proven and bounded."
    else:
        headline = _accuracy_headline(found)
    if invisible is not None and bounded is not None and _less(bounded, invisible):
        details.append(
            f"Cheaper still: {bounded.policy}, {_traffic(bounded)}. Its output error of "
            f"{scientific(bounded.worst_error)} does not grow with length, but check it on your task."
        )
    bad = [v.policy for v in found if v.verdict == "diverged"]
    growing = [v.policy for v in found if v.verdict == "grows"]
    losing = [v.policy for v in found if v.verdict == "loses"]
    if losing and drift:
        details.append(f"Avoid {join(losing)}: accuracy drops by more than chance explains.")
    if bad:
        details.append(f"Avoid {join(bad)}: diverged on at least one stream.")
    if growing:
        details.append(f"Avoid for long outputs {join(growing)}: the error grows with every decoded token.")
    ruinous = [v.policy for v in found if v.verdict == "ruinous"]
    if ruinous:
        details.append(f"Avoid {join(ruinous)}: an output error above half of the signal.")
    for verdict, reason in (
        ("unclear", "the growth interval is too wide"),
        ("untimed", "no growth interval; it needs heads x sequences of at least 16"),
        ("unproven", "points failed, are missing, or never read a store back"),
    ):
        undecided = [v.policy for v in found if v.verdict == verdict]
        if undecided and drift:
            details.append(f"Undecided here: {join(undecided)} ({reason}).")
    return Answer(headline, details, _sure(found, streams, drift))


def _cheapest(found: Sequence[Verdict], verdict: str) -> Verdict | None:
    # fp32 traffic is what everybody pays today: a policy that does not save some is no answer.
    fitting = [v for v in found if v.verdict == verdict and v.traffic is not None and v.traffic < 1]
    return min(fitting, key=lambda v: v.traffic or math.inf, default=None)


def _less(a: Verdict, b: Verdict) -> bool:
    return a.traffic is not None and b.traffic is not None and a.traffic < b.traffic


def _traffic(verdict: Verdict) -> str:
    return (
        "" if verdict.traffic is None else f"{100 * verdict.traffic:.0f} % of the state traffic of {BASELINE}"
    )


def _accuracy_headline(found: Sequence[Verdict]) -> str:
    paired = [v for v in found if v.accuracy and v.accuracy.paired]
    if not paired:
        return "These records hold no comparison: neither drift nor an accuracy paired against fp32@1."
    losing = [v.policy for v in paired if v.verdict == "loses"]
    if losing:
        verb = "loses" if len(losing) == 1 else "lose"
        return f"{join(losing)} {verb} accuracy against {BASELINE}; no other loss can be told from chance."
    return f"No policy loses accuracy that can be told from chance against {BASELINE}."


def _sure(found: Sequence[Verdict], streams: int, drift: Sequence[DriftRow]) -> list[str]:
    sentences = []
    if drift:
        seeds = max(row.seeds for row in drift)
        plural = "stream" if streams == 1 else "streams"
        repeats = "one seed each" if seeds == 1 else f"up to {seeds} seeds each"
        sentences.append(
            f"{streams} {plural}, {repeats}; every policy runs on the same stream, beside a float64 shadow; "
            "the worst stream decides."
        )
        agreeing, predicted = sum(v.agreeing for v in found), sum(v.predicted for v in found)
        if predicted:
            sentences.append(
                f"An independent closed form predicts {agreeing} of {predicted} measured errors within a "
                f"factor of {AGREEMENT}; the exceptions are explained in the table."
            )
        sentences.append("Streams show what rounding does to a state; they do not prove task accuracy.")
    paired = [v.accuracy.paired for v in found if v.accuracy and v.accuracy.paired]
    if paired:
        smallest = max(p.detectable for p in paired)
        n = min(p.n for p in paired)
        seen = (
            "no change of any size"
            if math.isinf(smallest)
            else f"changes of {100 * smallest:.1f} points or more"
        )
        sentences.append(
            f"Accuracy is paired by document (n = {n}); this run had an 80 % chance to show {seen}. "
            "A smaller loss cannot be ruled out."
        )
    else:
        sentences.append("No task accuracy was measured.")
    return sentences


def join(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def scientific(value: float | None, digits: int = 2) -> str:
    """A number as people write it: 0.087, 3.1×10⁻⁷, ∞; an en dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    superscript = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}×10{superscript}"
