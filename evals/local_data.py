"""A table of questions from anywhere on this machine: a file, a folder, or the cache of an earlier download.

The network is touched in one case only, data "hub".  No error quotes a cell: rows are named by number.
"""

import csv
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from quantlab.errors import InputError

HUB = "hub"
"""Given as data: download from the hub, with the user's token.  A folder of that name is "./hub"."""
Rows = list[dict[str, Any]]

_SPLITS = ("test", "train")  # of a data set in several: the first of these that it has
_CARD = "README.md"
_LARGE_FILE = b"version https://git-lfs"


class _NoRows(ValueError):
    """JSON that is no list of objects."""


@dataclass(frozen=True)
class Source:
    """Which table is meant where a place holds several, and where it is published."""

    title: str
    """In errors: "GPQA"."""
    configuration: str | None = None
    """Its name in a clone, a cache or on the hub."""
    repository: str | None = None
    """OWNER/NAME on the hub; None: local data only."""

    @property
    def expected(self) -> str:
        local = (
            f"{self.title} in a CSV, JSON, JSONL or Parquet file, a save_to_disk folder "
            "or a clone of its repository"
        )
        if self.repository is None:
            return local
        return (
            f"{local}. To get it: accept the terms of {self.repository} on the hub, log in (`hf auth login`, in older "
            f"releases `huggingface-cli login`, or HF_TOKEN), then `--data {HUB}` downloads it"
        )


def read_table(data: str | Path | None, source: Source) -> Rows:
    """The rows of ``source`` at ``data``, as they are stored.

    data: a .csv, .json, .jsonl or .parquet file; a folder that ``save_to_disk`` wrote, a clone of the hub's
    repository or a cache of the ``datasets`` library; "hub"; None: what an earlier download left in the caches.
    Raises InputError, argument "data", with the way to get the data where there is none.
    """
    if data is None:
        return _from_caches(source)
    if str(data) == HUB:
        return _from_hub(source)
    path = Path(data).expanduser()
    if path.is_file():
        return _from_file(path, source)
    if not path.is_dir():
        raise InputError("data", str(data), source.expected)
    for read in (_from_saved, _from_cached, _from_clone):
        if (rows := read(path, source)) is not None:
            return rows
    raise InputError("data", str(data), source.expected)


def find_columns(rows: Rows, wanted: Sequence[Sequence[str]], data: Any, title: str) -> list[str]:
    """The name in ``rows`` of each wanted column, whose possible names are given; the case does not matter.

    Raises InputError, argument "data": no rows, or columns missing (all are listed).
    """
    if not rows:
        raise InputError("data", _shown(data), "at least one row")
    there = {str(name).strip().lower(): name for name in rows[0] if name is not None}
    found = [next((there[n.lower()] for n in names if n.lower() in there), None) for names in wanted]
    missing = [" or ".join(names) for names, name in zip(wanted, found, strict=True) if name is None]
    if missing:
        raise InputError("data", _shown(data), f"{title}'s columns; missing: {', '.join(missing)}")
    return [name for name in found if name is not None]


def refuse_row(data: Any, row: int, problem: str) -> NoReturn:
    """InputError for a row, counted from 1; ``problem`` must not quote it."""
    raise InputError("data", _shown(data), f"rows that can be asked; row {row} {problem}")


def cell_text(value: Any) -> str:
    """A cell as text: "None", "nan" and "4.0" stay what they are; "" for nothing (None and the NaN of a table), and
    for what is no text, such as a list or a table, whose spelling in Python nobody means to ask.
    """
    if not isinstance(value, str | int | float | Decimal) or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value).strip()


def check_unicode(texts: Sequence[str], data: Any, row: int) -> None:
    """JSON can spell halves of characters, which no tokenizer and no hash takes; a NUL is a damaged file's."""
    text = "".join(texts)
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse_row(data, row, "is not valid Unicode")
    if "\0" in text:
        refuse_row(data, row, "holds a NUL character")


def _shown(data: Any) -> str | None:
    return None if data is None else str(data)


def _from_file(path: Path, source: Source) -> Rows:
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise InputError("data", str(path), source.expected)
    try:
        with path.open("rb") as file:
            if file.read(len(_LARGE_FILE)) == _LARGE_FILE:
                raise InputError("data", str(path), "the file itself, not a pointer to it (`git lfs pull`)")
        return read(path)
    except InputError:
        raise
    except _NoRows:
        raise InputError("data", str(path), f"{source.title} as JSON objects, one a row") from None
    except UnicodeDecodeError as error:
        problem = f"text in UTF-8; byte {error.start} is not"
        raise InputError("data", str(path), problem) from error
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        # The library's own message may quote what it read.
        problem = f"{source.expected} ({type(error).__name__} on reading)"
        raise InputError("data", str(path), problem) from None


