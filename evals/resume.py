"""What an evaluation keeps of each policy, so that the same command goes on where it was stopped."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantlab.records import content_hash, decode, encode, write_atomic

SIDECAR = "generations.jsonl"
"""In a policy's folder: its sequences as they finish (``sidecar``)."""


def evaluation_key(point: Mapping[str, Any], settings: Mapping[str, Any], files: Iterable[str | Path]) -> str:
    """Hash of all that decides a record: the point, what settings name of model and software, and the bytes of files
    or folders.
    """
    held = [_bytes_hash(Path(file)) for file in files]
    return content_hash({"point": dict(point), "settings": dict(settings), "files": held})


def kept_record(folder: Path, key: str) -> dict[str, Any] | None:
    """The record that ``keep_record`` wrote; None if there is none, no whole one, or one of its files is gone."""
    found = _kept(folder, key)
    if found is None or not all((folder / name).is_file() for name in found["files"]):
        return None
    return decode(found["record"])


def keep_record(folder: Path, key: str, record: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write ``record``, then its ``files``, content by name.

    The record is first, so that a run that was killed in between finds what it had begun and takes it away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"files": list(files), "record": encode(record)}
    write_atomic(folder / f"record_{key}.json", json.dumps(kept).encode())
    for name, content in files.items():
        write_atomic(folder / name, content)


def remove_unfinished(folder: Path, key: str) -> None:
    """Delete what is left of a record whose files are not all there: beside those of the next run they would be taken
    for a second one.
    """
    found = _kept(folder, key)
    if found is not None:
        for name in found["files"]:
            (folder / name).unlink(missing_ok=True)


def _kept(folder: Path, key: str) -> dict[str, Any] | None:
    """What ``keep_record`` wrote, if it has the shape of that."""
    try:
        found = json.loads((folder / f"record_{key}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != {"files", "record"}:
        return None
    files, record = found["files"], found["record"]
    named = isinstance(files, list) and all(isinstance(f, str) and Path(f).name == f for f in files)
    whole = isinstance(record, dict) and all(
        isinstance(record.get(name), dict) for name in ("point", "metrics")
    )
    return found if named and whole and "status" in record else None


def _bytes_hash(path: Path) -> str:
    """Of a file, or of the files of a folder by their names."""
    digest = hashlib.sha256(
        b"" if path.exists() else str(path).encode()
    )  # data may be named, not stored here
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
