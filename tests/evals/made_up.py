"""Invented rows in GPQA's columns, as many and as long as the real ones: none is true and none comes from GPQA.

Every question and every choice carries ``CANARY``, so that a test can tell whether any text has got into a file.
``python tests/evals/made_up.py FILE.csv`` writes the 198 rows for trials.
"""

import csv
import random
import sys
from pathlib import Path

CANARY = "zqx-canary-4417"
ROWS = 198
WORDS = 200
"""Of a question: at least as many tokens of any tokenizer."""
COLUMNS = ("Record ID", "Subdomain", "Question", "Correct Answer")
COLUMNS += ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_SYLLABLES = (
    "vor",
    "mel",
    "tash",
    "qui",
    "ond",
    "bril",
    "esk",
    "ula",
    "fen",
    "dru",
    "zim",
    "orr",
    "pal",
    "nev",
)
# What extraction has to live with: letters in names, choices that look like letters, brackets and numbers.
_KINDS = (
    "({r})-2-{w}ol",
    "{w}-{r}-glucose",
    "{n}.0",
    "({r}) and {w}",
    "C{n}H{n}",
    "None",
    "vitamin {r}",
    "{n} {w}s",
)


def rows(count: int = ROWS, words: int = WORDS, seed: int = 0) -> list[dict[str, str]]:
    """``count`` different rows with questions of ``words`` words and four different choices each."""
    draw = random.Random(seed)

    def word() -> str:
        return "".join(draw.choices(_SYLLABLES, k=draw.randint(2, 3)))

    made = []
    for number in range(count):
        asked = " ".join(word() for _ in range(max(0, words - 6)))
        kinds = draw.sample(_KINDS, 4)
        choices = [k.format(r=draw.choice("ABCDEFRSZ"), w=word(), n=draw.randint(2, 60)) for k in kinds]
        texts = [f"{choice} {CANARY}" for choice in choices]
        question = f"Case {number} {CANARY}: {asked}. Which follows?"
        made.append(dict(zip(COLUMNS, (f"made-up-{number}", "Invented", question, *texts), strict=True)))
    return made


def write(path: Path, table: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(table)
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]), rows())
