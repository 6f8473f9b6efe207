"""The record of one point: its schema, its name, and how it is read and written.

A file name is a function of the point alone, so that "has this been computed?" needs no index.
"""

import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantlab.errors import InputError, unknown_name
from quantlab.records.writing import write_atomic

SCHEMA_VERSION = 1
KINDS = (
    "drift",
    "closed_loop",
    "eval",
    "replay",
    "recall",
    "mechanism",
    "predicted",
    "scan",
    "bench",
    "decode_step",
    "generation_speed",
)
STATUSES = ("ok", "diverged", "not_exercised", "not_served", "comparison_failed", "failed")
FIELDS = (
    "schema_version",
    "kind",
    "status",
    "message",
    "point",
    "metrics",
    "curve",
    "series",
    "protocol",
    "environment",
    "seconds",
    "created",
)
RECORD_NAME = re.compile(r"[0-9a-f]{16}\.json")

# How each kind of number is measured.  Raise the version when the same point would give another number;
# records of two versions are never put into one report.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "drift": {
        "version": 2,
        "reference": "float64 shadow from the unrounded prefill state on the stored stream",
        "pooling": "sqrt(sum |e|^2 / sum |ref|^2), steps and heads jointly, second half of the run",
        "growth": "slope of log RMS over log-spaced bins in [T/8, T], bootstrap over heads x sequences",
    },
    "closed_loop": {
        "version": 1,
        "reference": "next-token distributions of the same model under the baseline policy",
        "kl": "KL(baseline || policy) in nats, float64 log softmax, mean over the compared tokens",
        "margin": "bins of the baseline's top-2 log-probability gap from 0, .01, .03, .1, .3, 1 and 3 nats on",
        "free": "greedy; a sequence is compared up to the first step at which the choices differ, itself included",
    },
    "eval": {
        "version": 1,
        "scoring": "teacher-forced decode of context and continuation under the policy",
        "pairing": "by document hash against fp32@1 of the same model, task and data",
    },
    "replay": {
        "version": 1,
        "reading": "prompt and response token by token through the decode state, the same tokens for every policy",
        "kl": "KL(baseline || policy) in nats, float64 log softmax, at every response token; interval over traces",
        "answer": "letters' probabilities, summed over their tokens, where the response says its answer last",
        "pairing": "by trace, against fp32@1 of the same model beside it",
    },
    "recall": {
        "version": 1,
        "questions": "state recall, made from level and seed",
        "scoring": "every token through the decode state; letter: likeliest of 4, value: likeliest of 64",
        "pairing": "by number of the question",
    },
    "mechanism": {
        "version": 1,
        "inputs": "of each recurrent layer under fp32@1; each layer alone under a policy",
        "fact": "difference of two runs that differ in the asked fact's value, at the token that asks for it",
        "reference": "the unrounded recurrence in float64",
    },
    "predicted": {
        "version": 1,
        "inputs": "of each recurrent layer under fp32@1; each layer alone under a policy",
        "of_fact": "closed form: independent roundings of the exact state, followed to the token that asks",
        "state_error": "measured, behind the same token, against the unrounded recurrence in float64",
    },
    "scan": {"version": 1, "reference": "the trained recurrence in float64 on the same inputs"},
    "bench": {
        "version": 1,
        "time": "median of CUDA-graph replays: a layer's decode step amortised over the window, begin and end included",
        "rows": "cursors spread evenly over the window; memory beyond several times the last cache between two visits",
        "bytes": "read and written by the policy's ledger at the batch; inputs and outputs apart",
        "copy": "torch.mul(x, 1.5, out=y) in a graph, 4 GiB read and 4 GiB written, in the same run",
        "gate": "compared with the torch twin at the same batch before it is timed; peers with float64",
    },
    "decode_step": {
        "version": 1,
        "time": "median of rounds of 16 replays of one CUDA graph of a model's whole step, policies taking turns",
        "rows": "random states and records, cursors spread evenly over the window; attention over all positions",
        "ssm": "the recurrent ops of all layers, begin and end included, in a graph of their own",
        "rest": "the step whose recurrent ops return their values; attention and mlp: what it loses without them",
        "gate": "a cut model in float32 decodes on the GPU as on the CPU",
    },
    "generation_speed": {
        "version": 1,
        "time": "wall time of one generation of all sequences, prompts, refills and sampling included, capture apart",
        "sequences": "random prompts of one length, each read once for its repeats; all get all their tokens",
        "gate": "a cut model in float32 samples on the GPU, with refills, what it samples on the CPU",
    },
}

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any) -> Any:
    """Plain JSON values for ``value``: numpy scalars and arrays unwrapped, non-finite floats as "inf",
    "-inf", "nan".

    Raises InputError for a type that JSON does not know and for a literal string "inf", "-inf" or "nan",
    which could not be told from a number when it is read back.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        if value in _NON_FINITE:
            raise InputError(
                "record text", value, "a text other than inf, -inf and nan, which stand for numbers"
            )
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise InputError("record key", wrong, "text")
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    raise InputError(
        "record value", type(value).__name__, "numbers, text, booleans, null, lists and tables of them"
    )


def decode(value: Any) -> Any:
    """Inverse of :func:`encode`: the strings "inf", "-inf" and "nan" become floats again."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def canonical_json(value: Any) -> str:
    """The one JSON text of ``value``: keys sorted, no spaces, ASCII.  1 and 1.0 are different values."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def record_path(folder: str | os.PathLike[str], point: Mapping[str, Any]) -> Path:
    """Where the record of ``point`` lives in ``folder``."""
    return Path(folder) / f"{content_hash(point)}.json"


def protocol_fingerprint(kind: str) -> str:
    """Hash of how ``kind`` is measured, schema version included.  Raises InputError for an unknown kind."""
    if kind not in PROTOCOLS:
        raise unknown_name("kind", kind, PROTOCOLS)
    return content_hash({"schema_version": SCHEMA_VERSION, "kind": kind, "protocol": PROTOCOLS[kind]})


def complete_record(
    point: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    environment: Mapping[str, Any],
    seconds: float = 0.0,
) -> dict[str, Any]:
    """A whole record from what a runner gave: fills in every field that the runner left out.

    ``result`` may say status, message, metrics, curve, series, seconds; status is "ok" where it is silent.
    """
    known = {
        "kind": point.get("kind"),
        "status": "ok",
        "message": None,
        "metrics": {},
        "curve": None,
        "series": None,
    }
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **known, "seconds": seconds, **result}
    record["point"] = dict(point)
    record["protocol"] = protocol_fingerprint(str(point.get("kind")))
    record["environment"] = dict(environment)
    record["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return validate_record({field: record.pop(field) for field in FIELDS} | record)


def validate_record(record: Any, source: str = "record") -> dict[str, Any]:
    """``record`` itself if it follows schema version 1, else InputError whose argument is ``source``."""
    if not isinstance(record, dict):
        raise InputError(source, type(record).__name__, "a JSON object")
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{source} schema_version", version, f"{SCHEMA_VERSION}, the version that this release reads"
        )
    for field in FIELDS:
        if field not in record:
            raise InputError(source, sorted(record), f"the field {field}")
    for field in record:
        if field not in FIELDS:
            raise unknown_name(f"{source} field", field, FIELDS)
    for field, valid in (("kind", KINDS), ("status", STATUSES)):
        if record[field] not in valid:
            raise unknown_name(f"{source} {field}", str(record[field]), valid)
    types: dict[str, tuple[type, ...]] = {
        "message": (str, type(None)),
        "point": (dict,),
        "metrics": (dict,),
        "curve": (dict, type(None)),
        "series": (str, type(None)),
        "protocol": (str,),
        "environment": (dict,),
        "seconds": (int, float),
        "created": (str,),
    }
    for field, expected in types.items():
        if not isinstance(record[field], expected):
            names = " or ".join("null" if t is type(None) else t.__name__ for t in expected)
            raise InputError(f"{source} {field}", record[field], names)
    for field in ("kind", "policy"):
        if not isinstance(record["point"].get(field), str):
            raise InputError(f"{source} point", sorted(record["point"]), f"text under {field}")
    if record["point"]["kind"] != record["kind"]:
        raise InputError(
            f"{source} kind", record["kind"], f"the kind of its point, {record['point']['kind']}"
        )
    if record["status"] == "failed" and not record["message"]:
        raise InputError(f"{source} message", record["message"], "a reason, as the status is failed")
    return record


def save_record(folder: str | os.PathLike[str], record: dict[str, Any]) -> Path:
    """Write ``record`` under its name in ``folder``, all or nothing; returns the path."""
    validate_record(record)
    path = record_path(folder, record["point"])
    text = json.dumps(encode(record), indent=1, allow_nan=False)
    write_atomic(path, (text + "\n").encode())
    return path


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read one record.  InputError if it is unreadable, not of this schema, or not named after its point."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        expected = f"a readable JSON record ({error}); delete the file to have it computed anew"
        raise InputError("record", str(path), expected) from error
    record = validate_record(decode(value), f"record {path.name}")
    if path != record_path(path.parent, record["point"]):
        raise InputError(
            "record", path.name, f"the name {record_path('', record['point'])}, the hash of its point"
        )
    return record


def iterate_records(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Every record in ``folder`` in the order of file names; other files are passed over.

    Raises InputError if ``folder`` is not a folder or a record is not valid.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("records folder", str(folder), "an existing folder")
    for path in sorted(folder.iterdir()):
        if RECORD_NAME.fullmatch(path.name):
            yield load_record(path)


def load_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """List of :func:`iterate_records`."""
    return list(iterate_records(folder))
