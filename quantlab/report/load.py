"""Read a folder of records and refuse to compare what was not measured alike."""

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantlab.errors import InputError
from quantlab.records import canonical_json, load_records
from quantlab.report.check import check_contents

Record = dict[str, Any]
BASELINE = "fp32@1"


@dataclass(frozen=True)
class Collection:
    """Records that may stand in one report; ``about`` is study.json of the sweep, ``warnings`` what a reader
    must know."""

    records: list[Record]
    about: dict[str, Any]
    warnings: list[str]

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


def load_collection(folder: str | os.PathLike[str]) -> Collection:
    """Records of ``folder``/records, or of ``folder`` itself.

    Raises InputError for an empty folder, a record that is not valid or holds what no report can show, and
    two protocol fingerprints of one kind.
    """
    folder = Path(folder)
    inner = folder / "records"
    records = load_records(inner if inner.is_dir() else folder)
    if not records:
        raise InputError("records folder", str(folder), "at least one record; run quantlab sweep first")
    for record in records:
        check_contents(record)
    return Collection(records, _about(folder), check_records(records))


def check_records(records: list[Record]) -> list[str]:
    """Refuses (InputError) records of one kind under two protocols; returns warnings about the rest."""
    protocols: dict[str, set[str]] = defaultdict(set)
    for record in records:
        protocols[record["kind"]].add(record["protocol"])
    for kind, found in protocols.items():
        if len(found) > 1:
            expected = (
                f"one protocol fingerprint for all {kind} records; run the sweep again to measure them alike"
            )
            raise InputError("records", ", ".join(sorted(found)), expected)
    return [*_stream_warnings(records), *_environment_warnings(records)]


def stream_key(record: Record) -> str:
    """Everything of a point but the policy: records with equal keys are one comparison."""
    return canonical_json({key: value for key, value in record["point"].items() if key != "policy"})


def stream_name(stream: dict[str, Any]) -> str:
    """A heading for one stream, its seed left out."""
    if "file" in stream:
        return f"captured: {stream['file']}"
    decay = f"alpha {stream['alpha']:g}" if stream.get("alpha") is not None else stream["preset"]
    return f"{stream['family']}, {decay}"


def _stream_warnings(records: list[Record]) -> list[str]:
    hashes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    names: dict[str, str] = {}
    for record in records:
        digest = record["metrics"].get("stream_hash") or record["metrics"].get("text_hash")
        if digest:
            hashes[stream_key(record)][digest].append(record["point"]["policy"])
            point = record["point"]
            drift = record["kind"] == "drift"  # a script may call a parameter of its own "stream"
            names[stream_key(record)] = (
                stream_name(point["stream"]) if drift else str(point.get("name", "scan"))
            )
    return [
        f"{names[key]}: policies ran on {len(found)} different streams (stream hashes "
        f"{', '.join(sorted(found))}), so they cannot be compared with each other."
        for key, found in hashes.items()
        if len(found) > 1
    ]


def _environment_warnings(records: list[Record]) -> list[str]:
    warnings = []
    for name in ("cpu", "gpu", "threads", "git", "script"):
        found = {str(record["environment"].get(name)) for record in records}
        if name == "script":
            found -= {"None"}
        if len(found) > 1:
            warnings.append(f"Records come from {len(found)} values of {name}: {', '.join(sorted(found))}.")
    versions: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for library, version in record["environment"].get("versions", {}).items():
            versions[library].add(str(version))
    for library, found in versions.items():
        if len(found) > 1:
            warnings.append(f"Records come from several versions of {library}: {', '.join(sorted(found))}.")
    return warnings


def _about(folder: Path) -> dict[str, Any]:
    path = folder / "study.json"
    about = {"title": folder.resolve().name, "description": "", "command": None, "spec": None, "quick": False}
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError("study.json", str(path), f"valid JSON ({error})") from error
        if not isinstance(found, dict):
            raise InputError("study.json", str(path), f"a JSON object, not {type(found).__name__}")
        about |= found
    return about
