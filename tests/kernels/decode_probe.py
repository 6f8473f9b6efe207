"""Decode every byte under every E4M3 scale with the kernels' helpers."""

import numpy
import torch
import triton
import triton.language as tl

from quantlab.kernels import target
from quantlab.kernels.decode import e2m1, e4m3


@triton.jit
def probe_kernel(words, scales, output, POSITION: tl.constexpr, UNIT_ROOT: tl.constexpr):
    byte = tl.arange(0, 256)
    value = e2m1(tl.load(words + byte), POSITION) * UNIT_ROOT * UNIT_ROOT
    product = value[:, None] * e4m3(tl.load(scales + byte))[None, :]
    tl.store(output + byte[:, None] * 256 + byte[None, :], product)


def every_byte(device: str) -> numpy.ndarray:
    """float32 (byte position in the word, nibble, byte, scale byte)."""
    scales = torch.arange(256, dtype=torch.uint8, device=device)
    output = torch.full((4, 2, 256, 256), float("nan"), device=device)
    for place in range(4):
        # The other three bytes of the word hold the complement: a nibble taken from the wrong place shows.
        byte = numpy.arange(256, dtype=numpy.uint8)
        columns = numpy.repeat((255 - byte)[:, None], 4, axis=1)
        columns[:, place] = byte
        words = (
            torch.from_numpy(columns.view(numpy.uint32)[:, 0].astype(numpy.int64)).to(torch.uint32).to(device)
        )
        for nibble in range(2):
            probe_kernel[(1,)](
                words,
                scales,
                output[place, nibble],
                POSITION=2 * place + nibble,
                UNIT_ROOT=2.0**63,
                **target.LAUNCH_OPTIONS,
            )
    return output.cpu().numpy()
