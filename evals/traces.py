"""Reasoning traces: fixed prompts and responses that every policy reads, from a JSONL file or a generation run.

No error quotes a prompt or a response: it names the line.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantlab.errors import InputError, unknown_name
from quantlab.evals.answers import THINK_CLOSE
from quantlab.evals.documents import letters as letters_of
from quantlab.evals.resume import SIDECAR
from quantlab.evals.trace_answers import Answer, LetterTokens, decide, token_at
from quantlab.records import content_hash

_KEYS = ("id", "prompt", "response", "prompt_ids", "response_ids", "answer", "letters", "thinking")
DEFAULT_LETTERS = "ABCD"


@dataclass(frozen=True)
class Trace:
    """A prompt and the response to it as token ids, none empty.

    number: counted from 0 in its source.  name: what stochastic rounding and records know it by, a hash of its id, so
    that neither the batch nor where the response is cut off enters.
    """

    number: int
    name: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    answer: Answer | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.response

    @property
    def sequence_id(self) -> int:
        return int(self.name[:8], 16) >> 1


@dataclass(frozen=True)
class _Said:
    """One trace as its source has it; ``where`` names it in errors."""

    where: str
    id: str
    prompt: str | Sequence[int]
    response: str | Sequence[int]
    answer: str | None
    letters: str
    thinking: bool


def read_traces(source: str | Path, lm: Any, limit: int | None = None) -> list[Trace]:
    """The traces of ``source``, a JSONL file or the folder of one policy of a generation run, the first ``limit``.

    lm: the ``QuantlabLM`` whose tokenizer reads them and whose vocabulary and context they must fit.  A prompt's text
    is encoded as lm-eval encodes prompts, a response's without special tokens; token ids are taken as they are.
    Raises InputError for everything that cannot be replayed.
    """
    source = Path(source)
    said = list(_from_folder(source) if source.is_dir() else _from_file(source))[:limit]
    if not said:
        raise InputError("replay", str(source), "at least one trace")
    seen: dict[str, str] = {}
    for one in said:
        if one.id in seen:
            raise InputError("replay", f"{seen[one.id]} and {one.where}", "ids that are there once")
        seen[one.id] = one.where
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    letter_tokens = LetterTokens(lm.tokenizer, vocabulary)
    return [_trace(number, one, lm, vocabulary, letter_tokens) for number, one in enumerate(said)]


def traces_hash(traces: Sequence[Trace]) -> str:
    """16 hex digits over ids, tokens and answers of all traces."""
    rows = []
    for one in traces:
        answer = None if one.answer is None else [one.answer.index, one.answer.wanted, one.answer.tokens]
        rows.append([one.name, one.prompt, one.response, answer])
    return content_hash(rows)


def _trace(number: int, one: _Said, lm: Any, vocabulary: int, letter_tokens: LetterTokens) -> Trace:
    prompt, response = one.prompt, one.response
    if isinstance(prompt, str):
        prompt = lm.tok_encode(prompt)
    if isinstance(response, str):
        response = lm.tok_encode(response, add_special_tokens=False)
    for name, ids in (("prompt", prompt), ("response", response)):
        if not len(ids):
            raise InputError("replay", f"{one.where}, {name}", "at least one token")
        outside = next((token for token in ids if not 0 <= token < vocabulary), None)
        if outside is not None:
            expected = f"tokens of the model's vocabulary, 0 to {vocabulary - 1}"
            raise InputError("replay", f"{one.where}, {name}", f"{expected}; it has {outside}")
    count = len(prompt) + len(response)
    if count > lm.max_length:
        expected = f"at most {lm.max_length} tokens, the model's context (max_length); it has {count}"
        raise InputError("replay", one.where, expected)
    answer = _answer(one, tuple(response), lm.tokenizer, letter_tokens)
    name = content_hash({"id": one.id})
    return Trace(number, name, tuple(prompt), tuple(response), answer)


def _answer(
    one: _Said, response: tuple[int, ...], tokenizer: Any, letter_tokens: LetterTokens
) -> Answer | None:
    """None where the response commits itself to nothing, or says it in a token that is more than the letter."""
    if not one.letters:
        return None
    special = set(tokenizer.all_special_ids)
    end = len(response)
    while end and response[end - 1] in special:  # "Answer: B<eos>" ends with the letter
        end -= 1

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    said = decide(decode(response[:end]), one.letters, thinking=one.thinking)
    index = None if said is None else token_at(response[:end], said[1], decode)
    tokens = None if index is None else letter_tokens.of(one.letters, response[index])
    if (
        said is None
        or index is None
        or tokens is None
        or response[index] not in tokens[one.letters.index(said[0])]
    ):
        return None
    wanted = one.letters.index(said[0] if one.answer is None else one.answer)
    return Answer(index, one.letters.index(said[0]), wanted, tokens)


def _from_file(path: Path) -> Iterator[_Said]:
    for number, row in enumerate(_rows(path), 1):
        where = f"{path.name} line {number}"
        _check(where, row)
        id_ = row.get("id")
        if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
            raise InputError("replay", where, "an id, text or a whole number")
        letters = row.get("letters", DEFAULT_LETTERS)
        yield _Said(
            where,
            str(id_),
            _part(where, row, "prompt"),
            _part(where, row, "response"),
            _letter(where, row.get("answer"), letters),
            letters,
            _flag(where, row.get("thinking", False)),
        )


def _check(where: str, row: Any) -> None:
    if not isinstance(row, dict):
        raise InputError("replay", where, "a JSON object")
    unknown = next((key for key in row if key not in _KEYS), None)
    if unknown is not None:
        raise unknown_name(f"replay {where}, key", unknown, _KEYS)


def _part(where: str, row: dict[str, Any], name: str) -> Any:
    """Text, or a list of token ids."""
    text, ids = row.get(name), row.get(f"{name}_ids")
    if (text is None) == (ids is None):
        raise InputError("replay", where, f"one of {name} and {name}_ids")
    if text is not None and not isinstance(text, str):
        raise InputError("replay", f"{where}, {name}", "text")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise InputError("replay", f"{where}, {name}_ids", "a list of token ids")
    return ids if text is None else text


def _letter(where: str, answer: Any, letters: Any) -> str | None:
    plain = isinstance(letters, str) and len(set(letters)) == len(letters) != 1 and letters.isascii()
    if not plain or not (letters == "" or letters.isdigit() or (letters.isalpha() and letters.isupper())):
        expected = 'two or more different upper-case letters, or digits, or "" for no answer'
        raise InputError("replay", f"{where}, letters", expected)
    if answer is not None and (not isinstance(answer, str) or len(answer) != 1 or answer not in letters):
        raise InputError("replay", f"{where}, answer", f"one of the letters {letters}")
    return answer


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError("replay", f"{where}, thinking", "true or false")
    return value


def _rows(path: Path) -> Iterator[Any]:
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        expected = f"a JSONL file of traces or a policy's folder of a generation run ({error.strerror})"
        raise InputError("replay", str(path), expected) from None
    except UnicodeDecodeError as error:
        raise InputError("replay", path.name, f"UTF-8 text, but byte {error.start} is not") from None
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError("replay", f"{path.name} line {number}", "one JSON object") from None
        yield row


def _from_folder(folder: Path) -> Iterator[_Said]:
    """The responses of the newest run of each task in a policy's folder."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("samples_*.jsonl")):
        newest[path.name.removeprefix("samples_").rpartition("_")[0]] = path
    if not newest:
        expected = "a policy's folder of a run with --log-samples-with-text, such as results/eval/fp32@1"
        raise InputError("replay", str(folder), expected)
    ids = _generated_ids(folder / SIDECAR)
    for task, path in newest.items():
        yield from _of_task(task, path, ids)


