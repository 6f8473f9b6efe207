"""Hugging Face models whose recurrent decode state is held under a policy."""

from quantlab.models.capture import capture, write_capture
from quantlab.models.closed_loop import closed_loop
from quantlab.models.families import Family, OpCall, register_family
from quantlab.models.graph import DecodeGraph
from quantlab.models.interception import run_with_policy
from quantlab.models.live import live_recurrence
from quantlab.models.loading import load
from quantlab.models.tiny import build_tiny

__all__ = [
    "DecodeGraph",
    "Family",
    "OpCall",
    "build_tiny",
    "capture",
    "closed_loop",
    "live_recurrence",
    "load",
    "register_family",
    "run_with_policy",
    "write_capture",
]
