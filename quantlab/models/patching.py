"""Replace attributes of modules and classes, and put back exactly what was there.

What two replace at once would not be undone in reverse order, so one thread at a time does.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from quantlab.errors import InputError

_MISSING = object()
_ENTERED = threading.Lock()
_entered_by: tuple[int, str, Any] = (0, "", None)  # thread, policy and model of the block that holds the lock


def enter(stack: contextlib.ExitStack, model: nn.Module, policy: str) -> None:
    """Hold a block of ``model`` until ``stack`` closes.  InputError inside of another one, in whichever thread."""
    global _entered_by
    if not _ENTERED.acquire(blocking=False):
        thread, other, _ = _entered_by
        expected = "to be entered outside of other blocks: leave that of {} first (quantlab_close() of a loaded model)"
        if thread != threading.get_ident():
            expected = "one thread at a time: another is inside such a block, of {}"
        raise InputError("policy", policy, expected.format(other))
    stack.callback(_ENTERED.release)
    _entered_by = threading.get_ident(), policy, weakref.ref(model)


def enter_step(stack: contextlib.ExitStack, model: nn.Module, policy: str, *, reads: bool) -> None:
    """As ``enter``, for what replaces functions for a moment, which this thread may do inside of a block.

    reads: whether ``model`` is to run by its own ops, which a block of the same model has replaced.
    """
    thread, other, entered = _entered_by
    if not _ENTERED.locked() or thread != threading.get_ident():
        enter(stack, model, policy)
    elif reads and entered() is model:
        raise InputError(
            "policy", policy, f"to be used outside of a block of the same model: leave {other} first"
        )


def replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``make(current)``, and undo it when the stack closes."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, make(getattr(owner, name, None)))
    if own is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)
