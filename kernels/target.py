"""What the kernels run on.  The only file that asks."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton import knobs

MINIMUM_CAPABILITY = (8, 0)

COMPILE_CAPABILITIES = (80, 90, 100)
"""Compute capabilities that every specialisation must compile for, without a GPU."""

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Given on every launch, because Triton's own default changes between releases.  Contracting ``a * b + c``
drops one rounding and never adds one, so the error bounds of the tests hold either way."""


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels of this process."""
    return not isinstance(tl.sum, triton.runtime.JITFunction)


def obstacle(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of ``device``, or None if they can."""
    if interpreting() != knobs.runtime.interpret:
        # Triton decides for its own library when it is imported and for each kernel when that is defined.
        return "TRITON_INTERPRET was changed after triton was imported"
    if interpreting():
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device or TRITON_INTERPRET=1, not {device}"
    if torch.version.hip is not None:
        return "the kernels are untested on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return f"{device} has compute capability {capability}, the kernels need {MINIMUM_CAPABILITY}"
    return None


def describe(device: torch.device) -> str:
    """What runs a kernel on ``device``, in words."""
    if interpreting():
        return "Triton interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"Triton on {torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def overlaps(device: torch.device) -> bool:
    """Whether a launch can begin before the one that it follows has ended (``succession``)."""
    return device.type == "cuda" and not interpreting() and torch.cuda.get_device_capability(device) >= (9, 0)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launches inside may run beside those that follow, until ``together``: on a branch of a CUDA graph that is being
    captured, where that costs no host time; elsewhere they simply come first.
    """
    if not _capturing(device):
        yield
        return
    branch = _branch(device)
    branch.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(branch):
        yield


def together(device: torch.device) -> None:
    """What follows waits for the launches of ``beside``."""
    if _capturing(device):
        torch.cuda.current_stream(device).wait_stream(_branch(device))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
