"""What a report reads of a record has the type that it expects: a runner is any script, and files can be edited."""

import math
from typing import Any, TypeGuard

from quantlab.errors import InputError
from quantlab.records import record_path

NUMBERS = (
    *("state_error", "read_error", "output_error", "growth_exponent", "predicted_output_error"),
    *("kl", "label_flips", "logit_error", "diverged_at"),
)
# Axes and sizes: infinity has no place on them.
FINITE = ("bits_per_value", "bytes_per_token")
TEXTS = ("warning", "prediction_note", "stream_hash", "text_hash")
TABLES = ("exercised", "op_hits")
LOOP_NUMBERS = ("kl_largest", "top1_agreement", "tokens", "earliest_divergence", "nll", "baseline_nll")
CURVES = ("output_error", "predicted_low", "predicted_high")
STREAM_TEXTS, STREAM_COUNTS = ("preset", "family"), ("steps", "heads", "sequences", "value_dim", "key_dim")

SPEED_NUMBERS = ("us", "us_lower", "us_upper", "bytes", "bytes_per_us", "of_copy", "copy_bandwidth")
SPEED_SIZES = ("batch", "heads", "value_dim", "key_dim", "key_heads")
SPEED_TEXTS = ("policy", "implementation", "family", "device")


def check_speed(record: dict[str, Any]) -> None:
    """InputError for a point or metric of a bench record (valid otherwise) that no table of speed could show."""
    point, metrics, name_of_file = record["point"], record["metrics"], record_path("", record["point"])

    def check(where: str, fields: dict[str, Any], names: tuple[str, ...], fits: Any, expected: str) -> None:
        for name in names:
            if not fits(fields.get(name)):
                expected += "; delete the record to have it timed anew"
                raise InputError(f"record {name_of_file} {where}.{name}", fields.get(name), expected)

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    def positive(value: Any) -> bool:
        return _number(value) and math.isfinite(value) and value > 0

    def launched(value: Any) -> bool:
        return isinstance(value, dict) and all(
            isinstance(one, dict)
            and texts(one.get("kernels"))
            and positive(one.get("us"))
            and all(positive(one[name]) for name in ("bytes", "of_copy") if name in one)
            for one in value.values()
        )

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)

    def chosen(value: Any) -> bool:
        return isinstance(value, dict) and isinstance(value.get("policy"), str)

    check("point", point, SPEED_TEXTS, lambda value: isinstance(value, str), "text")
    check("point", point, SPEED_SIZES, whole, "an integer above zero")
    check("metrics", metrics, ("checkpoint_bits",), positive, "a number above zero")
    if metrics.get("us") is not None:
        check("metrics", metrics, SPEED_NUMBERS, positive, "a number above zero")
    optional = {
        "kernels": (texts, "a list of names"),
        "launches": (launched, "a table of launches with times"),
    }
    optional["chosen"] = (chosen, "a table with a policy")
    for name, (fits, expected) in optional.items():
        if metrics.get(name) is not None:
            check("metrics", metrics, (name,), fits, expected)
    if "drafts" in point:
        check("point", point, ("drafts",), whole, "an integer above zero")


def check_contents(record: dict[str, Any]) -> None:
    """InputError for a metric, curve or stream of ``record`` (valid otherwise) that no report could show."""
    metrics, name_of_file = record["metrics"], record_path("", record["point"])

    def refuse(name: str, value: Any, expected: str) -> None:
        raise InputError(
            f"record {name_of_file} {name}", value, f"{expected}; mend its runner and delete the record"
        )

    def check(names: tuple[str, ...], fits: Any, expected: str) -> None:
        for name in names:
            if metrics.get(name) is not None and not fits(metrics[name]):
                refuse(f"metrics.{name}", metrics[name], f"{expected} or null")

    check(NUMBERS, _number, "a number")
    check(FINITE, lambda value: _number(value) and math.isfinite(value), "a finite number")
    check(TEXTS, lambda value: isinstance(value, str), "text")
    check(TABLES, lambda value: isinstance(value, dict), "a table")
    check(("growth_ci",), _interval, "[low, high]")
    for part, value in (metrics.get("exercised") or {}).items():
        if value is not None and not _number(value):
            refuse(f"metrics.exercised.{part}", value, "a number or null")
    versions = record["environment"].get("versions", {})
    if not isinstance(versions, dict):
        refuse("environment.versions", versions, "a table")
    curve = record["curve"]
    if curve and curve.get("output_error"):
        steps = curve.get("step")
        if not _numbers(steps):
            refuse("curve.step", steps, "a list of numbers")
        for name in CURVES:
            column = curve.get(name)
            if column is None and name != "output_error":
                continue
            if not _numbers(column) or len(column) != len(steps):
                found = len(column) if _numbers(column) else column
                refuse(f"curve.{name}", found, f"{len(steps)} numbers, one a step")
    if record["kind"] == "drift":
        _check_stream(record["point"].get("stream"), refuse)
    if record["kind"] == "eval":
        _check_eval(metrics, refuse)
    if record["kind"] == "closed_loop":
        check(LOOP_NUMBERS, _number, "a number")
        check(
            ("agreement_by_margin",),
            _bins,
            "a list of tables with numbers under low, high, tokens and agreement",
        )


def _check_stream(stream: Any, refuse: Any) -> None:
    if not isinstance(stream, dict):
        refuse("point.stream", stream, "a table")
    if "file" in stream:
        wanted = {name: isinstance(stream.get(name), str) for name in ("file", "hash")}
    else:
        alpha = stream.get("alpha")
        wanted = {name: isinstance(stream.get(name), str) for name in STREAM_TEXTS}
        wanted |= {name: _number(stream.get(name)) for name in STREAM_COUNTS}
        wanted |= {"alpha": alpha is None or _number(alpha)}
    for name, fits in wanted.items():
        if not fits:
            refuse(f"point.stream.{name}", stream.get(name), "what a sweep writes there")


def _check_eval(metrics: dict[str, Any], refuse: Any) -> None:
    tasks, documents = metrics.get("tasks"), metrics.get("documents")
    for task, values in tasks.items() if isinstance(tasks, dict) else ():
        if not isinstance(values, dict) or not all(
            values.get(name) is None or _number(values[name]) for name in ("acc", "avg_at_k", "n")
        ):
            refuse(f"metrics.tasks.{task}", values, "a table with numbers under acc, avg_at_k and n")
    lists = documents.values() if isinstance(documents, dict) else [documents or []]
    for rows in lists:
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            refuse("metrics.documents", type(rows).__name__, "a list of tables")


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _numbers(value: Any) -> TypeGuard[list[Any]]:
    # A diverged run ends in nulls.
    return isinstance(value, list) and all(item is None or _number(item) for item in value)


def _bins(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(found, dict)
        and all(_number(found.get(name)) for name in ("low", "high", "tokens"))
        and (found.get("agreement") is None or _number(found["agreement"]))
        for found in value
    )


def _interval(value: Any) -> bool:
    return _numbers(value) and len(value) in (0, 2)
