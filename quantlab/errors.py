"""The one error for bad input, and the helper that words it.  Imports nothing, so every layer may use it."""

import difflib
from collections.abc import Iterable

LONGEST_VALUE = 300  # characters of a value that a message quotes


class InputError(ValueError):
    """A user's argument is wrong.

    The message is one line: the argument, its value, what was expected.  The command line prints it and exits with
    status 2; nothing has been written by then.
    """

    def __init__(self, argument: str, value: object, expected: str):
        self.argument, self.value, self.expected = argument, value, expected
        # Libraries whose messages are quoted here write several lines; the user gets one, short enough to be read.
        try:
            shown = repr(value)
        except Exception:  # Python writes no number of thousands of digits
            shown = f"<{type(value).__name__}>"
        if len(shown) > LONGEST_VALUE:
            shown = f"{shown[:LONGEST_VALUE]}..."
        text = f"{argument} {shown}: expected {expected}"
        super().__init__(" ".join(line.strip() for line in text.splitlines()))

    def __reduce__(self):
        # Exceptions are rebuilt from args by pickle; workers send this one across process borders.
        return (InputError, (self.argument, self.value, self.expected))


def unknown_name(argument: str, value: object, valid: Iterable[str]) -> InputError:
    """An InputError for a name that is not in ``valid``: lists the valid names and the nearest one."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f" (nearest: {close[0]})" if close else ""
    return InputError(argument, value, f"one of {', '.join(names)}{hint}")
