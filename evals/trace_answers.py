"""Where in a reasoning trace its answer is said, and which tokens could have said another.

The character that decides is found by what it does: with another letter in its place the trace commits itself to that
letter.  So it is the one that ``answers`` reads, through markup, boxes and repetitions.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantlab.evals.answers import extract_letter, extract_number

# What a token may hold beside the letter; a piece of a longer word ("##A") is no letter.
_AROUND = " \t\n\r\u0120\u010a\u2581([{)]}\"'*`$.,:;"


@dataclass(frozen=True)
class Answer:
    """The place at which a trace says its answer.

    index: of the token, counted in the response.  said: index of the letter that the trace says.  wanted: of the gold
    letter, or of the one said where nobody told the gold one.  tokens: of each letter, all tokens that are it.
    """

    index: int
    said: int
    wanted: int
    tokens: tuple[tuple[int, ...], ...]


def decide(text: str, letters: str, *, thinking: bool = False) -> tuple[str, int] | None:
    """(letter, its place in ``text``) of the answer that ``text`` commits to, or None.

    letters: upper-case letters, or digits, of which numbers from 0 to 9 are answers.
    """
    found = _extract(text, letters, thinking)
    if found is None:
        return None
    for place in range(len(text) - 1, -1, -1):
        character = text[place]
        same = unicodedata.normalize("NFKC", character).strip("()")
        beside = text[max(0, place - 1) : place], text[place + 1 : place + 2]
        if same.upper() != found or any(neighbour.isalnum() for neighbour in beside):
            continue
        other = letters[(letters.index(found) + 1) % len(letters)]
        swapped = text[:place] + (other.lower() if same.islower() else other) + text[place + 1 :]
        if _extract(swapped, letters, thinking) == other:
            return found, place
    return None


def _extract(text: str, letters: str, thinking: bool) -> str | None:
    if not letters.isdigit():
        return extract_letter(text, letters, thinking=thinking)
    number = extract_number(text, lowest=0, highest=9, thinking=thinking)
    return str(int(number)) if number is not None and str(int(number)) in letters else None


def token_at(ids: Sequence[int], place: int, decode: Callable[[Sequence[int]], str]) -> int | None:
    """Index of the token that brings the character at ``place`` of ``decode(ids)``, or None.

    A token that ends within a character decodes to something else, so a prefix may be a little longer or shorter than
    its text: the tokens near the one that is found by length are looked at.
    """
    text = decode(ids)
    count = bisect_right(range(len(ids) + 1), place, key=lambda n: len(decode(ids[:n])))
    for n in range(max(1, count - 4), min(len(ids), count + 4) + 1):
        before, behind = decode(ids[: n - 1]), decode(ids[:n])
        if len(before) <= place < len(behind) and text.startswith(behind):
            return n - 1
    return None


class LetterTokens:
    """The tokens of a vocabulary that are one letter or digit, with blanks, brackets, quotes and the like around it."""

    def __init__(self, tokenizer: Any, vocabulary: int):
        special = set(tokenizer.all_special_ids)
        self._tokens: dict[str, list[int]] = {}
        known = min(vocabulary, len(tokenizer))
        for token, piece in enumerate(tokenizer.convert_ids_to_tokens(list(range(known)))):
            plain = (piece or "").strip(_AROUND)
            if len(plain) == 1 and plain.isascii() and plain.isalnum() and token not in special:
                self._tokens.setdefault(plain, []).append(token)

    def of(self, letters: str, token: int) -> tuple[tuple[int, ...], ...] | None:
        """Tokens of each letter, in the case in which ``token`` says one; None if ``token`` or a letter is none."""
        for names in (letters, letters.lower()):
            found = tuple(tuple(self._tokens.get(name, ())) for name in names)
            if all(found) and any(token in group for group in found):
                return found
        return None
