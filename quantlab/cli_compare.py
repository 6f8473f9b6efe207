"""``quantlab compare``: what evaluated runs lose against a base, and what such a study could have seen at all."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table, print_wrapped

if TYPE_CHECKING:
    from quantlab.evals.pairing import Pairs
    from quantlab.evals.result_files import TaskRun
    from quantlab.statistics.comparison import RateComparison, Reach

EPILOG = (
    "Example: [bold]quantlab compare results/eval/fp32@1 results/eval/nvfp4@1 "
    "results/eval/fp32--nvfp4@16 --aa results/again/fp32@1[/bold]"
)
_COLUMNS = {
    "task": "task",
    "run": "run",
    "accuracy": "right %",
    "difference": "points",
    "interval": "interval",
    "p": "p (Holm)",
    "lost": "lost",
    "gained": "gained",
    "margin": "margin",
    "length": "length",
    "no_answer": "no answer %",
    "truncated": "cut off %",
    "loglikelihood": "|dLL|",
}
_NUMBERS = ("accuracy", "difference", "interval", "p", "length", "no_answer", "truncated", "loglikelihood")


def compare(
    base: Annotated[Path, typer.Argument(help="Run of the baseline: a folder or a file of it.")],
    candidates: Annotated[
        list[Path] | None, typer.Argument(help="Runs to compare with it.", metavar="CANDIDATE...")
    ] = None,
    aa: Annotated[
        list[Path] | None,
        typer.Option(
            "--aa", help="The baseline run again, with other seeds or batches: the noise floor; repeat."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task (default: all of the base).")] = None,
    metric: Annotated[
        str | None, typer.Option(help="Of the samples (default: correct, acc or exact_match).")
    ] = None,
    filter_name: Annotated[
        str | None, typer.Option("--filter", help="Of the samples, where there are several.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Points that a loss may have and still be none.")] = 2.0,
    confidence: Annotated[float, typer.Option(help="Of the intervals; tests at 1 - it.")] = 0.95,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Compare the documents that both runs have.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run and task.")] = False,
) -> None:
    """Compare runs document by document: loss, interval, tests, and what the study can see.

    Reads the results and samples of lm-eval (--log_samples), of any model, and quantlab's own records.  Runs that were
    not asked the same in the same way are refused.
    """
    if not 0 < margin < 100:
        raise InputError("--margin", margin, "points of accuracy, above 0 and below 100")
    if not 0.5 < confidence < 1:
        raise InputError("--confidence", confidence, "a number above 0.5 and below 1, for example 0.95")
    if not candidates and not aa:
        raise InputError("CANDIDATE", None, "at least one run to compare with the base, or --aa")
    pairs = _pairs(base, candidates or [], aa or [], task, metric, filter_name, allow_missing)
    rows = _rows(pairs, margin / 100, confidence)
    if as_json:
        print_json(rows)
        return
    cells = _cells(rows)
    several = len({row["task"] for row in rows}) > 1
    print_table(
        f"Against {rows[0]['base_run']}, {confidence:.3g} intervals, margin {margin:g} points",
        cells,
        [
            name
            for name in _COLUMNS
            if any(cell.get(name) is not None for cell in cells) and (several or name != "task")
        ],
        _COLUMNS,
        _NUMBERS,
        ["run", "accuracy", "difference", "interval", "p", "lost", "gained", "margin"],
        ["run", "difference", "interval", "p", "margin"],
    )
    for row in rows:
        print_wrapped(row["sentence"])
    for remark in dict.fromkeys(f"{row['run']}: {remark}." for row in rows for remark in row["remarks"]):
        print_wrapped(remark)


def _pairs(
    base: Path,
    candidates: list[Path],
    controls: list[Path],
    task: str | None,
    metric: str | None,
    filter_name: str | None,
    allow_missing: bool,
) -> "list[tuple[bool, Pairs]]":
    """(is a control, pairs) of each task of the base, controls first."""
    from quantlab.evals.answer_arrays import read_answers
    from quantlab.evals.pairing import pair
    from quantlab.evals.result_files import read_runs

    baseline = read_runs(base, task)
    others = [(True, path, read_runs(path, task)) for path in controls]
    others += [(False, path, read_runs(path, task)) for path in candidates]
    _check_once(others)
    found = []
    for name, run in baseline.items():
        answers = None
        for control, path, runs in others:
            if name not in runs:
                expected = f"the base's task {name} (there: {', '.join(runs)}); --task compares one alone"
                raise InputError("--aa" if control else "candidate", str(path), expected)
            answers = answers or read_answers(run, metric, filter_name)
            candidate = read_answers(runs[name], metric, filter_name)
            found.append((control, pair(answers, candidate, allow_missing=allow_missing, control=control)))
    return found


def _check_once(others: "list[tuple[bool, Path, dict[str, TaskRun]]]") -> None:
    """InputError for a run given twice: it would count twice in Holm's adjustment, or as its own noise floor."""
    seen: dict[tuple[Path, str], Path] = {}
    for control, path, runs in others:
        for name, run in runs.items():
            key = run.source.resolve(), name
            if key in seen:
                expected = f"each run once; {seen[key]} is the same"
                raise InputError("--aa" if control else "candidate", str(path), expected)
            seen[key] = path


