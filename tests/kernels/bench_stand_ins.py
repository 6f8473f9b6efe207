"""Stand-ins for the bench on the CPU: a timer that is injected, and the torch twin for the kernels."""

import unittest.mock

import torch

from quantlab.kernels import bench
from quantlab.kernels.bench_cases import Case
from quantlab.kernels.bench_timing import Times
from quantlab.schemes import drafts, parse_policy, steps
from quantlab.schemes.ledger import StateShape

LARGE = StateShape(64, 64, 128, 8)
SMALL = StateShape(4, 16, 32, 2)


def case(policy="fp32/nvfp4@16:buffer=bf16", batch=8, family="mamba2", shape=SMALL, drafts=0):
    return Case(family, shape, str(parse_policy(policy)), batch, drafts=drafts)


class CountingTimer:
    """Runs the work once and says that it took two microseconds."""

    device = torch.device("cpu")
    name = "a made-up device"
    l2_bytes = 1

    def __init__(self):
        self.measured = 0

    def measure(self, work):
        self.measured += 1
        work()
        return Times(2.0, 1.5, 2.5, 11)

    def free_bytes(self):
        return 2**30


def run(cases, **options):
    defaults = {"environment": {"threads": 1}, "steps": steps, "drafts": drafts, "bandwidth": 4.0}
    options = defaults | options
    with unittest.mock.patch.object(bench, "FEWEST_LAYERS", 2):  # the twin is slow
        return bench.run_cases(cases, options.pop("timer", CountingTimer()), **options)
