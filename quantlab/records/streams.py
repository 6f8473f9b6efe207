"""Stream files: the inputs of a decode state as safetensors, checked when they are read."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quantlab.errors import InputError
from quantlab.records.record import canonical_json, decode
from quantlab.records.writing import write_atomic

STREAM_SCHEMA_VERSION = 1


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
