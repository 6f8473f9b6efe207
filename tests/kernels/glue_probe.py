"""Gates at the ends of their range, by the kernel that makes a delta rule's inputs."""

import numpy
import torch

from quantlab.kernels.step_inputs import gated_delta_inputs

INFINITY = float("inf")
GATES = (
    *(
        -INFINITY,
        -1e30,
        -1e4,
        -200.0,
        -104.0,
        -88.0,
        -87.0,
        -60.0,
        -30.0,
        -20.0,
        -17.0,
        -16.0,
        -10.0,
        -7.0,
        -4.0,
    ),
    *(
        -1.0,
        -0.5,
        -1e-3,
        -1e-10,
        -0.0,
        0.0,
        1e-30,
        1e-4,
        0.5,
        1.0,
        4.0,
        10.0,
        16.0,
        19.999,
        20.0,
        20.001,
        50.0,
    ),
    *(88.0, 104.0, 1e4, 1e30, INFINITY, float("nan")),
)


def extremes(device: str) -> tuple[numpy.ndarray, ...]:
    """Numbers, softplus and sigmoid of them."""
    z = torch.tensor([GATES], device=device)
    heads = z.shape[1]
    token, values = torch.ones(1, 1, 4, device=device), torch.ones(1, heads, 1, device=device)
    zeros = torch.zeros(heads, device=device)
    found = gated_delta_inputs(token, token, values, z, z, zeros, zeros)
    return tuple(part[0].cpu().numpy() for part in (z, -found.log_decay, found.beta))
