"""Replace attributes of modules and classes, and put back exactly what was there."""

import contextlib
from collections.abc import Callable
from typing import Any

_MISSING = object()


def replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``make(current)``, and undo it when the stack closes."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, make(getattr(owner, name, None)))
    if own is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)
