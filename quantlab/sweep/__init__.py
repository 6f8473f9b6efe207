"""Spec -> points -> records.  A sweep may be stopped at any time; the same command computes only what is
missing."""

from quantlab.sweep.executor import LocalExecutor
from quantlab.sweep.jobs import RUNNERS, Job
from quantlab.sweep.run import Summary, parse_shard, run_sweep
from quantlab.sweep.spec import Study, expand, load_study

__all__ = [
    "RUNNERS",
    "Job",
    "LocalExecutor",
    "Study",
    "Summary",
    "expand",
    "load_study",
    "parse_shard",
    "run_sweep",
]