def _rows(pairs: "list[tuple[bool, Pairs]]", margin: float, confidence: float) -> list[dict[str, Any]]:
    import numpy as np

    from quantlab.statistics.comparison import compare_rates, equivalence, reach
    from quantlab.statistics.multiple import holm

    names = _labels(pairs)
    rows = []
    for control, found in pairs:
        before, after = _correct(found)
        noise = [
            _differences(other) for is_control, other in pairs if is_control and other.base is found.base
        ]
        # Documents may be missing in one run and not in another; then the runs are not of one shape.
        noise = [values for values in noise if not found.missing and len(values) == len(before)]
        rates = compare_rates(before, after, confidence)
        shown = equivalence(before, after, margin, confidence)
        rows.append(
            {
                "task": found.base.run.task,
                "run": names[found.candidate.run.path],
                "base_run": names[found.base.run.path],
                "control": control,
                "n": rates.n,
                "k": rates.k,
                "metric": found.candidate.metric,
                "filter": found.candidate.filter,
                "rates": rates,
                "reach": reach(before, after, margin, None if control else np.array(noise), 1 - confidence),
                "equivalence": shown,
                "p_holm": None,
                **_beside(found, confidence),
                "missing": found.missing,
                "remarks": found.remarks,
            }
        )
    tested = [row for row in rows if not row["control"]]
    for row, p_value in zip(tested, holm([row["rates"].p_value for row in tested]), strict=True):
        row["p_holm"] = p_value
    for row in rows:
        row["tests"] = 1 if row["control"] else len(tested)
        controls = [r for r in rows if r["control"] and r["task"] == row["task"] and not row["control"]]
        row["sentence"] = _sentence(row, controls, margin, confidence)
    return [_flat(row) for row in rows]


def _correct(found: "Pairs") -> tuple[Any, Any]:
    arrays = found.of("correct")
    assert arrays is not None  # every run has it
    return arrays


def _differences(found: "Pairs") -> Any:
    before, after = _correct(found)
    return after.mean(1) - before.mean(1)


def _beside(found: "Pairs", confidence: float) -> dict[str, Any]:
    """What moves before accuracy does: length, answers given, answers cut off, log-likelihoods."""
    from quantlab.statistics.clustered import ratio_of_means
    from quantlab.statistics.comparison import compare_rates

    length, answered, truncated = found.of("length"), found.of("answered"), found.of("truncated")
    return {
        "length_unit": found.base.unit if length else None,
        "length": ratio_of_means(*length, confidence) if length else None,
        "no_answer": compare_rates(1 - answered[0], 1 - answered[1], confidence) if answered else None,
        "truncated": compare_rates(*truncated, confidence) if truncated else None,
        "loglikelihood_change": found.loglikelihood_change(),
    }


