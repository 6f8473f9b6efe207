"""The ledger against kernels that were timed: none can be faster than the bytes that it charges allow.

Microseconds of a decode step of one layer on one H200, with the copy bandwidth measured in the same session; medians of
40 graph replays, at batches whose states (134 MB and more in FP32) do not fit into the 50 MB of the second-level cache.
Baselines: vLLM's selective_state_update and packed GDN decode; ReplaySSM: the authors' Triton kernels, window 16.
"""

import pytest

from quantlab.recurrences import RECURRENCES
from quantlab.schemes import StateShape, parse_policy
from quantlab.schemes.ledger import ledger

COPY_BYTES_PER_MICROSECOND = 4.28e6
MAMBA2, WIDE, LONG = (StateShape(64, 64, 128, 8), StateShape(96, 80, 128, 8), StateShape(128, 64, 128, 8))
GDN = StateShape(32, 128, 128, 16)
REPLAY, REPLAY16 = "fp32@16:buffer=bf16", "fp16@16:buffer=bf16"
DERIVED = ":contents=derived"
MEASURED = [
    *(
        ("mamba2", MAMBA2, "fp32@1", batch, time)
        for batch, time in ((128, 141.3), (256, 276.0), (512, 554.0))
    ),
    *(("mamba2", MAMBA2, REPLAY, batch, time) for batch, time in ((128, 94.7), (256, 177.6), (512, 349.8))),
    *(("mamba2", MAMBA2, "fp16@1", batch, time) for batch, time in ((256, 141.7), (512, 287.6))),
    *(("mamba2", MAMBA2, REPLAY16, batch, time) for batch, time in ((256, 119.7), (512, 230.5))),
    *(("mamba2", LONG, policy, 256, time) for policy, time in (("fp32@1", 567.4), ("fp16@1", 286.0))),
    *(("mamba2", LONG, policy, 256, time) for policy, time in ((REPLAY, 346.8), (REPLAY16, 231.2))),
    *(("mamba2", WIDE, policy, 256, time) for policy, time in ((REPLAY, 358.4), (REPLAY16, 238.6))),
    *(("gated_delta", GDN, "fp32@1", batch, time) for batch, time in ((256, 271.5), (512, 534.3))),
    *(("gated_delta", GDN, REPLAY + DERIVED, batch, time) for batch, time in ((256, 167.8), (512, 324.5))),
    *(("gated_delta", GDN, "fp16@1", batch, time) for batch, time in ((256, 139.4), (512, 272.6))),
    *(("gated_delta", GDN, REPLAY16 + DERIVED, batch, time) for batch, time in ((256, 127.7), (512, 249.7))),
]


def share(family, shape, policy, batch, time):
    """Bytes charged, as a share of what a copy moves in the measured time."""
    charged = batch * ledger(parse_policy(policy), RECURRENCES[family], shape).bytes_per_token
    return charged / (time * COPY_BYTES_PER_MICROSECOND)


@pytest.mark.parametrize("case", MEASURED, ids=lambda c: f"{c[0]}-{c[1].heads}-{c[2]}-{c[3]}")
def test_no_kernel_is_faster_than_its_bytes(case):
    assert share(*case) < 1


@pytest.mark.parametrize(
    "case", [c for c in MEASURED if c[2].endswith("@1")], ids=lambda c: f"{c[0]}-{c[1].heads}-{c[2]}-{c[3]}"
)
def test_both_directions_are_charged(case):
    """Without a window a kernel reads the state and writes it.

    A ledger that charged one of the two would charge less than half of a copy, because the whole is less than one.
    """
    assert share(*case) > 0.5
