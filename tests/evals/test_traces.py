"""Traces are read as they are, their answer is found where it is said, and what cannot be replayed is one line."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.evals.answers import extract_letter
from quantlab.evals.trace_answers import LetterTokens, decide, token_at
from quantlab.evals.traces import read_traces, traces_hash
from quantlab.models.reference import vocabulary as v

TOKENIZER = v.tokenizer()
GOOD = {"id": "one", "prompt": "2 + 2?", "response": "It is four. Answer: B"}


@pytest.fixture
def lm():
    embeddings = SimpleNamespace(num_embeddings=v.VOCABULARY_SIZE)
    model = SimpleNamespace(get_input_embeddings=lambda: embeddings)

    def encode(text, add_special_tokens=None):
        return TOKENIZER.encode(text, add_special_tokens=False)

    return SimpleNamespace(model=model, tokenizer=TOKENIZER, max_length=200, tok_encode=encode)


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "traces.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def test_text_and_ids_are_the_same_trace(lm, written):
    ids = {f"{name}_ids": lm.tok_encode(GOOD[name]) for name in ("prompt", "response")}
    (text,) = read_traces(written(GOOD), lm)
    (tokens,) = read_traces(written({"id": "one", **ids}), lm)
    assert text == tokens
    assert list(text.tokens) == ids["prompt_ids"] + ids["response_ids"]
    assert traces_hash([text]) == traces_hash([tokens])
    (other,) = read_traces(written(GOOD | {"id": "two"}), lm)
    assert traces_hash([other]) != traces_hash([text])
    assert (other.tokens, other.sequence_id == text.sequence_id) == (text.tokens, False)


def test_the_answer_is_at_the_token_of_its_letter(lm, written):
    rows = [
        GOOD | {"answer": "C"},
        GOOD | {"id": "2", "response": "Not A or D, so the answer is (C). All A aside."},
        GOOD | {"id": "3", "response": "I cannot tell"},
        GOOD | {"id": "4", "letters": ""},
        GOOD | {"id": "5", "response": " s00 + 1 3 Answer: 7 End", "letters": "0123456789", "answer": "3"},
        GOOD | {"id": "6", "response": "<think>Answer: B", "thinking": True},
    ]
    one, two, none, unasked, digit, thought = (trace.answer for trace in read_traces(written(*rows), lm))
    for row, answer, said in ((rows[0], one, "B"), (rows[1], two, "C"), (rows[4], digit, "7")):
        ids = lm.tok_encode(row["response"])
        assert TOKENIZER.decode([ids[answer.index]]).strip() == said
        assert row.get("letters", "ABCD")[answer.said] == said
        assert all(TOKENIZER.decode([t]).strip() == "ABCD0123456789"[i + 4 * said.isdigit()]
                   for i, group in enumerate(answer.tokens) for t in group)  # fmt: skip
    assert (one.wanted, two.wanted, digit.wanted) == (2, 2, 3)
    # The letter alone, and behind a blank: two tokens of this vocabulary.
    assert [len(group) for group in one.tokens] == [2, 2, 2, 2]
    assert (none, unasked, thought) == (None, None, None)


def test_an_end_token_is_no_part_of_the_answer(lm, written):
    end = TOKENIZER.convert_tokens_to_ids("<eos>")
    ids = [*lm.tok_encode(GOOD["response"]), end]
    (trace,) = read_traces(written({"id": "1", "prompt": "x", "response_ids": ids}), lm)
    assert trace.response[-1] == end
    assert trace.answer.index == len(ids) - 2


SAYINGS = [
    "Answer: {}",
    "the answer is ({}).",
    r"\boxed{{\text{{{}}}}}",
    "**Answer: {}**",
    "({}) is the correct answer",
]
NOISE = ["A cat sat.", "If the answer is B, no.", "Answer: A", "(C) fails", "A or D"]
ASIDES = ["A cat sat.", "Now B and D fail.", "(C) fails"]


@given(
    st.lists(st.sampled_from(NOISE), max_size=4),
    st.sampled_from(SAYINGS),
    st.sampled_from("ABCD"),
    st.booleans(),
    st.lists(st.sampled_from(ASIDES), max_size=3),
)
def test_the_place_decides(before, saying, letter, again, behind):
    """Every other letter put there is what the extraction then reads; the letters behind it say nothing."""
    said = saying.format(letter)
    text = "\n".join([*before, said, *([said] if again else []), *behind])
    found, place = decide(text, "ABCD")
    assert found == letter == text[place]
    assert text.rindex(said) <= place < text.rindex(said) + len(said)
    for other in "ABCD":
        assert extract_letter(text[:place] + other + text[place + 1 :], "ABCD") == other


def test_letters_in_other_dress_and_in_no_answer():
    assert decide("Answer: Ｂ", "ABCD") == ("B", 8)
    assert decide("answer: b", "ABCD") == ("B", 8)
    assert decide("Aspirin is (R)-2-butanol", "ABCD") is None
    assert decide("Answer: 12", "0123456789") is None
    assert decide("#### 4", "0123456789") == ("4", 5)


@given(st.text(alphabet="aé€😀 B", min_size=1, max_size=12), st.integers(0, 11))
def test_the_token_of_a_character_of_several_bytes(text, place):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    text = TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)
    place = min(place, len(text) - 1)
    found = token_at(
        ids, place, lambda part: TOKENIZER.decode(list(part), clean_up_tokenization_spaces=False)
    )
    if text[place].isascii():
        assert text[place] in TOKENIZER.decode([ids[found]])


def test_letter_tokens_are_letters_alone():
    pieces = ["A", "\u0120A", "\u2581(A", "A.", "##A", "AB", "B", "a", "b", "<|A|>", "1"]

    class Tokenizer:
        all_special_ids = (6,)

        def __len__(self):
            return len(pieces)

        def convert_ids_to_tokens(self, ids):
            return [pieces[i] for i in ids]

    found = LetterTokens(Tokenizer(), 100)
    assert found.of("AB", 0) is None  # the only B is special
    assert found._tokens == {"A": [0, 1, 2, 3], "a": [7], "b": [8], "1": [10]}
    assert found.of("AB", 7) == ((7,), (8,))


LINES = {
    "not JSON": ["{"],
    "a list": [[1, 2]],
    "no id": [{"prompt": "a", "response": "b"}],
    "no response": [{"id": "1", "prompt": "a"}],
    "both forms": [GOOD | {"response_ids": [1]}],
    "an unknown key": [GOOD | {"respones": "b"}],
    "an empty response": [GOOD | {"response": ""}],
    "an empty prompt": [GOOD | {"prompt_ids": [], "prompt": None}],
    "no text": [GOOD | {"response": 7}],
    "no ids": [{"id": "1", "prompt": "a", "response_ids": [1.5]}],
    "tokens beyond the vocabulary": [{"id": "1", "prompt": "a", "response_ids": [1, v.VOCABULARY_SIZE]}],
    "negative tokens": [{"id": "1", "prompt": "a", "response_ids": [-1]}],
    "an unknown letter": [GOOD | {"answer": "E"}],
    "letters twice": [GOOD | {"letters": "ABA"}],
    "small letters": [GOOD | {"letters": "ab"}],
    "one letter": [GOOD | {"letters": "A"}],
    "letters and digits": [GOOD | {"letters": "A1"}],
    "a prompt beyond the context": [GOOD | {"prompt": "x" * 200}],
    "a blank line": ["", GOOD],
}
SAYS = {
    "not JSON": "one JSON object",
    "a list": "a JSON object",
    "no id": "an id",
    "no response": "one of response and response_ids",
    "both forms": "one of response and response_ids",
    "an unknown key": r"nearest: response\)",
    "an empty response": "at least one token",
    "an empty prompt": "at least one token",
    "no text": "text",
    "no ids": "a list of token ids",
    "tokens beyond the vocabulary": f"0 to {v.VOCABULARY_SIZE - 1}; it has {v.VOCABULARY_SIZE}",
    "negative tokens": "it has -1",
    "an unknown letter": "one of the letters ABCD",
    "letters twice": "different upper-case letters",
    "small letters": "different upper-case letters",
    "one letter": "two or more",
    "letters and digits": "upper-case letters, or digits",
    "a prompt beyond the context": "at most 200 tokens, the model's context",
    "a blank line": "one JSON object",
}


@pytest.mark.parametrize("what", LINES)
def test_what_cannot_be_replayed_is_one_line(what, lm, written):
    with pytest.raises(InputError, match=SAYS[what]) as error:
        read_traces(written(*LINES[what]), lm)
    assert "line 1" in str(error.value)
    assert "\n" not in str(error.value)
    assert GOOD["prompt"] not in str(error.value)


def test_bad_files_are_one_line(lm, written, tmp_path):
    with pytest.raises(InputError, match="at least one trace"):
        read_traces(written(), lm)
    with pytest.raises(
        InputError, match=r"line 1 and traces.jsonl line 3': expected ids that are there once"
    ):
        read_traces(written(GOOD, GOOD | {"id": "two"}, GOOD), lm)
    with pytest.raises(InputError, match="No such file"):
        read_traces(tmp_path / "none.jsonl", lm)
    with pytest.raises(InputError, match="log-samples-with-text"):
        read_traces(tmp_path, lm)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    with pytest.raises(InputError, match="UTF-8 text, but byte 8 is not"):
        read_traces(tmp_path / "latin.jsonl", lm)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples_gpqa_2026.jsonl").write_text(json.dumps({"doc_id": 0}) + "\n")
    with pytest.raises(InputError, match="generated responses with their text"):
        read_traces(tmp_path / "run", lm)


def test_a_limit_takes_the_first_and_a_number_is_an_id(lm, written):
    path = written(GOOD | {"id": 3}, GOOD | {"id": "4"}, GOOD | {"id": 5})
    assert [trace.number for trace in read_traces(path, lm, 2)] == [0, 1]
