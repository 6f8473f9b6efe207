"""Where a run takes its tokens from, block by block, so that a long stream never has to be in memory."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantlab.drift.streams import Stream, check_memory, stream_of_arrays
from quantlab.drift.synthetic import CHUNK, BlockMaker, make_recipe
from quantlab.errors import InputError

BLOCK = 64
"""Steps of a block."""


class StreamSource(ABC):
    """The decode inputs of one layer, read once from the first step to the last.

    family, steps, batch, heads, key_heads, initial, rates, meta: as of a ``Stream``.  Where blocks begin and end
    changes no value and no hash.
    """

    family: str
    steps: int
    key_heads: int
    initial: Tensor
    rates: Tensor | None
    meta: Mapping[str, Any]

    @property
    def batch(self) -> int:
        return self.initial.shape[0]

    @property
    def heads(self) -> int:
        return self.initial.shape[1]

    @abstractmethod
    def blocks(self, length: int = BLOCK) -> Iterator[Stream]:
        """Consecutive parts of at most ``length`` steps, each with the stream's own ``initial`` and ``rates``."""

    @property
    @abstractmethod
    def hash(self) -> str:
        """16 hex digits that name the inputs; of a stream made in blocks only known once all were read."""


class WholeSource(StreamSource):
    """A stream that is in memory."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.family, self.steps, self.key_heads = stream.family, stream.steps, stream.key_heads
        self.initial, self.rates, self.meta = stream.initial, stream.rates, stream.meta

    def blocks(self, length: int = BLOCK) -> Iterator[Stream]:
        for first in range(0, self.steps, length):
            yield _part(self.stream, first, first + length)

    @property
    def hash(self) -> str:
        return self.stream.hash


class SyntheticSource(StreamSource):
    """A made stream of any length: ``block_stream`` makes one.

    Its hash is over family, initial state and the digests of all chunks.
    """

    def __init__(self, family: str, **options: Any):
        self.recipe = make_recipe(family, **options)
        self.family, self.steps, self.key_heads = family, self.recipe.steps, self.recipe.key_heads
        r = self.recipe
        state = r.sequences * r.heads * r.value_dim * r.key_dim
        token = r.sequences * (2 * r.key_heads * r.key_dim + r.heads * (2 * r.value_dim + r.key_dim))
        sizes = {"heads": r.heads, "sequences": r.sequences, "key_heads": r.key_heads}
        check_memory("stream", sizes, state + CHUNK * token)
        maker = BlockMaker(self.recipe)
        self.initial, self.rates = maker.initial, maker.rates
        self.meta = self.recipe.meta | {"generator": "blocks"}
        self._hash: str | None = None

    def blocks(self, length: int = BLOCK) -> Iterator[Stream]:
        maker, digest = BlockMaker(self.recipe), hashlib.sha256(f"blocks {self.family}".encode())
        fixed = {"initial": self.initial} | ({} if self.rates is None else {"rates": self.rates})
        for name, value in fixed.items():
            _update(digest, name, value)
        waiting: Stream | None = None
        for first in range(0, self.steps, CHUNK):
            arrays = {name: value[: self.steps - first] for name, value in maker.chunk().items()}
            for name in sorted(arrays):
                _update(digest, name, arrays[name])
            made = Stream(family=self.family, meta=self.meta, **arrays, **fixed)
            waiting = made if waiting is None else _joined(waiting, made)
            last = first + CHUNK >= self.steps
            whole = waiting.steps if last else waiting.steps // length * length
            for start in range(0, whole, length):
                yield _part(waiting, start, min(start + length, whole))
            waiting = _part(waiting, whole, waiting.steps) if whole < waiting.steps else None
        self._hash = digest.hexdigest()[:16]

    @property
    def hash(self) -> str:
        if self._hash is None:
            for _ in self.blocks(CHUNK):
                pass
        assert self._hash is not None
        return self._hash


class FileSource(StreamSource):
    """A stream file, read in slices; ``hash`` is that of the whole stream.

    Raises InputError like ``load_stream``: the file's content hash is checked as a file is opened.
    """

    def __init__(self, path: str | Path):
        from quantlab.records import open_stream_file

        self.path = Path(path)
        self._slices, shapes, meta = open_stream_file(self.path)
        self.family = meta.get("family", "")
        for name in ("q", "k", "v", "log_decay", "initial"):
            if name not in shapes:
                expected = f"arrays q, k, v, log_decay, initial [beta, rates]; got {sorted(shapes)}"
                raise InputError("stream", str(path), expected)
        first = self._read(0, 1, meta)
        self.steps, self.key_heads, self.meta = shapes["v"][0], first.key_heads, meta
        self.initial, self.rates = first.initial, first.rates
        for name in ("q", "k", "log_decay", "beta"):
            if name in shapes and shapes[name][0] != self.steps:
                raise InputError(f"stream {name}", shapes[name], f"{self.steps} steps, as v has")
        self._shapes = shapes

    def __reduce__(self):
        return FileSource, (self.path,)

    def _read(self, first: int, stop: int, meta: Mapping[str, Any]) -> Stream:
        arrays = {
            name: get(slice(None)) if name in ("initial", "rates") else get(slice(first, stop))
            for name, get in self._slices.items()
        }
        return stream_of_arrays(arrays, meta, str(self.path))

    def blocks(self, length: int = BLOCK) -> Iterator[Stream]:
        for first in range(0, self.steps, length):
            yield self._read(first, min(first + length, self.steps), self.meta)

    @property
    def hash(self) -> str:
        digest = hashlib.sha256(self.family.encode())
        named = self._read(0, 1, self.meta).tensors()
        for name in named:
            digest.update(f"{name}float32{tuple(self._shapes[name])}".encode())
            if name in ("initial", "rates"):
                digest.update(named[name].contiguous().numpy().tobytes())
                continue
            for first in range(0, self.steps, CHUNK):
                part = self._slices[name](slice(first, first + CHUNK))
                digest.update(part.astype("float32").tobytes())
        return digest.hexdigest()[:16]


def block_stream(family: str, **options: Any) -> SyntheticSource:
    """A made stream that is drawn as it is read: the arguments and presets of ``synthetic_stream``, other values.

    Its values do not depend on the number of steps or on the length of blocks; see ``BlockMaker``.
    """
    return SyntheticSource(family, **options)


def open_source(description: Mapping[str, Any]) -> StreamSource:
    """What a description names: {"file": path} or arguments of ``block_stream`` with generator "blocks"."""
    if "file" in description:
        return FileSource(description["file"])
    options = {key: value for key, value in description.items() if key != "generator"}
    return block_stream(**options)


def as_source(stream: "Stream | StreamSource") -> StreamSource:
    """A stream in memory as a source; a source as it is."""
    return WholeSource(stream) if isinstance(stream, Stream) else stream


def _per_token(stream: Stream) -> dict[str, Tensor]:
    return {name: value for name, value in stream.tensors().items() if name not in ("initial", "rates")}


def _part(stream: Stream, first: int, stop: int) -> Stream:
    arrays = {name: value[first:stop] for name, value in _per_token(stream).items()}
    return _with(stream, arrays)


def _joined(one: Stream, other: Stream) -> Stream:
    later = _per_token(other)
    return _with(one, {name: torch.cat([value, later[name]]) for name, value in _per_token(one).items()})


def _with(stream: Stream, arrays: dict[str, Tensor]) -> Stream:
    return Stream(
        family=stream.family, meta=stream.meta, initial=stream.initial, rates=stream.rates, **arrays
    )


def _update(digest: Any, name: str, value: Tensor) -> None:
    array = value.contiguous().numpy()
    digest.update(f"{name}{array.dtype}{array.shape}".encode())
    digest.update(array.tobytes())
