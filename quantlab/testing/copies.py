"""States that are hard to encode as NVFP4, and the quotients on which a code turns."""

from fractions import Fraction
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.kernels import target
from quantlab.kernels.nvfp4_encode import quotient, reciprocal
from quantlab.kernels.steps import load_states
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.pool import allocate_pool, copy_of

SHAPE = StateShape(heads=2, value_dim=16, key_dim=64, key_heads=1)
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where the code of a quotient turns; at them exactly the even code wins."""


def hard_states() -> dict[str, Tensor]:
    """Float32 states (n, H, V, K) by what is hard about them."""
    generator = torch.Generator().manual_seed(1)
    size = (8, SHAPE.heads, SHAPE.value_dim, SHAPE.key_dim)
    blocks = (*size[:3], size[3] // 16)

    def normal() -> Tensor:
        return torch.randn(size, generator=generator)

    def powers(low: int, high: int, *shape: int) -> Tensor:
        return torch.exp2(torch.randint(low, high, shape, generator=generator).double()).float()

    midpoints = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6])
    ties = midpoints[torch.randint(0, len(midpoints), size, generator=generator)]
    ties = torch.where(torch.rand(size, generator=generator) < 0.5, -ties, ties)
    ties[..., ::16] = 6
    ties[:, :, 0, 0] = 2688
    ulps = torch.randint(-1, 2, size, generator=generator, dtype=torch.int32)
    near = (ties.view(torch.int32) + torch.where(ties == 0, 0, ulps)).view(torch.float32)

    zeros = normal()
    zeros[..., 16:32] = 0
    zeros[0], zeros[1] = -0.0, 0
    zeros[2, 0, :, :16] *= 1e-8
    zeros[3, 0, :, :16] = 1e-44
    zeros[4, :, :, ::3] = 0
    zeros[5, :, :, ::3] *= 1e-38

    # Block maxima at six times an E4M3 number, and half a step above it.
    scale = (
        torch.randint(1, 126, blocks, generator=generator).to(torch.uint8).view(torch.float8_e4m3fn).float()
    )
    largest = 6 * scale * (1 + 2.0**-4 * torch.randint(0, 2, blocks, generator=generator))
    within = torch.rand(size, generator=generator) * 2 - 1
    within = within.view(*blocks, 16)
    scales = (within / within.abs().amax(-1, keepdim=True) * largest[..., None]).view(size)
    scales[:, :, 0, 0] = 2688
    return {
        "normal": normal(),
        "rows of all sizes": normal() * powers(-40, 40, *size[:3], 1),
        "columns of all sizes": normal() * powers(-140, 120, *size[:2], 1, size[3]),
        "matrices of all sizes": normal() * powers(-60, 120, *size[:2], 1, 1),
        "subnormal matrices": normal() * powers(-149, -100, *size[:2], 1, 1),
        "heavy tails": normal() * powers(-30, 1, *size),
        "ties": ties * powers(-8, 8, *blocks).repeat_interleave(16, -1),
        "an ulp from ties": near,
        "zeros": zeros,
        "largest numbers": normal().clamp(-1, 1) * 3.4e38,
        "scales halfway": scales,
    }


def encoded(name: str, device: str, copy: str = "nvfp4") -> dict[str, numpy.ndarray]:
    """A pool's parts of the copy of a state of ``hard_states``, by the kernels that load prefill states."""
    state = hard_states()[name].to(device)
    pool = allocate_pool(f"fp32/{copy}@16", "mamba2", SHAPE, len(state), device=device)[0]
    load_states(pool, torch.arange(len(state), dtype=torch.int32, device=device), state)
    return {part: value.cpu().numpy() for part, value in copy_of(pool, torch.arange(len(state))).items()}


@triton.jit
def quotient_kernel(x, divisor, output, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    below = tl.load(divisor + at)
    tl.store(output + at, quotient(tl.load(x + at), below, reciprocal(below)))


def wrong_quotients(threshold: float, device: str) -> int:
    """Of all 2^23 significands of a divisor b, how many quotients x / b next to a threshold are not the rounded ones.

    x: the float32 nearest to b times the midpoint between the threshold and either of its neighbours, and the numbers
    beside it: no other quotient of b can be rounded across.
    """
    count, wrong = 2**23, 0
    kernel: Any = quotient_kernel
    b = torch.arange(count, 2 * count, device=device)
    divisor = b.float()
    output = torch.empty_like(divisor)
    point = numpy.float32(threshold)
    for neighbour in (numpy.nextafter(point, numpy.float32(0)), numpy.nextafter(point, numpy.float32(8))):
        # A multiple of 2^-28 below 2^31 of them: its product with b is formed in two exact halves.
        midpoint = int((Fraction(float(point)) + Fraction(float(neighbour))) / 2 * 2**28)
        product = (b * (midpoint >> 14)).double() * 2.0**14 + (b * (midpoint & 0x3FFF)).double()
        nearest = (product * 2.0**-28).float().view(torch.int32)
        for step in (-1, 0, 1):
            x = (nearest + step).view(torch.float32)
            kernel[(count // 1024,)](x, divisor, output, COUNT=1024, **target.LAUNCH_OPTIONS)
            wrong += int((output != x / divisor).sum())
    return wrong
