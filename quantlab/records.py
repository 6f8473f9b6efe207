"""Records: one immutable JSON file a point, named by the hash of the point.  Imports no torch.

A *point* is a plain dict that decides a result completely; a *record* is what running it gave.  The file name
is a function of the point alone, so that "has this been computed?" needs no index, and machines that share a
folder need no lock.  Every write goes to a temporary name in the same folder first: a reader never sees half
a record.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantlab.errors import InputError, unknown_name

SCHEMA_VERSION = 1
KINDS = ("drift", "eval", "scan")
STATUSES = ("ok", "diverged", "not_exercised", "failed")
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
STREAM_SCHEMA_VERSION = 1
MINIMUM_FREE_BYTES = 16 * 2**20

# How each kind of number is measured.  Raise the version when the same point would give another number;
# records of two versions are never put into one report.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "drift": {
        "version": 2,
        "reference": "float64 shadow from the unrounded prefill state on the stored stream",
        "pooling": "sqrt(sum |e|^2 / sum |ref|^2), steps and heads jointly, second half of the run",
        "growth": "slope of log RMS over log-spaced bins in [T/8, T], bootstrap over heads x sequences",
    },
    "eval": {
        "version": 1,
        "scoring": "teacher-forced decode of context and continuation under the policy",
        "pairing": "by document hash against fp32@1 of the same model, task and data",
    },
    "scan": {"version": 1, "reference": "the trained recurrence in float64 on the same inputs"},
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


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; flushed to disk and renamed on success, removed on
    failure.

    The name carries machine and process, so that :func:`remove_stale` can tell what a killed process left
    behind.  A link is followed, so its target is what changes.  Raises InputError for a device, pipe or folder:
    renaming would replace it, and for root even /dev/null can be replaced.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not path.is_file():
        raise InputError("output", str(path), "a regular file or a free name; something else is in the way")
    prefix = f".{path.name}.{_machine()}.{os.getpid()}."
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes private files; results are as readable as any file that the user creates.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path``, all or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def remove_stale(folder: str | os.PathLike[str]) -> int:
    """Delete the temporary files of processes of this machine that are gone; returns how many."""
    removed = 0
    for path in Path(folder).glob(f".*.{_machine()}.*.tmp"):
        process = path.name.split(".")[-3]
        if process.isdigit() and not _alive(int(process)):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_output_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder ``path`` if needed and prove that it takes files; returns it as a Path.

    A probe file is written and removed rather than permission bits read: those say nothing for root, on a
    read-only file system, or on a full disk.  Raises InputError, argument "output", if it cannot be used.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
        free = shutil.disk_usage(path).free
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError("output", str(path), "a folder, but a file is in the way") from error
    except OSError as error:
        raise InputError(
            "output", str(path), f"a folder that can be written to ({error.strerror})"
        ) from error
    if free < MINIMUM_FREE_BYTES:
        raise InputError(
            "output", str(path), f"at least {MINIMUM_FREE_BYTES >> 20} MiB of free space, not {free} bytes"
        )
    return path


def save_stream_file(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> str:
    """Write a decode stream as safetensors, all or nothing; returns the content hash.

    ``arrays``: q, k (T, B, G, K), v (T, B, H, V), log_decay (T, B, H), (T, B, H, V) or (T, B, H, K), beta (T, B, H),
    initial (B, H, V, K), rates (H, V, K); other names are free.  ``meta`` must name the "family".  Raises
    InputError as :func:`load_stream_file` does.
    """
    import safetensors.numpy

    if not isinstance(meta.get("family"), str):
        raise InputError("stream meta", sorted(meta), "the recurrence under family")
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    _check_stream(arrays, str(path))
    digest = _stream_hash(arrays, meta["family"])
    metadata = {
        "schema_version": str(STREAM_SCHEMA_VERSION),
        "family": meta["family"],
        "meta": canonical_json(meta),
        "content_hash": digest,
    }
    data = safetensors.numpy.save(arrays, metadata=metadata)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise InputError(
            "stream file", str(path), f"a place that can be written to ({error.strerror})"
        ) from error
    return digest


def load_stream_file(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a stream file: arrays by name, and the meta table.  InputError if it is unreadable, of another
    schema version, changed since it was written, holds NaN or Inf, or its arrays disagree in shape."""
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            version = metadata.get("schema_version")
            if version != str(STREAM_SCHEMA_VERSION):
                raise InputError(
                    "stream file", str(path), f"schema_version {STREAM_SCHEMA_VERSION}, not {version}"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            meta = decode(json.loads(metadata["meta"]))
            family, digest = metadata["family"], metadata["content_hash"]
    except InputError:
        raise
    except Exception as error:
        raise InputError("stream file", str(path), f"a readable quantlab stream file ({error})") from error
    _check_stream(arrays, str(path))
    if digest != _stream_hash(arrays, family):
        raise InputError(
            "stream file", str(path), "arrays that agree with the content hash; the file was changed"
        )
    return arrays, meta


def open_stream_file(
    path: str | os.PathLike[str], rows: int = 256
) -> tuple[dict[str, Callable[[slice], np.ndarray]], dict[str, tuple[int, ...]], dict[str, Any]]:
    """A stream file for reading in parts: for each array a function of a slice of its first axis, the shapes, and the
    meta table.  InputError as load_stream_file, but for NaN, Inf and shapes, which the reader of the parts checks.

    The content hash is checked ``rows`` rows at a time, so that the file never has to fit into memory.
    """
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        version = metadata.get("schema_version")
        if version != str(STREAM_SCHEMA_VERSION):
            raise InputError(
                "stream file", str(path), f"schema_version {STREAM_SCHEMA_VERSION}, not {version}"
            )
        meta, family, expected = (
            decode(json.loads(metadata["meta"])),
            metadata["family"],
            metadata["content_hash"],
        )
    except InputError:
        raise
    except Exception as error:
        raise InputError("stream file", str(path), f"a readable quantlab stream file ({error})") from error

    def reader(name: str) -> Callable[[slice], np.ndarray]:
        def read(part: slice) -> np.ndarray:
            with safetensors.safe_open(str(path), framework="numpy") as file:
                return file.get_slice(name)[slice(*part.indices(shapes[name][0]))]

        return read

    readers = {name: reader(name) for name in shapes}
    digest = hashlib.sha256(family.encode())
    for name in sorted(shapes):
        dtype = readers[name](slice(0, 1)).dtype
        if dtype.kind not in "fiu":
            raise InputError("stream file", str(path), f"real numbers, but {name} is {dtype}")
        digest.update(canonical_json([name, dtype.str, shapes[name]]).encode())
        for first in range(0, shapes[name][0], rows):
            digest.update(readers[name](slice(first, first + rows)).tobytes())
    if digest.hexdigest()[:16] != expected:
        raise InputError(
            "stream file", str(path), "arrays that agree with the content hash; the file was changed"
        )
    return readers, shapes, meta


def stream_file_hash(path: str | os.PathLike[str]) -> str:
    """The content hash of a stream file, checked against its contents.  InputError as load_stream_file."""
    arrays, meta = load_stream_file(path)
    return _stream_hash(arrays, meta["family"])


def _stream_hash(arrays: Mapping[str, np.ndarray], family: str) -> str:
    digest = hashlib.sha256(family.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(canonical_json([name, array.dtype.str, array.shape]).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _check_stream(arrays: Mapping[str, np.ndarray], source: str) -> None:
    """Names the first array that is not finite or whose shape does not fit the others."""
    sizes: dict[str, tuple[int, str]] = {}
    axes = {
        "q": "TBGK",
        "k": "TBGK",
        "v": "TBHV",
        "log_decay": "TBH",
        "beta": "TBH",
        "initial": "BHVK",
        "rates": "HVK",
    }
    for name in sorted(
        arrays, key=lambda name: (list(axes).index(name) if name in axes else len(axes), name)
    ):
        array = arrays[name]
        if array.dtype.kind not in "fiu":
            raise InputError("stream file", source, f"real numbers, but {name} is {array.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError("stream file", source, f"finite numbers, but {name} holds NaN or Inf")
        letters = axes.get(name, "")
        if (
            name == "log_decay" and array.ndim == 4
        ):  # one a key channel (kimi_delta) or a value channel (mamba1)
            letters += "K" if array.shape[-1] == sizes.get("K", (0, ""))[0] else "V"
        if letters and array.ndim != len(letters):
            raise InputError(
                "stream file", source, f"{name} of shape ({', '.join(letters)}), not {array.shape}"
            )
        for letter, size in zip(letters, array.shape, strict=False):
            known, owner = sizes.setdefault(letter, (size, name))
            if known != size:
                raise InputError(
                    "stream file", source, f"{name} {array.shape} to agree with {owner}: {letter} is {known}"
                )
    heads, groups = sizes.get("H", (0, ""))[0], sizes.get("G", (1, ""))[0]
    if groups == 0 or heads % groups:
        raise InputError(
            "stream file", source, f"value heads ({heads}) that are a multiple of the key heads ({groups})"
        )
