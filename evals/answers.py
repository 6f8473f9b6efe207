r"""The answer that a response commits itself to, read from its text: a letter, or a number.

A response commits itself with "Answer: B", "the answer is (B)", "the correct option is B", "(B) is the correct
answer", ``\boxed{B}``, ``<answer>B</answer>`` and their like; of several the last one counts.  A letter inside a name
("(R)-2-butanol", "C-3", "Aspirin"), a repeated instruction ("Answer: A/B/C/D"), a choice left open ("A or B"), a
question, a supposition and thinking that has not ended commit to nothing: no answer is better than one made up.

Everything is linear in the length of the text: patterns are anchored at words found by a plain search, and every
repetition in them is bounded.
"""

import re
import unicodedata
from decimal import Decimal

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_LONGEST_BOX = 200  # characters: a box that holds more is no answer
_DEEPEST_BOX = 8  # braces
_LONGEST_NUMBER = 40


def extract_letter(text: str, letters: str = "ABCD", *, thinking: bool = False) -> str | None:
    """The letter of the last answer that ``text`` commits to, one of ``letters`` (upper case), or None.

    ``thinking``: the model is known to think first, so text without "</think>" is all thought, even where the prompt
    opened the thought and "<think>" is not in it.
    """
    plain = _plain(text, thinking)
    found: str | None = None
    spoken = False
    for head in _HEADS.finditer(plain):
        letter, retracted = _after(plain, head)
        if letter is None and head["reverse"]:
            letter = _letter(head["reverse"])
        if retracted:
            found, spoken = None, True
        elif letter is not None and letter in letters:
            found, spoken = letter, True
    return found if spoken else _bare_letter(plain, letters)


def extract_number(
    text: str, *, lowest: int | None = None, highest: int | None = None, thinking: bool = False
) -> Decimal | None:
    r"""The number of the last "Answer: X", ``\boxed{X}`` or "#### X" in ``text``, or None.

    With ``lowest`` and ``highest`` only whole numbers within them are answers.  Thousands' commas, currency signs,
    a unit behind the number and the left sides of equations are passed over.  ``thinking`` as in ``extract_letter``.
    """
    plain = _plain(text, thinking)
    found: Decimal | None = None
    for head in _NUMBER_HEADS.finditer(plain):
        if _SUPPOSED.search(plain[max(0, head.start() - 40) : head.start()]):
            continue
        number = _number(plain, head.end())
        if number is not None:
            found = number
    if found is None or lowest is None or highest is None:
        return found
    return found if found == found.to_integral_value() and lowest <= found <= highest else None


_OPEN, _CLOSE = r"[(\[\"'“‘«【「]", r"[)\]\"'”’»】」]"
# "answer" and "box" may be followed by the letter at once; "option" and "choice" need a verb, or they name one of many.
_REVERSE = (
    rf"(?<![\w-])(?P<reverse>{_OPEN}?[A-Ja-j]{_CLOSE}?) (?:is|was) (?:indeed |therefore |thus |clearly )?(?:the )?"
    r"(?:only )?(?:correct|right|best|final)(?: answer| option| choice|(?= ?[.\n]| ?\Z))"
)
_HEADS = re.compile(rf"\b(?P<word>answers?|options?|choices?)\b|{_REVERSE}", re.IGNORECASE)
_VERB = r"(?::|=|->|→|⇒|[-–—](?= )|is|are|was|to be|(?:must|should|would|will|can only|has to) be)"
_FILLER = (
    r"(?:the|option|choice|letter|answer|therefore|thus|hence|clearly|indeed|definitely|simply|likely|most|probably"
    r"|correct|right|final|best|labell?ed|given by)"
)
_LINK = re.compile(
    rf"\s{{0,4}}(?P<verb>{_VERB})?(?:\s{{0,4}}(?:{_FILLER}\b|{_VERB}(?!\w))){{0,5}}\s{{0,8}}", re.I
)
_ONE = rf"(?:{_OPEN}\s?[A-Za-z]\s?{_CLOSE}{{1,2}}|[A-Za-z])"
_LETTER = re.compile(rf"(?P<letter>{_OPEN}{{1,2}}\s?[A-Za-z]\s?{_CLOSE}{{1,2}}|[A-Za-z]){_CLOSE}?")
# What may stand behind an answer: an end, punctuation that ends something, or a word that begins a reason.  Anything
# else, "-2-butanol", "=O", "60", "₂", " glucose", makes the letter a part of a name.
_END = r"\s*\Z|[ \t]*\n"
_REASON = r"because|since|as|which|with|due|where|for|not"
_STOP = rf"[.,;:!]+(?=\s|\Z|{_CLOSE}|<)"
_CLOSED = re.compile(
    rf"{_END}|{_STOP}|\s"
)  # in brackets the letter stands for itself; the choice's text may follow
_CLOSED_BARE = re.compile(rf"{_END}|{_STOP}|\s[-–—→(\[]|\s(?:{_REASON})\b")
_CLOSED_SMALL = re.compile(rf"{_END}|{_STOP}|\s[-–—→]")  # "a" is an article too
_LINE_ENDS = re.compile(rf"{_END}|\.(?:\s|\Z)")
_MORE = re.compile(rf" ?(?:,? ?\b(?:or|and|and/or)\b ?|[,/&|;] ?){_ONE}(?![\w'’-])")
_MORE_CAPITAL = re.compile(
    r" ?(?:,? ?\b(?:or|and|and/or)\b ?|[,/&|;] ?)(?:(?:option|choice) )?"
    rf"(?:{_OPEN}\s?[A-Za-z]\s?{_CLOSE}{{1,2}}|[A-Z])(?![\w'’-])"
)
_SUPPOSED = re.compile(
    r"\b(?:if|whether|unless|suppose|supposing|assume|assuming|say|says|wrong|incorrect|another|other|next|first|second"
    r"|third|fourth|tempting|bad|worst|eliminated?)(?: that)?(?: the| an?)?(?: correct| right| final| best)? ?\Z",
    re.IGNORECASE,
)


