"""lm-eval's ``--use_cache``: its keys name the prompt alone, so a file must belong to one model under one policy."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quantlab.errors import InputError
from quantlab.evals.generating import settings_of
from quantlab.records import canonical_json

OWNER = "quantlab settings"
"""The key under which a cache says whose answers it holds; lm-eval's own keys are hashes."""


def check_cache(lm: Any) -> None:
    """Take a new cache for ``lm``.  InputError for one with answers of another policy or model, or of unknown ones."""
    held = getattr(getattr(lm, "cache_hook", None), "dbdict", None)
    if held is None:
        return
    settings = settings_of(lm) | {"scoring": lm.scoring}
    mine = canonical_json(settings)
    if OWNER not in held:
        if len(held):
            raise InputError("use_cache", _name(held), "a new file: nobody knows whose answers it holds")
        held[OWNER] = mine
        return
    if held[OWNER] != mine:
        expected = f"another file for policy {settings['policy']}: it holds answers under other settings"
        raise InputError("use_cache", _name(held), expected)


def check_repeats(lm: Any, requests: Sequence[Any]) -> None:
    """InputError for repeats of a greedy request beside a cache, which has one answer for all of them."""
    if getattr(getattr(lm, "cache_hook", None), "dbdict", None) is None:
        return
    if any(count > 1 for count in Counter(map(id, requests)).values()) and not any(
        request.args[1].get("do_sample") for request in requests
    ):
        expected = "no repeats: lm-eval's cache keeps one answer for all of them (a sidecar keeps each)"
        raise InputError("use_cache", _name(lm.cache_hook.dbdict), expected)


def _name(held: Any) -> str:
    return str(getattr(held, "filename", "a cache"))
