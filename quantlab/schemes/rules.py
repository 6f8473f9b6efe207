"""Policies that differ between the layers and heads of a model: a default, and rules that override it.

    default = "fp32@16"

    [[rule]]
    layers = "0-3"                          # the model's own layer numbers
    heads = "5,7"                           # heads of the state (value heads); left out: all of them
    policy = "fp16+sr/nvfp4@16"

The last rule that matches a head decides.  Every rule must decide something.
"""

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantlab.errors import InputError, unknown_name
from quantlab.schemes.fits import check_policy_fits
from quantlab.schemes.policy import Policy, parse_policy

LARGEST_NUMBER = 65535  # of a layer or head; beyond this a typing error, not a model
_NUMBERS = 'numbers and ranges such as "0-3,7", a number, or a list of them'


@dataclass(frozen=True)
class Rule:
    """``policy`` for these heads of these layers; None for one of the two stands for all of them."""

    layers: frozenset[int] | None
    heads: frozenset[int] | None
    policy: Policy

    def __post_init__(self) -> None:
        for name in ("layers", "heads"):
            numbers = getattr(self, name)
            if numbers is not None and not (isinstance(numbers, frozenset) and numbers):
                raise InputError(name, numbers, "a frozenset of at least one number, or None for all")
            for number in numbers or ():
                _check_number(name, number)
        if self.layers is None and self.heads is None:
            raise InputError(
                "policy", str(self.policy), "layers or heads beside it: what holds everywhere is the default"
            )

    def __str__(self) -> str:
        named = [
            f"{name} {number_text(numbers)}"
            for name, numbers in (("layers", self.layers), ("heads", self.heads))
            if numbers is not None
        ]
        return f"{' '.join(named)}: {self.policy}"

    def matches(self, layer: int) -> bool:
        """Whether the rule has a say in ``layer``."""
        return self.layers is None or layer in self.layers


@dataclass(frozen=True)
class HeadGroup:
    """The heads of one layer that follow the same policy, ascending."""

    policy: Policy
    heads: tuple[int, ...]

    def __str__(self) -> str:
        return f"heads {number_text(self.heads)}: {self.policy}"