def _read_csv(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        names = reader.fieldnames or []
        # By number: without a header these are the cells of the first row.
        if repeated := [str(n) for n, name in enumerate(names, 1) if names.count(name) > 1]:
            raise InputError(
                "data", str(path), f"one column of each name; columns {', '.join(repeated)} share one"
            )
        return list(reader)


def _read_json(path: Path) -> Rows:
    return _objects(json.loads(path.read_text(encoding="utf-8-sig")))


def _read_jsonl(path: Path) -> Rows:
    # Not splitlines: JSON may hold other line separators as they are.
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return _objects([json.loads(line) for line in lines if line.strip()])


def _objects(value: Any) -> Rows:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise _NoRows
    return value


def _read_parquet(path: Path) -> Rows:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _from_saved(path: Path, source: Source) -> Rows | None:
    """What ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote."""
    if not (path / "dataset_dict.json").is_file() and not (path / "state.json").is_file():
        return None
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a broken file raises inside the library
        problem = f"a folder that save_to_disk wrote ({type(error).__name__} on reading)"
        raise InputError("data", str(path), problem) from None
    if not isinstance(saved, datasets.DatasetDict):
        return saved.to_list()
    names = [source.configuration, *_SPLITS] if len(saved) > 1 else list(saved)
    chosen = next((name for name in names if name in saved), None)
    if chosen is None:
        raise InputError("data", str(path), f"one of its parts {', '.join(map(str, saved))} as a folder")
    return saved[chosen].to_list()


def _from_cached(path: Path, source: Source) -> Rows | None:
    """The cache of the ``datasets`` library: .../OWNER___NAME/CONFIGURATION/VERSION/HASH/NAME-SPLIT.arrow."""
    owner_name = (source.repository or "").replace("/", "___")
    places = [path]
    if source.configuration is not None:
        places += [path / source.configuration]
        if owner_name:
            places += [path / folder / owner_name / source.configuration for folder in (".", "datasets")]
    found = []
    for place in places:
        folders = [place, *place.glob("*/*")] if place.is_dir() else []
        found += [f for f in folders if (f / "dataset_info.json").is_file() and list(f.glob("*.arrow"))]
    if not found:
        return None
    if len(found) > 1:
        raise InputError("data", str(path), f"one of the versions in it: {', '.join(f.name for f in found)}")
    import datasets

    files = sorted(found[0].glob("*.arrow"))
    for split in _SPLITS:
        parts = [f for f in files if f"-{split}." in f.name or f"-{split}-0" in f.name]
        if parts:
            return [row for part in parts for row in datasets.Dataset.from_file(str(part)).to_list()]
    return None


def _from_clone(path: Path, source: Source) -> Rows | None:
    """A repository as the hub stores it: a card whose ``configs`` name the files; or a file of the table's name, or
    the only one where the table has none.
    """
    patterns = _card_files(path / _CARD, source) if (path / _CARD).is_file() else None
    named = patterns is not None or source.configuration is not None
    if patterns is None:
        patterns = [f"{source.configuration or '*'}{suffix}" for suffix in _READERS]
    if any(pattern.startswith("/") or ".." in Path(pattern).parts for pattern in patterns):
        return None  # a card of somebody else's does not choose among this user's files
    files = [file for pattern in patterns for file in sorted(path.glob(pattern))]
    if not files or (not named and len(files) > 1):
        return None
    return [row for file in files for row in _from_file(file, source)]


def _card_files(card: Path, source: Source) -> list[str] | None:
    """The patterns of the table's files in a card; None where the card names none."""
    from huggingface_hub.repocard import metadata_load

    try:
        table = metadata_load(card) or {}
        configs = {
            str(c.get("config_name", "default")): c.get("data_files") for c in table.get("configs") or []
        }
    except Exception as error:  # whatever a card that is no card raises inside the library
        raise InputError("data", str(card), f"a data set's card ({type(error).__name__})") from None
    if not configs:
        return None
    name = (
        source.configuration if source.configuration is not None or len(configs) > 1 else next(iter(configs))
    )
    name = "default" if name is None else name
    if name not in configs:
        raise InputError("data", str(card), f"a configuration {name}; it has {', '.join(configs)}")
    files = configs[name]
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    files = files if isinstance(files, list) else [files]
    by_split: dict[str, list[str]] = {}
    for entry in files:
        split, paths = (
            (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        )
        by_split.setdefault(str(split), []).extend(paths if isinstance(paths, list) else [str(paths)])
    chosen = next((split for split in (*_SPLITS, *by_split) if split in by_split), None)
    return None if chosen is None else by_split[chosen]


def _from_caches(source: Source) -> Rows:
    """What a download on this machine has left; never asks the network."""
    if source.repository is not None:
        home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        tables = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
        if tables.is_dir() and (rows := _from_cached(tables, source)) is not None:
            return rows
        files = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        repository = files / f"datasets--{source.repository.replace('/', '--')}"
        reference = repository / "refs" / "main"
        if reference.is_file():
            snapshot = repository / "snapshots" / reference.read_text().strip()
            if snapshot.is_dir() and (rows := _from_clone(snapshot, source)) is not None:
                return rows
    raise InputError("data", None, source.expected)


def _from_hub(source: Source) -> Rows:
    if source.repository is None:
        raise InputError("data", HUB, source.expected)
    from huggingface_hub import errors, hf_hub_download

    def get(name: str) -> Path:
        return Path(hf_hub_download(str(source.repository), name, repo_type="dataset"))

    try:
        card = get(_CARD)
        names = _card_files(card, source) or [f"{source.configuration}.csv"]
        return [row for name in names for row in _from_file(get(name), source)]
    except errors.GatedRepoError as error:
        reason = "the hub asks for its terms to be accepted, and for a token of who did"
        raise InputError("data", HUB, f"{source.expected} ({reason})") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise InputError("data", HUB, f"{source.expected} (the hub cannot be reached)") from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise InputError("data", HUB, f"{source.expected} (the hub answers {status})") from error
    except OSError as error:
        raise InputError("data", HUB, f"{source.expected} ({type(error).__name__})") from error
