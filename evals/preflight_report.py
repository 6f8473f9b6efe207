"""What a preflight found: one check a line, and whether the run that it stands before would mean anything."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from quantlab.errors import InputError

Verdict = Literal["ok", "warn", "stop"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    task: "" where it concerns all of them.  found: in words, for a table.  values: the same for a record; plain values,
    no text of documents or answers.  change: what to change, where the verdict is not "ok".  argument: whose fault it
    is, where that is an argument of the run.
    """

    name: str
    found: str
    verdict: Verdict = "ok"
    change: str = ""
    task: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    argument: str | None = None

    @property
    def error(self) -> InputError:
        where = f" ({self.task})" if self.task else ""
        return InputError(self.argument or f"preflight {self.name}{where}", self.found, self.change)

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        plain = {"check": self.name, "task": self.task, "verdict": self.verdict, "change": self.change}
        return {name: value for name, value in plain.items() if value} | {"values": self.values}


@dataclass(frozen=True)
class Preflight:
    """The checks in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def stops(self) -> list[Check]:
        return [check for check in self.checks if check.verdict == "stop"]

    @property
    def warnings(self) -> list[Check]:
        return [check for check in self.checks if check.verdict == "warn"]

    def with_checks(self, more: Iterable[Check]) -> "Preflight":
        return Preflight((*self.checks, *more))

    def require(self) -> None:
        """InputError, which says the number and what to change, if a check stops the run."""
        for check in self.stops:
            raise check.error

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return {"checks": [check.as_dict() for check in self.checks]}


@dataclass(frozen=True)
class SampleSize:
    """documents: of each task.  tokens: of a response at most.  repeats: of each document, at most the task's own."""

    documents: int = 4
    tokens: int = 1024
    repeats: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"preflight_{name}", value, "a whole number of at least 1")
