"""What a response commits itself to: tables of cases, and laws that hold for any text."""

import copy
import json
import pickle
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.evals.answers import extract_letter, extract_number
from quantlab.evals.generated import Generated

# Commitments, however they are written.
COMMITTED = [
    ("Answer: B", "B"),
    ("answer: d", "D"),
    ("ANSWER: C", "C"),
    ("Answer B", "B"),
    ("Answer - B", "B"),
    ("Final answer - D", "D"),
    ("Answer = C", "C"),
    ("Answer:\n\nB", "B"),
    ("### Answer\nB", "B"),
    ("**Answer:** (C)", "C"),
    ("**Answer: C**", "C"),
    ("**Answer**: C", "C"),
    ("Answer: __C__", "C"),
    ("Answer: _C_", "C"),
    ("Answer: `C`", "C"),
    ("Answer: <b>C</b>", "C"),
    ("Answer: [C]", "C"),
    ('Answer: "C"', "C"),
    ("Answer: “C”", "C"),
    ("Answer: 【C】", "C"),
    ("<answer>C</answer>", "C"),
    ("The answer is B.", "B"),
    ("the answer is b.", "B"),
    ("The answer is B", "B"),
    ("The correct answer is therefore (C).", "C"),
    ("The answer would be D.", "D"),
    ("the answer must be (D)", "D"),
    ("The answer: option B", "B"),
    ("The correct option is: D", "D"),
    ("So the best choice is A.", "A"),
    ("Thus (B) is the correct answer.", "B"),
    ("So C is the right choice!", "C"),
    ("Option B is correct.", "B"),
    ("Answer: B.\n\nI hope that helps!", "B"),
    ("Answer: B (nearly certain)", "B"),
    ("Answer: B, since it is lighter", "B"),
    ("My answer is B because of its charge", "B"),
    ("Answer: B. 1.5 eV", "B"),
    ("Answer: B) ethanol", "B"),
    ("## Answer: **B) ethanol**", "B"),
    ("Answer: (B) 1.5 eV", "B"),
    ("We get 4. Answer: B", "B"),
    ("so the option is (B), the (Z)-isomer.", "B"),
    ("Answer: (C), (Z)-but-2-ene", "C"),
    ("(B): the (R) enantiomer", "B"),
    ("B", "B"),
    ("(b)", "B"),
    ("Both vanish.\n\n**C**", "C"),
    (r"\boxed{B}", "B"),
    (r"$\boxed{B}$ as claimed", "B"),
    (r"\[\boxed{\text{(B)}}\]", "B"),
    (r"\boxed{\mathrm{C}}", "C"),
    (r"\boxed{ \textbf{C} }", "C"),
    (r"\boxed{\boxed{C}}", "C"),
    (r"\fbox{C}", "C"),
    (r"\boxed{\text{Answer: } B}", "B"),
    (r"\boxed{B: 3.5\ \text{m}}", "B"),
    (r"The final answer is $\boxed{D}$.", "D"),
    (r"Answer: \(B\)", "B"),
    (r"Answer: $\textbf{B}$", "B"),
    ("Answer: Ｂ", "B"),
    ("Ａｎｓｗｅｒ：Ｃ", "C"),
    ("Answer: 𝐁", "B"),
    ("Answer: Ⓑ", "B"),
    ("Answer: ⒝", "B"),
    ("Answer:\u00a0\u200bB\ufe0f", "B"),
    ("Answer: A\nAnswer: C", "C"),
    ("The answer is A. Wait, no. The answer is D.", "D"),
    (r"\boxed{A} cannot be, so \boxed{B}", "B"),
    ("Answer: B\nAs asked: 'Answer: A/B/C/D'", "B"),
    ("Answer: B\nThe wrong answer is A.", "B"),
    ("Answer: B\n(If the answer is A, the mass is negative.)", "B"),
    ("<think>Answer: A</think>\nAnswer: B", "B"),
    ("the prompt opened it, answer: A</think>Answer: B", "B"),
    ("a</think>b</think>Answer: C", "C"),
]
# Letters that answer nothing.
UNCOMMITTED = [
    "",
    "option (A) looks right but",
    "(A) looks right but",
    "(A) one\n(B) two\n(C) three\n(D) four",
    "Answer: Aspirin",
    "Answer: Benzene, by symmetry",
    "Answer: (R)-2-butanol",
    "Answer: (D)-glucose",
    "Answer: D-glucose",
    "Answer: C-3 is attacked",
    "Answer: C60",
    "Answer: C=O stretch",
    "Answer: C₂H₆",
    "Answer: B12",
    "Answer: A ring expansion occurs",
    "The answer is a matter of taste.",
    "the answer is a ring",
    "Answer: A/B/C/D",
    "End with 'Answer: A/B/C/D', only one letter",
    "Answer: A, B, C, or D",
    "Answer: A or B",
    "Answer: (A) or (B)",
    "Answer: A and B",
    "Answer: A, B",
    "Answer: B\nNo: answer: A or C",
    "Answer: E",
    "The answer is not B.",
    "Is the answer B?",
    "If the answer is A, then the mass is negative.",
    "Suppose that the answer is A.",
    "The wrong answer is A.",
    "option B is not correct",
    r"\boxed{C_2H_6}",
    r"\boxed{\mathrm{CH_4}}",
    r"\boxed{B \text{ or } C}",
    r"\boxed{B",
    "<think>The answer is A",
    "<think>Answer: A\nAnswer: B",
    "Answer: A</think>",
    "Answer: A</think>so <think>Answer: B",
]


