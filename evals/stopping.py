"""When a generated sequence is over, and what of it is the answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantlab.evals.generated import Finish


@dataclass(frozen=True)
class Stops:
    """What ends a sequence.

    ends: end-of-sequence tokens.  texts: stop strings.  raw: tokens -> text with special tokens, in which stop strings
    are looked for.  plain: tokens -> text without them, the answer's.  think_end: the token, or the text where it is no
    single token, that ends a thinking model's thoughts: before it stop strings end nothing, and what follows it is the
    answer.
    """

    ends: frozenset[int]
    texts: tuple[str, ...]
    raw: Callable[[list[int]], str]
    plain: Callable[[list[int]], str]
    think_end: int | str | None = None

    def answer(self, tokens: Sequence[int]) -> str:
        """The text behind the last end of thinking, up to the first stop string.

        Empty if thinking never ended: what was cut off in the middle of a thought is no answer.
        """
        kept = list(tokens)
        if isinstance(self.think_end, int):
            if self.think_end not in kept:
                return ""
            kept = kept[len(kept) - kept[::-1].index(self.think_end) :]
        text = self.plain(kept)
        if isinstance(self.think_end, str):
            _, found, text = text.rpartition(self.think_end)
            if not found:
                return ""
        if self.think_end is not None:
            text = text.lstrip()
        for stop in self.texts:
            text = text.partition(stop)[0]
        return text


class Watch:
    """One sequence as it grows.  tokens: what was generated; finish: why it ended, None while it goes on."""

    def __init__(self, stops: Stops, limit: int):
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._stops, self._limit = stops, limit
        self._answer = 0 if stops.think_end is None else None  # where the answer begins, once it does
        texts = [*stops.texts, *([stops.think_end] if isinstance(stops.think_end, str) else [])]
        # A token is a byte or more; a few more make up for halves of characters and tokens without text.
        self._reach = max((len(text.encode()) for text in texts), default=0) + 8
        self._reads = bool(texts)

    @property
    def left(self) -> int:
        """How many tokens it may still have."""
        return 0 if self.finish else self._limit - len(self.tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """The next tokens; those behind the end are dropped."""
        tokens = list(tokens)
        # Text is looked at once for all of them, and token by token only where something was found.
        closely = self._reads and self._found([*self.tokens[-self._reach :], *tokens])
        for token in tokens:
            if self.finish:
                return
            self.tokens.append(token)
            if self._answer is None and token == self._stops.think_end:
                self._answer = len(self.tokens)
            if token in self._stops.ends or (closely and self._over()):
                self.finish = "stop"
            elif len(self.tokens) == self._limit:
                self.finish = "length"

    def _found(self, tokens: list[int]) -> bool:
        text, think_end = self._stops.raw(tokens), self._stops.think_end
        thinking = self._answer is None and isinstance(think_end, str) and think_end in text
        return thinking or any(stop in text for stop in self._stops.texts)

    def _over(self) -> bool:
        """Whether a stop string stands in the answer; notes where the answer begins."""
        first = max(0, len(self.tokens) - self._reach)
        if self._answer is None:
            think_end = self._stops.think_end
            if isinstance(think_end, str) and think_end in self._stops.raw(self.tokens[first:]):
                self._answer = len(self.tokens)
            return False
        text = self._stops.raw(self.tokens[max(first, self._answer) :])
        return any(stop in text for stop in self._stops.texts)
