"""Error drift of the decode state: streams, measures per step, growth laws, the closed-form predictor."""

from quantlab.drift.budget import Allocation, allocate
from quantlab.drift.growth import Growth, growth
from quantlab.drift.heads import (
    HeadStatistics,
    heads_of_decay,
    heads_of_gates,
    heads_of_stream,
    steady_errors,
    steady_output_error,
)
from quantlab.drift.long import LongResult, run_long
from quantlab.drift.measure import DriftResult, PolicyRun, run_drift
from quantlab.drift.predictor import BAND, predict_curve
from quantlab.drift.sources import StreamSource, block_stream, open_source
from quantlab.drift.streams import Stream, check_memory, load_stream, save_stream
from quantlab.drift.summary import PolicySummary
from quantlab.drift.synthetic import synthetic_stream

__all__ = [
    "BAND",
    "Allocation",
    "DriftResult",
    "Growth",
    "HeadStatistics",
    "LongResult",
    "PolicyRun",
    "PolicySummary",
    "Stream",
    "StreamSource",
    "allocate",
    "block_stream",
    "check_memory",
    "growth",
    "heads_of_decay",
    "heads_of_gates",
    "heads_of_stream",
    "load_stream",
    "open_source",
    "predict_curve",
    "run_drift",
    "run_long",
    "save_stream",
    "steady_errors",
    "steady_output_error",
    "synthetic_stream",
]
