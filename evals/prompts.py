"""The prompts of the tasks whose answer is generated.  Each ends by asking for a last line "Answer: ...".

The instruction names all letters, so a model that repeats it has answered nothing.
"""

from typing import Any

from quantlab.evals.documents import letters


def choice_question(document: dict[str, Any]) -> str:
    """A multiple-choice question that is answered by a letter, after as much reasoning as the model likes."""
    names = letters(document)
    choices = "\n".join(f"{name}) {text}" for name, text in zip(names, document["choices"], strict=True))
    return (
        "Exactly one of the choices below answers the question. Work out which one it is.\n\n"
        f"Question:\n{document['question']}\n\nChoices:\n{choices}\n\n"
        "Think it through first. Then close with a line of its own that names the letter of your choice "
        f"and nothing else, in this form:\nAnswer: {'/'.join(names)}"
    )


def number_question(document: dict[str, Any]) -> str:
    """A problem that is answered by a number."""
    return _number_question(document, "a number in digits, without a unit")


def aime_question(document: dict[str, Any]) -> str:
    """A problem that is answered by a whole number from 0 to 999."""
    return _number_question(document, "a whole number from 0 to 999")


def scored_question(document: dict[str, Any]) -> str:
    """A multiple-choice question whose continuations "(A)", "(B)" ... are scored, in the wording of GPQA's task."""
    choices = "\n".join(
        f"{name} {text}" for name, text in zip(scored_letters(document), document["choices"], strict=True)
    )
    return f"What is the correct answer to this question:{document['question']}\nChoices:\n{choices}\nAnswer:"


def scored_letters(document: dict[str, Any]) -> list[str]:
    """The continuations of ``scored_question``."""
    return [f"({name})" for name in letters(document)]


def _number_question(document: dict[str, Any], what: str) -> str:
    return (
        f"Solve the problem below. Its answer is {what}.\n\nProblem:\n{document['question']}\n\n"
        "Think it through first. Then close with a line of its own that holds the final result "
        "and nothing else, in this form:\nAnswer: RESULT"
    )