def _labels(pairs: "list[tuple[bool, Pairs]]") -> dict[str, str]:
    """A run's policy where it has one and no other run has the same, else its path; of a control, the path."""
    runs: dict[str, TaskRun] = {}
    for control, found in pairs:
        for answers in (found.base,) if control else (found.base, found.candidate):
            runs[answers.run.path] = answers.run
    policies = [run.policy for run in runs.values()]
    paths = {found.candidate.run.path for _, found in pairs}
    named = {path: run.policy for path, run in runs.items() if policies.count(run.policy) == 1}
    return {path: named.get(path) or path for path in (*paths, *runs)}


def _sentence(row: dict[str, Any], controls: list[dict[str, Any]], margin: float, confidence: float) -> str:
    """What a reader should take away, in plain words."""
    rates, points = row["rates"], 100 * margin
    if row["control"]:
        subject = f"A/A, {row['run']} ({row['task']})"
        tested = f"p {_p(rates.p_value)}"
    else:
        subject = f"{row['run']} ({row['task']})"
        tested = f"p {_p(row['p_holm'])} (Holm over {row['tests']})"
    parts = [f"{subject}: {_change(rates)}, {tested}, {_margin(row['equivalence'].verdict, points)}"]
    parts.append(f"{_asked(rates)} can see {_reach(row['reach'], points)}")
    if "widened" in rates.method or "no question" in rates.method:
        parts.append(f"interval: {rates.method}")
    if row["control"]:
        few = 1 - confidence
        verdict = (
            "the base differs from itself by more than chance: no difference of this size is the policy's"
            if rates.p_value < few
            else "the base differs from itself no more than chance allows"
        )
        parts.append(f"{verdict}; {_moved(rates)} of {rates.n} questions moved")
    elif controls:
        floor = max(abs(control["rates"].difference) for control in controls)
        moved = max(_moved(control["rates"]) for control in controls)
        parts.append(
            f"the base against itself moves {100 * floor:.1f} points and {moved} questions, this run {_moved(rates)}"
        )
        if any(control["rates"].p_value < 1 - confidence for control in controls):
            parts.append("the base differs from itself by more than chance, so this is no evidence of a loss")
    if row["length"] is not None and row["length"].p_value < 1 - confidence:
        length = row["length"]
        parts.append(
            f"{length.ratio:.2f} times the {row['length_unit']} [{length.low:.2f}, {length.high:.2f}]"
        )
    for name, words in (("no_answer", "without an answer"), ("truncated", "cut off")):
        other = row[name]
        if other is not None and other.p_value < 1 - confidence:
            parts.append(f"{words} {100 * other.base:.1f} % -> {100 * other.candidate:.1f} %")
    return "; ".join(parts) + "."


def _change(rates: "RateComparison") -> str:
    ends = 100 * rates.low, 100 * rates.high
    if rates.difference < 0:
        return f"loses {-100 * rates.difference:.1f} points [{-ends[1]:.1f}, {-ends[0]:.1f}]"
    verb = "gains" if rates.difference > 0 else "changes"
    return f"{verb} {100 * rates.difference:.1f} points [{ends[0]:.1f}, {ends[1]:.1f}]"


def _margin(verdict: str, points: float) -> str:
    return {
        "within": f"within the {points:g}-point margin",
        "beyond": f"beyond the {points:g}-point margin",
        "undecided": f"not shown to be within the {points:g}-point margin",
    }[verdict]


def _asked(rates: "RateComparison") -> str:
    return f"{rates.n} questions" + (f" x {rates.k}" if rates.k > 1 else "")


def _moved(rates: "RateComparison") -> int:
    return rates.fell + rates.rose


