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
    """The record that ``keep_record`` wrote; None if there is none, or no whole one."""
    try:
        found = json.loads((folder / f"record_{key}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return decode(found) if isinstance(found, dict) else None


def keep_record(folder: Path, key: str, record: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"record_{key}.json", json.dumps(encode(record)).encode())


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