@dataclass(frozen=True)
class PolicyRules:
    """A policy for every head of every layer; ``parse_rules`` makes one from a text or a file.

    default: where no rule matches.  rules: the last one that matches wins.  name: stem of the file they came from,
    which plays no part in comparisons.
    """

    default: Policy
    rules: tuple[Rule, ...] = ()
    name: str = field(default="rules", compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """In one line, for people and records: the canonical policy, or the default and every rule behind it."""
        return "; ".join([str(self.default), *map(str, self.rules)])

    @property
    def file_name(self) -> str:
        """For a folder or file of results: the policy's own, or the name and a hash of the canonical TOML."""
        if not self.rules:
            return self.default.file_name
        return f"{self.name}-{hashlib.sha256(self.toml().encode()).hexdigest()[:8]}"

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Each policy that is named, once."""
        return tuple(dict.fromkeys([self.default, *(rule.policy for rule in self.rules)]))

    def toml(self) -> str:
        """The canonical file: ``parse_rules`` of it gives these rules again."""
        lines = [f'default = "{self.default}"']
        for rule in self.rules:
            lines += ["", "[[rule]]"]
            for name, numbers in (("layers", rule.layers), ("heads", rule.heads)):
                if numbers is not None:
                    lines.append(f'{name} = "{number_text(numbers)}"')
            lines.append(f'policy = "{rule.policy}"')
        return "\n".join(lines) + "\n"

    def of_layer(self, layer: int, heads: int) -> tuple[HeadGroup, ...]:
        """The heads 0 to ``heads`` - 1 of ``layer`` by policy, in the order of their first heads.

        Head numbers that the layer does not have are passed over; ``check`` refuses those that no layer has.
        """
        _check_number("layer", layer)
        if _check_number("heads", heads) == 0:
            raise InputError("heads", heads, "at least one head")
        found: dict[Policy, list[int]] = {}
        for head, number in enumerate(self._deciding(layer, heads)):
            policy = self.default if number is None else self.rules[number].policy
            found.setdefault(policy, []).append(head)
        return tuple(HeadGroup(policy, tuple(numbers)) for policy, numbers in found.items())

    def check(self, layers: Mapping[int, int], family: str | Mapping[int, str]) -> None:
        """InputError unless every rule decides something and every policy suits the heads that follow it.

        layers: number of heads of each recurrent layer, by layer number.  family: of all of them, or by layer number.
        """
        if not layers:
            raise InputError("layers", dict(layers), "at least one layer with a recurrent state")
        for number, rule in enumerate(self.rules):
            self._check_matches(self._place(number), rule, layers)
        deciding = {layer: self._deciding(layer, heads) for layer, heads in layers.items()}
        effective = {number for numbers in deciding.values() for number in numbers}
        for number in range(len(self.rules)):
            if number not in effective:
                expected = "a rule that decides something: later rules override all of it"
                raise InputError("policy", self._place(number), expected)
        for layer, numbers in deciding.items():
            of_layer = family if isinstance(family, str) else family[layer]
            for number in dict.fromkeys(numbers):
                check_policy_fits(self.default if number is None else self.rules[number].policy, of_layer)

    def check_layer(self, layer: int, heads: int, family: str) -> None:
        """``check`` of one layer alone: rules for other layers, and those that later ones override, are no matter."""
        for number, rule in enumerate(self.rules):
            if rule.matches(layer) and rule.heads is not None and max(rule.heads) >= heads:
                expected = f"heads from 0 to {heads - 1}, which is what layer {layer} has"
                raise InputError("policy", self._place(number), expected)
        for group in self.of_layer(layer, heads):
            check_policy_fits(group.policy, family)

    def _deciding(self, layer: int, heads: int) -> list[int | None]:
        """For each head the number of the rule that decides, None for the default."""
        deciding: list[int | None] = [None] * heads
        for number, rule in enumerate(self.rules):
            if rule.matches(layer):
                for head in range(heads) if rule.heads is None else rule.heads:
                    if head < heads:
                        deciding[head] = number
        return deciding

    def _check_matches(self, place: str, rule: Rule, layers: Mapping[int, int]) -> None:
        # A range may run over layers of other kinds, but a part of the list that meets none is a mistake.
        for first, last in _runs(rule.layers or ()):
            if not any(first <= layer <= last for layer in layers):
                raise InputError("policy", place, f"layers with a recurrent state: {number_text(layers)}")
        most = max(heads for layer, heads in layers.items() if rule.matches(layer))
        if rule.heads is not None and max(rule.heads) >= most:
            named = "these layers have" if rule.layers is not None else "the layers have"
            raise InputError("policy", place, f"heads from 0 to {most - 1}, which is what {named}")

    def _place(self, number: int) -> str:
        return f"{self.name}, rule {number + 1} ({self.rules[number]})"


def parse_rules(value: "str | Path | Policy | PolicyRules") -> PolicyRules:
    """The rules of a file (a path, or a text that ends in ".toml"), or those of one policy for everything.

    Raises InputError (argument "policy") for a file that cannot be read or says something else.
    """
    if isinstance(value, PolicyRules):
        return value
    if isinstance(value, Path) or (isinstance(value, str) and value.lower().endswith(".toml")):
        return _read(Path(value))
    return PolicyRules(parse_policy(value))


def number_text(numbers: Iterable[int]) -> str:
    """Numbers as rules write them: "0-3,7"."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(numbers))


def parse_numbers(name: str, value: object) -> frozenset[int]:
    """What ``number_text`` writes, or a number, or a list of numbers and texts.  InputError names ``name``."""
    if isinstance(value, list) and value:
        return frozenset().union(*(parse_numbers(name, item) for item in value))
    if not isinstance(value, str):
        return frozenset([_check_number(name, value)])
    found: set[int] = set()
    for item in value.split(","):
        ends = [end.strip() for end in item.split("-")]
        # Length first: Python refuses to read a number of thousands of digits.
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() and len(end) <= 9 for end in ends):
            raise InputError(name, value, _NUMBERS)
        first, last = (_check_number(name, int(end)) for end in (ends[0], ends[-1]))
        if first > last:
            raise InputError(name, value, f"a range that goes up, not {item.strip()}")
        found.update(range(first, last + 1))
    return frozenset(found)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _check_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(name, value, _NUMBERS)
    if not 0 <= value <= LARGEST_NUMBER:
        raise InputError(name, value, f"a number from 0 to {LARGEST_NUMBER}")
    return value


def _read(path: Path) -> PolicyRules:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("policy", str(path), f"a file that can be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # not TOML, not even UTF-8, or tables within tables
        raise InputError("policy", str(path), f"TOML: {error}") from None
    try:
        return _rules(table, path.stem)
    except InputError as error:
        raise InputError("policy", str(path), f"{_EXPECTED}; {error}") from None


_EXPECTED = 'default = "POLICY" and [[rule]] tables of layers, heads and policy'


def _rules(table: dict[str, Any], name: str) -> PolicyRules:
    _check_keys("key", table, ("default", "rule"), ("default",))
    entries = table.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError("rule", type(entries).__name__, "tables, each headed [[rule]]")
    rules = []
    for number, entry in enumerate(entries, 1):
        try:
            rules.append(_rule(entry))
        except InputError as error:
            raise InputError(f"rule {number} {error.argument}", error.value, error.expected) from None
    return PolicyRules(_policy(table["default"]), tuple(rules), name)


def _rule(entry: dict[str, Any]) -> Rule:
    _check_keys("key", entry, ("layers", "heads", "policy"), ("policy",))
    layers, heads = (parse_numbers(n, entry[n]) if n in entry else None for n in ("layers", "heads"))
    return Rule(layers, heads, _policy(entry["policy"]))


def _policy(value: object) -> Policy:
    if not isinstance(value, str):
        raise InputError("policy", value, "policy text")
    return parse_policy(value)


def _check_keys(
    argument: str, table: dict[str, Any], known: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    for key in table:
        if key not in known:
            raise unknown_name(argument, key, known)
    for key in needed:
        if key not in table:
            raise InputError(argument, sorted(table), f"{key} = ... among them")
