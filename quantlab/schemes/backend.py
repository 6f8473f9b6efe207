"""Which code serves an op: the torch twin or the Triton kernel.

The one place that looks upwards: a kernel is imported by name, and only once something asks for it on a
device that can run it.  ``quantlab/schemes/<op>.py`` holds the twin, ``quantlab/kernels/<op>.py`` the kernel,
both a function ``<op>`` of the same signature; or several functions, each an op ``<module>.<function>``.
"""

import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from quantlab.errors import unknown_name

logger = logging.getLogger(__name__)

FUNCTIONS = {
    "steps": ("begin_step", "decode_token", "end_step", "load_states"),
    "drafts": ("verify_tokens", "end_verify", "begin_commit", "commit_tokens", "end_commit"),
}
"""Modules of several ops, which work on the same memory: one device is served by the same kind in all of them."""


@dataclass(frozen=True)
class Backend:
    """What serves one op on one device."""

    op: str
    device: torch.device
    kind: str
    """``torch`` or ``triton``."""
    function: Callable[..., Any]
    reason: str
    """Why this one is in force, in words."""

    def __str__(self) -> str:
        return f"{self.op} on {self.device}: {self.kind} ({self.reason})"


def find(name: str, device: torch.device | str) -> Callable[..., Any]:
    """The function that serves op ``name`` on ``device``; ``choose(name, device)`` says why."""
    return choose(name, device).function


def choose(name: str, device: torch.device | str, *work: Any) -> Backend:
    """The Triton kernel on CUDA, or in Triton's interpreter if TRITON_INTERPRET=1; else the torch twin.

    A kernel that is missing or cannot run there is replaced by the twin: the log says so once,
    ``reason`` always.

    work: what the op is wanted for, if kernels do not serve all of it; the arguments of the kernel module's
    ``served``, for ``steps`` a Policy, the family and a StateShape, for ``drafts`` also the tokens of a verification.

    Raises:
        InputError: there is no op of that name.
    """
    return _choose(name, torch.device(device), _interpreter_wanted(), *work)


def ops() -> list[str]:
    """Names of the ops: modules of ``quantlab.schemes`` that define a function of their own name, and FUNCTIONS."""
    schemes = importlib.import_module("quantlab.schemes")
    names = (module.name for module in pkgutil.iter_modules(schemes.__path__))
    parts = (f"{module}.{function}" for module, functions in FUNCTIONS.items() for function in functions)
    return sorted([*(name for name in names if callable(getattr(_scheme(name), name, None))), *parts])


@functools.cache
def _choose(name: str, device: torch.device, interpret: bool, *work: Any) -> Backend:
    module, dot, function = name.partition(".")
    known = function in FUNCTIONS.get(module, ()) if dot else module not in FUNCTIONS
    if not known or not module.isidentifier():
        raise unknown_name("op", name, ops())
    if importlib.util.find_spec(f"quantlab.schemes.{module}") is None:
        raise unknown_name("op", name, ops())
    twin = getattr(_scheme(module), function or module, None)
    if not callable(twin):
        raise unknown_name("op", name, ops())
    if device.type != "cuda" and not interpret:
        return Backend(name, device, "torch", twin, "no CUDA device, TRITON_INTERPRET not set")
    kernel, reason = _kernel(module, function or module, device, work)
    if kernel is None:
        logger.warning("%s on %s: torch, because %s", name, device, reason)
        return Backend(name, device, "torch", twin, reason)
    logger.info("%s on %s: %s", name, device, reason)
    return Backend(name, device, "triton", kernel, reason)


def _kernel(
    module: str, function: str, device: torch.device, work: tuple[Any, ...]
) -> tuple[Callable[..., Any] | None, str]:
    """The kernel and what runs it, or None and why not."""
    if importlib.util.find_spec("triton") is None:
        return None, "triton is not installed"
    if importlib.util.find_spec(f"quantlab.kernels.{module}") is None:
        return None, f"there is no kernel quantlab.kernels.{module}"
    target = importlib.import_module("quantlab.kernels.target")
    obstacle = target.obstacle(device)
    if obstacle is not None:
        return None, obstacle
    kernels = importlib.import_module(f"quantlab.kernels.{module}")
    unserved = kernels.served(*work) if work else None
    if unserved is not None:
        return None, f"no kernel serves {unserved}"
    return getattr(kernels, function), target.describe(device)


def _interpreter_wanted() -> bool:
    # Read without triton, so that a CPU process that only ever uses the twin never imports it.  The spellings
    # are the ones that triton takes for true.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _scheme(name: str) -> ModuleType:
    return importlib.import_module(f"quantlab.schemes.{name}")