def _reach(reach: "Reach", points: float) -> str:
    seen = "no difference" if math.isinf(reach.detectable) else f"{100 * reach.detectable:.1f}"
    if 100 * reach.detectable <= points:
        return seen
    if reach.repeats is not None:
        return f"{seen}; {reach.repeats:,} repeats would see {points:g}"
    questions = (
        "more questions than there are" if reach.questions is None else f"about {reach.questions:,} questions"
    )
    if reach.repeats_known:
        return f"{seen}; no number of repeats would see {points:g}, {questions} would"
    return f"{seen}; {questions} would see {points:g} (how many repeats would, one answer each cannot say)"


def _p(value: float) -> str:
    """ "= .031", "< .0001", "= 1"."""
    if value < 1e-4:
        return "< .0001"
    return f"= {value:.2g}".replace("0.", ".", 1) if value < 0.995 else "= 1"


def _cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The base's row of each task and one row a run, numbers as text."""
    cells: list[dict[str, Any]] = []
    for row in rows:
        if not any(cell["task"] == row["task"] for cell in cells):
            first: dict[str, Any] = {
                "task": row["task"],
                "run": row["base_run"],
                "accuracy": f"{100 * row['base']:.1f}",
            }
            if row["length_base"] is not None:
                first["length"] = f"{row['length_base']:,.0f} {row['length_unit']}"
            for name, key in (("no_answer", "base_no_answer"), ("truncated", "base_truncated")):
                first[name] = _percent(row[key])
            cells.append(first)
        cells.append(
            {
                "task": row["task"],
                "run": f"A/A {row['run']}" if row["control"] else row["run"],
                "accuracy": f"{100 * row['candidate']:.1f}",
                "difference": f"{100 * row['difference']:+.1f}",
                "interval": f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
                "p": None if row["p_holm"] is None else _p(row["p_holm"]).removeprefix("= "),
                "lost": row["lost"],
                "gained": row["gained"],
                "margin": row["margin_verdict"],
                "length": None if row["length_ratio"] is None else f"{row['length_ratio']:.2f}x",
                "no_answer": _percent(row["no_answer"]),
                "truncated": _percent(row["truncated"]),
                "loglikelihood": None
                if row["loglikelihood_change"] is None
                else f"{row['loglikelihood_change']:.2g}",
            }
        )
    return cells


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON has it: rates and differences as fractions, null where the files do not say."""
    rates, reach, shown, length = row["rates"], row["reach"], row["equivalence"], row["length"]
    found = {name: row[name] for name in ("task", "run", "base_run", "control", "n", "k", "metric", "filter")}
    found |= {name: getattr(rates, name) for name in ("base", "candidate", "difference", "low", "high")}
    found |= {"method": rates.method, "test": rates.test, "p_value": rates.p_value, "p_holm": row["p_holm"]}
    found |= {name: getattr(rates, name) for name in ("lost", "gained", "fell", "rose")}
    found["bootstrap"] = None if math.isnan(rates.bootstrap[0]) else list(rates.bootstrap)
    found |= {
        "margin": shown.margin,
        "margin_verdict": shown.verdict,
        "margin_p_value": shown.p_value,
        "margin_interval": [shown.low, shown.high],
        "no_worse_than_margin": shown.no_worse,
        "detectable": _finite(reach.detectable),
        "repeats_needed": reach.repeats,
        "repeats_known": reach.repeats_known,
        "questions_needed": reach.questions,
    }
    found |= {"length_unit": row["length_unit"]}
    for name in ("base", "candidate", "ratio", "low", "high", "p_value"):
        found[f"length_{name}"] = None if length is None else _finite(getattr(length, name))
    for name in ("no_answer", "truncated"):
        other = row[name]
        found[f"base_{name}"] = None if other is None else other.base
        found[name] = None if other is None else other.candidate
        for part in ("low", "high", "p_value"):
            found[f"{name}_{part}"] = None if other is None else getattr(other, part)
    found["loglikelihood_change"] = _finite(row["loglikelihood_change"])
    return found | {name: row[name] for name in ("missing", "remarks", "sentence")}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