def _after(plain: str, head: re.Match[str]) -> tuple[str | None, bool]:
    """(letter, False) of an answer behind ``head``; (None, True) where two are left open; (None, False) for none."""
    if head["word"] is None or _SUPPOSED.search(plain[max(0, head.start() - 40) : head.start()]):
        return None, False
    link = _LINK.match(plain, head.end())
    at = link.end() if link else head.end()
    verb = link is not None and link["verb"] is not None
    one = _LETTER.match(plain, at)
    if one is None:
        return None, False
    letter = _letter(one["letter"])
    bare = len(one.group()) == 1
    small = bare and one.group().islower()
    more = _MORE if small else _MORE_CAPITAL
    listed, end = 1, one.end()
    while listed < 12 and (next_one := more.match(plain, end)):
        listed, end = listed + 1, next_one.end()
    if listed > 1:  # two are a choice left open; three and more are the list that the prompt gave
        return None, listed == 2
    closed = (_CLOSED_SMALL if small else _CLOSED_BARE if bare else _CLOSED).match(plain, one.end())
    if closed is None:
        return None, False
    # "the answer (B)", "Answer B" at the end of a line; "option B is wrong", "answer (A) has a flaw" are none.
    named = head["word"].lower().startswith("answer") and _LINE_ENDS.match(plain, one.end())
    return (letter if verb or named else None), False


def _letter(text: str) -> str:
    return next(character for character in text if character.isalpha()).upper()


_ALONE = re.compile(rf"\s*{_OPEN}?([A-Za-z]){_CLOSE}?[.:]?\s*\Z")
_LED = re.compile(rf"\s*(?:{_OPEN}([A-Za-z]){_CLOSE}|([B-HJ-Z])\)?(?=:))\s?(?:[:.,;]|[-–—](?=\s))\s")


def _bare_letter(plain: str, letters: str) -> str | None:
    """A last line that is a letter and nothing else, or a single line that a letter leads: "(B): the other one"."""
    lines = plain.strip().rsplit("\n", 1)
    found = _ALONE.match(lines[-1][:24]) if len(lines[-1]) <= 24 else None
    if found is None and len(lines) == 1:
        found = _LED.match(lines[0][:24])
    if found is None:
        return None
    letter = _letter(found.group())
    return letter if letter in letters else None


_NUMBER_HEADS = re.compile(r"\banswers?\b|####", re.IGNORECASE)
_NUMBER_LINK = re.compile(
    r"\s{0,4}(?:(?::|=|is|are|was|->|→|⇒|[-–—](?= )|(?:must|should|would|will) be)(?!\w)\s{0,8}"
    r"|(?:the|therefore|thus|hence|simply|number|value|approximately|about|equal to|exactly|answer)\b\s{0,4}){0,6}"
)
_NUMBER = re.compile(
    r"(?:US)?[$€£¥]? ?(?P<sign>[-+−]?) ?[$€£¥]? ?"
    rf"(?P<digits>\d{{1,3}}(?:,\d{{3}}){{1,{_LONGEST_NUMBER // 4}}}|\d{{1,{_LONGEST_NUMBER}}})"
    rf"(?P<rest>\.\d{{1,{_LONGEST_NUMBER}}})?(?!\d)"
)
# Behind the number: the end of something, or a unit.  Operators and further numbers make it a part of something else.
_NUMBER_CLOSED = re.compile(
    rf"{_END}|[.;:!,](?=\s(?!\d)|\Z|{_CLOSE}|<)|{_CLOSE}|[%°€£]|[ ]?(?![\d+*×·/^=<>:,.;?(\[-])\S"
)
_JOINED = re.compile(r"\s?(?:or|and|to)\b\s?[$€£¥]?\d|\s?(?:times|cdot)\b|[A-Za-z_^]\d", re.IGNORECASE)


