"""Drift as points of a sweep: a point names a stream and a policy; its record holds the metrics and the curve."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from quantlab.drift.measure import run_drift
from quantlab.drift.sources import StreamSource, as_source, open_source
from quantlab.drift.streams import Stream, load_stream
from quantlab.drift.summary import PolicySummary
from quantlab.drift.synthetic import synthetic_stream
from quantlab.schemes import check_policy_fits, parse_policy


def stream_of(description: dict[str, Any]) -> Stream | StreamSource:
    """The stream that a point describes: {"file", "hash"}, or the arguments of ``synthetic_stream``, or with generator
    "blocks" those of ``block_stream``."""
    if description.get("generator") == "blocks":
        return open_source(description)
    if "file" in description:
        return load_stream(description["file"])
    return synthetic_stream(**description)


def check_points(points: list[dict[str, Any]]) -> None:
    """Raise InputError for a policy that the family of its stream cannot use, before anything runs."""
    stream = points[0]["stream"]
    family = stream["family"] if "family" in stream else load_stream(stream["file"]).family
    for point in points:
        check_policy_fits(parse_policy(point["policy"]), family)


def run_points(
    points: list[dict[str, Any]], *, threads: int, on_progress: Callable[..., None]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Records of points that share everything but the policy: one stream and one shadow for all of them.

    threads is set by the caller (the sweep's worker) and recorded there.
    """
    started = time.monotonic()
    on_progress("making the stream")
    stream = as_source(stream_of(points[0]["stream"]))
    by_policy = {str(parse_policy(point["policy"])): point for point in points}
    seed = points[0].get("rounding_seed", 0)
    result = run_drift(
        stream, list(by_policy), seed=seed, on_step=lambda step: on_progress(step, stream.steps)
    )
    # All policies ran side by side; each is charged its share.
    seconds = (time.monotonic() - started) / len(result.runs)
    for run in result.runs:
        series = result.policy_table(run).drop(columns="policy")
        found = result_of(run, result.metrics(run)) | {"series": series, "seconds": seconds}
        yield by_policy[str(run.policy)], found


def result_of(run: PolicySummary, metrics: dict[str, Any]) -> dict[str, Any]:
    """What a record says of a run: status, message, metrics, curve."""
    message = f"diverged at step {run.diverged_at}" if run.status == "diverged" else None
    if run.status == "not_exercised":
        message = f"no stored state was read back: exercised {run.exercised}"
    return {"status": run.status, "message": message, "metrics": metrics, "curve": run.curve()}


def run_point(point: dict[str, Any]) -> dict[str, Any]:
    """The record of one point (environment left out)."""
    ((_, record),) = run_points([point], threads=1, on_progress=lambda *_: None)
    return record
