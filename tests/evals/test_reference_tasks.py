"""The reference models' tasks, read as text by a reader of their own: a dictionary, and Python's arithmetic."""

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.evals import manual_text, reference_tasks, running_arithmetic
from quantlab.evals.state_recall import Level, questions, sequences
from quantlab.models.reference import vocabulary as v

LEVELS = st.builds(
    lambda facts, registers, updates, share, spare: Level(
        facts, registers, updates, share if registers else 0.0, min(64, max(4, facts + registers + spare))
    ),
    st.integers(4, 24),
    st.integers(0, 8),
    st.integers(0, 40),
    st.floats(0, 1),
    st.integers(0, 32),
)


def read(words):
    """What keys hold at the end, how often each was written, and what is behind."""
    held, writes, place = {}, {}, 0
    while words[place] != "Q":
        key, value = words[place : place + 2]
        if key.startswith("k"):
            held[key] = value
            writes[key] = writes.get(key, 0) + 1
        else:
            assert key.startswith("f")
            assert value.startswith("f")
        place += 2
    return held, writes, words[place:]


@given(LEVELS, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_question_is_answered_by_what_was_written_last(level, seed):
    found = questions(level, 3, seed)
    assert found.tokens.shape == (3, level.tokens)
    for row in range(3):
        words = v.text(found.tokens[row]).split()
        held, writes, question = read(words)
        assert len(held) == level.facts + level.registers
        assert {int(key[1:]) for key in held} <= set(range(level.keys))
        assert question[0] == "Q"
        key, options = question[1], dict(zip(question[3:11:2], question[4:12:2], strict=True))
        assert question[2] == "?"
        assert question[11] == "ANS"
        assert list(options) == list("ABCD")
        assert options[question[12]] == held[key]
        assert v.VALUES[found.value[row, 0]] == held[key]
        assert "ABCD"[found.choice[row, 0]] == question[12]
        assert writes[key] == 1, "a fact is written once"
        assert len(set(options.values())) == 4
        others = {value for other, value in held.items() if value != held[key]}
        wrong = {value for letter, value in options.items() if letter != question[12]}
        assert len(wrong - others) <= max(0, 3 - len(others)), "wrong options are what other keys hold"
        assert words[found.recall[row, 0]] == "?"
        assert words[found.letter[row, 0]] == "ANS"
        assert [words[place] for place in found.options[row, 0]] == list(options.values())


def test_several_questions_stand_behind_each_other_and_ask_about_registers_too():
    rng = np.random.default_rng(3)
    found = sequences(rng, np.full(200, 6), 6, 30, np.full(200, 0.7), 4, 32)
    of_registers = 0
    for row, tokens in enumerate(found.tokens):
        words = v.text(tokens).split()
        held, writes, rest = read(words)
        for number in range(4):
            question = rest[13 * number : 13 * number + 13]
            assert held[question[1]] == v.VALUES[found.value[row, number]]
            assert question[12] == "ABCD"[found.choice[row, number]]
            of_registers += writes[question[1]] > 1
    assert of_registers > 100  # of 800, half of them about one of six registers


def test_nothing_marks_a_register_when_it_is_first_written():
    """Its place among the first writes, its key and the right letter are uniform: chi-squared, p > 1e-4 each."""
    from scipy.stats import chisquare

    found = questions(Level(8, 4, 24), 4000, 7)
    places, keys = np.zeros(12), np.zeros(32)
    for tokens in found.tokens:
        words = v.text(tokens).split()
        first = words[0:24:2]
        _, writes, _ = read(words)
        for place, key in enumerate(first):
            if writes[key] > 1:
                places[place] += 1
                keys[int(key[1:])] += 1
    assert chisquare(places).pvalue > 1e-4
    assert chisquare(keys).pvalue > 1e-4
    assert chisquare(np.bincount(found.choice[:, 0], minlength=4)).pvalue > 1e-4


def test_shorter_rows_keep_their_length_with_fillers():
    facts = np.array([2, 8, 5])
    found = sequences(np.random.default_rng(0), facts, 3, 6, np.ones(3), 1, 16)
    for row, count in enumerate(facts):
        held, _, _ = read(v.text(found.tokens[row]).split())
        assert len(held) == count + 3


def test_the_default_questions_are_what_they_always_were():
    """Results of two releases are of the same items."""
    digest = hashlib.sha256(
        np.ascontiguousarray(questions(Level(), 198, 0).tokens, "<i8").tobytes()
    ).hexdigest()
    assert digest[:16] == "91c948cc38a9a00b"
    prompts, rest = running_arithmetic.problems(8, 198, 0)
    joined = np.ascontiguousarray(np.concatenate([prompts, rest], 1), "<i8")
    assert hashlib.sha256(joined.tobytes()).hexdigest()[:16] == "478fe75769b5cea1"


def test_the_fewer_items_begin_the_more():
    """198 questions are the first of 2,000, so that a wider study holds the narrow one."""
    few, more = questions(Level(updates=9), 70, 0), questions(Level(updates=9), 198, 0)
    for name, part in vars(few).items():
        assert np.array_equal(part, getattr(more, name)[:70]), name
    assert len(np.unique(more.tokens, axis=0)) == 198
    for few_part, more_part in zip(
        running_arithmetic.problems(5, 70, 1), running_arithmetic.problems(5, 130, 1), strict=True
    ):
        assert np.array_equal(few_part, more_part[:70])


@given(st.integers(1, 32), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_pad_does_what_the_steps_say(steps, seed):
    prompts, rest = running_arithmetic.problems(steps, 2, seed)
    assert (prompts.shape, rest.shape) == ((2, 3 + 3 * steps), (2, 4 * steps + 3))
    for prompt, pad in zip(prompts, rest, strict=True):
        words, lines = v.text(prompt).split(), v.text(pad).split()
        assert words[0] == "Start"
        assert words[-1] == "Work"
        value = int(words[1])
        for number in range(steps):
            name, sign, amount = words[2 + 3 * number : 5 + 3 * number]
            value = (value + int(sign + amount)) % 10
            assert lines[4 * number : 4 * number + 4] == [name, sign, amount, str(value)]
        assert lines[-3:] == ["Answer:", str(value), "End"]


def test_a_prompt_is_one_token_a_word():
    found = questions(Level(8, 4, 20), 3, 0)
    for tokens in found.tokens:
        text = v.text(tokens)
        assert v.tokenizer()(text).input_ids == tokens.tolist()
        assert v.tokenizer().decode(tokens) == text


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text):
    ids = v.tokenizer()(text).input_ids
    assert v.tokenizer().decode(ids, clean_up_tokenization_spaces=False) == text
    assert max(ids, default=0) < v.VOCABULARY_SIZE


def test_words_within_words_are_bytes():
    """ " A" of " And" is no letter of an answer."""
    ids = v.tokenizer()(" And A ANSWER k05x k05").input_ids
    words = [i - v.FIRST_WORD for i in ids if i >= v.FIRST_WORD]
    assert [v.WORDS[i] for i in words] == ["A", "k05"]


def test_held_out_topics_are_apart_and_whatever_a_release_has():
    from pydoc_data.topics import topics

    train, test = manual_text.topics(held_out=False), manual_text.topics(held_out=True)
    assert set(train) | set(test) == set(topics.values())
    assert set(train).isdisjoint(test), "no text is in both, under whatever names"
    assert len(set(test)) == len(test)
    # By the first byte of the SHA-256 of the name, which no release changes.
    chosen = [name for name in topics if hashlib.sha256(name.encode()).digest()[0] % 5 == 0]
    assert {topics[name] for name in chosen} >= set(test)
    assert set(train) == {topics[name] for name in topics if name not in chosen}
    assert train
    assert test


def test_datasets_are_what_the_generators_say():
    rows = reference_tasks.state_recall(items=5, updates=16)["test"]
    found = questions(Level(updates=16), 5, 0)
    for row, tokens, choice in zip(rows, found.tokens, found.choice[:, 0], strict=True):
        assert row["prompt"] + " " + "ABCD"[row["answer"]] == v.text(tokens)
        assert row["answer"] == choice
        assert row["prompt"].startswith(row["recall_prompt"])
        assert row["recall_prompt"].endswith(" ?")
    for row in reference_tasks.arithmetic(items=4, steps=3)["test"]:
        value, words = 0, row["prompt"].split()
        value = int(words[1]) + sum(int("".join(words[i + 1 : i + 3])) for i in range(2, 11, 3))
        assert row["answer"] == str(value % 10)
    pieces = reference_tasks.text(items=7)["test"]["text"]
    assert len(pieces) == 7
    assert all(re.search("[a-z]", piece) for piece in pieces)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"facts": 0}, "facts"),
        ({"facts": 30, "registers": 8}, "facts"),
        ({"updates": -1}, "updates"),
        ({"share": 1.5}, "share"),
        ({"registers": 0}, "share"),
        ({"keys": 65}, "keys"),
    ],
)
def test_levels_that_are_none(arguments, found):
    with pytest.raises(InputError) as error:
        Level(**arguments)
    assert error.value.argument == found


@pytest.mark.parametrize("items", [0, -3, 1.5, True, "many", None])
def test_counts_that_are_none(items):
    with pytest.raises(InputError, match="items"):
        reference_tasks.state_recall(items=items)


@pytest.mark.parametrize("steps", [0, 33])
def test_steps_without_names(steps):
    with pytest.raises(InputError, match="steps"):
        running_arithmetic.problems(steps, 1, 0)
