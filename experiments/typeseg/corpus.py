"""Real text that every Python carries, cut into named documents of one length.  Imports no torch and no typeseg.

Eleven sources: reference prose, Python sources, and the HTML, XML, JSON and CSV that the standard library writes.
Another Python version has other sources, so a study records ``corpus_hash`` and results are compared on equal hashes.
"""

import csv
import functools
import hashlib
import heapq
import html
import http
import inspect
import io
import json
import plistlib
import pydoc_data.topics
import string
import textwrap
from collections.abc import Callable, Iterable

from quantlab.errors import InputError, unknown_name


def _topic(name: str) -> str:
    return inspect.cleandoc(pydoc_data.topics.topics[name])


def _statuses() -> list[dict[str, object]]:
    return [
        {"code": s.value, "name": s.name, "phrase": s.phrase, "note": s.description} for s in http.HTTPStatus
    ]


def _html() -> str:
    cells = "".join(
        f'      <tr class="status"><td>{s["code"]}</td><td><b>{html.escape(str(s["phrase"]))}</b></td></tr>\n'
        for s in _statuses()
    )
    paragraphs = "".join(f"    <p>{html.escape(p)}</p>\n" for p in _topic("assert").split("\n\n"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n  <head>\n    <meta charset="utf-8" />\n    <title>Status codes</title>\n'
        "    <style>\n      td { border: 1px solid #ccc; padding: 2px; }\n    </style>\n  </head>\n  <body>\n"
        f'    <table id="codes">\n{cells}    </table>\n{paragraphs}  </body>\n</html>\n'
    )


def _csv() -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["code", "name", "phrase", "note"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_statuses())
    return out.getvalue()


# name -> (text, first character): the middle of a source file is code, its start is the docstring.
SOURCES: dict[str, tuple[Callable[[], str], int]] = {
    "topic-assignment": (lambda: _topic("assignment"), 0),
    "topic-formatstrings": (lambda: _topic("formatstrings"), 0),
    "topic-execmodel": (lambda: _topic("execmodel"), 0),
    "python-textwrap": (lambda: inspect.getsource(textwrap), 5000),
    "python-heapq": (lambda: inspect.getsource(heapq), 0),
    "python-string": (lambda: inspect.getsource(string), 2000),
    "python-json-decoder": (lambda: inspect.getsource(json.decoder), 4000),
    "html": (_html, 0),
    "json": (lambda: json.dumps(_statuses(), indent=2), 0),
    "xml": (lambda: plistlib.dumps({"statuses": _statuses()}).decode(), 0),
    "csv": (_csv, 0),
}

#: The study's texts.  Two kinds of text each, because telling them apart is what the network was trained for.
DOCUMENTS = (
    "topic-assignment+python-textwrap",
    "python-heapq+topic-execmodel",
    "html+json",
    "csv+topic-formatstrings",
    "python-json-decoder+xml",
    "json+python-string",
    "xml+csv",
    "topic-execmodel+html",
)


@functools.cache
def document(name: str, length: int) -> str:
    """``length`` characters of text: "a+b" joins equal parts of the sources a and b.

    Non-ASCII characters are written "?", so that a character is one byte token.  Raises InputError for an unknown
    source and for a length that the parts do not divide or the sources do not have.
    """
    parts = name.split("+")
    if length < len(parts) or length % len(parts):
        raise InputError("length", length, f"a positive multiple of {len(parts)} for the document {name}")
    return "".join(_source(part, length // len(parts)) for part in parts)


def _source(name: str, length: int) -> str:
    if name not in SOURCES:
        raise unknown_name("source", name, SOURCES)
    make, start = SOURCES[name]
    text = make().encode("ascii", "replace").decode()[start:]
    if length > len(text):
        raise InputError("length", length, f"at most {len(text)} characters of the source {name}")
    return text[:length]


def corpus_hash(names: Iterable[str], length: int) -> str:
    """16 hex digits over the names and the texts: equal exactly when the same text is read in the same order."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{document(name, length)}\0".encode())
    return digest.hexdigest()[:16]
