"""What the scripts of this folder ask of their arguments, and how they end if they do not get it."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantlab.errors import InputError


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return number


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 0")
    return number


def checked_device(name: str) -> torch.device:
    """Raises InputError for a device that this machine does not have."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError("device", name, "a device of this machine, such as cpu or cuda") from error
    return device


@contextmanager
def one_line_errors() -> Iterator[None]:
    """An InputError becomes one line and exit status 2."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
