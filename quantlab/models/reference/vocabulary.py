"""The vocabulary of the reference models: one token a byte, and the words of their tasks as one token each.

A word of a task is a token together with the blank before it, so that a prompt is plain text: " k05 v33 k12 v01".  In
running text the same letters between blanks are the same tokens.
"""

import functools
import re
from typing import Any

KEYS = tuple(f"k{i:02d}" for i in range(64))
VALUES = tuple(f"v{i:02d}" for i in range(64))
FILLERS = tuple(f"f{i:02d}" for i in range(32))
LETTERS = ("A", "B", "C", "D")
QUESTION, RECALL, ANSWER, YES, NO = "Q", "?", "ANS", "YES", "NO"
STEPS = tuple(f"s{i:02d}" for i in range(32))
DIGITS = tuple(str(i) for i in range(10))
START, PLUS, MINUS, WORK, RESULT, END = "Start", "+", "-", "Work", "Answer:", "End"
WORDS = (
    *KEYS, *VALUES, *FILLERS, *LETTERS, QUESTION, RECALL, ANSWER, YES, NO,
    *STEPS, *DIGITS, START, PLUS, MINUS, WORK, RESULT, END,
)  # fmt: skip

SPECIALS = ("<pad>", "<bos>", "<eos>")
FIRST_WORD = 256 + len(SPECIALS)
VOCABULARY_SIZE = FIRST_WORD + len(WORDS)

_PLACES = {word: FIRST_WORD + index for index, word in enumerate(WORDS)}


def token(word: str) -> int:
    """The id of a word."""
    return _PLACES[word]


def text(ids: Any) -> str:
    """Words as a prompt, each behind a blank."""
    return "".join(f" {WORDS[int(i) - FIRST_WORD]}" for i in ids)


@functools.cache
def tokenizer() -> Any:
    """A fast tokenizer of transformers: no file is read, and decoding gives the text back."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    blank = "\u0120"  # what a blank is in the byte alphabet
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {name: 256 + index for index, name in enumerate(SPECIALS)}
    vocabulary |= {blank + word: place for word, place in _PLACES.items()}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=None))
    core.normalizer = normalizers.ByteLevel()
    words = "|".join(re.escape(word) for word in sorted(WORDS, key=lambda word: (-len(word), word)))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{blank}(?:{words})(?={blank}|\u010a|$)|."), "isolated")
    core.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)