def _number(plain: str, at: int) -> Decimal | None:
    line_end = plain.find("\n", at, at + 400)
    link = _NUMBER_LINK.match(plain, at)
    at = link.end() if link else at
    if at > line_end >= 0:
        line_end = plain.find("\n", at, at + 400)
    # Of an equation the right side counts.
    line = plain[at : line_end if line_end >= 0 else at + 400]
    at += line.rfind("=") + 1
    at += len(plain[at : at + 8]) - len(plain[at : at + 8].lstrip(" "))
    one = _NUMBER.match(plain, at)
    if one is None or _JOINED.match(plain, one.end()) or not _NUMBER_CLOSED.match(plain, one.end()):
        return None
    sign = "-" if one["sign"] in ("-", "−") else ""
    return Decimal(sign + one["digits"].replace(",", "") + (one["rest"] or ""))


def _table() -> dict[int, str | None]:
    """Letters, digits and marks in other dress (full width, bold, circled) as ASCII; marks without width as nothing."""
    table: dict[int, str | None] = dict.fromkeys(
        [
            0xAD,
            *range(0x200B, 0x2010),
            0x2060,
            0xFE0E,
            0xFE0F,
            0xFEFF,
        ]  # soft hyphen, joiners, selectors, marks
    )
    for first, last in ((0xFF01, 0xFF5E), (0x1D400, 0x1D7FF), (0x249C, 0x24E9), (0x1F110, 0x1F149)):
        for point in range(first, last + 1):
            plain = unicodedata.normalize("NFKC", chr(point))
            if plain.isascii():
                table[point] = plain
    for first in (0x1F150, 0x1F170):  # white on black
        table.update({first + i: chr(ord("A") + i) for i in range(26)})
    table |= {0x3000: " ", 0xA0: " ", 0x202F: " ", 0x2009: " ", 0xFE55: ":", ord("∶"): ":"}
    return table


_PLAIN_CHARACTERS = _table()
_FONT = re.compile(
    r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:bf|rm|it|sf|tt|bb)|bf|rm|it|big|Big|left|right|bm)(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|,\\!)(?=\d{3})")
_SPACING = re.compile(r"\\(?:[,;:!> ()\[\]]|quad(?![A-Za-z])|qquad(?![A-Za-z])|displaystyle(?![A-Za-z])|$)")
_MARKS = re.compile(r"\*{1,3}|_{2,3}|`{1,3}|\$|[{}~]|(?<![\w_])_(?=\w)|(?<=\w)_(?![\w_])")
_TAG = re.compile(
    r"<(/?)(answer|final_answer|b|strong|i|em|u|mark|br|p|span)(?:\s[^<>\n]{0,40})?/?>", re.IGNORECASE
)
_BRACE = re.compile(r"[{}]")
_COMMAND = re.compile(r"\\(?=[A-Za-z])")


def _plain(text: str, thinking: bool) -> str:
    """``text`` behind its thinking, without markup, each box on a line of its own as "Answer: ..."."""
    _, close, after = text.rpartition(THINK_CLOSE)
    if (thinking and not close) or THINK_OPEN in after:
        return ""
    after = after.translate(_PLAIN_CHARACTERS).replace("\r\n", "\n").replace("\r", "\n")
    after = _THOUSANDS.sub(lambda mark: ",", after.replace("\\$", "$").replace("\\%", "%"))
    after = _unbox(after)
    after = _TAG.sub(
        lambda tag: ("\n" if tag[1] else "\nAnswer: ") if "answer" in tag[2].lower() else "", after
    )
    return _COMMAND.sub("", _MARKS.sub("", _SPACING.sub("", _FONT.sub("", after))))


def _unbox(text: str) -> str:
    parts, at = [], 0
    for box in re.finditer(r"\\f?boxed\s?\{|\\fbox\s?\{", text):
        if box.start() < at:
            continue  # a box in a box
        parts.append(text[at : box.start()])
        end = _closing(text, box.end())
        if end is None:  # cut off, or too long to be an answer
            end = text.find("\n", box.end())
            at = end if end >= 0 else len(text)
            continue
        inside = re.sub(r"\\f?box(?:ed)?\b", "", text[box.end() : end]).replace("\n", " ")
        parts.append(f"\nAnswer: {inside}\n")
        at = end + 1
    return "".join([*parts, text[at:]])


def _closing(text: str, at: int) -> int | None:
    depth = 1
    for brace in _BRACE.finditer(text, at, at + _LONGEST_BOX):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
        if depth > _DEEPEST_BOX:
            return None
    return None
