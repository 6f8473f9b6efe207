"""The generations of a run beside its results: one line a sequence, appended as sequences finish.

A run that was killed goes on from it.  The lines have counts, reasons and seeds, and the token ids of the answers until
the run is over; no text of questions or answers is ever in it.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantlab.errors import InputError
from quantlab.evals.generated import FINISHES, Finish
from quantlab.records import content_hash, write_atomic

SCHEMA_VERSION = 1
KIND = "generations"
_BEGINNING = f'{{"schema_version":{SCHEMA_VERSION},"kind":"{KIND}"'.encode()


@dataclass(frozen=True)
class Line:
    """A finished sequence.

    task, doc_id, index, repeat: which one it is, index counting the requests of a document.  prompt, sampling: hashes
    of the prompt's tokens and of how it was continued.  prompt_tokens, tokens: how many were read and generated.
    exercised: stores that a later step read back, by copy.  ids: the generated tokens, None once the run is over.
    """

    task: str
    doc_id: int
    index: int
    repeat: int
    prompt: str
    sampling: str
    prompt_tokens: int
    tokens: int
    finish: Finish
    seed: int
    exercised: dict[str, int | None]
    ids: tuple[int, ...] | None

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.task, self.doc_id, self.index, self.repeat


class Sidecar:
    """An open file of generations, locked against other runs.  ``lines``: what it holds, by ``Line.key``.

    settings: everything but prompts and their sampling that decides a sample, as plain values.  Raises InputError for a
    file that is no such file, is of other settings, is being written by another run, or is of a run that is over; a
    line that was cut off by a kill is dropped.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path, self._header = Path(path), {"schema_version": SCHEMA_VERSION, "kind": KIND}
        self._header |= {"fingerprint": content_hash(dict(settings)), "settings": dict(settings)}
        self.lines: dict[tuple[str, int, int, int], Line] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115  open as long as the run
        except OSError as error:
            raise InputError("sidecar", str(path), f"a file to write ({error.strerror})") from None
        try:
            self._lock()
            self._load()
        except BaseException:
            self._file.close()
            raise

    def append(self, lines: Iterable[Line]) -> None:
        """Add finished sequences; they are on the disk when this returns."""
        lines = list(lines)
        self._file.write(b"".join(_dump(asdict(line)) for line in lines))
        self._sync()
        self.lines |= {line.key: line for line in lines}

    def find(self, wanted: Line) -> Line | None:
        """The line of the same sequence.  InputError if it was another prompt then, or was continued otherwise."""
        found = self.lines.get(wanted.key)
        for name in ("prompt", "sampling", "seed"):
            if found is not None and getattr(found, name) != getattr(wanted, name):
                where = f"{wanted.task}, document {wanted.doc_id}"
                raise InputError(
                    "sidecar", str(self.path), f"a file of the same run: {name} of {where} differs"
                )
        return found

    def finish(self) -> None:
        """The run is over: token ids leave the file."""
        self.lines = {key: replace(line, ids=None) for key, line in self.lines.items()}
        rows = [self._header | {"over": True}, *map(asdict, self.lines.values())]
        write_atomic(self.path, b"".join(map(_dump, rows)))
        self.close()

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("sidecar", str(self.path), "a file that no other run is writing") from None

    def _load(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        header, *rows = data[:whole].splitlines() or [b""]
        if not header:
            # What a kill leaves of a header is a beginning of one; anything else is somebody's file.
            if whole or not (data.startswith(_BEGINNING) or _BEGINNING.startswith(data)):
                raise InputError("sidecar", str(self.path), "a file of generations, or none")
            self._file.truncate(0)
            self._file.write(_dump(self._header))
            self._sync()
            return
        self._check(_parse(header))
        for number, row in enumerate(rows, 2):
            if (line := _line(_parse(row))) is None:
                raise InputError("sidecar", str(self.path), f"whole lines; line {number} is not one")
            self.lines[line.key] = line
        if whole < len(data):
            self._file.truncate(whole)
            self._sync()

    def _check(self, header: dict[str, Any]) -> None:
        if header.get("kind") != KIND or header.get("schema_version") != SCHEMA_VERSION:
            raise InputError("sidecar", str(self.path), f"a file of generations, version {SCHEMA_VERSION}")
        if header.get("fingerprint") != self._header["fingerprint"]:
            old, new = header.get("settings"), self._header["settings"]
            if not isinstance(old, dict):
                raise InputError("sidecar", str(self.path), "a file of generations that names its settings")
            names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
            told = ", ".join(f"{name} {old.get(name)!r} then, {new.get(name)!r} now" for name in names)
            raise InputError("sidecar", str(self.path), f"a file of the same settings: {told}")
        if header.get("over"):
            expected = "a file of a run that is not over; remove it to run again"
            raise InputError("sidecar", str(self.path), expected)

    def _sync(self) -> None:
        self._file.flush()
        with contextlib.suppress(OSError):  # a pipe, or a file system without it
            os.fsync(self._file.fileno())


def set_aside(path: str | Path) -> None:
    """Give a sidecar whose run is over another name, with the time of its end, so that a run can begin in its place."""
    path = Path(path)
    if path.is_file():
        with path.open("rb") as file:
            over = _parse(file.readline()).get("over")
        if over:
            stamp = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(path.stat().st_mtime))
            path.rename(path.with_name(f"{path.stem}_{stamp}_{path.stat().st_ino}{path.suffix}"))


def strip_tokens(path: str | Path) -> None:
    """Take the token ids out of a sidecar whose run is over; nothing where there is none, or none are left in it."""
    path = Path(path)
    if not path.is_file():
        return
    header, *rows = path.read_bytes().splitlines() or [b""]
    about = _parse(header)
    if about.get("kind") != KIND or about.get("over"):
        return
    lines = [found | {"ids": None} for row in rows if (found := _parse(row))]
    write_atomic(path, b"".join(map(_dump, [about | {"over": True}, *lines])))


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _line(found: Mapping[str, Any]) -> Line | None:
    """None unless all of a Line is there, each value of its kind."""
    if set(found) != set(Line.__dataclass_fields__):
        return None
    counts = [found[name] for name in ("doc_id", "index", "repeat", "prompt_tokens", "tokens", "seed")]
    texts = [found[name] for name in ("task", "prompt", "sampling")]
    exercised, ids = found["exercised"], found["ids"]
    fits = all(map(_is_count, counts)) and all(isinstance(text, str) for text in texts)
    fits = fits and isinstance(exercised, dict) and found["finish"] in FINISHES
    if not fits or not all(count is None or _is_count(count) for count in exercised.values()):
        return None
    if ids is None:
        return Line(**found)
    if not isinstance(ids, list) or len(ids) != found["tokens"] or not all(map(_is_count, ids)):
        return None
    return Line(**{**found, "ids": tuple(ids)})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
