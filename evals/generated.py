"""A generated text that remembers how long it is and why it ended.  lm-eval's pipeline carries it as the text it is."""

from typing import Any, Literal, NoReturn, get_args

from quantlab.errors import InputError

Finish = Literal["stop", "length"]
"""Why generation ended: the model or a stop string ended it, or the token limit cut it off."""
FINISHES: tuple[str, ...] = get_args(Finish)


class Generated(str):
    """A response as str, with ``tokens`` (generated tokens, thinking and end token included) and ``finish``.

    Immutable, equal to and hashed as its text, written to JSON as its text; pickling and copying keep all three.
    Slicing and other str methods give plain str: a changed text has no token count.  Raises InputError for a
    negative count or an unknown finish.
    """

    __slots__ = ("finish", "tokens")
    tokens: int
    finish: Finish

    def __new__(cls, text: str, tokens: int, finish: Finish) -> "Generated":
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InputError("tokens", tokens, "a count of generated tokens")
        if finish not in FINISHES:
            raise InputError("finish", finish, " or ".join(FINISHES))
        made = super().__new__(cls, text)
        object.__setattr__(made, "tokens", tokens)
        object.__setattr__(made, "finish", finish)
        return made

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Generated is not changed ({name})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Generated is not changed ({name})")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Generated, (str(self), self.tokens, self.finish))
