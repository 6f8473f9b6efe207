"""Hugging Face models whose recurrent decode state is held under a policy."""

from quantlab.models.interception import run_with_policy
from quantlab.models.loading import load
from quantlab.models.tiny import build_tiny

__all__ = ["build_tiny", "load", "run_with_policy"]
