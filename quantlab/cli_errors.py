"""How the command line ends: usage errors as one line, and a standard output that takes nothing more."""

import contextlib
import os
import re
import sys
from typing import Any

import typer

from quantlab.errors import InputError, unknown_name

# Typer takes click's classes or its own copies of them; BadParameter is the one that it exports from every release.
CommandLineError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def is_help(error: Any) -> bool:
    """Whether a group was called without a verb: it has shown its help, which is no mistake to be named."""
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_text(error: Any) -> str:
    """One line for a usage error: the argument, its value, what was expected."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "quantlab"
    message = " ".join(error.format_message().split())
    param = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and param is not None:
        wanted = " ".join((getattr(param, "help", None) or "a value").split()).rstrip(".")
        return f"{_name(param)}: missing, expected: {wanted} ({command} --help)"
    if param is not None:
        return _bad_value(error, param)
    option = getattr(error, "option_name", None)
    if option is not None and not hasattr(error, "possibilities"):
        return f"{option}: expected {'a value' if 'requires' in message else 'no value'} behind it"
    if option is not None:
        close = " or ".join(sorted(error.possibilities or ()))
        return str(InputError("option", option, close or f"an option of {command} --help"))
    commands = getattr(context.command, "commands", None) if context is not None else None
    quoted = re.search(r"No such command '(.*)'", message)
    if quoted and commands:
        return str(unknown_name("command", quoted[1], commands))
    return f"{message.rstrip('.')} ({command} --help)"


def _name(param: Any) -> str:
    if param.param_type_name == "option":
        return max(param.opts, key=len)
    return param.metavar or param.name.upper()


def _bad_value(error: Any, param: Any) -> str:
    # The parser keeps no value; what refused it may say which it was.
    cause: Any = error.__cause__
    details = cause.errors() if hasattr(cause, "errors") else []
    expected = re.sub(
        r"^Input should be |, unable to parse .*", "", details[0]["msg"] if details else error.message
    )
    if details:
        return str(InputError(_name(param), details[0]["input"], expected))
    return f"{_name(param)}: {' '.join(expected.split())}"


def flush_output() -> None:
    """Everything printed leaves the process, or OSError says why it cannot."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_output() -> None:
    """What standard output would not take is dropped, so that the interpreter does not stumble over it when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.stdout.flush()