@pytest.mark.parametrize(("text", "letter"), COMMITTED)
def test_a_commitment_is_read(text, letter):
    assert extract_letter(text) == letter


@pytest.mark.parametrize("text", UNCOMMITTED)
def test_a_letter_that_answers_nothing_is_not_read(text):
    assert extract_letter(text) is None


def test_the_letters_are_those_of_the_choices():
    assert extract_letter("Answer: G", "ABCDEFGHIJ") == "G"
    assert extract_letter("Answer: I think so", "ABCDEFGHIJ") is None
    assert extract_letter("Answer: D", "ABC") is None
    assert extract_letter("Answer: (E)-but-2-ene", "ABCDEFGHIJ") is None
    assert extract_letter("Answer: A/B/C/D/E/F/G/H/I/J", "ABCDEFGHIJ") is None


def test_a_model_known_to_think_has_not_answered_before_its_thought_ends():
    assert extract_letter("Answer: B", thinking=True) is None
    assert extract_letter("Answer: A</think>Answer: B", thinking=True) == "B"
    assert extract_number("Answer: 7", thinking=True) is None


NUMBERS = [
    ("Answer: 42", 42),
    ("The answer is 42.", 42),
    ("3 + 4 = 7\n#### 7", 7),
    ("#### 1,234", 1234),
    ("#### -5", -5),
    (r"\boxed{042}", 42),
    (r"\boxed{1{,}234}", 1234),
    (r"$\boxed{12\,345}$", 12345),
    ("Answer: $1,234.50", Decimal("1234.5")),
    (r"Answer: \$18", 18),
    ("Answer: $18$", 18),
    ("Answer: **18**", 18),
    ("Answer:\n\n18", 18),
    ("Answer: １８", 18),
    ("Answer: 18 dollars a day", 18),
    ("Answer: 5km", 5),
    ("Answer: 5%", 5),
    ("Answer: 5.0", 5),
    ("Answer: -7", -7),
    ("Answer: −7", -7),
    ("Answer: x = 5", 5),
    ("Answer: 2 + 3 = 5", 5),
    ("Answer: 12\nAnswer: 13", 13),
    ("Answer: 12\nWhat else is there to say about 13", 12),
    ("<think>Answer: 3</think>Answer: 4", 4),
    ("the last number is 7", None),
    ("Answer: unknown", None),
    ("Answer: 3/4", None),
    ("Answer: 7, 8", None),
    ("Answer: 18 or 19", None),
    ("Answer: 10-12", None),
    ("Answer: 12:30", None),
    ("Answer: 2^{10}", None),
    (r"Answer: 2 \times 5", None),
    ("Answer: 1.5.2", None),
    ("Answer: " + "9" * 41, None),
    ("<think>Answer: 3", None),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_number_is_read_or_not(text, number):
    assert extract_number(text) == number


def test_a_range_admits_whole_numbers_only():
    def asked(text):
        return extract_number(text, lowest=0, highest=999)

    assert asked("Answer: 042") == 42
    assert asked("Answer: 999") == 999
    assert [asked(f"Answer: {x}") for x in ("1000", "-1", "3.5")] == [None] * 3
    assert asked("Answer: 7\nAnswer: 1000") is None


ANY_TEXT = st.text(st.characters(), max_size=200)  # halves of surrogate pairs too
# Texts in which the words that mean something are common.
PIECES = (
    "Answer",
    ":",
    " ",
    "A",
    "B",
    "(",
    ")",
    "or",
    "is",
    "the",
    "if",
    "\\boxed{",
    "}",
    "{",
    "\n",
    "**",
    "<answer>",
)
PIECES += (
    "\\",
    "/",
    ",",
    "</think>",
    "####",
    "1",
    ",000",
    "$",
    "=",
    "not",
    "option",
    "correct",
    "\\text",
    "_",
    "?",
)
WORDY = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@given(st.one_of(ANY_TEXT, WORDY), st.sampled_from("ABCD"))
@settings(max_examples=400, deadline=None)
def test_a_last_line_in_the_asked_form_is_the_answer_whatever_stands_before(text, letter):
    assert extract_letter(f"{text.replace('<think>', '')}\nAnswer: {letter}") == letter


@given(st.one_of(ANY_TEXT, WORDY), st.integers(0, 10**9))
@settings(max_examples=400, deadline=None)
def test_a_number_on_a_last_line_in_the_asked_form_is_the_answer(text, number):
    assert extract_number(f"{text.replace('<think>', '')}\nAnswer: {number}") == number


@given(st.one_of(ANY_TEXT, WORDY), st.sampled_from(("A", "ABCD", "ABCDEFGHIJ")))
@settings(max_examples=400, deadline=None)
def test_no_text_breaks_it_and_no_thought_counts(text, letters):
    found = extract_letter(text, letters)
    assert found is None or (found in letters and len(found) == 1)
    assert extract_letter(f"{text}<think>", letters) is None
    assert extract_letter(f"Answer: A{text}</think>", letters) is None
    number = extract_number(text)
    assert number is None or number.is_finite()


ADVERSARIAL = (
    "answer: ",
    "Answer: A or ",
    "\\boxed{",
    "\\boxed{\n",
    "\\boxed{B} ",
    "(A) ",
    "<answer ",
    "**",
    " ",
    "\n",
)
ADVERSARIAL += (
    "answer is the the the ",
    "A, ",
    "#### 1,234,",
    "<think>",
    "</think>",
    "if the answer ",
    "9",
    "9,999",
    "_",
)
ADVERSARIAL += ("{,}", "\\text", "answer: A/", "A is ", "\u0323\u0301", "\\", "{", "$")


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_a_megabyte_of_repetition_costs_what_its_length_does(piece):
    # A square law would need 10^12 steps here, days; no clock is read, the test simply would not end.
    text = piece * (1_000_000 // len(piece))
    extract_letter(text, "ABCDEFGHIJ")
    extract_number(text)


def test_a_generated_text_is_its_text_and_keeps_what_it_knows():
    made = Generated("Answer: B", 7, "length")
    assert made == "Answer: B"
    assert hash(made) == hash("Answer: B")
    assert json.dumps([made]) == '["Answer: B"]'
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy([made])[0]):
        assert (type(other), other, other.tokens, other.finish) == (Generated, "Answer: B", 7, "length")
    assert type(made.strip()) is str
    for change in (
        lambda: setattr(made, "tokens", 8),
        lambda: setattr(made, "note", 1),
        lambda: delattr(made, "tokens"),
    ):
        with pytest.raises(AttributeError, match="not changed"):
            change()


@pytest.mark.parametrize(
    ("tokens", "finish"), [(-1, "stop"), (1.5, "stop"), (True, "stop"), (1, "eos"), (1, None)]
)
def test_a_generated_text_with_made_up_facts_is_refused(tokens, finish):
    with pytest.raises(InputError):
        Generated("", tokens, finish)
