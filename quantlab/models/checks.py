"""What a model must be for its decode state to be held under a policy, and whether memory holds the states."""

import contextlib
import re
from collections.abc import Iterator

from torch import nn

from quantlab.errors import InputError


def check_model(value: object) -> None:
    """InputError for what is no model, for a compiled one, and for one whose weights are not loaded."""
    if not isinstance(value, nn.Module):
        raise InputError("model", type(value).__name__, "a loaded model (torch.nn.Module)")
    for name, part in value.named_modules():
        place = f"{type(part).__name__} at {name}" if name else type(part).__name__
        if hasattr(part, "_orig_mod"):  # what torch.compile returns
            expected = (
                "a model that is not compiled: pass model._orig_mod"
                if not name
                else f"{name}._orig_mod there"
            )
            raise InputError("model", f"{place}, compiled", expected)
        if getattr(part, "_compiled_call_impl", None) is not None:  # what Module.compile leaves
            raise InputError("model", f"{place}, compiled", "a model on which compile() was not called")
    absent = [name for name, weight in value.named_parameters() if weight.is_meta]
    if absent:
        found = f"{type(value).__name__} with {len(absent)} weights on the meta device ({absent[0]})"
        raise InputError("model", found, "loaded weights: from_pretrained, or to_empty and load_state_dict")


@contextlib.contextmanager
def in_memory(argument: str, value: object, expected: str) -> Iterator[None]:
    """InputError of these where what is allocated inside does not fit."""
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        # An allocator in vain, or a size that torch has no integer for; whatever else is no matter of memory.
        if not re.search("allocat|out of memory|overflow|too big", str(error), re.IGNORECASE):
            raise
        raise InputError(argument, value, expected) from error
