"""Where a sequence ends and what of it is the answer.  Tokens are characters here."""

import pytest

from quantlab.evals.stopping import Stops, Watch

END = 0


def stops(*texts, think_end=None, ends=(END,)):
    def read(tokens):
        return "".join(chr(token) for token in tokens if token != END)

    return Stops(frozenset(ends), texts, read, read, think_end)


def watched(text, made, limit=1000, block=1):
    watch, tokens = Watch(made, limit), [ord(c) for c in text]
    for first in range(0, len(tokens), block):
        watch.add(tokens[first : first + block])
        if watch.finish:
            break
    return watch


@pytest.mark.parametrize("block", [1, 3, 16])
def test_a_stop_string_ends_a_sequence_at_its_last_token(block):
    made = stops("\n\n", "Question:")
    watch = watched("The answer is B.\n\nQuestion: and on", made, block=block)
    assert watch.finish == "stop"
    assert "".join(map(chr, watch.tokens)) == "The answer is B.\n\n"
    assert made.answer(watch.tokens) == "The answer is B."


@pytest.mark.parametrize("block", [1, 4, 16])
def test_an_end_token_counts_and_ends(block):
    watch = watched("ab\0cd", stops("zz"), block=block)
    assert (watch.finish, watch.tokens) == ("stop", [97, 98, END])
    assert stops().answer(watch.tokens) == "ab"


@pytest.mark.parametrize("block", [1, 4, 16])
def test_the_limit_is_exact(block):
    watch = watched("x" * 40, stops("zz"), limit=10, block=block)
    assert (watch.finish, len(watch.tokens), watch.left) == ("length", 10, 0)


def test_a_stop_at_the_limit_is_a_stop():
    assert watched("abc\n", stops("\n"), limit=4).finish == "stop"


@pytest.mark.parametrize("block", [1, 5, 32])
@pytest.mark.parametrize("think_end", ["</think>", ord("|")])
def test_stop_strings_in_a_thought_end_nothing(block, think_end):
    mark = think_end if isinstance(think_end, str) else chr(think_end)
    made = stops("\n", think_end=think_end)
    watch = watched(f"first\nsecond{mark}  B\nmore", made, block=block)
    assert "".join(map(chr, watch.tokens)) == f"first\nsecond{mark}  B\n"
    assert made.answer(watch.tokens) == "B"


@pytest.mark.parametrize("think_end", ["</think>", ord("|")])
def test_a_cut_thought_is_no_answer(think_end):
    made = stops(think_end=think_end)
    watch = watched("I think (A) is right, so the answer is (A)", made, limit=20)
    assert watch.finish == "length"
    assert made.answer(watch.tokens) == ""


def test_the_answer_stands_behind_the_last_thought():
    made = stops(think_end="</think>")
    assert made.answer([ord(c) for c in "one</think>two</think> three"]) == "three"