def _of_task(
    task: str, path: Path, ids: dict[tuple[str, int, int], tuple[list[int], str]]
) -> Iterator[_Said]:
    rows = list(enumerate(_rows(path), 1))
    first = rows[0][1].get("filter") if rows and isinstance(rows[0][1], dict) else None
    # lm-eval writes a line for each filter; the responses are the same.
    rows = [(n, row) for n, row in rows if not isinstance(row, dict) or row.get("filter") == first]
    targets = {str(row.get("target")) for _, row in rows if isinstance(row, dict)}
    digits = "0123456789" if all(len(t) == 1 and t in "0123456789" for t in targets) else ""
    for number, row in rows:
        where = f"{path.name} line {number}"
        doc_id, document, target, prompt, responses = _generated(where, row)
        letters = letters_of(document) if "choices" in document else digits
        gold = target if len(target) == 1 and target in letters else None
        if gold is None and letters and isinstance(document.get("answer"), int):
            gold = letters[document["answer"]]
        thinks = any(THINK_CLOSE in response for response in responses)
        for repeat, response in enumerate(responses):
            known, finish = ids.get((task, doc_id, repeat), (None, None))
            thinking = thinks or finish == "length"
            name = f"{task} {doc_id} {repeat}"
            yield _Said(where, name, prompt, known or response, gold, letters, thinking)


def _generated(where: str, row: Any) -> tuple[int, dict[str, Any], str, str, list[str]]:
    """doc_id, document, target, prompt and responses of a line of lm-eval's samples."""
    try:
        found = int(row["doc_id"]), row["doc"], str(row["target"]), row["arguments"][0][0], row["resps"][0]
        if isinstance(found[4], list) and all(isinstance(text, str) for text in [found[3], *found[4]]):
            return found
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    expected = "generated responses with their text (a generative task, --log-samples-with-text)"
    raise InputError("replay", where, expected)


def _generated_ids(sidecar: Path) -> dict[tuple[str, int, int], tuple[list[int], str]]:
    """(task, doc_id, repeat) -> the generated token ids and why they ended, where the run kept them."""
    if not sidecar.exists():
        return {}
    return {
        (row["task"], row["doc_id"], row["repeat"]): (row["ids"], row["finish"])
        for row in _rows(sidecar)
        if isinstance(row, dict) and row.get("ids") and row.get("index") == 0
    }
