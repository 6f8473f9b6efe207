"""Error drift of the decode state: streams, measures per step, growth laws, the closed-form predictor."""

from quantlab.drift.growth import Growth, growth
from quantlab.drift.heads import (
    HeadStatistics,
    heads_of_decay,
    heads_of_gates,
    heads_of_stream,
    steady_errors,
    steady_output_error,
)
from quantlab.drift.measure import DriftResult, PolicyRun, run_drift
from quantlab.drift.predictor import BAND, predict_curve
from quantlab.drift.streams import Stream, check_memory, load_stream, save_stream, synthetic_stream

__all__ = [
    "BAND",
    "DriftResult",
    "Growth",
    "HeadStatistics",
    "PolicyRun",
    "Stream",
    "check_memory",
    "growth",
    "heads_of_decay",
    "heads_of_gates",
    "heads_of_stream",
    "load_stream",
    "predict_curve",
    "run_drift",
    "save_stream",
    "steady_errors",
    "steady_output_error",
    "synthetic_stream",
]
